"""
Workers that are killed at random, again and again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from sqlqueue import Queue
from tests.acceptance.processes import EXIT_PATIENCE, Site, site_on
from tests.servers import Database
from tests.workers import failures, jobs

pytestmark = pytest.mark.chaos

JOBS = 5000
MINUTES = float(os.environ.get("SQLQUEUE_CHAOS_MINUTES", "1"))
ATTEMPTS = 1000  # a job may be unlucky often; none may be given up


@pytest.fixture
def site(queue: Queue, database: Database, observer: Engine, tmp_path: Path) -> Iterator[Site]:
    with site_on(queue, database, observer, tmp_path) as site:
        yield site


def test_workers_killed_at_random_lose_nothing(site: Site) -> None:
    seed = int(os.environ.get("SQLQUEUE_CHAOS_SEED", random.randrange(10**6)))
    print(f"seed {seed}")
    chance = random.Random(seed)
    site.use_write_ahead_log()
    ids = site.push("effect", JOBS, max_attempts=ATTEMPTS)
    workers = [site.start(concurrency=4, lease=2) for _ in range(4)]
    until, kills = time.monotonic() + MINUTES * 60, 0
    while site.queue.stats() and time.monotonic() < until:
        time.sleep(chance.uniform(0.5, 2))
        place = chance.randrange(len(workers))
        workers[place].kill()
        workers[place] = site.start(concurrency=4, lease=2)
        kills += 1
    assert site.queue.wait_empty(EXIT_PATIENCE)
    for worker in workers:
        worker.await_words("4 at once")
        worker.send(signal.SIGTERM)
    assert [worker.wait() for worker in workers] == [0] * 4
    runs = site.effects()
    print(f"{kills} kills, {len(runs) - len(ids)} of {len(ids)} jobs took effect more than once")
    assert sorted({id for id, _ in runs}) == ids
    assert (jobs(site.observer, site.queue), failures(site.observer, site.queue)) == ([], [])
