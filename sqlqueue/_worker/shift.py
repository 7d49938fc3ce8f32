"""
What the threads of one run share.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from .._driver.claim import Company, company_of
from .._driver.settle import Return, Settlement
from .._executor import Ended, Status
from .._job import Delivery, JobContext
from .._queue import Queue
from .._timeouts import Timeouts
from .bell import Bell
from .logs import log
from .summary import Limits
from .telling import tell_attempted
from .trouble import Patience

__all__ = ["HANDED_BACK", "Held", "Holdings", "Idling", "Shift"]

HANDED_BACK = Ended(Status.RETURNED, Return(), "not started")
SOON = 0.1  # seconds that a job may wait in memory
LONG = 10.0  # longer jobs count as that long
STUCK = 0.25  # seconds after which what waits is better handed back
MOST_AHEAD = 3000
MOST_UNSETTLED = 3000  # beyond that the settlements have to catch up first


@dataclass(slots=True, eq=False)
class Held:
    """
    One delivery of ours, from its claim until its settlement is written.
    """

    delivery: Delivery
    confirmed: float
    """By the monotonic clock: when we last knew that the lease was ours."""
    started: float | None = None
    took: float = 0.0
    ended: Ended | None = None
    lost: bool = False
    """Another worker may have it by now."""
    context: JobContext | None = None
    """What its handler knows; made when it starts, as there may be thousands that wait."""
    is_async: bool = False
    doubtful: bool = False
    """A settlement was sent and its answer lost: it may have been applied."""
    told: bool = False
    """Listeners have heard how it ended."""

    @property
    def lease(self) -> tuple[int, str]:
        return self.delivery.id, self.delivery.token

    @property
    def label(self) -> tuple[int, str]:
        return self.delivery.id, self.delivery.name

    def start(self, renew: Callable[[tuple[int, str]], bool]) -> JobContext:
        """
        It begins to run.
        """
        delivery = self.delivery
        self.started = time.monotonic()
        self.context = context = JobContext(
            id=delivery.id,
            name=delivery.name,
            queue=delivery.queue,
            attempt=delivery.attempt,
            max_attempts=delivery.max_attempts,
            headers=delivery.headers,
            deadline=delivery.deadline,
            _renew=partial(renew, self.lease),
        )
        if self.lost:  # perhaps a moment ago, when there was no context to tell. Never back to False: it may be lost right now
            context.lost = True
        return context

    def settlement(self, ended: Ended) -> Settlement:
        return Settlement(self.delivery.id, self.delivery.token, self.delivery.unique, ended.outcome)

    def lose(self, why: str) -> None:
        """
        Tell the handler that the job may not be ours any more.
        """
        if not self.lost:
            self.lost = True
            if self.context is not None:
                self.context.lost = True
            log.warning("job %d (%s) may run elsewhere now: %s", self.delivery.id, self.delivery.name, why)


class Holdings:
    """
    All that is held, by lease: a job whose lease we lost may come to us a second time, while its first run still goes on.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: dict[tuple[int, str], Held] = {}
        self._reclaimed: set[Held] = set()
        self._busy = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def busy(self) -> int:
        """
        How many have not ended.
        """
        return self._busy

    @property
    def unsettled(self) -> int:
        """
        How many have ended, and are not written yet.
        """
        return len(self._held) - self._busy

    def add(self, claimed: Iterable[Held]) -> None:
        with self._guard:
            for held in claimed:
                self._held[held.lease] = held
                self._busy += 1
                if held.delivery.reclaimed_from is not None:
                    self._reclaimed.add(held)

    def end(self, held: Held, ended: Ended) -> None:
        with self._guard:
            held.ended = ended
            self._busy -= 1
            self._reclaimed.discard(held)

    def remove(self, deliveries: Iterable[Held]) -> bool:
        """
        Forget deliveries; whether these were the last ones.
        """
        with self._guard:
            for held in deliveries:
                self._held.pop(held.lease, None)
            return not self._held

    def find(self, lease: tuple[int, str]) -> Held | None:
        return self._held.get(lease)

    def all(self) -> list[Held]:
        with self._guard:
            return list(self._held.values())

    def running(self) -> list[Held]:
        """
        Those that have not ended.
        """
        return [held for held in self.all() if held.ended is None]

    def may_tell(self, held: Held) -> bool:
        """
        Whether nobody has told yet how it ended; from now on somebody has.
        """
        with self._guard:
            told, held.told = held.told, True
        return not told

    def company(self) -> Company:
        """
        What runs here that came from a dead worker.
        """
        with self._guard:
            return company_of((True, held.delivery.last_attempt) for held in self._reclaimed)


class Pace:
    """
    How long jobs take at present, to guess how many can start soon.
    """

    def __init__(self, concurrency: int) -> None:
        self._weight = 1 / (concurrency + 6)
        self._average: float | None = None

    def note(self, seconds: float) -> None:
        average = self._average
        self._average = seconds if average is None else average + (min(seconds, LONG) - average) * self._weight

    def ahead(self, slots: Sequence[float]) -> int:
        """
        How many jobs these slots can start within a tenth of a second, when each of them is busy.

        Args:
            slots: when they began what they do. One that has done it for long is not going to start anything.
        """
        if self._average is None:
            return 0
        now = time.monotonic()
        moving = sum(now - began < SOON for began in slots if began) + slots.count(0.0)
        return min(int(moving * SOON / max(self._average, 1e-6)), MOST_AHEAD)

    @staticmethod
    def stuck(slots: Sequence[float]) -> bool:
        """
        No slot has started anything for a while.
        """
        latest = time.monotonic() - STUCK
        return all(0.0 < began < latest for began in slots)


@dataclass(frozen=True, slots=True)
class Idling:
    """
    How a worker that has found nothing goes on.
    """

    poll_max: float | None = None
    """The longest pause between two looks, in seconds; what suits the database if not given."""
    notify: bool = True
    """Whether pushes end a pause."""


IDLING = Idling()


class Shift:
    """
    One run of a worker: its queues of work, what it holds, and why it ends.
    """

    beside = 0
    """How many async jobs run without a slot."""
    refill_below = 0
    """The thread that claims wants to hear when fewer than so many are waiting or running in slots."""
    behind = False
    """It waits until enough of what has ended is settled."""
    look_now = False
    woken = False
    """There may be something new in the queues."""
    reason: str | None = None
    """Why it stops."""
    asked_at: float | None = None
    """By the monotonic clock: when somebody asked, so that what has not started is handed back; a limit lets it run."""
    signals = 0
    fatal: BaseException | None = None

    def __init__(
        self,
        queue: Queue,
        queues: tuple[str, ...],
        limits: Limits,
        *,
        concurrency: int,
        async_concurrency: int = 0,
        lease: float,
        name: str,
        idling: Idling = IDLING,
        exit_on_stuck: bool = False,
    ) -> None:
        self.queue = queue
        self.queues = queues
        self.limits = limits
        self.concurrency = concurrency
        self.async_concurrency = max(async_concurrency, concurrency)
        self.lease = lease
        self.name = name
        self.process = os.getpid()
        self.idling = idling
        self.holdings = Holdings()
        self.patience = Patience()
        self.counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.todo: SimpleQueue[Held | None] = SimpleQueue()
        self.over: SimpleQueue[Held | None] = SimpleQueue()
        self.bell = Bell()
        """For the thread that conducts."""
        self.claim_bell = Bell()
        """For the thread that claims."""
        self.slots = [0.0] * concurrency
        """When each slot began what it does, by the monotonic clock; 0 while it does nothing."""
        self.pace = Pace(concurrency)
        self.closing = threading.Event()
        self.given_up = threading.Event()
        """Nobody waits for what has not been settled by now."""
        self.finished = threading.Event()
        self.timeouts = Timeouts(self._note_stuck)
        self.stuck: set[Held] = set()
        """What is left behind, because it does not react."""
        self._exit_on_stuck = exit_on_stuck
        self.own_threads: set[int | None] = set()

    @property
    def asked(self) -> bool:
        return self.asked_at is not None

    @property
    def ending(self) -> bool:
        return self.reason is not None or self.fatal is not None

    @property
    def most_unsettled(self) -> int:
        """
        How many may have ended without being settled before no more are claimed; they keep their payloads.
        """
        return min(MOST_UNSETTLED, max(self.queue.consumer.most_in_memory, self.concurrency))

    @property
    def in_slots(self) -> int:
        """
        How many wait for a slot or have one.
        """
        return self.holdings.busy - self.beside

    def ask_to_stop(self, reason: str) -> None:
        # May run in a signal handler, between any two bytecodes of the main thread: nothing here may wait for a lock.
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        self.reason = self.reason or reason
        self._ring()

    def reach(self, limit: str) -> None:
        self.reason = self.reason or limit
        self._ring()

    def die(self, error: BaseException) -> None:
        """
        End the run with this error: an idle worker that only looks alive is worse.
        """
        self.fatal = self.fatal or error
        self._ring()

    def wake(self) -> None:
        """
        Somebody has pushed. In the pusher's thread: once is enough until the next look.
        """
        if not self.woken:
            self.woken = True
            self.claim_bell.ring()

    def end(self, held: Held, ended: Ended) -> None:
        """
        A delivery has its outcome, and its slot is free.
        """
        if held.started is not None:
            held.took = time.monotonic() - held.started
            # So many async jobs run for one slot.
            self.pace.note(held.took * self.concurrency / self.async_concurrency if held.is_async else held.took)
            if self.queue.listeners.kinds:
                tell_attempted(self.queue.listeners, held.delivery, self.name, ended, held.took)
        self.holdings.end(held, ended)
        if not ended.committed:
            self.over.put(held)
        if held.delivery.reclaimed_from is not None:
            self.look_now = True  # what was not allowed to run beside it may be claimed
        self.slot_is_free()

    def slot_is_free(self) -> None:
        """
        Tell the thread that claims, if it wants to hear.
        """
        if self.look_now or self.in_slots < self.refill_below:
            self.refill_below = 0  # it has been heard
            self.claim_bell.ring()

    def hand_back_unstarted(self) -> int:
        """
        Hand back what waits for a slot; how many.
        """
        number = 0
        while True:
            try:
                held = self.todo.get_nowait()
            except Empty:
                return number
            if held is None:  # a slot is asked to end
                self.todo.put(None)
                return number
            self.end(held, HANDED_BACK)
            number += 1

    def forget(self, written: Sequence[tuple[Held, str]]) -> None:
        """
        The settlements of these deliveries are written, or never will be; how each has ended.
        """
        with self._counting:
            self.counts.update(status for _, status in written)
        last = self.holdings.remove(held for held, _ in written)
        if last and self.limits.stop_when_empty:
            self.look_now = True
        if self.look_now or (self.behind and self.holdings.unsettled < self.most_unsettled / 2):
            self.behind = False
            self.claim_bell.ring()
        if last and self.ending:
            self.bell.ring()

    def _note_stuck(self, delivery: Delivery) -> None:
        held = self.holdings.find((delivery.id, delivery.token))
        if self._exit_on_stuck and held is not None:
            self.stuck.add(held)
            self.ask_to_stop(f"job {delivery.id} ({delivery.name}) is stuck")

    def _ring(self) -> None:
        self.bell.ring()
        self.claim_bell.ring()
