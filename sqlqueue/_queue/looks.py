"""
What looks at the lanes have found, remembered for a while.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._driver.lanes import Lane

__all__ = ["REMEMBERED", "Look", "Looks"]

REMEMBERED, LONGEST_REMEMBERED = 1.0, 10.0
SHARE = 10  # looks take no more than a tenth of the time, however many dead rows there are to pass over
SELECTIONS = 256


@dataclass(slots=True)
class Look:
    """
    The lanes that a look has found, and where claims since then have found each of them to begin.

    Rows that are gone stay in the way as long as any transaction anywhere may still see them, all of them before the first
    live one. That makes the beginning worth remembering, but it is a hint: a row that was pushed before it may be committed
    after it. The next look finds that.
    """

    began: float
    took: float
    lanes: list[Lane]
    back_at: float = 0.0
    """When the last rows that a claim has put back may be claimed."""
    _beginnings: dict[tuple[Lane, bool], Any] = field(default_factory=dict)

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_fresh(self) -> bool:
        return self.age < min(max(REMEMBERED, SHARE * self.took), LONGEST_REMEMBERED)

    def ready(self) -> list[Lane]:
        """
        The lanes in which rows may be claimed by now, or before these are forgotten.
        """
        age = self.age
        return [lane for lane in self.lanes if lane.due_in <= age]

    def beginning(self, lane: Lane, ahead: bool) -> Any:
        """
        From when on a claim of this kind finds rows of the lane.
        """
        return self._beginnings.get((lane, ahead), lane.first)

    def advance(self, lane: Lane, ahead: bool, due: Any) -> None:
        """
        A claim of this kind has taken all that was due before.
        """
        self._beginnings[lane, ahead] = due


class Looks:
    """
    The last look at each selection of queues.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, ...], Look] = {}

    def __len__(self) -> int:
        return len(self._last)

    def note(self, queues: Sequence[str], look: Look) -> None:
        if len(self._last) >= SELECTIONS:  # somebody asks for other queues each time
            self._last.clear()
        self._last[tuple(queues)] = look

    def last(self, queues: Sequence[str]) -> Look | None:
        return self._last.get(tuple(queues))

    def fresh(self, queues: Sequence[str]) -> Look | None:
        """
        The last look, if it is no older than what may be relied on.
        """
        look = self.last(queues)
        return look if look is not None and look.is_fresh else None
