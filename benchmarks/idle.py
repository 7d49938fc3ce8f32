"""
W6: what a worker costs that has nothing to do. All databases are silent at the same time, so that it takes a minute once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .arena import Contestant
from .contestants.ours import COUNTS
from .figures import Figures
from .stamps import Reader

WINDOW = 15.0
W6 = "W6 idle after {silence:.0f} s, "


@dataclass(slots=True)
class Sleeper:
    database: str
    contestant: Contestant
    counts: Path | None
    """Where our own worker writes how many statements it has sent."""
    stamps: Reader | None = None

    def spent(self) -> tuple[float, float, float]:
        """Seconds of CPU, statements, ends of transactions."""
        ticks = 0
        for pid in self.contestant.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        statements, transactions = COUNTS.unpack(self.counts.read_bytes()) if self.counts else (0, 0)
        return ticks / os.sysconf("SC_CLK_TCK"), statements, transactions


def measure_idle(sleepers: Sequence[Sleeper], silence: float, figures: Figures) -> None:
    for one in sleepers:
        one.contestant.ask("clear")
        one.stamps = one.contestant.start(1)
        one.contestant.ask("push_paced", 3, 1)
        one.contestant.wait_for(one.stamps, 3)
    time.sleep(max(silence - WINDOW, 0))
    before = [one.spent() for one in sleepers]
    time.sleep(WINDOW)
    prefix = W6.format(silence=silence)
    for one, (cpu, statements, transactions) in zip(sleepers, before, strict=True):
        cpu_after, statements_after, transactions_after = one.spent()
        label = one.contestant.entry.short
        figures.add(one.database, prefix + "CPU", label, "% core", (cpu_after - cpu) / WINDOW * 100)
        if one.counts:
            figures.add(one.database, prefix + "statements", label, "/s", (statements_after - statements) / WINDOW)
            figures.add(one.database, prefix + "transactions", label, "/s", (transactions_after - transactions) / WINDOW)
    for one in sleepers:
        assert one.stamps is not None
        (number, sent), *_ = one.contestant.ask("push_paced", 1, 1000)
        one.contestant.wait_for(one.stamps, 4)
        moment = next(moment for found, moment in one.stamps.found if found == number)
        figures.add(one.database, prefix + "then latency", one.contestant.entry.short, "ms", (moment - sent) * 1000)
        one.contestant.stop()
