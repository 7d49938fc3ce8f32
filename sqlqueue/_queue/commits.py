"""
The moment at which a Session has committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

__all__ = ["Open", "open_transaction"]

Action = Callable[[], object]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Open:
    """
    A transaction of a session that has not ended, and what is to be done when it is committed.
    """

    connection: sa.Connection
    _always: dict[object, Action] = field(default_factory=dict)
    _written: list[tuple[frozenset[str], Action]] = field(default_factory=list)

    def do(self, action: Action) -> None:
        """
        Do this once after the commit, however often it is asked for.
        """
        self._always[action] = action

    def do_if_kept(self, action: Action) -> None:
        """
        Do this after the commit, unless what was just written is rolled back to a savepoint before.
        """
        self._written.append((frozenset(_savepoints(self.connection)), action))
        if not event.contains(self.connection, "rollback_savepoint", _after_savepoint):
            event.listen(self.connection, "rollback_savepoint", _after_savepoint)
        _by_connection[self.connection] = ref(self)

    def undo(self, savepoint: str) -> None:
        """
        What was written since is gone.
        """
        self._written = [one for one in self._written if savepoint not in one[0]]

    def finish(self) -> None:
        """
        It is committed.
        """
        for action in (*self._always.values(), *(action for _, action in self._written)):
            with suppress(Exception):  # it would look as if the commit had failed
                action()


# One that is rolled back is forgotten with its object.
_open: WeakKeyDictionary[SessionTransaction, Open] = WeakKeyDictionary()
_by_connection: WeakKeyDictionary[sa.Connection, ref[Open]] = WeakKeyDictionary()


def open_transaction(session: object, connection: sa.Connection) -> Open | None:
    """
    The transaction that a session is in on this connection; None for a plain Connection, which says only before its COMMIT
    that there will be one: too early.
    """
    found = session() if isinstance(session, scoped_session) else session
    root = found.get_transaction() if isinstance(found, Session) else None
    if root is None:
        return None
    assert isinstance(found, Session)
    if root not in _open:
        _open[root] = Open(connection)
    # On this session alone: to add a listener to all sessions would be seen by those that are just committing, in other threads.
    if not event.contains(found, "after_commit", _after_commit):
        event.listen(found, "after_commit", _after_commit)
    return _open[root]


def _after_commit(session: Session) -> None:
    if session.in_nested_transaction():
        return  # a savepoint was released
    root = session.get_transaction()
    opened = None if root is None else _open.pop(root, None)
    # A session on a connection whose transaction began outside of it does not commit that one.
    if opened is not None and not opened.connection.in_transaction():
        opened.finish()


def _savepoints(connection: sa.Connection) -> Iterator[str]:
    """
    The names of the savepoints that are open, which SQLAlchemy tells when it rolls back to one.
    """
    nested: Any = connection.get_nested_transaction()
    while nested is not None:
        yield nested._savepoint
        nested = nested._previous_nested


def _after_savepoint(connection: sa.Connection, name: str, context: object) -> None:
    known = _by_connection.get(connection)
    if known is not None and (opened := known()) is not None:
        opened.undo(name)
