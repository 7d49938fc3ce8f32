"""
How the thread that claims sleeps, and what wakes it.
"""

from __future__ import annotations

import contextlib
import time

from .._dialects import CannotWatch, Watch, WatchLost, open_watch
from .._driver.sleepers import note_worker, strike_dead_workers, strike_worker
from .._job import Delivery
from .logs import log
from .shift import Shift
from .trouble import first_line

__all__ = ["Waking"]

SIGN_OF_LIFE = 20.0
BUSY = 0.25
BETWEEN_STRIKES = 300.0
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0


class Waking:
    """
    Waits for changes in the database where there is something to wait for.

    Where pushes announce themselves only to sleepers, a worker that has found nothing writes down that it sleeps, and has
    to look once more before it does: what was committed in between has announced itself to nobody. A transaction that had
    not seen the note and commits later still does not; so the pauses between looks grow slowly even here.
    """

    def __init__(self, shift: Shift, *, wanted: bool) -> None:
        self._shift = shift
        self._wanted = wanted
        self._watch: Watch | None = None
        self._asleep = False  # as it is written down
        self._noted = 0.0  # when that was last written
        self._busy_since: float | None = None
        self._strike_at = 0.0
        self._pause = FIRST_PAUSE
        self._try_again = 0.0

    @property
    def watching(self) -> bool:
        """
        Whether a push ends a pause.
        """
        return self._watch is not None

    def looked(self, found: bool) -> bool:
        """
        Note what a look has found; whether to look once more before the next pause.
        """
        if found:
            self._busy_since = self._busy_since or time.monotonic()
            return False
        self._busy_since = None
        opened = self._watch is None and self._open()
        return (not self._asleep and self._note(asleep=True)) or opened

    def wait(self, pause: float, *, has_room: bool) -> bool:
        """
        Wait until the bell rings, something has changed, or the pause is over; whether to look now.
        """
        now = time.monotonic()
        if self._asleep and self._busy_since is not None and now - self._busy_since > BUSY:
            self._note(asleep=False)  # pushes need not pay for announcements to a worker that looks anyway
        elif self._noted and now - self._noted > SIGN_OF_LIFE and self._note(asleep=self._asleep):
            return self._asleep  # perhaps it had been taken for dead
        if self._noted:
            pause = min(pause, self._noted + SIGN_OF_LIFE - now)
        if self._asleep and self._busy_since is not None:
            pause = min(pause, BUSY)
        if self._watch is None or not has_room:
            self._shift.claim_bell.wait(pause)
            return False
        try:
            return self._shift.claim_bell.wait_beside(self._watch.wait, pause)
        except WatchLost as error:
            self._lose(error)
            return True

    def announced(self) -> list[tuple[str, int, str]]:
        """
        The lanes in which pushes have announced themselves since the last time, as far as that is known.
        """
        return [] if self._watch is None else self._watch.announced()

    def claim_at(self, lane: tuple[str, int, str], limit: int) -> list[Delivery]:
        """
        Take what has been announced in a lane, on the connection that has heard of it.
        """
        watch, shift = self._watch, self._shift
        if watch is None:
            return []
        try:
            return shift.queue.consumer.claim_announced(watch.connection, lane, limit, shift.lease, shift.name)
        except Exception as error:
            self._lose(error)
            return []

    def close(self) -> None:
        """
        Strike ourselves off, and give up the connection.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        # Whatever goes wrong: a row without a sign of life is soon not believed any more.
        with contextlib.suppress(Exception):
            if self._noted:
                strike_worker(watch.connection, self._shift.queue.tables, self._shift.name)
                watch.connection.commit()
        with contextlib.suppress(Exception):
            watch.close()

    def _open(self) -> bool:
        if not self._wanted or time.monotonic() < self._try_again:
            return False
        shift = self._shift
        try:
            with shift.patience.asking():
                # None where only looking helps, and always will.
                self._watch = open_watch(shift.queue.consumer.engine, shift.queue.tables, shift.queues, shift.claim_bell.socket)
            self._wanted = self._watch is not None
        except CannotWatch as error:
            self._wanted = False
            log.info("looking for new jobs at intervals: %s", error)
        except Exception as error:  # also the driver's own, and those of the operating system: jobs are found without it
            self._lose(error)
        return self.watching

    def _note(self, *, asleep: bool) -> bool:
        """
        Write down whether we sleep; whether that has changed anything for those who push.
        """
        watch, shift = self._watch, self._shift
        if watch is None or not watch.by_register:
            return False
        try:
            with shift.patience.asking():
                note_worker(watch.connection, shift.queue.tables, shift.name, shift.queues, asleep=asleep)
                if time.monotonic() >= self._strike_at:
                    self._strike_at = time.monotonic() + BETWEEN_STRIKES
                    strike_dead_workers(watch.connection, shift.queue.tables)
                watch.connection.commit()
        except Exception as error:
            self._lose(error)
            return False
        self._asleep, self._noted, self._pause = asleep, time.monotonic(), FIRST_PAUSE
        return True

    def _lose(self, error: Exception) -> None:
        """
        Go on by looking alone for a while.
        """
        log.info("pushes cannot wake this worker at present, it looks at intervals: %s", first_line(error))
        watch, self._watch = self._watch, None
        self._asleep, self._noted = False, 0.0
        self._try_again, self._pause = time.monotonic() + self._pause, min(self._pause * 2, LONGEST_PAUSE)
        if watch is not None:
            with contextlib.suppress(Exception):
                watch.close()
