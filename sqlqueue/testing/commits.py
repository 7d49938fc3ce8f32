"""
What becomes of the transactions that something was pushed in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

__all__ = ["Commits"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Open(Generic[T]):
    """
    A transaction that has not ended, and what was noted in it.
    """

    session: Session | None
    root: Any
    driver: Any
    items: list[T] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    """By the names of its savepoints, how much had been noted when they began."""


class Commits(Generic[T]):
    """
    Keeps what is noted in a transaction until that commits or rolls back, with all or to a savepoint.

    Of a Session what counts is its own commit, of whatever lies on its connection below; and it has ended when its connection
    is given back. SQLAlchemy does not tell when a plain Connection has committed, only when it is about to.

    Args:
        committed: is handed what was noted in a transaction after its commit, in the thread that committed.
        dropped: is handed what was rolled back.
    """

    def __init__(self, committed: Callable[[list[T]], None], dropped: Callable[[list[T]], None]) -> None:
        self._committed = committed
        self._dropped = dropped
        self._guard = threading.RLock()
        self._open: dict[sa.Connection, _Open[T]] = {}
        self._ending: WeakKeyDictionary[SessionTransaction, bool] = WeakKeyDictionary()
        self._listening: list[tuple[Any, str, Callable[..., None]]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """
        What is open at the end is forgotten.
        """
        try:
            yield
        finally:
            with self._guard:
                for target, name, listener in self._listening:
                    if isinstance(target, Dialect):
                        _unhear(target, listener)
                    else:
                        event.remove(target, name, listener)
                self._listening.clear()
                self._open.clear()

    def note(self, session: object, connection: sa.Connection, item: T) -> None:
        """
        Something was pushed in the transaction of `session`, which is on this connection.
        """
        found = session() if isinstance(session, scoped_session) else session
        root = connection.get_transaction()
        with self._guard:
            known = self._open.get(connection)
            if known is None or known.root is not root:
                self._forget(connection)
                known = self._open[connection] = _Open(None, root, connection.connection)
            known.items.append(item)
            if isinstance(found, Session):
                known.session = found
                self._listen(found, "after_commit", self._session_commits)
                self._listen(found, "after_transaction_end", self._session_ends)
            else:
                self._listen(connection.dialect, "commit", self._driver_commits)
            self._listen(connection, "before_cursor_execute", self._executes)  # the event "savepoint" does not know its name
            self._listen(connection, "rollback_savepoint", self._rolls_back_to)
            self._listen(connection, "rollback", self._forget)

    def _listen(self, target: Any, name: str, listener: Callable[..., None]) -> None:
        if any(one is target and known == name for one, known, _ in self._listening):
            return
        self._listening.append((target, name, listener))
        if isinstance(target, Dialect):
            _hear(target, listener)
        else:
            event.listen(target, name, listener)

    def _executes(self, connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith("SAVEPOINT ") and (known := self._open.get(connection)) is not None:
            known.marks[statement.split()[1]] = len(known.items)

    def _rolls_back_to(self, connection: sa.Connection, name: str, context: object) -> None:
        with self._guard:
            if (known := self._open.get(connection)) is None:
                return
            begin = known.marks.get(name, 0)  # one without a mark began before all that is noted
            dropped, known.items[begin:] = known.items[begin:], []
        self._dropped(dropped)

    def _forget(self, connection: sa.Connection) -> None:
        """
        Whatever was noted on the connection has been rolled back, or is of a transaction that went without a word.
        """
        with self._guard:
            known = self._open.pop(connection, None)
        if known is not None:
            self._dropped(known.items)

    def _session_commits(self, session: Session) -> None:
        root = session.get_transaction()
        if root is not None and not session.in_nested_transaction():  # else a savepoint was released
            self._ending[root] = True

    def _session_ends(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is not None:
            return
        ended = self._ended(lambda known: known.session is session)
        (self._committed if self._ending.pop(transaction, False) else self._dropped)(ended)

    def _driver_commits(self, driver: object) -> None:
        self._committed(self._ended(lambda known: known.session is None and known.driver is driver))

    def _ended(self, which: Callable[[_Open[T]], bool]) -> list[T]:
        with self._guard:
            ended = [connection for connection, known in self._open.items() if which(known)]
            return [item for connection in ended for item in self._open.pop(connection).items]


# Of dialects whose commits somebody wants to hear of: the last word before the driver, and the first after it.
_hearing: dict[int, list[Callable[[Any], None]]] = {}
_hearing_guard = threading.Lock()


def _hear(dialect: Dialect, listener: Callable[[Any], None]) -> None:
    with _hearing_guard:
        if id(dialect) in _hearing:
            _hearing[id(dialect)].append(listener)
            return
        listeners = _hearing[id(dialect)] = [listener]
    commit = dialect.do_commit

    def commit_and_tell(driver: Any) -> None:
        commit(driver)
        for one in tuple(listeners):
            one(driver)

    vars(dialect)["do_commit"] = commit_and_tell  # of this dialect alone, not of its class


def _unhear(dialect: Dialect, listener: Callable[[Any], None]) -> None:
    with _hearing_guard:
        _hearing[id(dialect)].remove(listener)
        if not _hearing[id(dialect)]:
            del _hearing[id(dialect)], vars(dialect)["do_commit"]
