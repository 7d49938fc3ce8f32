"""
Settling and renewing: the token decides, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Delivery, Queue
from sqlqueue._dialects import server_of
from sqlqueue._driver.settle import Complete, Move, Release, Settlement
from sqlqueue._failure import Failure, Reason
from sqlqueue.errors import StaleDelivery
from tests.rows import change, expire, failed_in, jobs_in, keys_in, make_due, moment_of, put, put_key, statements_of

OPERATIONS: dict[str, Callable[[Queue, Delivery], object]] = {
    "complete": lambda queue, delivery: queue.complete(delivery),
    "release": lambda queue, delivery: queue.release(delivery),
    "release with an error": lambda queue, delivery: queue.release(delivery, error="no", delay=5),
    "fail": lambda queue, delivery: queue.fail(delivery, "no"),
    "renew": lambda queue, delivery: queue.renew(delivery, lease=600),
}
SETTLING = [name for name in OPERATIONS if name != "renew"]


def world(observer: Engine, queue: Queue) -> object:
    return jobs_in(observer, queue), failed_in(observer, queue), keys_in(observer, queue)


def test_a_completed_job_is_gone_and_its_key_free(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    put_key(observer, queue, id, "unique:job/a")
    queue.complete(queue.claim()[0])
    assert world(observer, queue) == ({}, {}, {})


def test_a_released_job_is_due_after_the_delay_and_the_attempt_is_given_back(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, attempts=1, last_error="before")
    put_key(observer, queue, id, "unique:job/a")
    (delivery,) = queue.claim()
    before = moment_of(observer)
    queue.release(delivery, delay=timedelta(minutes=5))
    row = jobs_in(observer, queue)[id]
    assert timedelta(minutes=5) <= row["available_at"] - before < timedelta(minutes=5, seconds=10)
    assert (row["attempts"], row["last_error"]) == (1, "before")
    assert row["reserved_until"] is None
    assert row["reserved_by"] is None
    assert keys_in(observer, queue) == {"unique:job/a": id}


def test_a_release_with_an_error_was_an_attempt(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    queue.release(queue.claim()[0], error=ValueError("no stock"))
    row = jobs_in(observer, queue)[id]
    assert (row["attempts"], row["last_error"]) == (1, "ValueError: no stock")
    assert queue.claim()[0].attempt == 2


@pytest.mark.parametrize("error", ["x" * 1_000_000, ValueError("\U0001f4a5" * 300_000)], ids=["ascii", "emoji"])
def test_the_error_of_a_release_is_cut(queue: Queue, observer: Engine, error: ValueError | str) -> None:
    (id,) = put(observer, queue)
    queue.release(queue.claim()[0], error=error)
    text = jobs_in(observer, queue)[id]["last_error"]
    assert len(text) <= 8 * 1024
    assert "characters cut" in text


def test_a_failed_job_is_in_the_failed_table_only(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, max_attempts=7)
    put_key(observer, queue, id, "unique:job/a")
    (delivery,) = queue.claim()
    queue.fail(delivery, "it cannot be done")
    assert jobs_in(observer, queue) == {}
    assert keys_in(observer, queue) == {}
    row = failed_in(observer, queue)[id]
    assert (row["attempts"], row["max_attempts"], row["unique_key"]) == (1, 7, "unique:job/a")
    assert (row["reason"], row["error_class"], row["error_message"]) == ("failed_by_job", None, "it cannot be done")
    assert (row["token"], row["worker"]) == (delivery.token, row["worker"])


# --- fencing ----------------------------------------------------------------------------------------------------------


def assert_stale(queue: Queue, observer: Engine, delivery: Delivery) -> None:
    """Every operation names itself, and changes nothing."""
    before = world(observer, queue)
    for name, operation in OPERATIONS.items():
        with pytest.raises(StaleDelivery, match=f"cannot {name.split()[0]} job {delivery.id}"):
            operation(queue, delivery)
    assert world(observer, queue) == before


def test_another_claim_s_job_is_not_touched(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    put_key(observer, queue, id, "unique:job/a")
    (old,) = queue.claim()
    expire(observer, queue)
    (new,) = queue.claim()
    assert_stale(queue, observer, old)
    queue.complete(new)


@pytest.mark.parametrize("first", SETTLING)
def test_what_has_been_settled_is_settled(queue: Queue, observer: Engine, first: str) -> None:
    put(observer, queue)
    (delivery,) = queue.claim()
    OPERATIONS[first](queue, delivery)
    assert_stale(queue, observer, delivery)


@pytest.mark.parametrize("operation", SETTLING)
def test_a_late_settlement_counts_while_nobody_else_has_the_job(queue: Queue, observer: Engine, operation: str) -> None:
    put(observer, queue)
    (delivery,) = queue.claim()
    expire(observer, queue)
    OPERATIONS[operation](queue, delivery)
    with pytest.raises(StaleDelivery):
        queue.complete(delivery)


def test_a_job_that_was_moved_away_is_not_brought_back(queue: Queue, observer: Engine) -> None:
    put(observer, queue, max_attempts=1)
    (delivery,) = queue.claim()
    expire(observer, queue)
    assert queue.claim() == []
    assert_stale(queue, observer, delivery)


# --- renewing ---------------------------------------------------------------------------------------------------------


def test_a_renewal_moves_the_lease_s_end(queue: Queue, observer: Engine, engine: Engine) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim(lease=60)
    renewed = queue.renew(delivery, lease=600)
    row = jobs_in(observer, queue)[id]
    assert renewed.lease_until == row["reserved_until"]
    left = row["reserved_until"] - moment_of(observer)
    assert timedelta(seconds=590) < left <= timedelta(seconds=600)
    grace = timedelta(seconds=600 * server_of(engine.dialect).lease_grace)
    assert abs(row["available_at"] - row["reserved_until"] - grace) < timedelta(seconds=1)
    assert (renewed.id, renewed.token, renewed.attempt) == (delivery.id, delivery.token, delivery.attempt)
    queue.complete(renewed)


def test_a_renewal_never_shortens_a_lease(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim(lease=600)
    before = jobs_in(observer, queue)[id]
    for lease in (1, 30, 590):
        assert queue.renew(delivery, lease=lease).lease_until == before["reserved_until"]
        assert jobs_in(observer, queue)[id] == before


def test_a_renewal_that_adds_little_brings_the_job_no_closer(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim(lease=600)
    reach = moment_of(observer) + timedelta(seconds=800)
    change(observer, queue, [id], reserved_until=moment_of(observer) + timedelta(seconds=59), available_at=reach)
    queue.renew(delivery, lease=60)
    assert jobs_in(observer, queue)[id]["available_at"] == reach


def test_a_lease_that_has_ended_is_not_revived(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    (delivery,) = queue.claim()
    expire(observer, queue)
    before = world(observer, queue)
    with pytest.raises(StaleDelivery, match="cannot renew"):
        queue.renew(delivery)
    assert world(observer, queue) == before
    # Neither lost nor renewed: the job may still be settled.
    assert queue.consumer.renew([(delivery.id, delivery.token)], 60) == (set(), set())
    queue.complete(delivery)


def test_a_lease_may_be_renewed_as_long_as_nobody_can_take_the_job(queue: Queue, observer: Engine, engine: Engine) -> None:
    """Where one writer at a time gets through, live workers have some grace to renew before others may take over."""
    put(observer, queue)
    (delivery,) = queue.claim(lease=60)
    change(observer, queue, [delivery.id], reserved_until=moment_of(observer) - timedelta(seconds=1))
    assert queue.claim() == []
    queue.renew(delivery)
    assert jobs_in(observer, queue)[delivery.id]["reserved_until"] > moment_of(observer)


def test_a_group_of_renewals_tells_what_is_lost(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 5)
    ours, released, gone, taken, ended = queue.claim(limit=5)
    queue.release(released)
    queue.complete(gone)
    expire(observer, queue, [taken.id])
    make_due(observer, queue)
    queue.claim(limit=2)
    expire(observer, queue, [ended.id])
    leases = [(delivery.id, delivery.token) for delivery in (ended, taken, gone, ours, released)]
    renewed, lost = queue.consumer.renew(leases, 600)
    assert renewed == {ours.id}
    assert lost == {released.id, gone.id, taken.id}


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_group_settles_each_on_its_own_merits(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 6)
    done, retried, failed, stale, gone, given_back = queue.claim(limit=6)
    expire(observer, queue, [stale.id])
    queue.claim()
    queue.complete(gone)
    failure = Failure(Reason.EXCEPTION, "ValueError", "no", "Traceback …")
    outcomes: list[tuple[Delivery, Any]] = [
        (done, Complete()),
        (retried, Release(60, "ValueError: no")),
        (failed, Move(failure, "worker")),
        (stale, Complete()),
        (gone, Release(0, None)),
        (given_back, Release(0, None)),
    ]
    group = [Settlement(delivery.id, delivery.token, False, outcome) for delivery, outcome in outcomes]
    results = queue.consumer.settle(group)
    assert results.settled == {done.id, retried.id, failed.id, given_back.id}
    assert results.stale == {stale.id, gone.id}
    assert results.blocked == set()
    assert set(jobs_in(observer, queue)) == {retried.id, stale.id, given_back.id}
    assert set(failed_in(observer, queue)) == {failed.id}


def test_a_group_of_any_size_is_settled_in_parts(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 1000)
    deliveries = queue.claim(limit=1000)
    with statements_of(queue.consumer.engine) as seen:
        results = queue.consumer.settle([Settlement(one.id, one.token, False, Complete()) for one in deliveries])
    assert len(results.settled) == 1000
    assert len(seen) == (2 if server_of(queue.consumer.engine.dialect).writes_in_with else 4)
    assert jobs_in(observer, queue) == {}


def test_the_keys_of_a_group_are_freed_together(queue: Queue, observer: Engine) -> None:
    ids = put(observer, queue, 20)
    for id in ids:
        put_key(observer, queue, id, f"unique:job/{id}")
    kept = moment_of(observer) + timedelta(hours=1)
    keys = queue.tables.keys
    with observer.connect() as connection:
        connection.execute(sa.update(keys).where(keys.c.job_id == ids[0]).values(expires_at=kept))  # unique_for
        connection.execute(sa.update(keys).where(keys.c.job_id == ids[1]).values(job_id=12345678))  # taken over
        connection.execute(sa.delete(keys).where(keys.c.job_id == ids[2]))
    deliveries = queue.claim(limit=20)
    results = queue.consumer.settle([Settlement(one.id, one.token, one.unique, Complete()) for one in deliveries])
    assert results.settled == set(ids)
    assert keys_in(observer, queue) == {f"unique:job/{ids[0]}": ids[0], f"unique:job/{ids[1]}": 12345678}
