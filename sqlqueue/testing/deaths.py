"""
Workers that die at a chosen moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args
from weakref import WeakKeyDictionary

from .._job import Delivery, Job
from .._queue import Queue
from ..errors import OptionError

__all__ = ["Death", "dies_now", "worker_dies"]

Moment = Literal["before_run", "before_settle"]


class Death:
    """
    One death of a worker, to come or past.
    """

    def __init__(self, at: Moment, name: str | None) -> None:
        self.at = at
        self.died = False
        """It has come to that."""
        self._name = name

    def strikes(self, at: Moment, delivery: Delivery) -> bool:
        """
        Whether the worker dies here. It dies once.
        """
        if self.died or at != self.at or self._name not in (None, delivery.name):
            return False
        self.died = True
        return True


_expected: WeakKeyDictionary[Queue, tuple[Death, ...]] = WeakKeyDictionary()


@contextmanager
def worker_dies(queue: Queue, *, at: Moment = "before_settle", job: Job[..., object] | str | None = None) -> Iterator[Death]:
    """
    Let the next delivery that `queue.drain` works end as if its process had been killed, and the drain with it.

    The row stays as a dead worker leaves it: under its lease. When that has ended, move the clock beyond it, the job runs
    again: with one attempt less, and as a check that the handler can bear that.

    Args:
        at: "before_settle": the handler has run, nobody wrote down how it ended. "before_run": it was claimed, and not begun.
        job: which job the worker dies of; the first that comes if not given.

    Raises:
        AssertionError: at the end of the block, when it has not come to that.

    Example:
        ```python
        with worker_dies(queue):
            queue.drain()
        Clock(queue).advance(minutes=2)
        queue.drain()
        assert mails_sent == 1
        ```
    """
    if at not in get_args(Moment):
        raise OptionError(f"at: {' or '.join(f'{one!r}' for one in get_args(Moment))}, not {at!r}")
    death = Death(at, job.name if isinstance(job, Job) else job)
    _expected[queue] = (*_expected.get(queue, ()), death)
    try:
        yield death
    finally:
        _expected[queue] = tuple(other for other in _expected[queue] if other is not death)
    if not death.died:
        raise AssertionError("no worker died: queue.drain() was not called in the block, or nothing was due that it could die of")


def dies_now(queue: Queue, at: Moment, delivery: Delivery) -> bool:
    """
    Whether the worker of this delivery dies at this moment.
    """
    return any(death.strikes(at, delivery) for death in _expected.get(queue, ()))
