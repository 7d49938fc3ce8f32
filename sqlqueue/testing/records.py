"""
What tests look at: a job that was pushed, and what became of one that was run.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .._arguments import from_json
from .._driver.push import NewJob
from .._failure import Reason
from .._job import BoundJob
from .._options import Key, RowOptions
from .._queue.registry import Registry
from ..errors import SqlQueueError

__all__ = ["Arguments", "JobRun", "PushedJob", "arguments_of", "pushed_job"]

REDACTED = "[redacted]"


class Arguments:
    """
    A job's arguments, each an attribute, as its handler gets them: restored, defaults included.

    `a.invoice_id`, `a["invoice_id"]`; equal to a dict with the same arguments; `dict(a)` makes one. The options of the push
    are attributes, too (`a.queue`, `a.delay`, …), unless a parameter has their name.
    """

    __slots__ = ("_hidden", "_options", "_values")

    def __init__(self, values: Mapping[str, Any], hidden: Iterable[str] = (), options: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values)
        self._hidden = frozenset(hidden)
        self._options = options or {}

    def __getattr__(self, name: str) -> Any:
        if name in Arguments.__slots__:  # not there yet: a copy is being made
            raise AttributeError(name)
        for place in (self._values, self._options):
            if name in place:
                return place[name]
        raise AttributeError(f"there is no argument or option {name!r}; arguments: {', '.join(self._values) or 'none'}")

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._values.items())

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Arguments):
            return self._values == other._values
        return self._values == other if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # they may hold lists

    def __repr__(self) -> str:
        return ", ".join(f"{name}={REDACTED if name in self._hidden else reprlib.repr(value)}" for name, value in self)


@dataclass(frozen=True, slots=True)
class PushedJob:
    """
    A push that a fake has recorded.
    """

    id: int
    """Made up."""
    name: str
    arguments: Arguments
    queue: str
    priority: int
    delay: float
    """Seconds; 0 for a job that is due at once, or at `available_at`."""
    available_at: datetime | None
    max_attempts: int
    unique: str | Key | bool | None = field(repr=False)
    deadline: datetime | float | None
    """An instant, or seconds from the push."""
    headers: Mapping[str, str] = field(repr=False)

    def __str__(self) -> str:
        due = f", available_at={self.available_at.isoformat()}" if self.available_at else f", delay={self.delay:g}" if self.delay else ""
        priority = f", priority={self.priority}" if self.priority else ""
        return f"{self.name}({self.arguments!r}) on queue {self.queue}{priority}{due}"


@dataclass(frozen=True, slots=True)
class JobRun:
    """
    One run of a job, and how it ended.
    """

    id: int
    name: str
    queue: str
    attempt: int
    arguments: Arguments
    status: str
    """done, retrying, failed, released, discarded; lost when the lease was gone before the end; died with its worker."""
    note: str = ""
    error: BaseException | None = field(default=None, repr=False)
    """What the handler raised, when that was a failure."""
    reason: Reason | str | None = None
    """Why a claim moved the job to the failed table without running it."""

    def __str__(self) -> str:
        return f"{self.name}({self.arguments!r}), attempt {self.attempt}: {self.status}{f' ({self.note})' if self.note else ''}"


def pushed_job(registry: Registry, id: int, bound: BoundJob, job: NewJob) -> PushedJob:
    """
    What a test sees of a push.
    """
    options = bound.options
    seen: dict[str, Any] = {
        "queue": job.terms.queue,
        "priority": job.terms.priority,
        "delay": options.delay or 0.0,
        "available_at": options.available_at,
        "max_attempts": job.terms.max_attempts,
        "unique": options.unique,
        "deadline": options.deadline,
        "headers": from_json(job.terms.headers or "{}"),
    }
    all_options = {name: getattr(options, name) for name in RowOptions.__dataclass_fields__} | seen
    return PushedJob(id=id, name=bound.name, arguments=arguments_of(registry, bound.name, from_json(bound.payload), all_options), **seen)


def arguments_of(registry: Registry, name: str, payload: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Arguments:
    """
    A payload as the handler would get it; as it is where no handler would, and then nobody knows what of it may be shown.
    """
    try:
        job = registry.find(name)
        restored = job.signature.decode(payload)
    except SqlQueueError:
        return Arguments(payload, payload, options)
    return Arguments(job.signature.complete(restored), job.signature.sensitive, options)
