"""
How fast jobs are pushed and drained, each figure beside what a hand-written loop reaches in the same run.

    python benchmarks/drain.py                    SQLite, and every server whose SQLQUEUE_TEST_*_URL is set
    python benchmarks/drain.py --servers          private instances of whatever servers are on this machine
    python benchmarks/drain.py --jobs 20000 --only postgresql

Read the ratios: digits do not carry over from one machine to another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from sqlqueue import Queue, Worker, __version__  # noqa: E402
from sqlqueue._dialects import now  # noqa: E402
from tests.servers import NAMES, Servers  # noqa: E402

GROUP = 100
RESULTS = Path(__file__).parent / "results"
BUSINESS = sa.Table("bench_orders", sa.MetaData(), sa.Column("id", sa.Integer(), primary_key=True), sa.Column("note", sa.String(50)))

# Claim and delete in groups, in two transactions, on the very table: what a driver can do without any promise.
LANE = "queue = 'default' AND priority = 0 AND fair_by = ''"
READY = f"FROM sqlqueue_jobs WHERE {LANE} AND available_at <= {{now}} ORDER BY available_at, id LIMIT {GROUP}"
LEASED = "attempts = attempts + 1, reserved_token = 'raw', reserved_until = {later}, available_at = {later}"
CLOCKS = {
    "postgresql": ("statement_timestamp()", "statement_timestamp() + interval '60 s'"),
    "mysql": ("UTC_TIMESTAMP(6)", "UTC_TIMESTAMP(6) + INTERVAL 60 SECOND"),
    "sqlite": ("strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'", "strftime('%Y-%m-%d %H:%M:%f', 'now', '60 seconds') || '000'"),
}


def raw_claim(cursor: Any, dialect: str) -> list[int]:
    moment, later = CLOCKS[dialect]
    ready, leased = READY.format(now=moment), LEASED.format(later=later)
    locking = {"postgresql": " FOR UPDATE SKIP LOCKED", "mysql": " FOR UPDATE SKIP LOCKED", "sqlite": ""}[dialect]
    if dialect == "mysql":
        cursor.execute(f"SELECT id, payload {ready}{locking}")
        ids = [row[0] for row in cursor.fetchall()]
        if ids:
            cursor.execute(f"UPDATE sqlqueue_jobs SET {leased} WHERE id IN ({', '.join(map(str, ids))})")
        return ids
    cursor.execute(f"UPDATE sqlqueue_jobs SET {leased} WHERE id IN (SELECT id {ready}{locking}) RETURNING id, payload")
    return [row[0] for row in cursor.fetchall()]


def drain_raw(url: str) -> None:
    engine = sa.create_engine(url)
    dialect = "mysql" if engine.dialect.name == "mariadb" else engine.dialect.name
    connection = engine.raw_connection()
    cursor = connection.cursor()
    if dialect == "sqlite":
        connection.driver_connection.isolation_level = None  # type: ignore[union-attr]
    begin = {"sqlite": "BEGIN IMMEDIATE", "mysql": "BEGIN", "postgresql": "SELECT"}[dialect]
    while True:
        cursor.execute(begin)
        ids = raw_claim(cursor, dialect)
        cursor.execute("COMMIT")
        if not ids:
            break
        cursor.execute(begin)
        cursor.execute(f"DELETE FROM sqlqueue_jobs WHERE id IN ({', '.join(map(str, ids))})")
        cursor.execute("COMMIT")
    connection.close()
    engine.dispose()


def queue_on(url: str) -> tuple[Queue, Any]:
    queue = Queue(url)

    @queue.job(name="noop")
    def noop(number: int) -> None: ...

    return queue, noop


def drain_with_worker(url: str) -> None:
    queue, _ = queue_on(url)
    Worker(queue, stop_when_empty=True).run()


def in_process(body: Callable[[str], None], url: str, barrier: Any, spans: Any) -> None:
    barrier.wait()
    began = time.time()
    body(url)
    spans.put((began, time.time()))


def seconds_of(body: Callable[[str], None], url: str, processes: int) -> float:
    """From the first start to the last end, without the time that the interpreters take to start."""
    context = multiprocessing.get_context("spawn")
    barrier, spans = context.Barrier(processes), context.SimpleQueue()
    workers = [context.Process(target=in_process, args=(body, url, barrier, spans)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    found = [spans.get() for _ in workers]
    for worker in workers:
        worker.join()
    return float(max(end for _, end in found) - min(begin for begin, _ in found))


def timed(body: Callable[[], object]) -> float:
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def job_row(number: int) -> dict[str, Any]:
    fixed = {"queue": "default", "name": "noop", "priority": 0, "fair_by": "", "attempts": 0, "max_attempts": 5}
    return fixed | {"payload": f'{{"number":{number}}}', "due_at": now(), "available_at": now(), "created_at": now()}


def push_each(engine: sa.Engine, count: int, push: Callable[[sa.Connection, int], object]) -> float:
    def all_of_them() -> None:
        for number in range(count):
            with engine.begin() as connection:
                connection.execute(BUSINESS.insert().values(note="an order"))
                push(connection, number)

    return timed(all_of_them)


def measure(url: str, jobs: int, pushes: int) -> Iterator[tuple[str, float, float]]:
    """(what, ours, by hand), both a second."""
    engine = sa.create_engine(url)
    queue, noop = queue_on(url)
    table = queue.tables.jobs
    for metadata in (queue.metadata, BUSINESS.metadata):
        metadata.drop_all(engine)
        metadata.create_all(engine)

    def push_all() -> None:
        with engine.begin() as connection:
            queue.push_many(connection, [noop.bind(number) for number in range(jobs)])

    def insert_all() -> None:
        with engine.begin() as connection:
            moment = connection.execute(sa.select(now())).scalar_one()
            clock = {"due_at": moment, "available_at": moment, "created_at": moment}
            connection.execute(table.insert(), [job_row(number) | clock for number in range(jobs)])

    ours = push_each(engine, pushes, noop.push)
    by_hand = push_each(engine, pushes, lambda connection, number: connection.execute(table.insert().values(job_row(number))))
    yield "W1 push with a business row", pushes / ours, pushes / by_hand
    yield "W2 bulk push", jobs / timed(push_all), jobs / timed(insert_all)
    for processes in (1, 2):
        rates = []
        for body in (drain_with_worker, drain_raw):
            with engine.begin() as connection:
                connection.execute(table.delete())
            push_all()
            rates.append(jobs / seconds_of(body, url, processes))
        yield f"W3 drain, {processes} process{'es' if processes > 1 else ''}", rates[0], rates[1]
    queue.consumer.close()
    engine.dispose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", action="store_true", help="start private instances of the servers that are found")
    parser.add_argument("--only", choices=NAMES, action="append", help="this database; repeatable")
    parser.add_argument("--jobs", type=int, default=10_000, help="how many are pushed in bulk and drained")
    parser.add_argument("--pushes", type=int, default=1_000, help="how many are pushed one by one")
    asked = parser.parse_args()
    servers = Servers(os.environ)
    report: dict[str, Any] = {"version": __version__, "python": platform.python_version(), "cpus": os.cpu_count(), "figures": []}
    try:
        for name in asked.only or NAMES:
            given = name == "sqlite" or asked.servers or f"SQLQUEUE_TEST_{name.upper()}_URL" in os.environ
            if not given or servers.missing(name):
                print(f"{name}: left out ({servers.missing(name) or 'no URL; see --servers'})")
                continue
            server = servers.get(name)
            print(f"\n{name} {server.version:<32}{'ours':>10}{'by hand':>10}{'ratio':>8}")
            with tempfile.TemporaryDirectory() as folder:
                for what, ours, by_hand in measure(server.database(Path(folder)).url, asked.jobs, asked.pushes):
                    print(f"  {what:<40}{ours:>8,.0f}/s{by_hand:>8,.0f}/s{ours / by_hand:>8.2f}", flush=True)
                    report["figures"].append({"database": name, "server": server.version, "what": what, "ours": ours, "by_hand": by_hand})
    finally:
        servers.close()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"drain-{time.strftime('%Y%m%d-%H%M%S')}.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
