"""
Memory stays flat, whatever becomes of the jobs.
"""

from __future__ import annotations

import gc
import logging
import os
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

import sqlqueue
from sqlqueue import Discard, Fail, Fixed, JobContext, Queue, Release, Worker
from sqlqueue._dialects import server_of
from sqlqueue._driver import claim, failed, holders, keys, lanes, reports, settle
from sqlqueue._driver import push as pushing
from sqlqueue._driver.settle import Complete, Move, Settlement
from sqlqueue._driver.settle import Release as ReleaseRow
from sqlqueue._failure import Failure
from sqlqueue._worker.summary import memory_in_use
from tests.rows import put_each
from tests.workers import PATIENCE, eventually, working

ROUND, ROUNDS = 30, 3
JOBS = 6 * ROUND * ROUNDS
MODULES = (claim, failed, holders, keys, lanes, pushing, reports, settle)
CACHES = [found for module in MODULES for found in vars(module).values() if hasattr(found, "cache_info")]
ENDINGS = ("done", "retrying", "failed", "released", "discarded", "lost")


class Crowd:
    """A worker, and jobs that end in every way there is."""

    def __init__(self, queue: Queue, observer: Engine, worker: Worker) -> None:
        self.queue = queue
        self.worker = worker
        self._table = queue.tables.jobs
        self._observer = observer
        self._seen: set[int] = set()
        for name in ENDINGS:
            queue.job(name=name, max_attempts=2, backoff=Fixed(0))(getattr(self, name))

    def done(self) -> None: ...

    def retrying(self, context: JobContext) -> None:
        if context.attempt == 1:
            raise ValueError("the first time")

    def failed(self) -> None:
        raise Fail("for good")

    def released(self, context: JobContext) -> None:
        if context.id not in self._seen:
            self._seen.add(context.id)
            raise Release
        self._seen.remove(context.id)

    def discarded(self) -> None:
        raise Discard

    def lost(self, context: JobContext) -> None:
        with self._observer.connect() as connection:
            connection.execute(sa.delete(self._table).where(self._table.c.id == context.id))

    def run(self, count: int) -> None:
        """So many of each, until nothing is held any more."""
        jobs: list[Any] = [self.queue.registry.find(name) for name in ENDINGS]
        with self.queue.begin() as session:
            self.queue.push_many(session, [job.bind() for job in jobs for _ in range(count)])
        assert self.queue.wait_empty(PATIENCE * 10)
        shift = self.worker._shift
        assert shift is not None
        eventually(lambda: not shift.holdings, "everything is settled and forgotten")
        assert (shift.holdings.all(), shift.holdings.busy, shift.todo.qsize(), shift.over.qsize()) == ([], 0, 0, 0)
        assert self._seen == set()
        self.queue.failed.forget(all=True)

    def counts(self) -> Counter[str]:
        assert self.worker._shift is not None
        return self.worker._shift.counts


@pytest.fixture
def crowd(queue: Queue, observer: Engine, caplog: pytest.LogCaptureFixture) -> Iterator[Crowd]:
    for name in ("sqlqueue", "sqlqueue.jobs"):
        caplog.set_level(logging.CRITICAL, name)  # pytest keeps every line
    if not server_of(queue.consumer.engine.dialect).row_locks:
        with observer.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")  # where all share one lock, the rounds are short
    with working(queue, concurrency=4) as worker:
        yield Crowd(queue, observer, worker)


def objects() -> int:
    gc.collect()
    # SQLAlchemy's weak references come and go by the hundred.
    return sum(type(found) is not weakref.ref for found in gc.get_objects())


def own_bytes() -> int:
    """What the library's own lines have asked for; drivers fill their caches for a long while."""
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{Path(sqlqueue.__file__).parent}/*")])
    return sum(found.size for found in traces.statistics("filename"))


def test_no_outcome_leaves_anything_behind(crowd: Crowd) -> None:
    crowd.run(ROUND)  # caches fill, pools open what they need
    tracemalloc.start()
    try:
        crowd.run(ROUND)  # what is older was not seen, and what replaces it would count
        crowd.run(1)  # the last group is kept until another one comes
        before, own_before = objects(), own_bytes()
        for _ in range(ROUNDS):
            crowd.run(ROUND)
        crowd.run(1)
        assert objects() - before < JOBS / 2
        assert own_bytes() - own_before < 100 * JOBS  # what is kept of a job would be hundreds
    finally:
        tracemalloc.stop()
    expected = {"done": 3, "retrying": 1, "failed": 1, "released": 1, "discarded": 1, "lost": 1}
    assert crowd.counts() == {name: times * (ROUND * (2 + ROUNDS) + 2) for name, times in expected.items()}


@pytest.mark.chaos
def test_memory_is_flat_over_a_million_jobs(crowd: Crowd) -> None:
    million = int(os.environ.get("SQLQUEUE_CHAOS_JOBS", "1000000"))
    crowd.run(1_000)
    gc.collect()
    before, highest, ran = memory_in_use(), 0.0, 0
    while ran < million:
        crowd.run(5_000)
        ran += 5_000 * len(ENDINGS)
        highest = max(highest, memory_in_use())
    print(f"{ran} jobs: {before:.0f} MiB at first, {highest:.0f} MiB at most")
    assert highest - before < 20


def statements_cached(queue: Queue) -> int:
    cache: Any = queue.consumer.engine._compiled_cache
    return len(cache)


def every_size(queue: Queue, observer: Engine, sizes: range, prefix: str) -> None:
    """Claims, renewals and settlements with other queues, limits and group sizes each time."""
    for size in sizes:
        names = [f"{prefix}-{size}-{number}" for number in range(2)]
        put_each(observer, queue, [{"queue": names[0], "name": f"job-{size}"}] * size)
        deliveries = queue.claim(names, limit=size, lease=size)
        assert len(deliveries) == size
        queue.consumer.renew([(delivery.id, delivery.token) for delivery in deliveries], size + 1)
        outcomes = (Complete(), ReleaseRow(size, f"error {size}"), Move(Failure.from_text(f"error {size}"), f"worker-{size}"))
        results = queue.consumer.settle([Settlement(one.id, one.token, False, outcomes[one.id % 3]) for one in deliveries])
        assert len(results.settled) == size
        queue.stats()


def test_what_is_remembered_of_statements_does_not_grow_with_what_they_are_about(queue: Queue, observer: Engine) -> None:
    every_size(queue, observer, range(1, 8), "early")
    cached, prepared = statements_cached(queue), sum(found.cache_info().currsize for found in CACHES)
    every_size(queue, observer, range(8, 40), "late")
    assert statements_cached(queue) == cached
    assert sum(found.cache_info().currsize for found in CACHES) == prepared


def test_many_sizes_of_a_push_are_one_statement(queue: Queue, engine: Engine) -> None:
    job = queue.job(name="noop")(lambda number: None)
    sizes: list[int] = []
    for size in range(1, 40):
        with queue.begin() as session:
            queue.push_many(session, [job.bind(number) for number in range(size)])
            job.options(unique=f"key-{size}", delay=size, headers={"size": str(size)}, priority=size).push(session, size)
        cache: Any = engine._compiled_cache
        sizes.append(len(cache))
    assert sizes[-1] == sizes[2]
