"""
A database that is away, comes back, says no, or is not there at all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError

from sqlqueue import JobContext, NotConfigured, Queue, UnusableDatabase, Worker
from tests.rows import apply_and_lose, lose
from tests.servers import Database, Server, free_port
from tests.workers import PATIENCE, Gate, eventually, failures, jobs, push, work_off, working

SERVERS = pytest.mark.databases("postgresql", "mysql", "mariadb")


def kill_connections(observer: Engine) -> int:
    """End every other connection to this database from the server's side; how many there were."""
    killer = create_engine(observer.url, poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT")
    with killer.connect() as connection:
        if connection.dialect.name == "postgresql":
            others = "datname = current_database() AND pid <> pg_backend_pid()"
            return len(connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")).all())
        others = "db = DATABASE() AND id <> CONNECTION_ID()"
        ids = connection.scalars(text(f"SELECT id FROM information_schema.processlist WHERE {others}")).all()
        for id in ids:
            with contextlib.suppress(DBAPIError):  # it has just gone by itself
                connection.execute(text(f"KILL {id}"))
        return len(ids)


def writes(connection: sa.Connection) -> bool:
    """Whether this is one of the queue's transactions that write: the first that does is a claim."""
    return connection.get_execution_options().get("sqlqueue_read_only") is False


# --- at the start


@SERVERS
def test_a_database_that_cannot_be_reached_is_waited_for_and_given_up(database: Database) -> None:
    queue = Queue(make_url(database.url).set(port=free_port()))
    began = time.monotonic()
    with pytest.raises(UnusableDatabase, match="cannot be reached"):
        Worker(queue, wait_for_database=0.5).run()
    assert 0.5 <= time.monotonic() - began < PATIENCE
    queue.consumer.close()


@SERVERS
def test_a_stop_ends_the_waiting(database: Database) -> None:
    queue = Queue(make_url(database.url).set(port=free_port()))
    worker = Worker(queue, wait_for_database=3600)
    worker.start()
    worker.stop(PATIENCE)
    assert worker.summary is not None
    queue.consumer.close()


@SERVERS
def test_a_wrong_password_is_told_at_once(database: Database) -> None:
    queue = Queue(make_url(database.url).set(password="wrong"))
    with pytest.raises(UnusableDatabase, match="refuses us") as found:
        Worker(queue, wait_for_database=3600).run()
    assert "wrong" not in str(found.value)
    queue.consumer.close()


def test_missing_tables_are_told_at_once(fresh_database: Database) -> None:
    queue = Queue(fresh_database.url)
    with pytest.raises(UnusableDatabase, match=r"tables are missing.*alembic upgrade head"):
        Worker(queue, wait_for_database=3600).run()
    with pytest.raises(UnusableDatabase, match="tables are missing"):
        Worker(queue, wait_for_database=3600).run_once()
    queue.consumer.close()


def test_a_worker_that_was_started_tells_when_it_is_stopped(fresh_database: Database) -> None:
    queue = Queue(fresh_database.url)
    worker = Worker(queue)
    worker.start()
    eventually(lambda: worker._error)
    with pytest.raises(UnusableDatabase, match="tables are missing"):
        worker.stop(PATIENCE)
    worker.stop()  # told once
    queue.consumer.close()


def test_a_folder_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    queue = Queue(f"sqlite:///{tmp_path}/mounted/later/queue.db")
    with pytest.raises(UnusableDatabase, match="cannot be reached"):
        Worker(queue, wait_for_database=0.2).run()
    queue.consumer.close()


def test_a_queue_without_a_database() -> None:
    with pytest.raises(NotConfigured):
        Worker(Queue()).run()


# --- under way


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "running"])
def test_tables_that_are_dropped_end_the_worker(fresh_database: Database, busy: bool) -> None:
    engine = create_engine(fresh_database.url)
    queue = Queue(engine)
    queue.metadata.create_all(engine)
    gate = Gate()
    queue.job(name="wait")(gate.pass_through)
    worker = Worker(queue, concurrency=1, lease=1)
    if busy:
        push(queue, "wait")
    worker.start()
    if busy:
        gate.await_arrivals()
    else:
        eventually(lambda: queue.consumer.soonest(("default",)) is None and queue.consumer._looks)
    with engine.begin() as connection:
        for table in reversed(queue.metadata.sorted_tables):
            connection.execute(sa.schema.DropTable(table))
    eventually(lambda: worker._error)
    with pytest.raises(UnusableDatabase, match="tables are missing"):
        worker.stop(PATIENCE)
    gate.open()
    queue.consumer.close()
    engine.dispose()


@SERVERS
def test_killed_connections_of_an_idle_worker(queue: Queue, engine: Engine, observer: Engine) -> None:
    observer.dispose()  # it is killed too
    ran = threading.Semaphore(0)
    queue.job(name="noop")(ran.release)
    with working(queue) as worker:
        for _ in range(3):
            push(queue, "noop")
            assert ran.acquire(timeout=PATIENCE)
            assert queue.wait_empty(PATIENCE)
            engine.dispose()
            assert kill_connections(observer) > 0
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 3}


@SERVERS
def test_killed_connections_while_a_handler_runs(queue: Queue, engine: Engine, observer: Engine) -> None:
    observer.dispose()  # it is killed too
    gate = Gate()
    runs: Counter[int] = Counter()

    @queue.job(name="wait")
    def wait(context: JobContext) -> None:
        runs[context.id] += 1
        gate.pass_through()

    ids = push(queue, "wait", 5)
    engine.dispose()
    with working(queue, concurrency=5, lease=2) as worker:
        gate.await_arrivals(5)
        kill_connections(observer)
        gate.open()
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 5}
    assert runs == Counter(ids)


@SERVERS
def test_a_claim_that_is_cut_off_costs_no_attempt(queue: Queue, observer: Engine) -> None:
    observer.dispose()  # it is killed too
    seen: list[int] = []

    @queue.job(name="note", max_attempts=1)
    def note(context: JobContext) -> None:
        seen.append(context.attempt)

    cuts: list[int] = []

    def cut(connection: sa.Connection) -> None:
        if not cuts and writes(connection):  # before COMMIT
            cuts.append(kill_connections(observer))

    push(queue, "note")
    event.listen(queue.consumer.engine, "commit", cut)
    assert work_off(queue).counts == {"done": 1}
    assert cuts
    assert seen == [1]


@SERVERS
def test_a_settlement_that_is_cut_off_is_written_once(queue: Queue, engine: Engine, observer: Engine) -> None:
    observer.dispose()  # it is killed too
    cuts: list[int] = []
    runs: Counter[int] = Counter()
    one_at_a_time = threading.Lock()

    @queue.job(name="note")
    def note(context: JobContext) -> None:
        runs[context.id] += 1

    def cut(connection: sa.Connection) -> None:
        with one_at_a_time:
            if runs and len(cuts) < 2 and writes(connection):
                cuts.append(kill_connections(observer))

    ids = push(queue, "note", 20)
    engine.dispose()
    event.listen(queue.consumer.engine, "commit", cut)
    summary = work_off(queue, concurrency=1)
    assert len(cuts) == 2
    assert summary.counts["done"] == 20
    assert runs == Counter(ids)
    assert (jobs(observer, queue), failures(observer, queue)) == ([], [])


@pytest.mark.parametrize("size", [1, 2])
def test_a_pool_that_is_smaller_than_the_concurrency(queue: Queue, database: Database, size: int) -> None:
    small = create_engine(database.url, pool_size=size, max_overflow=0, pool_timeout=PATIENCE, poolclass=sa.pool.QueuePool)
    tight = Queue(small)
    runs: Counter[int] = Counter()

    @tight.job(name="note")
    def note(context: JobContext) -> None:
        runs[context.id] += 1
        assert context.renew()

    @queue.job(name="note")
    def pushed() -> None: ...

    ids = push(queue, "note", 60)
    assert work_off(tight, concurrency=12).counts == {"done": 60}
    assert runs == Counter(ids)
    tight.consumer.close()


def test_ten_handlers_that_renew_and_settle_share_one_connection(queue: Queue, database: Database) -> None:
    """Whoever does not get the connection soon gives up for the moment, and no lease is lost for it."""
    small = create_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=0.05, poolclass=sa.pool.QueuePool)
    tight = Queue(small)
    queue.job(name="renew")(lambda: None)
    runs: Counter[int] = Counter()
    answers: Counter[bool] = Counter()
    lost: list[bool] = []
    all_run = threading.Barrier(11)

    @tight.job(name="renew", max_attempts=1)
    def renew(context: JobContext) -> None:
        runs[context.id] += 1
        all_run.wait(PATIENCE)
        until = time.monotonic() + 1.3  # longer than the lease
        while time.monotonic() < until:
            answers[context.renew()] += 1
            time.sleep(0.05)
        lost.append(context.lost)

    ids = push(queue, "renew", 10, max_attempts=1)
    with working(tight, concurrency=10, lease=1) as worker:
        all_run.wait(PATIENCE)
        connection = eventually(lambda: _taken_from(tight.consumer.engine))
        eventually(lambda: answers[False] >= 5)
        connection.close()
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 10}
    assert runs == Counter(ids)
    assert lost == [False] * 10
    assert answers[True] > 10
    tight.consumer.close()


def test_a_pool_that_is_empty_for_a_while_is_survived(queue: Queue, database: Database) -> None:
    small = create_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=0.1, poolclass=sa.pool.QueuePool)
    tight = Queue(small)
    ran = threading.Event()
    tight.job(name="noop")(ran.set)
    queue.job(name="noop")(lambda: None)
    with working(tight, notify=False) as worker:  # what waits for pushes has a connection of its own
        eventually(lambda: tight.consumer._looks)
        connection = eventually(lambda: _taken_from(tight.consumer.engine))
        push(queue, "noop")
        eventually(lambda: worker._shift is not None and worker._shift.patience._since)
        assert not ran.is_set()
        connection.close()
        assert ran.wait(PATIENCE)
    tight.consumer.close()


def _taken_from(engine: Engine) -> sa.Connection | None:
    try:
        return engine.connect()
    except sa.exc.TimeoutError:
        return None


def test_a_write_lock_held_longer_than_anybody_waits(queue: Queue, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Only where one lock is for the whole database; elsewhere nothing of ours is locked by it."""
    ran = threading.Event()
    queue.job(name="noop")(ran.set)
    push(queue, "noop")
    sqlite = engine.dialect.name == "sqlite"
    with engine.connect() as connection:
        if sqlite:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        with working(queue, lease=1) as worker:
            if sqlite:
                eventually(lambda: "trouble with the database" in caplog.text)
            connection.rollback()
            assert ran.wait(PATIENCE)
            worker.stop(PATIENCE)
            assert worker.summary is not None
            assert worker.summary.counts == {"done": 1}


@SERVERS
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_server_restart_under_a_running_worker(server: Server, queue: Queue, engine: Engine, observer: Engine, how: str) -> None:
    if server.instance is None:
        pytest.skip("not our server")
    gate = Gate()
    runs: Counter[int] = Counter()
    late = threading.Event()

    @queue.job(name="wait")
    def wait(context: JobContext) -> None:
        runs[context.id] += 1
        gate.pass_through()

    queue.job(name="late")(late.set)
    ids = push(queue, "wait", 2)
    engine.dispose()
    with working(queue, concurrency=3) as worker:
        gate.await_arrivals(2)
        getattr(server.instance, how)()
        gate.open()  # so that it has to settle, and to look for more, while nobody answers
        eventually(lambda: worker._shift is not None and worker._shift.patience._since)
        server.instance.start()
        observer.dispose()
        push(queue, "late")
        assert late.wait(PATIENCE)
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 3}
    assert runs == Counter(ids)
    assert failures(observer, queue) == []


@SERVERS
@pytest.mark.parametrize("stage", ["idle", "claiming", "settling"])
def test_a_server_that_crashes_at_any_moment(server: Server, queue: Queue, engine: Engine, observer: Engine, stage: str) -> None:
    """A job with a single attempt: the claim was not applied, or the settlement was and nobody heard of it."""
    instance = server.instance
    if instance is None:
        pytest.skip("not our server")
    runs: Counter[int] = Counter()
    crashed = threading.Event()
    one_at_a_time = threading.Lock()

    @queue.job(name="note", max_attempts=1)
    def note(context: JobContext) -> None:
        runs[context.id] += 1

    def crash(connection: sa.Connection) -> None:
        with one_at_a_time:
            if crashed.is_set() or not writes(connection) or bool(runs) != (stage == "settling"):
                return
            # A server's sessions may outlive it for a moment, long enough for an answer.
            (apply_and_lose if runs else lose)(connection)
            instance.kill()
            crashed.set()

    ids = push(queue, "note") if stage != "idle" else []
    engine.dispose()
    if stage != "idle":
        event.listen(queue.consumer.engine, "commit", crash)
    with working(queue) as worker:
        if stage == "idle":
            eventually(lambda: queue.consumer._looks)
            instance.kill()
            crashed.set()
        assert crashed.wait(PATIENCE)
        eventually(lambda: worker._shift is not None and worker._shift.patience._since)
        instance.start()
        observer.dispose()
        ids = ids or push(queue, "note")
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 1}
    assert runs == Counter(ids)
    assert failures(observer, queue) == []


@SERVERS
def test_a_renewal_that_is_cut_off_costs_no_lease(queue: Queue, engine: Engine, observer: Engine) -> None:
    observer.dispose()  # it is killed too
    gate = Gate()
    lost: list[bool] = []
    cuts: list[int] = []
    renewed = threading.Event()

    @queue.job(name="wait")
    def wait(context: JobContext) -> None:
        gate.pass_through()
        lost.append(context.lost)

    def cut(connection: sa.Connection) -> None:
        if threading.current_thread().name == "sqlqueue-renew" and writes(connection):
            if cuts:
                renewed.set()
            else:
                cuts.append(kill_connections(observer))

    push(queue, "wait")
    event.listen(queue.consumer.engine, "commit", cut)
    with working(queue, lease=3) as worker:
        gate.await_arrivals()
        assert renewed.wait(PATIENCE)
        gate.open()
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 1}
    assert lost == [False]


def test_trouble_is_told_in_one_line_without_values(
    queue: Queue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusal(Exception):
        sqlstate = "55P03"

    def away(*arguments: Any, **options: Any) -> Any:
        raise sa.exc.OperationalError("SELECT :card", {"card": "4111"}, Refusal("lock timeout\nDETAIL: Failing row contains (4111)."))

    monkeypatch.setattr(queue.consumer, "claim", away)
    with working(queue):
        eventually(lambda: "trouble with the database, trying again: lock timeout" in caplog.text)
    assert "4111" not in caplog.text


def test_trouble_that_goes_on_is_told_once(queue: Queue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = threading.Semaphore(0)

    def away(*arguments: Any, **options: Any) -> Any:
        tries.release()
        raise sa.exc.OperationalError("SELECT 1", {}, Exception("gone"))

    monkeypatch.setattr(queue.consumer, "claim", away)
    with working(queue):
        for _ in range(4):
            assert tries.acquire(timeout=PATIENCE)
    assert caplog.text.count("trouble with the database") == 1
