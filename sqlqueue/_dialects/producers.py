"""
Whether what is written on a caller's connection commits and rolls back with the caller's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError

from .._tables import INNODB
from ..errors import NotTransactional
from .trouble import Trouble, trouble_of

__all__ = ["check_transactional", "closed_when_undone", "left_when_undone"]

UNDONE = ((1213,), (1020,))  # a deadlock; MariaDB's strict snapshots
_WATCHED = "sqlqueue_left_when_undone"
SQLITE_RECIPE = (
    "see «Serializable isolation / Savepoints / Transactional DDL» in SQLAlchemy's SQLite dialect documentation: "
    "isolation_level=None on connect, BEGIN on begin"
)


def check_transactional(connection: sa.Connection) -> None:
    """
    Ask the driver, without a round trip.

    Raises:
        NotTransactional: a push here would be committed at once, or could outlive the caller's rollback.
    """
    if connection.dialect.name == "sqlite":
        _check_sqlite(connection)
    elif _in_autocommit(_driver_connection(connection)) or _in_autocommit(connection.connection.dbapi_connection):
        raise NotTransactional(
            "this connection is in autocommit: the job would exist at once, whatever becomes of your work; "
            "push on a connection with transactions (no isolation_level='AUTOCOMMIT')"
        )


@contextmanager
def closed_when_undone(connection: sa.Connection) -> Iterator[None]:
    """
    Let nothing more be sent before the caller rolls back, where the server has undone the whole transaction.

    InnoDB does that at a deadlock, and goes on in a new transaction: who caught the error could commit what came after,
    without what came before. It forgets the savepoints too, and rolling back to one would hide the deadlock.
    """
    try:
        yield
    except DBAPIError as error:
        if connection.dialect.name in INNODB and _is_undone(error.orig):
            connection.invalidate(error)
        raise


@contextmanager
def left_when_undone(connection: sa.Connection) -> Iterator[None]:
    """
    The same for every statement on this connection, whoever sends it: until a rollback nothing more can be sent.
    """
    if not event.contains(connection.engine, "handle_error", _leave):
        event.listen(connection.engine, "handle_error", _leave)
    info = connection.info
    info[_WATCHED] = True
    try:
        yield
    finally:
        info.pop(_WATCHED, None)


def _leave(context: ExceptionContext) -> None:
    connection, error = context.connection, context.sqlalchemy_exception
    if connection is None or connection.invalidated or not isinstance(error, DBAPIError) or _WATCHED not in connection.info:
        return
    if connection.dialect.name in INNODB:
        undone = _is_undone(error.orig)
    else:  # SQLite rolls back by itself when it cannot write
        undone = connection.dialect.name == "sqlite" and trouble_of(error) in (Trouble.UNAVAILABLE, Trouble.LOST)
    if undone:
        context.is_disconnect, context.invalidate_pool_on_disconnect = True, False


def _is_undone(origin: BaseException | None) -> bool:
    return origin is not None and origin.args[:1] in UNDONE


def _check_sqlite(connection: sa.Connection) -> None:
    driver = _driver_connection(connection)
    driver = getattr(driver, "_conn", driver)  # aiosqlite wraps the real one
    if getattr(driver, "autocommit", -1) is True or (_manual(driver) and not driver.in_transaction):
        raise NotTransactional(
            "this SQLite connection is in autocommit: the job would exist at once, whatever becomes of your work; "
            f"use the driver's own transactions or SQLAlchemy's BEGIN recipe ({SQLITE_RECIPE})"
        )
    if connection.in_nested_transaction() and not _manual(driver) and getattr(driver, "autocommit", -1) == -1:
        raise NotTransactional(
            "a push inside begin_nested() with SQLite's stock driver could survive your rollback: the driver opens no "
            f"transaction before a SAVEPOINT. Push outside of it, or use SQLAlchemy's BEGIN recipe ({SQLITE_RECIPE})"
        )


def _manual(driver: Any) -> bool:
    """
    The driver issues no BEGIN of its own: somebody else's recipe does, or nobody.
    """
    return driver.isolation_level is None and getattr(driver, "autocommit", -1) == -1


def _driver_connection(connection: sa.Connection) -> Any:
    pooled = connection.connection
    return getattr(pooled, "driver_connection", None) or pooled.dbapi_connection


def _in_autocommit(driver: Any) -> bool:
    ask = getattr(driver, "get_autocommit", None)  # PyMySQL, mysqlclient, asyncmy, aiomysql
    if callable(ask):
        return bool(ask())
    flag = getattr(driver, "autocommit", None)  # psycopg, psycopg2, pg8000, SQLAlchemy's adapter for asyncpg
    return flag if isinstance(flag, bool) else False
