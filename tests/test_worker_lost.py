"""
What the death of a worker means for its jobs: repeated, or failed; and claims whose answer never came.
"""

from __future__ import annotations

import time

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from sqlqueue import OptionError, Queue, StaleDelivery
from sqlqueue._queue import consumer as consumers
from tests.rows import (
    Trap,
    apply_and_lose,
    at_commit,
    at_statement,
    can_lock_rows,
    change,
    claims_commit,
    cut,
    expire,
    failed_in,
    holding,
    jobs_in,
    lock_of,
    lose,
    put,
)
from tests.workers import work_off


@pytest.fixture
def queue(queue: Queue) -> Queue:
    """Knows a job that is to be run at most once, and one that is not."""
    ran: list[str] = []
    queue.job(name="charge", max_attempts=5, on_worker_lost="fail")(lambda: ran.append("charge"))
    queue.job(name="job", max_attempts=5)(lambda n: ran.append("job"))
    return queue


# --- on_worker_lost -----------------------------------------------------------------------------------------------------


def test_a_job_that_must_not_be_repeated_has_failed_when_its_worker_dies(queue: Queue, observer: Engine) -> None:
    (once,) = put(observer, queue, name="charge", lease_in=-1, last_error="OSError: before")
    (again,) = put(observer, queue, name="job", lease_in=-1)
    (delivery,) = queue.claim(limit=5)
    assert (delivery.id, delivery.reclaimed_from) == (again, "dead:1")
    assert set(jobs_in(observer, queue)) == {again}
    failed = failed_in(observer, queue)[once]
    assert (failed["reason"], failed["worker"], failed["attempts"]) == ("worker_lost", "dead:1", 1)
    message = "worker dead:1 died or lost its lease during attempt 1, and this job is not to be repeated then"
    assert failed["error_message"] == f"{message}; the last error was: OSError: before"


def test_a_worker_asks_for_the_same(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, name="charge", payload="{}", lease_in=-1)
    summary = work_off(queue)
    assert failed_in(observer, queue)[id]["reason"] == "worker_lost"
    assert summary.counts == {}


def test_a_job_that_must_not_be_repeated_is_repeated_after_anything_else(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, name="charge")
    queue.release(queue.claim()[0], error="an exception")
    queue.release(queue.claim()[0])  # as a worker that is told to stop
    (delivery,) = queue.claim()
    assert (delivery.id, delivery.attempt, delivery.reclaimed_from) == (id, 2, None)


def test_a_late_worker_cannot_settle_what_has_failed_meanwhile(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, name="charge")
    (delivery,) = queue.claim()
    expire(observer, queue)
    assert queue.claim() == []
    for settle in (queue.complete, queue.release, lambda late: queue.fail(late, "x"), queue.renew):
        with pytest.raises(StaleDelivery):
            settle(delivery)
    assert failed_in(observer, queue)[id]["reason"] == "worker_lost"


def test_a_route_decides_over_the_decorator(queue: Queue, observer: Engine) -> None:
    queue.route("charge", on_worker_lost="retry")
    queue.route("elsewhere", on_worker_lost="fail")  # a name without code here
    put(observer, queue, name="charge", lease_in=-1)
    (strange,) = put(observer, queue, name="elsewhere", lease_in=-1)
    assert [delivery.name for delivery in queue.claim(limit=5)] == ["charge"]
    assert failed_in(observer, queue)[strange]["reason"] == "worker_lost"


def test_a_choice_that_is_none_is_refused() -> None:
    for wrong in ("", "discard", True, 1, ["fail"]):
        with pytest.raises(OptionError, match=r"^on_worker_lost"):
            Queue().job(name="a", on_worker_lost=wrong)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match=r"^on_worker_lost.*@queue\.job"):
        Queue().job(name="a")(lambda: None).options(on_worker_lost="fail")  # type: ignore[call-arg]


def test_many_lost_jobs_of_both_kinds_are_sorted_out_by_one_claim(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 30, name="charge", lease_in=-2)
    again = put(observer, queue, 30, name="job", lease_in=-1)
    assert [delivery.id for delivery in queue.claim(limit=30)] == again
    assert len(failed_in(observer, queue)) == 30


# --- a claim whose answer was lost --------------------------------------------------------------------------------------


def test_a_claim_that_was_applied_although_its_answer_was_lost_costs_nothing(queue: Queue, observer: Engine) -> None:
    ids = put(observer, queue, max_attempts=1) + put(observer, queue, priority=5, attempts=2)
    before = jobs_in(observer, queue)
    with at_commit(queue.consumer.engine, Trap(apply_and_lose, at=claims_commit(queue))) as trap, pytest.raises(DBAPIError):
        queue.claim(limit=5, lease=600)
    assert trap.sprung == 1
    assert all(row["reserved_until"] is not None for row in jobs_in(observer, queue).values()), "it was applied"
    assert sorted(delivery.id for delivery in queue.claim(limit=5)) == sorted(ids)
    attempts = {id: row["attempts"] - 1 for id, row in jobs_in(observer, queue).items()}
    assert attempts == {id: row["attempts"] for id, row in before.items()}


def test_a_claim_that_was_rolled_back_leaves_nothing_to_give_back(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    with at_commit(queue.consumer.engine, Trap(lose, at=claims_commit(queue))), pytest.raises(DBAPIError):
        queue.claim()
    assert [delivery.id for delivery in queue.claim()] == [id]
    assert jobs_in(observer, queue)[id]["attempts"] == 1


def test_a_connection_that_is_lost_before_the_commit_is_nobody_s_concern(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    with at_statement(queue.consumer.engine, Trap(cut(observer)), "UPDATE") as trap:
        (delivery,) = queue.claim()
    assert (trap.sprung, delivery.id, delivery.attempt) == (1, id, 1)
    assert not queue.consumer._unanswered
    with at_statement(queue.consumer.engine, Trap(lose)):
        assert queue.renew(delivery).id == id
    with at_statement(queue.consumer.engine, Trap(lose)):
        assert queue.clear("other") == 0


def test_a_commit_that_comes_after_its_connection_is_gone_is_noticed_too(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, max_attempts=1)
    with at_commit(queue.consumer.engine, Trap(lose, at=claims_commit(queue))), pytest.raises(DBAPIError):
        queue.claim()
    token = queue.consumer._unanswered[0].terms.token
    queue.claim()  # looks, and finds nothing yet
    change(observer, queue, [id], reserved_token=token)  # as a server that was still at it would leave the row
    (delivery,) = queue.claim()
    assert (delivery.id, delivery.attempt) == (id, 1)
    assert not queue.consumer._unanswered


def test_nobody_looks_for_ever(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(observer, queue)
    monkeypatch.setattr(consumers, "UNANSWERED", -1.0)
    with at_commit(queue.consumer.engine, Trap(lose, at=claims_commit(queue))), pytest.raises(DBAPIError):
        queue.claim()
    assert len(queue.claim()) == 1
    assert not queue.consumer._unanswered


def test_what_somebody_has_locked_is_given_back_later(queue: Queue, observer: Engine, engine: Engine) -> None:
    if not can_lock_rows(engine):
        pytest.skip("nothing but the whole database can be locked")
    (id,) = put(observer, queue, max_attempts=1)
    with at_commit(queue.consumer.engine, Trap(apply_and_lose, at=claims_commit(queue))), pytest.raises(DBAPIError):
        queue.claim(lease=600)
    with holding(engine, lock_of(queue.tables.jobs, queue.tables.jobs.c.id == id)):
        assert queue.claim() == []
    began = time.monotonic()
    assert [delivery.id for delivery in queue.claim()] == [id]
    assert time.monotonic() - began < 5


def test_a_worker_gives_back_what_it_claimed_unheard(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, max_attempts=1)
    with at_commit(queue.consumer.engine, Trap(apply_and_lose, at=3)) as trap:  # after a look around and a look for lanes
        summary = work_off(queue)
    assert trap.sprung == 1
    assert summary.counts == {"done": 1}
    assert id not in failed_in(observer, queue)
