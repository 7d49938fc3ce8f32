"""
What the tests of overlapping pushes share: callers with transactions of their own, held open for as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Barrier

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlqueue import Job, Key, Pushed, Queue
from sqlqueue._dialects import server_of
from tests.producers import ORDERS, is_conflict, wait_at_most

JobOfNumber = Job[[int], None]
A_MOMENT = 0.2


class Callers:
    """Connections of several callers, each with a transaction of its own at the same isolation level."""

    def __init__(self, engine: Engine, level: str | None, stack: ExitStack) -> None:
        self._engine = engine.execution_options(isolation_level=level) if level else engine
        self._stack = stack
        self.level = level

    def new(self, *, patience: int = 1) -> Connection:
        """A caller who gives up after some seconds where it has to wait."""
        return wait_at_most(self._stack.enter_context(self._engine.connect()), patience)


def levels(engine: Engine, *wanted: str) -> list[str | None]:
    """Those of the levels at which callers can work side by side; SERIALIZABLE makes InnoDB lock whatever it reads."""
    if not server_of(engine.dialect).row_locks:
        return [None]
    return [level for level in wanted if level != "SERIALIZABLE" or not server_of(engine.dialect).snapshot_reads]


EachLevel = Callable[..., Iterator[Callers]]
ALL_LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


def each_level(engine: Engine, queue: Queue) -> EachLevel:
    """Callers at one level after the other; whatever they leave open is rolled back, and the queue is emptied."""

    def each(*wanted: str) -> Iterator[Callers]:
        for level in levels(engine, *(wanted or ALL_LEVELS)):
            with ExitStack() as stack:
                yield Callers(engine, level, stack)
            with engine.begin() as connection:
                for table in (*queue.tables.all, ORDERS):
                    connection.execute(table.delete())

    return each


def take_a_snapshot(connection: Connection) -> None:
    connection.execute(sa.select(ORDERS)).all()


def complete_everything(queue: Queue) -> None:
    for delivery in queue.claim(limit=10):
        queue.complete(delivery)


def push_until_it_commits(job: JobOfNumber, caller: Connection, start: Barrier, key: str | Key = "one") -> tuple[Pushed, int]:
    """What a producer does about the database's own errors: its transaction once more. The job, and how often it took another try."""
    start.wait(10)
    for tries in range(20):
        try:
            pushed = job.options(unique=key).push(caller, 1)
            caller.commit()
            return pushed, tries
        except DBAPIError as error:
            caller.rollback()
            if not is_conflict(error):
                raise
    raise AssertionError("twenty conflicts in a row")
