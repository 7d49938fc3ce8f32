"""
P3 where transactions overlap: each race is provoked with transactions that are held open.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from datetime import UTC, datetime
from threading import Barrier

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlqueue import Job, Key, Pushed, Queue
from sqlqueue._dialects import server_of
from sqlqueue._driver.settle import Complete, Settlement
from tests.callers import A_MOMENT, EachLevel, complete_everything, each_level, push_until_it_commits, take_a_snapshot
from tests.producers import ORDERS, is_conflict, job_ids, key_names, make_orders, order_ids, wait_at_most

JobOfNumber = Job[[int], None]

servers_only = pytest.mark.databases("postgresql", "mysql", "mariadb")


@pytest.fixture
def send_invoice(engine: Engine, queue: Queue) -> JobOfNumber:
    make_orders(engine)

    @queue.job(name="invoices.send")
    def send_invoice(number: int) -> None: ...

    return send_invoice


@pytest.fixture
def at_each_level(engine: Engine, queue: Queue) -> EachLevel:
    return each_level(engine, queue)


def holder_of(engine: Engine, job: JobOfNumber, key: str | Key = "one") -> Pushed:
    with engine.begin() as connection:
        pushed = job.options(unique=key).push(connection, 1)
    assert pushed.created
    return pushed


# --- a duplicate that is held open ------------------------------------------------------------------------------------


def test_a_duplicate_writes_nothing_and_both_of_the_callers_rows_commit(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    for callers in at_each_level():
        held = holder_of(engine, send_invoice)
        caller = callers.new()
        caller.execute(ORDERS.insert().values(id=1))
        assert send_invoice.options(unique="one").push(caller, 2) == Pushed(held.id, created=False)
        caller.execute(ORDERS.insert().values(id=2))
        caller.commit()
        assert (order_ids(observer), job_ids(observer, queue)) == ([1, 2], [held.id])
        assert holder_of(engine, send_invoice, "two").id == held.id + 1


@servers_only
def test_a_duplicate_that_is_held_open_keeps_nobody_else_waiting(
    at_each_level: EachLevel, engine: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    """Not pushes of other keys, the neighbours in the order of keys included, nor without one; no claim, no renewal."""
    for callers in at_each_level():
        for key in ("b", "m", "x"):
            holder_of(engine, send_invoice, key)
        duplicate, other = callers.new(), callers.new()
        assert not send_invoice.options(unique="m").push(duplicate, 2).created
        send_invoice.push(other, 1)
        for key in ("a", "c", "lzz", "m0", "n", "z"):
            assert send_invoice.options(unique=key).push(other, 1).created
        assert not send_invoice.options(unique="b").push(other, 1).created
        assert not send_invoice.options(unique="m").push(other, 1).created
        assert queue.push_many(other, [send_invoice.bind(1)] * 10) == 10
        other.commit()
        deliveries = queue.claim(limit=3)
        assert [delivery.unique for delivery in deliveries] == [True] * 3
        for delivery in deliveries:
            assert queue.renew(delivery).lease_until >= delivery.lease_until
        duplicate.rollback()


@servers_only
def test_a_new_key_that_is_held_open_keeps_nobody_else_waiting(
    at_each_level: EachLevel, engine: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    for callers in at_each_level():
        for key in ("b", "x"):
            holder_of(engine, send_invoice, key)
        new, other = callers.new(), callers.new()
        assert send_invoice.options(unique="m").push(new, 2).created
        send_invoice.push(other, 1)
        for key in ("a", "c", "lzz", "m0", "n", "z"):
            assert send_invoice.options(unique=key).push(other, 1).created
        other.commit()
        assert len(queue.claim(limit=9)) == 9
        new.rollback()


@servers_only
def test_the_holders_settlement_goes_through_or_waits_for_the_callers_commit(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    for callers in at_each_level():
        held = holder_of(engine, send_invoice)
        stranger = holder_of(engine, send_invoice, "another")
        deliveries = queue.claim(limit=2)
        caller = callers.new()
        assert not send_invoice.options(unique="one").push(caller, 2).created
        group = [Settlement(delivery.id, delivery.token, delivery.unique, Complete()) for delivery in deliveries]
        results = queue.consumer.settle(group)
        waits = server_of(engine.dialect).snapshot_reads
        assert results.blocked == ({held.id} if waits else set())
        assert results.settled == ({stranger.id} if waits else {held.id, stranger.id})
        caller.commit()
        if waits:
            (delivery,) = (delivery for delivery in deliveries if delivery.id == held.id)
            queue.complete(queue.renew(delivery))
        assert (job_ids(observer, queue), key_names(observer, queue)) == ([], [])


# --- a snapshot that is older than the push ---------------------------------------------------------------------------


def test_a_holder_that_finished_after_the_callers_snapshot_does_not_swallow_the_new_job(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    for callers in at_each_level():
        held = holder_of(engine, send_invoice)
        caller = callers.new()
        take_a_snapshot(caller)
        complete_everything(queue)
        assert job_ids(observer, queue) == []
        pushed = send_invoice.options(unique="one").push(caller, 2)
        assert pushed.created
        assert pushed.id > held.id
        assert send_invoice.options(unique="one").push(caller, 2) == Pushed(pushed.id, created=False)
        caller.execute(ORDERS.insert().values(id=1))
        caller.commit()
        assert (job_ids(observer, queue), order_ids(observer)) == ([pushed.id], [1])
        assert len(key_names(observer, queue)) == 1


@servers_only
def test_a_holder_that_changed_after_the_callers_snapshot_is_the_new_one_or_the_databases_error(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    """The old holder, which the snapshot still shows, is never the answer."""
    for callers in at_each_level():
        holder_of(engine, send_invoice)
        caller = callers.new()
        take_a_snapshot(caller)
        complete_everything(queue)
        held = holder_of(engine, send_invoice)
        assert_held_or_conflict(caller, send_invoice, held)
        assert job_ids(observer, queue) == [held.id]


@servers_only
def test_a_holder_that_came_after_the_callers_snapshot_is_told_or_is_the_databases_error(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    for callers in at_each_level():
        caller = callers.new()
        take_a_snapshot(caller)
        held = holder_of(engine, send_invoice)
        assert_held_or_conflict(caller, send_invoice, held)
        assert job_ids(observer, queue) == [held.id]


def assert_held_or_conflict(caller: Connection, job: JobOfNumber, held: Pushed) -> None:
    above_read_committed = caller.get_isolation_level() != "READ COMMITTED"
    if above_read_committed and not server_of(caller.dialect).snapshot_reads:
        with pytest.raises(DBAPIError) as caught:
            job.options(unique="one").push(caller, 2)
        assert is_conflict(caught.value)
        caller.rollback()
    assert job.options(unique="one").push(caller, 2) == Pushed(held.id, created=False)
    caller.execute(ORDERS.insert().values(id=1))
    caller.commit()


@pytest.mark.databases("mariadb")
def test_mariadbs_strict_snapshots_make_it_the_databases_error(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with engine.connect() as caller:
        wait_at_most(caller, 1)
        caller.exec_driver_sql("SET innodb_snapshot_isolation = ON")
        caller.commit()
        take_a_snapshot(caller)
        held = holder_of(engine, send_invoice)
        with pytest.raises(DBAPIError) as caught:
            send_invoice.options(unique="one").push(caller, 2)
        assert is_conflict(caught.value)
        caller.rollback()
        assert send_invoice.options(unique="one").push(caller, 2) == Pushed(held.id, created=False)
        caller.rollback()
        caller.exec_driver_sql("SET innodb_snapshot_isolation = DEFAULT")
        caller.commit()


# --- two producers of one key -----------------------------------------------------------------------------------------


def push_that_waits(pool: ThreadPoolExecutor, job: JobOfNumber, caller: Connection) -> Future[Pushed]:
    """A push that waits for somebody's commit."""
    future = pool.submit(job.options(unique="one").push, caller, 2)
    with pytest.raises(NotYet):
        future.result(A_MOMENT)
    return future


def test_the_second_producer_of_a_key_writes_the_job_when_the_first_rolls_back(
    at_each_level: EachLevel, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    for callers in at_each_level():
        first, second = callers.new(), callers.new(patience=10)
        assert send_invoice.options(unique="one").push(first, 1).created
        with ThreadPoolExecutor(1) as pool:
            pushing = push_that_waits(pool, send_invoice, second)
            first.rollback()
            pushed = pushing.result(10)
        assert pushed.created
        second.commit()
        assert job_ids(observer, queue) == [pushed.id]


def test_the_second_producer_of_a_key_is_told_the_first_ones_job_when_that_commits(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    """Above READ COMMITTED on PostgreSQL the first one's job came after the second one's snapshot."""
    for callers in at_each_level():
        first, second = callers.new(), callers.new(patience=10)
        held = send_invoice.options(unique="one").push(first, 1)
        level = second.get_isolation_level()
        second.rollback()
        with ThreadPoolExecutor(1) as pool:
            pushing = push_that_waits(pool, send_invoice, second)
            first.commit()
            if level in ("REPEATABLE READ", "SERIALIZABLE") and server_of(engine.dialect).claim_in_one_statement:
                with pytest.raises(DBAPIError) as caught:
                    pushing.result(10)
                assert is_conflict(caught.value)
                second.rollback()
            else:
                assert pushing.result(10) == Pushed(held.id, created=False)
                second.execute(ORDERS.insert().values(id=1))
                second.commit()
                assert order_ids(observer) == [1]
        assert job_ids(observer, queue) == [held.id]


@pytest.mark.databases("mariadb")
def test_strict_snapshots_do_no_harm_to_a_caller_whose_first_statement_is_the_push(
    at_each_level: EachLevel, queue: Queue, send_invoice: JobOfNumber
) -> None:
    for callers in at_each_level("REPEATABLE READ"):
        first, second = callers.new(), callers.new(patience=10)
        second.exec_driver_sql("SET innodb_snapshot_isolation = ON")
        second.commit()
        held = send_invoice.options(unique="one").push(first, 1)
        with ThreadPoolExecutor(1) as pool:
            pushing = push_that_waits(pool, send_invoice, second)
            first.commit()
            assert pushing.result(10) == Pushed(held.id, created=False)
        second.commit()
        second.exec_driver_sql("SET innodb_snapshot_isolation = DEFAULT")
        second.commit()


@pytest.mark.parametrize("found", ["nothing", "an orphan", "a key that was kept", "a holder"])
def test_producers_of_one_key_at_the_same_moment_make_one_job(
    found: str, at_each_level: EachLevel, engine: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    producers = 4
    for callers in at_each_level():
        if found != "nothing":
            holder_of(engine, send_invoice)
        with engine.begin() as connection:
            if found in ("an orphan", "a key that was kept"):
                connection.execute(queue.tables.jobs.delete())
            if found == "a key that was kept":
                connection.execute(queue.tables.keys.update().values(expires_at=datetime(2000, 1, 1, tzinfo=UTC)))
        start = Barrier(producers)
        connections = [callers.new(patience=10) for _ in range(producers)]
        with ThreadPoolExecutor(producers) as pool:
            tries = pool.map(push_until_it_commits, [send_invoice] * producers, connections, [start] * producers)
            pushed = [push for push, _ in tries]
        assert sum(push.created for push in pushed) == (0 if found == "a holder" else 1)
        assert job_ids(engine, queue) == [pushed[0].id]
        assert {push.id for push in pushed} == {pushed[0].id}


def test_a_push_right_beside_the_end_of_its_holder_loses_no_job(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    """Either the holder is told while it is there, or a new job is written: never a holder that nobody will run."""
    for callers in at_each_level("READ COMMITTED", "REPEATABLE READ"):
        caller = callers.new(patience=10)
        for _ in range(5):
            held = holder_of(engine, send_invoice)
            (delivery,) = queue.claim()
            start = Barrier(2)
            with ThreadPoolExecutor(1) as pool:
                pushing = pool.submit(push_until_it_commits, send_invoice, caller, start)
                start.wait(10)
                queue.complete(delivery)
                pushed, _ = pushing.result(10)
            assert job_ids(observer, queue) == ([pushed.id] if pushed.created else [])
            assert pushed.created or pushed.id == held.id
            complete_everything(queue)


def test_many_keys_pushed_in_any_order_by_push_many_lock_nobody_out(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    names = [f"key {number}" for number in range(20)]

    def push_all(caller: Connection, order: list[str]) -> int:
        start.wait(10)
        written = queue.push_many(caller, [send_invoice.options(unique=name).bind(1) for name in order])
        caller.commit()
        return written

    for callers in at_each_level("READ COMMITTED"):
        start = Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            counts = pool.map(push_all, (callers.new(patience=10), callers.new(patience=10)), (names, names[::-1]))
            assert sum(counts) == len(names)
        assert len(job_ids(observer, queue)) == len(names)
