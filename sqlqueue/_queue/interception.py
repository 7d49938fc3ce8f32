"""
Somebody who takes pushes before they become SQL: the testing kit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from .._driver.push import NewJob
from .._job import BoundJob, Pushed

__all__ = ["Interception", "Interceptor"]


class Interceptor(Protocol):
    """
    Is handed what has passed every check of a push, and answers in its place.
    """

    takes_any_session: bool
    """What the caller pushes on is not looked at: it may be a mock, or None."""

    def push(self, session: object, bound: BoundJob, job: NewJob, /) -> Pushed: ...


class Interception:
    """
    Who takes the pushes of a queue now: the innermost of those that are open, for all threads.
    """

    def __init__(self) -> None:
        self.current: Interceptor | None = None
        self._guard = threading.Lock()
        self._open: tuple[Interceptor, ...] = ()

    @contextmanager
    def by(self, interceptor: Interceptor) -> Iterator[None]:
        """
        Hand it every push meanwhile.
        """
        self._set(lambda others: (*others, interceptor))
        try:
            yield
        finally:
            # By identity: in other threads blocks may end in another order than they began.
            self._set(lambda others: tuple(other for other in others if other is not interceptor))

    def _set(self, change: Callable[[tuple[Interceptor, ...]], tuple[Interceptor, ...]]) -> None:
        with self._guard:
            self._open = change(self._open)
            self.current = self._open[-1] if self._open else None
