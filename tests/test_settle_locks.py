"""
Strangers' locks: a group waits for nobody, and says what it could not do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from sqlqueue import Queue
from sqlqueue._dialects import server_of
from sqlqueue._driver.settle import GROUP, Complete, Move, Release, Results, Settlement
from sqlqueue._failure import Failure, Reason
from sqlqueue._job import Delivery
from sqlqueue._queue import operations
from sqlqueue._worker.settling import Settler
from sqlqueue._worker.shift import Shift
from sqlqueue._worker.summary import Limits
from sqlqueue.errors import LockTimeout
from tests.producers import wait_at_most
from tests.rows import (
    PATIENCE,
    before_each,
    can_lock_rows,
    change,
    expire,
    failed_in,
    holding,
    jobs_in,
    keys_in,
    listening,
    lock_of,
    put,
    put_key,
)
from tests.workers import eventually

T = TypeVar("T")

OUTCOMES: dict[str, Any] = {
    "complete": Complete(),
    "release": Release(60, "no"),
    "fail": Move(Failure(Reason.EXCEPTION, "ValueError", "no"), "worker"),
}


@pytest.fixture
def queue(queue: Queue, engine: Engine) -> Queue:
    with engine.connect():
        pass  # so that the server is known
    if not can_lock_rows(engine):
        pytest.skip("there are no row locks here")
    return queue


def at_once(work: Callable[[], T]) -> T:
    """Nothing here may wait for a lock. Where it did, it would be for seconds: InnoDB's shortest wait is one, ours are ten."""
    began = time.monotonic()
    result = work()
    assert time.monotonic() - began < 5
    return result


def settle(queue: Queue, deliveries: list[Delivery], outcome: Complete | Release | Move) -> Results:
    group = [Settlement(one.id, one.token, one.unique, outcome) for one in deliveries]
    return at_once(lambda: queue.consumer.settle(group))


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_group_settles_around_a_row_that_a_stranger_has_locked(queue: Queue, observer: Engine, engine: Engine, outcome: str) -> None:
    """A good part of a small table: where the optimizer likes to read it all."""
    put(observer, queue, 150)
    locked, *others = queue.claim(limit=51)
    jobs = queue.tables.jobs
    waiting = max(jobs_in(observer, queue))
    with holding(engine, lock_of(jobs, jobs.c.id == locked.id), lock_of(jobs, jobs.c.id == waiting)):
        results = settle(queue, [locked, *others], OUTCOMES[outcome])
        assert results.settled == {one.id for one in others}
        assert results.blocked == {locked.id}
        assert results.stale == set()
        assert jobs_in(observer, queue)[locked.id]["reserved_token"] == locked.token
    assert settle(queue, [locked], OUTCOMES[outcome]).settled == {locked.id}


def test_a_group_is_renewed_around_a_locked_row(queue: Queue, observer: Engine, engine: Engine) -> None:
    put(observer, queue, 60)
    locked, *others = queue.claim(limit=50)
    jobs = queue.tables.jobs
    leases = [(one.id, one.token) for one in (locked, *others)]
    with holding(engine, lock_of(jobs, jobs.c.id == locked.id)):
        assert at_once(lambda: queue.consumer.renew(leases, 600)) == ({one.id for one in others}, set())


@pytest.mark.parametrize("outcome", ["complete", "fail"])
def test_a_key_that_a_duplicate_push_has_locked_delays_its_own_job_only(
    queue: Queue, observer: Engine, engine: Engine, outcome: str
) -> None:
    ids = put(observer, queue, 50)
    for id in ids[:10]:
        put_key(observer, queue, id, f"unique:job/{id}")
    deliveries = queue.claim(limit=50)
    keys = queue.tables.keys
    # On InnoDB the failed INSERT of a duplicate leaves a lock that others can share, until its transaction ends.
    with holding(engine, sa.select(keys).where(keys.c.key == f"unique:job/{ids[3]}").with_for_update(read=True)):
        results = settle(queue, deliveries, OUTCOMES[outcome])
        assert results.blocked == {ids[3]}
        assert results.settled == set(ids) - {ids[3]}
        assert keys_in(observer, queue) == {f"unique:job/{ids[3]}": ids[3]}
        still = next(one for one in deliveries if one.id == ids[3])
        assert at_once(lambda: queue.consumer.renew([(still.id, still.token)], 600)) == ({still.id}, set())
        assert settle(queue, [still], Release(0, None)).settled == {still.id}


def test_a_real_duplicate_push_delays_nobody_else(queue: Queue, observer: Engine, engine: Engine) -> None:
    queue.job(name="job")(lambda: None)
    with queue.begin() as session:
        held = queue.push_named(session, "job", {}, unique="a").id
        others = [queue.push_named(session, "job", {}, unique=f"other-{n}").id for n in range(9)]
    deliveries = queue.claim(limit=10)
    with engine.connect() as connection, connection.begin() as transaction:
        assert not queue.push_named(connection, "job", {}, unique="a").created
        results = settle(queue, deliveries, Complete())
        assert results.settled | results.blocked == {held, *others}
        assert results.settled >= set(others)
        transaction.rollback()
    assert settle(queue, [one for one in deliveries if one.id in results.blocked], Complete()).stale == set()
    assert jobs_in(observer, queue) == {}


@pytest.mark.parametrize("operation", ["complete", "release", "fail"])
def test_an_operation_on_a_locked_row_gives_up_after_a_sixth_of_the_lease(
    queue: Queue, observer: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(operations, "DEFAULT_LEASE", 0.6)
    (id,) = put(observer, queue)
    (delivery,) = queue.claim()
    jobs = queue.tables.jobs
    before = jobs_in(observer, queue)
    act = {
        "complete": lambda: queue.complete(delivery),
        "release": lambda: queue.release(delivery),
        "fail": lambda: queue.fail(delivery, "no"),
    }[operation]
    with holding(engine, lock_of(jobs, jobs.c.id == id)):
        with pytest.raises(LockTimeout, match=f"cannot {operation} job {id}"):
            at_once(act)
        assert jobs_in(observer, queue) == before
        assert failed_in(observer, queue) == {}
    act()


def test_a_renewal_of_a_locked_row_gives_up_too(queue: Queue, observer: Engine, engine: Engine) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim()
    jobs = queue.tables.jobs
    with holding(engine, lock_of(jobs, jobs.c.id == id)), pytest.raises(LockTimeout, match=f"job {id}"):
        at_once(lambda: queue.renew(delivery, lease=1))
    queue.renew(delivery)


def test_an_operation_goes_on_as_soon_as_the_lock_is_gone(queue: Queue, observer: Engine, engine: Engine) -> None:
    (id,) = put(observer, queue)
    (delivery,) = queue.claim()
    jobs = queue.tables.jobs
    with holding(engine, lock_of(jobs, jobs.c.id == id)) as stranger:
        completing = threading.Thread(target=queue.complete, args=(delivery,))
        completing.start()
        completing.join(0.1)
        assert completing.is_alive()
        stranger.rollback()
        completing.join(PATIENCE)
    assert jobs_in(observer, queue) == {}


CONSUMING: dict[str, Callable[[Queue, Delivery], object]] = {
    "claim": lambda queue, delivery: queue.claim(limit=5),
    "renew": lambda queue, delivery: queue.renew(delivery, lease=600),
    "complete": lambda queue, delivery: queue.complete(delivery),
    "release": lambda queue, delivery: queue.release(delivery, delay=5),
    "fail": lambda queue, delivery: queue.fail(delivery, "no"),
    "clear": lambda queue, delivery: queue.clear("default"),
    "retry": lambda queue, delivery: queue.failed.retry(all=True),
    "forget": lambda queue, delivery: queue.failed.forget(all=True),
}


@pytest.mark.parametrize("operation", CONSUMING)
def test_nothing_that_a_consumer_does_keeps_a_producer_waiting(queue: Queue, observer: Engine, engine: Engine, operation: str) -> None:
    """
    Its transaction stands before its COMMIT, and producers push beside whatever it has locked: between rows that it
    has changed or deleted, and behind the last one, where InnoDB at REPEATABLE READ would have locked the gaps.
    """
    pushed: list[int] = []
    options: list[dict[str, Any]] = [{}, {"priority": 1}, {"priority": -1}, {"delay": 3600}, {"queue": "new"}]

    def produce(connection: Connection) -> None:
        if pushed or connection.get_execution_options()["sqlqueue_read_only"]:
            return
        for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"):
            with engine.connect().execution_options(isolation_level=level) as producer:
                wait_at_most(producer, 1)
                for each in (*options, *({"unique": f"{key} {level}"} for key in "aehz")):
                    pushed.append(queue.push_named(producer, "stranger", {}, **each).id)
                producer.commit()

    first, *others = put(observer, queue, 9)
    for id, key in zip((first, *others), "bdfhjlnpr", strict=True):
        put_key(observer, queue, id, f"unique:stranger/{key}")
    delivery, failed = queue.claim(limit=2)
    queue.fail(failed, "no")
    with listening(queue.consumer.engine, "commit", produce):
        CONSUMING[operation](queue, delivery)
    assert len(pushed) == 3 * 9, "a producer had to wait"


def test_clearing_a_queue_waits_for_nobody(queue: Queue, observer: Engine, engine: Engine) -> None:
    locked, *others = put(observer, queue, 20)
    other_queue = put(observer, queue, 20, queue="other")
    keyed = others[0]
    put_key(observer, queue, keyed, "unique:job/a")
    jobs, keys = queue.tables.jobs, queue.tables.keys
    strangers = [lock_of(jobs, jobs.c.id == id) for id in (locked, *other_queue)] + [lock_of(keys, keys.c.key == "unique:job/a")]
    with holding(engine, *strangers):
        assert at_once(lambda: queue.clear("default")) == 18
        assert set(jobs_in(observer, queue)) == {locked, keyed, *other_queue}
    assert queue.clear("default") == 2


def test_two_groups_that_overlap_never_wait_in_a_circle(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 200)
    deliveries = queue.claim(limit=200)
    ordered = {0: deliveries, 1: deliveries[::-1]}
    errors: list[BaseException] = []

    def renew(number: int) -> None:
        try:
            for _ in range(10):
                queue.consumer.renew([(one.id, one.token) for one in ordered[number]], 600)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=renew, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []


def test_a_row_that_is_counted_is_locked_until_it_is_deleted(queue: Queue, observer: Engine, engine: Engine) -> None:
    """Nobody can claim it in between, so that what is deleted is what the token was compared for."""
    if server_of(engine.dialect).writes_in_with:
        pytest.skip("there is nothing in between here")
    ids = put(observer, queue, 5)
    strange = put(observer, queue)
    deliveries = queue.claim(limit=5)
    jobs = queue.tables.jobs
    free: list[list[int]] = []

    def look(connection: Connection) -> None:
        with engine.connect() as other:
            free.append(list(other.scalars(sa.select(jobs.c.id).order_by(jobs.c.id).with_for_update(skip_locked=True))))
            other.rollback()

    change(observer, queue, ids[1:2], reserved_token="another's")
    with before_each(queue.consumer.engine, "DELETE", look):
        results = settle(queue, deliveries, Complete())
    assert (results.settled, results.stale) == ({ids[0], *ids[2:]}, {ids[1]})
    assert free == [[ids[1], *strange]]


@pytest.mark.databases("postgresql")
def test_a_row_that_changes_hands_while_the_statement_runs_is_left_alone(queue: Queue, observer: Engine, engine: Engine) -> None:
    """The snapshot still shows our token; what counts is the row as it is when it is locked."""
    ids = put(observer, queue, 2)
    deliveries = queue.claim(limit=2)
    function = "BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN OLD; END"
    with observer.connect() as connection:
        connection.exec_driver_sql(f"CREATE FUNCTION wait_for_us() RETURNS trigger LANGUAGE plpgsql AS $$ {function} $$")
        connection.exec_driver_sql("CREATE TRIGGER wait_for_us BEFORE DELETE ON sqlqueue_jobs FOR EACH ROW EXECUTE FUNCTION wait_for_us()")
    try:
        with holding(engine, sa.select(sa.func.pg_advisory_xact_lock(4711))) as stranger:
            found: list[Results] = []
            settling = threading.Thread(target=lambda: found.append(settle(queue, deliveries, Complete())))
            settling.start()
            waiting = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            with observer.connect() as connection:
                eventually(lambda: connection.scalar(waiting))
                jobs = queue.tables.jobs
                free = list(connection.scalars(sa.select(jobs.c.id).with_for_update(skip_locked=True)))
                change(observer, queue, free, reserved_token="another's")
            stranger.rollback()
            settling.join(PATIENCE)
        assert free == ids[1:]
        assert found[0].stale == set(free)
        assert found[0].settled == set(ids) - set(free)
        assert sorted(jobs_in(observer, queue)) == free
    finally:
        with observer.connect() as connection:
            connection.exec_driver_sql("DROP TRIGGER wait_for_us ON sqlqueue_jobs")
            connection.exec_driver_sql("DROP FUNCTION wait_for_us")


def test_two_leases_of_one_job_in_a_group_complete_it_once(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    (old,) = queue.claim()
    expire(observer, queue)
    (new,) = queue.claim()
    settle(queue, [old, new], Complete())
    assert jobs_in(observer, queue) == {}


def test_those_whom_a_stranger_has_locked_do_not_slow_the_others(queue: Queue) -> None:
    shift = Shift(queue, ("default",), Limits(), concurrency=1, lease=60, name="tested")
    blocked: list[Any] = [object() for _ in range(GROUP + 100)]
    for _ in range(GROUP + 100):
        shift.over.put(object())  # type: ignore[arg-type]
    assert len(Settler(shift)._gather(blocked, 0.0)) == len(blocked) + GROUP
