"""
Leases: renewed while a handler runs, lost when they are, and never trusted after that.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import JobContext, Queue, UnusableDatabase, Worker
from sqlqueue._dialects import after, now, server_of
from sqlqueue._job import Delivery
from sqlqueue._worker.shift import Held
from tests.workers import PATIENCE, Gate, change, eventually, expire, jobs, push, working

LEASE = 1.0  # the shortest there is


class Handler:
    """A job that waits, and lets itself be watched."""

    def __init__(self, queue: Queue) -> None:
        self.gate = Gate()
        self.contexts: list[JobContext] = []
        queue.job(name="wait")(self.run)

    def run(self, context: JobContext) -> None:
        self.contexts.append(context)
        self.gate.pass_through()


@pytest.fixture
def handler(queue: Queue) -> Iterator[Handler]:
    handler = Handler(queue)
    yield handler
    handler.gate.open()


def test_a_lease_that_a_slow_claim_has_used_up_is_renewed_before_anything_starts(
    queue: Queue, observer: Engine, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = queue.consumer.claim

    def slow(*arguments: Any, **options: Any) -> list[Delivery]:
        """As when the commit waits for the disk."""
        found = claim(*arguments, **options)
        time.sleep(0.5 if found else 0)
        return found

    monkeypatch.setattr(queue.consumer, "claim", slow)
    push(queue, "wait")
    with working(queue, lease=LEASE):
        handler.gate.await_arrivals()
        (row,) = jobs(observer, queue)
        with observer.connect() as connection:
            moment = connection.execute(sa.select(now())).scalar_one()
        assert row["reserved_until"] - moment > timedelta(seconds=LEASE / 2)
        assert handler.contexts[0].lost is False
        handler.gate.open()


def test_what_was_lost_while_it_was_claimed_does_not_start(
    queue: Queue, observer: Engine, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = queue.consumer.claim

    def slow(*arguments: Any, **options: Any) -> list[Delivery]:
        found = claim(*arguments, **options)
        if found:
            monkeypatch.setattr(queue.consumer, "claim", claim)
            expire(observer, queue)
            (other,) = queue.claim()
            time.sleep(LEASE / 2)
            queue.complete(other)
        return found

    monkeypatch.setattr(queue.consumer, "claim", slow)
    push(queue, "wait")
    worker = Worker(queue, stop_when_empty=True, lease=LEASE)
    assert worker.run() == 0
    assert worker.summary is not None
    assert worker.summary.counts == {"lost": 1}
    assert handler.contexts == []


def test_a_lease_is_renewed_at_a_third_while_the_handler_runs(queue: Queue, observer: Engine, handler: Handler) -> None:
    def later_ends(latest: datetime) -> set[datetime]:
        return {row["reserved_until"] for row in jobs(observer, queue) if row["reserved_until"] > latest}

    push(queue, "wait", 2)
    with working(queue, concurrency=2, lease=LEASE) as worker:
        handler.gate.await_arrivals(2)
        ends = {row["reserved_until"] for row in jobs(observer, queue)}
        for _ in range(4):  # longer than the lease itself
            ends = eventually(partial(later_ends, max(ends)))
        assert [row["attempts"] for row in jobs(observer, queue)] == [1, 1]
        assert not any(context.lost for context in handler.contexts)
        handler.gate.open()
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 2}


def test_a_job_that_somebody_else_holds_is_lost_and_left_alone(queue: Queue, observer: Engine, handler: Handler) -> None:
    push(queue, "wait")
    with working(queue, concurrency=1, lease=LEASE) as worker:
        handler.gate.await_arrivals()
        change(observer, queue, {"reserved_token": "another", "reserved_by": "elsewhere"})
        eventually(lambda: handler.contexts[0].lost)
        assert handler.contexts[0].renew() is False
        before = jobs(observer, queue)
        handler.gate.open()
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"lost": 1}
    assert jobs(observer, queue) == before


def test_a_job_whose_row_is_gone_is_lost(queue: Queue, observer: Engine, handler: Handler) -> None:
    push(queue, "wait")
    with working(queue, concurrency=1, lease=LEASE) as worker:
        handler.gate.await_arrivals()
        with observer.connect() as connection:
            connection.execute(sa.delete(queue.tables.jobs))
        eventually(lambda: handler.contexts[0].lost)
        handler.gate.open()
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"lost": 1}


def test_late_but_not_taken_over_is_valid(queue: Queue, observer: Engine, handler: Handler) -> None:
    push(queue, "wait")
    with working(queue, concurrency=1, lease=LEASE) as worker:
        handler.gate.await_arrivals()
        expire(observer, queue)
        # A renewal does not revive it, so in the end the clock says that it may be lost.
        eventually(lambda: handler.contexts[0].lost)
        handler.gate.open()
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 1}
    assert jobs(observer, queue) == []


def test_a_renewal_without_an_answer_is_noticed_by_the_clock(queue: Queue, handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def hang(*arguments: Any) -> Any:
        asked.set()
        answer.wait(PATIENCE)
        return set(), set()

    monkeypatch.setattr(queue.consumer, "renew", hang)
    push(queue, "wait")
    with working(queue, concurrency=1, lease=LEASE) as worker:
        handler.gate.await_arrivals()
        assert asked.wait(PATIENCE)
        eventually(lambda: handler.contexts[0].lost)
        assert not answer.is_set()
        handler.gate.open()
        answer.set()
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 1}


def test_the_same_worker_may_get_its_lost_job_a_second_time(queue: Queue, observer: Engine) -> None:
    gates = {1: Gate(), 2: Gate()}
    contexts: dict[int, JobContext] = {}

    @queue.job(name="wait")
    def wait(context: JobContext) -> None:
        contexts[context.attempt] = context
        gates[context.attempt].pass_through()

    push(queue, "wait")
    with working(queue, concurrency=2, lease=60) as worker:
        gates[1].await_arrivals()
        expire(observer, queue)
        gates[2].await_arrivals()
        (row,) = jobs(observer, queue)
        assert row["attempts"] == 2
        gates[1].open()
        eventually(lambda: worker._shift is not None and worker._shift.counts["lost"] == 1)
        assert contexts[2].renew() is True
        assert [(row["attempts"], row["reserved_until"] is None) for row in jobs(observer, queue)] == [(2, False)]
        gates[2].open()
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"lost": 1, "done": 1}
    assert jobs(observer, queue) == []


def test_the_first_of_two_runs_here_is_told(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gates = {1: Gate(), 2: Gate()}
    contexts: dict[int, JobContext] = {}

    @queue.job(name="wait")
    def wait(context: JobContext) -> None:
        contexts[context.attempt] = context
        gates[context.attempt].pass_through()

    push(queue, "wait")
    with working(queue, concurrency=2, lease=LEASE):
        gates[1].await_arrivals()
        expire(observer, queue)
        gates[2].await_arrivals()
        eventually(lambda: contexts[1].lost)
        assert not contexts[2].lost
        for gate in gates.values():
            gate.open()
        assert queue.wait_empty(PATIENCE)


def test_a_handler_may_renew_by_itself(queue: Queue, observer: Engine) -> None:
    seen: list[Any] = []

    @queue.job(name="renews")
    def renews(context: JobContext) -> None:
        change(observer, queue, {"reserved_until": after(5_000_000), "available_at": after(5_000_000)})
        (before,) = jobs(observer, queue)
        seen.append(context.renew())
        (now,) = jobs(observer, queue)
        seen.append(now["reserved_until"] > before["reserved_until"])
        change(observer, queue, {"reserved_token": "another"})
        seen.append(context.renew())
        seen.append(context.lost)

    push(queue, "renews")
    with working(queue, concurrency=1) as worker:
        eventually(lambda: len(seen) == 4)
        worker.stop(PATIENCE)
    assert seen == [True, True, False, True]


def test_a_row_that_a_stranger_has_locked_costs_no_other_row_its_lease(
    queue: Queue, engine: Engine, observer: Engine, handler: Handler
) -> None:
    if not server_of(queue.consumer.engine.dialect).row_locks:
        with engine.connect():
            pytest.skip("one lock for the whole database")
    locked, free = push(queue, "wait", 2)
    table = queue.tables.jobs
    with working(queue, concurrency=2, lease=LEASE):
        handler.gate.await_arrivals(2)
        by_id = {context.id: context for context in handler.contexts}
        with engine.connect() as connection:
            connection.execute(sa.select(table.c.id).where(table.c.id == locked).with_for_update())
            eventually(lambda: by_id[locked].lost)
            assert not by_id[free].lost
            connection.rollback()
        assert by_id[free].renew()
        handler.gate.open()
        assert queue.wait_empty(PATIENCE)


@pytest.mark.parametrize("operation", ["renew", "settle"])
def test_a_database_that_stays_away_ends_a_worker_that_only_renews_or_settles(
    queue: Queue, handler: Handler, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)

    def away(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 2:  # it has tried again
            monkeypatch.setattr("sqlqueue._worker.trouble.PATIENCE", 0.0)
        raise sa.exc.OperationalError("SELECT", {}, ConnectionError("reset by peer"), connection_invalidated=True)

    monkeypatch.setattr(queue.consumer, operation, away)
    push(queue, "wait", 1)
    worker = Worker(queue, concurrency=1, lease=LEASE if operation == "renew" else 3600)
    if operation == "settle":
        handler.gate.open()
        monkeypatch.setattr("sqlqueue._worker.shift.MOST_UNSETTLED", 1)  # so that it does not claim, which would succeed
    with pytest.raises(UnusableDatabase, match="no statement has succeeded for"):
        worker.run()
    assert next(calls) > 2


def test_a_lease_that_is_lost_at_the_very_moment_its_job_starts_stays_lost(queue: Queue) -> None:
    """Between the look at the old flag and the new context's."""

    class LostMeanwhile(Held):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "lost" and value is False and super().__getattribute__("context") is not None:
                self.context.lost = True  # type: ignore[union-attr]
                object.__setattr__(self, "lost", True)
            return value

    delivery = Delivery(1, "job", "default", {}, 1, 5, "token", datetime.now(UTC), {})
    assert LostMeanwhile(delivery, 0.0).start(lambda lease: True).lost
