"""
How a key is held, without races: until the job starts, for a time, and by a job that later pushes replace.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sqlqueue import Delivery, Job, Key, Pushed, Queue
from sqlqueue._dialects import after, server_of
from tests.producers import job_ids, key_names, make_orders, only_job, statements
from tests.rows import expire, failed_in, jobs_in, make_due, statements_of
from tests.workers import Gate, eventually, working

JobOfNumber = Job[[int], None]
INSTANT = datetime(2031, 1, 1, tzinfo=UTC)


@pytest.fixture
def job(engine: Engine, queue: Queue) -> JobOfNumber:
    make_orders(engine)

    @queue.job(name="index.build", max_attempts=3, unique="one")
    def build_index(number: int) -> None: ...

    return build_index


def push(engine: Engine, job: JobOfNumber, number: int = 1, **options: Any) -> Pushed:
    with Session(engine) as session, session.begin():
        return job.options(**options).push(session, number)


def let_time_pass(observer: Engine, queue: Queue) -> None:
    """The time that keys are kept for is over."""
    keys = queue.tables.keys
    with observer.connect() as connection:
        connection.execute(keys.update().where(keys.c.expires_at.is_not(None)).values(expires_at=after(-1)))


def completed(queue: Queue, delivery: Delivery) -> None:
    queue.complete(delivery)


def failed(queue: Queue, delivery: Delivery) -> None:
    queue.fail(delivery, ValueError("no"))


def failed_and_forgotten(queue: Queue, delivery: Delivery) -> None:
    queue.fail(delivery, ValueError("no"))
    queue.failed.forget(id=delivery.id)


def released_and_cleared(queue: Queue, delivery: Delivery) -> None:
    queue.release(delivery)
    assert queue.clear("default") == 1


def deleted_by_hand(queue: Queue, delivery: Delivery) -> None:
    with queue.begin() as session:
        session.execute(queue.tables.jobs.delete())


ENDS = [completed, failed, failed_and_forgotten, released_and_cleared, deleted_by_hand]
every_end = pytest.mark.parametrize("ended", ENDS)
End = Callable[[Queue, Delivery], None]


# --- until it has started ---------------------------------------------------------------------------------------------


def test_a_job_that_has_started_holds_its_key_no_more(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    first = push(engine, job, unique_until="started")
    assert push(engine, job, unique_until="started") == Pushed(first.id, created=False)
    (delivery,) = queue.claim()
    assert not delivery.unique
    assert key_names(observer, queue) == []
    second = push(engine, job, unique_until="started")
    assert second.created
    assert push(engine, job, unique_until="started") == Pushed(second.id, created=False)
    queue.complete(delivery)
    assert push(engine, job, unique_until="started") == Pushed(second.id, created=False)
    queue.complete(queue.claim()[0])
    assert (job_ids(observer, queue), key_names(observer, queue)) == ([], [])


def test_until_finished_is_what_is_meant_without_it(engine: Engine, queue: Queue, job: JobOfNumber) -> None:
    first = push(engine, job, unique_until="finished")
    assert queue.claim()[0].unique
    assert push(engine, job, unique_until="started") == Pushed(first.id, created=False)


@pytest.mark.parametrize("error", [None, "it broke"])
def test_a_job_that_comes_back_has_left_its_key_behind(
    error: str | None, engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber
) -> None:
    first = push(engine, job, unique_until="started")
    queue.release(queue.claim()[0], error=error)
    second = push(engine, job, unique_until="started")
    assert second.created
    deliveries = queue.claim(limit=2)
    assert sorted(delivery.id for delivery in deliveries) == [first.id, second.id]
    third = push(engine, job, unique_until="started")
    for delivery in deliveries:
        queue.complete(delivery)
    assert push(engine, job) == Pushed(third.id, created=False)


def test_a_job_that_is_reclaimed_or_failed_takes_no_key(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    first = push(engine, job, unique_until="started")
    queue.claim()
    second = push(engine, job)
    expire(observer, queue)
    deliveries = {delivery.id: delivery for delivery in queue.claim(limit=2)}
    assert [deliveries[pushed.id].unique for pushed in (first, second)] == [False, True]
    queue.fail(deliveries[first.id], "no")
    assert queue.failed.retry(all=True) == 1
    assert push(engine, job) == Pushed(second.id, created=False)
    assert {id: row["unique_key"] for id, row in jobs_in(observer, queue).items()} == {first.id: None, second.id: "unique:index.build/one"}


def test_many_keys_are_let_go_in_one_claim(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    with engine.begin() as connection:
        for number in range(30):
            until: Any = ("started", "finished")[number % 2]
            assert job.options(unique=f"key {number}", unique_until=until).push(connection, number).created
        assert job.options(unique=False).push(connection, 0).created
    with statements_of(queue.consumer.engine) as seen:
        deliveries = queue.claim(limit=40)
    assert len(deliveries) == 31
    assert sum(delivery.unique for delivery in deliveries) == len(key_names(observer, queue)) == 15
    touching = [statement for statement, _ in seen if queue.tables.keys.name in statement]
    assert len(touching) == 3, "look which, lock those, delete those"


def test_a_claim_of_jobs_without_keys_asks_for_none(engine: Engine, queue: Queue, job: JobOfNumber) -> None:
    with engine.begin() as connection:
        for number in range(3):
            job.options(unique=False).push(connection, number)
    with statements_of(queue.consumer.engine) as seen:
        assert len(queue.claim(limit=3)) == 3
    assert not [statement for statement, _ in seen if queue.tables.keys.name in statement]


@pytest.mark.databases("postgresql")
def test_a_claim_without_a_transaction_leaves_jobs_with_keys_to_one_that_frees_them(
    engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber
) -> None:
    keyed, plain = push(engine, job, unique_until="started"), push(engine, job, unique=False)
    with observer.connect() as connection:
        announced = queue.consumer.claim_announced(connection, ("default", 0, ""), 10, 60.0, "w")
    assert [delivery.id for delivery in announced] == [plain.id]
    assert [delivery.id for delivery in queue.claim()] == [keyed.id]
    assert key_names(observer, queue) == []


def test_a_change_that_is_pushed_while_the_old_run_reads_makes_another_run(engine: Engine, queue: Queue) -> None:
    gate = Gate()
    runs: list[int] = []

    @queue.job(name="slow", unique="one", unique_until="started")
    def slow(number: int) -> None:
        runs.append(number)
        gate.pass_through()

    with working(queue):
        first = push(engine, slow, 1)
        gate.await_arrivals()
        second = push(engine, slow, 2)
        assert second.created
        assert second.id != first.id
        gate.await_arrivals()
        gate.open()
        eventually(lambda: queue.size("default") == 0 and not queue.stats())
    assert runs == [1, 2]


# --- for a time -------------------------------------------------------------------------------------------------------


@every_end
def test_a_key_is_taken_for_its_time_whatever_becomes_of_the_job(
    ended: End, engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber
) -> None:
    first = push(engine, job, unique_for=timedelta(hours=1))
    assert push(engine, job) == Pushed(first.id, created=False)
    (delivery,) = queue.claim()
    assert push(engine, job) == Pushed(first.id, created=False)
    ended(queue, delivery)
    assert push(engine, job) == Pushed(first.id, created=False)
    let_time_pass(observer, queue)
    second = push(engine, job, unique_for=60)
    assert second.created
    assert push(engine, job, unique_for=60) == Pushed(second.id, created=False)
    assert job_ids(observer, queue) == [second.id]


def test_the_time_counts_from_the_push_by_the_databases_clock(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    for ways in (("created at once", 90), ("taken over", 30)):
        pushed = push(engine, job, unique_for=ways[1])
        assert pushed.created, ways
        keys, jobs = queue.tables.keys.c, queue.tables.jobs.c
        with observer.connect() as connection:
            row = connection.execute(sa.select(keys.expires_at, jobs.created_at).where(keys.job_id == jobs.id)).one()
        assert timedelta(0) <= row.expires_at - row.created_at - timedelta(seconds=ways[1]) < timedelta(seconds=1)
        deleted_by_hand(queue, queue.claim()[0])
        let_time_pass(observer, queue)


def test_a_job_that_outlives_the_time_holds_its_key_to_its_end(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    first = push(engine, job, unique_for=60)
    let_time_pass(observer, queue)
    assert push(engine, job) == Pushed(first.id, created=False)
    queue.complete(queue.claim()[0])
    assert key_names(observer, queue) == []


def test_a_job_that_has_started_leaves_its_key_for_the_rest_of_the_time(
    engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber
) -> None:
    first = push(engine, job, unique_until="started", unique_for=60)
    (delivery,) = queue.claim()
    assert not delivery.unique
    assert push(engine, job) == Pushed(first.id, created=False)
    let_time_pass(observer, queue)
    second = push(engine, job, unique_until="started")
    assert second.created, "although the first job is running"
    queue.complete(delivery)
    assert push(engine, job) == Pushed(second.id, created=False)


def test_a_job_that_is_retried_within_its_time_holds_the_key_that_was_kept_for_it(
    engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber
) -> None:
    first = push(engine, job, unique_for=60)
    queue.fail(queue.claim()[0], "no")
    assert queue.failed.retry(all=True) == 1
    let_time_pass(observer, queue)
    assert push(engine, job) == Pushed(first.id, created=False)
    queue.complete(queue.claim()[0])
    assert key_names(observer, queue) == []


def test_no_time_at_all_keeps_nothing(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    push(engine, job, unique_for=0)
    queue.complete(queue.claim()[0])
    assert key_names(observer, queue) == []


# --- replaced ---------------------------------------------------------------------------------------------------------


def replace(engine: Engine, job: JobOfNumber, number: int, **options: Any) -> Pushed:
    return push(engine, job, number, on_conflict="replace", **options)


def test_a_waiting_job_becomes_the_one_that_is_pushed(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    first = replace(engine, job, 1, delay=60, deadline=600, headers={"a": "b"})
    assert first.created
    moment = only_job(observer, queue)["created_at"]
    again = replace(engine, job, 2, available_at=INSTANT, queue="other", priority=7, max_attempts=9)
    assert again == Pushed(first.id, created=False)
    row = only_job(observer, queue)
    assert (row["payload"], row["queue"], row["priority"], row["max_attempts"]) == ('{"number":2}', "other", 7, 9)
    assert (row["due_at"], row["available_at"], row["deadline"], row["headers"]) == (INSTANT, INSTANT, None, None)
    assert row["created_at"] >= moment
    assert replace(engine, job, 3, queue="other") == again
    (delivery,) = queue.claim("other")
    assert (delivery.id, delivery.payload, delivery.unique) == (first.id, {"number": 3}, True)


def test_a_shared_key_makes_it_another_job(engine: Engine, queue: Queue, job: JobOfNumber) -> None:
    @queue.job(name="index.drop")
    def drop_index(number: int) -> None: ...

    first = replace(engine, job, 1, unique=Key("index"))
    assert replace(engine, drop_index, 2, unique=Key("index")) == Pushed(first.id, created=False)
    (delivery,) = queue.claim()
    assert (delivery.id, delivery.name, delivery.payload) == (first.id, "index.drop", {"number": 2})


def test_a_job_that_waits_for_its_next_attempt_starts_over(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    first = replace(engine, job, 1)
    queue.release(queue.claim()[0], delay=3600, error="it broke")
    assert replace(engine, job, 2) == Pushed(first.id, created=False)
    assert only_job(observer, queue)["last_error"] is None
    (delivery,) = queue.claim()
    assert (delivery.payload, delivery.attempt, delivery.reclaimed_from) == ({"number": 2}, 1, None)


def running(observer: Engine, queue: Queue) -> None: ...


def expired(observer: Engine, queue: Queue) -> None:
    expire(observer, queue)


@pytest.mark.parametrize("state", [running, expired])
def test_while_one_runs_one_more_may_wait(
    state: Callable[[Engine, Queue], None], engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber
) -> None:
    """A lease that has ended is no waiting: its worker may still complete the job, with all that was pushed into it."""
    first = replace(engine, job, 1)
    (delivery,) = queue.claim()
    state(observer, queue)
    second = replace(engine, job, 2)
    assert second.created
    assert replace(engine, job, 3) == Pushed(second.id, created=False)
    assert push(engine, job, 4) == Pushed(second.id, created=False)
    assert job_ids(observer, queue) == [first.id, second.id]
    queue.complete(delivery)
    assert push(engine, job, 4) == Pushed(second.id, created=False)
    (last,) = queue.claim()
    assert (last.id, last.payload) == (second.id, {"number": 3})
    queue.complete(last)
    assert key_names(observer, queue) == []


def test_a_job_that_comes_back_behind_its_successor_holds_no_key(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    first = replace(engine, job, 1)
    (delivery,) = queue.claim()
    second = replace(engine, job, 2)
    queue.release(delivery, error="it broke")
    assert replace(engine, job, 3) == Pushed(second.id, created=False)
    make_due(observer, queue)
    found = {delivery.id: delivery for delivery in queue.claim(limit=2)}
    assert {id: one.payload for id, one in found.items()} == {first.id: {"number": 1}, second.id: {"number": 3}}
    queue.fail(found[first.id], "no")
    assert queue.failed.retry(all=True) == 1
    assert failed_in(observer, queue) == {}
    assert push(engine, job) == Pushed(second.id, created=False)


def test_a_replacing_push_says_how_the_key_is_held_from_now_on(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    replace(engine, job, 1)
    replace(engine, job, 2, unique_until="started")
    assert not queue.claim()[0].unique
    replace(engine, job, 3, unique_until="started")
    replace(engine, job, 4)
    assert queue.claim()[0].unique
    running_on = replace(engine, job, 5, unique_until="started")
    assert running_on.created
    assert not queue.claim()[0].unique


def test_a_key_that_is_only_kept_for_a_time_is_taken_for_replacing_pushes_too(
    engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber
) -> None:
    first = push(engine, job, 1, unique_for=60)
    assert replace(engine, job, 2) == Pushed(first.id, created=False)
    (delivery,) = queue.claim()
    assert delivery.payload == {"number": 2}
    second = replace(engine, job, 3)
    assert second.created
    queue.complete(delivery)
    queue.complete(queue.claim()[0])
    assert replace(engine, job, 4) == Pushed(second.id, created=False)
    assert job_ids(observer, queue) == []
    let_time_pass(observer, queue)
    assert replace(engine, job, 5).created


def test_a_key_that_nobody_holds_is_for_a_replacing_push_too(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    for job_id in (None, 0, 10**12):
        with queue.begin() as session:
            session.execute(queue.tables.keys.insert().values(key="unique:index.build/one", job_id=job_id, owner="until-started"))
        taken = replace(engine, job, 1)
        assert taken.created
        assert push(engine, job) == Pushed(taken.id, created=False)
        queue.complete(queue.claim()[0])
        assert key_names(observer, queue) == []


def test_a_replacement_is_rolled_back_with_the_callers_work(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    replace(engine, job, 1, delay=60)
    before = dict(only_job(observer, queue))
    with Session(engine) as session:
        assert not job.options(on_conflict="replace").push(session, 2).created
        session.rollback()
    assert dict(only_job(observer, queue)) == before


def test_replacing_pushes_by_name_and_by_the_dozen(engine: Engine, observer: Engine, queue: Queue, job: JobOfNumber) -> None:
    with engine.begin() as connection:
        replacing = job.options(on_conflict="replace")
        assert queue.push_many(connection, [replacing.bind(number) for number in range(5)]) == 1
        holder = queue.push_named(connection, "index.build", {"number": 9}, unique="one", on_conflict="replace", unique_until="started")
        assert not holder.created
    (delivery,) = queue.claim()
    assert (delivery.id, delivery.payload, delivery.unique) == (holder.id, {"number": 9}, False)


def test_a_replacement_wakes_a_worker_that_waits_for_the_old_due_time(engine: Engine, queue: Queue) -> None:
    ran: list[int] = []

    @queue.job(name="noted", unique="one", on_conflict="replace")
    def note(number: int) -> None:
        ran.append(number)

    with working(queue, poll_max=20.0):
        push(engine, note, 1, delay=3600)
        push(engine, note, 2)
        eventually(lambda: ran == [2])


def test_what_a_replacing_push_costs(engine: Engine, queue: Queue, job: JobOfNumber) -> None:
    """Of a new key, of a job that waits, of one that runs."""
    server = server_of(engine.dialect)
    expected = (1, 6, 6) if server.writes_in_with else (4, 5, 5) if server.snapshot_reads else (3, 3, 4)
    replacing = job.options(on_conflict="replace")
    costs = []
    for state in ("new", "waiting", "running"):
        if state == "running":
            queue.claim()
        with engine.begin() as connection, statements(engine) as sent:
            replacing.push(connection, 1)
        costs.append(len(sent))
    assert tuple(costs) == expected


def test_what_a_keyed_push_costs_however_the_key_is_held(engine: Engine, queue: Queue, job: JobOfNumber) -> None:
    one_statement = server_of(engine.dialect).writes_in_with
    ways: list[dict[str, Any]] = [{}, {"unique_for": 60}, {"unique_until": "started"}, {"unique_until": "started", "unique_for": 60}]
    for number, options in enumerate(ways):
        with engine.begin() as connection, statements(engine) as sent:
            assert job.options(unique=f"key {number}", **options).push(connection, 1).created
            written = len(sent)
            assert not job.options(unique=f"key {number}", **options).push(connection, 1).created
        assert written == (1 if one_statement else 3)
        assert len(sent) - written <= 4
