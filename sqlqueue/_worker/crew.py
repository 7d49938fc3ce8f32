"""
The threads of one run, and how it ends.
"""

from __future__ import annotations

import math
import threading
import time
from functools import partial

from .._driver.settle import Release as ReleaseRow
from .._executor import Ended, Status, run_delivery
from .._job import JobContext
from ..errors import UnusableDatabase
from .claiming import Claimer
from .logs import log
from .loop import Loop
from .renewing import Renewer
from .settling import Settler
from .shift import HANDED_BACK, Held, Shift
from .telling import tell_ended, tell_interrupted, tell_looking, tell_processing
from .trouble import TROUBLE, first_line

__all__ = ["Crew"]

HAND_BACK_DELAY = 5.0
CLAIM_GRACE = 10.0  # for a claim under way whose answer does not come
CUT_SHORT_GRACE = 3.0  # for handing back, and one more for what has ended
FATAL_GRACE = 5.0  # for what has ended when the worker has to stop by itself
SHORT_PAUSE = 0.05


class Crew:
    """
    Starts the threads, waits until the shift is over, and sees to it that nothing is lost then.
    """

    def __init__(self, shift: Shift, *, wait_for_database: float, shutdown_timeout: float | None = None) -> None:
        self._shift = shift
        self._shutdown_timeout = shutdown_timeout
        self._renewer = Renewer(shift)
        self._claimer = Claimer(shift, self._renewer, wait_for_database=wait_for_database)
        self._settler = Settler(shift)
        self._loop = Loop(shift, shift.async_concurrency - shift.concurrency)
        self._tick = min(1.0, shift.lease / 12)
        self._claiming = self._thread("claim", self._claimer.work)
        self._settling = self._thread("settle", self._settler.work)
        self._renewing = self._thread("renew", self._renewer.work)
        self._slots = [self._thread(f"slot-{number + 1}", partial(self._run_jobs, number)) for number in range(shift.concurrency)]

    def work(self) -> bool:
        """
        Work until the shift ends; False when running jobs were cut short.
        """
        grace = FATAL_GRACE
        try:
            for thread in (self._settling, self._renewing, *self._slots, self._claiming):
                thread.start()
                self._shift.own_threads.add(thread.ident)
            clean = self._conduct()
            grace = FATAL_GRACE if clean else 1.0
            return clean
        finally:
            self._close(grace)

    def run_one(self) -> bool:
        """
        Run at most one job in this thread; whether there was one.
        """
        self._claimer.start_up()
        tell_looking(self._shift, 1)
        claimed = self._claimer.claim(1)
        self._claimer.say_goodbye("once")
        waiting = list(claimed)
        if waiting:
            self._renewing.start()
        try:
            for held in claimed:
                self._run_here(held, self._started(held))
            waiting = [held for held in waiting if self._shift.holdings.find(held.lease)]
            while waiting:
                if waiting := self._settler.settle(waiting):
                    time.sleep(SHORT_PAUSE)
        finally:
            self._shift.closing.set()
            self._shift.timeouts.close()
        return bool(claimed)

    def _thread(self, name: str, body: object) -> threading.Thread:
        return threading.Thread(target=body, name=f"sqlqueue-{name}", daemon=True)  # type: ignore[arg-type]

    def _run_jobs(self, slot: int) -> None:
        slots = self._shift.slots
        try:
            while (held := self._shift.todo.get()) is not None:
                if self._shift.asked:
                    self._shift.end(held, HANDED_BACK)
                    continue
                self._run(held, slot)
                slots[slot] = 0.0
        except BaseException as error:
            self._shift.die(error)

    def _run(self, held: Held, slot: int) -> None:
        shift = self._shift
        held.is_async = shift.queue.registry.is_async(held.delivery.name)
        context = self._started(held)
        shift.slots[slot] = held.started or 0.0
        if held.is_async:
            self._loop.run(held, context)
        else:
            self._run_here(held, context)

    def _started(self, held: Held) -> JobContext:
        context = held.start(self._renewer.renew_one)
        if self._shift.queue.listeners.kinds:
            tell_processing(self._shift.queue.listeners, held.delivery, self._shift.name)
        return context

    def _run_here(self, held: Held, context: JobContext) -> None:
        shift = self._shift
        ended = run_delivery(shift.queue, held.delivery, context, shift.name, timeouts=shift.timeouts)
        shift.end(held, ended)
        if ended.committed:
            self._settler.note_committed(held)

    def _conduct(self) -> bool:
        shift = self._shift
        while not shift.ending and self._claiming.is_alive():
            self._wait()
        since = time.monotonic()
        if shift.asked or shift.fatal is not None:
            shift.hand_back_unstarted()
            if shift.holdings.busy:
                log.info("%s: no more jobs are taken, %d are running", shift.reason or "trouble", shift.holdings.busy)
        while not self._is_over(since):
            if why := self._why_not_wait():
                self._cut_short(why)
                return False
            self._wait()
        for held in shift.holdings.running():
            log.error("job %d (%s) is left behind: it has used an attempt, and comes back when its lease ends", *held.label)
        return not shift.stuck

    def _wait(self) -> None:
        self._shift.bell.wait(min(self._tick, self._time_to_finish()))
        self._renewer.doubt()  # here too: the thread that renews may be waiting for an answer
        try:
            self._shift.patience.check()
        except UnusableDatabase as error:
            self._shift.die(error)

    def _why_not_wait(self) -> str | None:
        """
        Why running jobs get no more time, if they do not.
        """
        if self._shift.signals > 1:
            return "second signal"
        return f"{self._shutdown_timeout:g} s to shut down are over" if self._time_to_finish() <= 0 else None

    def _time_to_finish(self) -> float:
        """
        Seconds that running jobs still have.
        """
        asked_at, timeout = self._shift.asked_at, self._shutdown_timeout
        return math.inf if asked_at is None or timeout is None else asked_at + timeout - time.monotonic()

    def _is_over(self, since: float) -> bool:
        if self._shift.fatal is not None:
            return True
        no_more_claims = not self._claiming.is_alive() or time.monotonic() - since > CLAIM_GRACE
        return no_more_claims and self._shift.stuck.issuperset(self._shift.holdings.all())

    def _cut_short(self, why: str) -> None:
        running = [held for held in self._shift.holdings.running() if held not in self._shift.stuck]
        log.warning("%s: handing back %d running jobs, due again in %g s", why, len(running), HAND_BACK_DELAY)
        self._shift.closing.set()  # no renewal may hold the rows
        # Whatever the database does, the process ends now.
        until = time.monotonic() + CUT_SHORT_GRACE
        helpers = [self._thread("hand-back", lambda: self._hand_back(running))]
        if self._shift.queue.listeners.kinds:
            helpers.append(self._thread("tell", lambda: tell_interrupted(self._shift, why, running)))
        for helper in helpers:
            helper.start()
        for helper in helpers:
            self._join(helper, until - time.monotonic())

    def _hand_back(self, running: list[Held]) -> None:
        outcome = Ended(Status.RELEASED, ReleaseRow(HAND_BACK_DELAY, None))
        left = {held.delivery.id: held.settlement(outcome) for held in running}
        until = time.monotonic() + CUT_SHORT_GRACE
        try:
            while left and time.monotonic() < until:
                results = self._shift.queue.consumer.settle(list(left.values()), lock_wait=1)
                left = {id: settlement for id, settlement in left.items() if id in results.blocked}
                self._tell_handed_back(running, outcome, results.settled)
                self._shift.given_up.wait(SHORT_PAUSE if left else 0)
        except TROUBLE as error:
            log.error("they could not be handed back and come back when their leases end: %s", first_line(error))

    def _tell_handed_back(self, running: list[Held], outcome: Ended, settled: set[int]) -> None:
        shift = self._shift
        if shift.queue.listeners.kinds:
            for held in running:
                if held.delivery.id in settled and shift.holdings.may_tell(held):
                    tell_ended(shift.queue.listeners, held.delivery, shift.name, outcome)

    def _close(self, grace: float) -> None:
        """
        Let the threads go. What has ended is settled first, even when the worker has to stop by itself.
        """
        shift = self._shift
        shift.closing.set()
        for _ in self._slots:
            shift.todo.put(None)
        shift.over.put(None)
        self._join(self._settling, grace)
        shift.given_up.set()
        for held in shift.holdings.running():
            held.lose("its worker has stopped")
        shift.claim_bell.ring()
        shift.timeouts.close()
        loop = self._loop.close()
        until = time.monotonic() + grace
        jobs = [] if shift.holdings else [*self._slots, *([loop] if loop else [])]
        for thread in (self._claiming, self._renewing, *jobs):
            self._join(thread, until - time.monotonic())

    @staticmethod
    def _join(thread: threading.Thread, timeout: float) -> None:
        if thread.ident is not None:
            thread.join(max(timeout, 0.0))
