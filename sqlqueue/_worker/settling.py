"""
The thread that settles.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from queue import Empty

from .._dialects import Trouble
from .._driver.settle import GROUP, Results
from .._executor import Ended, Status
from .logs import job_log, log
from .shift import Held, Shift
from .summary import LOST
from .telling import tell_ended
from .trouble import TROUBLE, first_line, kind_of

__all__ = ["Settler"]

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
LONGEST_LINGER = 0.005
LEVELS = {Status.FAILED: logging.ERROR, Status.RETRYING: logging.WARNING}


class Settler:
    """
    Writes the outcomes of what has ended, in groups.
    """

    def __init__(self, shift: Shift) -> None:
        self._shift = shift
        self._open_ended = True
        self._not_before = 0.0

    def work(self) -> None:
        try:
            self._work()
        except BaseException as error:  # a fault here must end the worker, not leave it claiming what it cannot settle
            self._shift.die(error)

    def _work(self) -> None:
        waiting: list[Held] = []
        pause = FIRST_PAUSE
        while self._open_ended or (waiting and not self._shift.given_up.is_set()):
            group = self._gather(waiting, pause)
            if not group:
                continue
            began = time.monotonic()
            waiting = self.settle(group)
            # Half of the time at most is spent on settling: under load that makes the groups larger.
            self._not_before = (now := time.monotonic()) + min(now - began, LONGEST_LINGER)
            # With everything else settled, what is blocked is asked for less and less often.
            pause = FIRST_PAUSE if len(waiting) < len(group) else min(pause * 1.5, LONGEST_PAUSE, self._shift.lease / 6)

    def settle(self, group: list[Held]) -> list[Held]:
        """
        Write a group's outcomes; those that have to be tried again.

        Raises:
            UnusableDatabase: there is no hope.
        """
        fresh: dict[int, Held] = {}
        doubtful: dict[int, Held] = {}
        later: list[Held] = []
        for held in group:
            part = doubtful if held.doubtful else fresh
            # A job that came to us twice: the two leases are told apart by their tokens, results only by the job's id.
            if part.setdefault(held.delivery.id, held) is not held:
                later.append(held)
        for part in (doubtful, fresh):
            if part:
                later += self._write(list(part.values()))
        return later

    def note_committed(self, held: Held) -> None:
        """
        A delivery has been settled in its handler's own transaction. In the thread of its slot.
        """
        self._note([held], Results(settled={held.delivery.id}))

    def _gather(self, waiting: list[Held], pause: float) -> list[Held]:
        """
        What has ended since the last group, after what is still waiting from it.
        """
        over = self._shift.over
        group = list(waiting)
        most = len(waiting) + GROUP  # however many there are that a stranger has locked
        with contextlib.suppress(Empty):
            held = over.get(timeout=pause * (0.75 + random.random() / 2) if waiting or not self._open_ended else None)
            # Asleep, not at the queue: there each job that ends would wake this thread.
            if held is not None and over.qsize() < GROUP and (left := self._not_before - time.monotonic()) > 0:
                time.sleep(left)
            while held is not None:
                group.append(held)
                if len(group) >= most:
                    return group
                held = over.get_nowait()
            self._open_ended = False
        return group

    def _write(self, group: list[Held]) -> list[Held]:
        settlements = [held.settlement(held.ended) for held in group if held.ended is not None]
        try:
            consumer, lock_wait = self._shift.queue.consumer, self._shift.lease / 6
            with self._shift.patience.asking():
                results = consumer.settle(settlements, lock_wait=lock_wait, repeated=group[0].doubtful)
        except TROUBLE as error:
            trouble = kind_of(error)
            if trouble in (Trouble.OTHER, Trouble.DUPLICATE):
                return self._write_one_by_one(group, error)
            for held in group:
                held.doubtful = True  # some try of it may have been applied before the connection went
            self._shift.patience.bear(error)
            return group
        self._shift.patience.succeeded()
        return self._note(group, results)

    def _write_one_by_one(self, group: list[Held], error: Exception) -> list[Held]:
        """
        Something in the group cannot be written: find it, so that it does not take the others with it.
        """
        if len(group) > 1:
            return [again for held in group for again in self._write([held])]
        (held,) = group
        log.error("the outcome of job %d cannot be written and is given up until its lease ends: %s", held.delivery.id, first_line(error))
        self._forget([(held, LOST)])
        return []

    def _note(self, group: list[Held], results: Results) -> list[Held]:
        again: list[Held] = []
        written: list[tuple[Held, str]] = []
        spoken = {level for level in (logging.INFO, *LEVELS.values()) if job_log.speaks(level)}
        for held in group:
            delivery, ended = held.delivery, held.ended
            if ended is None or delivery.id in results.blocked:
                again.append(held)
            elif delivery.id in results.settled:
                if (level := LEVELS.get(ended.status, logging.INFO)) in spoken:
                    _report(held, ended, level)
                written.append((held, ended.status))
            else:
                log.warning(
                    "the outcome of job %d (%s, attempt %d) came too late: its lease had ended and it is not ours any more",
                    delivery.id,
                    delivery.name,
                    delivery.attempt,
                )
                written.append((held, LOST))
        self._forget(written)
        return again

    def _forget(self, written: list[tuple[Held, str]]) -> None:
        """
        Tell how these have ended, and let them go: a worker does not end before that is told.
        """
        shift = self._shift
        if shift.queue.listeners.kinds:
            for held, status in written:
                # Of one that had not started there is nothing to tell.
                if held.ended is not None and held.started is not None and shift.holdings.may_tell(held):
                    tell_ended(shift.queue.listeners, held.delivery, shift.name, held.ended, lost=status == LOST)
        shift.forget(written)


def _report(held: Held, ended: Ended, level: int) -> None:
    delivery = held.delivery
    took = "" if held.started is None else f" in {held.took:.3f} s"
    attempt = f", attempt {delivery.attempt} of {delivery.max_attempts}" if delivery.max_attempts > 1 else ""
    note = f": {ended.note}" if ended.note else ""
    job_log.log(level, "%s %d %s%s%s%s", ended.status, delivery.id, delivery.name, attempt, took, note)
