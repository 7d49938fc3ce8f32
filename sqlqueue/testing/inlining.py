"""
`queue.inline()`: jobs that run here, after the commit of their push.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import overload

from .._arguments import from_json
from .._driver.push import NewJob
from .._job import BoundJob, Delivery, Pushed
from .._queue import Queue
from .._queue.consumer import host_name
from .._queue.sessions import producer_connection
from .._worker.shift import Held
from .._worker.telling import tell_ended
from .commits import Commits
from .draining import job_run, run_here
from .pushes import MADE_UP_IDS
from .records import JobRun

__all__ = ["InlineRuns", "inline"]

ENDLESS = 1000
LEASE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """
    A job whose transaction has not committed yet.
    """

    id: int
    job: NewJob
    deadline: datetime | None
    generation: int
    """How many jobs stand between it and a push that came from no job."""


class InlineRuns(Sequence[JobRun]):
    """
    The jobs that have run, in order.
    """

    takes_any_session = False

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._guard = threading.Lock()
        self._keys: dict[str, int] = {}
        self._running: set[int] = set()
        self._runs: list[JobRun] = []
        self._here = threading.local()
        self.commits: Commits[_Waiting] = Commits(self._run_all, self._free)

    @overload
    def __getitem__(self, place: int) -> JobRun: ...
    @overload
    def __getitem__(self, place: slice) -> list[JobRun]: ...
    def __getitem__(self, place: int | slice) -> JobRun | list[JobRun]:
        return self._runs[place]

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"<InlineRuns: {', '.join(f'{run.name} {run.status}' for run in self._runs) or 'none'}>"

    @property
    def errors(self) -> list[BaseException]:
        """
        What handlers have raised as failures.
        """
        return [run.error for run in self._runs if run.error is not None]

    def push(self, session: object, bound: BoundJob, job: NewJob, /) -> Pushed:
        """
        Take the place of a real push.
        """
        connection = producer_connection(session, self._queue.tables.jobs, "push")
        with self._guard:
            holder = None if job.key is None else self._keys.get(job.key)
            if holder is not None and not job.terms.hold.replaces:
                return Pushed(holder, created=False)
            created = holder is None or holder in self._running
            id = next(MADE_UP_IDS) if holder is None or created else holder
            if job.key is not None:
                self._keys[job.key] = id
        generation = getattr(self._here, "generation", 0)
        self.commits.note(session, connection, _Waiting(id, job, _instant(job.terms.deadline), generation))
        return Pushed(id, created=created)

    def _run_all(self, waiting: list[_Waiting]) -> None:
        """
        Run jobs in the order in which they were pushed; those that they push themselves after them, not inside of them.
        """
        waiting = list({one.id: one for one in waiting}.values())  # the last of those that have replaced each other
        line: deque[_Waiting] | None = getattr(self._here, "line", None)
        if line is not None:
            line.extend(waiting)
            return
        line = self._here.line = deque(waiting)
        try:
            while line:
                self._here.generation = line[0].generation + 1
                if line[0].generation > ENDLESS:
                    raise RuntimeError(f"{ENDLESS:,} jobs in a row have each pushed the next: there seems to be no last one")
                self._run(line.popleft())
        finally:
            self._here.line, self._here.generation = None, 0

    def _run(self, waiting: _Waiting) -> None:
        delivery = _delivery(waiting)
        hold = waiting.job.terms.hold
        with self._guard:
            self._running.add(waiting.id)
        if hold.until_started and not hold.kept_for:
            self._free([waiting])
        ended, error = run_here(self._queue, Held(delivery, time.monotonic()), lambda lease: True)
        with self._guard:
            self._running.discard(waiting.id)
            self._runs.append(job_run(self._queue, delivery, ended.status, ended.note, error))
        tell_ended(self._queue.listeners, delivery, host_name(), ended)
        if not hold.kept_for:  # else its time is not over before the block is
            self._free([waiting])

    def _free(self, ended: list[_Waiting]) -> None:
        with self._guard:
            for one in ended:
                if one.job.key is not None and self._keys.get(one.job.key) == one.id:
                    del self._keys[one.job.key]


@contextmanager
def inline(queue: Queue, *, raise_errors: bool = True) -> Iterator[InlineRuns]:
    """
    What `Queue.inline` does.
    """
    runs = InlineRuns(queue)
    try:
        with queue.interception.by(runs), runs.commits.watched():
            yield runs
    except BaseException as error:
        for run in runs:
            if run.error is not None:
                error.add_note(f"inside of queue.inline() a job had failed: {run}")
        raise
    if raise_errors and runs.errors:
        _raise(runs.errors)


def _raise(errors: list[BaseException]) -> None:
    if len(errors) > 1:
        raise BaseExceptionGroup(f"{len(errors)} jobs have failed inside of queue.inline()", errors)
    if isinstance(errors[0], Exception):
        raise errors[0]
    raise RuntimeError(f"a job has raised {type(errors[0]).__name__} inside of queue.inline()") from errors[0]  # not to end the tests


def _delivery(waiting: _Waiting) -> Delivery:
    terms = waiting.job.terms
    return Delivery(
        id=waiting.id,
        name=terms.name,
        queue=terms.queue,
        payload=from_json(waiting.job.payload),
        attempt=1,
        max_attempts=terms.max_attempts,
        token="inline",
        lease_until=datetime.now(UTC) + LEASE,
        headers={name: str(value) for name, value in from_json(terms.headers or "{}").items()},
        deadline=waiting.deadline,
        unique=waiting.job.key is not None,
    )


def _instant(when: datetime | float | None) -> datetime | None:
    return when if when is None or isinstance(when, datetime) else datetime.now(UTC) + timedelta(seconds=when)
