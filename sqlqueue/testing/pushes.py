"""
`queue.fake()`: pushes that are recorded and not written.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from .._driver.push import NewJob
from .._job import BoundJob, Job, Pushed
from .._queue import Queue
from .._queue.registry import Registry
from .records import PushedJob, pushed_job

__all__ = ["MADE_UP_IDS", "Pushes", "fake"]

MADE_UP_IDS = itertools.count(1)
MOST_LISTED = 20

Predicate = Callable[[Any], object]
AnyJob = Job[..., Any] | str


class Pushes(Sequence[PushedJob]):
    """
    What was pushed, in order, and assertions about it.

    A predicate is handed the job's `Arguments`: `lambda a: a.order_id == 1 and a.delay == 60`.
    """

    takes_any_session = True

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._guard = threading.Lock()
        self._records: list[PushedJob] = []
        self._keys: dict[str, int] = {}

    @overload
    def __getitem__(self, place: int) -> PushedJob: ...
    @overload
    def __getitem__(self, place: slice) -> list[PushedJob]: ...
    def __getitem__(self, place: int | slice) -> PushedJob | list[PushedJob]:
        return self._records[place]

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<{len(self)} pushed: {self._listed()}>"

    def push(self, session: object, bound: BoundJob, job: NewJob, /) -> Pushed:
        """
        Take the place of a real push.
        """
        with self._guard:
            holder = None if job.key is None else self._keys.get(job.key)
            if holder is not None:
                if job.terms.hold.replaces:
                    replacement = pushed_job(self._registry, holder, bound, job)
                    self._records = [replacement if one.id == holder else one for one in self._records]
                return Pushed(holder, created=False)
            id = next(MADE_UP_IDS)
            record = pushed_job(self._registry, id, bound, job)
            if job.key is not None:
                self._keys[job.key] = id
            self._records.append(record)
        return Pushed(id, created=True)

    def of(self, job: AnyJob, predicate: Predicate | None = None, /) -> list[PushedJob]:
        """
        The pushes of a job, given itself or by name, whose arguments and options the predicate likes.
        """
        name = _name_of(job)
        return [one for one in self._records[:] if one.name == name and (predicate is None or predicate(one.arguments))]

    def clear(self) -> None:
        """
        Forget what was pushed so far; unique keys are free again.
        """
        with self._guard:
            self._records.clear()
            self._keys.clear()

    def assert_pushed(self, job: AnyJob, predicate: Predicate | None = None, /, *, times: int | None = None) -> list[PushedJob]:
        """
        The job was pushed: at least once, or exactly so many times. Returns the pushes that fit.
        """
        __tracebackhide__ = True
        found = self.of(job, predicate)
        if times is None and not found:
            self._refuse(f"{_name_of(job)} was not pushed{_that_fits(predicate)}")
        if times is not None and len(found) != times:
            self._refuse(f"{_name_of(job)} was pushed {_times(len(found))}{_that_fits(predicate)}, not {_times(times)}")
        return found

    def assert_pushed_once(self, job: AnyJob, predicate: Predicate | None = None, /) -> PushedJob:
        """
        The job was pushed exactly once. Returns that push.
        """
        __tracebackhide__ = True
        return self.assert_pushed(job, predicate, times=1)[0]

    def assert_not_pushed(self, job: AnyJob, predicate: Predicate | None = None, /) -> None:
        """
        The job was not pushed.
        """
        __tracebackhide__ = True
        self.assert_pushed(job, predicate, times=0)

    def assert_nothing_pushed(self) -> None:
        """
        Nothing at all was pushed.
        """
        __tracebackhide__ = True
        if self._records:
            self._refuse("something was pushed")

    def _refuse(self, what: str) -> None:
        __tracebackhide__ = True
        raise AssertionError(f"{what}; pushed were: {self._listed()}")

    def _listed(self) -> str:
        records = self._records[:]
        lines = [f"\n  {record}" for record in records[:MOST_LISTED]]
        if len(records) > MOST_LISTED:
            lines.append(f"\n  … and {len(records) - MOST_LISTED} more")
        return "".join(lines) or "nothing"


@contextmanager
def fake(queue: Queue) -> Iterator[Pushes]:
    """
    What `Queue.fake` does.
    """
    pushes = Pushes(queue.registry)
    with queue.interception.by(pushes):
        yield pushes


def _name_of(job: AnyJob) -> str:
    if isinstance(job, Job):
        return job.name
    if isinstance(job, str):
        return job
    raise TypeError(f"name a job, itself or as text, not a {type(job).__name__}")


def _that_fits(predicate: Predicate | None) -> str:
    return "" if predicate is None else " with arguments that fit"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
