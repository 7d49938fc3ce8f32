"""
Jobs that end their worker's process, and processes that are ended.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from sqlqueue._dialects import after
from tests.acceptance.processes import EXIT_PATIENCE, Process, Site
from tests.workers import PATIENCE, Gate, change, eventually, expire, failures, working

CODES = {"exit": 137, "kill": -signal.SIGKILL, "segfault": -signal.SIGSEGV}


@dataclass
class Fleet:
    """One worker at a time on a queue of its own, with a fresh one for each that dies."""

    site: Site
    how: str
    max_attempts: int
    slots: int
    workers: list[str] = field(default_factory=list)
    process: Process | None = None

    def step(self) -> bool:
        """Whether there was anything to do."""
        if self.process is None:
            self.process = self.site.start(queues=self.how, concurrency=self.slots)
        elif self.process.popen.poll() is not None:
            assert self.process.popen.returncode == CODES[self.how], self.process.said
            self.workers += re.findall(r", worker ([^\s;]+)", self.process.said)
            self.process = None
            self.end_leases()
            return True
        return self.how in {row.queue for row in self.site.queue.stats()}

    def end_leases(self) -> None:
        past, jobs = after(-1_000_000), self.site.queue.tables.jobs.c
        mine = (jobs.queue == self.how, jobs.reserved_until.is_not(None))
        change(self.site.observer, self.site.queue, {"reserved_until": past, "available_at": past}, *mine)


def push_killer(site: Site, how: str, max_attempts: int, others: int) -> int:
    """In front of many others; its id."""
    *_, killer = site.push("die", 1, {"how": how}, queue=how, max_attempts=max_attempts)
    site.push("noop", others, queue=how, max_attempts=max_attempts)
    return killer


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([("exit", 2, 10, 1000), ("kill", 2, 50, 100), ("segfault", 1, 1, 100)], id="short"),
        pytest.param([("exit", 5, 10, 1000), ("kill", 5, 50, 1000), ("segfault", 1, 1, 1000)], marks=pytest.mark.chaos, id="long"),
        pytest.param([("exit", 2, 3, 1000), ("kill", 2, 1000, 1000), ("segfault", 5, 1, 1000)], marks=pytest.mark.chaos, id="sizes"),
    ],
)
def test_of_many_jobs_and_one_that_ends_its_process_only_that_one_fails(site: Site, kinds: list[tuple[str, int, int, int]]) -> None:
    site.use_write_ahead_log()
    fleets = {push_killer(site, how, most, others): Fleet(site, how, most, slots) for how, most, slots, others in kinds}
    until = time.monotonic() + EXIT_PATIENCE
    while sum(fleet.step() for fleet in fleets.values()):  # all of them, each time
        assert time.monotonic() < until, "the queues do not become empty"
        time.sleep(0.1)
    failed = {row["id"]: row for row in failures(site.observer, site.queue)}
    assert set(failed) == set(fleets)
    assert Counter(id for id, _ in site.effects()) == {id: fleet.max_attempts for id, fleet in fleets.items()}
    for id, fleet in fleets.items():
        row, worker = failed[id], fleet.workers[-1]
        assert len(set(fleet.workers)) == fleet.max_attempts
        assert (row["reason"], row["attempts"], row["worker"]) == ("worker_lost", fleet.max_attempts, worker)
        assert worker in row["error_message"]


def test_a_job_that_must_not_be_repeated_runs_once_and_names_the_worker_that_died(site: Site) -> None:
    (once,) = site.push("die_once")
    noops = site.push("noop", 20)
    first = site.start(lease=1)
    assert first.wait() == -signal.SIGKILL
    (died,) = re.findall(r", worker ([^\s;]+)", first.said)
    assert site.start(lease=1, stop_when_empty=True).wait() == 0
    eventually(lambda: site.queue.stats() == [] or site.start(lease=1, stop_when_empty=True).wait(), f"{len(noops)} others are done")
    (failed,) = failures(site.observer, site.queue)
    assert (failed["id"], failed["reason"], failed["worker"], failed["attempts"]) == (once, "worker_lost", died, 1)
    assert site.effects() == [(once, 1)]


def kill_a_host(site: Site, max_attempts: int, slots: int) -> None:
    """It has as many jobs under way as it has slots."""
    ids = site.push("wait", slots, {"folder": str(site.folder)}, max_attempts=max_attempts)
    process = site.start(concurrency=slots)
    eventually(lambda: all((site.folder / f"began-{id}").exists() for id in ids))
    process.kill()
    expire(site.observer, site.queue)


def count_claims(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs of the dead each claim brings, those aside that bring none."""
    claim, counts = site.queue.consumer.claim, list[int]()

    def counted(*arguments: Any, **options: Any) -> Any:
        found = claim(*arguments, **options)
        back = sum(delivery.reclaimed_from is not None for delivery in found)
        if back:
            counts.append(back)
        return found

    monkeypatch.setattr(site.queue.consumer, "claim", counted)
    return counts


def test_what_a_dead_host_was_doing_runs_side_by_side_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    site.queue.job(name="wait")(lambda folder: gate.pass_through())
    kill_a_host(site, max_attempts=3, slots=50)
    claims = count_claims(site, monkeypatch)
    with working(site.queue, concurrency=50):
        gate.await_arrivals(50)
        gate.open()
        assert site.queue.wait_empty(EXIT_PATIENCE)
    assert claims == [50]
    assert failures(site.observer, site.queue) == []


def test_last_attempts_of_a_dead_host_run_one_after_another_beside_other_work(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, ran = Counter[str](), Counter[str](), Counter[str]()
    fresh, enough = threading.Semaphore(0), threading.Event()

    @site.queue.job(name="wait")
    def wait(folder: str) -> None:
        running["wait"] += 1
        most["wait"] = max(most["wait"], running["wait"])
        assert fresh.acquire(timeout=PATIENCE), "no other slot goes on"
        running["wait"] -= 1
        ran["wait"] += 1

    @site.queue.job(name="fresh")
    def others() -> None:
        fresh.release()
        if not enough.is_set():
            with site.queue.begin() as session:
                others.push(session)

    kill_a_host(site, max_attempts=2, slots=10)
    site.push("fresh", 2)
    claims = count_claims(site, monkeypatch)
    with working(site.queue, concurrency=5):
        eventually(lambda: ran["wait"] == 10)
        enough.set()
        assert site.queue.wait_empty(EXIT_PATIENCE)
    assert claims == [1] * 10
    assert most["wait"] == 1
    assert failures(site.observer, site.queue) == []
