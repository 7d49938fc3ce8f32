"""
Claims and settlements read a few rows, however many others there are.

What is measured is what the servers say about the very statements that are sent: counters of rows read on MySQL and MariaDB,
EXPLAIN ANALYZE on PostgreSQL, the query plan on SQLite.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from sqlqueue import Queue
from sqlqueue._dialects import after
from sqlqueue._driver.claim import Company
from sqlqueue._driver.settle import Complete, Move, Release, Settlement
from sqlqueue._failure import Failure, Reason
from tests.rows import PATIENCE, Trap, at_commit, can_lock_rows, put, put_each
from tests.servers import Database, Server

SCHEDULED, HELD, OTHER_QUEUES, READY = 200_000, 10_000, 1_000, 600
KEYS = 10_000
BOUND = 100
"""Rows that a statement may read for a handful of jobs."""
DAY = 86_400_000_000
PREPARING = ("SET ", "BEGIN", "PRAGMA", "SELECT set_config")


@dataclass
class Crowd:
    """A database with many jobs that are not due, and a few that are."""

    queue: Queue
    observer: Engine
    server: Server


@pytest.fixture(scope="module")
def crowd(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    file = tmp_path_factory.mktemp("crowd") / "queue.db"
    database = Database("sqlite", f"sqlite:///{file}") if server.url is None else server.create_database()
    observer = create_engine(database.url, poolclass=NullPool, enable_from_linting=False)  # digits are crossed on purpose
    queue = Queue(database.url)
    queue.metadata.create_all(observer)
    fill(queue, observer)
    yield Crowd(queue, observer, server)
    queue.consumer.close()
    observer.dispose()
    if server.url is not None:
        server.drop_database(database)


def fill(queue: Queue, observer: Engine) -> None:
    """Numbers from digits: the same statement on every server, and nothing goes through the network."""
    jobs = queue.tables.jobs
    digits: Any = sa.union_all(*(sa.select(sa.literal_column(str(digit)).label("d")) for digit in range(10)))
    places: list[Any] = [digits.subquery(f"place{n}") for n in range(6)]
    numbers: Any = functools.reduce(lambda left, right: left.join(right, sa.true()), places)
    number: Any = sum((place.c.d * 10**n for n, place in enumerate(places[1:], 1)), places[0].c.d)
    held = {"reserved_until": after(DAY), "reserved_by": sa.literal("somebody"), "reserved_token": sa.literal("token")}
    kinds: list[tuple[int, Any, int, int, dict[str, Any]]] = [
        (SCHEDULED, sa.literal("default"), 5, DAY, {}),
        (HELD, sa.literal("default"), 0, DAY, held),
        (OTHER_QUEUES, sa.literal("other-") + sa.cast(number, sa.String(10)), 0, -DAY, {}),
        (READY, sa.literal("default"), 0, -1_000_000, {}),
    ]
    with observer.begin() as connection:
        for count, name, priority, due, more in kinds:
            values = {
                "queue": name,
                "name": sa.literal("job"),
                "payload": sa.literal("{}"),
                "priority": sa.literal(priority),
                "fair_by": sa.literal(""),
                "attempts": sa.literal(0),
                "max_attempts": sa.literal(5),
                "due_at": after(due),
                "available_at": after(due),
                "created_at": after(due),
            } | more
            source = sa.select(*(value.label(column) for column, value in values.items())).where(number < count)
            connection.execute(sa.insert(jobs).from_select(list(values), source.select_from(numbers)))
        for name, expires in (("held-", sa.null()), ("kept-", after(DAY))):
            source = sa.select(sa.literal(name) + sa.cast(number, sa.String(10)), expires).where(number < KEYS)
            connection.execute(sa.insert(queue.tables.keys).from_select(["key", "expires_at"], source.select_from(numbers)))


def analyze(crowd: Crowd) -> None:
    statement = "ANALYZE TABLE sqlqueue_jobs" if crowd.server.name in ("mysql", "mariadb") else "ANALYZE"
    with crowd.observer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(statement)


# --- meters -----------------------------------------------------------------------------------------------------------


@dataclass
class Reading:
    statement: str
    rows: int = 0
    sorted_rows: int = 0
    scans: list[str] = field(default_factory=list)


@contextmanager
def metering(crowd: Crowd) -> Iterator[list[Reading]]:
    """What each statement of the queue's own connections reads."""
    readings: list[Reading] = []
    engine = crowd.queue.consumer.engine
    meter = {"postgresql": explain_analyze, "sqlite": explain_plan}.get(engine.dialect.name)

    def before(connection: Connection, cursor: object, statement: str, parameters: Any, *rest: object) -> None:
        if not statement.startswith(PREPARING):
            driver: Any = connection.connection.dbapi_connection
            if meter is None:
                driver.cursor().execute("FLUSH STATUS")
            else:
                # What is sent for many rows is the same for each of them.
                readings.append(meter(driver, statement, parameters[0] if isinstance(parameters, list) else parameters))

    def afterwards(connection: Connection, cursor: object, statement: str, *rest: object) -> None:
        if meter is None and not statement.startswith(PREPARING):
            readings.append(count_reads(connection.connection.dbapi_connection, statement))

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", afterwards)
    try:
        yield readings
    finally:
        event.remove(engine, "before_cursor_execute", before)
        event.remove(engine, "after_cursor_execute", afterwards)


def count_reads(driver: Any, statement: str) -> Reading:
    cursor = driver.cursor()
    cursor.execute("SHOW SESSION STATUS WHERE Variable_name LIKE 'Handler_read%' OR Variable_name = 'Sort_rows'")
    counters = {name: int(value) for name, value in cursor.fetchall()}
    sorted_rows = counters.pop("Sort_rows")
    return Reading(statement, sum(counters.values()), sorted_rows)


def explain_analyze(driver: Any, statement: str, parameters: Any) -> Reading:
    cursor = driver.cursor()
    cursor.execute("SAVEPOINT measured")
    cursor.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + statement, parameters)
    (plans,) = cursor.fetchone()
    cursor.execute("ROLLBACK TO SAVEPOINT measured")
    reading = Reading(statement)

    def walk(node: dict[str, Any]) -> None:
        rows = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        if "Relation Name" in node and "Scan" in node["Node Type"]:
            reading.rows += int(rows)
            if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "sqlqueue_jobs":
                reading.scans.append(node["Relation Name"])
        if node["Node Type"] == "Sort":
            reading.sorted_rows += int(rows)
        for child in node.get("Plans", ()):
            walk(child)

    walk((json.loads(plans) if isinstance(plans, str) else plans)[0]["Plan"])
    return reading


def explain_plan(driver: Any, statement: str, parameters: Any) -> Reading:
    steps = [row[3] for row in driver.execute("EXPLAIN QUERY PLAN " + statement, parameters)]
    reading = Reading(statement)
    reading.scans = [step for step in steps if step.startswith("SCAN sqlqueue") or "TEMP B-TREE" in step]
    return reading


def assert_bounded(what: str, readings: list[Reading]) -> None:
    assert readings, what
    # A group is locked in the order of its ids; PostgreSQL may sort that handful. What looks for jobs never sorts.
    sortable = 0 if what.startswith(("a claim", "the look")) else 10
    for reading in readings:
        assert reading.scans == [], f"{what}: {reading.statement}"
        assert reading.rows <= BOUND, f"{what}: {reading.rows} rows read by {reading.statement}"
        assert reading.sorted_rows <= sortable, f"{what}: {reading.sorted_rows} rows sorted by {reading.statement}"


# --- tests --------------------------------------------------------------------------------------------------------------


def test_everything_that_a_consumer_does_reads_a_few_rows(crowd: Crowd) -> None:
    """Also before anybody has told the server how full the table is."""
    consumer = crowd.queue.consumer
    failure = Failure(Reason.EXCEPTION, "ValueError", "no")

    def settle(outcome: Complete | Release | Move, keyed: bool = False) -> None:
        group = [Settlement(one.id, one.token, keyed, outcome) for one in crowd.queue.claim(limit=10)]
        assert len(consumer.settle(group).settled) == 10

    def renew() -> None:
        leases = [(one.id, one.token) for one in crowd.queue.claim(limit=10)]
        assert len(consumer.renew(leases, 600)[0]) == 10

    operations: dict[str, Callable[[], object]] = {
        "the look for lanes": lambda: consumer.due_in(("default",)),
        "a claim": lambda: crowd.queue.claim(limit=10),
        "a claim in two queues": lambda: crowd.queue.claim(["other-77", "default"], limit=10),
        "a claim beside a reclaimed job": lambda: consumer.claim(("default",), 10, 60.0, "w", Company.RECLAIMED),
        "a claim beside a last attempt": lambda: consumer.claim(("default",), 10, 60.0, "w", Company.ON_LAST_ATTEMPT),
        "a claim in an empty queue": lambda: crowd.queue.claim("nothing", limit=10),
        "completing": lambda: settle(Complete()),
        "completing with keys": lambda: settle(Complete(), keyed=True),
        "releasing": lambda: settle(Release(3600, "no")),
        "failing": lambda: settle(Move(failure, "w")),
        "renewing": renew,
        "sweeping keys": consumer.sweep_keys,
    }
    for state in ("as filled", "analyzed"):
        for name, operation in operations.items():
            with metering(crowd) as readings:
                operation()
            assert_bounded(f"{name}, {state}", readings)
        analyze(crowd)


def test_a_retry_reads_a_few_rows(crowd: Crowd) -> None:
    deliveries = crowd.queue.claim(limit=3)
    for delivery in deliveries:
        crowd.queue.fail(delivery, "no")
    analyze(crowd)
    with metering(crowd) as readings:
        assert crowd.queue.failed.retry(id=[delivery.id for delivery in deliveries[:2]]) == 2
    # SQLAlchemy measures the INSERT like the rest, and explaining one is no reading.
    assert_bounded("a retry", readings)


def test_the_answers_come_fast(crowd: Crowd) -> None:
    """No figure to rely on, but a plan gone wrong takes a hundred times as long."""
    crowd.queue.claim()
    began = time.monotonic()
    for _ in range(20):
        assert len(crowd.queue.claim(limit=2)) == 2
    assert time.monotonic() - began < 5


@pytest.mark.databases("postgresql")
def test_statements_that_the_driver_has_prepared_keep_their_plans(crowd: Crowd) -> None:
    """After some executions the server may plan for any limit, and a tenth of the table is what it guesses."""
    crowd.queue.consumer.close()
    before = table_scans(crowd)
    for _ in range(30):
        (delivery,) = crowd.queue.claim()
        crowd.queue.renew(delivery, lease=600)
        crowd.queue.complete(delivery)
    crowd.queue.consumer.close()  # a session that ends reports its counters
    until = time.monotonic() + PATIENCE
    while table_scans(crowd)[1] < before[1] + 90:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert table_scans(crowd)[0] == before[0]


def table_scans(crowd: Crowd) -> tuple[int, int]:
    with crowd.observer.connect() as connection:
        row = connection.exec_driver_sql("SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = 'sqlqueue_jobs'").one()
        return row.seq_scan, row.idx_scan


def test_a_claim_that_is_under_way_keeps_no_other_from_its_jobs(queue: Queue, observer: Engine, engine: Engine) -> None:
    """InnoDB locks what it reads: where it has to sort, the first claim locks all."""
    if not can_lock_rows(engine):
        pytest.skip("one transaction at a time writes here")
    kinds = [{"queue": f"q{n % 3}", "priority": n % 5, "due_in": -60 + n % 7} for n in range(300)]
    put_each(observer, queue, kinds)
    queues = ["q1", "q2", "q0"]
    queue.consumer.due_in(tuple(queues))
    others: list[int] = []
    second_is_done = threading.Event()

    def second(connection: Connection) -> None:
        def claim() -> None:
            others.extend(delivery.id for delivery in other.claim(queues, limit=2))
            second_is_done.set()

        threading.Thread(target=claim).start()
        assert second_is_done.wait(PATIENCE)

    other = Queue(engine)
    with at_commit(queue.consumer.engine, Trap(second)):
        first = [delivery.id for delivery in queue.claim(queues, limit=2)]
    assert len(set(first) | set(others)) == 4
    other.consumer.close()


def test_payloads_are_read_for_the_jobs_that_are_taken_only(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 40, payload='{"text": "' + "x" * 200_000 + '"}')
    fetched: list[int] = []
    engine = queue.consumer.engine

    def executed(connection: Connection, cursor: Any, statement: str, *rest: object) -> None:
        if "payload" in statement:
            fetched.append(max(cursor.rowcount, 0))

    event.listen(engine, "after_cursor_execute", executed)
    assert len(queue.claim(limit=3)) == 3
    assert sum(fetched) <= 3
