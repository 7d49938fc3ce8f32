"""
Claiming and settling by hand, for one's own loop instead of a worker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from .._backoff import seconds
from .._dialects import server_of
from .._driver.settle import Complete, Move, Release, Settlement, lease_end, lease_ended
from .._failure import Failure
from .._job import Delivery
from .._options import check_queue_name
from .._secrets import secrets_of
from ..errors import LockTimeout, OptionError, SqlQueueError, StaleDelivery
from .consumer import host_name
from .database import Configured
from .producer import DEFAULT_QUEUE
from .registry import Registry
from .telling import tell_lost, tell_settled

__all__ = ["DEFAULT_LEASE", "Operations", "check_lease", "check_queues"]

DEFAULT_LEASE = 60.0
SHORTEST_LEASE, LONGEST_LEASE = 1.0, 86_400.0
MOST_CLAIMED = 1000
LONGEST_DELAY = 10 * 366 * 86_400
BLOCKED_PAUSE = 0.05
PAST = {"complete": "done", "release": "released", "fail": "failed"}


class Operations(Configured):
    """
    The consumer's side of a queue.
    """

    registry: Registry

    def claim(
        self,
        queues: str | Sequence[str] = DEFAULT_QUEUE,
        *,
        limit: int = 1,
        lease: float | timedelta | None = None,
        wait: float | timedelta = 0,
    ) -> list[Delivery]:
        """
        Take ready jobs, for one's own loop instead of a worker.

        Args:
            queues: one name or several in order of precedence.
            limit: how many at most, from 1 to 1,000.
            lease: for how long, in seconds or a timedelta; 60 s if not given. Nobody renews it but you.
            wait: how long to keep looking when there is none; 0 looks once.

        Returns:
            The deliveries in order; an empty list when there was nothing to take. Each has to be completed, released or failed.
        """
        names = check_queues(queues)
        if type(limit) is not int or not 1 <= limit <= MOST_CLAIMED:
            raise OptionError("limit: a whole number from 1 to 1000")
        length = check_lease(lease)
        until = time.monotonic() + seconds(wait, "wait")
        pause = 0.01
        while True:
            deliveries = self.consumer.claim(names, limit, length, host_name(), not_repeated=self.registry.not_repeated())
            left = until - time.monotonic()
            if deliveries or left <= 0:
                return deliveries
            time.sleep(min(pause, left))
            pause = min(pause * 2, server_of(self.consumer.engine.dialect).poll_max)

    def complete(self, delivery: Delivery) -> None:
        """
        The job is done: delete it.

        Raises:
            StaleDelivery: another claim holds the job, or it is gone. Nothing was changed.
            LockTimeout: somebody's open transaction holds the row, or pushed a duplicate of its unique key. Try again.
        """
        self._settle("complete", delivery, Complete(), None)

    def release(self, delivery: Delivery, *, delay: float | timedelta = 0, error: BaseException | str | None = None) -> None:
        """
        Put the job back, due in `delay` seconds. With an error this was an attempt; without, the attempt is given back.

        Raises:
            StaleDelivery: another claim holds the job, or it is gone. Nothing was changed.
            LockTimeout: somebody's open transaction holds the row.
        """
        failure = None if error is None else self._failure(delivery, error)
        text = None if failure is None else failure.last_error
        self._settle("release", delivery, Release(seconds(delay, "delay", maximum=LONGEST_DELAY), text), failure)

    def fail(self, delivery: Delivery, error: BaseException | str) -> None:
        """
        Move the job to the failed table.

        Raises:
            StaleDelivery: another claim holds the job, or it is gone. Nothing was changed.
            LockTimeout: somebody's open transaction holds the row, or pushed a duplicate of its unique key. Try again.
        """
        failure = self._failure(delivery, error)
        self._settle("fail", delivery, Move(failure, host_name()), failure)

    def renew(self, delivery: Delivery, *, lease: float | timedelta | None = None) -> Delivery:
        """
        Extend the lease to `lease` seconds from now (60 if not given); the delivery with its new end. Never shortens one.

        Raises:
            StaleDelivery: the lease has ended, another claim holds the job, or it is gone.
            LockTimeout: somebody's open transaction holds the row.
        """
        length = check_lease(lease)
        until = time.monotonic() + length / 6
        while True:
            renewed, lost = self.consumer.renew([(delivery.id, delivery.token)], length)
            if renewed:
                end = self.consumer.read(lambda connection: lease_end(connection, self.tables, delivery.id, delivery.token))
                return replace(delivery, lease_until=end or delivery.lease_until)
            ended = self.consumer.read(lambda connection: lease_ended(connection, self.tables, delivery.id))
            if lost or ended:
                raise StaleDelivery("renew", delivery.id)
            if time.monotonic() > until:
                raise LockTimeout(f"job {delivery.id} could not be renewed: its row is locked by another transaction")
            time.sleep(BLOCKED_PAUSE)

    def _settle(self, operation: str, delivery: Delivery, outcome: Complete | Release | Move, failure: Failure | None) -> None:
        settlement = Settlement(delivery.id, delivery.token, delivery.unique, outcome)
        until = time.monotonic() + DEFAULT_LEASE / 6
        while True:
            results = self.consumer.settle([settlement])
            if results.settled:
                tell_settled(self.listeners, delivery, host_name(), outcome, failure)
                return
            if results.stale:
                tell_lost(self.listeners, delivery, host_name(), PAST[operation])
                raise StaleDelivery(operation, delivery.id)
            if time.monotonic() > until:
                raise LockTimeout(f"cannot {operation} job {delivery.id}: another transaction holds its row or its unique key")
            time.sleep(BLOCKED_PAUSE)

    def _failure(self, delivery: Delivery, error: BaseException | str) -> Failure:
        try:
            secrets = secrets_of(self.registry.find(delivery.name).signature, delivery.payload)
        except SqlQueueError:  # of a job whose code is not here nobody knows what is sensitive
            secrets = ()
        if isinstance(error, BaseException):
            return Failure.from_exception(error, secrets=secrets)
        if not isinstance(error, str):
            raise OptionError(f"error: an exception or a text, not a {type(error).__name__}")
        return Failure.from_text(error, secrets=secrets)


def check_queues(queues: str | Sequence[str]) -> tuple[str, ...]:
    """
    Raises:
        OptionError: no queue, a name that is not one, or one that is named twice.
    """
    names = (queues,) if isinstance(queues, str) else tuple(queues)
    for name in names:
        check_queue_name(name)
    if not names:
        raise OptionError("queues: name at least one")
    if len(set(names)) != len(names):
        raise OptionError(f"queues: {next(name for name in names if names.count(name) > 1)} is named twice")
    return names


def check_lease(lease: float | timedelta | None) -> float:
    """
    Raises:
        OptionError: not a duration from 1 second to a day.
    """
    return DEFAULT_LEASE if lease is None else seconds(lease, "lease", minimum=SHORTEST_LEASE, maximum=LONGEST_LEASE)
