"""
Signals and garbage, while a worker has the main thread.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from .shift import Shift

__all__ = ["Interrupted", "Signals"]

NAMES = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGBREAK")  # not every system has all


class Interrupted(BaseException):
    """
    A signal came while there was nothing to finish.
    """


class Signals:
    """
    The first signal asks the shift to stop, the second cuts it short, the third does what it did before.

    In another thread than the main one they are left to the program.
    """

    def __init__(self, shift: Shift) -> None:
        self._shift = shift
        self._before: dict[int, Any] = {}
        self._interrupting = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Signals:
        if self._in_main_thread:
            for name in NAMES:
                number = getattr(signal, name, None)
                if number is not None:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """
        Let a signal end this block at once.
        """
        self._interrupting = True
        try:
            yield
        finally:
            self._interrupting = False

    @contextlib.contextmanager
    def process_is_ours(self) -> Iterator[None]:
        """
        Keep the collector from what has been imported. Deliveries come and go by the thousand, and each time it would go
        through all modules of the application, a fifth of the time of a worker with short jobs.
        """
        freezes = self._in_main_thread and not gc.get_freeze_count()
        if freezes:
            gc.freeze()
        try:
            yield
        finally:
            if freezes:
                gc.unfreeze()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Runs between two bytecodes of the main thread, perhaps inside a lock: nothing here may wait for one.
        self._shift.signals += 1
        self._shift.ask_to_stop(signal.Signals(number).name)
        if self._shift.signals > 1:
            self._restore()
        if self._interrupting:
            raise Interrupted

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
