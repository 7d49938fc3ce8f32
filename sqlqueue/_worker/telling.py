"""
What a worker tells the listeners of its queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import _events as events
from .._executor import Ended, Status
from .._failure import Reason
from .._job import Delivery
from .._queue.listeners import Listeners
from .._queue.telling import about, tell_lost, tell_settled

if TYPE_CHECKING:
    from .shift import Held, Shift

__all__ = ["tell_attempted", "tell_ended", "tell_interrupted", "tell_looking", "tell_processing", "tell_starting", "tell_stopping"]


def tell_processing(listeners: Listeners, delivery: Delivery, worker: str) -> None:
    """
    Tell that a handler is about to run.
    """
    if listeners.hear(events.JobProcessing):
        listeners.tell(events.JobProcessing(**about(delivery, worker)))


def tell_attempted(listeners: Listeners, delivery: Delivery, worker: str, ended: Ended, seconds: float) -> None:
    """
    Tell that a handler has run, and before that whether for too long.
    """
    failure = ended.failure
    if failure is not None and failure.reason is Reason.TIMED_OUT and listeners.hear(events.JobTimedOut):
        listeners.tell(events.JobTimedOut(**about(delivery, worker), seconds=seconds))
    if listeners.hear(events.JobAttempted):
        listeners.tell(events.JobAttempted(**about(delivery, worker), seconds=seconds, status=str(ended.status)))


def tell_ended(listeners: Listeners, delivery: Delivery, worker: str, ended: Ended, *, lost: bool = False) -> None:
    """
    Tell how a delivery ended, once that is written; or that it could not be.
    """
    if lost:
        tell_lost(listeners, delivery, worker, str(ended.status))
    else:
        tell_settled(listeners, delivery, worker, ended.outcome, ended.failure, discarded=ended.status is Status.DISCARDED)


# --- about itself


def tell_starting(shift: Shift) -> None:
    """
    Tell that it is about to take its first job.
    """
    if shift.queue.listeners.hear(events.WorkerStarting):
        shift.queue.listeners.tell(events.WorkerStarting(worker=shift.name, queues=shift.queues, concurrency=shift.concurrency))


def tell_looking(shift: Shift, free: int) -> None:
    """
    Tell that it is about to look for jobs.
    """
    if shift.queue.listeners.hear(events.WorkerLooping):
        shift.queue.listeners.tell(events.WorkerLooping(worker=shift.name, queues=shift.queues, free=free))


def tell_stopping(shift: Shift, reason: str) -> None:
    """
    Tell that it takes no more jobs.
    """
    if shift.queue.listeners.hear(events.WorkerStopping):
        shift.queue.listeners.tell(events.WorkerStopping(worker=shift.name, queues=shift.queues, reason=reason))


def tell_interrupted(shift: Shift, reason: str, running: Iterable[Held]) -> None:
    """
    Tell that it ends at once.
    """
    if shift.queue.listeners.hear(events.WorkerInterrupted):
        ids = tuple(held.delivery.id for held in running)
        shift.queue.listeners.tell(events.WorkerInterrupted(worker=shift.name, queues=shift.queues, reason=reason, running=ids))
