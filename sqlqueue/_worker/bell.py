"""
What wakes a thread of the worker.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["Bell"]


class Bell:
    """
    An event that may be rung from a signal handler, where a lock of `threading.Event` could be held already.
    """

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()
        self._wire: tuple[socket.socket, socket.socket] | None = None
        self._on_the_wire = False

    def ring(self) -> None:
        self._rings.put(None)
        if self._on_the_wire and self._wire is not None:
            with contextlib.suppress(OSError):  # full: it has rung. Closed: nobody waits any more.
                self._wire[0].send(b".")

    @property
    def socket(self) -> socket.socket:
        """
        Can be read after a ring, for somebody who waits for other things too.
        """
        if self._wire is None:
            self._wire = socket.socketpair()
            for end in self._wire:
                end.setblocking(False)
        return self._wire[1]

    def wait(self, timeout: float) -> None:
        """
        Wait for a ring at most so long. Several rings are one.
        """
        with contextlib.suppress(Empty):
            self._rings.get(timeout=max(timeout, 0.0))
            while True:
                self._rings.get_nowait()

    def wait_beside(self, wait: Callable[[float], bool], timeout: float) -> bool:
        """
        Let `wait` do the waiting, which ends when `socket` can be read; what it returned, False when it has rung before.
        """
        self._on_the_wire = True
        try:
            return self._rings.empty() and wait(max(timeout, 0.0))
        finally:
            self._on_the_wire = False
            self.wait(0)
            with contextlib.suppress(OSError):
                self.socket.recv(4096)

    def close(self) -> None:
        """
        Nobody waits beside it any more.
        """
        if self._wire is not None:
            for end in self._wire:
                end.close()
