"""
W1 to W4: measured in rounds, in which each contestant has its turn at each workload, so that a slow minute of the machine meets all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .arena import Contestant, Entry
from .figures import Figures
from .stamps import Reader

W1, W2, W4 = "W1 push with a business row", "W2 bulk push", "W4 latency when idle"
W3T = "W3t drain, each job writes a row"
LEAST = 200  # jobs, however slow a contestant is
PACED = 15


@dataclass(frozen=True, slots=True)
class Sizes:
    runs: int
    jobs: int
    pushes: int
    writing: int
    workloads: frozenset[str]
    processes: tuple[int, ...] = (1, 2, 4)


def w3(processes: int) -> str:
    return f"W3 drain, {processes} process{'es' if processes > 1 else ''}"


def run_rounds(database: str, contestants: Sequence[Contestant], sizes: Sizes, figures: Figures) -> None:
    turns = list(contestants)
    for _ in range(sizes.runs):
        print(".", end="", flush=True)
        if "W1" in sizes.workloads:
            each(turns, lambda entry: entry.pushes, partial(push, database=database, count=sizes.pushes, figures=figures))
        for processes in sizes.processes if "W3" in sizes.workloads else ():
            each(
                turns,
                lambda entry, count=processes: count in entry.processes,
                partial(drain, database=database, most=sizes.jobs, processes=processes, figures=figures),
            )
        if "W3t" in sizes.workloads:
            each(turns, lambda entry: entry.writes, partial(drain_writing, database=database, most=sizes.writing, figures=figures))
        if "W4" in sizes.workloads:
            each(turns, lambda entry: entry.waits, partial(wake, database=database, figures=figures))
        turns = [*turns[1:], *turns[:1]]
    for processes in sizes.processes[1:]:
        figures.compare(database, f"W3 {processes} processes to 1", w3(processes), w3(1))
    add_percentiles(database, contestants, figures)


def each(turns: list[Contestant], wanted: Callable[[Entry], bool], measure: Callable[[Contestant], None]) -> None:
    """A peer that fails is left out from then on, with what it said; where we fail or a loop by hand, the benchmark does."""
    for one in [one for one in turns if wanted(one.entry)]:
        try:
            measure(one)
        except RuntimeError as error:
            if one.entry.environment is None:
                raise
            print(f"\n{one.entry.label} is left out from here on: {error}")
            turns.remove(one)


def push(one: Contestant, database: str, count: int, figures: Figures) -> None:
    one.ask("clear")
    figures.add(database, W1, one.entry.short, "jobs/s", count / one.ask("push_each", count))


def drain(one: Contestant, database: str, most: int, processes: int, figures: Figures) -> None:
    """From the first start to the last settlement, of workers that find the queue full. Filling it is W2."""
    jobs = max(int(most * one.entry.share), LEAST)
    one.ask("clear")
    took = one.ask("push_bulk", jobs)
    if processes == 1 and one.entry.pushes:
        figures.add(database, W2, one.entry.short, "jobs/s", jobs / took)
    figures.add(database, w3(processes), one.entry.label, "jobs/s", jobs / emptied(one, jobs, one.start(processes)))


def drain_writing(one: Contestant, database: str, most: int, figures: Figures) -> None:
    """Each job commits a business row together with its own completion; one process, four at once."""
    one.ask("clear")
    one.ask("push_bulk", most)
    figures.add(database, W3T, one.entry.short, "jobs/s", most / emptied(one, most, one.start(1, "work_writing")))


def emptied(one: Contestant, jobs: int, stamps: Reader) -> float:
    """The seconds that the workers take which have just been started."""
    flag = one.run / "started"
    one.send("watch", str(flag), 120)
    try:
        one.wait_for(stamps, jobs)
    finally:
        flag.touch()
        empty = one.receive("watch")
        one.stop()
    if len({number for number, _ in stamps.found}) != jobs or len(stamps.found) != jobs:
        raise RuntimeError(f"{one.entry.label}: {len(stamps.found)} starts of {jobs} jobs")
    return float(empty - min(moment for _, moment in stamps.found))


def wake(one: Contestant, database: str, figures: Figures) -> None:
    """From the commit of a push to the start of the job, where nothing else is to be done."""
    one.ask("clear")
    stamps = one.start(1)
    try:
        one.ask("push_paced", 3, 1)
        one.wait_for(stamps, 3)
        sent = dict(one.ask("push_paced", PACED, 1000))
        one.wait_for(stamps, PACED + 3)
    finally:
        one.stop()
    latencies = [(moment - sent[number]) * 1000 for number, moment in stamps.found if number in sent]
    figures.add(database, W4, one.entry.short, "ms", *latencies)


def add_percentiles(database: str, contestants: Sequence[Contestant], figures: Figures) -> None:
    for one in contestants:
        values = sorted(figures.take(database, W4, one.entry.short))
        for percent in (50, 95, 99) if values else ():
            place = min(len(values) - 1, round(percent / 100 * (len(values) - 1)))
            figures.add(database, f"{W4}, p{percent}", one.entry.short, "ms", values[place])
