"""
What was measured.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from .arena import OURS

TIMES = "times"


@dataclass(slots=True)
class Figure:
    """
    One workload of one contestant on one database, measured once or several times.
    """

    database: str
    workload: str
    contestant: str
    unit: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def more_is_better(self) -> bool:
        return self.unit == "jobs/s"


class Figures:
    def __init__(self) -> None:
        self._all: dict[tuple[str, str, str], Figure] = {}

    def add(self, database: str, workload: str, contestant: str, unit: str, *values: float) -> None:
        figure = self._all.setdefault((database, workload, contestant), Figure(database, workload, contestant, unit))
        figure.values.extend(values)

    def compare(self, database: str, workload: str, dividend: str, divisor: str) -> None:
        """A new figure for each contestant: how many times its median of one workload is that of another."""
        for (found, _, contestant), figure in list(self._all.items()):
            other = self._all.get((database, divisor, contestant))
            if found == database and figure.workload == dividend and other is not None and other.median:
                self.add(database, workload, contestant, TIMES, figure.median / other.median)

    def take(self, database: str, workload: str, contestant: str) -> list[float]:
        """Remove a figure; its values."""
        figure = self._all.pop((database, workload, contestant), None)
        return figure.values if figure else []

    def of(self, database: str) -> list[Figure]:
        """In the order in which the workloads were measured; ours first, then what is best."""
        found = [figure for figure in self._all.values() if figure.database == database]
        workloads = list(dict.fromkeys(figure.workload for figure in found))

        def place(figure: Figure) -> tuple[Any, ...]:
            goodness = -figure.median if figure.more_is_better else figure.median
            return (workloads.index(figure.workload), figure.contestant != OURS, goodness)

        return sorted(found, key=place)

    def ratio(self, figure: Figure) -> float | None:
        """How many times better we are; below 1, how much worse."""
        ours = self._all.get((figure.database, figure.workload, OURS))
        if ours is None or ours is figure or figure.unit == TIMES or not figure.median or not ours.median:
            return None
        return ours.median / figure.median if figure.more_is_better else figure.median / ours.median

    def as_json(self) -> list[dict[str, Any]]:
        databases = dict.fromkeys(figure.database for figure in self._all.values())
        return [
            {
                "database": figure.database,
                "workload": figure.workload,
                "contestant": figure.contestant,
                "unit": figure.unit,
                "median": round(figure.median, 3),
                "ours_is_better_by": None if (ratio := self.ratio(figure)) is None else round(ratio, 3),
                "values": [round(value, 3) for value in figure.values],
            }
            for database in databases
            for figure in self.of(database)
        ]

    def table(self, database: str) -> str:
        lines = [f"  {'':<40}{'':<28}{'median':>10} {'':<7}{'least':>10}{'most':>10}{'ours is better by':>19}"]
        workload = ""
        for figure in self.of(database):
            shown, workload = figure.workload if figure.workload != workload else "", figure.workload
            ratio = self.ratio(figure)
            numbers = "".join(number(value) for value in (min(figure.values), max(figure.values)))
            better = "" if ratio is None else f"{ratio:.2f}"
            lines.append(f"  {shown:<40}{figure.contestant:<28}{number(figure.median)} {figure.unit:<7}{numbers}{better:>19}")
        return "\n".join(lines)


def number(value: float) -> str:
    return f"{value:>10,.0f}" if value >= 100 else f"{value:>10.2f}"
