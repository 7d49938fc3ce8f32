"""
`queue.drain()`: the real driver in the caller's thread, also in a transaction that the test never commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from sqlqueue import (
    Discard,
    Fail,
    Fixed,
    Job,
    JobContext,
    LockTimeout,
    NotConfigured,
    NotTransactional,
    OptionError,
    Queue,
    Reason,
    Release,
)
from tests.producers import ORDERS, Order, job_ids, make_orders, order_ids, use_begin_recipe
from tests.rows import can_lock_rows, failed_in, holding, jobs_in, keys_in, lock_of, put
from tests.servers import Database
from tests.test_push_async import ASYNC_DRIVERS


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def note(queue: Queue, seen: list[Any]) -> Job[[Any], None]:
    @queue.job(name="note")
    def note(what: Any) -> None:
        seen.append(what)

    return note


@pytest.fixture
def end(queue: Queue) -> Job[[str], None]:
    @queue.job(name="end", max_attempts=2, backoff=Fixed(60))
    def end(how: str) -> None:
        if how != "return":
            raise {"raise": ValueError("on purpose"), "release": Release(60), "fail": Fail("for good"), "discard": Discard()}[how]

    return end


@pytest.fixture
def savepoints(engine: Engine) -> Iterator[Engine]:
    """An engine on which a push may stand in a savepoint."""
    other = create_engine(engine.url)
    yield use_begin_recipe(other) if other.dialect.name == "sqlite" else other
    other.dispose()


def push(queue: Queue, *jobs: Any) -> None:
    with queue.begin() as session:
        queue.push_many(session, jobs)


def test_all_that_is_due_is_worked_in_order(queue: Queue, engine: Engine, note: Job[..., None], seen: list[Any]) -> None:
    with Session(engine) as session, session.begin():
        note.push(session, "first")
        note.push(session, "second")
        note.options(priority=1).push(session, "urgent")
        note.options(queue="another").push(session, "elsewhere")
        note.options(delay=60).push(session, "later")
    drained = queue.drain(engine)
    assert seen == ["elsewhere", "urgent", "first", "second"]
    assert drained.counts == {"done": 4}
    assert [(run.name, run.queue, run.attempt, run.arguments.what) for run in drained][:2] == [
        ("note", "another", 1, "elsewhere"),
        ("note", "default", 1, "urgent"),
    ]
    drained.assert_all_done()
    assert queue.size("default") == 1
    assert repr(queue.drain(engine)) == "<Drained: nothing was due>"


@pytest.mark.parametrize("place", ["nothing", "own engine", "another engine", "session", "connection"])
def test_every_outcome_is_written_by_the_real_driver(
    queue: Queue, engine: Engine, observer: Engine, end: Job[[str], None], place: str
) -> None:
    push(queue, *(end.bind(how) for how in ("return", "raise", "release", "fail", "discard")), end.options(max_attempts=1).bind("raise"))
    other = create_engine(engine.url)
    if place in ("session", "connection"):
        with Session(other) if place == "session" else other.connect() as target:
            drained = queue.drain(target)
            target.commit()
    else:
        drained = queue.drain({"nothing": None, "own engine": engine, "another engine": other}[place])
    other.dispose()
    assert [str(run.status) for run in drained] == ["done", "retrying", "released", "failed", "discarded", "failed"]
    assert [type(run.error) for run in drained] == [type(None), ValueError, type(None), Fail, type(None), ValueError]
    assert {job["payload"]: (job["attempts"], job["reserved_until"]) for job in jobs_in(observer, queue).values()} == {
        '{"how":"raise"}': (1, None),
        '{"how":"release"}': (0, None),
    }
    assert [(job["reason"], job["error_message"]) for job in failed_in(observer, queue).values()] == [
        ("failed_by_job", "for good"),
        ("exception", "on purpose"),
    ]
    with pytest.raises(AssertionError, match="not all jobs were done:\n  end\\(how='raise'\\), attempt 1: retrying") as raised:
        drained.assert_all_done()
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("kind", ["session", "connection"])
def test_nothing_of_a_drain_survives_the_rollback_of_the_test(
    queue: Queue, engine: Engine, observer: Engine, end: Job[[str], None], note: Job[..., None], seen: list[Any], kind: str
) -> None:
    with Session(engine) if kind == "session" else engine.connect() as target:
        queue.push_many(target, [note.bind(1), end.bind("raise"), end.bind("fail")])
        note.options(unique="once").push(target, 2)
        drained = queue.drain(target)
        assert drained.counts == {"done": 2, "retrying": 1, "failed": 1}
        assert seen == [1, 2]
        assert len(target.execute(sa.select(queue.tables.jobs.c.id)).all()) == 1
        assert note.options(unique="once").push(target, 3).created
        target.rollback()
    assert jobs_in(observer, queue) == failed_in(observer, queue) == {}
    assert keys_in(observer, queue) == {}


def test_jobs_that_were_committed_before_come_back_with_the_rollback_of_the_test(
    queue: Queue, engine: Engine, observer: Engine, note: Job[..., None], seen: list[Any]
) -> None:
    push(queue, note.bind(1))
    before = jobs_in(observer, queue)
    with engine.connect() as connection:
        assert queue.drain(connection).counts == {"done": 1}
        connection.rollback()
    assert jobs_in(observer, queue) == before
    assert seen == [1]


def test_a_transaction_that_has_only_read_is_drained_as_well(queue: Queue, engine: Engine, observer: Engine, note: Job[..., None]) -> None:
    push(queue, note.bind(1))
    with engine.connect() as connection:
        connection.execute(sa.select(1))
        assert queue.drain(connection).counts == {"done": 1}
        connection.rollback()
        assert len(job_ids(observer, queue)) == 1
        assert queue.drain(connection).counts == {"done": 1}
        connection.commit()
    assert job_ids(observer, queue) == []


def test_handlers_work_in_the_test_s_transaction_with_sessions_of_their_own(
    queue: Queue, savepoints: Engine, observer: Engine, seen: list[Any]
) -> None:
    make_orders(savepoints)

    @queue.job(name="order", max_attempts=1)
    def order(number: int) -> None:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.add(Order(id=number))
            session.flush()
            if number == 2:
                session.execute(ORDERS.insert().values(id=1))  # there is one: this spoils a transaction
            if number < 3:
                order.push(session, number + 1)
            session.commit()

    with savepoints.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.add(Order(id=1))
            order.push(session, 2)
            order.push(session, 3)
            session.commit()
        drained = queue.drain(connection)
        assert [(run.arguments.number, run.status) for run in drained] == [(2, "failed"), (3, "done")]
        assert set(connection.scalars(sa.select(ORDERS.c.id))) == {1, 3}
        connection.rollback()
    assert order_ids(observer) == []


def test_a_session_is_flushed_before_and_forgets_what_it_has_loaded(queue: Queue, savepoints: Engine, observer: Engine) -> None:
    make_orders(savepoints)

    @queue.job(name="stamp")
    def stamp(number: int) -> None:
        session.connection().execute(ORDERS.update().where(ORDERS.c.id == number).values(note="stamped"))

    with Session(savepoints) as session:
        order = Order(id=1)
        session.add(order)
        stamp.push(session, 1)
        queue.drain(session).assert_all_done()
        assert order.note == "stamped"


def test_a_handler_that_ends_the_test_s_transaction_is_named(queue: Queue, engine: Engine) -> None:
    @queue.job(name="meddle")
    def meddle() -> None:
        connection.commit()

    with engine.connect() as connection:
        meddle.push(connection)
        with pytest.raises(RuntimeError, match=r"has ended the transaction that its queue is drained in.*create_savepoint"):
            queue.drain(connection)


def test_jobs_that_push_jobs_are_worked_until_nothing_is_due(queue: Queue, engine: Engine, seen: list[Any]) -> None:
    @queue.job(name="count")
    def count(number: int) -> None:
        seen.append(number)
        if number:
            with Session(engine) as session, session.begin():
                count.push(session, number - 1)

    push(queue, count.bind(3))
    assert queue.drain(engine).counts == {"done": 4}
    assert seen == [3, 2, 1, 0]


def test_a_limit_ends_it(queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    push(queue, *(note.bind(number) for number in range(3)))
    assert queue.drain(limit=2).counts == {"done": 2}
    assert queue.drain(limit=2).counts == {"done": 1}
    for limit in (0, -1, 1.5, True):
        with pytest.raises(OptionError, match="limit: a whole number"):
            queue.drain(limit=limit)  # type: ignore[arg-type]


def test_without_a_limit_it_does_not_go_on_for_ever(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlqueue.testing import draining

    monkeypatch.setattr(draining, "ENDLESS", 5)

    @queue.job(name="again")
    def again() -> None:
        raise Release(0)

    push(queue, again.bind())
    with pytest.raises(RuntimeError, match="after 5 deliveries there is still a job due"):
        queue.drain()
    assert queue.drain(limit=7).counts == {"released": 7}


def test_queues_are_worked_in_the_order_in_which_they_are_named(queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    push(queue, *(note.options(queue=name).bind(name) for name in ("a", "b", "c", "a")))
    queue.drain(queues=["c", "a"])
    assert seen == ["c", "a", "a"]
    queue.drain(queues="b")
    assert seen == ["c", "a", "a", "b"]
    with pytest.raises(OptionError, match="named twice"):
        queue.drain(queues=["a", "a"])


def test_jobs_that_must_not_run_are_failed_by_their_claim(queue: Queue, engine: Engine, observer: Engine, note: Job[..., None]) -> None:
    put(observer, queue, name="note", payload="[]")
    put(observer, queue, name="note", attempts=5)
    put(observer, queue, name="note", payload='{"what": 1}')
    drained = queue.drain(engine)
    assert [(run.status, run.reason) for run in drained] == [
        ("failed", Reason.DAMAGED),
        ("failed", Reason.MAX_ATTEMPTS_EXCEEDED),
        ("done", None),
    ]
    assert len(failed_in(observer, queue)) == 2


def test_a_handler_has_its_context_and_can_renew(queue: Queue, engine: Engine, observer: Engine, seen: list[Any]) -> None:
    @queue.job(name="renew", headers={"tenant": "a"})
    def renew(context: JobContext) -> None:
        [before] = jobs_in(observer, queue).values()
        assert context.renew()
        [after] = jobs_in(observer, queue).values()
        seen.append((context.attempt, dict(context.headers), after["reserved_until"] >= before["reserved_until"]))

    push(queue, renew.bind())
    queue.drain(engine, lease=120).assert_all_done()
    assert seen == [(1, {"tenant": "a"}, True)]


def test_a_row_that_somebody_has_locked_is_left_to_them(queue: Queue, engine: Engine, observer: Engine, note: Job[..., None]) -> None:
    if not can_lock_rows(engine):
        pytest.skip("rows cannot be locked")
    jobs = queue.tables.jobs
    [first] = put(observer, queue, name="note", payload='{"what": 1}')
    put(observer, queue, name="note", payload='{"what": 2}')
    with holding(engine, lock_of(jobs, jobs.c.id == first)):
        drained = queue.drain()
    assert [run.arguments.what for run in drained] == [2]


def test_a_settlement_that_somebody_prevents_is_an_error(queue: Queue, engine: Engine, observer: Engine) -> None:
    if not can_lock_rows(engine):
        pytest.skip("rows cannot be locked")
    jobs = queue.tables.jobs
    stranger: list[Connection] = []

    @queue.job(name="hold")
    def hold(context: JobContext) -> None:
        stranger.append(engine.connect())
        stranger[0].execute(lock_of(jobs, jobs.c.id == context.id))

    push(queue, hold.bind())
    with pytest.raises(LockTimeout, match="cannot be settled: another transaction holds its row"):
        queue.drain()
    stranger[0].close()


async def test_an_asynchronous_session_connection_or_engine_is_drained(
    database: Database, queue: Queue, observer: Engine, note: Job[..., None], end: Job[[str], None], seen: list[Any]
) -> None:
    for driver in ASYNC_DRIVERS[database.name]:
        engine = create_async_engine(sa.make_url(database.url).set(drivername=driver))
        async with AsyncSession(engine) as session:
            await queue.push_many_async(session, [note.bind("session"), end.bind("fail")])
            assert (await queue.drain_async(session)).counts == {"done": 1, "failed": 1}
            await session.rollback()
        async with engine.connect() as connection:
            await note.push_async(connection, "connection")
            assert (await queue.drain_async(connection, limit=1)).counts == {"done": 1}
            await connection.commit()
        push(queue, note.bind("engine"), end.bind("fail"))
        assert (await queue.drain_async(engine)).counts == {"done": 1, "failed": 1}
        await engine.dispose()
        assert seen == ["session", "connection", "engine"]
        assert jobs_in(observer, queue) == {}
        seen.clear()


async def test_the_wrong_kind_is_told_to_call_the_twin(database: Database, queue: Queue, engine: Engine) -> None:
    asynchronous = create_async_engine(sa.make_url(database.url).set(drivername=ASYNC_DRIVERS[database.name][0]))
    async with AsyncSession(asynchronous) as session:
        with pytest.raises(TypeError, match="await drain_async"):
            queue.drain(session)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="drain takes a Session"):
        queue.drain("sqlite://")  # type: ignore[arg-type]
    with Session(engine) as session, pytest.raises(TypeError, match="call drain"):
        await queue.drain_async(session)  # type: ignore[arg-type]


def test_a_connection_in_autocommit_is_refused(queue: Queue, engine: Engine) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection, pytest.raises(NotTransactional):
        queue.drain(connection)
    with pytest.raises(NotTransactional):
        queue.drain(autocommit)


def test_a_queue_without_a_database_needs_to_be_told_where() -> None:
    with pytest.raises(NotConfigured):
        Queue().drain()


@pytest.mark.parametrize("told", [False, True])
def test_a_database_in_memory_is_drained_on_its_own_engine(told: bool) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    queue = Queue(engine)
    queue.metadata.create_all(engine)
    seen: list[int] = []

    @queue.job(name="note")
    def note(number: int) -> None:
        seen.append(number)

    with queue.begin() as session:
        note.push(session, 1)
    drain: Callable[[], Any] = (lambda: queue.drain(engine)) if told else queue.drain
    assert drain().counts == {"done": 1}
    assert seen == [1]
    engine.dispose()
