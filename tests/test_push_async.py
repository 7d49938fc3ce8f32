"""
P1 for AsyncSession and AsyncConnection, and every driver that a producer may have beside the workers' own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session
from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelAsyncSession

from sqlqueue import ArgumentError, Job, NotTransactional, Queue
from tests.producers import ORDERS, inserts_at_server, job_ids, key_names, make_orders, order_ids
from tests.servers import Database

ASYNC_DRIVERS = {
    "sqlite": ["sqlite+aiosqlite"],
    "postgresql": ["postgresql+psycopg", "postgresql+asyncpg"],
    "mysql": ["mysql+aiomysql", "mysql+asyncmy"],
    "mariadb": ["mysql+aiomysql", "mariadb+asyncmy"],  # one of them through SQLAlchemy's own MariaDB dialect
}


@pytest.fixture
async def engines(database: Database) -> AsyncIterator[list[AsyncEngine]]:
    """An engine for each asynchronous driver of this database."""
    url = sa.make_url(database.url)
    engines = [create_async_engine(url.set(drivername=driver)) for driver in ASYNC_DRIVERS[database.name]]
    yield engines
    for engine in engines:
        await engine.dispose()


@pytest.fixture
def send_invoice(engine: Engine, queue: Queue) -> Job[[int], None]:
    make_orders(engine)

    @queue.job(name="invoices.send")
    def send_invoice(number: int) -> None: ...

    return send_invoice


async def take_order(session: Any) -> None:
    connection = session if isinstance(session, AsyncConnection) else await session.connection()
    await connection.execute(ORDERS.insert().values(id=1))


Opened = AbstractAsyncContextManager[Any]


def session(engine: AsyncEngine) -> Opened:
    return AsyncSession(engine)


def sqlmodel_session(engine: AsyncEngine) -> Opened:
    return SQLModelAsyncSession(engine)


def connection(engine: AsyncEngine) -> Opened:
    return engine.connect()


@asynccontextmanager
async def task_local_session(engine: AsyncEngine) -> AsyncIterator[Any]:
    session = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    yield session
    await session.remove()


@pytest.mark.parametrize("opened", [session, connection, sqlmodel_session, task_local_session])
async def test_jobs_commit_and_roll_back_with_the_callers_work(
    opened: Callable[[AsyncEngine], Opened], engines: list[AsyncEngine], observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    async def push_all(session: Any) -> list[int]:
        pushes = [
            await send_invoice.push_async(session, 1),
            await send_invoice.bind(1).push_async(session),
            await queue.push_named_async(session, "invoices.send", {"number": 1}),
            await send_invoice.options(unique="one").push_async(session, 1),
        ]
        again = await send_invoice.options(unique="one").push_async(session, 1)
        assert (again.created, again.id) == (False, pushes[-1].id)
        assert await queue.push_many_async(session, [send_invoice.bind(1), send_invoice.options(unique="one").bind(1)]) == 1
        return [pushed.id for pushed in pushes]

    for engine in engines:
        async with opened(engine) as session:
            await push_all(session)
            assert job_ids(observer, queue) == []
            await session.rollback()
            assert (job_ids(observer, queue), key_names(observer, queue)) == ([], [])

            await take_order(session)
            pushed = await push_all(session)
            assert (job_ids(observer, queue), order_ids(observer)) == ([], [])
            await session.commit()
        assert (job_ids(observer, queue)[:4], order_ids(observer)) == (pushed, [1])
        assert queue.clear("default") == 5
        make_orders(queue.consumer.engine)


async def test_a_duplicate_of_a_committed_job_is_told_by_every_driver(
    engines: list[AsyncEngine], engine: Engine, send_invoice: Job[[int], None]
) -> None:
    unique = send_invoice.options(unique="one")
    with engine.begin() as connection:
        held = unique.push(connection, 1)
    for other in engines:
        async with AsyncSession(other) as session, session.begin():
            await session.execute(ORDERS.insert().values(id=1))
            pushed = await unique.push_async(session, 1)
            assert (pushed.id, pushed.created) == (held.id, False)
            await session.execute(ORDERS.delete().where(ORDERS.c.id == 1))


@pytest.mark.databases("postgresql", "mysql", "mariadb")
async def test_many_jobs_are_one_insert_whatever_the_driver(
    engines: list[AsyncEngine], engine: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    """Jobs with the same options, and jobs whose options differ."""
    later = [send_invoice.options(delay=delay, priority=3, deadline=60, headers={"a": "b"}) for delay in range(3)]
    for other in engines:
        for bound in ([send_invoice.bind(number) for number in range(90)], [job.bind(1) for job in (send_invoice, *later)] * 20):
            async with other.connect() as connection:
                inserts = await connection.run_sync(lambda sync: inserts_at_server(sync, queue.tables.jobs))
                assert await queue.push_many_async(connection, bound) == len(bound)
                assert await connection.run_sync(lambda sync: inserts()) == 1  # noqa: B023  # called before the next round
                await connection.rollback()


async def test_a_task_may_push_in_a_savepoint_and_take_it_back(
    engines: list[AsyncEngine], observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    for engine in engines:
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(ORDERS.insert().values(id=1))
            savepoint = await session.begin_nested()
            if engine.dialect.name == "sqlite":
                with pytest.raises(NotTransactional, match="BEGIN recipe"):
                    await send_invoice.push_async(session, 1)
            else:
                await send_invoice.push_async(session, 1)
            await savepoint.rollback()
            await session.execute(ORDERS.delete())
    assert job_ids(observer, queue) == []


async def test_an_asynchronous_engine_in_autocommit_is_refused(
    engines: list[AsyncEngine], observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    for engine in engines:
        for opened in (AsyncSession, AsyncEngine.connect):
            async with opened(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
                with pytest.raises(NotTransactional, match="autocommit"):
                    await send_invoice.push_async(session, 1)
                with pytest.raises(NotTransactional, match="autocommit"):
                    await queue.push_many_async(session, [send_invoice.bind(1)])
    assert job_ids(observer, queue) == []


async def test_the_wrong_kind_of_session_is_told_its_twin(engines: list[AsyncEngine], engine: Engine, send_invoice: Job[..., None]) -> None:
    queue: Any = send_invoice._producer
    async with AsyncSession(engines[0]) as session, engines[0].connect() as connection:
        for asynchronous in (session, connection, async_scoped_session(async_sessionmaker(engines[0]), scopefunc=lambda: 1)):
            with pytest.raises(TypeError, match="await push_async"):
                send_invoice.push(asynchronous, 1)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="await push_many_async"):
                queue.push_many(asynchronous, [])
    for synchronous in (Session(engine), sa.orm.scoped_session(sa.orm.sessionmaker(engine))):
        with pytest.raises(TypeError, match=r"call push$"):
            await send_invoice.push_async(synchronous, 1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"call push_many$"):
            await queue.push_many_async(synchronous, [])
    for stranger in (None, engines[0], engine, 42):
        with pytest.raises(TypeError, match="push_async takes an AsyncSession or AsyncConnection"):
            await send_invoice.push_async(stranger, 1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        await send_invoice.push_async(None)  # type: ignore[arg-type]


# --- synchronous drivers that are not the workers' own -----------------------------------------------------------------


@pytest.mark.databases("postgresql")
def test_a_second_synchronous_driver_keeps_the_same_promise(
    database: Database, observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    engine = sa.create_engine(sa.make_url(database.url).set(drivername="postgresql+psycopg2"))
    unique = send_invoice.options(unique="one")
    for ending, jobs in (("rollback", 0), ("commit", 5)):
        with Session(engine) as session:
            pushed = unique.push(session, 1)
            assert unique.push(session, 1).id == pushed.id
            send_invoice.options(delay=1.5, deadline=60).push(session, 1)
            assert (
                queue.push_many(session, [send_invoice.bind(1), *(send_invoice.options(delay=n, deadline=60).bind(n) for n in (1, 2))]) == 3
            )
            assert job_ids(observer, queue) == []
            getattr(session, ending)()
            assert len(job_ids(observer, queue)) == jobs
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(NotTransactional, match="autocommit"):
            send_invoice.push(connection, 1)
    engine.dispose()
