"""
Claiming: what is taken, in which order, for how long, and what a claim leaves alone.
"""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Queue
from sqlqueue._job import Delivery
from sqlqueue._queue import looks
from sqlqueue.errors import OptionError
from tests.rows import (
    Trap,
    at_commit,
    at_statement,
    can_lock_rows,
    change,
    claims_commit,
    expire,
    failed_in,
    holding,
    jobs_in,
    lock_of,
    lose,
    make_due,
    moment_of,
    put,
    put_each,
    put_key,
    statements_of,
)
from tests.servers import Database

NOWHERE = "sqlite:///nowhere/queue.db"


def ids(deliveries: list[Delivery]) -> list[int]:
    return [delivery.id for delivery in deliveries]


def test_a_claim_takes_a_job_for_a_lease(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, payload='{"order": 7}', headers='{"trace": "abc"}', max_attempts=3)
    (delivery,) = queue.claim(lease=90)
    row = jobs_in(observer, queue)[id]
    assert (delivery.id, delivery.name, delivery.queue, delivery.payload) == (id, "job", "default", {"order": 7})
    assert (delivery.attempt, delivery.max_attempts, delivery.headers) == (1, 3, {"trace": "abc"})
    assert delivery.reclaimed_from is None
    assert not delivery.last_attempt
    # Never later than the row says, and hardly earlier: it may have been worked out a statement before.
    assert timedelta(0) <= row["reserved_until"] - delivery.lease_until < timedelta(seconds=2)
    assert delivery.token == row["reserved_token"]
    assert timedelta(seconds=85) < row["reserved_until"] - moment_of(observer) <= timedelta(seconds=90)
    assert row["available_at"] >= row["reserved_until"]
    assert row["attempts"] == 1
    assert row["reserved_by"]


def test_a_job_under_a_lease_is_not_handed_out_again(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    assert len(queue.claim(limit=5)) == 1
    assert queue.claim(limit=5) == []


def test_a_job_that_is_not_due_yet_is_not_handed_out(queue: Queue, observer: Engine) -> None:
    put(observer, queue, due_in=0.2)
    assert queue.claim() == []
    assert len(queue.claim(wait=5)) == 1


def test_every_claim_has_a_token_of_its_own(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 2)
    (first,), (second,) = queue.claim(), queue.claim()
    assert first.token != second.token
    assert len(first.token) == 32


def test_a_claim_takes_no_more_than_its_limit(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 7)
    assert [len(queue.claim(limit=3)) for _ in range(4)] == [3, 3, 1, 0]


def test_a_thousand_jobs_can_be_claimed_at_once(queue: Queue, observer: Engine) -> None:
    expected = put(observer, queue, 1000)
    assert ids(queue.claim(limit=1000)) == expected


def test_other_queues_are_left_alone(queue: Queue, observer: Engine) -> None:
    other = put(observer, queue, queue="other")
    before = jobs_in(observer, queue)
    assert queue.claim(limit=5) == []
    assert jobs_in(observer, queue) == before
    assert ids(queue.claim("other")) == other


# --- order --------------------------------------------------------------------------------------------------------------


def test_higher_priorities_come_first_then_the_due_time_then_the_id(queue: Queue, observer: Engine) -> None:
    low = put(observer, queue, priority=-100)
    late = put(observer, queue, 2, due_in=-1)
    early = put(observer, queue, due_in=-60)
    high = put(observer, queue, priority=100)
    below = put(observer, queue, priority=-1, due_in=-3600)
    assert ids(queue.claim(limit=10)) == high + early + late + below + low


def test_queues_come_in_the_order_in_which_they_are_named(queue: Queue, observer: Engine) -> None:
    b = put(observer, queue, queue="b", priority=50)
    a = put(observer, queue, queue="a", priority=-50)
    c = put(observer, queue, queue="c")
    put(observer, queue, queue="unnamed")
    assert ids(queue.claim(["c", "a", "b"], limit=10)) == c + a + b


def test_the_jobs_of_one_transaction_come_in_the_order_of_their_ids(queue: Queue, observer: Engine) -> None:
    expected = put(observer, queue, 25)
    found = [delivery.id for _ in range(5) for delivery in queue.claim(limit=5)]
    assert found == expected


def test_the_order_holds_one_job_at_a_time_too(queue: Queue, observer: Engine) -> None:
    expected = put(observer, queue, priority=9) + put(observer, queue, due_in=-9) + put(observer, queue) + put(observer, queue, priority=-9)
    assert [queue.claim()[0].id for _ in range(4)] == expected


def test_lanes_of_fairness_are_one_order_of_due_times(queue: Queue, observer: Engine) -> None:
    b = put(observer, queue, fair_by="b", due_in=-3)
    a = put(observer, queue, fair_by="a", due_in=-2)
    none = put(observer, queue, due_in=-1)
    assert ids(queue.claim(limit=9)) == b + a + none


def test_a_lane_that_comes_up_while_another_is_remembered_keeps_its_rank(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    assert len(queue.claim()) == 1  # the lanes are looked at, and remembered
    normal = put(observer, queue)
    urgent = put(observer, queue, priority=7)
    assert ids(queue.claim(limit=5)) == urgent + normal


def test_a_new_lane_is_seen_within_a_second_while_the_others_are_busy(
    queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(observer, queue, 100)
    queue.claim()
    urgent = put(observer, queue, priority=1)
    assert ids(queue.claim()) != urgent  # enough was found where the last look found it
    monkeypatch.setattr(looks, "SHARE", 0)  # however slow this machine's last look was
    monkeypatch.setattr(looks, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1.0))
    assert ids(queue.claim()) == urgent


def test_many_lanes_are_all_found(queue: Queue, observer: Engine) -> None:
    expected = put_each(observer, queue, [{"fair_by": f"tenant-{n:03}", "due_in": n - 100} for n in range(60)])
    put(observer, queue, queue="other")
    assert ids(queue.claim(limit=100)) == expected


def test_a_queue_without_rows_is_no_lane(queue: Queue) -> None:
    assert queue.consumer.due_in(("default", "other")) is None
    assert queue.claim(["default", "other"], limit=9) == []


def test_the_next_due_time_is_known(queue: Queue, observer: Engine) -> None:
    put(observer, queue, due_in=3600, priority=3)
    put(observer, queue, due_in=600)
    due_in = queue.consumer.due_in(("default",))
    assert due_in is not None
    assert 590 < due_in <= 600
    soonest = queue.consumer.soonest(("default",))
    assert soonest is not None
    assert 590 < soonest <= 600
    put(observer, queue)
    due_in = queue.consumer.due_in(("other", "default"))
    assert due_in is not None
    assert due_in <= 0


# --- attempts and leases that ended -----------------------------------------------------------------------------------


def test_every_start_counts_and_a_dead_worker_s_too(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, max_attempts=5)
    attempts = []
    for _ in range(3):
        (delivery,) = queue.claim()
        attempts.append((delivery.attempt, delivery.reclaimed_from is not None))
        expire(observer, queue)
    assert attempts == [(1, False), (2, True), (3, True)]
    assert jobs_in(observer, queue)[id]["attempts"] == 3


def test_a_reclaimed_job_names_the_worker_that_let_go_of_it(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    queue.claim()
    change(observer, queue, [id], reserved_by="the-dead-one")
    expire(observer, queue)
    (delivery,) = queue.claim()
    assert delivery.reclaimed_from == "the-dead-one"


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_a_job_starts_exactly_as_often_as_it_may(queue: Queue, observer: Engine, max_attempts: int) -> None:
    (id,) = put(observer, queue, max_attempts=max_attempts)
    starts = 0
    while deliveries := queue.claim():
        starts += 1
        if starts % 2:
            expire(observer, queue)
        else:
            queue.release(deliveries[0], error="not today")
            make_due(observer, queue)
    assert starts == max_attempts
    assert failed_in(observer, queue)[id]["attempts"] == max_attempts


def test_a_job_that_was_handed_back_unstarted_has_not_used_an_attempt(queue: Queue, observer: Engine) -> None:
    put(observer, queue, max_attempts=1)
    for _ in range(3):
        (delivery,) = queue.claim()
        assert delivery.attempt == 1
        queue.release(delivery)
    assert failed_in(observer, queue) == {}


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_a_locked_job_hides_no_other(queue: Queue, observer: Engine, engine: Engine) -> None:
    first, *others = put(observer, queue, 4)
    jobs = queue.tables.jobs
    if not can_lock_rows(engine):
        pytest.skip("there are no row locks here")
    with holding(engine, lock_of(jobs, jobs.c.id == first)):
        assert ids(queue.claim(limit=10)) == others
        assert queue.consumer.due_in(("default",)) is not None
    assert ids(queue.claim(limit=10)) == [first]


def test_a_connection_that_is_lost_at_the_commit_of_a_claim_is_raised_and_nothing_is_handed_out(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 3)
    before = jobs_in(observer, queue)
    with at_commit(queue.consumer.engine, Trap(lose, at=claims_commit(queue))), pytest.raises(sa.exc.DBAPIError):
        queue.claim(limit=3)
    assert jobs_in(observer, queue) == before
    assert len(queue.claim(limit=3)) == 3


def test_jobs_that_were_taken_are_not_lost_when_the_look_for_more_fails(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 2)
    queue.claim()  # from now on the lane is remembered
    remaining = put(observer, queue)
    with statements_of(queue.consumer.engine) as seen:
        queue.consumer.due_in(("default",))
    look = seen[0][0]
    with at_statement(queue.consumer.engine, Trap(lose, times=9), look):
        assert len(queue.claim(limit=5)) == 2
    assert remaining[0] in jobs_in(observer, queue)
    assert queue.claim(limit=5) == []


def test_a_key_does_not_keep_a_job_from_being_claimed(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    put_key(observer, queue, id, "unique:job/a")
    (delivery,) = queue.claim()
    assert delivery.unique


@pytest.mark.parametrize("limit", [0, -1, 1001, True, 1.0])
def test_a_limit_that_is_none_is_refused(limit: int) -> None:
    with pytest.raises(OptionError, match="limit"):
        Queue(NOWHERE).claim(limit=limit)


@pytest.mark.parametrize("lease", [0, -5, 0.5, 86_401])
def test_a_lease_that_makes_no_sense_is_refused(lease: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        Queue(NOWHERE).claim(lease=lease)


@pytest.mark.parametrize("queues", [[], ["a", "a"], "no spaces", ["*"]])
def test_queues_are_names_and_each_named_once(queues: list[str]) -> None:
    with pytest.raises(OptionError, match="queue"):
        Queue(NOWHERE).claim(queues)


# --- other names, other dialects --------------------------------------------------------------------------------------


def go_round(queue: Queue, observer: Engine) -> None:
    """Every kind of statement once."""
    first, second = put_each(observer, queue, [{}, {"payload": "[]"}])
    put_key(observer, queue, first, "unique:job/a")
    (delivery,) = queue.claim(limit=5)
    delivery = queue.renew(delivery, lease=600)
    queue.release(delivery, error="no")
    queue.fail(queue.claim()[0], "no")
    assert sorted(failed_in(observer, queue)) == [first, second]
    assert queue.failed.retry(id=first) == 1
    assert queue.failed.forget(all=True) == 1
    put(observer, queue)
    queue.complete(queue.claim()[0])
    assert [stats.total for stats in queue.stats()] == [1]
    assert queue.clear("default") == 1


@pytest.mark.parametrize("prefix", ["order ", "Select-"])
def test_tables_of_any_name_serve(engine: Engine, observer: Engine, prefix: str) -> None:
    queue = Queue(engine, prefix=prefix)
    queue.metadata.create_all(engine)
    try:
        go_round(queue, observer)
    finally:
        queue.consumer.close()
        queue.metadata.drop_all(engine)


@pytest.mark.databases("mariadb")
def test_mariadb_s_own_dialect_serves(queue: Queue, observer: Engine, database: Database) -> None:
    own = Queue(database.mariadb_url)
    own.job(name="job")(lambda: None)
    with own.begin() as session:
        id = own.push_named(session, "job", {}, unique="a").id
        assert not own.push_named(session, "job", {}, unique="a").created
    own.complete(own.claim()[0])
    assert id not in jobs_in(observer, queue)
    go_round(own, observer)
    own.consumer.close()
