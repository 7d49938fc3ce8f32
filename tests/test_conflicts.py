"""
Conflicts and lost connections: what is repeated, what is not, and that a job is in exactly one table whatever is cut off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sqlqueue import Queue
from sqlqueue._driver.settle import Complete, Move, Release, Settlement
from sqlqueue._failure import Failure, Reason
from sqlqueue._job import Delivery
from sqlqueue._queue import transactions
from sqlqueue.errors import StaleDelivery
from tests.rows import (
    PATIENCE,
    Trap,
    apply_and_lose,
    at_commit,
    at_statement,
    can_lock_rows,
    conflicts,
    cut,
    expire,
    failed_in,
    holding,
    in_threads,
    jobs_in,
    keys_in,
    lose,
    put,
    put_each,
    put_key,
    raising,
    raising_at_commit,
    statements_of,
)

SETTLING: dict[str, Callable[[Queue, Delivery], None]] = {
    "complete": lambda queue, delivery: queue.complete(delivery),
    "release": lambda queue, delivery: queue.release(delivery, delay=60, error="no"),
    "fail": lambda queue, delivery: queue.fail(delivery, "no"),
}


@pytest.fixture
def queue(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setattr(transactions, "PAUSE", 0.001)
    return queue


def places(observer: Engine, queue: Queue) -> tuple[set[int], set[int]]:
    return set(jobs_in(observer, queue)), set(failed_in(observer, queue))


def clear(observer: Engine, queue: Queue) -> None:
    with observer.connect() as connection:
        for table in (queue.tables.jobs, queue.tables.failed, queue.tables.keys):
            connection.execute(sa.delete(table))


# --- conflicts --------------------------------------------------------------------------------------------------------


def test_a_conflict_at_any_statement_of_a_claim_costs_nothing(queue: Queue, observer: Engine) -> None:
    put_each(observer, queue, [{"payload": "[]"}, {}, {}])
    with statements_of(queue.consumer.engine) as seen:
        assert len(queue.claim(limit=5)) == 2
    kinds = list(conflicts(observer).values())
    for number in range(1, len(seen) + 1):
        clear(observer, queue)
        bad, *good = put_each(observer, queue, [{"payload": "[]", "due_in": -5}, {}, {}])
        with at_statement(queue.consumer.engine, Trap(raising(kinds[number % len(kinds)]), at=number)) as trap:
            assert [delivery.id for delivery in queue.claim(limit=5)] == good
        assert trap.sprung == 1 or number > trap.passed
        assert [row["attempts"] for row in jobs_in(observer, queue).values()] == [1, 1]
        assert {id: row["reason"] for id, row in failed_in(observer, queue).items()} == {bad: "damaged"}


@pytest.mark.parametrize("operation", SETTLING)
def test_a_conflict_at_any_statement_of_a_settlement_is_tried_again(queue: Queue, observer: Engine, operation: str) -> None:
    make = next(iter(conflicts(observer).values()))
    number, sprung = 1, 1
    while sprung:
        (id,) = put(observer, queue)
        put_key(observer, queue, id, f"unique:job/{id}")
        (delivery,) = queue.claim()
        with at_statement(queue.consumer.engine, Trap(raising(make), at=number)) as trap:
            SETTLING[operation](queue, delivery)
        sprung, number = trap.sprung, number + 1
        jobs, failed = jobs_in(observer, queue), failed_in(observer, queue)
        assert (id in jobs, id in failed) == (operation == "release", operation == "fail")
        assert (jobs | failed).get(id, {"attempts": 1})["attempts"] == 1
        assert (f"unique:job/{id}" in keys_in(observer, queue)) == (operation == "release")
    assert number > 3


def test_a_conflict_at_commit_is_a_conflict(queue: Queue, observer: Engine) -> None:
    for make in conflicts(observer).values():
        (id,) = put(observer, queue)
        with at_commit(queue.consumer.engine, Trap(raising_at_commit(make), times=3)) as trap:
            (delivery,) = queue.claim()
        assert (trap.sprung, delivery.attempt, jobs_in(observer, queue)[id]["attempts"]) == (3, 1, 1)
        for operation in (lambda: queue.renew(delivery, lease=600), lambda: queue.fail(delivery, "no")):  # noqa: B023
            with at_commit(queue.consumer.engine, Trap(raising_at_commit(make))) as trap:
                operation()
            assert trap.sprung == 1
        assert list(failed_in(observer, queue)) == [id]
        with at_commit(queue.consumer.engine, Trap(raising_at_commit(make), times=2)):
            assert queue.failed.retry(id=id) == 1
        queue.complete(queue.claim()[0])
    assert places(observer, queue) == (set(), set())


def test_five_tries_are_enough(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim()
    make = next(iter(conflicts(observer).values()))
    with at_statement(queue.consumer.engine, Trap(raising(make), times=99)) as trap, pytest.raises(DBAPIError):
        queue.complete(delivery)
    assert trap.sprung == 5
    with at_statement(queue.consumer.engine, Trap(raising(make), times=4)) as trap:
        queue.complete(delivery)
    assert trap.sprung == 4
    assert id not in jobs_in(observer, queue)


def test_an_error_that_is_no_conflict_is_not_tried_again(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    with observer.connect() as connection:
        connection.execute(sa.DDL("ALTER TABLE sqlqueue_jobs RENAME TO sqlqueue_elsewhere"))
    try:
        with statements_of(queue.consumer.engine) as seen, pytest.raises(DBAPIError):
            queue.claim()
        assert len(seen) == 1
    finally:
        with observer.connect() as connection:
            connection.execute(sa.DDL("ALTER TABLE sqlqueue_elsewhere RENAME TO sqlqueue_jobs"))


def test_a_busy_database_is_waited_for(queue: Queue, observer: Engine, engine: Engine) -> None:
    """For real: somebody writes, and is done in a moment."""
    (id,) = put(observer, queue)
    (delivery,) = queue.claim()
    if can_lock_rows(engine):
        # A lock that SKIP LOCKED cannot pass over: a new job's key, while a failed job with that key is retried.
        queue.fail(delivery, "no")
        with observer.connect() as connection:
            connection.execute(sa.update(queue.tables.failed).values(unique_key="unique:job/a"))
        busy = sa.insert(queue.tables.keys).values(key="unique:job/a")
        work: Callable[[], object] = lambda: queue.failed.retry(id=id)  # noqa: E731
    else:
        busy = sa.insert(queue.tables.keys).values(key="unique:job/b")
        work = lambda: queue.complete(delivery)  # noqa: E731
    with holding(engine, busy) as stranger:
        working = threading.Thread(target=work)
        working.start()
        working.join(0.1)
        assert working.is_alive()
        stranger.rollback()
        working.join(PATIENCE)
    assert (id in jobs_in(observer, queue)) == can_lock_rows(engine)


def test_a_real_deadlock_is_resolved_by_trying_again(queue: Queue, observer: Engine, engine: Engine) -> None:
    if not can_lock_rows(engine):
        pytest.skip("one transaction at a time writes here")
    ids = put(observer, queue, 2)
    jobs = queue.tables.jobs
    both_hold_one = threading.Barrier(2)
    tries = [0, 0]

    def cross(number: int) -> None:
        def operation(connection: sa.Connection) -> None:
            tries[number] += 1
            for place, id in enumerate(ids if number else reversed(ids)):
                connection.execute(sa.update(jobs).where(jobs.c.id == id).values(attempts=jobs.c.attempts + 1))
                if place == 0 and tries[number] == 1:
                    both_hold_one.wait(PATIENCE)

        queue.consumer.write(operation)

    in_threads(2, cross)
    assert 3 <= sum(tries) <= 6  # without the barrier they may meet once more
    assert {row["attempts"] for row in jobs_in(observer, queue).values()} == {2}


# --- a lost connection ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", SETTLING)
def test_a_settlement_that_was_applied_although_its_answer_was_lost_counts(queue: Queue, observer: Engine, operation: str) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim()
    with at_commit(queue.consumer.engine, Trap(apply_and_lose)) as trap:
        SETTLING[operation](queue, delivery)
    assert trap.sprung == 1
    jobs, failed = places(observer, queue)
    assert (jobs, failed) == {"complete": (set(), set()), "release": ({id}, set()), "fail": (set(), {id})}[operation]


@pytest.mark.parametrize("operation", SETTLING)
def test_a_settlement_that_was_not_applied_is_repeated(queue: Queue, observer: Engine, operation: str) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim()
    with at_commit(queue.consumer.engine, Trap(lose)) as trap:
        SETTLING[operation](queue, delivery)
    assert trap.sprung == 1
    assert (id in jobs_in(observer, queue)) == (operation == "release")


@pytest.mark.parametrize("operation", SETTLING)
def test_after_a_lost_connection_another_token_is_stale_all_the_same(queue: Queue, observer: Engine, operation: str) -> None:
    put(observer, queue)
    (old,) = queue.claim()
    expire(observer, queue)
    (new,) = queue.claim()
    before = jobs_in(observer, queue)
    with at_commit(queue.consumer.engine, Trap(lose)), pytest.raises(StaleDelivery):
        SETTLING[operation](queue, old)
    assert jobs_in(observer, queue) == before
    queue.release(new, error="mine")
    before = jobs_in(observer, queue)
    with at_commit(queue.consumer.engine, Trap(lose)), pytest.raises(StaleDelivery):
        SETTLING[operation](queue, old)
    assert jobs_in(observer, queue) == before


def test_a_job_that_another_claim_has_failed_was_not_completed_by_us(queue: Queue, observer: Engine) -> None:
    put(observer, queue, max_attempts=1)
    (delivery,) = queue.claim()
    expire(observer, queue)
    assert queue.claim() == []
    for operation in SETTLING.values():
        with at_commit(queue.consumer.engine, Trap(lose)), pytest.raises(StaleDelivery):
            operation(queue, delivery)


def test_who_repeats_a_whole_group_says_so(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 3)
    done, released, failed = queue.claim(limit=3)
    failure = Failure(Reason.EXCEPTION, None, "no")
    group = [
        Settlement(done.id, done.token, False, Complete()),
        Settlement(released.id, released.token, False, Release(60, None)),
        Settlement(failed.id, failed.token, False, Move(failure, "worker")),
    ]
    assert len(queue.consumer.settle(group).settled) == 3
    assert len(queue.consumer.settle(group).stale) == 3
    assert len(queue.consumer.settle(group, repeated=True).settled) == 3


def test_a_claim_whose_connection_is_lost_hands_out_nothing_and_comes_back_by_itself(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    queue.consumer.due_in(("default",))  # the next commit is the claim's
    with at_commit(queue.consumer.engine, Trap(apply_and_lose)) as trap, pytest.raises(DBAPIError):
        queue.claim()
    assert trap.sprung == 1
    assert jobs_in(observer, queue)[id]["attempts"] == 1
    expire(observer, queue)
    (delivery,) = queue.claim()
    assert delivery.reclaimed_from is not None


def test_reading_is_repeated(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    with at_statement(queue.consumer.engine, Trap(lose)) as trap:
        assert queue.pending() == 1
    assert trap.sprung == 1


# --- cut off between any two statements ---------------------------------------------------------------------------------


def moves(queue: Queue, observer: Engine) -> Iterator[tuple[int, Callable[[], object]]]:
    """A job, and what moves it from one table to the other: again and again, each on a new job."""
    while True:
        (id,) = put(observer, queue)
        put_key(observer, queue, id, f"unique:job/{id}")
        (delivery,) = queue.claim()
        yield id, lambda delivery=delivery: queue.fail(delivery, "no")  # type: ignore[misc]


def retries(queue: Queue, observer: Engine) -> Iterator[tuple[int, Callable[[], object]]]:
    for id, fail in moves(queue, observer):
        fail()
        yield id, lambda id=id: queue.failed.retry(id=id)  # type: ignore[misc]


def claims(queue: Queue, observer: Engine) -> Iterator[tuple[int, Callable[[], object]]]:
    while True:
        (id,) = put(observer, queue, attempts=5, last_error="before")
        put_key(observer, queue, id, f"unique:job/{id}")
        queue.consumer.due_in(("default",))
        yield id, queue.claim


@pytest.mark.parametrize("kind", [moves, retries, claims])
def test_a_job_is_in_exactly_one_table_wherever_a_move_is_cut_off(
    queue: Queue, observer: Engine, kind: Callable[[Queue, Engine], Iterator[tuple[int, Callable[[], object]]]]
) -> None:
    number, sprung = 1, True
    for id, move in kind(queue, observer):
        before = places(observer, queue)
        with at_statement(queue.consumer.engine, Trap(cut(observer), at=number)) as trap:
            try:
                move()
            except SQLAlchemyError:
                # What is not a settlement is not repeated: nothing has happened, and the key is where the job is.
                assert places(observer, queue) == before
        jobs, failed = places(observer, queue)
        assert (id in jobs) + (id in failed) == 1
        assert (f"unique:job/{id}" in keys_in(observer, queue)) == (id in jobs)
        sprung, number = bool(trap.sprung), number + 1
        clear(observer, queue)
        if not sprung:
            break
    assert number > 4


def test_one_failure_makes_one_failed_row(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim()
    make = next(iter(conflicts(observer).values()))
    with at_statement(queue.consumer.engine, Trap(raising(make)), "DELETE") as trap:
        queue.fail(delivery, "no")
    assert trap.sprung == 1
    assert places(observer, queue) == (set(), {id})
