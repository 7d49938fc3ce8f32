"""
`queue.once`: a guard for what must not be done twice.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlqueue import Fixed, NotTransactional, OptionError, Queue
from sqlqueue._dialects import after, server_of
from tests.callers import A_MOMENT, EachLevel, each_level, take_a_snapshot
from tests.producers import Order, is_conflict, key_names, make_orders, order_ids, statements
from tests.servers import Database
from tests.test_push_async import ASYNC_DRIVERS
from tests.workers import work_off


@pytest.fixture
def at_each_level(engine: Engine, queue: Queue) -> EachLevel:
    make_orders(engine)
    return each_level(engine, queue)


def once(engine: Engine, queue: Queue, key: str = "a", **options: Any) -> bool:
    with engine.begin() as connection:
        return queue.once(connection, key, **options)


def test_it_is_the_first_time_once_in_a_committed_transaction(engine: Engine, observer: Engine, queue: Queue) -> None:
    with engine.connect() as connection:
        assert queue.once(connection, "a")
        assert not queue.once(connection, "a")
        connection.rollback()
    assert key_names(observer, queue) == []
    assert [once(engine, queue), once(engine, queue), once(engine, queue, "b")] == [True, False, True]


def test_it_goes_with_the_callers_work_in_any_kind_of_session(engine: Engine, observer: Engine, queue: Queue) -> None:
    make_orders(engine)
    sessions: list[Session | scoped_session[Session]] = [Session(engine), scoped_session(sessionmaker(engine))]
    for number, session in enumerate(sessions, 1):
        for ends in (session.rollback, session.commit):
            session.add(Order(id=number))
            session.flush()
            assert queue.once(session, f"order:{number}")
            ends()
        assert not queue.once(session, f"order:{number}")
        session.add(Order(id=number + 10))
        session.commit()
        session.close()
    assert order_ids(observer) == [1, 2, 11, 12]


def test_a_handler_that_is_repeated_does_it_once(engine: Engine, queue: Queue) -> None:
    done: list[str] = []

    @queue.job(name="pay", max_attempts=3, backoff=Fixed(0))
    def pay(order: str) -> None:
        with engine.begin() as connection:
            if queue.once(connection, f"paid:{order}"):
                done.append(order)
        raise ValueError("after the effect")

    with engine.begin() as connection:
        for order in ("a", "b"):
            pay.push(connection, order)
    work_off(queue)
    assert sorted(done) == ["a", "b"]


def test_keys_are_told_apart_byte_for_byte_and_from_those_of_jobs(engine: Engine, observer: Engine, queue: Queue) -> None:
    job = queue.job(name="once")(lambda: None)
    keys = ["a", "A", "a ", " a", "ä", "a\x00", "x" * 185, "x" * 186, "x" * 10_000, "x" * 10_001, "sha256:1", "once:a", "%", "a/b"]
    with engine.begin() as connection:
        assert [queue.once(connection, key) for key in keys] == [True] * len(keys)
        assert all(job.options(unique=key).push(connection).created for key in keys)
        assert [queue.once(connection, key) for key in keys] == [False] * len(keys)
    stored = [name for name in key_names(observer, queue) if name.startswith("once:")]
    assert "once:a" in stored
    assert len(stored) == len(keys)
    digest = next(name for name in stored if name.startswith("once:sha256:")).removeprefix("once:")
    assert once(engine, queue, digest)


def test_a_key_may_be_forgotten_after_a_time(engine: Engine, observer: Engine, queue: Queue) -> None:
    assert once(engine, queue, expire_after=timedelta(hours=1))
    assert not once(engine, queue, expire_after=0)
    keys = queue.tables.keys
    with observer.connect() as connection:
        connection.execute(keys.update().values(expires_at=after(-1)))
    with engine.connect() as connection:
        assert queue.once(connection, "a")
        assert not queue.once(connection, "a")
        connection.rollback()
    assert [once(engine, queue, expire_after=60), once(engine, queue, expire_after=60)] == [True, False]
    assert len(key_names(observer, queue)) == 1


def test_what_is_no_key_or_no_duration_is_refused_before_any_sql(engine: Engine, queue: Queue) -> None:
    wrong: list[Any] = ["", "\ud800", 1, None, b"a", ("a",)]
    with engine.connect() as connection, statements(engine) as sent:
        for key in wrong:
            with pytest.raises(OptionError, match=r"^key"):
                queue.once(connection, key)
        for span in (-1, float("nan"), "1", True):
            with pytest.raises(OptionError, match=r"^expire_after"):
                queue.once(connection, "a", expire_after=span)  # type: ignore[arg-type]
        for session in (engine, None, "a"):
            with pytest.raises(TypeError, match=r"^once takes"):
                queue.once(session, "a")  # type: ignore[arg-type]
    assert sent == []


def test_a_connection_in_autocommit_is_refused(engine: Engine, observer: Engine, queue: Queue) -> None:
    with observer.connect() as connection, pytest.raises(NotTransactional, match="autocommit"):
        queue.once(connection, "a")
    assert key_names(observer, queue) == []


async def test_it_has_an_asynchronous_twin(database: Database, engine: Engine, queue: Queue) -> None:
    asynchronous = create_async_engine(engine.url.set(drivername=ASYNC_DRIVERS[database.name][0]))
    async with AsyncSession(asynchronous) as session:
        assert await queue.once_async(session, "a", expire_after=60)
        assert not await queue.once_async(session, "a")
        await session.rollback()
        assert await queue.once_async(session, "a")
        await session.commit()
        with pytest.raises(TypeError, match="await once_async"):
            queue.once(session, "b")  # type: ignore[arg-type]
    with Session(engine) as wrong, pytest.raises(TypeError, match="call once"):
        await queue.once_async(wrong, "a")  # type: ignore[arg-type]
    await asynchronous.dispose()


def test_it_costs_a_statement_the_first_time(engine: Engine, queue: Queue) -> None:
    with engine.begin() as connection, statements(engine) as sent:
        assert queue.once(connection, "a")
        assert len(sent) == 1
        assert not queue.once(connection, "a")
        assert len(sent) == 3


# --- callers at the same time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_who_asks_meanwhile_waits_for_the_first_ones_end(commits: bool, at_each_level: EachLevel, engine: Engine, queue: Queue) -> None:
    for callers in at_each_level():
        first, second = callers.new(), callers.new(patience=10)
        assert queue.once(first, "a")
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(queue.once, second, "a")
            with pytest.raises(NotYet):
                asking.result(A_MOMENT)
            if not commits:
                first.rollback()
                assert asking.result(10)
                continue
            first.commit()
            if _conflicts_with_what_is_newer(engine, callers.level):
                with pytest.raises(DBAPIError) as caught:
                    asking.result(10)
                assert is_conflict(caught.value)
            else:
                assert not asking.result(10)


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_a_snapshot_that_is_older_than_the_first_time_does_not_make_it_another(
    at_each_level: EachLevel, engine: Engine, queue: Queue
) -> None:
    for callers in at_each_level():
        caller = callers.new()
        take_a_snapshot(caller)
        assert once(engine, queue)
        if _conflicts_with_what_is_newer(engine, callers.level):
            with pytest.raises(DBAPIError) as caught:
                queue.once(caller, "a")
            assert is_conflict(caught.value)
            caller.rollback()
        assert not queue.once(caller, "a")


def _conflicts_with_what_is_newer(engine: Engine, level: str | None) -> bool:
    return level in ("REPEATABLE READ", "SERIALIZABLE") and not server_of(engine.dialect).snapshot_reads


@pytest.mark.parametrize("found", ["nothing", "an expired key"])
def test_of_many_at_the_same_moment_one_is_the_first(found: str, at_each_level: EachLevel, engine: Engine, queue: Queue) -> None:
    callers_at_once = 4
    for callers in at_each_level("READ COMMITTED", "REPEATABLE READ"):
        if found == "an expired key":
            assert once(engine, queue, expire_after=0)
        start = Barrier(callers_at_once)

        def ask(caller: Connection, start: Barrier = start) -> bool:
            start.wait(10)
            for _ in range(20):
                try:
                    first = queue.once(caller, "a")
                    caller.commit()
                    return first
                except DBAPIError as error:
                    caller.rollback()
                    if not is_conflict(error):
                        raise
            raise AssertionError("twenty conflicts in a row")

        connections = [callers.new(patience=10) for _ in range(callers_at_once)]
        with ThreadPoolExecutor(callers_at_once) as pool:
            assert sorted(pool.map(ask, connections)) == [False, False, False, True]
