"""
`queue.inline()`: pushes run here, after the commit of the transaction that they were pushed in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlqueue import Discard, Fail, Job, JobContext, Queue, Release, UnknownJob, current_job
from tests.producers import Order, job_ids, make_orders, order_ids, use_begin_recipe
from tests.servers import Database
from tests.test_push_async import ASYNC_DRIVERS


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def note(queue: Queue, seen: list[Any]) -> Job[[Any], None]:
    @queue.job(name="note", max_attempts=3)
    def note(what: Any) -> None:
        seen.append(what)

    return note


@pytest.fixture
def savepoints(engine: Engine) -> Iterator[Engine]:
    """An engine on which a push may stand in a savepoint."""
    other = create_engine(engine.url)
    yield use_begin_recipe(other) if other.dialect.name == "sqlite" else other
    other.dispose()


def test_a_push_runs_after_the_commit_of_its_session(
    engine: Engine, observer: Engine, queue: Queue, note: Job[..., None], seen: list[Any]
) -> None:
    with queue.inline() as ran:
        with Session(engine) as session:
            pushed = note.push(session, 1)
            note.options(delay=3600, queue="slow").push(session, 2)
            assert seen == []
            session.commit()
            assert seen == [1, 2]
            note.push(session, 3)
            session.commit()
        assert seen == [1, 2, 3]
    assert (ran[0].id, ran[0].name, ran[0].status) == (pushed.id, "note", "done")
    assert [run.queue for run in ran] == ["default", "slow", "default"]
    assert job_ids(observer, queue) == []


def test_a_push_runs_after_the_commit_of_its_connection(engine: Engine, queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    with queue.inline():
        with engine.connect() as connection:
            note.push(connection, 1)
            assert seen == []
            connection.commit()
            assert seen == [1]
            note.push(connection, 2)
            connection.rollback()
            connection.execute(sa.select(1))
            connection.commit()
        with engine.begin() as connection:
            note.push(connection, 3)
        with engine.connect() as connection:
            note.push(connection, 4)
    with engine.begin() as connection:
        connection.execute(sa.select(1))
    assert seen == [1, 3]
    assert "do_commit" not in vars(engine.dialect)


def test_everything_that_pushes_runs(engine: Engine, queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    scoped = scoped_session(sessionmaker(engine))
    with queue.inline():
        with Session(engine) as session, session.begin():
            assert queue.push_many(session, [note.bind(1), note.bind(2)]) == 2
            queue.push_named(session, "note", {"what": 3})
            note.bind(4).push(session)
        note.push(scoped, 5)
        scoped.commit()
        scoped.remove()
        with queue.begin() as session:
            note.push(session, 6)
    assert seen == [1, 2, 3, 4, 5, 6]


async def test_an_asynchronous_session_runs_its_pushes(database: Database, queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    for driver in ASYNC_DRIVERS[database.name]:
        engine = create_async_engine(sa.make_url(database.url).set(drivername=driver))
        with queue.inline():
            async with AsyncSession(engine) as session, session.begin():
                await note.push_async(session, driver)
                assert seen == []
            async with engine.begin() as connection:
                await queue.push_many_async(connection, [note.bind("connection")])
        assert seen == [driver, "connection"]
        seen.clear()
        await engine.dispose()


def test_what_is_rolled_back_does_not_run(engine: Engine, queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    with queue.inline() as ran:
        with Session(engine) as session:
            note.push(session, 1)
            session.rollback()
            session.execute(sa.select(1))
            session.commit()
            note.push(session, 2)
        with engine.connect() as connection, connection.begin() as transaction:
            note.push(connection, 3)
            transaction.rollback()
    assert seen == list(ran) == []


@pytest.mark.parametrize("kind", ["session", "connection"])
def test_what_is_rolled_back_to_a_savepoint_does_not_run(
    savepoints: Engine, queue: Queue, note: Job[..., None], seen: list[Any], kind: str
) -> None:
    with queue.inline(), Session(savepoints) if kind == "session" else savepoints.connect() as session:
        with session.begin_nested() as undone:
            note.push(session, "undone")
            undone.rollback()
        note.push(session, "before")
        with session.begin_nested():
            note.push(session, "released")
            with session.begin_nested() as undone:
                note.push(session, "undone, too")
                undone.rollback()
        assert seen == []
        session.commit()
        assert seen == ["before", "released"]


def test_a_session_on_a_connection_that_is_never_committed_runs_its_pushes(
    savepoints: Engine, queue: Queue, note: Job[..., None], seen: list[Any]
) -> None:
    with queue.inline(), savepoints.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            note.push(session, 1)
            session.rollback()
            note.push(session, 2)
            session.commit()
            assert seen == [2]
            note.push(session, 3)
            session.commit()
        connection.rollback()
    assert seen == [2, 3]


def test_arguments_travel_as_json_and_the_handler_has_its_context(engine: Engine, queue: Queue, seen: list[Any]) -> None:
    @queue.job(name="look", headers={"tenant": "a"}, max_attempts=4)
    def look(context: JobContext, day: date, numbers: list[int]) -> None:
        assert current_job() is context
        assert context.renew()
        seen.append((day, numbers, context.name, context.attempt, context.max_attempts, dict(context.headers)))
        numbers.append(0)

    numbers = [1]
    with queue.inline() as ran, Session(engine) as session, session.begin():
        look.options(deadline=60).push(session, date(2026, 1, 31), numbers)
        numbers.append(2)
    assert seen == [(date(2026, 1, 31), [1, 0], "look", 1, 4, {"tenant": "a"})]
    assert numbers == [1, 2]
    assert ran[0].arguments.day == date(2026, 1, 31)


def test_a_failure_leaves_the_pusher_alone_and_is_raised_at_the_end(engine: Engine, queue: Queue, seen: list[Any]) -> None:
    @queue.job(name="break")
    def break_() -> None:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(ZeroDivisionError, match="by nothing") as raised, queue.inline() as ran:  # noqa: PT012  # at the end, not before
        with Session(engine) as session, session.begin():
            break_.push(session)
        seen.append("went on")
    assert seen == ["went on"]
    assert [(run.status, run.error) for run in ran] == [("retrying", raised.value)]
    with queue.inline(raise_errors=False) as ran, Session(engine) as session, session.begin():
        break_.options(max_attempts=1).push(session)
    assert [run.status for run in ran] == ["failed"]
    assert [type(error) for error in ran.errors] == [ZeroDivisionError]


def test_several_failures_are_raised_as_a_group(engine: Engine, queue: Queue) -> None:
    @queue.job(name="break")
    def break_() -> None:
        raise ZeroDivisionError

    @queue.job(name="leave")
    def leave() -> None:
        raise SystemExit

    with pytest.raises(BaseExceptionGroup) as raised, queue.inline(), Session(engine) as session, session.begin():
        queue.push_many(session, [break_.bind(), leave.bind()])
    assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError, SystemExit]
    with pytest.raises(RuntimeError, match="SystemExit"), queue.inline(), Session(engine) as session, session.begin():
        leave.push(session)


def test_an_error_of_the_block_itself_comes_first(engine: Engine, queue: Queue) -> None:
    @queue.job(name="break")
    def break_() -> None:
        raise ZeroDivisionError("by nothing")

    def run_block() -> None:
        with queue.inline():
            with Session(engine) as session, session.begin():
                break_.push(session)
            raise KeyError("the test's own")

    with pytest.raises(KeyError) as raised:
        run_block()
    assert "a job had failed: break(), attempt 1: retrying" in raised.value.__notes__[0]
    assert "by nothing" in raised.value.__notes__[0]


def test_other_outcomes_are_no_errors(engine: Engine, queue: Queue, seen: list[Any]) -> None:
    @queue.job(name="end")
    def end(how: str) -> None:
        seen.append(how)
        raise {"release": Release(5), "discard": Discard()}[how]

    with queue.inline() as ran, Session(engine) as session, session.begin():
        queue.push_many(session, [end.bind("release"), end.bind("discard")])
    assert [run.status for run in ran] == ["released", "discarded"]
    assert seen == ["release", "discard"]

    @queue.job(name="fail")
    def fail() -> None:
        raise Fail("for good")

    with pytest.raises(Fail, match="for good"), queue.inline(), Session(engine) as session, session.begin():
        fail.push(session)


def test_a_job_that_nobody_knows_has_failed(engine: Engine, queue: Queue) -> None:
    with pytest.raises(UnknownJob, match="stranger"), queue.inline(), Session(engine) as session, session.begin():
        queue.push_named(session, "stranger", {})


def test_jobs_that_a_job_pushes_run_after_it(engine: Engine, queue: Queue, seen: list[Any]) -> None:
    @queue.job(name="count")
    def count(number: int) -> None:
        seen.append(f"{number} begins")
        if number:
            with Session(engine) as session, session.begin():
                count.push(session, number - 1)
        seen.append(f"{number} ends")

    with queue.inline(), Session(engine) as session, session.begin():
        count.push(session, 2)
    assert seen == ["2 begins", "2 ends", "1 begins", "1 ends", "0 begins", "0 ends"]


def test_many_jobs_may_run(engine: Engine, queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    with queue.inline() as ran, Session(engine) as session, session.begin():
        queue.push_many(session, [note.bind(number) for number in range(1500)])
    assert seen == list(range(1500))
    assert len(ran) == 1500


def test_jobs_that_push_themselves_for_ever_are_stopped(queue: Queue) -> None:
    @queue.job(name="again")
    def again() -> None:
        with queue.begin() as session:
            again.push(session)

    with pytest.raises(RuntimeError, match="1,000 jobs in a row have each pushed the next"), queue.inline(), queue.begin() as session:
        again.push(session)


def test_a_unique_key_is_held_until_the_job_has_run(engine: Engine, queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    once = note.options(unique="once")
    with queue.inline(), Session(engine) as session:
        first = once.push(session, 1)
        second = once.push(session, 2)
        assert (second.id, second.created) == (first.id, False)
        session.rollback()
        assert once.push(session, 3).created
        session.commit()
        assert once.push(session, 4).created
        session.commit()
    assert seen == [3, 4]


def test_a_unique_key_is_held_as_its_push_says(engine: Engine, queue: Queue) -> None:
    seen: list[int] = []
    answers: list[bool] = []

    @queue.job(name="again")
    def again(number: int, options: dict[str, Any]) -> None:
        seen.append(number)
        if number < 3:
            with Session(engine) as session, session.begin():
                answers.append(again.options(unique="a", **options).push(session, number + 1, options).created)

    def push(**options: Any) -> list[bool]:
        seen.clear()
        answers.clear()
        with queue.inline(), Session(engine) as session, session.begin():
            first = again.options(unique="a", **options).push(session, 0, options)
            second = again.options(unique="a", **options).push(session, 1, options)
            assert (second.id, second.created) == (first.id, False)
        return answers

    assert (push(), seen) == ([False], [0])
    assert (push(unique_until="started"), seen) == ([True] * 3, [0, 1, 2, 3])
    assert (push(unique_until="started", unique_for=60), seen) == ([False], [0])
    assert (push(on_conflict="replace"), seen) == ([True] * 2, [1, 2, 3])


def test_a_push_of_another_thread_runs_in_that_thread(engine: Engine, queue: Queue) -> None:
    ran_in: list[str] = []

    @queue.job(name="where")
    def where() -> None:
        ran_in.append(threading.current_thread().name)

    def push() -> None:
        with Session(engine) as session, session.begin():
            where.push(session)

    thread = threading.Thread(target=push, name="of the code under test")
    with queue.inline():
        thread.start()
        thread.join()
    assert ran_in == ["of the code under test"]


def test_what_a_real_push_refuses_is_refused(queue: Queue, note: Job[..., None]) -> None:
    with queue.inline(), pytest.raises(TypeError, match="push takes a Session"):
        note.push(None, 1)  # type: ignore[arg-type]


def test_blocks_inside_each_other_and_real_pushes_beside_them(
    engine: Engine, observer: Engine, queue: Queue, note: Job[..., None], seen: list[Any]
) -> None:
    with queue.inline() as outer:
        with queue.inline() as inner, engine.begin() as connection:
            note.push(connection, 1)
        with queue.fake() as pushed, engine.begin() as connection:
            note.push(connection, 2)
        with engine.begin() as connection:
            note.push(connection, 3)
    with engine.begin() as connection:
        note.push(connection, 4)
    assert [len(runs) for runs in (outer, inner, pushed)] == [1, 1, 1]
    assert seen == [1, 3]
    assert len(job_ids(observer, queue)) == 1


def test_a_transactional_handler_has_a_session_that_commits(engine: Engine, queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    @queue.job(name="order")
    def order(session: Session, total: int) -> None:
        session.add(Order(note=str(total)))
        note.push(session, total)
        if total < 0:
            raise ValueError("no such order")

    make_orders(engine)
    with queue.inline(raise_errors=False) as runs:
        for total in (7, -7):
            with Session(engine) as session, session.begin():
                order.push(session, total)
    assert [(run.name, run.status) for run in runs] == [("order", "done"), (note.name, "done"), ("order", "retrying")]
    assert len(order_ids(engine)) == 1
