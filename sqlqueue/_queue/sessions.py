"""
From what a caller hands us to the connection that the push belongs on.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from .._dialects import check_transactional
from ..errors import NotTransactional

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AnyAsyncSession: TypeAlias = AsyncSession | AsyncConnection | async_scoped_session[Any]

AnySession: TypeAlias = "Session | scoped_session[Any] | sa.Connection"

__all__ = ["AnySession", "check_async", "producer_connection"]


def producer_connection(session: object, table: sa.Table, method: str) -> sa.Connection:
    """
    The caller's connection, in the caller's transaction.

    Raises:
        TypeError: not a session or connection, or one for the asynchronous twin of `method`.
        NotTransactional: what is written there would not commit and roll back with the caller's work.
    """
    connection = _connection(session, table, method)
    if connection.in_transaction():
        check_transactional(connection)
        return connection
    begun = connection.begin()  # what its first statement would do; a BEGIN recipe has to run before the driver is asked
    try:
        check_transactional(connection)
    except NotTransactional:
        begun.rollback()  # leave it as it came
        raise
    return connection


def check_async(session: object, method: str) -> Any:
    """
    Raises:
        TypeError: not an AsyncSession or AsyncConnection.
    """
    if _is_async(session):
        return session if hasattr(session, "run_sync") else session()  # type: ignore[operator]  # a scoped one
    if isinstance(session, Session | scoped_session | sa.Connection):
        raise TypeError(f"{method}_async takes an AsyncSession or AsyncConnection; for a {type(session).__name__} call {method}")
    raise TypeError(f"{method}_async takes an AsyncSession or AsyncConnection first, not a {type(session).__name__}")


def _connection(session: object, table: sa.Table, method: str) -> sa.Connection:
    if isinstance(session, sa.Connection):
        return session
    if isinstance(session, scoped_session):
        session = session()
    if isinstance(session, Session):
        return _session_connection(session, table)
    if _is_async(session):
        raise TypeError(f"{method} takes a Session or Connection; for an {type(session).__name__} await {method}_async")
    raise TypeError(f"{method} takes a Session, scoped_session or Connection first, not a {type(session).__name__}")


def _session_connection(session: Session, table: sa.Table) -> sa.Connection:
    target = session.get_bind(clause=sa.insert(table))
    try:
        default: Any = session.get_bind()
    except UnboundExecutionError:  # only binds for single classes and tables: all of them have to agree
        default = next((bind for bind in _binds(session) if bind is not target), target)
    # Compared by identity: a Session gives an Engine with execution options a connection of its own.
    if default is not target:
        raise NotTransactional(
            f"this Session sends table {table.name} to {target.engine!r}, but its own work to {default.engine!r}: "
            "two transactions could not commit together"
        )
    return session.connection(bind_arguments={"bind": target})  # not asked again: a router may answer at random


def _binds(session: Session) -> list[Any]:
    known: Any = getattr(session, "binds", None)  # public since SQLAlchemy 2.1
    return list((getattr(session, "_Session__binds", {}) if known is None else known).values())


def _is_async(session: object) -> bool:
    # Importing the extension fails without greenlet; whoever has such a session has imported it.
    extension = sys.modules.get("sqlalchemy.ext.asyncio")
    if extension is None:
        return False
    return isinstance(session, extension.AsyncSession | extension.AsyncConnection | extension.async_scoped_session)
