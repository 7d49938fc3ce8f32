"""
Timeouts of handlers: who watches the clock, and how a handler hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from queue import Empty, SimpleQueue
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import JobTimeout

if TYPE_CHECKING:
    from ._job import Delivery

__all__ = ["AsyncWatch", "ThreadWatch", "Timeouts", "Watch"]

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds that a handler has to react before it counts as stuck."""
BUSY_PAUSE = 0.05  # until the next try to interrupt what must not be interrupted now
LONGEST_WAIT = 3600.0
FRAMES = 12

_log = logging.getLogger("sqlqueue")


class Watch:
    """
    One run of a handler with a timeout.
    """

    def __init__(self, timeouts: Timeouts, seconds: float, delivery: Delivery) -> None:
        self._timeouts = timeouts
        self.delivery = delivery
        self.text = f"the handler ran longer than its timeout of {seconds:g} s"
        self.seconds = seconds
        self.due = math.inf
        self.fired = False
        """The time is over, and the handler has been told or is about to be."""

    def begin(self) -> None:
        self.due = time.monotonic() + self.seconds
        self._timeouts.add(self)

    def look(self, now: float) -> None:
        """
        In the thread that watches: what is due is done, and the next moment set.
        """
        if self.fired:
            self.due = math.inf
            self._timeouts.report(self)
        else:
            self.due = now + (PATIENCE if self.interrupt() else BUSY_PAUSE)

    def interrupt(self) -> bool:
        """
        Tell the handler. False when that is not possible at this moment.
        """
        raise NotImplementedError

    def stack(self) -> str:
        """
        Where the handler is: places in the code, no values.
        """
        raise NotImplementedError


class ThreadWatch(Watch):
    """
    Raises JobTimeout in the thread of a handler, between two bytecodes of the handler's own.

    Python may deliver such an exception late, when the handler has returned and our code runs. There is at most one a run: whoever
    takes the token decides whether it comes, and nothing is left pending when `around` returns.
    """

    def __init__(self, timeouts: Timeouts, seconds: float, delivery: Delivery) -> None:
        super().__init__(timeouts, seconds, delivery)
        self._thread = threading.get_ident()
        self._token: list[None] = []  # taking it out is one step that no other thread can split
        self._raised = False

    def around(self, call: Callable[[], T]) -> T:
        """
        Call, for at most the timeout. What the call makes of JobTimeout is its result.
        """
        returned: list[T] = []
        raised: list[BaseException] = []
        self.begin()
        try:
            self._token.append(None)
            try:
                returned.append(call())
            except BaseException as error:
                raised.append(error)
            self._finish()
        except BaseException as late:  # ours came into the lines above: there is no second one, and nothing interrupts what follows
            self._finish()
            if type(late) is not JobTimeout or not (returned or raised):
                raised[:] = [late]
        if raised:
            raise self._described(raised.pop())
        return returned[0]

    def shielded(self, call: Callable[[], T]) -> Callable[[], T]:
        """
        `call`, never interrupted: this library's own work, which a handler asks for.
        """

        def shielding() -> T:
            if not self._take():
                self._await_delivery()
                return call()
            try:
                return call()
            finally:
                self._token.append(None)

        return shielding

    def interrupt(self) -> bool:
        if not self._take():
            return False
        self.fired = True
        _set_async_exception(self._thread, JobTimeout)
        self._raised = True
        return True

    def stack(self) -> str:
        return _stack_of_thread(self._thread)

    def _take(self) -> bool:
        try:
            self._token.pop()
        except IndexError:
            return False
        return True

    def _finish(self) -> None:
        """
        From here on nothing is raised. Once more from the beginning if it was raised in here.
        """
        while not self._take():
            if self._raised:
                _flush(self._thread)
                break
            time.sleep(0)  # the other thread is between two lines, or in a shielded call
        self._timeouts.discard(self)

    def _await_delivery(self) -> None:
        while not self._raised:
            time.sleep(0)
        time.sleep(0)  # here at the latest

    def _described(self, error: BaseException) -> BaseException:
        if type(error) is JobTimeout and not error.args:
            error.args = (self.text,)
        return error


class AsyncWatch(Watch):
    """
    Cancels the task of an async handler.
    """

    def __init__(self, timeouts: Timeouts, seconds: float, delivery: Delivery) -> None:
        super().__init__(timeouts, seconds, delivery)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._awaited: Any = None
        self._cancelled = False

    async def around(self, work: Awaitable[T]) -> T:
        """
        Await, for at most the timeout. What the awaited makes of the cancellation is its result.
        """
        self._awaited = work
        self.begin()
        try:
            return await work
        except asyncio.CancelledError as error:
            if not self._cancelled:
                raise
            raise JobTimeout(self.text) from error
        finally:
            if self._cancelled and self._task is not None:
                self._task.uncancel()
            self._task = None
            self._timeouts.discard(self)

    def interrupt(self) -> bool:
        self.fired = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel)
        return True

    def stack(self) -> str:
        if self._task is asyncio.current_task(self._loop):  # it does not let go of the loop
            return _stack_of_thread(self._thread)
        return _stack_of_coroutine(self._awaited)

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()


class Timeouts:
    """
    Watches the clock for handlers that have a timeout, in a thread that starts with the first of them.

    Args:
        on_stuck: is told of a handler that has not reacted for 30 s.
    """

    def __init__(self, on_stuck: Callable[[Delivery], None] | None = None) -> None:
        self._on_stuck = on_stuck
        self._running: dict[Watch, None] = {}
        self._next_look = math.inf
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        if self._thread is None:
            self._start()
        self._running[watch] = None
        if watch.due < self._next_look:
            self._bell.put(True)

    def discard(self, watch: Watch) -> None:
        self._running.pop(watch, None)

    def close(self) -> None:
        """
        Nobody watches any more.
        """
        self._bell.put(False)
        if self._thread is not None:
            self._thread.join(1.0)

    def report(self, watch: Watch) -> None:
        """
        Say that a handler does not react.
        """
        if watch not in self._running:
            return
        stack = watch.stack()
        if watch not in self._running:  # it has ended while we looked, and the stack is somebody else's
            return
        _log.error(
            "job %d (%s) is stuck: its timeout of %g s ended %g s ago, and it has not reacted; it is at %s",
            watch.delivery.id,
            watch.delivery.name,
            watch.seconds,
            PATIENCE,
            stack,
        )
        if self._on_stuck is not None:
            self._on_stuck(watch.delivery)

    def _start(self) -> None:
        with self._guard:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="sqlqueue-timeouts", daemon=True)
                thread.start()
                self._thread = thread

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            self._next_look = math.inf  # whoever is added from now on rings, or is seen
            now = time.monotonic()
            for watch in list(self._running):
                if watch.due <= now:
                    with contextlib.suppress(BaseException):  # of logging: it must not stop the clock
                        watch.look(now)
            self._next_look = min((watch.due for watch in list(self._running)), default=math.inf)
            with contextlib.suppress(Empty):
                goes_on = self._bell.get(timeout=min(max(self._next_look - time.monotonic(), 0.0), LONGEST_WAIT))


class _Flushed(BaseException):
    pass


def _flush(thread: int) -> None:
    """
    Let nothing be pending in this thread. A thread has one place for an exception that is to come: put another one there, and catch it.

    To clear the place would be shorter. But Python 3.11 and 3.12 go on looking for what is not there any more, at every call and
    every loop, and 3.11 for ever once a debugger traces the thread.
    """
    try:
        while True:  # again, if the callback of a weak reference has swallowed it
            _set_async_exception(thread, _Flushed)
            time.sleep(0)
    except _Flushed:
        pass


def _set_async_exception(thread: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


# --- places in the code


def _stack_of_thread(thread: int) -> str:
    frames: list[str] = []
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and len(frames) < FRAMES:
        frames.append(_place(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return " < ".join(frames) or "an unknown place"


def _stack_of_coroutine(awaited: Any) -> str:
    frames: list[str] = []
    while awaited is not None and len(frames) < FRAMES:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None:
            frames.append(_place(frame.f_code, frame.f_lineno))
        awaited = getattr(awaited, "cr_await", None)
    return " < ".join(reversed(frames)) or "an unknown place"


def _place(code: CodeType, line: int | None) -> str:
    return f"{code.co_qualname} ({code.co_filename}:{line or code.co_firstlineno})"
