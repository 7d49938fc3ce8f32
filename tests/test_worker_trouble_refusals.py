"""
A database that answers, and says no: read-only for a while, or no longer willing to let us do one thing or another.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine, event, make_url

from sqlqueue import JobContext, Queue, UnusableDatabase, Worker
from tests.rows import driver_of
from tests.servers import Database, Server
from tests.workers import PATIENCE, Gate, eventually, expire, failures, jobs, push, work_off, working

SERVERS = pytest.mark.databases("postgresql", "mysql", "mariadb")
USER = "sqlqueue_plain"


@pytest.fixture
def plain(engine: Engine, observer: Engine, database: Database, queue: Queue) -> Iterator[Queue]:
    """A queue on the same tables for a user who may read and write them, and nothing else."""
    administrator = Administrator(observer, queue)
    administrator.create_user()
    plain = Queue(make_url(database.url).set(username=USER, password="plain"))
    yield plain
    plain.consumer.close()
    plain.new_session().get_bind().engine.dispose()
    administrator.drop_user()


class Administrator:
    """Gives and takes privileges. In autocommit: what it does holds at once."""

    def __init__(self, observer: Engine, queue: Queue) -> None:
        self.observer = observer
        self.tables = [table.name for table in queue.metadata.sorted_tables]
        self.postgresql = observer.dialect.name == "postgresql"
        self.user = USER if self.postgresql else f"{USER}@'%%'"

    def create_user(self) -> None:
        self.drop_user()
        self.run(f"CREATE USER {self.user} {'PASSWORD' if self.postgresql else 'IDENTIFIED BY'} 'plain'")
        for table in self.tables:
            self.give("SELECT, INSERT, UPDATE, DELETE", table)
        if self.postgresql:
            self.run(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {self.user}")

    def drop_user(self) -> None:
        with self.observer.connect() as connection:
            there = "SELECT 1 FROM pg_roles WHERE rolname = :name" if self.postgresql else "SELECT 1 FROM mysql.user WHERE user = :name"
            if connection.scalar(sa.text(there), {"name": USER}):
                if self.postgresql:
                    self.run(f"DROP OWNED BY {self.user}")
                self.run(f"DROP USER {self.user}")

    def give(self, privileges: str, table: str) -> None:
        self.run(f"GRANT {privileges} ON {table} TO {self.user}")

    def take(self, privileges: str, table: str) -> None:
        self.run(f"REVOKE {privileges} ON {table} FROM {self.user}")

    def run(self, statement: str) -> None:
        with self.observer.connect() as connection:
            connection.exec_driver_sql(statement)


# --- read-only for a while


@contextmanager
def read_only(observer: Engine, queue: Queue) -> Iterator[None]:
    """Nobody who is not an administrator can write meanwhile."""
    name = observer.dialect.name
    if name == "sqlite":
        # The file's permissions would mean nothing to root, and nothing to a connection that has the file open.
        forbid = [True]

        def borrowed(connection: sa.Connection) -> None:
            driver_of(connection).execute(f"PRAGMA query_only = {int(forbid[0])}")

        event.listen(queue.consumer.engine, "engine_connect", borrowed)
        yield
        forbid[0] = False
        return
    before, after = {
        "postgresql": (
            ["ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"],
            ["ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()"],
        ),
        "mysql": (["SET GLOBAL read_only = ON"], ["SET GLOBAL read_only = OFF"]),
    }[name]
    with observer.connect() as connection:
        for statement in before:
            connection.exec_driver_sql(statement)
        if name == "postgresql":
            # The sessions that are there are told before a new one can begin.
            eventually(lambda: setting_of_a_new_session(observer, "default_transaction_read_only") == "on")
        try:
            yield
        finally:
            for statement in after:
                connection.exec_driver_sql(statement)


def setting_of_a_new_session(observer: Engine, name: str) -> str:
    engine = create_engine(observer.url, poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        return str(connection.scalar(sa.text(f"SHOW {name}")))


@pytest.fixture
def restricted(request: pytest.FixtureRequest, server: Server, queue: Queue) -> Queue:
    """A queue whose writes a server that is read-only refuses."""
    if server.url is None:
        return queue
    if server.instance is None:
        pytest.skip("not our server")
    plain: Queue = request.getfixturevalue("plain")
    return plain


def test_a_database_that_is_read_only_for_a_while(
    restricted: Queue, queue: Queue, observer: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """One job has to be settled meanwhile, one goes on running, one is waiting to be claimed."""
    settling, running = Gate(), Gate()
    runs: Counter[int] = Counter()
    attempts: list[int] = []

    def job(name: str, gate: Gate | None) -> None:
        @restricted.job(name=name, max_attempts=1)
        def handler(context: JobContext) -> None:
            runs[context.id] += 1
            attempts.append(context.attempt)
            if gate is not None:
                gate.pass_through()

        if restricted is not queue:
            queue.job(name=name)(lambda: None)

    job("settling", settling)
    job("running", running)
    job("late", None)
    ids = push(queue, "settling", max_attempts=1) + push(queue, "running", max_attempts=1)
    with working(restricted, concurrency=3, lease=1) as worker:
        settling.await_arrivals()
        running.await_arrivals()
        ids += push(queue, "late", delay=0.2, max_attempts=1)
        with read_only(observer, restricted):
            settling.open()
            eventually(lambda: caplog.text.count("trouble with the database") >= 1)
            shift = worker._shift
            assert shift is not None
            eventually(lambda: any(held.doubtful for held in shift.holdings.all()), "a settlement was refused")
            assert shift.fatal is None
        running.open()
        assert restricted.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 3}
    assert runs == Counter(ids)
    assert attempts == [1, 1, 1]
    assert failures(observer, queue) == []


def test_connections_that_still_lead_to_the_old_primary_are_given_up(queue: Queue, engine: Engine, database: Database) -> None:
    """After a failover new connections lead to the new one. The old ones answer, and refuse to write for ever."""
    gate = Gate()
    queue.job(name="wait")(lambda: None)
    moved = Queue(create_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=1, poolclass=sa.pool.QueuePool))
    moved.job(name="wait")(gate.pass_through)
    statement = {
        "sqlite": "PRAGMA query_only = 1",
        "postgresql": "SET default_transaction_read_only = on",
        "mysql": "SET SESSION TRANSACTION READ ONLY",
    }[engine.dialect.name]
    old: list[Any] = []
    failed_over = threading.Event()

    def connected(driver: Any, record: object) -> None:
        if not failed_over.is_set():
            old.append(driver)

    def borrowed(connection: sa.Connection) -> None:
        driver = driver_of(connection)
        if failed_over.is_set() and any(driver is one for one in old):
            driver.cursor().execute(statement)
            driver.commit()

    push(queue, "wait", 2, max_attempts=1)
    event.listen(moved.consumer.engine, "connect", connected)
    event.listen(moved.consumer.engine, "engine_connect", borrowed)
    with working(moved, concurrency=2):
        gate.await_arrivals(2)
        failed_over.set()
        gate.open()
        survived = moved.wait_empty(3)
        if not survived:
            for driver in old:
                driver.close()  # so that the worker can end
    moved.consumer.close()
    assert survived


# --- no longer allowed


def end_of(worker: Worker) -> str:
    """Run a worker that has to stop by itself; the line that it ends with."""
    worker.start()
    eventually(lambda: worker._error, "the worker ends")
    with pytest.raises(UnusableDatabase) as told:
        worker.stop(PATIENCE)
    return str(told.value)


CASES: dict[str, tuple[str, str]] = {
    "reading": ("SELECT", "sqlqueue_jobs"),
    "updating": ("UPDATE", "sqlqueue_jobs"),
    "deleting": ("DELETE", "sqlqueue_jobs"),
    "failing": ("INSERT", "sqlqueue_failed_jobs"),
}


@SERVERS
@pytest.mark.parametrize("case", CASES)
def test_one_privilege_that_is_taken_away_ends_the_worker_and_loses_no_job(plain: Queue, queue: Queue, observer: Engine, case: str) -> None:
    administrator = Administrator(observer, queue)
    privilege, table = CASES[case]
    gate = Gate()
    runs: Counter[str] = Counter()

    @plain.job(name="good", max_attempts=2)
    def good() -> None:
        runs["good"] += 1
        gate.pass_through()

    @plain.job(name="bad", max_attempts=1)
    def bad() -> None:
        runs["bad"] += 1
        gate.pass_through()
        raise ValueError("no")

    for one in (plain, queue):
        one.job(name="noop")(lambda: None)
    ids = push(plain, "bad") + push(plain, "good")
    worker = Worker(plain, concurrency=2, lease=1)
    worker.start()
    gate.await_arrivals(2)
    administrator.take(privilege, table)
    gate.open()
    ids += push(queue, "noop")  # where a row may be locked by who may only delete it, only a claim shows what is missing
    eventually(lambda: worker._error)
    with pytest.raises(
        UnusableDatabase, match=rf"the database refuses us: .*{table}.*; check user, password, database name and privileges"
    ):
        worker.stop(PATIENCE)
    assert not {row["id"] for row in jobs(observer, queue)} & {row["id"] for row in failures(observer, queue)}

    administrator.give(privilege, table)
    expire(observer, queue)
    work_off(plain)
    assert jobs(observer, queue) == []
    assert {row["id"] for row in failures(observer, queue)} == {ids[0]}
    assert runs["bad"] == 1
    assert runs["good"] <= 2


@SERVERS
def test_a_claim_that_may_not_move_what_is_used_up_ends_the_worker(plain: Queue, queue: Queue, observer: Engine) -> None:
    """Otherwise it would find the same row again and again."""
    ran = threading.Event()
    plain.job(name="noop")(ran.set)
    (used_up,) = push(plain, "noop", priority=1)
    push(plain, "noop")
    with observer.connect() as connection:
        connection.execute(sa.update(queue.tables.jobs).where(queue.tables.jobs.c.id == used_up).values(attempts=5))
    administrator = Administrator(observer, queue)
    administrator.take("INSERT", "sqlqueue_failed_jobs")
    assert re.search(r"refuses us.*sqlqueue_failed_jobs", end_of(Worker(plain)))
    assert [row["attempts"] for row in jobs(observer, queue)] == [5, 0]
    assert not ran.is_set()


def test_a_failed_table_that_is_gone_ends_the_worker_and_loses_no_job(fresh_database: Database) -> None:
    engine = create_engine(fresh_database.url)
    observer = create_engine(fresh_database.url, isolation_level="AUTOCOMMIT")
    queue = Queue(engine)
    queue.metadata.create_all(engine)
    fail: list[Callable[[], None]] = [lambda: queue.tables.failed.drop(engine)]

    @queue.job(name="bad", max_attempts=1)
    def bad() -> None:
        fail.pop()()
        raise ValueError("no")

    (id,) = push(queue, "bad")
    told = end_of(Worker(queue))
    assert re.search(r"the tables are missing or of another version: .*sqlqueue_failed_jobs.*«sqlqueue install»", told)
    assert [row["id"] for row in jobs(observer, queue)] == [id]
    queue.tables.failed.create(engine)
    expire(observer, queue)
    work_off(queue)
    assert [row["id"] for row in failures(observer, queue)] == [id]
    queue.consumer.close()
    observer.dispose()
    engine.dispose()


# --- what a producer needs


@SERVERS
def test_a_producer_needs_the_privileges_that_the_manual_names(plain: Queue, observer: Engine, queue: Queue) -> None:
    administrator = Administrator(observer, queue)
    for table in administrator.tables:
        administrator.take("SELECT, INSERT, UPDATE, DELETE", table)
    manual = (Path(__file__).parent.parent / "docs/deployment.md").read_text()
    for table, privileges in re.findall(r"^\| `(\w+)` \| ([A-Z, ]+)", manual, re.MULTILINE):
        administrator.give(privileges, table)
    job = plain.job(name="job")(lambda n: None)
    with plain.begin() as session:
        assert job.push(session, 1).created
        assert job.options(unique="a").push(session, 2).created
        assert not job.options(unique="a").push(session, 3).created
        assert plain.push_many(session, [job.bind(4), job.options(unique="b").bind(5)]) == 2
    with plain.begin() as session:
        assert not job.options(unique="b").push(session, 6).created
    assert len(jobs(observer, queue)) == 4
    for delivery in queue.claim(limit=4):
        queue.complete(delivery)
    orphan = sa.insert(queue.tables.keys).values(key="unique:job/c", job_id=1)
    with observer.connect() as connection:
        connection.execute(orphan)
    with plain.begin() as session:
        assert job.options(unique="c").push(session, 7).created
