"""
Pushes of this process wake the workers of this process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

__all__ = ["Wakes"]


@dataclass(frozen=True, slots=True, eq=False)
class _Listener:
    queues: frozenset[str]
    wake: Callable[[], None]
    process: int


@dataclass(frozen=True, slots=True)
class _Pushed:
    """
    What a transaction has pushed that somebody here waits for.
    """

    connection: sa.Connection
    listeners: set[_Listener]


# Of transactions that have not ended. One that is rolled back is forgotten with its object.
_open: WeakKeyDictionary[SessionTransaction, _Pushed] = WeakKeyDictionary()


class Wakes:
    """
    The workers of this process that want to hear of pushes to their queues.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._listeners: tuple[_Listener, ...] = ()

    @contextmanager
    def heard_by(self, queues: Iterable[str], wake: Callable[[], None]) -> Iterator[None]:
        """
        Call `wake` after the commit of whatever is pushed to these queues meanwhile. It runs in the pusher's thread.
        """
        listener = _Listener(frozenset(queues), wake, os.getpid())
        with self._guard:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._guard:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

    def pushed(self, session: object, connection: sa.Connection, queues: Iterable[str]) -> None:
        """
        Something was pushed in this session's transaction. Whatever goes wrong here, the push has not.

        A plain Connection says only before its COMMIT that there will be one: too early to look.
        """
        if not self._listeners:
            return
        with suppress(Exception):  # without a wake the workers look by themselves
            _note(session, connection, {one for one in self._listeners if not one.queues.isdisjoint(queues)})


def _note(session: object, connection: sa.Connection, listeners: set[_Listener]) -> None:
    found = session() if isinstance(session, scoped_session) else session
    root = found.get_transaction() if listeners and isinstance(found, Session) else None
    if root is None:
        return
    assert isinstance(found, Session)
    if root not in _open:
        _open[root] = _Pushed(connection, set())
    _open[root].listeners.update(listeners)
    # On this session alone: to add a listener to all sessions would be seen by those that are just committing, in other threads.
    if not event.contains(found, "after_commit", _after_commit):
        event.listen(found, "after_commit", _after_commit)


def _after_commit(session: Session) -> None:
    if session.in_nested_transaction():
        return  # a savepoint was released
    root = session.get_transaction()
    pushed = None if root is None else _open.pop(root, None)
    # A session on a connection whose transaction began outside of it does not commit that one.
    if pushed is None or pushed.connection.in_transaction():
        return
    for listener in pushed.listeners:
        if listener.process == os.getpid():  # else its threads are in the parent of this fork
            with suppress(Exception):  # it would look as if the commit had failed
                listener.wake()
