"""
Keys that nobody needs any more, swept by whatever worker is there.
"""

from __future__ import annotations

import random
import time

from .._driver.keys import LONGEST_AGO
from .logs import log
from .shift import Shift
from .trouble import TROUBLE, first_line

__all__ = ["Sweeping"]

INTERVAL = 60.0


class Sweeping:
    """
    One portion of expired keys a minute; the first one sometime within the first minute, so that workers that are started
    together do not sweep together.
    """

    def __init__(self, shift: Shift) -> None:
        self._shift = shift
        self._next = time.monotonic() + INTERVAL * random.random()
        self._since = LONGEST_AGO

    def sweep_when_due(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL * (0.75 + random.random() / 2)
        try:
            with self._shift.patience.asking():
                self._since = self._shift.queue.consumer.sweep_keys(self._since)
        except TROUBLE as error:  # they can wait
            log.info("expired keys could not be swept: %s", first_line(error))
