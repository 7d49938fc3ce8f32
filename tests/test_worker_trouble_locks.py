"""
Other people's locks, and tables that are changed, under a running worker.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine, make_url

from sqlqueue import JobContext, Queue
from sqlqueue._queue import transactions
from tests.rows import before_each, can_lock_rows, holding, listening, lock_of
from tests.servers import Database
from tests.workers import PATIENCE, Gate, eventually, failures, jobs, push, working

# --- where one lock is for everything

HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=20)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
"""


@contextmanager
def locked_by_another_process(database: Database) -> Iterator[None]:
    command = [sys.executable, "-S", "-c", HOLDER, str(make_url(database.url).database)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.communicate("go\n", timeout=PATIENCE)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times a sixth of the lease is most of a lease."""
    monkeypatch.setattr(transactions, "TRIES", 2)


@contextmanager
def refusals_of(queue: Queue) -> Iterator[Counter[str]]:
    """How often each thread was refused the lock, after it had waited for it."""
    refusals: Counter[str] = Counter()

    def refused(context: sa.engine.ExceptionContext) -> None:
        assert "database is locked" in str(context.original_exception)
        refusals[threading.current_thread().name] += 1

    with listening(queue.consumer.engine, "handle_error", refused):
        yield refusals


@pytest.mark.databases("sqlite")
@pytest.mark.usefixtures("impatient")
def test_a_file_that_another_process_has_locked_while_we_claim(queue: Queue, database: Database, caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[int] = []

    @queue.job(name="note", max_attempts=1)
    def note(context: JobContext) -> None:
        attempts.append(context.attempt)

    push(queue, "note")
    with ExitStack() as lock, refusals_of(queue) as refusals:
        lock.enter_context(locked_by_another_process(database))
        with working(queue, lease=2):
            eventually(lambda: refusals["sqlqueue-claim"] > transactions.TRIES)
            assert attempts == []
            lock.close()
            assert queue.wait_empty(PATIENCE)
    assert attempts == [1]


@pytest.mark.databases("sqlite")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("thread", ["sqlqueue-settle", "sqlqueue-renew"])
def test_a_file_that_another_process_has_locked_while_we_settle_or_renew(
    queue: Queue, database: Database, observer: Engine, thread: str
) -> None:
    """For longer than we wait, and not for so long that the lease ends: it is kept."""
    gate = Gate()
    lost: list[bool] = []

    @queue.job(name="wait", max_attempts=1)
    def wait(context: JobContext) -> None:
        gate.pass_through()
        lost.append(context.lost)

    push(queue, "wait")
    with refusals_of(queue) as refusals, working(queue, lease=2) as worker:
        gate.await_arrivals()
        with locked_by_another_process(database):
            if thread == "sqlqueue-settle":
                gate.open()
            eventually(lambda: refusals[thread] == transactions.TRIES)
        gate.open()
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 1}
    assert lost == [False]
    assert failures(observer, queue) == []


@pytest.mark.databases("sqlite")
@pytest.mark.usefixtures("impatient")
def test_a_file_that_another_process_has_locked_for_longer_than_the_lease(queue: Queue, database: Database, observer: Engine) -> None:
    """The handler is told. Nobody else could claim the job either: its outcome counts."""
    contexts: list[JobContext] = []
    gate = Gate()

    @queue.job(name="wait", max_attempts=1)
    def wait(context: JobContext) -> None:
        contexts.append(context)
        gate.pass_through()

    push(queue, "wait")
    with working(queue, lease=1) as worker:
        gate.await_arrivals()
        with locked_by_another_process(database):
            eventually(lambda: contexts[0].lost)
            worker.stop(0)  # this worker claims nothing more, and there is no other
            gate.open()
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 1}
    assert (jobs(observer, queue), failures(observer, queue)) == ([], [])


# --- where rows are locked


def test_a_long_transaction_that_holds_rows_delays_nobody_elses_jobs(queue: Queue, engine: Engine, observer: Engine) -> None:
    """One row that is ready, one whose job is running, and the key of a third: all are done when the transaction ends."""
    with engine.connect():
        pass  # so that the server is known
    if not can_lock_rows(engine):
        pytest.skip("there are no row locks here")
    gate = Gate()
    runs: Counter[int] = Counter()

    @queue.job(name="note", max_attempts=1)
    def note(context: JobContext) -> None:
        runs[context.id] += 1

    @queue.job(name="wait", max_attempts=1)
    def wait(context: JobContext) -> None:
        runs[context.id] += 1
        gate.pass_through()

    (running,) = push(queue, "wait", priority=1)
    (keyed,) = push(queue, "note", unique="a")
    (ready,) = push(queue, "note")
    table, keys = queue.tables.jobs, queue.tables.keys
    with ExitStack() as locks:
        locks.enter_context(holding(engine, lock_of(table, table.c.id == ready), lock_of(keys, keys.c.job_id == keyed)))
        with working(queue, concurrency=3):
            gate.await_arrivals()
            locks.enter_context(holding(engine, lock_of(table, table.c.id == running)))
            gate.open()
            others = push(queue, "note", 20)
            eventually(lambda: {row["id"] for row in jobs(observer, queue)} == {running, keyed, ready})
            assert runs == Counter([running, keyed, *others])
            locks.close()
            assert queue.wait_empty(PATIENCE)
            eventually(lambda: not jobs(observer, queue))
    assert runs == Counter([running, keyed, ready, *others])
    assert failures(observer, queue) == []


# --- changed tables


def test_columns_that_are_added_under_a_running_worker(fresh_database: Database) -> None:
    """Each time while a transaction of ours is open, so that the change comes between it and the next."""
    engine = create_engine(fresh_database.url)
    observer = create_engine(fresh_database.url, isolation_level="AUTOCOMMIT")
    queue = Queue(engine)
    queue.metadata.create_all(engine)
    runs: Counter[int] = Counter()

    @queue.job(name="good", max_attempts=1)
    def good(context: JobContext) -> None:
        runs[context.id] += 1

    @queue.job(name="bad", max_attempts=1)
    def bad(context: JobContext) -> None:
        runs[context.id] += 1
        raise ValueError("no")

    moments = Counter({"UPDATE sqlqueue_jobs": 0, "DELETE": 0, "INSERT INTO sqlqueue_failed_jobs": 0})
    changes: list[threading.Thread] = []
    changed: list[str] = []

    def change(number: int) -> None:
        for table in ("sqlqueue_jobs", "sqlqueue_failed_jobs"):
            with engine.begin() as connection:
                connection.exec_driver_sql(f"ALTER TABLE {table} ADD COLUMN extra_{number} VARCHAR(10)")
            changed.append(table)

    def executing(word: str) -> None:
        moments[word] += 1
        if moments[word] == 8:  # a driver prepares a statement when it has seen it some times
            thread = threading.Thread(target=change, args=(len(changes),))
            thread.start()
            changes.append(thread)

    goods: list[int] = []
    bads: list[int] = []

    def push_until_all_is_changed() -> bool:
        goods.extend(push(queue, "good"))
        bads.extend(push(queue, "bad"))
        return len(changes) == len(moments)

    with ExitStack() as stack:
        for word in moments:
            stack.enter_context(before_each(queue.consumer.engine, word, lambda connection, word=word: executing(word)))  # type: ignore[misc]
        with working(queue, concurrency=2) as worker:
            eventually(push_until_all_is_changed)
            for thread in changes:
                thread.join(PATIENCE)
            goods += push(queue, "good", 10)
            bads += push(queue, "bad", 10)
            assert queue.wait_empty(PATIENCE)
            worker.stop(PATIENCE)
            assert worker.summary is not None
            assert worker.summary.counts == {"done": len(goods), "failed": len(bads)}
    assert len(changed) == 6
    assert runs == Counter(goods + bads)
    assert jobs(observer, queue) == []
    assert queue.failed.count() == len(bads)
    assert queue.failed.retry(all=True) == len(bads)
    queue.consumer.close()
    observer.dispose()
    engine.dispose()


def test_a_column_that_is_made_wider_under_a_running_worker(fresh_database: Database) -> None:
    """A driver that has prepared a statement is refused it from then on, until it prepares it again."""
    engine = create_engine(fresh_database.url)
    queue = Queue(engine)
    queue.metadata.create_all(engine)
    runs: Counter[int] = Counter()

    @queue.job(name="note", max_attempts=1)
    def note(context: JobContext) -> None:
        runs[context.id] += 1

    wider = {
        "sqlite": "ALTER TABLE sqlqueue_jobs ADD COLUMN wider BIGINT",  # columns cannot be changed there
        "postgresql": "ALTER TABLE sqlqueue_jobs ALTER COLUMN priority TYPE BIGINT",
        "mysql": "ALTER TABLE sqlqueue_jobs MODIFY COLUMN priority BIGINT NOT NULL",
    }[engine.dialect.name]
    ids: list[int] = []
    with working(queue, concurrency=1) as worker:
        for _ in range(8):  # a driver prepares a statement when it has seen it some times
            ids += push(queue, "note")
            assert queue.wait_empty(PATIENCE)
        with engine.begin() as connection:
            connection.exec_driver_sql(wider)
        ids += push(queue, "note")
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": len(ids)}
    assert runs == Counter(ids)
    queue.consumer.close()
    engine.dispose()
