"""
Time that tests move on.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .._backoff import seconds as duration
from .._driver.testing import move_back
from .._queue import Queue
from .draining import call_async
from .steps import Target, steps_on

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from .._queue.sessions import AnyAsyncSession

__all__ = ["Clock"]

LONGEST = 1000 * 366 * 86_400.0


class Clock:
    """
    Lets time go by for the jobs that are there: due times, backoff, leases, deadlines, unique windows, failure records.

    The database's clock stays as it is; every moment in the queue's tables moves back instead, in one transaction. So it works
    for all processes that use these tables. Moments that a test computes itself, for `available_at`, are counted from the
    real clock. A worker that runs meanwhile keeps what it has in memory: a lease that ends this way is one that it loses.

    Args:
        on: an Engine, or the test's own Session or Connection, in whose transaction it happens. The queue's own database if
            not given.

    Example:
        ```python
        clock = Clock(queue)
        clock.advance(hours=1)
        queue.drain()
        ```
    """

    def __init__(self, queue: Queue, on: Target | AsyncEngine | AnyAsyncSession = None, /) -> None:
        self._queue = queue
        self._on: Any = on

    def advance(self, by: float | timedelta = 0, /, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> None:
        """
        Let so much time go by: seconds or a timedelta, or in units.

        Raises:
            OptionError: negative, or longer than a thousand years.
        """
        self._move(self._on, _length(by, days, hours, minutes, seconds))

    async def advance_async(
        self, by: float | timedelta = 0, /, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """
        `advance` on an AsyncEngine, AsyncSession or AsyncConnection.
        """
        length = _length(by, days, hours, minutes, seconds)
        await call_async(self._on, "advance", lambda on: self._move(on, length))

    def _move(self, on: Target, length: float) -> None:
        with steps_on(self._queue, on, "advance") as steps:
            steps.run(lambda connection: move_back(connection, self._queue.tables, length))


def _length(by: float | timedelta, days: float, hours: float, minutes: float, seconds: float) -> float:
    units = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return duration(by, "by", maximum=LONGEST) + duration(units, "by", maximum=LONGEST)
