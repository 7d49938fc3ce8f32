"""
A worker holds more jobs than it runs: as many as its slots can start within a tenth of a second.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from sqlqueue import Queue, Worker
from sqlqueue._queue import claims
from sqlqueue._worker import claiming
from sqlqueue._worker.crew import Crew
from sqlqueue._worker.shift import MOST_AHEAD, Pace, Shift
from sqlqueue._worker.summary import Limits, Meter
from tests.acceptance.processes import Site, site_on
from tests.rows import put, statements_of
from tests.servers import Database
from tests.workers import PATIENCE, Gate, eventually, failures, jobs, push, work_off, working


@pytest.fixture
def site(queue: Queue, database: Database, observer: Engine, tmp_path: Path) -> Iterator[Site]:
    with site_on(queue, database, observer, tmp_path) as site:
        yield site


def test_nothing_is_taken_ahead_before_it_is_known_how_long_jobs_take(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    queue.job(name="wait")(gate.pass_through)
    push(queue, "wait", 20)
    with working(queue, concurrency=3):
        gate.await_arrivals(3)
        assert sum(row["reserved_until"] is not None for row in jobs(observer, queue)) == 3
        gate.open()


def test_short_jobs_come_in_large_claims(queue: Queue) -> None:
    queue.job(name="noop")(lambda: None)
    push(queue, "noop", 2000)
    with statements_of(queue.consumer.engine) as seen:
        assert work_off(queue).counts == {"done": 2000}
    assert len(seen) < 2000 / 10, "statements"


def test_long_jobs_are_not_taken_ahead(queue: Queue, observer: Engine) -> None:
    held: list[int] = []

    @queue.job(name="long")
    def long() -> None:
        time.sleep(0.15)
        held.append(sum(row["reserved_until"] is not None for row in jobs(observer, queue)))

    push(queue, "long", 6)
    assert work_off(queue, concurrency=2).counts == {"done": 6}
    assert max(held) <= 2 + 1, "a settlement may be under way"


def test_the_pace_follows_what_jobs_take() -> None:
    pace = Pace(10)
    assert pace.ahead([0.0] * 10) == 0
    for _ in range(200):
        pace.note(0.00001)
    assert pace.ahead([time.monotonic()] * 10) == MOST_AHEAD
    pace.note(10.0)
    assert pace.ahead([time.monotonic()] * 10) < 5
    for _ in range(200):
        pace.note(0.01)
    assert 80 <= pace.ahead([time.monotonic()] * 10) <= 100
    assert 8 <= pace.ahead([time.monotonic() - 1] * 9 + [0.0]) <= 10, "nine slots are busy with something long"
    assert not pace.stuck([time.monotonic() - 1] * 9 + [0.0])
    assert pace.stuck([time.monotonic() - 1] * 10)


def test_what_waits_behind_a_long_job_is_handed_to_others(queue: Queue, observer: Engine) -> None:
    gate, done = Gate(), threading.Event()
    queue.job(name="quick")(lambda: None)
    queue.job(name="long")(gate.pass_through)
    queue.job(name="last")(done.set)
    push(queue, "quick", 300)
    push(queue, "long")
    push(queue, "quick", 300)
    push(queue, "last")
    with working(queue, concurrency=1):
        gate.await_arrivals()
        eventually(lambda: sum(row["reserved_until"] is not None for row in jobs(observer, queue)) == 1)
        assert {row["attempts"] for row in jobs(observer, queue)} == {0, 1}
        with working(queue, concurrency=1):
            assert done.wait(10)
        gate.open()
    assert failures(observer, queue) == []


def test_what_waits_is_handed_back_when_the_worker_stops(site: Site) -> None:
    site.push("effect", 3000)
    process = site.start(concurrency=2)
    eventually(lambda: site.count_effects() > 300)
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    left = jobs(site.observer, site.queue)
    assert left
    assert {(row["attempts"], row["reserved_until"], row["available_at"] == row["due_at"]) for row in left} == {(0, None, True)}
    assert len(site.effects()) == 3000 - len(left)


def test_who_waits_in_the_memory_of_a_worker_that_dies_loses_an_attempt_at_most(site: Site) -> None:
    ids = site.push("effect", 2000, max_attempts=3)
    singles = site.push("see", 200, {"row": 1}, max_attempts=1)
    process = site.start(concurrency=2, lease=1)
    eventually(lambda: site.count_effects() > 300)
    process.kill()
    assert site.start(concurrency=2, lease=1, stop_when_empty=True).wait() == 0
    ran = {id for id, _ in site.effects()}
    assert ran >= set(ids)
    assert {row["id"] for row in failures(site.observer, site.queue)} == set(singles) - ran
    assert len(set(singles) - ran) <= 2, "more than ran when it died"


def test_no_more_jobs_than_asked_for_start(queue: Queue, observer: Engine) -> None:
    queue.job(name="noop")(lambda: None)
    push(queue, "noop", 1000)
    assert Worker(queue, max_jobs=777).run() == 0
    assert len(jobs(observer, queue)) == 223
    assert {(row["attempts"], row["reserved_until"]) for row in jobs(observer, queue)} == {(0, None)}


def test_a_job_of_many_seconds_among_short_ones_keeps_none_of_them(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    queue.job(name="quick")(lambda: None)
    queue.job(name="long")(gate.pass_through)
    push(queue, "quick", 1000)
    push(queue, "long")
    push(queue, "quick", 1000)
    with working(queue, concurrency=2), working(queue, concurrency=2):
        gate.await_arrivals()
        eventually(lambda: len(jobs(observer, queue)) == 1)
        gate.open()


def test_rows_of_a_thousand_single_attempts_are_not_put_back_and_forth(queue: Queue, observer: Engine) -> None:
    queue.job(name="job", max_attempts=1)(lambda n: None)
    put(observer, queue, 300, max_attempts=1)
    with statements_of(queue.consumer.engine) as seen:
        assert work_off(queue).counts == {"done": 300}
    assert len(seen) < 300 * 2


@pytest.mark.parametrize(
    ("row", "options"),
    [({"max_attempts": 1}, {}), ({"lease_in": -40}, {}), ({}, {"on_worker_lost": "fail"})],
    ids=["a single attempt", "its worker died", "not to be repeated"],
)
def test_what_may_not_wait_for_a_slot_gets_one_while_others_come(
    queue: Queue, observer: Engine, row: dict[str, float], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims for what is going to wait pass it over; as long as every slot has something waiting for it there is no other claim."""
    monkeypatch.setattr(claiming, "LONGEST_PASSED_OVER", 0.05)
    ran: list[str] = []
    queue.job(name="waits")(lambda: ran.append("waits"))
    queue.job(name="first", **options)(lambda: ran.append("first"))
    put(observer, queue, 300, name="waits", payload="{}", due_in=-100)
    put(observer, queue, 30, name="first", payload="{}", **({"due_in": -50} | row))
    put(observer, queue, 12_000, name="waits", payload="{}", due_in=-5)
    work_off(queue)
    assert ran.count("first") == 30
    places = [place for place, name in enumerate(ran) if name == "first"]
    assert places[-1] < len(ran) * 3 / 4
    assert places[-1] - places[0] < 3000, "once their turn has come, nothing overtakes them but what a claim had already brought"


def test_a_low_priority_does_not_overtake_for_long(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "LONGEST_PASSED_OVER", 0.05)
    ran: list[str] = []
    queue.job(name="low")(lambda: ran.append("low"))
    queue.job(name="high")(lambda: ran.append("high"))
    put(observer, queue, 300, name="low", payload="{}", due_in=-100)
    put(observer, queue, 12_000, name="low", payload="{}", priority=-1)
    put(observer, queue, 50, name="high", payload="{}", max_attempts=1)
    work_off(queue)
    between = ran[ran.index("high") :].count("low") - ran[len(ran) - ran[::-1].index("high") :].count("low")
    assert between < 3000, "once their turn has come, nothing more is taken that comes behind them"


def test_large_payloads_do_not_fill_the_memory_however_short_the_jobs(
    queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that wait for a slot nor those that wait for their settlement."""
    payload = '{"text": "' + "x" * 10_000 + '"}'
    monkeypatch.setattr(claims, "MOST_BYTES", 30 * len(payload))
    held: list[int] = []
    settles = threading.Event()
    settle = queue.consumer.settle

    @queue.job(name="large")
    def large(text: str) -> None:
        held.append(len(worker._shift.holdings) if worker._shift else 0)

    def settle_later(*arguments: Any, **options: Any) -> Any:
        assert settles.wait(PATIENCE)
        return settle(*arguments, **options)

    monkeypatch.setattr(queue.consumer, "settle", settle_later)
    put(observer, queue, 600, name="large", payload=payload)
    with working(queue, concurrency=4, stop_when_empty=True) as worker:
        eventually(lambda: len(held) >= 30)
        eventually(lambda: worker._shift is not None and worker._shift.behind)
        settles.set()
        eventually(lambda: worker.summary)
    assert len(held) == 600
    assert max(held) <= 100, "two claims and what they found unsettled"


@pytest.mark.parametrize(("jobs", "more"), [(100, True), (20, False)])
def test_a_claim_that_memory_has_bounded_is_a_full_one(
    queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch, jobs: int, more: bool
) -> None:
    """There are more to come, and no reason for a pause."""
    payload = '{"text": "' + "x" * 10_000 + '"}'
    monkeypatch.setattr(claims, "MOST_BYTES", 30 * len(payload))
    claimer = Crew(Shift(queue, ("default",), Limits(), concurrency=1, lease=60, name="tested"), wait_for_database=0)._claimer
    put(observer, queue, jobs, payload=payload)
    claimer._look(claiming._Room(busy=0, free=1, ahead=200, target=200), Meter(Limits()))
    assert claimer._filled is more
    claimer._waking.close()
