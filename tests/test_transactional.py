"""
Handlers that are handed a session: what they write and the job's completion are one transaction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from sqlqueue import Discard, Fail, Fixed, JobContext, Queue, Reason, RegistrationError, Release, Worker
from sqlqueue._driver.fenced import Fate, fate_of
from tests.rows import (
    Trap,
    apply_and_lose,
    at_commit,
    at_statement,
    can_lock_rows,
    conflicts,
    expire,
    holding,
    keys_in,
    lock_of,
    lose,
    moment_of,
    raising,
    raising_at_commit,
    statements_of,
)
from tests.servers import Database, Server
from tests.workers import PATIENCE, Gate, eventually, failures, jobs, make_due, push, work_off, working

if TYPE_CHECKING:
    from sqlalchemy.orm import Session as OnlyForTypeCheckers

LEASE = 1.0  # the shortest there is


class Base(DeclarativeBase):
    pass


class Effect(Base):
    """What a handler writes."""

    __tablename__ = "transactional_effects"
    __table_args__ = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}  # noqa: RUF012  # SQLAlchemy's
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(sa.String(50), unique=True)


EFFECTS: Any = Effect.__table__
WRITE = EFFECTS.insert()


class OwnSession(Session):
    pass


class Strange(BaseException):
    pass


@pytest.fixture(autouse=True)
def effects(request: pytest.FixtureRequest) -> Iterator[Callable[[], list[str]]]:
    """What was committed."""
    if "queue" not in request.fixturenames:
        yield list
        return
    observer: Engine = request.getfixturevalue("observer")
    request.getfixturevalue("queue")  # its fixture sets how long to wait for what another test has left
    Base.metadata.create_all(observer)
    with observer.connect() as connection:
        connection.execute(EFFECTS.delete())

    def committed() -> list[str]:
        with observer.connect() as connection:
            return list(connection.scalars(sa.select(EFFECTS.c.note).order_by(EFFECTS.c.note)))

    yield committed


def write(session: Session, note: str = "written") -> None:
    session.execute(WRITE, {"note": note})


def run(queue: Queue, handler: Callable[..., object], *, factory: Any = None, **options: Any) -> dict[str, int]:
    """Register a job, push it, and work the queue off, with sessions from this factory; how often it ended how."""
    decorate: Any = queue.job
    decorate(name="tested", **({"max_attempts": 2, "backoff": Fixed(3600)} | options))(handler)
    push(queue, "tested")
    if factory is not None:
        queue._session_factory = factory
    worker = Worker(queue, stop_when_empty=True, concurrency=1)
    assert worker.run() == 0
    assert worker.summary is not None
    return worker.summary.counts


def run_again(queue: Queue, observer: Engine) -> dict[str, int]:
    make_due(observer, queue)
    return work_off(queue, concurrency=1).counts


def steal(queue: Queue, observer: Engine) -> None:
    """As if the worker had been asleep for longer than its lease."""
    expire(observer, queue)
    assert len(queue.claim(lease=600)) == 1


def at(engine: Engine, level: str) -> Callable[[], Session]:
    return sessionmaker(engine.execution_options(isolation_level=level))


# --- together or not at all --------------------------------------------------------------------------------------------


def test_what_the_handler_writes_is_committed_with_the_job(queue: Queue, observer: Engine, effects: Any) -> None:
    seen: list[tuple[int, list[str], int]] = []

    @queue.job(name="write")
    def handler(context: JobContext, session: Session, number: int, *, note: str) -> None:
        write(session, f"{note} {number}")
        seen.append((context.attempt, effects(), len(jobs(observer, queue))))

    with queue.begin() as session:
        handler.push(session, 1, note="order")
    assert work_off(queue).counts == {"done": 1}
    assert seen == [(1, [], 1)]
    assert effects() == ["order 1"]
    assert jobs(observer, queue) == []


@pytest.mark.parametrize("error", [ValueError("no"), Strange("no"), SystemExit(3)])
def test_a_handler_that_raises_has_written_nothing(queue: Queue, observer: Engine, effects: Any, error: BaseException) -> None:
    queue.job(name="next")(lambda: None)

    def handler(context: JobContext, session: Session) -> None:
        write(session)
        queue.push_named(session, "next", {}, queue="later")
        if context.attempt == 1:
            raise error

    assert run(queue, handler) == {"retrying": 1}
    (job,) = jobs(observer, queue)
    assert (job["name"], job["attempts"], type(error).__name__ in job["last_error"]) == ("tested", 1, True)
    assert effects() == []
    assert run_again(queue, observer) == {"done": 1}
    assert effects() == ["written"]
    assert [job["name"] for job in jobs(observer, queue)] == ["next"]


def test_on_its_last_attempt_it_fails_and_has_written_nothing(queue: Queue, observer: Engine, effects: Any) -> None:
    def handler(session: Session) -> None:
        write(session)
        raise ValueError("no")

    assert run(queue, handler, max_attempts=1) == {"failed": 1}
    assert [row["reason"] for row in failures(observer, queue)] == [Reason.EXCEPTION]
    assert effects() == []


@pytest.mark.parametrize("how", ["raised", "returned"])
@pytest.mark.parametrize(
    ("outcome", "status", "left"), [(Release(3600), "released", 1), (Fail("no"), "failed", 0), (Discard(), "discarded", 0)]
)
def test_another_outcome_rolls_back_whether_raised_or_returned(
    queue: Queue, observer: Engine, effects: Any, how: str, outcome: Exception, status: str, left: int
) -> None:
    def handler(session: Session) -> Exception:
        write(session)
        if how == "raised":
            raise outcome
        return outcome

    assert run(queue, handler) == {status: 1}
    assert len(jobs(observer, queue)) == left
    assert len(failures(observer, queue)) == (status == "failed")
    assert effects() == []


def test_one_statement_beside_the_handler_s_own_where_nothing_gets_in_the_way(queue: Queue, engine: Engine, effects: Any) -> None:
    queue.job(name="warm")(write)
    queue.job(name="tested")(write)
    push(queue, "warm")
    work_off(queue)
    with engine.begin() as connection:
        connection.execute(EFFECTS.delete())
    push(queue, "tested")
    with statements_of(engine) as statements:
        assert work_off(queue, concurrency=1).counts == {"done": 1}
    words = [statement.split()[0] for statement, _ in statements]
    # On SQLite the write lock is taken first.
    assert words == ["INSERT", "DELETE"] if can_lock_rows(engine) else ["UPDATE", "INSERT", "DELETE"]


def test_run_once_and_limits_count_them(queue: Queue, effects: Any) -> None:
    numbers = iter(range(10))

    def handler(session: Session) -> None:
        write(session, str(next(numbers)))

    queue.job(name="tested")(handler)
    push(queue, "tested", 5)
    worker = Worker(queue)
    assert worker.run_once()
    assert worker.summary is not None
    assert worker.summary.counts == {"done": 1}
    assert work_off(queue, max_jobs=2).counts == {"done": 2}
    assert work_off(queue).counts == {"done": 2}
    assert len(effects()) == 5


# --- what the session is ------------------------------------------------------------------------------------------------


def test_it_comes_from_the_session_factory(queue: Queue, engine: Engine, effects: Any) -> None:
    queue.configure(engine, session_factory=sessionmaker(engine, info={"made": True}))
    made: list[Any] = []

    def handler(session: OwnSession) -> None:
        made.append(session.info)
        write(session)

    assert run(queue, handler) == {"done": 1}
    assert made == [{"made": True}]
    assert effects() == ["written"]


def test_without_a_factory_it_is_of_the_annotated_class(queue: Queue, effects: Any) -> None:
    made: list[Session] = []

    def handler(session: OwnSession) -> None:
        made.append(session)
        write(session)

    assert run(queue, handler) == {"done": 1}
    assert type(made[0]) is OwnSession
    assert not made[0].in_transaction()
    assert effects() == ["written"]


def test_a_queue_with_a_url_makes_an_engine_of_its_own(queue: Queue, database: Database, effects: Any) -> None:
    with_url = Queue(database.url)
    assert run(with_url, write_once) == {"done": 1}
    assert effects() == ["written"]
    with_url.new_session().get_bind().engine.dispose()
    with_url.consumer.close()


def write_once(session: Session) -> None:
    write(session)


def test_a_session_that_does_not_begin_by_itself(queue: Queue, engine: Engine, effects: Any) -> None:
    queue.configure(engine, session_factory=sessionmaker(engine, autobegin=False))
    assert run(queue, write_once) == {"done": 1}
    assert effects() == ["written"]


def test_what_was_left_in_a_scoped_session_is_not_committed(queue: Queue, engine: Engine, effects: Any) -> None:
    scoped = scoped_session(sessionmaker(engine))
    queue.configure(engine, session_factory=scoped)
    if can_lock_rows(engine):  # a file would stay locked
        queue.job(name="first")(lambda: write(scoped(), "left behind"))
        push(queue, "first")
    else:
        queue.job(name="first")(lambda: scoped().add(Effect(note="left behind")))
        push(queue, "first")
    assert run(queue, write_once) == {"done": 2}
    assert effects() == ["written"]


@pytest.mark.parametrize("made", [scoped_session, object])
def test_a_factory_may_make_a_scoped_session_and_nothing_that_is_no_session(
    queue: Queue, engine: Engine, observer: Engine, effects: Any, made: Any
) -> None:
    good = made is scoped_session
    counts = run(queue, write_once, factory=lambda: scoped_session(sessionmaker(engine)) if good else made())
    assert counts == {"done" if good else "retrying": 1}
    assert effects() == (["written"] if good else [])
    assert good or "TypeError: session_factory: it has to make a Session, not a object" in jobs(observer, queue)[0]["last_error"]


def test_the_annotation_decides(queue: Queue) -> None:
    def by_text(session: "Session", number: int) -> None: ...  # noqa: UP037

    def never_defined(session: OnlyForTypeCheckers, number: int) -> None: ...

    def second(context: "JobContext", it: "OwnSession", number: int) -> None: ...  # noqa: UP037

    def no_session(number: int) -> None: ...

    globals().pop("OnlyForTypeCheckers", None)
    signatures = [queue.job(name=function.__name__)(function).signature for function in (by_text, second, no_session)]
    assert [signature.session_type for signature in signatures] == [Session, OwnSession, None]
    with pytest.raises(RegistrationError, match=r"never_defined: parameter 'session': its annotation cannot be resolved"):
        queue.job(name="never")(never_defined).signature.resolve()


def test_a_class_that_is_only_known_to_type_checkers_is_known_by_its_name(queue: Queue) -> None:
    names: dict[str, Any] = {}
    exec("def handler(session: 'orm.Session', number: int) -> None: ...", names)
    signature = queue.job(name="tested")(names["handler"]).signature
    assert signature.encode((5,), {}) == {"number": 5}
    assert signature.session_type is Session


def test_a_class_of_the_same_name_that_is_defined_later_is_an_argument(queue: Queue) -> None:
    names: dict[str, Any] = {}
    exec("def handler(it: 'Session', number: int) -> None: ...", names)
    signature = queue.job(name="tested")(names["handler"]).signature
    names["Session"] = str
    assert signature.encode(("a", 5), {}) == {"it": "a", "number": 5}
    assert signature.session_type is None


def test_what_cannot_be_served_is_refused(queue: Queue) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession

    class OwnAsyncSession(AsyncSession):
        pass

    def asynchronous(session: AsyncSession) -> None: ...

    def derived(context: JobContext, session: OwnAsyncSession) -> None: ...

    derived.__annotations__["session"] = OwnAsyncSession

    asynchronous.__annotations__["session"] = AsyncSession

    async def coroutine(session: Session) -> None: ...

    def too_late(number: int, session: Session) -> None: ...

    def before_the_context(session: Session, context: JobContext) -> None: ...

    def twice(session: Session, other: Session) -> None: ...

    def by_name(*, session: Session) -> None: ...

    refused: list[tuple[Any, str]] = [
        (asynchronous, "handlers with an AsyncSession are not available in this version"),
        (derived, "handlers with an AsyncSession are not available in this version"),
        (coroutine, "an async def handler cannot be transactional"),
        (too_late, "parameter 'session': the session must be the first parameter, or follow the context, taken by position"),
        (before_the_context, "parameter 'context': the context must be the first parameter"),
        (twice, "parameter 'other': the session must be the first parameter"),
        (by_name, "parameter 'session': the session must be the first parameter"),
    ]
    for function, words in refused:
        with pytest.raises(RegistrationError, match=words):
            queue.job(name="tested")(function)


def test_a_direct_call_passes_on_what_it_is_given(queue: Queue, engine: Engine) -> None:
    seen: list[Any] = []
    plain: Any = queue.job(name="plain")(lambda session, number: seen.append((session, number)))

    @queue.job(name="both")
    def both(context: JobContext, session: Session, number: int) -> None:
        seen.append((context.attempt, session, number))

    called: Any = both
    with Session(engine) as session:
        plain(session, 1)
        called(session, 2)
        called(session, number=3)
        assert seen == [(session, 1), (1, session, 2), (1, session, 3)]


def test_a_session_in_autocommit_is_refused_and_writes_nothing(queue: Queue, engine: Engine, observer: Engine, effects: Any) -> None:
    assert run(queue, write_once, factory=at(engine, "AUTOCOMMIT")) == {"retrying": 1}
    assert "NotTransactional: the session of a transactional handler will not do" in jobs(observer, queue)[0]["last_error"]
    assert effects() == []


def test_a_session_that_sends_the_queue_s_tables_elsewhere_is_refused(queue: Queue, engine: Engine, observer: Engine, effects: Any) -> None:
    elsewhere = engine.execution_options()
    assert run(queue, write_once, factory=sessionmaker(engine, binds={queue.tables.jobs: elsewhere})) == {"retrying": 1}
    assert "two transactions could not commit together" in jobs(observer, queue)[0]["last_error"]
    assert effects() == []


def test_a_session_on_another_database_cannot_complete_the_job(
    queue: Queue, observer: Engine, fresh_database: Database, effects: Any
) -> None:
    other = sa.create_engine(fresh_database.url)
    queue.metadata.create_all(other)
    Base.metadata.create_all(other)
    assert run(queue, write_once, factory=sessionmaker(other)) == {"retrying": 1}
    assert run_again(queue, observer) == {"failed": 1}
    assert "leads to another database" in failures(observer, queue)[0]["error_message"]
    with other.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(EFFECTS)) == 0
    other.dispose()


# --- the fence -----------------------------------------------------------------------------------------------------------


def test_a_job_that_somebody_else_holds_by_now_takes_no_effect(queue: Queue, observer: Engine, engine: Engine, effects: Any) -> None:
    """On SQLite nobody can take it while the handler holds the write lock: it lets go of it."""

    def handler(session: Session) -> None:
        if not can_lock_rows(engine):
            session.commit()
        steal(queue, observer)
        write(session)

    assert run(queue, handler) == {"lost": 1}
    assert effects() == []
    assert [job["reserved_token"] is not None for job in jobs(observer, queue)] == [True]


@pytest.mark.parametrize("gone", ["stolen", "deleted"])
def test_a_job_that_is_not_ours_before_it_starts_does_not_run_where_its_row_is_locked_first(
    queue: Queue, observer: Engine, effects: Any, gone: str
) -> None:
    started: list[int] = []

    def factory() -> Session:
        if gone == "stolen":
            steal(queue, observer)
        else:
            with observer.connect() as connection:
                connection.execute(queue.tables.jobs.delete())
        return Session(observer.execution_options(isolation_level="SERIALIZABLE"))

    def handler(session: Session) -> None:
        started.append(1)
        write(session)

    queue.job(name="tested", max_attempts=3, backoff=Fixed(0))(handler)
    push(queue, "tested")
    (delivery,) = queue.claim()
    queue.release(delivery, error="an attempt, so that the next one locks")
    queue._session_factory = factory
    worker = Worker(queue)
    assert worker.run_once()
    assert worker.summary is not None
    assert worker.summary.counts == {"lost": 1}
    assert started == []
    assert effects() == []


LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.mark.databases("postgresql", "mysql", "mariadb")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_handler_that_outlasts_its_lease_is_done_once_at_any_level(
    queue: Queue, engine: Engine, observer: Engine, server: Server, effects: Any, level: str, strict: bool
) -> None:
    """Renewed while it runs, or its row is locked: never spoilt by a renewal, and nobody else's."""
    if strict:
        if server.name != "mariadb":
            pytest.skip("only MariaDB has innodb_snapshot_isolation")
        sa.event.listen(engine, "connect", set_strict_snapshots)
        engine.dispose()
    queue.configure(engine, session_factory=at(engine, level))
    seen: list[tuple[bool, bool, int]] = []

    def handler(context: JobContext, session: Session) -> None:
        session.scalars(sa.select(EFFECTS.c.note)).all()  # takes the snapshot, if there is one
        write(session)
        outlast_the_lease(observer)
        seen.append((context.lost, context.renew(), len(queue.claim(lease=600))))

    queue.job(name="tested", max_attempts=1)(handler)
    push(queue, "tested")
    assert work_off(queue, lease=LEASE).counts == {"done": 1}
    assert seen == [(False, True, 0)]
    assert effects() == ["written"]


def set_strict_snapshots(connection: Any, record: object) -> None:
    connection.cursor().execute("SET SESSION innodb_snapshot_isolation = ON")


def outlast_the_lease(observer: Engine) -> None:
    until = moment_of(observer) + timedelta(seconds=1.5 * LEASE)
    eventually(lambda: moment_of(observer) > until)


def test_a_handler_on_a_database_that_locks_as_a_whole_keeps_its_job(queue: Queue, engine: Engine, observer: Engine, effects: Any) -> None:
    if can_lock_rows(engine):
        pytest.skip("shown above")
    seen: list[tuple[bool, bool]] = []

    def handler(context: JobContext, session: Session) -> None:
        write(session)
        outlast_the_lease(observer)
        seen.append((context.lost, context.renew()))

    queue.job(name="tested", max_attempts=1)(handler)
    push(queue, "tested")
    assert work_off(queue, lease=LEASE).counts == {"done": 1}
    assert seen == [(False, True)]
    assert effects() == ["written"]


@pytest.mark.databases("postgresql")
def test_a_handler_that_changes_the_level_by_itself_is_done_at_the_second_attempt(queue: Queue, observer: Engine, effects: Any) -> None:
    seen: list[int] = []

    def handler(context: JobContext, session: Session) -> None:
        if context.attempt == 1:
            session.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            write(session)
            before = jobs(observer, queue)[0]["reserved_until"]
            eventually(lambda: jobs(observer, queue)[0]["reserved_until"] > before)
        seen.append(context.attempt)
        write(session)

    queue.job(name="tested", max_attempts=2, backoff=Fixed(0))(handler)
    push(queue, "tested")
    assert work_off(queue, lease=LEASE).counts == {"retrying": 1, "done": 1}
    assert effects() == ["written"]


def test_workers_whose_leases_end_all_the_time_do_each_job_once(queue: Queue, observer: Engine, engine: Engine, effects: Any) -> None:
    """Leases are ended behind the workers' backs. What two attempts of one job write differs, so that both could be committed."""
    count = 60

    @queue.job(name="count", max_attempts=100, backoff=Fixed(0))
    def handler(context: JobContext, session: Session, number: int) -> None:
        write(session, f"{number:02} {context.attempt}")
        time.sleep(0.02)

    with queue.begin() as session:
        queue.push_many(session, [handler.bind(number) for number in range(count)])
    over = threading.Event()

    def end_leases() -> None:
        while not over.wait(0.02):
            try:
                expire(observer, queue)
            except DBAPIError:  # a file is locked now and then
                continue

    saboteur = threading.Thread(target=end_leases)
    saboteur.start()
    try:
        with working(queue, concurrency=3), working(queue, concurrency=3):
            eventually(lambda: not jobs(observer, queue))
    finally:
        over.set()
        saboteur.join()
    assert [note.split()[0] for note in effects()] == [f"{number:02}" for number in range(count)]
    assert failures(observer, queue) == []


# --- the commit ----------------------------------------------------------------------------------------------------------


def at_its_commit(queue: Queue, engine: Engine, trap: Trap) -> dict[str, int]:
    queue.job(name="tested", max_attempts=2, backoff=Fixed(0))(write_once)
    push(queue, "tested")
    with at_commit(engine, trap):
        counts = work_off(queue, concurrency=1).counts
    assert trap.sprung == 1
    return counts


def test_a_conflict_at_the_commit_was_an_attempt(queue: Queue, engine: Engine, effects: Any) -> None:
    make = next(iter(conflicts(engine).values()))
    assert at_its_commit(queue, engine, Trap(raising_at_commit(make))) == {"retrying": 1, "done": 1}
    assert effects() == ["written"]


def test_a_commit_whose_answer_was_lost_is_done_and_not_run_again(queue: Queue, engine: Engine, observer: Engine, effects: Any) -> None:
    assert at_its_commit(queue, engine, Trap(apply_and_lose)) == {"done": 1}
    assert effects() == ["written"]
    assert jobs(observer, queue) == []


def test_a_commit_that_was_lost_is_run_again(queue: Queue, engine: Engine, effects: Any) -> None:
    assert at_its_commit(queue, engine, Trap(lose)) == {"retrying": 1, "done": 1}
    assert effects() == ["written"]


@pytest.mark.parametrize("when", ["before_commit", "after_commit"])
def test_a_listener_that_raises_at_the_commit_does_not_hide_what_it_did(
    queue: Queue, engine: Engine, observer: Engine, effects: Any, when: str
) -> None:
    factory = sessionmaker(engine)

    @sa.event.listens_for(factory, when)
    def refuse(session: Session) -> None:
        raise RuntimeError("not today")

    queue.configure(engine, session_factory=factory)
    queue.job(name="tested", backoff=Fixed(3600))(write_once)
    with Session(engine) as session, session.begin():
        queue.push_named(session, "tested", {})
    done = when == "after_commit"
    assert work_off(queue).counts == {"done" if done else "retrying": 1}
    assert effects() == (["written"] if done else [])


def test_what_became_of_a_transaction_is_known_when_nobody_holds_its_row(queue: Queue, observer: Engine, engine: Engine) -> None:
    queue.job(name="tested")(lambda: None)
    (id,) = push(queue, "tested")

    def fate() -> Fate:
        return queue.consumer.write(lambda connection: fate_of(connection, queue.tables, id))

    table = queue.tables.jobs
    if can_lock_rows(engine):
        with holding(engine, lock_of(table, table.c.id == id)):
            assert fate() is Fate.OPEN
    assert fate() is Fate.UNDONE
    (delivery,) = queue.claim()
    queue.fail(delivery, "somebody else's claim")
    assert fate() is Fate.UNDONE
    queue.failed.forget(id=id)
    assert fate() is Fate.COMMITTED


def test_a_transaction_that_is_still_open_on_the_server_is_waited_for(queue: Queue, engine: Engine, effects: Any) -> None:
    """The client has lost its connection, and the server does not know yet: then it commits after all."""
    if not can_lock_rows(engine):
        pytest.skip("a file has no server")
    kept: list[Any] = []

    def lose_sight(connection: sa.Connection) -> None:
        pooled = connection.connection
        kept.append(pooled.dbapi_connection)
        pooled.detach()  # nobody closes it
        connection.invalidate()
        threading.Timer(0.5, lambda: (kept[0].commit(), kept[0].close())).start()
        raise next(iter([sa.exc.OperationalError("COMMIT", {}, Exception("the network is down"))]))

    assert at_its_commit(queue, engine, Trap(lose_sight)) == {"done": 1}
    assert effects() == ["written"]


# --- what a handler does to its session ----------------------------------------------------------------------------------


def test_what_it_commits_itself_stays_and_the_rest_is_committed_with_the_job(queue: Queue, observer: Engine, effects: Any) -> None:
    def handler(context: JobContext, session: Session) -> None:
        write(session, f"early {context.attempt}")
        session.commit()
        write(session, f"late {context.attempt}")
        if context.attempt == 1:
            raise ValueError("no")

    assert run(queue, handler) == {"retrying": 1}
    assert effects() == ["early 1"]
    assert run_again(queue, observer) == {"done": 1}
    assert effects() == ["early 1", "early 2", "late 2"]
    assert jobs(observer, queue) == []


@pytest.mark.parametrize("way", ["rollback", "close"])
def test_what_it_rolls_back_is_gone_and_the_rest_is_committed_with_the_job(queue: Queue, observer: Engine, effects: Any, way: str) -> None:
    def handler(session: Session) -> None:
        write(session, "early")
        getattr(session, way)()
        write(session, "late")

    assert run(queue, handler) == {"done": 1}
    assert effects() == ["late"]
    assert jobs(observer, queue) == []


def test_a_handler_may_do_nothing_at_all(queue: Queue, observer: Engine) -> None:
    def handler(session: Session) -> None:
        session.close()

    assert run(queue, handler) == {"done": 1}
    assert jobs(observer, queue) == []


def test_objects_need_not_be_flushed(queue: Queue, observer: Engine, effects: Any) -> None:
    def handler(session: Session) -> None:
        session.add(Effect(note="added"))

    assert run(queue, handler) == {"done": 1}
    assert effects() == ["added"]


def test_objects_that_cannot_be_flushed_are_a_failure_of_the_job(queue: Queue, observer: Engine, effects: Any) -> None:
    def handler(session: Session) -> None:
        session.add_all([Effect(note="same"), Effect(note="same")])

    assert run(queue, handler) == {"retrying": 1}
    assert "IntegrityError" in jobs(observer, queue)[0]["last_error"]
    assert effects() == []


def test_a_failed_flush_that_is_swallowed_is_a_failure_of_the_job(queue: Queue, observer: Engine, effects: Any) -> None:
    def handler(session: Session) -> None:
        write(session, "same")
        session.add(Effect(note="same"))
        with pytest.raises(IntegrityError):
            session.flush()

    assert run(queue, handler) == {"retrying": 1}
    assert "PendingRollbackError" in jobs(observer, queue)[0]["last_error"]
    assert effects() == []


def test_a_savepoint_that_is_rolled_back_takes_only_its_part(queue: Queue, observer: Engine, effects: Any) -> None:
    def handler(session: Session) -> None:
        write(session, "outer")
        write_twice = partial(write, session, "outer")
        with pytest.raises(IntegrityError), session.begin_nested():
            write_twice()

    assert run(queue, handler) == {"done": 1}
    assert effects() == ["outer"]


@pytest.mark.databases("mysql", "mariadb")
def test_a_deadlock_that_is_swallowed_does_not_complete_a_job_that_is_half_done(
    queue: Queue, engine: Engine, observer: Engine, effects: Any
) -> None:
    """The server has undone everything before it, and would go on in a new transaction."""
    make = conflicts(engine)["1213"]

    def handler(context: JobContext, session: Session) -> None:
        write(session, "before")
        for _ in range(2):
            try:
                write(session, "after")
                return
            except DBAPIError:
                continue

    with at_statement(engine, Trap(raising(make), at=2), "INSERT INTO transactional_effects"):
        assert run(queue, handler) == {"retrying": 1}
    assert effects() == []
    assert run_again(queue, observer) == {"done": 1}
    assert effects() == ["after", "before"]


@pytest.mark.databases("mysql", "mariadb")
def test_a_statement_that_commits_by_itself_loses_no_job(queue: Queue, engine: Engine, observer: Engine, effects: Any) -> None:
    def handler(context: JobContext, session: Session) -> None:
        write(session, f"early {context.attempt}")
        session.execute(sa.text("CREATE TABLE IF NOT EXISTS transactional_scratch (id INT)"))
        if context.attempt == 1:
            raise ValueError("no")

    assert run(queue, handler) == {"retrying": 1}
    assert effects() == ["early 1"]
    assert run_again(queue, observer) == {"done": 1}
    assert effects() == ["early 1", "early 2"]
    with observer.connect() as connection:
        connection.execute(sa.text("DROP TABLE transactional_scratch"))


# --- unique keys ---------------------------------------------------------------------------------------------------------


def test_the_unique_key_is_free_when_the_job_is_done_and_kept_when_it_is_not(queue: Queue, observer: Engine, effects: Any) -> None:
    def handler(context: JobContext, session: Session) -> None:
        write(session)
        if context.attempt == 1:
            raise ValueError("no")

    assert run(queue, handler, unique="one") == {"retrying": 1}
    assert list(keys_in(observer, queue)) == ["unique:tested/one"]
    assert run_again(queue, observer) == {"done": 1}
    assert keys_in(observer, queue) == {}
    assert effects() == ["written"]


def test_a_duplicate_does_not_wait_for_the_handler_but_its_end_may_wait_for_the_duplicate(
    queue: Queue, engine: Engine, observer: Engine, effects: Any
) -> None:
    if not can_lock_rows(engine):
        pytest.skip("a file is locked as a whole")
    gate = Gate()

    @queue.job(name="tested", unique="one")
    def handler(session: Session) -> None:
        write(session)
        gate.pass_through()

    push(queue, "tested")
    with working(queue, concurrency=1) as worker:
        gate.await_arrivals()
        with Session(engine) as session, session.begin():
            assert handler.push(session).created is False
            gate.open()
        eventually(lambda: not jobs(observer, queue))
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 1}
    assert keys_in(observer, queue) == {}
    assert effects() == ["written"]


# --- connections ---------------------------------------------------------------------------------------------------------


def test_a_pool_that_is_smaller_than_the_concurrency_makes_them_wait(queue: Queue, database: Database, effects: Any) -> None:
    small = sa.create_engine(database.url, pool_size=1, max_overflow=0)
    queue._session_factory = sessionmaker(small)

    @queue.job(name="tested")
    def handler(session: Session, number: int) -> None:
        write(session, f"{number:02}")

    with queue.begin() as session:
        queue.push_many(session, [handler.bind(number) for number in range(20)])
    assert work_off(queue, concurrency=6).counts == {"done": 20}
    assert effects() == [f"{number:02}" for number in range(20)]
    small.dispose()


def test_a_job_for_which_there_is_no_connection_is_put_back_and_keeps_its_attempt(
    queue: Queue, database: Database, observer: Engine, effects: Any
) -> None:
    small = sa.create_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    queue.job(name="tested", max_attempts=1)(write_once)
    push(queue, "tested")
    queue._session_factory = sessionmaker(small)
    with small.connect(), working(queue, concurrency=1) as worker:
        eventually(lambda: jobs(observer, queue)[0]["reserved_token"] and not jobs(observer, queue)[0]["attempts"])
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert set(worker.summary.counts) == {"retrying"}
    assert run_again(queue, observer) == {"done": 1}
    assert effects() == ["written"]
    small.dispose()


def test_nothing_piles_up_on_the_application_s_engine(queue: Queue, engine: Engine) -> None:
    @queue.job(name="transactional")
    def handler(session: Session) -> None: ...

    push(queue, "transactional", 5)
    assert work_off(queue).counts == {"done": 5}
    dispatch: Any = engine.dialect.dispatch
    assert len(list(dispatch.handle_error)) == 1
    with engine.connect() as connection:
        assert "sqlqueue_left_when_undone" not in connection.info


def test_a_conflict_before_the_handler_starts_is_tried_again(queue: Queue, observer: Engine, engine: Engine, effects: Any) -> None:
    queue.job(name="tested", max_attempts=2, backoff=Fixed(0))(write_once)
    push(queue, "tested")
    queue.release(queue.claim()[0], error="an attempt, so that the next one locks")
    make = next(iter(conflicts(engine).values()))
    with at_statement(engine, Trap(raising(make), times=3)) as trap:
        assert work_off(queue).counts == {"done": 1}
    assert trap.sprung == 3
    assert effects() == ["written"]


def test_a_running_job_is_handed_back_when_its_worker_is_not_to_wait(queue: Queue, engine: Engine, observer: Engine, effects: Any) -> None:
    if not can_lock_rows(engine):
        pytest.skip("a file stays locked until the handler ends")
    gate = Gate()

    def handler(session: Session) -> None:
        write(session)
        gate.pass_through()

    queue.job(name="tested")(handler)
    push(queue, "tested")
    worker = Worker(queue, concurrency=1, shutdown_timeout=0.1)
    worker.start()
    gate.await_arrivals()
    worker.stop(PATIENCE)
    (job,) = jobs(observer, queue)
    assert (job["attempts"], job["reserved_until"]) == (0, None)
    gate.open()
    eventually(lambda: not engine.pool.checkedout(), "the handler's thread ends")  # type: ignore[attr-defined]
    assert effects() == []
