"""
What the tests of the worker share: running one here, and looking at what it leaves behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Queue, Worker
from sqlqueue._dialects import after, now
from sqlqueue._worker import Summary

PATIENCE = 20.0
"""Seconds after which something that should happen at once has not happened."""


class Gate:
    """A handler says that it has come, and waits until it may go on."""

    def __init__(self) -> None:
        self._came = threading.Semaphore(0)
        self._open = threading.Event()

    def pass_through(self) -> None:
        self._came.release()
        assert self._open.wait(PATIENCE), "nobody opened the gate"

    def await_arrivals(self, count: int = 1) -> None:
        for _ in range(count):
            assert self._came.acquire(timeout=PATIENCE), "no handler came to the gate"

    def open(self) -> None:
        self._open.set()


def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    """Ask until the answer is true, and return it."""
    until = time.monotonic() + PATIENCE
    while not (answer := condition()):
        assert time.monotonic() < until, f"it never came true: {what or condition}"
        time.sleep(0.01)
    return answer


def push(queue: Queue, name: str, count: int = 1, /, **options: Any) -> list[int]:
    """Push a registered job without arguments, in one transaction."""
    job: Any = queue.registry.find(name).options(**options)
    with queue.begin() as session:
        return [job.push(session).id for _ in range(count)]


def work_off(queue: Queue, **options: Any) -> Summary:
    """Run a worker until its queues are empty."""
    worker = Worker(queue, stop_when_empty=True, **options)
    assert worker.run() == 0
    assert worker.summary is not None
    return worker.summary


@contextmanager
def working(queue: Queue, queues: str = "default", **options: Any) -> Iterator[Worker]:
    """A worker in a thread, stopped at the end of the block."""
    worker = Worker(queue, queues, **options)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop(PATIENCE)


def jobs(observer: Engine, queue: Queue) -> list[sa.RowMapping]:
    """All rows of the jobs table."""
    table = queue.tables.jobs
    with observer.connect() as connection:
        return list(connection.execute(sa.select(table).order_by(table.c.id)).mappings())


def failures(observer: Engine, queue: Queue) -> list[sa.RowMapping]:
    """All rows of the failed table."""
    table = queue.tables.failed
    with observer.connect() as connection:
        return list(connection.execute(sa.select(table).order_by(table.c.id)).mappings())


def change(observer: Engine, queue: Queue, values: Mapping[str, Any], *conditions: sa.ColumnElement[bool]) -> None:
    """Change rows of the jobs table behind the worker's back."""
    with observer.connect() as connection:
        connection.execute(sa.update(queue.tables.jobs).where(*conditions).values(values))


def expire(observer: Engine, queue: Queue) -> None:
    """Let every lease be a second past its end."""
    change(
        observer,
        queue,
        {"reserved_until": after(-1_000_000), "available_at": after(-1_000_000)},
        queue.tables.jobs.c.reserved_until.is_not(None),
    )


def make_due(observer: Engine, queue: Queue) -> None:
    """Let what waits for its next attempt be due now."""
    change(observer, queue, {"available_at": now()}, queue.tables.jobs.c.reserved_until.is_(None))
