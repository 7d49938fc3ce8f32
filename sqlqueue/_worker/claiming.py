"""
The thread that claims.
"""

from __future__ import annotations

import contextlib
import random
import time
from functools import partial

import sqlalchemy as sa

from .._dialects import database_label, server_of
from .._driver.settle import Release as ReleaseRow
from .._executor import Ended, Status
from .._job import Delivery, JobContext
from .._queue import DEFAULT_QUEUE
from .._version import __version__
from .logs import log
from .renewing import Renewer
from .shift import Held, Shift
from .summary import Meter
from .trouble import TROUBLE, kind_of, passes, unusable
from .trouble import first_line as what_it_said

__all__ = ["Claimer"]

FIRST_PAUSE = 0.02
LONGEST_TROUBLE_PAUSE = 5.0
LONGEST_LINGER = 0.05
MOST_UNSETTLED = 1000  # beyond that the settlements have to catch up first
HANDED_BACK = Ended(Status.RELEASED, ReleaseRow(0.0, None), "not started")


class Claimer:
    """
    Fills free slots until the shift ends.
    """

    def __init__(self, shift: Shift, renewer: Renewer, *, wait_for_database: float) -> None:
        self._shift = shift
        self._renewer = renewer
        self._wait_for_database = wait_for_database
        self._pause = FIRST_PAUSE
        self._next_look = 0.0
        self._filled = False  # the last claim brought as many as it asked for

    def work(self) -> None:
        shift = self._shift
        try:
            self.start_up()
            if not shift.ending:
                self._loop(Meter(shift.limits))
        except BaseException as error:
            shift.die(error)
        finally:
            with contextlib.suppress(*TROUBLE):
                shift.queue.consumer.give_back()
            shift.bell.ring()

    def start_up(self) -> None:
        """
        Wait for the database, look whether its tables are ours, and say what is going to be done.

        Raises:
            UnusableDatabase: it cannot be reached in time, or cannot be used.
        """
        until = time.monotonic() + self._wait_for_database
        pause = 0.1
        while not self._shift.ending:
            try:
                self._announce(self._shift.queue.consumer.read(self._look_around))
                return
            except TROUBLE as error:
                trouble = kind_of(error)
                if not passes(trouble) or time.monotonic() >= until:
                    raise unusable(error, trouble) from error
                log.warning("the database cannot be reached yet: %s", what_it_said(error))
            self._shift.claim_bell.wait(min(pause, until - time.monotonic()))
            pause = min(pause * 2, 2.0)

    def claim(self, limit: int) -> list[Held]:
        """
        Take up to so many jobs, which are held from now on.
        """
        shift = self._shift
        before = time.monotonic()  # the lease begins no earlier
        company, not_repeated = shift.holdings.company(), shift.queue.registry.not_repeated()
        deliveries = shift.queue.consumer.claim(shift.queues, limit, shift.lease, shift.name, company, not_repeated=not_repeated)
        claimed = [Held(delivery, self._context(delivery), before) for delivery in deliveries]
        shift.holdings.add(claimed)
        return claimed

    def _context(self, delivery: Delivery) -> JobContext:
        return JobContext(
            id=delivery.id,
            name=delivery.name,
            queue=delivery.queue,
            attempt=delivery.attempt,
            max_attempts=delivery.max_attempts,
            headers=delivery.headers,
            deadline=delivery.deadline,
            _renew=partial(self._renewer.renew_one, (delivery.id, delivery.token)),
        )

    def _look_around(self, connection: sa.Connection) -> str:
        for table in self._shift.queue.tables.all:
            connection.execute(sa.select(table).where(sa.false()))
        return database_label(connection)

    def _announce(self, label: str) -> None:
        shift = self._shift
        watched = f"{'queue' if len(shift.queues) == 1 else 'queues'} {', '.join(shift.queues)}"
        line = f"sqlqueue {__version__}: {label}, {watched}, {shift.concurrency} at once, worker {shift.name}"
        others = sorted(set(shift.queue.registry.queues(DEFAULT_QUEUE)) - set(shift.queues))
        if others:
            log.warning("%s; not watched here, although registered jobs go there: %s", line, ", ".join(others))
        else:
            log.info("%s", line)

    def _loop(self, meter: Meter) -> None:
        shift = self._shift
        while not shift.ending:
            limit = meter.reached()
            if limit is not None:
                shift.reach(limit)
                return
            if shift.look_now:
                shift.look_now, self._next_look = False, 0.0
            shift.wants_slot = True  # before the slots are counted, or the last one to become free would not ring
            free = min(self._free_slots(), meter.jobs_left)
            if free and self._is_time_to_look(free):
                shift.wants_slot = False
                self._look(free, meter)
            else:
                shift.wants_slot = not free or self._filled
                pause = self._next_look - time.monotonic() if free else 1.0
                shift.claim_bell.wait(min(pause, meter.seconds_left, 1.0))

    def _is_time_to_look(self, free: int) -> bool:
        return time.monotonic() >= self._next_look or (self._filled and 2 * free >= self._shift.concurrency)

    def _free_slots(self) -> int:
        holdings = self._shift.holdings
        busy = holdings.busy
        return self._shift.concurrency - busy if len(holdings) - busy < MOST_UNSETTLED else 0

    def _look(self, free: int, meter: Meter) -> None:
        shift = self._shift
        began = time.monotonic()
        try:
            claimed = self.claim(free)
            empty = not claimed and shift.limits.stop_when_empty and self._nothing_is_left()
        except TROUBLE as error:
            shift.patience.bear(error)
            self._filled = False
            self._pause = min(self._pause * 2, LONGEST_TROUBLE_PAUSE)
            self._next_look = time.monotonic() + self._pause * (0.75 + random.random() / 2)
            return
        shift.patience.succeeded()
        self._hand_out(claimed, meter)
        if empty:
            shift.reach("empty")
        self._filled = len(claimed) == free
        self._schedule(time.monotonic() - began, bool(claimed))

    def _hand_out(self, claimed: list[Held], meter: Meter) -> None:
        shift = self._shift
        for held in claimed:
            if shift.asked:  # while the claim was under way
                shift.end(held, HANDED_BACK)
            else:
                meter.started += 1
                shift.todo.put(held)

    def _nothing_is_left(self) -> bool:
        if self._shift.holdings:
            return False
        due_in = self._shift.queue.consumer.due_in(self._shift.queues)
        return due_in is None or due_in > 0

    def _schedule(self, took: float, found: bool) -> None:
        """
        After a full claim look again soon, otherwise after a pause that grows while there is nothing.
        """
        if self._filled:
            # A claim for the first slot that becomes free would keep the others waiting: as long as this one took, or
            # until half of them are free, more may come together.
            self._pause, self._next_look = FIRST_PAUSE, time.monotonic() + min(took, LONGEST_LINGER)
            return
        consumer = self._shift.queue.consumer
        longest = server_of(consumer.engine.dialect).poll_max
        self._pause = FIRST_PAUSE if found else min(self._pause * 1.5, longest)
        pause = self._pause * (0.75 + random.random() / 2)
        soonest = consumer.soonest(self._shift.queues)
        if soonest is not None:
            pause = min(pause, max(soonest, 0.001))
        self._next_look = time.monotonic() + pause
