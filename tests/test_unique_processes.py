"""
P3 with real processes: producers that push the same keys while workers complete them.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Queue
from sqlqueue._driver.settle import Complete, Settlement
from tests.producers import ask_once, job_ids, key_names, push_some_of
from tests.servers import Database

PROCESSES = 4
ROUNDS = 100
KEYS = [f"key {number}" for number in range(20)]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
def test_no_key_is_held_twice_and_no_job_is_lost(
    processes: ProcessPoolExecutor, database: Database, observer: Engine, queue: Queue
) -> None:
    jobs = queue.tables.jobs.c
    twice = sa.select(jobs.unique_key).group_by(jobs.unique_key).having(sa.func.count() > 1)
    running = [processes.submit(push_some_of, database.url, KEYS, ROUNDS, seed) for seed in range(PROCESSES)]
    handed_out: list[tuple[str, int]] = []
    held: list[Settlement] = []
    with observer.connect() as connection:
        while not all(future.done() for future in running) or held or job_ids(observer, queue):
            assert connection.execute(twice).all() == []
            deliveries = queue.claim(limit=20)
            handed_out += [(str(delivery.payload["key"]), delivery.id) for delivery in deliveries]
            held += [Settlement(delivery.id, delivery.token, delivery.unique, Complete()) for delivery in deliveries]
            results = queue.consumer.settle(held)
            assert not results.stale
            held = [settlement for settlement in held if settlement.id in results.blocked]
    written = [pushed for future in running for pushed in future.result()[0]]
    assert len(written) > len(KEYS), "the workers freed no key: nothing was tried"
    assert Counter(handed_out) == Counter(written)
    assert key_names(observer, queue) == []


@pytest.mark.slow
def test_once_is_once_among_processes(processes: ProcessPoolExecutor, database: Database, queue: Queue) -> None:
    running = [processes.submit(ask_once, database.url, KEYS, seed) for seed in range(PROCESSES)]
    assert sorted(key for future in running for key in future.result()[0]) == sorted(KEYS)
