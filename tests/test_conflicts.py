"""
Conflicts and lost connections: what is repeated, what is not, and that a job is in exactly one table whatever is cut off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sqlqueue import Queue
from sqlqueue._dialects import Trouble, engines, trouble_of
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
    before_each,
    can_lock_rows,
    conflicts,
    cut,
    driver_of,
    expire,
    failed_in,
    holding,
    in_threads,
    jobs_in,
    keys_in,
    listening,
    lock_of,
    lose,
    put,
    put_each,
    put_key,
    raising,
    raising_at_commit,
    statements_of,
)
from tests.workers import eventually

SETTLING: dict[str, Callable[[Queue, Delivery], None]] = {
    "complete": lambda queue, delivery: queue.complete(delivery),
    "release": lambda queue, delivery: queue.release(delivery, delay=60, error="no"),
    "fail": lambda queue, delivery: queue.fail(delivery, "no"),
}

OPERATIONS = ("claim", *SETTLING, "renew", "retry", "clear")


def prepared(operation: str, queue: Queue, observer: Engine, *, lease: float = 600, **values: Any) -> tuple[int, Callable[[], object]]:
    """A job on a queue that is called like the operation, and what does the operation to it."""
    (id,) = put(observer, queue, queue=operation, **values)
    if operation == "claim":
        return id, lambda: queue.claim(operation, lease=lease)
    if operation == "clear":
        return id, lambda: queue.clear(operation)
    (delivery,) = queue.claim(operation)
    if operation == "renew":
        return id, lambda: queue.renew(delivery, lease=lease)
    if operation == "retry":
        queue.fail(delivery, "no")
        return id, lambda: queue.failed.retry(id=id)
    return id, lambda: SETTLING[operation](queue, delivery)


def check_done(operation: str, queue: Queue, observer: Engine, id: int) -> None:
    """The operation has been applied, once."""
    jobs, failed = jobs_in(observer, queue), failed_in(observer, queue)
    assert (id in jobs) == (operation in ("claim", "release", "renew", "retry")), operation
    assert (id in failed) == (operation == "fail"), operation
    if found := jobs.get(id) or failed.get(id):
        assert found["attempts"] == (operation != "retry"), operation


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


@pytest.mark.parametrize("operation", ["renew", "retry", "clear"])
def test_a_conflict_at_any_statement_of_what_is_no_settlement_is_tried_again(queue: Queue, observer: Engine, operation: str) -> None:
    kinds = list(conflicts(observer).values())
    number, sprung = 1, 1
    while sprung:
        id, act = prepared(operation, queue, observer)
        with at_statement(queue.consumer.engine, Trap(raising(kinds[number % len(kinds)]), at=number)) as trap:
            act()
        sprung, number = trap.sprung, number + 1
        check_done(operation, queue, observer, id)
        clear(observer, queue)
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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_five_tries_are_enough(queue: Queue, observer: Engine, operation: str) -> None:
    id, act = prepared(operation, queue, observer)
    make = next(iter(conflicts(observer).values()))
    before = jobs_in(observer, queue), failed_in(observer, queue)
    with at_commit(queue.consumer.engine, Trap(raising_at_commit(make), times=99)) as trap, pytest.raises(DBAPIError):
        act()
    assert trap.sprung == 5
    assert (jobs_in(observer, queue), failed_in(observer, queue)) == before
    # A claim looks for its lanes first, and has five tries for that as well.
    with at_commit(queue.consumer.engine, Trap(raising_at_commit(make), times=4)) as trap:
        act()
    assert trap.sprung == 4
    check_done(operation, queue, observer, id)


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


@contextmanager
def nobody_writes(engine: Engine, table: sa.Table) -> Iterator[None]:
    """A stranger keeps everybody from changing the table, or, where that is all one can lock, the database."""
    begin, end = {
        "sqlite": ("BEGIN IMMEDIATE", "ROLLBACK"),
        "postgresql": (f"LOCK TABLE {table.name} IN SHARE MODE", "ROLLBACK"),
        "mysql": (f"LOCK TABLES {table.name} READ", "UNLOCK TABLES"),
    }[engine.dialect.name]
    with engine.connect() as connection:
        connection.exec_driver_sql(begin)
        try:
            yield
        finally:
            connection.exec_driver_sql(end)


@contextmanager
def troubles_of(engine: Engine) -> Iterator[list[tuple[str, Trouble]]]:
    """Which thread met what."""
    seen: list[tuple[str, Trouble]] = []

    def failed(context: sa.engine.ExceptionContext) -> None:
        assert isinstance(context.sqlalchemy_exception, DBAPIError)
        seen.append((threading.current_thread().name, trouble_of(context.sqlalchemy_exception)))

    with listening(engine, "handle_error", failed):
        yield seen


def test_a_lock_that_is_held_longer_than_anybody_waits_is_a_conflict_for_every_operation(
    queue: Queue, observer: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real, and all at once: where a wait cannot be shorter than a second, that second is spent only once."""
    monkeypatch.setattr(engines, "_DEFAULT_LOCK_WAIT", 0.2)
    calls = {operation: prepared(operation, queue, observer, lease=1.2) for operation in OPERATIONS}
    results: dict[str, object] = {}
    threads = [
        threading.Thread(target=lambda name=name, act=act: results.update({name: act()}), name=name) for name, (_, act) in calls.items()
    ]
    with troubles_of(queue.consumer.engine) as seen:
        with nobody_writes(engine, queue.tables.jobs):
            for thread in threads:
                thread.start()
            eventually(lambda: {name for name, _ in seen} == set(OPERATIONS), f"conflicts: {seen}")
        for thread in threads:
            thread.join(PATIENCE)
    assert {trouble for _, trouble in seen} == {Trouble.CONFLICT}
    assert set(results) == set(OPERATIONS)
    for operation, (id, _) in calls.items():
        check_done(operation, queue, observer, id)


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


# Where each operation has its row, and still has to wait for a stranger: at which statement, of which table.
WAITING = {
    "claim": ("INSERT INTO sqlqueue_failed_jobs", "failed"),
    "complete": ("DELETE", "jobs"),
    "release": ("UPDATE sqlqueue_jobs", "jobs"),
    "fail": ("DELETE", "jobs"),
    "renew": ("UPDATE sqlqueue_jobs", "jobs"),
    "retry": ("INSERT INTO sqlqueue_jobs", "jobs"),
    "clear": ("DELETE", "jobs"),
}


def obstacle(queue: Queue, engine: Engine, operation: str) -> sa.Executable:
    """What does not keep a row from being locked, but from being changed, or a new one from being written."""
    table: sa.Table = getattr(queue.tables, WAITING[operation][1])
    if engine.dialect.name == "postgresql":
        return sa.text(f"LOCK TABLE {table.name} IN SHARE MODE")
    if operation in ("claim", "retry"):
        return sa.select(table.c.id).with_for_update()  # the gap at the end is locked as well
    # A shared lock on an index that holds all that is asked for leaves the row itself alone.
    entries = sa.select(table.c.id).where(table.c.queue == operation).with_for_update(read=True)
    return entries.with_hint(table, f"FORCE INDEX ({queue.tables.ready_index})")


def look_for_deadlocks_soon(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL deadlock_timeout = '20ms'")


def let_the_other_wait_first(observer: Engine) -> None:
    """PostgreSQL's victim is who finds the deadlock: it looks once, after it has waited for some time."""
    if observer.dialect.name == "postgresql":
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        with observer.connect() as connection:
            eventually(lambda: connection.scalar(sa.text(waiting)))


def can_be_a_victim(observer: Engine) -> bool:
    """How soon it looks is for an administrator to say."""
    with observer.connect() as connection:
        return observer.dialect.name != "postgresql" or connection.scalar(sa.text("SHOW is_superuser")) == "on"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_victim_of_a_real_deadlock_tries_again(queue: Queue, observer: Engine, engine: Engine, operation: str) -> None:
    with engine.connect():
        pass  # so that the server is known
    if not can_lock_rows(engine):
        pytest.skip("one transaction at a time writes here")
    if not can_be_a_victim(observer):
        pytest.skip("not an administrator's account")
    # What a claim locks first and does not only pass over is what it moves away. A job without a key may be locked and
    # deleted in one statement, in which there is nothing to wait for with a lock in hand.
    special: dict[str, dict[str, Any]] = {"claim": {"attempts": 5, "max_attempts": 5}, "complete": {"unique_key": "own"}}
    values = special.get(operation, {})
    id, act = prepared(operation, queue, observer, **values)
    ours = queue.tables.failed if operation == "retry" else queue.tables.jobs
    about_to_wait = threading.Event()
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(act()))

    def waiting(connection: sa.Connection) -> None:
        if not about_to_wait.is_set():
            about_to_wait.set()
            let_the_other_wait_first(observer)

    with (
        listening(queue.consumer.engine, "begin", look_for_deadlocks_soon),
        before_each(queue.consumer.engine, WAITING[operation][0], waiting),
        troubles_of(queue.consumer.engine) as seen,
        # Who has written more is not the one whose work is undone.
        holding(engine, obstacle(queue, engine, operation), *(sa.insert(queue.tables.keys).values(key=f"k{n}") for n in range(30))) as one,
    ):
        thread.start()
        assert about_to_wait.wait(PATIENCE)
        one.execute(lock_of(ours, ours.c.id == id)).all()
        one.rollback()
        thread.join(PATIENCE)
    assert results
    assert [trouble for _, trouble in seen] == [Trouble.CONFLICT]
    if operation == "claim":
        queue.claim(operation)
        assert (failed_in(observer, queue)[id]["attempts"], jobs_in(observer, queue)) == (5, {})
        return
    if operation in ("retry", "clear"):
        act()  # a locked row is somebody else's business for the moment
    check_done(operation, queue, observer, id)


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


@pytest.mark.databases("postgresql")
def test_a_session_that_has_forgotten_what_was_prepared_is_no_trouble(queue: Queue, observer: Engine) -> None:
    """As behind a pooler that gives a transaction to another session."""
    put(observer, queue)
    for _ in range(8):  # the driver prepares a statement when it has seen it some times
        assert queue.pending() == 1

    def forget(connection: sa.Connection) -> None:
        driver_of(connection).pgconn.exec_(b"DEALLOCATE ALL")

    with (
        listening(queue.consumer.engine, "engine_connect", Trap(forget)),
        troubles_of(queue.consumer.engine) as seen,
    ):
        assert queue.pending() == 1
    assert [trouble for _, trouble in seen] == [Trouble.CONFLICT]


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
        queue.consumer._unanswered.clear()  # looking after those would make each claim longer than the one before
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
