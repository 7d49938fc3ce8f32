"""
Rates, locks and limits with worker processes, by the database's clock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Queue
from tests import limits_app
from tests.limits_app import BURST, LIMIT
from tests.rows import keys_in
from tests.servers import Database
from tests.workers import eventually, jobs

ROOT = Path(__file__).parent.parent
PROCESSES = 4
LONG = 300.0


class Fleet:
    """Worker processes of `limits_app`, and what they have written down."""

    def __init__(self, queue: Queue, database: Database, observer: Engine, folder: Path) -> None:
        self.queue = queue
        self.observer = observer
        self.folder = folder
        self._url = database.url
        self._processes: list[subprocess.Popen[bytes]] = []
        if observer.dialect.name == "sqlite":
            with observer.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        told = {"LIMITS_URL": self._url, "LIMITS_FOLDER": str(self.folder), "LIMITS_OPTIONS": json.dumps(options)}
        process = subprocess.Popen([sys.executable, ROOT / "tests/limits_app.py"], env=os.environ | told | {"PYTHONPATH": str(ROOT)})
        self._processes.append(process)
        return process

    def push(self, name: str, count: int = 1, keys: int = 0) -> list[int]:
        job: Any = limits_app.queue.registry.find(name)
        with self.queue.begin() as session:
            arguments = [(f"{name} {number % keys}",) if keys else () for number in range(count)]
            return [job.push(session, *one).id for one in arguments]

    def await_jobs(self, seconds: float) -> None:
        assert self.queue.wait_empty(seconds), self.queue.stats()

    def stop(self) -> list[dict[str, Any]]:
        """End all workers in good order; what they have written down."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(LONG) for process in self._processes] == [0] * len(self._processes)
        return [record for file in self.folder.glob("records-*") for record in json.loads(file.read_text())]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def fleet(queue: Queue, database: Database, observer: Engine, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(queue, database, observer, tmp_path)
    yield fleet
    fleet.close()


def test_a_thousand_jobs_keep_to_their_rate_their_locks_and_their_limits(fleet: Fleet) -> None:
    keep_to_their_limits(fleet, rated=800, rate=400, others=100, keys=10)


@pytest.mark.chaos
def test_ten_thousand_jobs_keep_to_their_rate_their_locks_and_their_limits(fleet: Fleet) -> None:
    keep_to_their_limits(fleet, rated=10_000, rate=100, others=2_000, keys=5)


def keep_to_their_limits(fleet: Fleet, *, rated: int, rate: int, others: int, keys: int) -> None:
    ids = [*fleet.push("rated", rated), *fleet.push("alone", others, keys), *fleet.push("limited", others, 3)]
    for _ in range(PROCESSES):
        fleet.start(rate=rate, concurrency=8)
    fleet.await_jobs(LONG)
    records = fleet.stop()
    assert sorted(record["id"] for record in records) == ids
    assert {record["attempt"] for record in records} == {1}, "to be throttled cost an attempt"
    by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_key[record["key"]].append(record)
    started = by_key.pop("rated")
    check_rate(started, rate)
    for key, runs in by_key.items():
        assert most_at_once(runs) <= (1 if key.startswith("alone") else LIMIT), key
    assert max(most_at_once(runs) for key, runs in by_key.items() if key.startswith("limited")) > 1, "nothing was tried"
    seconds = max(one["began"] for one in started) - min(one["began"] for one in started)
    print(f"{len(started) / seconds:.0f} a second of {rate}, the last permit was used {latest(started):.3f} s late")


def check_rate(started: list[dict[str, Any]], rate: int) -> None:
    """No start before its permit, and in no interval more permits than the burst and the rate allow."""
    assert min(one["began"] - one["permit"] for one in started) >= -0.001, "SQLite counts milliseconds"
    permits = sorted(one["permit"] for one in started)
    # Of all intervals from one permit to another: number - burst <= length * rate. The tightest end at the smallest margin.
    margins = [place - permit * rate for place, permit in enumerate(permits)]
    lowest = margins[0]
    for margin in margins:
        lowest = min(lowest, margin)
        assert margin - lowest + 1 <= BURST + 0.01
    # And so the starts, but for how much later than its permit one of them may be.
    starts = sorted(one["began"] for one in started)
    slack = latest(started) * rate
    lowest = -starts[0] * rate
    for place, start in enumerate(starts):
        lowest = min(lowest, place - start * rate)
        assert place - start * rate - lowest + 1 <= BURST + slack + 0.5


def latest(started: list[dict[str, Any]]) -> float:
    return max(float(one["began"] - one["permit"]) for one in started)


def most_at_once(runs: list[dict[str, Any]]) -> int:
    # At one and the same moment an end comes first: SQLite counts milliseconds.
    steps = sorted([(run["began"], 1) for run in runs] + [(run["ended"], -1) for run in runs])
    most = running = 0
    for _, step in steps:
        running += step
        most = max(most, running)
    return most


@pytest.mark.parametrize("job", ["hold_lock", "hold_place"])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_dead_or_frozen_worker_has_taken_is_free_when_its_lease_ends(fleet: Fleet, blow: signal.Signals, job: str) -> None:
    struck = fleet.start(lease=1.5)
    (first,) = fleet.push(job)
    eventually(lambda: (fleet.folder / f"came-{first}").exists(), "the first has started")
    struck.send_signal(blow)
    (second,) = fleet.push(job)
    other = fleet.start(lease=1.5)
    came = eventually(lambda: (fleet.folder / f"came-{second}").exists() and lease_of(fleet, first), "the second has started")
    assert came in ("ended", "gone")
    assert second in keys_in(fleet.observer, fleet.queue).values()
    if blow is signal.SIGSTOP:
        struck.send_signal(signal.SIGCONT)
        (fleet.folder / f"go-{first}").touch()
        struck.send_signal(signal.SIGTERM)
        assert struck.wait(LONG) == 0
        assert second in keys_in(fleet.observer, fleet.queue).values(), "who lost the place has given it up for somebody else"
    (fleet.folder / f"go-{second}").touch()
    fleet.await_jobs(LONG)
    other.send_signal(signal.SIGTERM)
    assert other.wait(LONG) == 0
    assert not [key for key in keys_in(fleet.observer, fleet.queue) if not key.endswith("/line")]


def lease_of(fleet: Fleet, id: int) -> str:
    found = [row for row in jobs(fleet.observer, fleet.queue) if row["id"] == id]
    if not found:
        return "gone"
    with fleet.observer.connect() as connection:
        table = fleet.queue.tables.jobs
        from sqlqueue._dialects import now

        return "running" if connection.scalar(sa.select(table.c.available_at > now()).where(table.c.id == id)) else "ended"
