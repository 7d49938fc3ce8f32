"""
Taking what a push has announced: one statement on the connection that has heard of it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine, event

from sqlqueue import Queue
from sqlqueue._dialects import Watch, open_watch
from sqlqueue._driver.sleepers import note_worker
from sqlqueue._job import Delivery
from sqlqueue._queue.claims import Taking
from sqlqueue._worker.bell import Bell
from sqlqueue._worker.crew import Crew
from sqlqueue._worker.shift import Shift
from sqlqueue._worker.summary import Limits
from tests.rows import PATIENCE, Trap, at_statement, failed_in, jobs_in, listening, put, put_each, raising, statements_of
from tests.servers import Database
from tests.workers import eventually, push, working

pytestmark = pytest.mark.databases("postgresql")

LANE = ("default", 0, "")


@pytest.fixture
def watch(queue: Queue) -> Iterator[Watch]:
    bells = socket.socketpair()
    watch = open_watch(queue.consumer.engine, queue.tables, ["default", "other"], bells[1])
    assert watch is not None
    note_worker(watch.connection, queue.tables, "sleeper", ["default", "other"], asleep=True)
    watch.connection.commit()
    yield watch
    watch.close()
    for bell in bells:
        bell.close()


def take(queue: Queue, watch: Watch, limit: int = 10, lane: tuple[str, int, str] = LANE) -> list[Delivery]:
    return queue.consumer.claim_announced(watch.connection, lane, limit, 60.0, "worker")


def ids_of(deliveries: list[Delivery]) -> list[int]:
    return [delivery.id for delivery in deliveries]


def claimer_of(queue: Queue, **options: Any) -> Any:
    shift = Shift(queue, ("default",), Limits(), concurrency=1, lease=60, name="tested", **options)
    return Crew(shift, wait_for_database=0)._claimer


# --- what is taken ------------------------------------------------------------------------------------------------------


def test_one_statement_takes_what_is_due_in_order(queue: Queue, observer: Engine, watch: Watch) -> None:
    ids = put_each(observer, queue, [{"due_in": -20 + number} for number in range(5)])
    with statements_of(queue.consumer.engine) as sent:
        taken = take(queue, watch, 3)
    assert ids_of(taken) == ids[:3]
    assert len(sent) == 1
    queue.complete(taken[0])
    assert [row["attempts"] for row in jobs_in(observer, queue).values()] == [1, 1, 0, 0]


def test_what_is_not_easily_taken_is_left_exactly_as_it_was(queue: Queue, observer: Engine, watch: Watch) -> None:
    put(observer, queue, lease_in=-30)
    put(observer, queue, lease_in=-30, max_attempts=2)
    put(observer, queue, attempts=5, due_in=-20)
    put(observer, queue, attempts=-1)
    put(observer, queue, due_in=0.5)
    put(observer, queue, priority=3)
    put(observer, queue, queue="other")
    before = jobs_in(observer, queue)
    single = put(observer, queue, max_attempts=1)
    assert ids_of(take(queue, watch)) == single
    assert {id: row for id, row in jobs_in(observer, queue).items() if id not in single} == before


def test_a_damaged_payload_is_moved_and_what_came_beside_it_runs(queue: Queue, observer: Engine, watch: Watch) -> None:
    damaged = put(observer, queue, payload="[]", max_attempts=1)
    sound = put(observer, queue)
    assert ids_of(take(queue, watch)) == sound
    failed = failed_in(observer, queue)
    assert {id: (row["reason"], row["payload"], row["attempts"]) for id, row in failed.items()} == {damaged[0]: ("damaged", "[]", 0)}


def test_a_damaged_payload_that_cannot_be_moved_now_takes_nobody_with_it(queue: Queue, observer: Engine, watch: Watch) -> None:
    import psycopg

    put(observer, queue, payload="[]")
    sound = put(observer, queue)
    with at_statement(queue.consumer.engine, Trap(raising(lambda: psycopg.errors.DiskFull("made up")), times=9), "INSERT"):
        assert ids_of(take(queue, watch)) == sound


def test_an_announced_job_that_is_not_due_does_not_start_early(queue: Queue, engine: Engine, watch: Watch) -> None:
    queue.job(name="note")(lambda: None)
    push(queue, "note", delay=60)
    assert watch.wait(PATIENCE)
    assert watch.announced() == [LANE]
    assert take(queue, watch) == []


# --- what is heard ------------------------------------------------------------------------------------------------------


def test_the_lanes_of_a_transaction_are_heard_once_each(queue: Queue, watch: Watch) -> None:
    queue.job(name="note")(lambda: None)
    with queue.begin() as session:
        for priority in (1, 1, -3):
            queue.registry.find("note").options(priority=priority).push(session)
    assert watch.wait(PATIENCE)
    assert sorted(watch.announced()) == [("default", -3, ""), ("default", 1, "")]
    assert watch.announced() == []


@pytest.mark.parametrize("note", ["default x y", "default 1", "default 1 a b", "default", "default  "])
def test_what_somebody_else_says_on_the_channel_only_wakes(queue: Queue, observer: Engine, watch: Watch, note: str) -> None:
    for hear in (watch.wait, lambda seconds: bool(watch.connection.execute(sa.select(sa.literal(1))).all()) and watch.wait(seconds)):
        with observer.connect() as connection:
            connection.execute(sa.text("SELECT pg_notify('sqlqueue_jobs', :note)"), {"note": note})
        assert hear(PATIENCE)
        assert watch.announced() == []


# --- trouble ------------------------------------------------------------------------------------------------------------


def apply_and_lose(cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
    """The server has done it, and the connection dies before it can say so."""
    import psycopg

    if "UPDATE" not in statement:
        return False
    cursor.execute(statement, parameters)
    cursor.connection.close()
    raise psycopg.OperationalError("made up")


def test_what_was_taken_although_the_answer_was_lost_is_given_back(queue: Queue, observer: Engine, watch: Watch) -> None:
    ids = put(observer, queue, 3)
    with listening(queue.consumer.engine, "do_execute", apply_and_lose), pytest.raises(sa.exc.DBAPIError):
        take(queue, watch)
    assert [row["attempts"] for row in jobs_in(observer, queue).values()] == [1, 1, 1]
    assert ids_of(queue.claim(limit=3)) == ids
    assert [row["attempts"] for row in jobs_in(observer, queue).values()] == [1, 1, 1]


def test_an_answer_that_cannot_be_read_is_a_lost_one(queue: Queue, observer: Engine, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = put(observer, queue, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Taking, "_sort", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            take(queue, watch)
    assert ids_of(queue.claim(limit=3)) == ids
    assert [row["attempts"] for row in jobs_in(observer, queue).values()] == [1, 1, 1]


@pytest.mark.parametrize("state", ["40001", "57014", "55P03", "40P01"])
def test_a_conflict_leaves_the_rest_to_the_next_look(queue: Queue, observer: Engine, watch: Watch, state: str) -> None:
    import psycopg

    ids = put(observer, queue)
    with at_statement(queue.consumer.engine, Trap(raising(lambda: psycopg.errors.lookup(state)("made up"))), "UPDATE"):
        assert take(queue, watch) == []
    assert ids_of(take(queue, watch)) == ids


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_it_is_read_committed_whatever_the_server_s_default(queue: Queue, observer: Engine, database: Database, level: str) -> None:
    """Where another transaction has changed a row since the snapshot, another level raises, and lets producers' transactions fail."""
    engine = create_engine(database.url, connect_args={"options": f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"})
    other = Queue(engine)
    ring, bell = socket.socketpair()
    watch = open_watch(other.consumer.engine, other.tables, ["default"], bell)
    assert watch is not None
    assert watch.connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "read committed"
    watch.close()
    other.consumer.close()
    ring.close()
    bell.close()


# --- a worker -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    begun = threading.Semaphore(0)
    wait = Bell.wait_beside

    def waits(bell: Bell, watch: Callable[[float], bool], timeout: float) -> bool:
        begun.release()
        return wait(bell, watch, timeout)

    monkeypatch.setattr(Bell, "wait_beside", waits)
    return begun


def test_a_sleeping_worker_takes_it_before_it_looks_around(queue: Queue, engine: Engine, asleep: threading.Semaphore) -> None:
    ran = threading.Event()
    queue.job(name="note")(ran.set)
    with working(queue, poll_max=60):
        assert asleep.acquire(timeout=PATIENCE)
        with statements_of(queue.consumer.engine) as sent:
            with engine.begin() as connection:
                queue.push_named(connection, "note", {})
            assert ran.wait(PATIENCE)
    assert "UPDATE" in sent[0][0]
    assert "RETURNING" in sent[0][0]


def test_several_lanes_are_taken_in_their_order(queue: Queue, engine: Engine, asleep: threading.Semaphore) -> None:
    ran: list[int] = []

    @queue.job(name="note")
    def note(priority: int) -> None:
        ran.append(priority)

    with working(queue, concurrency=1, poll_max=60):
        assert asleep.acquire(timeout=PATIENCE)
        with engine.begin() as connection:
            for priority in (-1, 3, 0, 7):
                queue.push_named(connection, "note", {"priority": priority}, priority=priority)
        eventually(lambda: len(ran) == 4)
    assert ran == [7, 3, 0, -1]


def test_after_a_full_claim_an_announced_job_is_not_taken_out_of_turn(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    claimer = claimer_of(queue)
    asked: list[tuple[str, int, str]] = []
    monkeypatch.setattr(claimer._waking, "announced", lambda: [LANE])

    def claim_at(lane: tuple[str, int, str], limit: int) -> list[Delivery]:
        asked.append(lane)
        return []

    monkeypatch.setattr(claimer._waking, "claim_at", claim_at)
    claimer._filled = True
    assert claimer._claim_announced(1) == []
    assert asked == []
    claimer._filled = False
    claimer._claim_announced(1)
    assert asked == [LANE]


def test_what_was_taken_while_the_worker_was_asked_to_stop_is_handed_back(
    queue: Queue, observer: Engine, engine: Engine, asleep: threading.Semaphore
) -> None:
    ran = threading.Event()
    queue.job(name="note", max_attempts=1)(ran.set)
    with working(queue, poll_max=60) as worker:
        assert asleep.acquire(timeout=PATIENCE)

        def stop(*arguments: Any) -> None:
            if "UPDATE" in arguments[2] and "RETURNING" in arguments[2] and worker._shift is not None:
                worker._shift.ask_to_stop("asked to")

        event.listen(queue.consumer.engine, "after_cursor_execute", stop)
        with engine.begin() as connection:
            queue.push_named(connection, "note", {})
        eventually(lambda: worker.summary)
        event.remove(queue.consumer.engine, "after_cursor_execute", stop)
    assert [(row["attempts"], row["reserved_until"]) for row in jobs_in(observer, queue).values()] == [(0, None)]
    assert not ran.is_set()


def test_no_more_announced_jobs_start_than_the_worker_may(
    queue: Queue, observer: Engine, engine: Engine, asleep: threading.Semaphore
) -> None:
    queue.job(name="note")(lambda: None)
    with working(queue, max_jobs=3, poll_max=60) as worker:
        assert asleep.acquire(timeout=PATIENCE)
        with engine.begin() as connection:
            for _ in range(8):
                queue.push_named(connection, "note", {})
        eventually(lambda: worker.summary)
    assert [row["attempts"] for row in jobs_in(observer, queue).values()] == [0] * 5


def test_what_makes_the_connection_useless_leaves_none_open(queue: Queue, observer: Engine, watch: Watch) -> None:
    """SQLAlchemy lets go of a connection that it takes for lost, and does not close one that is no pool's any more."""
    import psycopg

    driver: Any = watch.connection.connection.dbapi_connection
    put(observer, queue)
    refusal = raising(lambda: psycopg.errors.lookup("25006")("made up"))
    with at_statement(queue.consumer.engine, Trap(refusal), "UPDATE"), pytest.raises(sa.exc.DBAPIError):
        take(queue, watch)
    watch.close()
    assert driver.closed
