"""
Several worker processes on one database.
"""

from __future__ import annotations

import signal
import time

import pytest

from sqlqueue._dialects import server_of
from sqlqueue._driver.settle import GROUP
from tests.acceptance.app import ROWS
from tests.acceptance.processes import EXIT_PATIENCE, Process, Site
from tests.workers import eventually, failures, jobs

JOBS = 5000
BATCHES = 40


def nothing_is_left(site: Site) -> None:
    assert jobs(site.observer, site.queue) == []
    assert failures(site.observer, site.queue) == []


def no_complaints(processes: list[Process]) -> None:
    assert [process.complaints for process in processes] == [[]] * len(processes)


def test_four_workers_run_every_job_once(site: Site) -> None:
    site.use_write_ahead_log()
    ids = site.push("effect", JOBS)
    processes = [site.start(stop_when_empty=True, concurrency=4) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert site.effects() == [(id, 1) for id in ids]
    nothing_is_left(site)
    no_complaints(processes)


@pytest.mark.parametrize("count", [4000, pytest.param(JOBS, marks=pytest.mark.chaos)])
def test_a_killed_worker_costs_one_attempt_of_what_it_ran(site: Site, count: int) -> None:
    site.use_write_ahead_log()
    ids = site.push("effect", count)
    victim, *others = [site.start(concurrency=4, lease=2) for _ in range(4)]
    victim.await_words("4 at once")
    eventually(site.count_effects)
    victim.kill()
    assert site.count_effects() < count, "it was killed too late"
    assert site.queue.wait_empty(EXIT_PATIENCE)
    for process in others:
        process.send(signal.SIGTERM)
    assert [process.wait() for process in others] == [0] * 3
    runs: dict[int, list[int]] = {}
    for id, attempt in site.effects():
        runs.setdefault(id, []).append(attempt)
    assert list(runs) == ids
    # What it ran, or had run and not settled yet, is run again. What only waited in its memory has lost an attempt.
    assert all(attempts in ([1], [2], [1, 2]) for attempts in runs.values())
    assert sum(attempts == [1, 2] for attempts in runs.values()) <= 4 + GROUP
    nothing_is_left(site)
    no_complaints(others)


def test_a_handler_always_sees_the_row_that_was_written_beside_its_job(site: Site) -> None:
    processes = [site.start(concurrency=2) for _ in range(4)]
    for process in processes:
        process.await_words("2 at once")
    whole = not server_of(site.queue.consumer.engine.dialect).row_locks
    for row in range(BATCHES):
        with site.engine.connect() as connection, connection.begin():
            connection.execute(ROWS.insert().values(id=row))
            site.queue.push_named(connection, "see", {"row": row})
            time.sleep(0.01 if whole else 0.05)  # the commit comes late
    assert site.queue.wait_empty(EXIT_PATIENCE)
    assert [attempt for _, attempt in site.effects()] == [1] * BATCHES
    nothing_is_left(site)
    no_complaints(processes)
