"""
P5, and P1 on SQLite: a push that could not commit and roll back with the caller's work is refused, and nothing is sent.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from sqlqueue import Job, NotTransactional, Queue
from tests.producers import ORDERS, Base, Order, job_ids, make_orders, order_ids, statements, use_begin_recipe
from tests.servers import Database

JobOfNumber = Job[[int], None]


@pytest.fixture
def send_invoice(engine: Engine, queue: Queue) -> JobOfNumber:
    make_orders(engine)

    @queue.job(name="invoices.send")
    def send_invoice(number: int) -> None: ...

    return send_invoice


def pushes(queue: Queue, job: JobOfNumber, session: Any) -> list[Callable[[], object]]:
    """Every way to push."""
    return [
        lambda: job.push(session, 1),
        lambda: job.bind(1).push(session),
        lambda: job.options(unique="one").push(session, 1),
        lambda: queue.push_many(session, [job.bind(1)]),
        lambda: queue.push_many(session, []),
        lambda: queue.push_named(session, "invoices.send", {"number": 1}),
    ]


# --- autocommit -------------------------------------------------------------------------------------------------------


def test_an_engine_in_autocommit_is_refused_and_nothing_is_sent(
    database: Database, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    engine = sa.create_engine(database.url, isolation_level="AUTOCOMMIT")
    with Session(engine) as session, engine.connect() as connection, statements(engine) as sent:
        for opened in (session, connection):
            for push in pushes(queue, send_invoice, opened):
                with pytest.raises(NotTransactional, match="autocommit"):
                    push()
        assert sent == []
    engine.dispose()
    assert job_ids(observer, queue) == []


def test_a_session_or_connection_in_autocommit_is_refused(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    with Session(engine) as session, engine.connect() as connection, statements(engine) as sent:
        session.connection(execution_options=options)
        connection.execution_options(**options)
        for opened in (session, connection, Session(connection), Session(engine.execution_options(**options))):
            for push in pushes(queue, send_invoice, opened):
                with pytest.raises(NotTransactional, match="autocommit"):
                    push()
            opened.rollback() if opened is not connection else None
        assert sent == []
    assert job_ids(observer, queue) == []


def test_a_driver_that_was_set_to_autocommit_behind_sqlalchemys_back_is_refused(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        if isinstance(driver, sqlite3.Connection):
            driver.isolation_level = None
        elif callable(driver.autocommit):
            driver.autocommit(True)
        else:
            driver.autocommit = True
        with statements(engine) as sent:
            for push in pushes(queue, send_invoice, connection):
                with pytest.raises(NotTransactional, match="autocommit"):
                    push()
        assert sent == []
        connection.invalidate()
    assert job_ids(observer, queue) == []


@pytest.mark.databases("mysql", "mariadb")
def test_autocommit_switched_on_by_a_statement_is_refused(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("SET autocommit = 1")
        with pytest.raises(NotTransactional, match="autocommit"):
            send_invoice.push(connection, 1)
        connection.invalidate()


@pytest.mark.databases("postgresql")
def test_another_postgresql_driver_in_autocommit_is_refused(
    database: Database, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    engine = sa.create_engine(sa.make_url(database.url).set(drivername="postgresql+psycopg2"))
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.autocommit = True
        for push in pushes(queue, send_invoice, connection):
            with pytest.raises(NotTransactional, match="autocommit"):
                push()
        connection.invalidate()
    engine.dispose()
    assert job_ids(observer, queue) == []


def test_a_refused_connection_is_left_as_it_came(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with engine.connect() as connection:
        with pytest.raises(NotTransactional):
            send_invoice.push(connection.execution_options(isolation_level="AUTOCOMMIT"), 1)
        assert not connection.in_transaction()
        connection.execution_options(isolation_level=engine.dialect.default_isolation_level or "SERIALIZABLE")
        with connection.begin():
            pushed = send_invoice.push(connection, 1)
            assert job_ids(observer, queue) == []
    assert job_ids(observer, queue) == [pushed.id]


def test_a_read_only_look_at_the_driver_is_all_that_the_check_costs(engine: Engine, send_invoice: JobOfNumber) -> None:
    with engine.connect() as connection:
        connection.execute(sa.select(ORDERS)).all()
        with statements(engine) as sent:
            send_invoice.push(connection, 1)
        assert len(sent) == 1
        connection.rollback()


# --- sessions over several engines ------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/elsewhere.db")
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_a_session_that_sends_the_jobs_elsewhere_is_refused_naming_both_engines(
    engine: Engine, elsewhere: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None, **rest: Any) -> Engine:
            return engine if clause is not None and clause.table is queue.tables.jobs else elsewhere

    sessions = {
        "binds": Session(binds={Order: elsewhere, queue.tables.jobs: engine}),
        "a default and binds": Session(elsewhere, binds={queue.tables.jobs: engine}),
        "a router": Routing(),
        "another connection to the same database": Session(engine, binds={queue.tables.jobs: engine.execution_options(a=1)}),
    }
    for kind, session in sessions.items():
        session.add(Order(id=1))
        with statements(engine) as sent, session:
            for push in pushes(queue, send_invoice, session):
                with pytest.raises(NotTransactional, match="sqlqueue_jobs") as caught:
                    push()
                assert repr(engine) in str(caught.value)
                assert kind.endswith("database") or repr(elsewhere) in str(caught.value)
                assert "test-password" not in str(caught.value)
            session.rollback()
        assert sent == []
    assert job_ids(observer, queue) == []


def test_a_router_that_answers_at_random_is_asked_once_for_the_jobs(
    engine: Engine, elsewhere: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    answers = iter([engine, engine, elsewhere])

    class Routing(Session):
        def get_bind(self, *args: Any, **options: Any) -> Engine:
            return next(answers)

    with Routing() as session:
        send_invoice.push(session, 1)
        session.commit()
    assert len(job_ids(observer, queue)) == 1


def test_a_session_whose_binds_agree_pushes(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None) -> Engine:  # type: ignore[override]
            return engine

    for session in (
        Session(binds={Order: engine, queue.tables.jobs: engine}),
        Session(engine, binds={Order: engine}),
        Routing(),
        Session(engine.execution_options(a=1)),
    ):
        with session:
            session.add(Order(id=1))
            session.flush()
            send_invoice.push(session, 1)
            session.rollback()
            assert (job_ids(observer, queue), order_ids(observer)) == ([], [])


def test_a_session_without_any_engine_is_sqlalchemys_own_error(queue: Queue, send_invoice: JobOfNumber) -> None:
    with Session() as session, pytest.raises(sa.exc.UnboundExecutionError):
        send_invoice.push(session, 1)


@pytest.mark.parametrize("mode", ["conditional_savepoint", "control_fully", "rollback_only"])
def test_a_session_that_joined_a_connection_pushes_into_its_transaction(
    mode: Any, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            session.add(Order(id=1))
            session.flush()
            send_invoice.push(session, 1)
            session.rollback() if mode == "control_fully" else session.commit()
        assert job_ids(observer, queue) == []
        if outer.is_active:
            outer.rollback()
    assert (job_ids(observer, queue), order_ids(observer)) == ([], [])


# --- savepoints -------------------------------------------------------------------------------------------------------


def savepoints_are_safe(connection: Connection) -> bool:
    """The driver begins a transaction before a SAVEPOINT."""
    driver: Any = connection.connection.driver_connection
    return not isinstance(driver, sqlite3.Connection) or driver.isolation_level is None


@pytest.fixture(params=["as it comes", "set up with care"])
def caller(request: pytest.FixtureRequest, database: Database) -> Iterator[Engine]:
    """The caller's engine: with the database's defaults; with SQLAlchemy's BEGIN recipe, or at READ COMMITTED."""
    engine = sa.create_engine(database.url)
    if request.param != "as it comes":
        if engine.dialect.name == "sqlite":
            use_begin_recipe(engine)
        else:
            engine = engine.execution_options(isolation_level="READ COMMITTED")
    yield engine
    engine.dispose()


def test_a_push_in_a_savepoint_goes_with_it_or_is_refused(
    caller: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    with Session(caller) as session:
        session.begin_nested()
        if not savepoints_are_safe(session.connection()):
            for push in pushes(queue, send_invoice, session):
                with pytest.raises(NotTransactional, match=r"begin_nested\(\).*BEGIN recipe"):
                    push()
            return
        send_invoice.push(session, 1)
        send_invoice.options(unique="one").push(session, 1)
        session.rollback()
        assert job_ids(observer, queue) == []

        session.add(Order(id=1))
        session.flush()
        with session.begin_nested() as savepoint:
            send_invoice.push(session, 1)
            assert send_invoice.options(unique="one").push(session, 1).created
            savepoint.rollback()
        with session.begin_nested():
            kept = send_invoice.options(unique="one").push(session, 1)
            assert kept.created
        assert job_ids(observer, queue) == []
        session.commit()
    assert (job_ids(observer, queue), order_ids(observer)) == ([kept.id], [1])


def test_a_push_after_a_savepoint_belongs_to_the_transaction(
    caller: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    """Also where the savepoint was the first statement, released or rolled back."""
    for end in ("commit", "rollback"):
        with Session(caller) as session:
            getattr(session.begin_nested(), end)()
            send_invoice.push(session, 1)
            assert job_ids(observer, queue) == []
            session.rollback()
            assert job_ids(observer, queue) == []
        with Session(caller) as session, session.begin():
            getattr(session.begin_nested(), end)()
            pushed = send_invoice.push(session, 1)
        assert job_ids(observer, queue) == [pushed.id]
        queue.clear("default")


def test_a_connections_savepoint_is_seen_too(caller: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with caller.connect() as connection:
        savepoint = connection.begin_nested()
        if savepoints_are_safe(connection):
            send_invoice.push(connection, 1)
        else:
            with pytest.raises(NotTransactional, match=r"savepoint|SAVEPOINT"):
                send_invoice.push(connection, 1)
        savepoint.commit()
        connection.rollback()
    assert job_ids(observer, queue) == []


def test_a_session_that_joins_with_a_savepoint_of_its_own(
    caller: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    """SQLAlchemy's recipe for test suites."""
    with caller.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            if savepoints_are_safe(connection):
                send_invoice.push(session, 1)
                session.commit()
                send_invoice.push(session, 2)
                session.rollback()
                jobs = queue.tables.jobs.c
                assert session.scalars(sa.select(jobs.payload)).all() == ['{"number":1}']
            else:
                with pytest.raises(NotTransactional, match="BEGIN recipe"):
                    send_invoice.push(session, 1)
        outer.rollback()
    assert job_ids(observer, queue) == []


# --- SQLite: the caller's rows and the job, with both ways to begin ---------------------------------------------------


def nothing_before(session: Session) -> None:
    return


def a_read_before(session: Session) -> None:
    session.scalars(sa.select(Order)).all()


def a_write_before(session: Session) -> None:
    session.add(Order(id=1))
    session.flush()


@pytest.mark.parametrize("before", [nothing_before, a_read_before, a_write_before])
def test_a_rollback_takes_the_job_along_whatever_came_before_it(
    before: Callable[[Session], None], caller: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    for job in (send_invoice, send_invoice.options(unique="one")):
        with Session(caller) as session:
            before(session)
            job.push(session, 1)
            queue.push_many(session, [job.bind(1)])
            assert job_ids(observer, queue) == []
            session.rollback()
            assert (job_ids(observer, queue), order_ids(observer)) == ([], [])
            before(session)
            pushed = job.push(session, 1)
            session.commit()
        assert job_ids(observer, queue) == [pushed.id]
        queue.clear("default")
        make_orders(queue.consumer.engine)


@pytest.mark.databases("sqlite")
def test_a_manual_driver_without_the_recipe_is_refused_until_somebody_begins(
    database: Database, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    engine = sa.create_engine(database.url)
    sa.event.listen(engine, "connect", lambda connection, record: setattr(connection, "isolation_level", None))
    with engine.connect() as connection:
        with pytest.raises(NotTransactional, match="BEGIN recipe"):
            send_invoice.push(connection, 1)
        connection.exec_driver_sql("BEGIN")
        send_invoice.push(connection, 1)
        assert job_ids(observer, queue) == []
        connection.exec_driver_sql("ROLLBACK")
    engine.dispose()
    assert job_ids(observer, queue) == []


@pytest.mark.databases("sqlite")
@pytest.mark.skipif(sys.version_info < (3, 12), reason="the driver has no autocommit attribute before Python 3.12")
def test_the_drivers_new_transaction_control_keeps_the_promise(
    database: Database, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    engine = sa.create_engine(database.url, connect_args={"autocommit": False})
    for before in (nothing_before, a_read_before, a_write_before, Session.begin_nested):
        with Session(engine) as session:
            before(session)
            send_invoice.push(session, 1)
            send_invoice.options(unique="one").push(session, 1)
            assert job_ids(observer, queue) == []
            session.rollback()
        assert (job_ids(observer, queue), order_ids(observer)) == ([], [])
    engine.dispose()
    autocommit = sa.create_engine(database.url, connect_args={"autocommit": True})
    with autocommit.connect() as connection, pytest.raises(NotTransactional, match="autocommit"):
        send_invoice.push(connection, 1)
    autocommit.dispose()


@pytest.mark.databases("sqlite")
def test_an_in_memory_database_takes_pushes(queue: Queue) -> None:
    engine = sa.create_engine("sqlite://")
    queue.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        assert queue.push_named(session, "stranger", {}).created
    with closing(engine.connect()) as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(queue.tables.jobs)) == 1
    engine.dispose()
