"""
The thread that claims.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass

import sqlalchemy as sa

from .._dialects import database_label, server_of
from .._job import Delivery
from .._queue import DEFAULT_QUEUE
from .._queue.claims import MOST_AT_ONCE
from .._version import __version__
from .logs import log
from .renewing import Renewer
from .shift import HANDED_BACK, Held, Shift
from .summary import MAX_JOBS, Meter
from .sweeping import Sweeping
from .telling import tell_looking, tell_starting, tell_stopping
from .trouble import TROUBLE, kind_of, passes, unusable
from .trouble import first_line as what_it_said
from .waking import Waking

__all__ = ["Claimer"]

FIRST_PAUSE = 0.02
# How pauses grow, as a part of the time since a job was last found. Where pushes wake us they are for the rest.
GROWTH, GROWTH_WHEN_WOKEN = 0.025, 0.5
LONGEST_PAUSE_WHEN_WOKEN = 3.0
IN_VAIN_PAUSE, LONGEST_IN_VAIN_PAUSE = 0.005, 0.05
LONGEST_TROUBLE_PAUSE = 5.0
LONGEST_LINGER = 0.05
STALL_TICK = 0.1
LONGEST_PASSED_OVER = 1.0  # seconds during which jobs that may wait for a slot overtake those that may not


@dataclass(frozen=True, slots=True)
class _Room:
    """
    How many jobs to ask for.
    """

    busy: int
    """How many wait for a slot or have one."""
    free: int
    ahead: int
    target: int
    """How many should wait for a slot, so that none is ever idle."""

    @property
    def any(self) -> bool:
        return self.free + self.ahead > 0


class Claimer:
    """
    Fills free slots until the shift ends.
    """

    def __init__(self, shift: Shift, renewer: Renewer, *, wait_for_database: float) -> None:
        self._shift = shift
        self._renewer = renewer
        self._wait_for_database = wait_for_database
        self._waking = Waking(shift, wanted=shift.idling.notify and not shift.limits.stop_when_empty)
        self._sweeping = Sweeping(shift)
        self._trouble_pause = FIRST_PAUSE
        self._next_look = 0.0
        self._earliest = 0.0  # nothing that wakes us brings the next look forward beyond this
        self._woken = False  # the next look is one that something has brought forward
        self._in_vain = 0  # so many of these in a row have found nothing
        self._last_found = time.monotonic()
        self._filled = False  # the last claim brought as many as it asked for
        self._in_turn = False  # the last claim for free slots brought jobs that may not wait for one: there may be more
        self._last_in_turn = time.monotonic()  # when there was such a claim
        self._started = False

    def work(self) -> None:
        shift = self._shift
        try:
            self.start_up()
            if not shift.ending:
                with shift.queue.wakes.heard_by(shift.queues, shift.wake) if shift.idling.notify else contextlib.nullcontext():
                    self._loop(Meter(shift.limits))
        except BaseException as error:
            shift.die(error)
        finally:
            self._give_back()
            self._waking.close()
            self.say_goodbye()
            shift.claim_bell.close()
            shift.bell.ring()

    def _give_back(self) -> None:
        if self._shift.queue.configured:
            with contextlib.suppress(*TROUBLE):
                self._shift.queue.consumer.give_back()

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
                with self._shift.patience.asking():
                    label = self._shift.queue.consumer.read(self._look_around)
                self._announce(label)
                self._started = True
                tell_starting(self._shift)
                return
            except TROUBLE as error:
                trouble = kind_of(error)
                if not passes(trouble) or time.monotonic() >= until:
                    raise unusable(error, trouble) from error
                log.warning("the database cannot be reached yet: %s", what_it_said(error))
            self._shift.claim_bell.wait(min(pause, until - time.monotonic()))
            pause = min(pause * 2, 2.0)

    def say_goodbye(self, reason: str | None = None) -> None:
        """
        Tell that nothing more is taken, if anything could have been.
        """
        if self._started:
            tell_stopping(self._shift, reason or self._shift.reason or "error")

    def claim(self, limit: int, ahead: int = 0) -> list[Held]:
        """
        Take up to `limit` jobs, and `ahead` more that are going to wait; they are held from now on.
        """
        shift = self._shift
        before = time.monotonic()  # the lease begins no earlier
        company, not_repeated = shift.holdings.company(), shift.queue.registry.not_repeated()
        deliveries = shift.queue.consumer.claim(
            shift.queues, limit, shift.lease, shift.name, company, ahead=ahead, not_repeated=not_repeated
        )
        return self._hold(deliveries, before)

    def _claim_announced(self, limit: int) -> list[Held]:
        """
        Take what somebody has just pushed without looking around first: whoever slept has missed nothing. But after a
        claim that was filled there may be more to do, and some of it more urgent.
        """
        lanes = self._waking.announced()
        if len(lanes) != 1 or not limit or self._filled:
            return []
        before = time.monotonic()
        return self._hold(self._waking.claim_at(lanes[0], limit), before)

    def _hold(self, deliveries: list[Delivery], before: float) -> list[Held]:
        claimed = [Held(delivery, before) for delivery in deliveries]
        self._shift.holdings.add(claimed)
        return claimed

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
                if limit != MAX_JOBS:
                    shift.hand_back_unstarted()
                return
            if shift.look_now:
                shift.look_now, self._next_look = False, 0.0
            if shift.woken:
                shift.woken, self._woken, self._next_look = False, True, min(self._next_look, self._earliest)
            room = self._room(meter)
            if room.any and self._is_time_to_look(room):
                self._look(room, meter)
            else:
                self._wait(room, meter)

    def _room(self, meter: Meter) -> _Room:
        """
        For how many more jobs there are slots, and for how many that are going to wait.
        """
        shift = self._shift
        busy = shift.in_slots
        free = max(shift.concurrency - busy, 0)
        target = self._target()
        shift.behind = shift.holdings.unsettled >= shift.most_unsettled
        if shift.behind:
            return _Room(busy, 0, 0, target)
        waiting = max(busy - shift.concurrency, 0)
        # Half of them have to go before more come: fewer, larger claims.
        ahead = target - waiting if 2 * waiting <= target else 0
        return _Room(busy, min(free, meter.jobs_left), max(min(ahead, MOST_AT_ONCE, meter.jobs_left - free), 0), target)

    def _target(self) -> int:
        """
        How many jobs should wait for a slot.

        A claim without a free slot passes over those that may not wait for one, and as long as any others come there would
        never be a slot for them. So there has to be one now and then, and while they come nothing is taken out of turn.
        """
        overdue = time.monotonic() - self._last_in_turn > LONGEST_PASSED_OVER
        if self._in_turn or overdue:
            return 0
        shift = self._shift
        return min(shift.pace.ahead(shift.slots), shift.queue.consumer.most_in_memory)

    def _may_not_wait(self, claimed: list[Held]) -> bool:
        """
        Whether there are any that a claim without a free slot would have passed over.
        """
        once = self._shift.queue.registry.not_repeated()
        deliveries = (held.delivery for held in claimed)
        return any(one.last_attempt or one.reclaimed_from is not None or one.name in once for one in deliveries)

    def _is_time_to_look(self, room: _Room) -> bool:
        if time.monotonic() >= self._next_look:
            return True
        return self._filled and (bool(room.ahead) or 2 * room.free >= self._shift.concurrency)

    def _wait(self, room: _Room, meter: Meter) -> None:
        shift = self._shift
        waiting = room.busy > shift.concurrency
        if waiting and shift.pace.stuck(shift.slots):
            shift.hand_back_unstarted()  # somebody else may have a free slot
        # The last claim brought all that it asked for: there are more, and we want to hear when there is room for them.
        # Otherwise only when there is a slot again, if all are taken.
        if self._filled:
            shift.refill_below = shift.concurrency + room.target // 2
        elif not room.free:
            shift.refill_below = shift.concurrency
        pause = self._next_look - time.monotonic() if room.any else 1.0
        if waiting:
            pause = min(pause, STALL_TICK)
        if shift.in_slots < shift.refill_below <= room.busy:
            return  # it has come to that meanwhile, and nobody has rung
        if self._waking.wait(min(pause, meter.seconds_left, 1.0), has_room=room.any and not self._filled):
            shift.woken = True

    def _look(self, room: _Room, meter: Meter) -> None:
        shift = self._shift
        tell_looking(shift, room.free)
        began = time.monotonic()
        try:
            with shift.patience.asking():
                claimed = self._claim_announced(room.free) or self.claim(room.free, room.ahead)
                empty = not claimed and shift.limits.stop_when_empty and self._nothing_is_left()
        except TROUBLE as error:
            shift.patience.bear(error)
            self._filled = False
            self._trouble_pause = min(self._trouble_pause * 2, LONGEST_TROUBLE_PAUSE)
            self._next_look = self._earliest = time.monotonic() + _jittered(self._trouble_pause)
            return
        self._trouble_pause = FIRST_PAUSE
        shift.patience.succeeded()
        if room.free:
            self._last_in_turn = time.monotonic()
            self._in_turn = self._may_not_wait(claimed)
        self._refresh(claimed, time.monotonic() - began)
        self._hand_out(claimed, meter)
        self._sweeping.sweep_when_due()
        if empty:
            shift.reach("empty")
        # No more than there is memory for, were it as much as what has just been seen.
        self._filled = len(claimed) >= min(room.free + room.ahead, max(room.free, shift.queue.consumer.most_in_memory))
        self._schedule(time.monotonic() - began, bool(claimed))
        if self._waking.looked(bool(claimed)):
            self._next_look = 0.0

    def _refresh(self, claimed: list[Held], took: float) -> None:
        """
        A commit may wait for a lock or the disk for as long as a lease: what starts now would soon be another worker's, too.
        """
        if claimed and took > self._shift.lease / 3:
            self._renewer.renew_all()

    def _hand_out(self, claimed: list[Held], meter: Meter) -> None:
        shift = self._shift
        for held in claimed:
            if shift.asked or held.lost:  # while the claim was under way
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
        now = time.monotonic()
        self._in_vain = self._in_vain + 1 if self._woken and not found else 0
        self._woken = False
        # A claim for the first slot that becomes free, or for the first of many that are pushed, would keep the others
        # waiting: as long as this one took, or until half of the slots are free, more may come together.
        linger = min(took, LONGEST_LINGER) if found else min(self._in_vain * IN_VAIN_PAUSE, LONGEST_IN_VAIN_PAUSE)
        self._earliest = now + linger
        if found:
            self._last_found = now
        if self._filled:
            self._next_look = self._earliest
            return
        pause = self._poll_pause(now - self._last_found)
        soonest = self._shift.queue.consumer.soonest(self._shift.queues)
        if soonest is not None:
            pause = min(pause, max(soonest, 0.001))
        self._next_look = now + pause

    def _poll_pause(self, silence: float) -> float:
        if self._waking.watching:
            growth, longest = GROWTH_WHEN_WOKEN, LONGEST_PAUSE_WHEN_WOKEN
        else:
            growth, longest = GROWTH, server_of(self._shift.queue.consumer.engine.dialect).poll_max
        return min(_jittered(max(silence * growth, FIRST_PAUSE)), self._shift.idling.poll_max or longest)


def _jittered(pause: float) -> float:
    return pause * (0.75 + random.random() / 2)
