"""
What listeners hear, in which order, and that nothing comes of what they do.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import sqlqueue
from sqlqueue import Discard, Fail, Fixed, Queue, Reason, RegistrationError, Release, StaleDelivery, Worker, _events, events
from sqlqueue._driver.settle import Release as ReleaseRow
from sqlqueue._executor import Ended, Status
from sqlqueue._failure import Failure
from sqlqueue._job import Delivery
from sqlqueue._queue import commits
from sqlqueue._queue.listeners import Listeners
from sqlqueue._worker.telling import tell_attempted
from sqlqueue.events import (
    Event,
    FinalEvent,
    JobAttempted,
    JobCommitted,
    JobDiscarded,
    JobEvent,
    JobFailed,
    JobProcessed,
    JobProcessing,
    JobPushed,
    JobPushing,
    JobReleased,
    JobRetrying,
    JobSettlementLost,
    JobTimedOut,
    WorkerEvent,
    WorkerInterrupted,
    WorkerLooping,
    WorkerStarting,
    WorkerStopping,
)
from sqlqueue.testing import worker_dies
from tests.producers import job_ids
from tests.rows import put
from tests.servers import Database, Server
from tests.test_push_async import ASYNC_DRIVERS
from tests.workers import PATIENCE, Gate, change, eventually, expire, failures, jobs, make_due, push, work_off, working


class Heard:
    """Notes all events that it hears of."""

    def __init__(self, queue: Queue, *kinds: type[Event]) -> None:
        self.all: list[Any] = []
        queue.on(*kinds or (JobEvent,))(self.all.append)

    @property
    def names(self) -> list[str]:
        return [type(one).__name__ for one in self.all]

    def of(self, kind: type[Event]) -> list[Any]:
        return [one for one in self.all if isinstance(one, kind)]

    def clear(self) -> list[Any]:
        heard, self.all[:] = self.all[:], []
        return heard


def raises() -> None:
    raise ValueError("as always")


# --- listening


def test_the_module_exports_all_events() -> None:
    assert events.__all__ == _events.__all__ == sorted(_events.__all__)
    for name in events.__all__:
        assert getattr(events, name) is getattr(_events, name)
        assert name in (events.__doc__ or "")
        assert name in (_events.__doc__ or "")
    assert sqlqueue.events is events


def test_events_are_frozen_and_hide_headers(queue: Queue) -> None:
    one = JobPushing(name="a", queue="b", headers={"tenant": "s3cret"})
    assert repr(one) == "JobPushing(name='a', queue='b')"
    assert hash(one)
    with pytest.raises(AttributeError):
        one.name = "c"  # type: ignore[misc]


def test_a_listener_hears_what_it_asked_for_once_until_it_does_not_want_to_any_more() -> None:
    queue = Queue()
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)

    assert queue.on(JobPushing, JobPushed)(listen) is listen
    queue.on(JobPushing)(listen)
    pushing, pushed = JobPushing(name="a", queue="b"), JobPushed(name="a", queue="b", id=1)
    for one in (pushing, pushed, JobCommitted(name="a", queue="b", id=1)):
        queue.listeners.tell(one)
    assert heard == [pushing, pushed]
    queue.off(listen)
    queue.off(listen)
    queue.listeners.tell(pushing)
    assert heard == [pushing, pushed]
    assert queue.listeners.kinds == {}


def test_a_base_class_stands_for_all_events_below_it() -> None:
    queue = Queue()
    queue.on(WorkerEvent)(print)
    assert set(queue.listeners.kinds) == {WorkerStarting, WorkerLooping, WorkerStopping, WorkerInterrupted}
    queue.on(Event)(repr)
    assert len(queue.listeners.kinds) == 16


@pytest.mark.parametrize("kind", [int, "JobFailed", JobPushing(name="a", queue="b")])
def test_only_event_classes_can_be_listened_to(kind: Any) -> None:
    with pytest.raises(RegistrationError, match=r"event classes of sqlqueue\.events"):
        Queue().on(kind)(print)


def test_only_plain_functions_can_listen() -> None:
    async def later(event: Event) -> None: ...

    for listener in (later, 5):
        with pytest.raises(RegistrationError, match="a listener is a"):
            Queue().on(JobFailed)(listener)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="at least one"):
        Queue().on()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [ValueError("oh\nno"), SystemExit(3), KeyboardInterrupt(), Unspeakable()])
def test_what_a_listener_raises_is_logged_and_the_others_hear_it_too(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue()

    @queue.on(JobPushing)
    def broken(event: JobPushing) -> None:
        raise error

    heard = Heard(queue, JobPushing)
    queue.listeners.tell(JobPushing(name="a", queue="b"))
    assert heard.names == ["JobPushing"]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "broken, has raised, which changes nothing" in record.message
    assert type(error).__name__ in record.message
    assert "\n" not in record.message


def test_a_slow_listener_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    moments = iter([0.0, 3.2])
    monkeypatch.setattr("sqlqueue._queue.listeners.time.monotonic", lambda: next(moments))

    @queue.on(JobPushing)
    def dawdle(event: JobPushing) -> None: ...

    queue.listeners.tell(JobPushing(name="a", queue="b"))
    assert "dawdle took 3.2 s for a JobPushing" in caplog.text


# --- pushes


@pytest.fixture
def note(queue: Queue) -> sqlqueue.Job[[], None]:
    @queue.job(name="note")
    def note() -> None: ...

    return note


def test_a_push_is_told_before_it_is_written_when_it_is_and_when_it_is_committed(
    queue: Queue, note: sqlqueue.Job[[], None], engine: Engine, observer: Engine
) -> None:
    heard: list[tuple[Any, int, int]] = []
    with Session(engine) as session:

        @queue.on(JobEvent)
        def look(event: JobEvent) -> None:
            inside = 0 if isinstance(event, JobCommitted) else session.scalar(sa.select(sa.func.count()).select_from(queue.tables.jobs))
            heard.append((event, inside or 0, 1 if not isinstance(event, JobCommitted) else len(job_ids(observer, queue))))

        id = note.options(queue="mail", headers={"tenant": "a"}).push(session).id
        session.commit()
    about: dict[str, Any] = {"name": "note", "queue": "mail", "headers": {"tenant": "a"}}
    assert heard == [
        (JobPushing(**about), 0, 1),
        (JobPushed(**about, id=id), 1, 1),
        (JobCommitted(**about, id=id), 0, 1),
    ]


def test_each_of_many_is_told(queue: Queue, note: sqlqueue.Job[[], None], engine: Engine) -> None:
    heard = Heard(queue)
    with Session(engine) as session, session.begin():
        first = note.options(unique="one").push(session)
        heard.clear()
        bound = [note.options(unique="one").bind(), note.bind(), note.options(unique="two").bind(), note.bind()]
        assert queue.push_many(session, bound) == 3
    assert heard.names == ["JobPushing"] * 4 + ["JobPushed"] * 3 + ["JobCommitted"] * 4
    ids = [one.id for one in heard.of(JobPushed)]
    assert ids[1:] == [None, None]
    assert ids[0] > first.id


@pytest.mark.parametrize("options", [{}, {"on_conflict": "replace"}], ids=["keep", "replace"])
def test_a_push_that_finds_its_key_taken_is_not_told_as_written(
    queue: Queue, note: sqlqueue.Job[[], None], engine: Engine, options: Any
) -> None:
    with Session(engine) as session, session.begin():
        note.options(unique="one").push(session)
    heard = Heard(queue)
    with Session(engine) as session, session.begin():
        assert not note.options(unique="one", **options).push(session).created
    assert heard.names == ["JobPushing"]


def test_a_push_that_is_refused_is_not_told(queue: Queue, note: sqlqueue.Job[[], None]) -> None:
    heard = Heard(queue)
    with pytest.raises(TypeError):
        note.push(None)  # type: ignore[arg-type]
    assert heard.all == []


def test_what_is_rolled_back_is_not_told_as_committed(queue: Queue, note: sqlqueue.Job[[], None], engine: Engine) -> None:
    heard = Heard(queue, JobCommitted)
    with Session(engine) as session:
        note.push(session)
        session.rollback()
        note.options(queue="kept").push(session)
        session.commit()
    with Session(engine) as session:
        note.push(session)
    assert [one.queue for one in heard.all] == ["kept"]


@pytest.fixture
def savepoints(engine: Engine, server: Server) -> Engine:
    """An engine on which savepoints are part of a transaction: SQLite needs SQLAlchemy's recipe."""
    if server.url is None:

        @event.listens_for(engine, "connect")
        def connect(driver: Any, record: object) -> None:
            driver.isolation_level = None

        @event.listens_for(engine, "begin")
        def begin(connection: sa.Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        engine.dispose()
    return engine


@pytest.mark.parametrize("of_the", ["session", "connection"])
def test_what_is_rolled_back_to_a_savepoint_is_not_told_as_committed(
    queue: Queue, note: sqlqueue.Job[[], None], savepoints: Engine, of_the: str
) -> None:
    heard = Heard(queue, JobCommitted)
    with Session(savepoints) as session, session.begin():
        holder: Any = session if of_the == "session" else session.connection()
        with holder.begin_nested():
            note.options(queue="released").push(session)
        with holder.begin_nested() as outer:
            note.options(queue="gone").push(session)
            with holder.begin_nested():
                note.options(queue="gone-too").push(session)
            outer.rollback()
        assert heard.all == []
        note.options(queue="after").push(session)
    assert [one.queue for one in heard.all] == ["released", "after"]


def test_a_session_in_somebody_elses_transaction_commits_nothing(queue: Queue, note: sqlqueue.Job[[], None], engine: Engine) -> None:
    heard = Heard(queue, JobCommitted)
    with engine.connect() as connection, connection.begin():
        with Session(connection) as session, session.begin():
            note.push(session)
        note.push(connection)
    assert heard.all == []


def test_a_scoped_session_tells_its_commit(queue: Queue, note: sqlqueue.Job[[], None], engine: Engine) -> None:
    heard = Heard(queue, JobCommitted)
    session = scoped_session(sessionmaker(engine))
    note.push(session)
    session.commit()
    session.remove()
    assert heard.names == ["JobCommitted"]


async def test_an_async_session_tells_its_commit(queue: Queue, note: sqlqueue.Job[[], None], database: Database) -> None:
    heard = Heard(queue)
    engine = create_async_engine(sa.make_url(database.url).set(drivername=ASYNC_DRIVERS[database.name][0]))
    async with AsyncSession(engine) as session:
        await note.push_async(session)
        assert heard.names == ["JobPushing", "JobPushed"]
        await session.commit()
    await engine.dispose()
    assert heard.names == ["JobPushing", "JobPushed", "JobCommitted"]


def test_a_listener_that_raises_stops_neither_push_nor_commit(
    queue: Queue, note: sqlqueue.Job[[], None], engine: Engine, observer: Engine
) -> None:
    @queue.on(JobPushing, JobPushed, JobCommitted)
    def broken(event: Event) -> None:
        raise SystemExit(type(event).__name__)

    with Session(engine) as session, session.begin():
        note.push(session)
        queue.push_many(session, [note.bind()])
    assert len(job_ids(observer, queue)) == 2


def test_nothing_is_kept_of_sessions_whose_commit_is_told(queue: Queue, note: sqlqueue.Job[[], None], engine: Engine) -> None:
    def rounds() -> int:
        for end in ("commit", "rollback", "close") * 5:
            session = Session(engine)
            note.push(session)
            getattr(session, end)()
            session.close()
        del session
        gc.collect()
        return len(event.registry._key_to_collection)

    Heard(queue, JobCommitted)
    before = rounds()
    assert rounds() == before
    assert len(commits._open) == 0
    assert len(commits._by_connection) == 0


def test_where_nobody_listens_no_event_is_made_and_no_session_listened_to(
    queue: Queue, note: sqlqueue.Job[[], None], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **facts: object) -> None:
        raise AssertionError("an event was made")

    for name in events.__all__:
        monkeypatch.setattr(getattr(_events, name), "__init__", never)
    with Session(engine) as session, session.begin():
        note.push(session)
        queue.push_many(session, [note.bind()])
        assert not event.contains(session, "after_commit", commits._after_commit)
    assert work_off(queue).counts == {"done": 2}


# --- deliveries


def hand_over(queue: Queue, handler: Callable[[], Any], **options: Any) -> Heard:
    """Run a handler once, and what was heard of it."""
    queue.job(name="tested", **options)(handler)
    (id,) = push(queue, "tested")
    heard = Heard(queue)
    assert Worker(queue).run_once()
    assert {one.id for one in heard.all} == {id}
    return heard


def test_a_job_that_is_done(queue: Queue, observer: Engine) -> None:
    left: list[int] = []
    queue.on(FinalEvent)(lambda event: left.append(len(jobs(observer, queue))))
    queue.job(name="tested", headers={"tenant": "a"})(lambda: None)
    (id,) = push(queue, "tested")
    heard = Heard(queue)
    worker = Worker(queue)
    assert worker.run_once()
    about: dict[str, Any] = {"id": id, "name": "tested", "queue": "default", "headers": {"tenant": "a"}}
    about |= {"attempt": 1, "max_attempts": 5, "worker": worker.name}
    processing, attempted, processed = heard.all
    assert processing == JobProcessing(**about)
    assert attempted == JobAttempted(**about, seconds=attempted.seconds, status="done")
    assert 0 <= attempted.seconds < PATIENCE
    assert processed == JobProcessed(**about)
    assert left == [0]  # it was told after the row was gone


def outcome(value: Any) -> Callable[[], Any]:
    return lambda: value


@pytest.mark.parametrize(
    ("handler", "options", "status", "final"),
    [
        (outcome(None), {}, "done", JobProcessed),
        (outcome(Discard), {}, "discarded", JobDiscarded),
        (outcome(Release(7)), {}, "released", JobReleased),
        (outcome(Fail("no such customer")), {}, "failed", JobFailed),
        (raises, {"backoff": Fixed(9)}, "retrying", JobRetrying),
        (raises, {"max_attempts": 1}, "failed", JobFailed),
    ],
    ids=["done", "discarded", "released", "failed", "retrying", "exhausted"],
)
def test_each_delivery_has_one_final_event(
    queue: Queue, handler: Callable[[], Any], options: dict[str, Any], status: str, final: type[Event]
) -> None:
    heard = hand_over(queue, handler, **options)
    assert heard.names == ["JobProcessing", "JobAttempted", final.__name__]
    assert heard.all[1].status == status
    told = heard.all[2]
    if isinstance(told, JobFailed):
        by_job = handler is not raises
        assert (told.reason, told.message) == ((Reason.FAILED_BY_JOB, "no such customer") if by_job else (Reason.EXCEPTION, "as always"))
        assert told.traceback
    if isinstance(told, JobRetrying):
        assert (told.delay, told.error_class, told.message) == (9.0, "ValueError", "as always")
    if isinstance(told, JobReleased):
        assert told.delay == 7.0


@pytest.mark.parametrize("handler", [lambda session: None, lambda session: 1 / 0], ids=["done", "raises"])
def test_a_transactional_handler(queue: Queue, observer: Engine, handler: Callable[[Session], Any]) -> None:
    @queue.job(name="tested", max_attempts=1)
    def tested(session: Session) -> None:
        handler(session)

    push(queue, "tested")
    left: list[int] = []
    queue.on(FinalEvent)(lambda event: left.append(len(jobs(observer, queue))))
    heard = Heard(queue)
    Worker(queue).run_once()
    assert heard.names[:2] == ["JobProcessing", "JobAttempted"]
    assert heard.names[2:] == (["JobFailed"] if failures(observer, queue) else ["JobProcessed"])
    assert left == [0]


def test_a_handler_that_took_too_long(queue: Queue) -> None:
    heard = Heard(queue)
    delivery = Delivery(1, "a", "default", {}, 1, 5, "token", datetime.now(UTC), {})
    failure = Failure(Reason.TIMED_OUT, "JobTimeout", "too long")
    tell_attempted(queue.listeners, delivery, "worker", Ended(Status.RETRYING, ReleaseRow(1.0, "x"), failure=failure), 3.0)
    assert heard.names == ["JobTimedOut", "JobAttempted"]
    assert heard.of(JobTimedOut)[0].seconds == 3.0


def test_a_settlement_that_comes_too_late(queue: Queue, observer: Engine) -> None:
    def lose_it() -> None:
        change(observer, queue, {"reserved_token": "another"})

    heard = hand_over(queue, lose_it)
    assert heard.names == ["JobProcessing", "JobAttempted", "JobSettlementLost"]
    assert heard.of(JobSettlementLost)[0].status == "done"


def test_finals_are_told_in_the_order_of_settlement_and_before_the_worker_ends(queue: Queue) -> None:
    queue.job(name="tested")(lambda: None)
    ids = push(queue, "tested", 200)
    heard = Heard(queue, FinalEvent)
    threads: set[str] = set()
    queue.on(FinalEvent)(lambda event: threads.add(threading.current_thread().name))
    work_off(queue, concurrency=1)
    assert [one.id for one in heard.all] == ids
    assert threads == {"sqlqueue-settle"}


@pytest.mark.parametrize("handler", [lambda: None, raises], ids=["done", "raises"])
def test_a_listener_that_raises_changes_no_outcome(queue: Queue, observer: Engine, handler: Callable[[], Any]) -> None:
    queue.job(name="tested", max_attempts=2, backoff=Fixed(0))(handler)
    push(queue, "tested", 5)

    @queue.on(Event)
    def broken(event: Event) -> None:
        sys.exit(type(event).__name__)

    summary = work_off(queue)
    assert summary.counts == ({"done": 5} if handler is not raises else {"retrying": 5, "failed": 5})
    assert jobs(observer, queue) == []


def test_a_listener_may_not_change_what_a_handler_sees(queue: Queue) -> None:
    seen: list[dict[str, str]] = []

    @queue.job(name="tested", headers={"tenant": "a"})
    def tested(context: sqlqueue.JobContext) -> None:
        seen.append(dict(context.headers))

    @queue.on(JobProcessing)
    def meddle(event: JobProcessing) -> None:
        event.headers["tenant"] = "b"  # type: ignore[index]

    push(queue, "tested")
    Worker(queue).run_once()
    assert seen == [{"tenant": "a"}]


def test_a_listener_may_stop_the_worker_and_push(queue: Queue, observer: Engine) -> None:
    queue.job(name="tested", max_attempts=1)(raises)
    queue.job(name="alert", queue="alerts")(lambda: None)
    push(queue, "tested")
    worker = Worker(queue)

    @queue.on(JobFailed)
    def alert(event: JobFailed) -> None:
        push(queue, "alert")
        worker.stop()

    assert worker.run() == 0
    assert [row["name"] for row in jobs(observer, queue)] == ["alert"]


# --- what a claim fails


def test_a_job_whose_worker_died(queue: Queue, observer: Engine) -> None:
    queue.job(name="tested")(lambda: None)
    (id,) = push(queue, "tested", max_attempts=1, headers={"tenant": "a"})
    queue.claim()
    expire(observer, queue)
    heard = Heard(queue)
    worker = Worker(queue, stop_when_empty=True)
    worker.run()
    [told] = heard.all
    assert isinstance(told, JobFailed)
    assert (told.id, told.name, told.queue, told.headers) == (id, "tested", "default", {"tenant": "a"})
    assert (told.reason, told.attempt, told.max_attempts, told.worker) == (Reason.WORKER_LOST, 1, 1, worker.name)
    assert "died or lost its lease" in told.message
    assert len(failures(observer, queue)) == 1


@pytest.mark.parametrize("by", ["claim", "drain"])
def test_jobs_that_must_not_run(queue: Queue, observer: Engine, by: str) -> None:
    put(observer, queue, 1, payload="[torn")
    put(observer, queue, 1, headers="{torn")
    heard = Heard(queue)
    if by == "claim":
        assert queue.claim(limit=10) == []
    else:
        queue.drain()
    assert [(one.reason, one.headers) for one in heard.all] == [(Reason.DAMAGED, {})] * 2
    assert {row["id"] for row in failures(observer, queue)} == {one.id for one in heard.all}


# --- by hand, and in tests


def test_settling_by_hand_is_told(queue: Queue) -> None:
    queue.job(name="tested")(lambda: None)
    push(queue, "tested", 5)
    heard = Heard(queue)
    one, two, three, four, five = queue.claim(limit=5)
    queue.complete(one)
    queue.release(two, delay=60)
    queue.release(three, delay=60, error="broken")
    queue.fail(four, ValueError("no"))
    queue.complete(five)
    with pytest.raises(StaleDelivery):
        queue.fail(five, "too late")
    assert heard.names == ["JobProcessed", "JobReleased", "JobRetrying", "JobFailed", "JobProcessed", "JobSettlementLost"]
    assert heard.of(JobRetrying)[0].message == "broken"
    assert heard.of(JobFailed)[0].error_class == "ValueError"


def test_a_drain_tells_what_a_worker_would(queue: Queue, engine: Engine) -> None:
    queue.job(name="tested", max_attempts=1)(raises)
    heard = Heard(queue)
    with Session(engine) as session, session.begin():
        queue.push_named(session, "tested", {}, max_attempts=1)
    queue.drain()
    assert heard.names == ["JobPushing", "JobPushed", "JobCommitted", "JobProcessing", "JobAttempted", "JobFailed"]


def test_an_inline_run_is_told_and_its_push_is_not(queue: Queue, note: sqlqueue.Job[[], None], engine: Engine) -> None:
    heard = Heard(queue)
    with queue.inline(), Session(engine) as session, session.begin():
        note.push(session)
    assert heard.names == ["JobProcessing", "JobAttempted", "JobProcessed"]
    heard.clear()
    with queue.fake():
        note.push(None)  # type: ignore[arg-type]
    assert heard.all == []


def test_what_died_before_its_end_was_written_has_no_final_event(queue: Queue, note: sqlqueue.Job[[], None]) -> None:
    push(queue, "note")
    heard = Heard(queue)
    with worker_dies(queue, at="before_settle"):
        queue.drain()
    assert heard.names == ["JobProcessing", "JobAttempted"]


# --- workers


def test_a_worker_starts_looks_and_stops(queue: Queue, note: sqlqueue.Job[[], None]) -> None:
    push(queue, "note")
    heard = Heard(queue, WorkerEvent)
    worker = Worker(queue, ["high", "default"], concurrency=3, stop_when_empty=True)
    worker.run()
    assert heard.names[0] == "WorkerStarting"
    assert set(heard.names[1:-1]) == {"WorkerLooping"}
    assert heard.all[0] == WorkerStarting(worker=worker.name, queues=("high", "default"), concurrency=3)
    assert heard.all[1] == WorkerLooping(worker=worker.name, queues=("high", "default"), free=3)
    assert heard.all[-1] == WorkerStopping(worker=worker.name, queues=("high", "default"), reason="empty")
    heard.clear()
    Worker(queue).run_once()
    assert heard.names == ["WorkerStarting", "WorkerLooping", "WorkerStopping"]


def test_a_worker_that_never_reached_its_database_has_not_started() -> None:
    queue = Queue("postgresql://nobody@127.0.0.1:1/nowhere")
    heard = Heard(queue, WorkerEvent)
    with pytest.raises(sqlqueue.UnusableDatabase):
        Worker(queue, wait_for_database=0).run()
    assert heard.all == []


def test_listeners_of_a_worker_that_raise_do_not_stop_it(queue: Queue, note: sqlqueue.Job[[], None]) -> None:
    @queue.on(WorkerEvent)
    def broken(event: WorkerEvent) -> None:
        sys.exit(1)

    push(queue, "note")
    assert work_off(queue).counts == {"done": 1}


@pytest.mark.parametrize("hangs", [False, True], ids=["quick", "a listener hangs"])
def test_a_worker_that_is_interrupted(queue: Queue, observer: Engine, hangs: bool) -> None:
    gate = Gate()
    queue.job(name="tested")(gate.pass_through)
    (id,) = push(queue, "tested")
    heard = Heard(queue)
    of_worker = Heard(queue, WorkerInterrupted, WorkerStopping)
    if hangs:

        @queue.on(WorkerInterrupted, JobReleased, WorkerStopping)
        def hang(event: Event) -> None:
            gate._open.wait(PATIENCE)

    def signals() -> None:
        gate.await_arrivals()
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: worker._shift is None or worker._shift.reason, "the first signal")
        os.kill(os.getpid(), signal.SIGTERM)

    worker = Worker(queue)
    helper = threading.Thread(target=signals)
    helper.start()
    assert worker.run() == 1
    helper.join()
    assert {one["attempts"] for one in jobs(observer, queue)} == {0}
    gate.open()
    [interrupted] = of_worker.of(WorkerInterrupted)
    assert (interrupted.reason, interrupted.running) == ("second signal", (id,))
    assert [one.reason for one in of_worker.of(WorkerStopping)] == ["SIGTERM"]
    assert heard.of(FinalEvent) == heard.of(JobReleased)
    assert [one.delay for one in heard.of(JobReleased)] == [5.0]


def test_a_job_that_is_handed_back_before_it_started_is_not_told(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    queue.job(name="tested")(gate.pass_through)
    queue.job(name="quick")(lambda: None)
    push(queue, "quick", 50)
    (held,) = push(queue, "tested")
    push(queue, "quick", 20)
    heard = Heard(queue)
    with working(queue, concurrency=1) as worker:
        gate.await_arrivals()
        assert worker._shift is not None
        worker._shift.ask_to_stop("asked to")
        gate.open()
    ended = {one.id for one in heard.of(FinalEvent)}
    assert held in ended
    assert ended == {one.id for one in heard.of(JobProcessing)}
    assert len(ended) + len(jobs(observer, queue)) == 71


def test_listeners_belong_to_their_queue() -> None:
    assert Listeners().kinds == {}
    first, second = Queue(), Queue()
    first.on(JobFailed)(print)
    assert second.listeners.kinds == {}


def test_retries_are_told_each(queue: Queue, observer: Engine) -> None:
    queue.job(name="tested", max_attempts=3, backoff=Fixed(0))(raises)
    push(queue, "tested")
    heard = Heard(queue, FinalEvent)
    work_off(queue)
    make_due(observer, queue)
    assert [(type(one), one.attempt) for one in heard.all] == [(JobRetrying, 1), (JobRetrying, 2), (JobFailed, 3)]
