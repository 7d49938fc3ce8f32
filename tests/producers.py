"""
What the tests of pushing share: the caller's own rows, and looks at what the library does to a connection.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlqueue import Queue
from sqlqueue._dialects import Trouble, server_of, trouble_of


class Base(DeclarativeBase):
    pass


class Order(Base):
    """The caller's own work."""

    __tablename__ = "test_orders"
    __table_args__ = ({"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"},)

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(sa.String(100), default="")


ORDERS = Base.metadata.tables["test_orders"]


def make_orders(engine: Engine) -> None:
    """An empty table of orders."""
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(ORDERS.delete())


def job_ids(observer: Engine, queue: Queue) -> list[int]:
    """The jobs that somebody else can see."""
    with observer.connect() as connection:
        return list(connection.scalars(sa.select(queue.tables.jobs.c.id).order_by(queue.tables.jobs.c.id)))


def order_ids(observer: Engine) -> list[int]:
    """The orders that somebody else can see."""
    with observer.connect() as connection:
        return list(connection.scalars(sa.select(ORDERS.c.id).order_by(ORDERS.c.id)))


def only_job(observer: Engine, queue: Queue) -> sa.RowMapping:
    """The one job that is there."""
    with observer.connect() as connection:
        return connection.execute(sa.select(queue.tables.jobs)).mappings().one()


def key_names(observer: Engine, queue: Queue) -> list[str]:
    """The unique keys that somebody else can see."""
    with observer.connect() as connection:
        return sorted(connection.scalars(sa.select(queue.tables.keys.c.key)))


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """All that SQLAlchemy sends through the engine, savepoints included."""
    seen: list[str] = []

    def executed(connection: Connection, cursor: object, statement: str, *rest: object) -> None:
        seen.append(statement)

    def savepoint(connection: Connection, name: str, *rest: object) -> None:
        seen.append(f"SAVEPOINT {name}")

    event.listen(engine, "before_cursor_execute", executed)
    event.listen(engine, "savepoint", savepoint)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", executed)
        event.remove(engine, "savepoint", savepoint)


def inserts_at_server(connection: Connection, table: sa.Table) -> Callable[[], int]:
    """
    How many INSERTs the server has run for this connection since: SQLAlchemy shows one statement where a driver sends one for
    each row. On PostgreSQL `table` gets a trigger, which goes with the transaction.
    """
    server = server_of(connection.dialect)
    if not server.row_locks:
        traced: list[str] = []
        connection.connection.driver_connection.set_trace_callback(traced.append)  # type: ignore[union-attr]
        return lambda: sum(statement.startswith("INSERT") for statement in traced)
    if server.snapshot_reads:
        names = "'Com_insert', 'Com_insert_select'"

        def inserts() -> int:
            shown = connection.exec_driver_sql(f"SHOW SESSION STATUS WHERE Variable_name IN ({names})")
            return sum(int(count) for _, count in shown)

        before = inserts()
        return lambda: inserts() - before
    for statement in (
        "CREATE TEMPORARY SEQUENCE inserts MINVALUE 0",
        "CREATE FUNCTION pg_temp.count_insert() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM nextval(''pg_temp.inserts''); RETURN NULL; END'",
        f"CREATE TRIGGER count_insert AFTER INSERT ON {table.name} FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.count_insert()",
        "SELECT nextval('pg_temp.inserts')",
    ):
        connection.exec_driver_sql(statement)
    return lambda: int(connection.exec_driver_sql("SELECT last_value FROM pg_temp.inserts").scalar_one())


def wait_at_most(connection: Connection, seconds: int) -> Connection:
    """Let the transactions that are to come fail where they would wait longer for a lock; a second is the least that InnoDB knows."""
    dialect = connection.dialect
    if not server_of(dialect).row_locks:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {seconds * 1000}")
    elif server_of(dialect).snapshot_reads:
        connection.exec_driver_sql(f"SET innodb_lock_wait_timeout = {seconds}")
    else:
        connection.exec_driver_sql(f"SET lock_timeout = '{seconds}s'")
    connection.commit()
    return connection


def is_conflict(error: DBAPIError) -> bool:
    """The database says that another transaction was in the way."""
    return trouble_of(error) is Trouble.CONFLICT


def use_begin_recipe(engine: Engine) -> Engine:
    """SQLAlchemy's recipe: SQLite's driver begins nothing of its own, and every transaction begins with BEGIN."""

    @event.listens_for(engine, "connect")
    def connected(connection: object, record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def push_some_of(url: str, keys: list[str], rounds: int, seed: int) -> tuple[list[tuple[str, int]], int]:
    """
    A producer in a process of its own: two keys a transaction, in any order, and once more after a conflict.

    Returns the key and id of each job that it committed, and how many conflicts it met.
    """
    engine = sa.create_engine(url)
    queue = Queue()
    dice = random.Random(seed)
    written: list[tuple[str, int]] = []
    conflicts = 0
    for _ in range(rounds):
        chosen = dice.sample(keys, 2)
        while True:
            try:
                with engine.begin() as connection:
                    pushed = [(key, queue.push_named(connection, "stranger", {"key": key}, unique=key)) for key in chosen]
                    if dice.random() < 0.1:
                        connection.rollback()
                        pushed = []
                break
            except DBAPIError as error:
                if not is_conflict(error):
                    raise
                conflicts += 1
        written += [(key, push.id) for key, push in pushed if push.created]
    engine.dispose()
    return written, conflicts


def ask_once(url: str, keys: list[str], seed: int) -> tuple[list[str], int]:
    """
    Ask for each key in an order of its own, in a process of its own, and once more after a conflict.

    Returns the keys for which this was the first time, and how many conflicts there were.
    """
    engine = sa.create_engine(url)
    queue = Queue()
    first: list[str] = []
    conflicts = 0
    for key in random.Random(seed).sample(keys, len(keys)):
        while True:
            try:
                with engine.begin() as connection:
                    if queue.once(connection, key):
                        first.append(key)
                break
            except DBAPIError as error:
                if not is_conflict(error):
                    raise
                conflicts += 1
    engine.dispose()
    return first, conflicts
