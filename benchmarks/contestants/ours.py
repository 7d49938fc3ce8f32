"""
sqlqueue: `push` and `push_many` in the caller's transaction, `Worker` with its defaults.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlqueue import Queue, Worker

from .base import Contestant, seconds_of, serve

COUNTS = struct.Struct("<qq")
BUSINESS = sa.Table("bench_orders", sa.MetaData(), sa.Column("id", sa.Integer(), primary_key=True), sa.Column("note", sa.String(50)))
ORDER = BUSINESS.insert().inline()  # nobody asks for its number


def engine_for(url: str) -> sa.Engine:
    return sa.create_engine(url)


def clear_tables(engine: sa.Engine, *tables: sa.Table) -> None:
    """Empty, as new: what one contestant has left behind must not slow the next one down."""
    with engine.begin() as connection:
        for table in tables:
            name = engine.dialect.identifier_preparer.format_table(table)
            connection.exec_driver_sql(f"DELETE FROM {name}" if engine.dialect.name == "sqlite" else f"TRUNCATE TABLE {name}")
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")


class Ours(Contestant):
    def __init__(self, url: str, **settings: object) -> None:
        super().__init__(url, **settings)
        self.queue = Queue()
        self.stamp: Callable[[int], None] = lambda number: None

        @self.queue.job(name="noop")
        def noop(number: int) -> None:
            self.stamp(number)

        self.noop = noop

    def install(self) -> None:
        engine = engine_for(self.url)
        if engine.dialect.name == "sqlite":
            with engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        for metadata in (self.queue.metadata, BUSINESS.metadata):
            metadata.drop_all(engine)
            metadata.create_all(engine)
        engine.dispose()

    def clear(self) -> None:
        clear_tables(engine_for(self.url), self.queue.tables.jobs, BUSINESS)

    def push_each(self, count: int) -> float:
        engine = engine_for(self.url)

        def push_all(numbers: range) -> None:
            for number in numbers:
                with engine.begin() as connection:
                    connection.execute(BUSINESS.insert().values(note="an order"))
                    self.noop.push(connection, number)

        push_all(range(20))
        return seconds_of(lambda: push_all(range(count)))

    def push_bulk(self, count: int) -> float:
        engine = engine_for(self.url)

        def push_all() -> None:
            with engine.begin() as connection:
                self.queue.push_many(connection, [self.noop.bind(number) for number in range(count)])

        engine.connect().close()
        return seconds_of(push_all)

    @contextlib.contextmanager
    def pusher(self) -> Iterator[Callable[[int], object]]:
        engine = engine_for(self.url)

        def push(number: int) -> None:
            with engine.begin() as connection:
                self.noop.push(connection, number)

        yield push

    _watching: sa.Engine | None = None

    def is_empty(self) -> bool:
        if self._watching is None:
            self._watching = engine_for(self.url)
        with self._watching.connect() as connection:
            return connection.execute(sa.select(self.queue.tables.jobs.c.id).limit(1)).first() is None

    def work(self, stamp: Callable[[int], None]) -> None:
        self.stamp = stamp
        if "count_into" in self.settings:
            count_statements(Path(self.settings["count_into"]))
        self.queue.configure(self.url)
        Worker(self.queue).run()

    def work_writing(self, stamp: Callable[[int], None]) -> None:
        queue = Queue(self.url)

        @queue.job(name="noop")
        def write(session: Session, number: int) -> None:
            stamp(number)
            session.execute(ORDER, {"note": "an order"})

        Worker(queue, concurrency=4).run()


def count_statements(path: Path) -> None:
    """Write how many statements and how many ends of transactions this process has sent into a file, as they come."""
    with path.open("w+b") as file:
        file.truncate(COUNTS.size)
        memory = mmap.mmap(file.fileno(), COUNTS.size)
    counts = [0, 0]

    def count(place: int) -> None:
        counts[place] += 1
        COUNTS.pack_into(memory, 0, *counts)

    @sa.event.listens_for(sa.Engine, "before_cursor_execute")
    def executed(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if "data_version" not in statement:  # asks the file, not the database
            count(0)

    for name in ("commit", "rollback"):
        sa.event.listen(sa.Engine, name, lambda connection: count(1))


if __name__ == "__main__":
    serve(Ours)
