"""
Claims for more jobs than there are free slots: the rest waits in memory, and the death of the process must not cost it much.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from sqlqueue import Queue
from sqlqueue._driver.settle import Return, Settlement
from sqlqueue._job import Delivery
from sqlqueue._queue import claims
from tests.rows import Trap, apply_and_lose, at_commit, claims_commit, failed_in, jobs_in, put, put_each, statements_of


def claim(queue: Queue, limit: int, ahead: int, **options: Any) -> list[int]:
    return [delivery.id for delivery in deliveries(queue, limit, ahead, **options)]


def deliveries(queue: Queue, limit: int, ahead: int, **options: Any) -> list[Delivery]:
    return queue.consumer.claim(("default", "other"), limit, 60.0, "worker", ahead=ahead, **options)


def test_what_waits_comes_behind_what_starts(queue: Queue, observer: Engine) -> None:
    ids = put_each(observer, queue, [{"due_in": -20 + number} for number in range(10)])
    assert claim(queue, 3, 4) == ids[:7]
    assert [row["attempts"] for row in jobs_in(observer, queue).values()] == [1] * 7 + [0] * 3


def test_without_a_free_slot_only_what_may_wait_is_taken(queue: Queue, observer: Engine) -> None:
    put(observer, queue, due_in=-50, max_attempts=1)
    put(observer, queue, due_in=-40, attempts=4, max_attempts=5)
    put(observer, queue, due_in=-40, lease_in=-30)
    put(observer, queue, due_in=-20, name="once")
    before = jobs_in(observer, queue)
    waits = put(observer, queue, 2, max_attempts=2)
    assert claim(queue, 0, 10, not_repeated=frozenset(["once"])) == waits
    assert {id: row for id, row in jobs_in(observer, queue).items() if id not in waits} == before


def test_a_free_slot_is_for_any_job_and_the_rest_for_those_behind_it(queue: Queue, observer: Engine) -> None:
    single = put(observer, queue, 3, due_in=-50, max_attempts=1)
    waits = put(observer, queue, 3, due_in=-5)
    assert claim(queue, 2, 10) == single[:2] + waits


def test_lanes_behind_the_first_are_looked_at_for_what_may_wait(queue: Queue, observer: Engine) -> None:
    high = put(observer, queue, 2, priority=9, max_attempts=1)
    low = put(observer, queue, 2, priority=1)
    other = put(observer, queue, 2, queue="other")
    assert claim(queue, 1, 3) == [high[0], *low, other[0]]


def test_many_that_may_not_wait_are_passed_over_without_being_touched(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 300, due_in=-50, max_attempts=1)
    before = jobs_in(observer, queue)
    waits = put(observer, queue, 5)
    with statements_of(queue.consumer.engine) as seen:
        assert claim(queue, 0, 50) == waits
    assert (
        len([statement for statement, _ in seen if "UPDATE" in statement and "FOR UPDATE" not in statement.split("RETURNING")[0][-20:]])
        <= 2
    )
    assert {id: row for id, row in jobs_in(observer, queue).items() if id not in waits} == before


def test_what_must_not_run_at_all_is_moved_by_such_a_claim_too(queue: Queue, observer: Engine) -> None:
    damaged = put(observer, queue, payload="[]", due_in=-9) + put(observer, queue, attempts=5, max_attempts=5, due_in=-8)
    waits = put(observer, queue)
    assert claim(queue, 0, 5) == waits
    assert sorted(failed_in(observer, queue)) == damaged


@pytest.mark.parametrize("number", [600, 1200])
def test_a_large_claim_takes_as_many_as_it_asks_for(queue: Queue, observer: Engine, number: int) -> None:
    ids = put(observer, queue, number + 10)
    assert claim(queue, 10, number - 10) == ids[:number]


# --- handing back -------------------------------------------------------------------------------------------------------


def hand_back(queue: Queue, handed: list[Delivery]) -> None:
    results = queue.consumer.settle([Settlement(delivery.id, delivery.token, False, Return()) for delivery in handed])
    assert (results.stale, results.blocked) == (set(), set())


def test_what_is_handed_back_is_where_it_was(queue: Queue, observer: Engine) -> None:
    put_each(observer, queue, [{"due_in": -20 + number} for number in range(10)])
    before = jobs_in(observer, queue)
    hand_back(queue, deliveries(queue, 3, 4))
    kept = ("attempts", "reserved_until", "reserved_by", "available_at")
    after = jobs_in(observer, queue)
    assert {id: [row[name] for name in kept] for id, row in after.items()} == {
        id: [row[name] for name in kept] for id, row in before.items()
    }
    assert claim(queue, 10, 0) == list(before)


def test_a_group_is_handed_back_by_one_statement(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 100)
    handed = deliveries(queue, 100, 0)
    with statements_of(queue.consumer.engine) as seen:
        hand_back(queue, handed)
    assert len(seen) == 2


def test_handing_back_again_after_a_lost_answer_counts(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    (delivery,) = deliveries(queue, 1, 0)
    with at_commit(queue.consumer.engine, Trap(apply_and_lose)):
        hand_back(queue, [delivery])
    assert jobs_in(observer, queue)[id]["attempts"] == 0


def test_who_holds_it_now_is_not_disturbed(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    (old,) = deliveries(queue, 1, 0)
    hand_back(queue, [old])
    (new,) = deliveries(queue, 1, 0)
    before = jobs_in(observer, queue)
    results = queue.consumer.settle([Settlement(id, old.token, False, Return())])
    assert results.stale == {id}
    assert jobs_in(observer, queue) == before
    queue.complete(new)


def test_a_claim_ahead_whose_answer_was_lost_is_given_back_whole(queue: Queue, observer: Engine) -> None:
    ids = put(observer, queue, 50)
    with at_commit(queue.consumer.engine, Trap(apply_and_lose, at=claims_commit(queue))), pytest.raises(DBAPIError):
        claim(queue, 10, 40)
    assert claim(queue, 10, 40) == ids
    assert {row["attempts"] for row in jobs_in(observer, queue).values()} == {1}


# --- memory -------------------------------------------------------------------------------------------------------------

PAYLOAD = '{"text": "' + "x" * 10_000 + '"}'


@pytest.mark.parametrize("limit", [0, 1])
def test_no_more_waits_than_there_is_memory_for(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(claims, "MOST_BYTES", 2**20)
    put(observer, queue, 300, payload=PAYLOAD)
    for _ in range(3):
        assert 90 <= len(claim(queue, limit, 200)) <= 2**20 / len(PAYLOAD)


def test_what_starts_at_once_is_taken_whatever_its_size(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MOST_BYTES", 1000)
    ids = put(observer, queue, 20, payload=PAYLOAD)
    assert claim(queue, 5, 100) == ids[:5]


def test_large_payloads_that_were_seen_lately_may_come_again(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MOST_BYTES", 2**20)
    put_each(observer, queue, [{"due_in": -30, "payload": PAYLOAD}, {"due_in": -20}, *[{"payload": PAYLOAD}] * 300])
    assert len(claim(queue, 1, 0)) == len(claim(queue, 1, 0)) == 1
    assert len(claim(queue, 0, 300)) <= 2 * 2**20 / len(PAYLOAD)
