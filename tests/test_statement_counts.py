"""
How many statements a job costs, and how many an idle worker: what a fast network hides and a slow one shows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from sqlalchemy import Engine

from sqlqueue import Delivery, Queue
from sqlqueue._dialects import Server, server_of
from sqlqueue._driver.settle import Complete, Move, Release, Settlement
from sqlqueue._failure import Failure, Reason
from sqlqueue._queue import looks
from sqlqueue._worker import claiming, waking
from sqlqueue._worker.bell import Bell
from sqlqueue._worker.crew import Crew
from sqlqueue._worker.shift import Shift
from sqlqueue._worker.summary import Limits, Meter
from tests.rows import put, put_key, statements_of

MINUTE = 60.0


@pytest.fixture
def kind(queue: Queue) -> Server:
    queue.claim()  # so that it is known
    return server_of(queue.consumer.engine.dialect)


def claim(queue: Queue, number: int) -> list[Delivery]:
    return queue.consumer.claim(("default",), 10, 60.0, "worker", ahead=number - 10)


@pytest.mark.parametrize("number", [10, 500, 1000])
def test_a_claim_of_n_beside_a_look_a_second(queue: Queue, observer: Engine, kind: Server, number: int) -> None:
    put(observer, queue, 1 + 2 * number)
    queue.claim()
    with statements_of(queue.consumer.engine) as sent:
        assert len(claim(queue, number)) == number
    kinds = 1 if number == 10 else 2  # those that start at once, and those that are going to wait
    updates = kinds if number <= 510 else kinds + 1  # at most 500 ids in a list
    assert len(sent) == (kinds if kind.claim_in_one_statement else kinds + updates)


def test_a_first_claim_looks_for_lanes(queue: Queue, observer: Engine, kind: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "REMEMBERED", 0.0)
    monkeypatch.setattr(looks, "SHARE", 0)
    put(observer, queue, 10)
    with statements_of(queue.consumer.engine) as sent:
        assert len(claim(queue, 10)) == 10
    lanes = 1 if kind.lanes_by_recursion else 2  # one hop a lane, and one that finds no more
    assert len(sent) == lanes + (1 if kind.claim_in_one_statement else 2)


OUTCOMES: dict[str, tuple[Callable[[], Complete | Release | Move], bool, Callable[[Server], int]]] = {
    "done": (Complete, False, lambda kind: 1 if kind.writes_in_with else 2),
    # Keys: which, locked, which of them are somebody else's, freed.
    "done, with a key": (Complete, True, lambda kind: 5),
    "to be tried again": (lambda: Release(5.0, "an error"), False, lambda kind: 2),
    "failed": (lambda: Move(Failure(Reason.EXCEPTION, "ValueError", "an error"), "worker"), False, lambda kind: 3),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("number", [1, 500])
def test_a_settlement_of_n(queue: Queue, observer: Engine, kind: Server, outcome: str, number: int) -> None:
    make, keyed, expected = OUTCOMES[outcome]
    ids = put(observer, queue, number)
    if keyed:
        for id in ids[:3]:
            put_key(observer, queue, id, f"key-{id}")
    deliveries = claim(queue, number + 10)
    assert len(deliveries) == number
    with statements_of(queue.consumer.engine) as sent:
        results = queue.consumer.settle([Settlement(one.id, one.token, one.unique, make()) for one in deliveries])
    assert len(results.settled) == number
    plain = keyed and number > 3
    assert len(sent) == expected(kind) + (OUTCOMES["done"][2](kind) if plain else 0)


class Hours:
    """A clock that every pause moves on at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (claiming, waking, looks):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(Bell, "wait", lambda bell, timeout: self.pass_by(timeout))
        monkeypatch.setattr(Bell, "wait_beside", lambda bell, wait, timeout: self.pass_by(timeout))

    def pass_by(self, seconds: float) -> bool:
        self.now += max(seconds, 0.001)
        return False


def test_an_idle_minute(queue: Queue, kind: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = Hours(monkeypatch)
    shift = Shift(queue, ("default", "mail"), Limits(), concurrency=10, lease=60, name="tested")
    claimer = Crew(shift, wait_for_database=0)._claimer
    minutes: list[int] = []
    claimer.start_up()
    with statements_of(queue.consumer.engine) as sent:
        for end in (hours.now + MINUTE, hours.now + 2 * MINUTE):
            before = len(sent)
            monkeypatch.setattr(Meter, "reached", lambda meter, end=end: "max time" if hours.now >= end else None)
            claimer._loop(Meter(shift.limits))
            shift.reason = None
            minutes.append(len(sent) - before)
    claimer._waking.close()
    shift.claim_bell.close()
    assert minutes[1] < (1 if kind.notifies or kind.counts_changes else 5) * MINUTE
    assert minutes[0] < 2 * minutes[1]
