"""
What is told to listeners. No event carries values of arguments.

    Event
    ├── JobEvent                     name, queue, headers
    │   ├── JobPushing               is about to be written
    │   ├── JobPushed                is written, in a transaction that is open
    │   ├── JobCommitted             exists, its transaction has been committed
    │   └── DeliveryEvent            id, attempt, max_attempts, worker
    │       ├── JobProcessing        its handler is about to run
    │       ├── JobTimedOut          its handler ran longer than its timeout
    │       ├── JobAttempted         its handler has run, whatever came of it
    │       └── FinalEvent           at most one for each delivery, after its end has been written
    │           ├── JobProcessed     done
    │           ├── JobRetrying      raised, and will be tried again
    │           ├── JobReleased      put back, without costing an attempt
    │           ├── JobFailed        in the failed table
    │           ├── JobDiscarded     deleted on its handler's word
    │           └── JobSettlementLost  its end could not be written: somebody else has it, or it is gone
    └── WorkerEvent                  worker, queues
        ├── WorkerStarting           is about to take its first job
        ├── WorkerLooping            looks for jobs
        ├── WorkerStopping           takes no more jobs
        └── WorkerInterrupted        hands back what runs, and ends at once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._failure import Reason

__all__ = [
    "DeliveryEvent",
    "Event",
    "FinalEvent",
    "JobAttempted",
    "JobCommitted",
    "JobDiscarded",
    "JobEvent",
    "JobFailed",
    "JobProcessed",
    "JobProcessing",
    "JobPushed",
    "JobPushing",
    "JobReleased",
    "JobRetrying",
    "JobSettlementLost",
    "JobTimedOut",
    "WorkerEvent",
    "WorkerInterrupted",
    "WorkerLooping",
    "WorkerStarting",
    "WorkerStopping",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """
    Something that happened in this process.
    """


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent(Event):
    """
    Something that happened to a job.
    """

    name: str
    queue: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPushing(JobEvent):
    """
    A push has passed every check, and is about to write. Another job may still hold its unique key.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPushed(JobEvent):
    """
    A job was written, in a transaction that may still be rolled back. Not told of a push that another job's unique key kept out,
    nor of one that has replaced what a waiting job is to do.
    """

    id: int | None
    """None for a job without a unique key that was written by `push_many` or `publish`: they do not ask for ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCommitted(JobEvent):
    """
    The Session that wrote a job has committed it. Of a plain Connection nobody hears that; a worker sees the job all the same.
    """

    id: int | None
    """As in `JobPushed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryEvent(JobEvent):
    """
    Something that happened to a delivery: one worker, one attempt.
    """

    id: int
    attempt: int
    max_attempts: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProcessing(DeliveryEvent):
    """
    A handler is about to run, in this thread.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimedOut(DeliveryEvent):
    """
    A handler ran longer than its timeout. What becomes of the job is told later.
    """

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAttempted(DeliveryEvent):
    """
    A handler has run, in this thread. The outcome is not written yet.
    """

    seconds: float
    status: str
    """What is going to be written: done, retrying, failed, released or discarded. With a transactional handler done is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalEvent(DeliveryEvent):
    """
    How a delivery ended. At most one for each, after that has been written.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProcessed(FinalEvent):
    """
    The job is done, and its row deleted.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRetrying(FinalEvent):
    """
    The attempt failed; the job is back on its queue.
    """

    delay: float
    """Seconds until it is due again."""
    error_class: str | None
    message: str
    """What was raised, as text; values of `Sensitive` arguments are redacted in it."""
    traceback: str | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReleased(FinalEvent):
    """
    The job is back on its queue, the attempt given back: by its handler, or because its worker had to end.
    """

    delay: float
    """Seconds until it is due again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed(FinalEvent):
    """
    The job is in the failed table. Also told by a claim that finds a job which must not run, as after the death of its worker.
    """

    reason: Reason
    error_class: str | None
    message: str
    """As in `JobRetrying`."""
    traceback: str | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDiscarded(FinalEvent):
    """
    The job was deleted because its handler said so.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettlementLost(FinalEvent):
    """
    The handler has run, and its end could not be written: the lease was over and the job is somebody else's, or gone.
    """

    status: str
    """What would have been written."""


# --- workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent(Event):
    """
    Something that a worker does.
    """

    worker: str
    queues: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarting(WorkerEvent):
    """
    A worker has reached the database, and is about to take its first job.
    """

    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLooping(WorkerEvent):
    """
    A worker is about to look for jobs. Many times a second.
    """

    free: int
    """How many it could start at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopping(WorkerEvent):
    """
    A worker takes no more jobs. Running ones may still finish.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInterrupted(WorkerEvent):
    """
    A second signal, or the end of `shutdown_timeout`: running jobs are handed back, and the worker ends at once.
    """

    reason: str
    running: tuple[int, ...]
    """The ids of the jobs that are handed back."""
