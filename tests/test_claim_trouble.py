"""
Trouble at a claim: whatever passes costs a pause, never a job, an attempt or the worker.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from sqlalchemy import Engine

from sqlqueue import JobContext, Queue
from tests.rows import Trap, at_statement, conflicts, raising, sqlite_error
from tests.workers import PATIENCE, failures, push, working

Makers = list[Callable[[], Exception]]


def what_else_passes(engine: Engine) -> Makers:
    """A server that is read-only, full, going down or gone, and a query that an administrator has ended."""
    if engine.dialect.name == "postgresql":
        import psycopg

        states = ("57014", "57P01", "57P02", "25006", "08006", "53300", "53100")
        return made(states, lambda state: psycopg.errors.lookup(state)("made up"))
    if engine.dialect.name == "sqlite":
        codes = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
        return made(codes, sqlite_error)
    import pymysql

    return made((1290, 1836, 2006, 2013, 3024, 4031, 1040, 1047), lambda code: pymysql.err.OperationalError(code, "made up"))


def made(codes: Iterable[Any], make: Callable[[Any], Exception]) -> Makers:
    return [lambda code=code: make(code) for code in codes]  # type: ignore[misc]


@pytest.mark.parametrize(("kinds", "times"), [(lambda engine: list(conflicts(engine).values()), 6), (what_else_passes, 1)])
def test_a_worker_takes_the_next_job_after_any_trouble_that_passes(
    queue: Queue, observer: Engine, kinds: Callable[[Engine], Makers], times: int
) -> None:
    """Conflicts once more often than one claim tries again, so that it is the worker that has to bear them."""
    starts: list[int] = []
    ran = threading.Semaphore(0)

    @queue.job(name="note")
    def note(context: JobContext) -> None:
        starts.append(context.attempt)
        ran.release()

    makers = kinds(observer)
    with working(queue) as worker:
        for make in makers:
            with at_statement(queue.consumer.engine, Trap(raising(make), times=times), "UPDATE") as trap:
                push(queue, "note")
                assert ran.acquire(timeout=PATIENCE), f"the worker did not get over {make()!r}"
            assert trap.sprung == times
            assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": len(makers)}
    assert starts == [1] * len(makers)
    assert failures(observer, queue) == []
