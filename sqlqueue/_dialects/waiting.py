"""
How to wait for a change in the database without asking for it again and again.
"""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import socket
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.engine.base import TwoPhaseTransaction

from .._tables import Tables
from .clock import after
from .engines import is_behind_a_pooler
from .server import server_of

__all__ = [
    "SLEEPERS_BELIEVED",
    "CannotWatch",
    "Watch",
    "WatchLost",
    "names_text",
    "open_watch",
    "wake_row_of",
    "wake_sleepers",
    "wakes_by_push",
]

SLEEPERS_BELIEVED = 60
"""Seconds without a sign of life after which a worker that is written down as asleep is taken for dead."""
LONGEST_NAME = 63  # of a channel, in bytes
LOOK_AT_FILE = 0.008


class WatchLost(Exception):
    """
    Its connection is gone, and with it whatever was to be heard.
    """


class CannotWatch(Exception):
    """
    It would never hear anything on this connection.
    """


class Watch(Protocol):
    """
    Hears of changes, on a connection of its own. For one thread.
    """

    by_register: bool
    """Pushes announce themselves only to workers that are written down as asleep: see `wake_sleepers`."""

    @property
    def connection(self) -> sa.Connection:
        """
        In autocommit: for the register of sleepers, as what is written here tells at once when the watch is lost; and for
        taking what has been announced.
        """

    def wait(self, timeout: float) -> bool:
        """
        Wait until there may be something new, at most so long; whether there may be. Whoever rings ends it, too.

        Raises:
            WatchLost: nothing more will be heard.
        """

    def announced(self) -> list[tuple[str, int, str]]:
        """
        The lanes (queue, priority, fair_by) of which it has heard since the last time; none where it only knows that
        something has changed.
        """

    def close(self) -> None:
        """
        Give up the connection.
        """


def open_watch(engine: Engine, tables: Tables, queues: Iterable[str], doorbell: socket.socket) -> Watch | None:
    """
    A watch for pushes to these queues, or None where there is nothing to wait for and only looking helps.

    Args:
        doorbell: as soon as it can be read, a wait is over.

    Raises:
        CannotWatch: not through this way to the server.
        DBAPIError: the database cannot be reached.
    """
    server = server_of(engine.dialect)
    if server.notifies:
        return _Listening(engine, channel_of(tables), frozenset(queues), doorbell)
    return _FileWatch(engine, doorbell) if server.counts_changes else None


def wakes_by_push(connection: sa.Connection) -> bool:
    """
    Whether a push here can announce itself. A transaction that does cannot be prepared for a two-phase commit.
    """
    return server_of(connection.dialect).notifies and not isinstance(connection.get_transaction(), TwoPhaseTransaction)


def wake_row_of(tables: Tables) -> sa.ColumnElement[Any]:
    """
    For RETURNING of an INSERT: announces the new row when it is committed, if somebody sleeps who watches its queue.

    To announce what nobody waits for would cost a transaction that pushes a quarter of its speed.
    """
    space = _constant("' '")
    lane = sa.func.concat(_QUEUE, space, sa.column("priority"), space, sa.column("fair_by"))
    return sa.case((_sleeper(tables), _announcement(tables, lane))).label("woken")


def wake_sleepers(tables: Tables) -> sa.ScalarSelect[int]:
    """
    Announces, when it is committed, that there is something in each queue of the array `queues` that a sleeper watches.
    """
    pushed = sa.select(sa.func.unnest(sa.bindparam("queues", type_=sa.ARRAY(sa.Text()))).label(_QUEUE.name)).subquery("pushed")
    return sa.select(sa.func.count(_announcement(tables, _QUEUE))).select_from(pushed).where(_sleeper(tables)).scalar_subquery()


_QUEUE: sa.ColumnClause[str] = sa.column("queue", sa.Text())
"""Of the row around it: SQLAlchemy knows no correlation to the table of an INSERT."""


def _announcement(tables: Tables, what: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
    # As text: what the function returns has a type that not every driver knows.
    return sa.cast(sa.func.pg_notify(_constant(f"'{channel_of(tables)}'"), sa.cast(what, sa.Text())), sa.Text())


def _sleeper(tables: Tables) -> sa.Exists:
    workers = tables.workers.c
    alive = workers.heartbeat > after(_constant(f"{-SLEEPERS_BELIEVED * 1_000_000}"))
    comma = _constant("','")
    return sa.exists().where(workers.asleep, alive, sa.func.strpos(workers.queues, sa.func.concat(comma, _QUEUE, comma)) > _constant("0"))


def _constant(sql: str) -> sa.ColumnElement[Any]:
    """
    Not a parameter: each costs time at both ends.
    """
    return sa.literal_column(sql)


def names_text(queues: Iterable[str]) -> str:
    """
    How a worker's queues are written down: each name stands between two commas.
    """
    return "".join(f",{queue}" for queue in queues) + ","


@lru_cache(maxsize=256)
def channel_of(tables: Tables) -> str:
    """
    Where pushes to these tables are announced. Tables of one name in two schemas that nobody named share it, which only wakes for nothing.
    """
    name = str(tables.jobs.fullname)
    if len(name.encode()) > LONGEST_NAME:
        return f"sqlqueue_{hashlib.sha256(name.encode()).hexdigest()[:40]}"
    return name


class _Listening:
    """
    LISTEN. What it hears is the name of a queue, or of a lane.
    """

    by_register = True

    def __init__(self, engine: Engine, channel: str, queues: frozenset[str], doorbell: socket.socket) -> None:
        self._queues = queues
        self._doorbell = doorbell
        self._heard = False
        self._lanes: set[tuple[str, int, str]] = set()
        self._driver: Any = None
        self.connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._selector = selectors.DefaultSelector()
        self._selector.register(doorbell, selectors.EVENT_READ)
        try:
            driver: Any = self.connection.connection.driver_connection
            self._driver = driver
            self.connection.detach()  # it stays open for long: the pool may have no other one
            if is_behind_a_pooler(driver):
                raise CannotWatch("a pooler stands before the server, and gives each transaction to another of its sessions")
            driver.add_notify_handler(self._hear)
            driver.prepare_threshold = 0  # all that is said here is said again and again
            settings = {
                "lock_timeout": "5000",
                "TimeZone": "UTC",
                "client_encoding": "UTF8",
                "default_transaction_isolation": "read committed",  # in autocommit there is no BEGIN that could say so
            }
            calls = (f"set_config('{name}', '{value}', false)" for name, value in settings.items())
            self.connection.exec_driver_sql(f"SELECT {', '.join(calls)}")
            quoted = engine.dialect.identifier_preparer.quote_identifier(channel)
            self.connection.exec_driver_sql(f"LISTEN {quoted}")
            self.connection.commit()
            self._selector.register(driver.fileno(), selectors.EVENT_READ)
        except BaseException:
            self.close()
            raise

    def wait(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while not self._heard:
            ready = [key.fileobj for key, _ in self._selector.select(max(until - time.monotonic(), 0.0))]
            if not ready or self._doorbell in ready:
                break
            self._read()
        heard, self._heard = self._heard, False
        return heard

    def _read(self) -> None:
        pg = self._driver.pgconn
        try:
            pg.consume_input()
            while (note := pg.notifies()) is not None:
                self._hear_of(note.extra.decode(errors="replace"))
        except Exception as error:  # the driver's own, not yet one of SQLAlchemy's
            raise WatchLost(str(error)) from error

    def _hear(self, note: Any) -> None:
        """
        What arrives while a statement runs, the driver reads.
        """
        self._hear_of(note.payload)

    def _hear_of(self, text: str) -> None:
        queue, *lane = text.split(" ")
        if queue not in self._queues:
            return
        self._heard = True
        with contextlib.suppress(ValueError):  # anybody may say anything here; to hear of the queue is enough
            priority, fair_by = lane
            self._lanes.add((queue, int(priority), fair_by))

    def announced(self) -> list[tuple[str, int, str]]:
        lanes, self._lanes = self._lanes, set()
        return list(lanes)

    def close(self) -> None:
        self._selector.close()
        self.connection.close()
        if self._driver is not None:
            self._driver.close()  # SQLAlchemy only lets go of one that it takes for lost and that no pool has


class _FileWatch:
    """
    A counter of SQLite's that changes whenever another connection has committed. To look at it reads no table.
    """

    by_register = False

    def __init__(self, engine: Engine, doorbell: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(doorbell, selectors.EVENT_READ)
        self.connection = engine.connect()
        self._driver: Any = self.connection.connection.driver_connection
        self.connection.detach()
        try:
            self._seen = self._version()
        except WatchLost:
            self.close()
            raise

    def wait(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while True:
            version = self._version()
            if version != self._seen:
                self._seen = version
                return True
            left = until - time.monotonic()
            if left <= 0 or self._selector.select(min(left, LOOK_AT_FILE)):
                return False

    def announced(self) -> list[tuple[str, int, str]]:
        return []

    def _version(self) -> int:
        try:
            version: int = self._driver.execute("PRAGMA data_version").fetchone()[0]
        except Exception as error:
            raise WatchLost(str(error)) from error
        return version

    def close(self) -> None:
        self._selector.close()
        self.connection.close()
        if self._driver is not None:
            self._driver.close()  # SQLAlchemy only lets go of one that it takes for lost and that no pool has
