"""
What a run did, and when it has to end.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from .._executor import Status

__all__ = ["LOST", "MAX_JOBS", "Limits", "Meter", "Summary"]

LOST = "lost"
MAX_JOBS = "max jobs"
MEMORY_INTERVAL = 1.0


@dataclass(slots=True)
class Summary:
    """
    What a worker did.
    """

    reason: str
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [f"{self.counts[status]} {status}" for status in (*Status, LOST) if self.counts[status] or status == Status.DONE]
        return f"stopped ({self.reason}) after {self.seconds:.1f} s: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Limits:
    """
    When a worker stops by itself.
    """

    stop_when_empty: bool = False
    max_jobs: int | None = None
    max_time: float | None = None
    max_memory: int | None = None


class Meter:
    """
    Measures one run against its limits.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._began = time.monotonic()
        self._memory_checked = 0.0
        self.started = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def jobs_left(self) -> int:
        """
        How many more may be started.
        """
        most = self._limits.max_jobs
        return sys.maxsize if most is None else most - self.started

    @property
    def seconds_left(self) -> float:
        most = self._limits.max_time
        return float("inf") if most is None else most - self.seconds

    def reached(self) -> str | None:
        """
        The limit that has been reached, in words.
        """
        if self.seconds_left <= 0:
            return "max time"
        if self.jobs_left <= 0:
            return MAX_JOBS
        return "max memory" if self._memory_is_used_up() else None

    def _memory_is_used_up(self) -> bool:
        most, now = self._limits.max_memory, time.monotonic()
        if most is None or now - self._memory_checked < MEMORY_INTERVAL:
            return False
        self._memory_checked = now
        return memory_in_use() > most


def memory_in_use() -> float:
    """
    MiB of this process. Where the system tells only the highest use so far, that.
    """
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        try:
            import resource  # not on Windows
        except ImportError:
            return 0.0
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used / (2**20 if sys.platform == "darwin" else 2**10)
