"""
A clock that tests move on, and workers that die.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlqueue import Fixed, Job, OptionError, Queue, Reason, StaleDelivery
from sqlqueue._tables import Instant
from sqlqueue.testing import Clock, worker_dies
from tests.rows import HOUR, change, failed_in, jobs_in, put, put_key, rows
from tests.servers import Database
from tests.test_push_async import ASYNC_DRIVERS


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def note(queue: Queue, seen: list[Any]) -> Job[[Any], None]:
    @queue.job(name="note", max_attempts=2)
    def note(what: Any) -> None:
        seen.append(what)

    return note


@pytest.fixture
def clock(queue: Queue) -> Clock:
    return Clock(queue)


def push(queue: Queue, *jobs: Any) -> None:
    with queue.begin() as session:
        queue.push_many(session, jobs)


def test_a_delayed_job_is_due_when_its_time_has_come(queue: Queue, clock: Clock, note: Job[..., None], seen: list[Any]) -> None:
    push(queue, note.options(delay=3600).bind("an hour"), note.options(delay=7200).bind("two hours"))
    clock.advance(minutes=59)
    queue.drain()
    assert seen == []
    clock.advance(timedelta(minutes=2))
    queue.drain()
    assert seen == ["an hour"]
    clock.advance(3600)
    queue.drain()
    assert seen == ["an hour", "two hours"]


def test_a_claim_of_one_s_own_sees_the_time_at_once(queue: Queue, clock: Clock, note: Job[..., None]) -> None:
    push(queue, note.options(delay=3600).bind(1))
    assert queue.claim() == []
    clock.advance(hours=1)
    [delivery] = queue.claim()
    clock.advance(hours=1)
    with pytest.raises(StaleDelivery):
        queue.renew(delivery)


def test_backoff_goes_by(queue: Queue, clock: Clock, seen: list[Any]) -> None:
    @queue.job(name="break", max_attempts=3, backoff=Fixed(600))
    def break_() -> None:
        raise ZeroDivisionError

    push(queue, break_.bind())
    for status in ("retrying", "retrying", "failed"):
        assert queue.drain().counts == {status: 1}
        assert queue.drain().counts == {}
        clock.advance(minutes=10)


def test_a_deadline_passes(queue: Queue, clock: Clock, note: Job[..., None], seen: list[Any]) -> None:
    push(queue, note.options(delay=60, deadline=120).bind(1))
    clock.advance(minutes=3)
    assert [(run.status, run.reason) for run in queue.drain()] == [("failed", Reason.DEADLINE_EXCEEDED)]
    assert seen == []


def test_every_moment_of_the_tables_moves_by_exactly_as_much(queue: Queue, observer: Engine, clock: Clock) -> None:
    [waiting, held] = put(observer, queue, due_in=5) + put(observer, queue, lease_in=5, max_attempts=1)
    late = jobs_in(observer, queue)[waiting]["due_at"].replace(microsecond=123_999)
    change(observer, queue, [waiting], deadline=late)
    put_key(observer, queue, waiting, "some key")
    with observer.connect() as connection:
        connection.execute(sa.update(queue.tables.keys).values(expires_at=late))
    before = _moments(observer, queue)
    clock.advance(days=40, hours=1, seconds=0.25)
    moved = timedelta(days=40, hours=1, seconds=0.25)
    assert {place: moment - moved for place, moment in before.items()} == _moments(observer, queue)
    assert {column for _, column in before} >= {"due_at", "available_at", "created_at", "reserved_until", "deadline", "expires_at"}
    queue.drain()
    [failed] = [job for job in failed_in(observer, queue).values() if job["id"] == held]
    clock.advance(HOUR)
    assert failed_in(observer, queue)[held]["failed_at"] == failed["failed_at"] - HOUR


def _moments(observer: Engine, queue: Queue) -> dict[tuple[Any, str], Any]:
    found: dict[tuple[Any, str], Any] = {}
    with observer.connect() as connection:
        for table in queue.tables.all:
            columns = [column for column in table.c if isinstance(column.type, Instant)]
            for row in connection.execute(sa.select(*table.primary_key.columns, *columns)):
                found |= {((table.name, row[0]), column.name): row._mapping[column] for column in columns if row._mapping[column]}
    return found


@pytest.mark.parametrize("kind", ["session", "connection"])
def test_time_goes_by_in_the_test_s_own_transaction_only(
    queue: Queue, engine: Engine, observer: Engine, note: Job[..., None], seen: list[Any], kind: str
) -> None:
    push(queue, note.options(delay=3600).bind("committed"))
    before = jobs_in(observer, queue)
    with Session(engine) if kind == "session" else engine.connect() as target:
        note.options(delay=3600).push(target, "not committed")
        Clock(queue, target).advance(hours=1)
        queue.drain(target).assert_all_done()
        assert sorted(seen) == ["committed", "not committed"]
        target.rollback()
    assert jobs_in(observer, queue) == before


async def test_time_goes_by_in_an_asynchronous_session(database: Database, queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    for driver in ASYNC_DRIVERS[database.name]:
        engine = create_async_engine(sa.make_url(database.url).set(drivername=driver))
        async with AsyncSession(engine) as session:
            await note.options(delay=60).push_async(session, driver)
            await Clock(queue, session).advance_async(minutes=1)
            assert (await queue.drain_async(session)).counts == {"done": 1}
            with pytest.raises(TypeError, match="await advance_async"):
                Clock(queue, session).advance(1)
            await session.rollback()
        await engine.dispose()
        assert seen.pop() == driver


def test_time_does_not_go_back(clock: Clock) -> None:
    for wrong in ({"seconds": -1}, {"days": 10**6}, {"hours": -1, "minutes": 30}):
        with pytest.raises(OptionError, match="by"):
            clock.advance(**wrong)


# --- workers that die ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["committed", "never committed"])
def test_a_job_whose_worker_died_before_settling_runs_again(
    queue: Queue, engine: Engine, note: Job[..., None], seen: list[Any], own: bool
) -> None:
    with engine.connect() as connection:
        target = connection if own else None
        if own:
            note.push(connection, 1)
        else:
            push(queue, note.bind(1))
        with worker_dies(queue) as death:
            died = queue.drain(target)
        assert death.died
        assert [(run.status, run.note) for run in died] == [("died", "before its end was written down: done")]
        assert seen == [1]
        assert list(queue.drain(target)) == []
        Clock(queue, target).advance(minutes=2)
        assert [(run.status, run.attempt) for run in queue.drain(target)] == [("done", 2)]
        assert seen == [1, 1]


def test_a_job_whose_worker_died_before_it_ran_has_lost_an_attempt(
    queue: Queue, clock: Clock, note: Job[..., None], seen: list[Any]
) -> None:
    push(queue, note.bind(1))
    for attempt in (1, 2):
        with worker_dies(queue, at="before_run", job=note):
            assert [(run.status, run.attempt) for run in queue.drain()] == [("died", attempt)]
        clock.advance(minutes=2)
    assert [(run.status, run.reason) for run in queue.drain()] == [("failed", Reason.WORKER_LOST)]
    assert seen == []


def test_a_job_that_must_not_be_repeated_is_lost_with_its_worker(queue: Queue, observer: Engine, clock: Clock) -> None:
    @queue.job(name="pay", on_worker_lost="fail")
    def pay() -> None: ...

    push(queue, pay.bind())
    with worker_dies(queue, job="pay"):
        queue.drain()
    clock.advance(minutes=2)
    assert [run.reason for run in queue.drain()] == [Reason.WORKER_LOST]
    assert [job["reason"] for job in rows(observer, queue.tables.failed).values()] == ["worker_lost"]


def test_the_drain_ends_with_its_worker_and_dies_once(queue: Queue, note: Job[..., None], seen: list[Any]) -> None:
    push(queue, note.bind(1), note.bind(2))
    with worker_dies(queue):
        assert queue.drain().counts == {"died": 1}
        assert queue.drain().counts == {"done": 1}
    assert seen == [1, 2]


def test_a_death_that_did_not_come_fails_the_test(queue: Queue, note: Job[..., None]) -> None:
    with pytest.raises(AssertionError, match="no worker died"), worker_dies(queue):
        queue.drain()
    push(queue, note.bind(1))
    with pytest.raises(AssertionError, match="no worker died"), worker_dies(queue, job="another"):
        assert queue.drain().counts == {"done": 1}
    with pytest.raises(OptionError, match="at: 'before_run' or 'before_settle', not 'never'"), worker_dies(queue, at="never"):  # type: ignore[arg-type]
        pass


def test_a_lease_that_ends_while_the_handler_runs_is_lost(queue: Queue, clock: Clock, seen: list[Any]) -> None:
    @queue.job(name="slow")
    def slow() -> None:
        seen.append(1)
        if len(seen) == 1:
            clock.advance(minutes=2)
            assert queue.drain().counts == {"done": 1}

    push(queue, slow.bind())
    assert [(run.status, run.note) for run in queue.drain()] == [("lost", "its lease had ended: done")]
    assert seen == [1, 1]
