"""
What is told about deliveries.
"""

from __future__ import annotations

from typing import Any

from .. import _events as events
from .._driver.settle import Complete, Move, Outcome, Release
from .._failure import Failure
from .._job import Delivery
from .listeners import Listeners

__all__ = ["about", "said_by", "tell_lost", "tell_settled"]


def about(delivery: Delivery, worker: str) -> dict[str, Any]:
    """
    What all events of a delivery say.
    """
    return {
        "id": delivery.id,
        "name": delivery.name,
        "queue": delivery.queue,
        "headers": dict(delivery.headers),  # a copy: the handler reads the other one
        "attempt": delivery.attempt,
        "max_attempts": delivery.max_attempts,
        "worker": worker,
    }


def tell_settled(
    listeners: Listeners, delivery: Delivery, worker: str, outcome: Outcome, failure: Failure | None = None, *, discarded: bool = False
) -> None:
    """
    Tell how a delivery ended, once that is written. Of one that was put back before it had started there is nothing to tell.

    Args:
        failure: what an attempt died of that is tried again.
    """
    if not listeners.kinds:
        return
    event: events.Event | None = None
    match outcome:
        case Complete():
            kind = events.JobDiscarded if discarded else events.JobProcessed
            event = kind(**about(delivery, worker)) if listeners.hear(kind) else None
        case Release(delay, None):
            event = events.JobReleased(**about(delivery, worker), delay=delay)
        case Release(delay, text):
            failure = failure or Failure.from_text(text or "")
            event = events.JobRetrying(**about(delivery, worker), delay=delay, **said_by(failure))
        case Move(failure):
            event = events.JobFailed(**about(delivery, worker), reason=failure.reason, **said_by(failure))
    if event is not None:
        listeners.tell(event)


def tell_lost(listeners: Listeners, delivery: Delivery, worker: str, status: str) -> None:
    """
    Tell that the end of a delivery could not be written.
    """
    if listeners.hear(events.JobSettlementLost):
        listeners.tell(events.JobSettlementLost(**about(delivery, worker), status=status))


def said_by(failure: Failure) -> dict[str, Any]:
    """
    What the events of a failure say about it.
    """
    return {"error_class": failure.error_class, "message": failure.message, "traceback": failure.traceback}
