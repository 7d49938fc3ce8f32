"""
Keys that are held until the job starts, and jobs that are replaced, where transactions overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlqueue import Delivery, Job, Pushed, Queue
from sqlqueue._driver.settle import Complete, Settlement
from tests.callers import A_MOMENT, EachLevel, each_level, take_a_snapshot
from tests.producers import ORDERS, is_conflict, job_ids, key_names, make_orders
from tests.rows import PATIENCE, Trap, at_commit, can_lock_rows, claims_commit, jobs_in, keys_in, make_due

JobOfNumber = Job[[int], None]

servers_only = pytest.mark.databases("postgresql", "mysql", "mariadb")


@pytest.fixture
def at_each_level(engine: Engine, queue: Queue) -> EachLevel:
    return each_level(engine, queue)


@pytest.fixture
def job(engine: Engine, queue: Queue) -> JobOfNumber:
    make_orders(engine)

    @queue.job(name="index.build", unique="one")
    def build_index(number: int) -> None: ...

    return build_index


@pytest.fixture
def restarting(job: JobOfNumber) -> JobOfNumber:
    return job.options(unique_until="started")


@pytest.fixture
def replacing(job: JobOfNumber) -> JobOfNumber:
    return job.options(on_conflict="replace")


def committed(engine: Engine, job: JobOfNumber, number: int = 1) -> Pushed:
    with engine.begin() as connection:
        return job.push(connection, number)


def claimed(queue: Queue) -> dict[int, Any]:
    return {delivery.id: delivery.payload["number"] for delivery in queue.claim(limit=10)}


def push_again_after_conflicts(job: JobOfNumber, caller: Connection, number: int) -> tuple[Pushed, int]:
    """What a producer does about the database's own errors; how often it had to."""
    for tries in range(20):
        try:
            caller.execute(ORDERS.delete())
            caller.execute(ORDERS.insert().values(id=number))
            pushed = job.push(caller, number)
            caller.commit()
            return pushed, tries
        except DBAPIError as error:
            caller.rollback()
            if not is_conflict(error):
                raise
    raise AssertionError("twenty conflicts in a row")


# --- a push that is held open -----------------------------------------------------------------------------------------


@servers_only
@pytest.mark.parametrize("hold", ["restarting", "replacing"])
def test_a_job_does_not_start_while_a_duplicate_of_it_is_pushed(
    hold: str, at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, request: pytest.FixtureRequest
) -> None:
    """It would not see what the producer has written. The claim waits for nobody, and takes the others."""
    job: JobOfNumber = request.getfixturevalue(hold)
    for callers in at_each_level():
        held = committed(engine, job)
        strangers = [committed(engine, job.options(unique=key), 7).id for key in ("mm", "o", "z")]
        before = jobs_in(observer, queue)[held.id]
        caller = callers.new()
        assert job.push(caller, 2) == Pushed(held.id, created=False)
        assert list(claimed(queue)) == strangers
        if hold == "restarting":
            assert 0 < (queue.consumer.soonest(("default",)) or 0) <= 0.1, "another look would come too late"
        after = jobs_in(observer, queue)[held.id]
        assert after | {"available_at": None} == before | {"available_at": None}
        caller.commit()
        make_due(observer, queue)
        assert claimed(queue) == {held.id: 2 if hold == "replacing" else 1}


@servers_only
def test_what_was_to_be_replaced_runs_when_the_replacement_is_rolled_back(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, replacing: JobOfNumber
) -> None:
    for callers in at_each_level():
        held = committed(engine, replacing.options(unique_until="started"))
        caller = callers.new()
        assert not replacing.options(unique_until="started").push(caller, 2).created
        assert claimed(queue) == {}
        caller.rollback()
        make_due(observer, queue)
        assert claimed(queue) == {held.id: 1}


@servers_only
@pytest.mark.parametrize("found", ["nothing", "a waiting job", "a running job", "a key without its job"])
def test_a_replacing_push_that_is_held_open_keeps_nobody_else_waiting(
    found: str, at_each_level: EachLevel, engine: Engine, queue: Queue, job: JobOfNumber, replacing: JobOfNumber
) -> None:
    """Not pushes of other keys, the neighbours in the order of keys included, nor without one; no claim, no renewal."""
    for callers in at_each_level():
        for key in ("b", "x"):
            committed(engine, job.options(unique=key))
        deliveries = queue.claim(limit=2)
        if found != "nothing":
            committed(engine, job.options(unique="m"))
        if found == "a running job":
            deliveries += queue.claim()
        if found == "a key without its job":
            with engine.begin() as connection:
                jobs = queue.tables.jobs
                connection.execute(jobs.delete().where(jobs.c.unique_key.endswith("/m")))
        caller, other = callers.new(), callers.new()
        assert replacing.options(unique="m").push(caller, 2).created is (found != "a waiting job")
        job.options(unique=False).push(other, 1)
        for key in ("a", "c", "lzz", "m0", "n", "z"):
            assert replacing.options(unique=key).push(other, 1).created
        assert not job.options(unique="b").push(other, 1).created
        assert queue.push_many(other, [job.options(unique=False).bind(1)] * 10) == 10
        other.commit()
        assert len(queue.claim(limit=30)) == 17
        for delivery in deliveries:
            queue.renew(delivery, lease=90)
        caller.rollback()


@servers_only
def test_the_job_that_runs_is_settled_after_its_successor_is_committed(
    at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, replacing: JobOfNumber
) -> None:
    for callers in at_each_level():
        held = committed(engine, replacing)
        stranger = committed(engine, replacing.options(unique="another"))
        group = [Settlement(one.id, one.token, one.unique, Complete()) for one in queue.claim(limit=2)]
        caller = callers.new()
        successor = replacing.push(caller, 2)
        assert successor.created
        results = queue.consumer.settle(group)
        assert (results.settled, results.blocked) == ({stranger.id}, {held.id})
        caller.commit()
        assert queue.consumer.settle([one for one in group if one.id == held.id]).settled == {held.id}
        assert keys_in(observer, queue) == {"unique:index.build/one": successor.id}
        assert claimed(queue) == {successor.id: 2}


# --- a push beside a claim ----------------------------------------------------------------------------------------------


@contextmanager
def during_the_claim(queue: Queue, action: Callable[[], Any], *, waits: bool) -> Iterator[Callable[[], Any]]:
    """Let `action` begin when the next claim is about to commit, and see whether it waits for that; its result."""
    with ThreadPoolExecutor(1) as pool:
        futures: list[Future[Any]] = []

        def begin(connection: Connection) -> None:
            futures.append(pool.submit(action))
            if waits:
                with pytest.raises(NotYet):
                    futures[0].result(A_MOMENT)
            else:
                futures[0].result(PATIENCE)

        with at_commit(queue.consumer.engine, Trap(begin, at=claims_commit(queue))):
            yield lambda: futures[0].result(PATIENCE)


@pytest.mark.parametrize("hold", ["restarting", "replacing"])
def test_a_push_that_meets_the_claim_of_its_holder_becomes_a_new_job(
    hold: str, at_each_level: EachLevel, engine: Engine, observer: Engine, queue: Queue, request: pytest.FixtureRequest
) -> None:
    """It waits for the claim only where that frees the key."""
    job: JobOfNumber = request.getfixturevalue(hold)
    waits = hold == "restarting" or not can_lock_rows(engine)
    for callers in at_each_level():
        held = committed(engine, job)
        push = partial(push_again_after_conflicts, job, callers.new(patience=10), 2)
        with during_the_claim(queue, push, waits=waits) as pushed:
            assert claimed(queue) == {held.id: 1}
            second, tries = pushed()
        assert second.created
        assert tries == 0 or (waits and callers.level not in (None, "READ COMMITTED"))
        assert claimed(queue) == {second.id: 2}
        assert key_names(observer, queue) == ([] if hold == "restarting" else ["unique:index.build/one"])


@servers_only
def test_a_replacing_push_that_has_met_a_claim_keeps_nobody_from_the_job_that_runs(
    at_each_level: EachLevel, engine: Engine, queue: Queue, replacing: JobOfNumber
) -> None:
    for callers in at_each_level():
        committed(engine, replacing)
        caller = callers.new(patience=10)
        with during_the_claim(queue, partial(replacing.push, caller, 2), waits=False) as pushed:
            (delivery,) = queue.claim()
            assert pushed().created
        assert queue.renew(delivery, lease=90).lease_until > delivery.lease_until
        caller.rollback()
        queue.complete(delivery)


@servers_only
def test_a_claim_that_was_rolled_back_leaves_the_old_job_before_the_new_one(
    engine: Engine, observer: Engine, queue: Queue, replacing: JobOfNumber
) -> None:
    """The old one, which has lost its key, runs once more than it had to; nothing is lost."""
    held = committed(engine, replacing)

    pushed: list[Pushed] = []

    def fail(connection: Connection) -> None:
        pushed.append(committed(engine, replacing, 2))
        raise RuntimeError("the worker's own trouble")

    with at_commit(queue.consumer.engine, Trap(fail)), pytest.raises(RuntimeError):
        queue.claim()
    (second,) = pushed
    assert second.created
    assert committed(engine, replacing, 3) == Pushed(second.id, created=False)
    assert claimed(queue) == {held.id: 1, second.id: 3}
    assert keys_in(observer, queue) == {"unique:index.build/one": second.id}


@servers_only
@pytest.mark.parametrize("hold", ["restarting", "replacing"])
def test_a_push_with_a_snapshot_from_before_the_claim_is_a_new_job_or_the_databases_error(
    hold: str, at_each_level: EachLevel, engine: Engine, queue: Queue, request: pytest.FixtureRequest
) -> None:
    job: JobOfNumber = request.getfixturevalue(hold)
    for callers in at_each_level():
        committed(engine, job)
        caller = callers.new()
        take_a_snapshot(caller)
        queue.claim()
        second, tries = push_again_after_conflicts(job, caller, 2)
        assert second.created
        assert tries == 0 or callers.level != "READ COMMITTED"
        assert claimed(queue) == {second.id: 2}


# --- two replacing pushes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_commits", [True, False])
def test_the_second_replacing_push_waits_for_the_first_and_has_the_last_word(
    first_commits: bool, at_each_level: EachLevel, engine: Engine, queue: Queue, replacing: JobOfNumber
) -> None:
    for callers in at_each_level():
        held = committed(engine, replacing)
        first, second = callers.new(), callers.new(patience=10)
        assert not replacing.push(first, 2).created
        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(push_again_after_conflicts, replacing, second, 3)
            with pytest.raises(NotYet):
                pushing.result(A_MOMENT)
            if first_commits:
                first.commit()
            else:
                first.rollback()
            pushed, tries = pushing.result(10)
        assert pushed == Pushed(held.id, created=False)
        assert tries == 0 or (first_commits and callers.level not in (None, "READ COMMITTED"))
        assert claimed(queue) == {held.id: 3}


@pytest.mark.parametrize("found", ["nothing", "a waiting job", "a running job"])
def test_replacing_pushes_at_the_same_moment_leave_one_job_that_waits(
    found: str, at_each_level: EachLevel, engine: Engine, queue: Queue, replacing: JobOfNumber
) -> None:
    producers = 4
    for callers in at_each_level("READ COMMITTED", "REPEATABLE READ"):
        if found != "nothing":
            committed(engine, replacing)
        if found == "a running job":
            queue.claim()
        start = threading.Barrier(producers)
        connections = [callers.new(patience=10) for _ in range(producers)]

        def push(number: int, caller: Connection, start: threading.Barrier = start) -> tuple[Pushed, int]:
            start.wait(10)
            for tries in range(20):
                try:
                    pushed = replacing.push(caller, number)
                    caller.commit()
                    return pushed, tries
                except DBAPIError as error:
                    caller.rollback()
                    if not is_conflict(error):
                        raise
            raise AssertionError("twenty conflicts in a row")

        with ThreadPoolExecutor(producers) as pool:
            results = list(pool.map(push, range(producers), connections))
        assert sum(pushed.created for pushed, _ in results) == (0 if found == "a waiting job" else 1)
        (id,) = {pushed.id for pushed, _ in results}
        ((waiting, _),) = claimed(queue).items()
        assert waiting == id
        if found == "a waiting job" and callers.level == "READ COMMITTED":
            assert sum(tries for _, tries in results) == 0


# --- all at once --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", ["restarting", "replacing"])
def test_the_last_change_is_always_seen_by_a_run_that_starts_after_it(
    hold: str, engine: Engine, observer: Engine, queue: Queue, request: pytest.FixtureRequest
) -> None:
    """Each run reads what is there when it starts; the producers write, push and commit meanwhile."""
    job: JobOfNumber = request.getfixturevalue(hold)
    changes, over = 60, threading.Event()
    runs: list[tuple[int, Any]] = []

    def run(delivery: Delivery) -> None:
        with observer.connect() as connection:
            runs.append((max(connection.scalars(sa.select(ORDERS.c.id)), default=0), delivery.payload["number"]))
        queue.complete(delivery)

    def work() -> None:
        while not over.is_set() or queue.size("default"):
            for delivery in queue.claim(limit=2):
                run(delivery)

    def produce() -> None:
        with engine.connect() as caller:
            for number in range(1, changes + 1):
                push_again_after_conflicts(job, caller, number)
        over.set()

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(produce), pool.submit(work), pool.submit(work)]:
            future.result(3 * PATIENCE)
    assert max(seen for seen, _ in runs) == changes
    if hold == "replacing":
        assert max(number for _, number in runs) == changes
        assert all(number <= seen for seen, number in runs)
    assert (job_ids(observer, queue), key_names(observer, queue)) == ([], [])
