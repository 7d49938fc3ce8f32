"""
The thread that renews leases.
"""

from __future__ import annotations

import time

from .logs import log
from .shift import Held, Shift
from .trouble import TROUBLE, first_line, kind_of, passes

__all__ = ["Renewer"]

NOT_OURS = "another worker holds it, or it is gone"
NOT_CONFIRMED = "its lease could not be confirmed in time"
BLOCKED_PAUSE = 0.05


class Renewer:
    """
    Extends the leases of everything that is held, at a third of the lease.
    """

    def __init__(self, shift: Shift) -> None:
        self._shift = shift

    def work(self) -> None:
        shift = self._shift
        pause = shift.lease / 3
        try:
            while not shift.closing.wait(pause):
                # What could not be renewed has two thirds left: time for several more tries.
                pause = shift.lease / (3 if self.renew_all() else 12)
                self.doubt()
        except BaseException as error:
            shift.die(error)

    def renew_all(self) -> bool:
        """
        Renew in one group; whether nothing is left to be tried again soon.

        Raises:
            UnusableDatabase: there is no hope.
        """
        shift = self._shift
        everything = shift.holdings.all()
        # Of a job that came to us twice only the younger lease can be alive.
        held = {entry.delivery.id: entry for entry in everything}
        if not held:
            return True
        asked = time.monotonic()
        try:
            with shift.patience.asking():
                renewed, lost = shift.queue.consumer.renew([entry.lease for entry in held.values()], shift.lease)
        except TROUBLE as error:
            shift.patience.bear(error)
            return False
        shift.patience.succeeded()
        for id in renewed:
            held[id].confirmed = asked
        for entry in (*(held[id] for id in lost), *(e for e in everything if held[e.delivery.id] is not e)):
            if entry.ended is None and shift.holdings.find(entry.lease) is entry:
                entry.lose(NOT_OURS)
        return len(renewed) + len(lost) == len(held)

    def renew_one(self, lease: tuple[int, str]) -> bool:
        """
        What `context.renew()` does, in the handler's thread: True if the lease was extended.
        """
        shift = self._shift
        held = shift.holdings.find(lease)
        until = time.monotonic() + shift.lease / 6
        while held is not None and held.ended is None:
            blocked = self._try_one(held)
            if blocked is None:
                return True
            if not blocked or time.monotonic() > until:
                return False
            time.sleep(BLOCKED_PAUSE)
        return False

    def _try_one(self, held: Held) -> bool | None:
        """
        None: renewed. True: worth another try. False: lost.
        """
        asked = time.monotonic()
        try:
            renewed, lost = self._shift.queue.consumer.renew([held.lease], self._shift.lease)
        except TROUBLE as error:
            log.warning("job %d could not be renewed by its handler: %s", held.delivery.id, first_line(error))
            return passes(kind_of(error))
        if renewed:
            held.confirmed = asked
            return None
        if lost:
            held.lose(NOT_OURS)
        return not lost

    def doubt(self) -> None:
        """
        Give up the leases that nobody has confirmed for their whole length. Asks the clock, not the database.

        Renewals pass over a row that the transaction of its own handler has locked, and so does everybody else.
        """
        now = time.monotonic()
        for held in self._shift.holdings.running():
            if now - held.confirmed > self._shift.lease and not (held.context is not None and held.context._locked()):
                held.lose(NOT_CONFIRMED)
