"""
What a hand-written loop over the very same table reaches with the bare driver: psycopg, PyMySQL, sqlite3.

Claim a group and commit, run it, delete it and commit. It keeps none of the promises: no fencing, no order over queues and
priorities, no renewal, no failed table.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from .base import seconds_of, serve
from .ours import Ours

COLUMNS = "queue, name, payload, priority, fair_by, attempts, max_attempts, due_at, available_at, created_at"
LANE = "queue = 'default' AND priority = 0 AND fair_by = ''"
LEASED = "attempts = attempts + 1, reserved_token = 'by hand', reserved_until = {later}, available_at = {later}"
PAUSE = 0.01  # between two looks, where nothing tells of a change


class Driver:
    """
    A connection, and the few words in which the databases differ.
    """

    name = ""
    now = later = mark = ""
    begin: str | None = "BEGIN"
    locking = " FOR UPDATE SKIP LOCKED"
    hint = ""

    def __init__(self, url: sa.URL) -> None:
        self.url = url
        self.connection = self.connect()
        self.cursor = self.connection.cursor()

    def connect(self) -> Any:
        raise NotImplementedError

    def execute(self, statement: str, *parameters: Any) -> Any:
        self.cursor.execute(statement, *parameters)
        return self.cursor

    def commit(self) -> None:
        self.connection.commit()

    def ready(self, group: int) -> str:
        return (
            f"FROM sqlqueue_jobs{self.hint} WHERE {LANE} AND available_at <= {self.now} "
            f"ORDER BY available_at, id LIMIT {group}{self.locking}"
        )

    def claim(self, group: int) -> list[tuple[int, str]]:
        """In one statement, where UPDATE can return."""
        update = f"UPDATE sqlqueue_jobs SET {LEASED.format(later=self.later)} WHERE id IN (SELECT id {self.ready(group)})"
        rows: list[tuple[int, str]] = self.execute(f"{update} RETURNING id, payload").fetchall()
        self.commit()
        return rows

    def delete(self, ids: list[int]) -> None:
        self.execute(f"DELETE FROM sqlqueue_jobs WHERE id IN ({', '.join(map(str, ids))})")
        self.commit()

    def sleep(self) -> None:
        time.sleep(PAUSE)

    def notify(self) -> None:
        """Wake whoever sleeps, where that can be done."""

    def insert_job(self, number: int) -> None:
        values = f"'default', 'noop', {self.mark}, 0, '', 0, 5, {self.now}, {self.now}, {self.now}"
        self.execute(f"INSERT INTO sqlqueue_jobs ({COLUMNS}) VALUES ({values})", (f'{{"number":{number}}}',))

    def insert_jobs(self, count: int) -> None:
        # The clock is read once and all values are parameters: otherwise PyMySQL would send a statement a row.
        moment = self.execute(f"SELECT {self.now}").fetchone()[0]
        rows = [("default", "noop", f'{{"number":{number}}}', 0, "", 0, 5, moment, moment, moment) for number in range(count)]
        marks = ", ".join([self.mark] * len(rows[0]))
        self.cursor.executemany(f"INSERT INTO sqlqueue_jobs ({COLUMNS}) VALUES ({marks})", rows)


class Psycopg(Driver):
    name = "psycopg"
    now = "statement_timestamp()"
    later = "statement_timestamp() + interval '60 s'"
    mark = "%s"
    begin = None

    def connect(self) -> Any:
        import psycopg

        return psycopg.connect(self.url.set(drivername="postgresql").render_as_string(hide_password=False))

    def delete(self, ids: list[int]) -> None:
        self.execute("DELETE FROM sqlqueue_jobs WHERE id = ANY(%s)", (ids,))
        self.commit()

    def listen(self) -> None:
        self.connection.autocommit = True
        self.execute("LISTEN bench")

    def sleep(self) -> None:
        if not self.connection.autocommit:
            self.listen()
        for _ in self.connection.notifies(timeout=1, stop_after=1):
            pass

    def notify(self) -> None:
        self.execute("NOTIFY bench")


class PyMySQL(Driver):
    name = "PyMySQL"
    now = "UTC_TIMESTAMP(6)"
    later = "UTC_TIMESTAMP(6) + INTERVAL 60 SECOND"
    mark = "%s"
    hint = " FORCE INDEX (sqlqueue_jobs_ready)"

    def connect(self) -> Any:
        import pymysql

        url = self.url
        settings = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
        place: dict[str, Any] = {"host": url.host, "port": url.port or 3306, "database": url.database}
        connection = pymysql.connect(**place, user=url.username, password=url.password or "", init_command=settings)
        if "MariaDB" in str(connection.server_version):
            # From 1,000 values on it would make a table of them and scan the jobs.
            connection.cursor().execute("SET in_predicate_conversion_threshold = 0")
        return connection

    def claim(self, group: int) -> list[tuple[int, str]]:
        rows = list(self.execute(f"SELECT id, payload {self.ready(group)}").fetchall())
        if rows:
            ids = ", ".join(str(row[0]) for row in rows)
            self.execute(f"UPDATE sqlqueue_jobs SET {LEASED.format(later=self.later)} WHERE id IN ({ids})")
        self.commit()
        return rows


class SQLite(Driver):
    name = "sqlite3"
    now = "strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'"
    later = "strftime('%Y-%m-%d %H:%M:%f', 'now', '60 seconds') || '000'"
    mark = "?"
    locking = ""

    def connect(self) -> Any:
        return sqlite3.connect(self.url.database or "", timeout=60)

    def claim(self, group: int) -> list[tuple[int, str]]:
        self.execute("BEGIN IMMEDIATE")
        return super().claim(group)


DRIVERS: dict[str, type[Driver]] = {"postgresql": Psycopg, "mysql": PyMySQL, "mariadb": PyMySQL, "sqlite": SQLite}


def driver_for(url: str) -> Driver:
    parsed = sa.make_url(url)
    return DRIVERS[parsed.get_backend_name()](parsed)


class ByHand(Ours):
    def push_each(self, count: int) -> float:
        driver = driver_for(self.url)

        def push_all(numbers: range) -> None:
            for number in numbers:
                driver.execute("INSERT INTO bench_orders (note) VALUES ('an order')")
                driver.insert_job(number)
                driver.commit()

        push_all(range(20))
        return seconds_of(lambda: push_all(range(count)))

    def push_bulk(self, count: int) -> float:
        driver = driver_for(self.url)

        def push_all() -> None:
            driver.insert_jobs(count)
            driver.commit()

        return seconds_of(push_all)

    def work_writing(self, stamp: Callable[[int], None]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        threads = [threading.Thread(target=self.write_and_delete, args=(stamp,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def write_and_delete(self, stamp: Callable[[int], None]) -> None:
        driver = driver_for(self.url)
        while True:
            rows = driver.claim(self.settings["group"])
            for id, payload in rows:
                stamp(json.loads(payload)["number"])
                driver.execute("INSERT INTO bench_orders (note) VALUES ('an order')")
                driver.delete([id])
            if not rows:
                time.sleep(PAUSE)

    @contextlib.contextmanager
    def pusher(self) -> Iterator[Callable[[int], object]]:
        driver = driver_for(self.url)

        def push(number: int) -> None:
            driver.insert_job(number)
            driver.notify()
            driver.commit()

        yield push

    def work(self, stamp: Callable[[int], None]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        driver = driver_for(self.url)
        while True:
            rows = driver.claim(self.settings["group"])
            if not rows:
                driver.sleep()
                continue
            for _, payload in rows:
                stamp(json.loads(payload)["number"])
            driver.delete([row[0] for row in rows])


if __name__ == "__main__":
    serve(ByHand)
