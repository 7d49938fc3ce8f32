"""
Engines that a queue makes for itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from sqlalchemy.engine import Engine

from .._dialects import close_before_fork

__all__ = ["OwnEngine"]


class OwnEngine:
    """
    One engine a process, made when it is first needed.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._guard = threading.Lock()
        self._engine: Engine | None = None
        _ALL.add(self)

    def get(self) -> Engine:
        """
        This process's engine.
        """
        with self._guard:
            if self._engine is None:
                self._engine = self._make()
            return self._engine

    def close(self) -> None:
        """
        Give up the connections. The next one to be needed is opened anew.
        """
        with self._guard:
            if self._engine is not None:
                self._engine.dispose()

    def before_fork(self) -> None:
        # Without the lock, which another thread may hold for a while: at worst a connection of this moment stays open.
        engine = self._engine
        if engine is not None:
            close_before_fork(engine)

    def start_over(self) -> None:
        """
        In the child of a fork: the connections are the parent's, and the lock may be held by a thread that is not here.
        """
        self._guard = threading.Lock()
        if self._engine is not None:
            self._engine.dispose(close=False)
            self._engine = None


_ALL: weakref.WeakSet[OwnEngine] = weakref.WeakSet()


def _before_fork() -> None:
    for own in list(_ALL):
        own.before_fork()


def _after_fork() -> None:
    for own in list(_ALL):
        own.start_over()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
