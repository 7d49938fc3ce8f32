"""
What the look for ready jobs remembers between two claims, and that nothing is overlooked for long because of it.

Time passes here when the test says so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, create_engine

from sqlqueue import Queue
from sqlqueue._driver.claim import Company
from sqlqueue._driver.settle import Return, Settlement
from sqlqueue._job import Delivery
from sqlqueue._queue import looks
from tests.rows import (
    Trap,
    at_commit,
    can_lock_rows,
    change,
    failed_in,
    holding,
    jobs_in,
    listening,
    lock_of,
    lose,
    moment_of,
    put,
    put_each,
    statements_of,
)
from tests.servers import Database
from tests.workers import eventually

QUEUES = ("default",)


class Clock:
    """The monotonic clock by which looks grow old."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(looks, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(looks, "SHARE", 0)  # however slow this machine is

    def pass_a_second(self) -> None:
        self.now += 1.01


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, queue: Queue) -> Clock:
    clock = Clock(monkeypatch)
    look = queue.consumer._look

    def look_by_the_clock(*arguments: Any) -> looks.Look:
        found = look(*arguments)
        found.began = clock.now
        return found

    monkeypatch.setattr(queue.consumer, "_look", look_by_the_clock)
    return clock


def deliveries(queue: Queue, limit: int, **options: Any) -> list[Delivery]:
    return queue.consumer.claim(QUEUES, limit, 60.0, "worker", **options)


def claim(queue: Queue, limit: int, **options: Any) -> list[int]:
    return [delivery.id for delivery in deliveries(queue, limit, **options)]


def backlog(queue: Queue, observer: Engine, count: int = 20) -> list[int]:
    """Jobs due one after another."""
    return put_each(observer, queue, [{"due_in": -30 + number} for number in range(count)])


def test_who_claims_from_another_queue_each_time_does_not_fill_the_memory(queue: Queue) -> None:
    for number in range(300):
        assert queue.claim(f"tenant-{number}") == []
    assert len(queue.consumer._looks) <= 256


def test_full_claims_look_for_lanes_once_a_second(queue: Queue, observer: Engine, clock: Clock) -> None:
    ids = backlog(queue, observer)
    for expected in (ids[:5], ids[5:10]):
        assert claim(queue, 5) == expected
    with statements_of(queue.consumer.engine) as without:
        assert claim(queue, 5) == ids[10:15]
    clock.pass_a_second()
    with statements_of(queue.consumer.engine) as with_a_look:
        assert claim(queue, 5) == ids[15:]
    assert len(without) < len(with_a_look)


# --- rows that become visible behind the beginning


def pushed_late(queue: Queue, observer: Engine, first: Delivery) -> int:
    """A transaction that began to push before the others, and committed after them."""
    return put(observer, queue, due_in=-100)[0]


def released(queue: Queue, observer: Engine, first: Delivery) -> int:
    queue.release(first)
    change(observer, queue, [first.id], available_at=moment_of(observer))
    return first.id


def handed_back(queue: Queue, observer: Engine, first: Delivery) -> int:
    assert queue.consumer.settle([Settlement(first.id, first.token, False, Return())]).settled == {first.id}
    return first.id


def died(queue: Queue, observer: Engine, first: Delivery) -> int:
    return put(observer, queue, due_in=-100, lease_in=-90)[0]


@pytest.mark.parametrize("appear", [pushed_late, handed_back, died])
def test_a_row_before_the_beginning_is_found_by_the_next_look(
    queue: Queue, observer: Engine, clock: Clock, appear: Callable[[Queue, Engine, Delivery], int]
) -> None:
    backlog(queue, observer)
    put(observer, queue, 50, due_in=30)
    (first, *_) = deliveries(queue, 5)
    claim(queue, 5)
    id = appear(queue, observer, first)
    clock.pass_a_second()
    assert claim(queue, 1) == [id]


@pytest.mark.parametrize("appear", [pushed_late, released, handed_back, died])
def test_a_claim_that_is_not_filled_finds_it_at_once(
    queue: Queue, observer: Engine, clock: Clock, appear: Callable[[Queue, Engine, Delivery], int]
) -> None:
    ids = backlog(queue, observer)
    (first, *_) = deliveries(queue, 10)
    id = appear(queue, observer, first)
    assert set(claim(queue, 20)) == {id, *ids[10:]}


@pytest.mark.parametrize("appear", [pushed_late, released, handed_back, died])
def test_nothing_is_empty_while_there_is_one(
    queue: Queue, observer: Engine, clock: Clock, appear: Callable[[Queue, Engine, Delivery], int]
) -> None:
    backlog(queue, observer, 10)
    (first, *_) = deliveries(queue, 10)
    id = appear(queue, observer, first)
    due_in = queue.consumer.due_in(QUEUES)
    assert due_in is not None
    assert due_in <= 0
    assert claim(queue, 1) == [id]


def test_a_row_that_was_locked_is_found_by_the_next_look(queue: Queue, observer: Engine, engine: Engine, clock: Clock) -> None:
    if not can_lock_rows(engine):
        pytest.skip("no row can be locked here")
    ids = backlog(queue, observer)
    with holding(engine, lock_of(queue.tables.jobs, queue.tables.jobs.c.id == ids[1])):
        assert claim(queue, 3) == [ids[0], *ids[2:4]]
        due_in = queue.consumer.due_in(QUEUES)
        assert due_in is not None
        assert due_in <= 0, "a lock hides nothing"
    clock.pass_a_second()
    assert claim(queue, 1) == [ids[1]]


def test_what_a_claim_has_rolled_back_is_not_passed(queue: Queue, observer: Engine, clock: Clock) -> None:
    ids = backlog(queue, observer)
    claim(queue, 1)

    def fail(connection: Connection) -> None:
        raise sa.exc.ProgrammingError("COMMIT", {}, Exception("made up"))

    with at_commit(queue.consumer.engine, Trap(fail)), pytest.raises(sa.exc.ProgrammingError):
        claim(queue, 5)
    with at_commit(queue.consumer.engine, Trap(lose)), pytest.raises(sa.exc.DBAPIError):
        claim(queue, 5)
    assert claim(queue, 5) == ids[1:6]


def test_a_look_of_before_a_long_freeze_is_not_relied_on(queue: Queue, observer: Engine, clock: Clock) -> None:
    backlog(queue, observer)
    claim(queue, 5)
    clock.now += 3600
    urgent = put(observer, queue, priority=9)
    assert claim(queue, 1) == urgent


def test_a_clock_of_the_server_that_steps_back_hides_nothing_for_long(queue: Queue, observer: Engine, clock: Clock) -> None:
    """What was due an hour later is claimed; then rows are pushed an hour earlier."""
    backlog(queue, observer)
    claim(queue, 10)
    earlier = put_each(observer, queue, [{"due_in": -3600 + number} for number in range(5)])
    clock.pass_a_second()
    assert claim(queue, 5) == earlier


def test_a_lane_that_becomes_due_while_it_is_remembered_is_claimed_from(queue: Queue, observer: Engine, clock: Clock) -> None:
    ids = backlog(queue, observer)
    soon = put(observer, queue, due_in=0.8, priority=5)
    due = jobs_in(observer, queue)[soon[0]]["available_at"]
    assert claim(queue, 1) == ids[:1]
    eventually(lambda: moment_of(observer) > due)
    clock.now += 0.9
    assert claim(queue, 1) == soon


# --- kinds of claims


def test_claims_ahead_do_not_pass_for_others_what_may_not_wait(queue: Queue, observer: Engine, clock: Clock) -> None:
    single = put(observer, queue, 2, due_in=-90, max_attempts=1)
    ended = put(observer, queue, due_in=-80, lease_in=-70)
    ids = backlog(queue, observer)
    assert claim(queue, 0, ahead=5) == ids[:5]
    assert claim(queue, 0, ahead=5) == ids[5:10]
    assert claim(queue, 2) == single
    assert claim(queue, 2) == [*ended, ids[10]]
    assert claim(queue, 0, ahead=2) == ids[11:13]


def test_what_company_kept_out_is_not_passed(queue: Queue, observer: Engine, clock: Clock) -> None:
    ended = put(observer, queue, 2, lease_in=-70, max_attempts=2)
    ids = backlog(queue, observer)
    assert claim(queue, 3, company=Company.ON_LAST_ATTEMPT) == ids[:3]
    assert claim(queue, 3, company=Company.RECLAIMED) == ids[3:6]
    assert claim(queue, 1) == ended[:1]
    assert claim(queue, 1, company=Company.ON_LAST_ATTEMPT) == [ids[6]]
    assert claim(queue, 1) == ended[1:]


def test_what_must_not_run_is_moved_by_whichever_claim_comes_by(queue: Queue, observer: Engine, clock: Clock) -> None:
    ids = backlog(queue, observer)
    claim(queue, 5)
    late = put(observer, queue, 30, due_in=-100, payload="[]")
    clock.pass_a_second()
    assert claim(queue, 0, ahead=5) == ids[5:10]
    assert sorted(failed_in(observer, queue)) == late


def test_threads_that_share_a_look_take_every_row_once(queue: Queue, observer: Engine, clock: Clock) -> None:
    """One has taken its rows and not committed yet, while another goes on behind them and is done before."""
    if not can_lock_rows(observer):
        pytest.skip("one transaction at a time writes here")
    ids = backlog(queue, observer)
    claim(queue, 1)
    taken: list[list[int]] = []
    with at_commit(queue.consumer.engine, Trap(lambda connection: taken.append(claim(queue, 5)))):
        taken.append(claim(queue, 5))
    assert taken == [ids[6:11], ids[1:6]]
    assert claim(queue, 5) == ids[11:16]


# --- what it is for


@pytest.mark.databases("postgresql")
def test_a_claim_behind_many_dead_rows_reads_few(queue: Queue, observer: Engine, database: Database, clock: Clock) -> None:
    """As long as anybody may still see them, they stay in the way: here an open transaction with an old snapshot."""
    # In another order than they lie in the table: otherwise a page is counted once for all of its rows.
    put_each(observer, queue, [{"due_in": -5000 + number * 7919 % 2500} for number in range(2500)])
    elsewhere = create_engine(database.url, isolation_level="REPEATABLE READ")
    with elsewhere.connect() as old:
        old.execute(sa.select(sa.func.count()).select_from(queue.tables.jobs)).all()
        deliveries(queue, 10)
        pages: list[int] = []
        for _ in range(4):
            for delivery in deliveries(queue, 500):
                queue.complete(delivery)
            with observer.connect() as connection:  # so that no plan rests on what other tests have left in the statistics
                connection.exec_driver_sql("ANALYZE sqlqueue_jobs")
            pages.append(pages_read(queue, lambda: claim(queue, 1)))
    assert len(jobs_in(observer, queue)) > 400
    assert max(pages) < 250, "without a beginning, a page or so for each of the rows that are gone"


def pages_read(queue: Queue, operation: Callable[[], object]) -> int:
    """Of the statements that write. Explained for real, and undone."""
    found: list[int] = []
    names = itertools.count()

    def explain(connection: Connection, cursor: object, statement: str, parameters: Any, *rest: object) -> None:
        if "UPDATE" not in statement:
            return
        driver: Any = connection.connection.dbapi_connection
        point = f"measured_{next(names)}"
        driver.execute(f"SAVEPOINT {point}")
        (plans,) = driver.execute("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, parameters).fetchone()
        driver.execute(f"ROLLBACK TO SAVEPOINT {point}")
        plan = (json.loads(plans) if isinstance(plans, str) else plans)[0]["Plan"]
        found.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    with listening(queue.consumer.engine, "before_cursor_execute", explain):
        operation()
    assert found
    return max(found)
