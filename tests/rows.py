"""
What the tests of claiming and settling share: rows written and changed behind the library's back, and trouble made on purpose.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event

from sqlqueue import Queue
from sqlqueue._dialects import Server, after, now, server_of
from sqlqueue._dialects import server as servers

PATIENCE = 20.0
"""Seconds after which something that should happen at once has not happened."""

HOUR = timedelta(hours=1)


def moment_of(observer: Engine) -> datetime:
    """The database's clock."""
    with observer.connect() as connection:
        moment: datetime | None = connection.scalar(sa.select(now()))
    assert moment is not None
    return moment


def put(observer: Engine, queue: Queue, count: int = 1, /, **values: Any) -> list[int]:
    """
    Rows as a push would write them, due a second ago.

    `values` change columns; `due_in` (seconds) all the times; `lease_in` makes a row that a worker got whose lease ends then.
    """
    return put_each(observer, queue, [values] * count)


def put_each(observer: Engine, queue: Queue, many: Sequence[Mapping[str, Any]]) -> list[int]:
    """As `put`, each row with changes of its own, all in one transaction."""
    jobs = queue.tables.jobs
    with observer.connect().execution_options(isolation_level=_transactional(observer)) as connection, connection.begin():
        before = connection.scalar(sa.select(sa.func.max(jobs.c.id))) or 0
        moment = connection.scalar(sa.select(now()))
        assert moment is not None
        written = [_row(moment, values) for values in many]
        names = {name for row in written for name in row}  # SQLAlchemy looks at the first row only
        connection.execute(sa.insert(jobs), [dict.fromkeys(names) | row for row in written])
        return list(connection.scalars(sa.select(jobs.c.id).where(jobs.c.id > before).order_by(jobs.c.id)))


def _row(moment: datetime, values: Mapping[str, Any]) -> dict[str, Any]:
    due = moment + timedelta(seconds=values.get("due_in", -1.0))
    row = {
        "queue": "default",
        "name": "job",
        "payload": '{"n": 1}',
        "priority": 0,
        "fair_by": "",
        "attempts": 0,
        "max_attempts": 5,
        "due_at": due,
        "available_at": due,
        "created_at": due,
    }
    if "lease_in" in values:
        end = moment + timedelta(seconds=values["lease_in"])
        row |= {"attempts": 1, "available_at": end, "reserved_until": end, "reserved_by": "dead:1", "reserved_token": "of-the-dead"}
    return row | {name: value for name, value in values.items() if name not in ("due_in", "lease_in")}


def _transactional(engine: Engine) -> Any:
    return "SERIALIZABLE" if engine.dialect.name == "sqlite" else "READ COMMITTED"


def put_key(observer: Engine, queue: Queue, job_id: int, key: str) -> None:
    """Let a job hold a unique key."""
    tables = queue.tables
    with observer.connect() as connection:
        connection.execute(sa.insert(tables.keys).values(key=key, job_id=job_id))
        connection.execute(sa.update(tables.jobs).where(tables.jobs.c.id == job_id).values(unique_key=key))


def rows(observer: Engine, table: sa.Table) -> dict[int, dict[str, Any]]:
    """All rows of a table, by id."""
    with observer.connect() as connection:
        found = connection.execute(sa.select(table).order_by(table.c.id)).mappings()
        return {row["id"]: dict(row) for row in found}


def jobs_in(observer: Engine, queue: Queue) -> dict[int, dict[str, Any]]:
    return rows(observer, queue.tables.jobs)


def failed_in(observer: Engine, queue: Queue) -> dict[int, dict[str, Any]]:
    return rows(observer, queue.tables.failed)


def keys_in(observer: Engine, queue: Queue) -> dict[str, int | None]:
    keys = queue.tables.keys
    with observer.connect() as connection:
        return {row.key: row.job_id for row in connection.execute(sa.select(keys.c.key, keys.c.job_id))}


def change(observer: Engine, queue: Queue, ids: Sequence[int], /, **values: Any) -> None:
    """Change columns of jobs."""
    jobs = queue.tables.jobs
    with observer.connect() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.id.in_(ids)).values(values))


def expire(observer: Engine, queue: Queue, ids: Sequence[int] | None = None) -> None:
    """Let leases (all that are running, or those of some jobs) be an hour past their end."""
    jobs = queue.tables.jobs
    past = after(int(-HOUR.total_seconds() * 1_000_000))
    which = [jobs.c.reserved_until.is_not(None), jobs.c.available_at > now()]
    if ids is not None:
        which.append(jobs.c.id.in_(ids))
    with observer.connect() as connection:
        connection.execute(sa.update(jobs).where(*which).values(reserved_until=past, available_at=past))


def make_due(observer: Engine, queue: Queue) -> None:
    """Let everything that waits be due."""
    jobs = queue.tables.jobs
    with observer.connect() as connection:
        waiting = sa.update(jobs).where(jobs.c.reserved_until.is_(None), jobs.c.available_at > now())
        connection.execute(waiting.values(available_at=now()))


def can_lock_rows(engine: Engine) -> bool:
    return server_of(engine.dialect).row_locks


def treat_server_as(monkeypatch: pytest.MonkeyPatch, **capabilities: Any) -> None:
    """Let the library believe that every server it meets from now on has these capabilities."""
    real = servers._server

    def pretend(name: str, is_mariadb: bool, version: tuple[Any, ...]) -> Server:
        return replace(real(name, is_mariadb, version), **capabilities)

    monkeypatch.setattr(servers, "_server", pretend)


@contextmanager
def holding(engine: Engine, *statements: sa.Executable) -> Iterator[Connection]:
    """A stranger's open transaction that has run these statements; rolled back at the end."""
    with engine.connect() as connection:
        for statement in statements:
            result = connection.execute(statement)
            if result.returns_rows:
                result.all()
        yield connection
        connection.rollback()


def lock_of(table: sa.Table, *conditions: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return sa.select(table).where(*conditions).with_for_update()


# --- what our own connections do ----------------------------------------------------------------------------------------


@contextmanager
def listening(engine: Engine, name: str, listener: Callable[..., Any]) -> Iterator[None]:
    event.listen(engine, name, listener)
    try:
        yield
    finally:
        event.remove(engine, name, listener)


@contextmanager
def statements_of(engine: Engine) -> Iterator[list[tuple[str, Any]]]:
    """Statements and parameters that go through the engine, without those that only prepare a transaction."""
    seen: list[tuple[str, Any]] = []

    def executed(connection: Connection, cursor: object, statement: str, parameters: Any, *rest: object) -> None:
        if not statement.startswith(("SET ", "BEGIN", "PRAGMA", "SELECT set_config")):
            seen.append((statement, parameters))

    with listening(engine, "before_cursor_execute", executed):
        yield seen


@contextmanager
def before_each(engine: Engine, word: str, action: Callable[[Connection], None]) -> Iterator[None]:
    """Call `action` before every statement that begins with, or contains, this word."""

    def executing(connection: Connection, cursor: object, statement: str, *rest: object) -> None:
        if word in statement:
            action(connection)

    with listening(engine, "before_cursor_execute", executing):
        yield


class Trap:
    """Does something once, or some times, when the n-th statement or commit comes by; `sprung` counts."""

    def __init__(self, action: Callable[[Connection], None], *, at: int = 1, times: int = 1) -> None:
        self.action = action
        self.at = at
        self.times = times
        self.passed = 0
        self.sprung = 0
        self._guard = threading.Lock()

    def __call__(self, connection: Connection) -> None:
        with self._guard:
            self.passed += 1
            if self.passed < self.at or self.sprung == self.times:
                return
            self.sprung += 1
        self.action(connection)


def claims_commit(queue: Queue) -> int:
    """Which commit of a first claim is its own: where a claim locks out everybody else a look at the lanes comes before it."""
    return 1 if server_of(queue.consumer.engine.dialect).row_locks else 2


@contextmanager
def at_statement(engine: Engine, trap: Trap, word: str = "") -> Iterator[Trap]:
    """Spring the trap where the driver would execute; what it raises looks like the driver's own error."""

    def execute(cursor: Any, statement: str, parameters: Any, context: Any) -> None:
        if word in statement and not statement.startswith(("SET ", "BEGIN", "PRAGMA", "SELECT set_config")):
            trap(context.root_connection)

    with listening(engine, "do_execute", execute):
        yield trap


@contextmanager
def at_commit(engine: Engine, trap: Trap) -> Iterator[Trap]:
    with listening(engine, "commit", trap):
        yield trap


def driver_of(connection: Connection) -> Any:
    return connection.connection.dbapi_connection


def apply_and_lose(connection: Connection) -> None:
    """The server commits, and the connection dies before it can say so."""
    driver_of(connection).commit()
    driver_of(connection).close()


def lose(connection: Connection) -> None:
    """The connection dies, and the server rolls back."""
    driver_of(connection).close()


def cut(observer: Engine) -> Callable[[Connection], None]:
    """An administrator ends the session on the server. SQLite has no server: the connection goes."""

    def kill(connection: Connection) -> None:
        driver = driver_of(connection)
        name = observer.dialect.name
        if name == "sqlite":
            driver.close()
            return
        with observer.connect() as other:
            if name == "postgresql":
                other.execute(sa.text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": driver.info.backend_pid})
            else:
                other.exec_driver_sql(f"KILL CONNECTION {driver.thread_id()}")

    return kill


def conflicts(engine: Engine) -> Mapping[str, Callable[[], Exception]]:
    """What this database's driver raises when another transaction was in the way."""
    if engine.dialect.name == "postgresql":
        import psycopg

        kinds = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure, psycopg.errors.LockNotAvailable)
        return {kind.__name__: lambda kind=kind: kind("made up") for kind in kinds}  # type: ignore[misc]
    if engine.dialect.name == "sqlite":
        return {"SQLITE_BUSY": lambda: sqlite_error(sqlite3.SQLITE_BUSY), "SQLITE_BUSY_SNAPSHOT": lambda: sqlite_error(517)}
    import pymysql

    return {str(code): lambda code=code: pymysql.err.OperationalError(code, "made up") for code in (1213, 1205, 1020)}  # type: ignore[misc]


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("made up")
    error.sqlite_errorcode = code
    return error


def raising(make: Callable[[], Exception]) -> Callable[[Connection], None]:
    def action(connection: Connection) -> None:
        raise make()

    return action


def raising_at_commit(make: Callable[[], Exception]) -> Callable[[Connection], None]:
    """At COMMIT the listener stands before SQLAlchemy's own translation."""

    def action(connection: Connection) -> None:
        raise sa.exc.OperationalError("COMMIT", {}, make())

    return action


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0)` … `work(count - 1)` at once; their results, or the first error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


CHILD = """
import json, sys
import sqlalchemy as sa
from sqlqueue import Queue
queue = Queue(sys.argv[1])
arguments = json.loads(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
"""


def in_processes(count: int, url: str, script: str, *arguments: Any) -> list[str]:
    """Run a script in processes of their own, all from the same moment; what each printed."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD + script, url, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    outputs = []
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n", child.communicate()[1]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            output, error = child.communicate(timeout=3 * PATIENCE)
            assert child.returncode == 0, error
            outputs.append(output)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()
    return outputs
