"""
The event loop of a worker, and who runs on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial

from .._executor import Ended, run_delivery_async
from .._job import JobContext
from .logs import log
from .shift import HANDED_BACK, Held, Shift

__all__ = ["Loop"]

START_GRACE = 60.0


class _Run:
    """
    One async job on the loop.
    """

    __slots__ = ("context", "ended", "held", "slot_is_free")

    def __init__(self, held: Held, context: JobContext) -> None:
        self.held = held
        self.context = context
        self.ended: Ended | None = None
        self.slot_is_free = threading.Semaphore(0)


class Loop:
    """
    Runs async jobs on one event loop, in a thread that starts with the first of them.

    Each job starts in a slot, at once: nothing that has been claimed waits for the loop. While fewer than `most_beside` do so, it
    leaves the slot to the next job and goes on beside it; otherwise it keeps the slot until it ends, or until another one has
    ended that ran beside. So a claim needs to know nothing but the number of free slots.
    """

    def __init__(self, shift: Shift, most_beside: int) -> None:
        self._shift = shift
        self._most_beside = most_beside
        self._guard = threading.Lock()
        self._in_slots: dict[_Run, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # a loop keeps no reference of its own
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def run(self, held: Held, context: JobContext) -> None:
        """
        Start a job. Returns when the slot in whose thread this is called is free again.
        """
        loop = self._loop or self._start()
        run = _Run(held, context)
        if is_beside := self._leave_slot(run):
            self._shift.slot_is_free()
        loop.call_soon_threadsafe(self._begin, run)
        if not is_beside:
            run.slot_is_free.acquire()

    def close(self) -> threading.Thread | None:
        """
        Let the loop end when nothing runs on it any more; its thread, if it has been needed.
        """
        with self._guard:
            self._is_closing = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._end_if_idle)
        return self._thread

    def _leave_slot(self, run: _Run) -> bool:
        with self._guard:
            if self._shift.beside < self._most_beside:
                self._shift.beside += 1
                return True
            self._in_slots[run] = None
            return False

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._guard:
            if self._loop is None:
                began = threading.Event()
                self._thread = threading.Thread(target=self._work, args=(began,), name="sqlqueue-loop", daemon=True)
                self._thread.start()
                began.wait(START_GRACE)
                self._shift.own_threads.add(self._thread.ident)
            if self._loop is None:
                raise RuntimeError("the event loop has not begun")
            return self._loop

    # --- in the thread of the loop

    def _work(self, began: threading.Event) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = loop = runner.get_loop()
                began.set()
                while not (self._is_closing and not self._tasks):
                    try:
                        loop.run_forever()
                    except BaseException as error:  # a task that a handler has started may raise SystemExit: the loop goes on
                        log.error("a task that a job has left on the event loop raised %s", type(error).__name__)
        except BaseException as error:
            self._shift.die(error)
        finally:
            began.set()

    def _begin(self, run: _Run) -> None:
        task = asyncio.get_running_loop().create_task(self._complete(run))
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, run))

    async def _complete(self, run: _Run) -> None:
        shift = self._shift
        run.ended = await run_delivery_async(shift.queue, run.held.delivery, run.context, shift.name, timeouts=shift.timeouts)

    def _end(self, run: _Run, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._shift.die(error)
            return
        self._free_slot(run)  # first: the slots that are free may be fewer than others think, never more
        # Without an end it has not begun: another job's handler has cancelled all tasks that it found.
        self._shift.end(run.held, run.ended or HANDED_BACK)
        self._end_if_idle()

    def _free_slot(self, run: _Run) -> None:
        """
        A job has ended. What it leaves is a slot, its own or that of another one, which takes its place beside the slots.
        """
        with self._guard:
            if run in self._in_slots:
                del self._in_slots[run]
            elif self._in_slots:
                run = next(iter(self._in_slots))
                del self._in_slots[run]
            else:
                self._shift.beside -= 1
                return
        run.slot_is_free.release()

    def _end_if_idle(self) -> None:
        if self._is_closing and not self._tasks:
            asyncio.get_running_loop().stop()
