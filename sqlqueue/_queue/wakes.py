"""
Pushes of this process wake the workers of this process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import sqlalchemy as sa

from .commits import open_transaction

__all__ = ["Wakes"]


@dataclass(frozen=True, slots=True, eq=False)
class _Listener:
    queues: frozenset[str]
    wake: Callable[[], None]
    process: int

    def hear(self) -> None:
        if self.process == os.getpid():  # else its threads are in the parent of this fork
            self.wake()


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
        """
        if not self._listeners:
            return
        with suppress(Exception):  # without a wake the workers look by themselves
            listeners = [one for one in self._listeners if not one.queues.isdisjoint(queues)]
            if listeners and (opened := open_transaction(session, connection)) is not None:
                for one in listeners:
                    opened.do(one.hear)
