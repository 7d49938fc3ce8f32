"""
Writing jobs, on the caller's connection and in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import StatementError

from .._dialects import (
    after,
    insert_if_absent,
    insert_rows,
    insert_with_key,
    now,
    server_of,
    wake_row_of,
    wake_sleepers,
    wakes_by_push,
)
from .._job import Pushed
from .._tables import Tables
from ..errors import LockTimeout

__all__ = ["NewJob", "Terms", "insert_job", "insert_jobs", "insert_keyed_job", "take_key"]

MANY_ROWS = 500
MANY_BYTES = 1024 * 1024
MICROSECONDS = 1_000_000
KEY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Terms:
    """
    What a row says beside its arguments and its key. Times are either aware datetimes or seconds from the push.
    """

    queue: str
    name: str
    priority: int
    max_attempts: int
    due: datetime | float
    deadline: datetime | float | None
    headers: str | None


@dataclass(frozen=True, slots=True)
class NewJob:
    """
    A row to be written. Jobs that share options share the object with their terms.
    """

    terms: Terms
    payload: str
    key: str | None


def insert_job(connection: sa.Connection, tables: Tables, job: NewJob) -> int:
    """
    One INSERT; the id of the new row.
    """
    wakes = wakes_by_push(connection)
    statement = _insert(tables, *_fixed_times(job.terms), wakes)
    with _silent_about_values():
        result = connection.execute(statement, _parameters(job))
    if wakes:
        return int(result.scalar_one())
    assert result.inserted_primary_key is not None
    return int(result.inserted_primary_key[0])


def insert_keyed_job(connection: sa.Connection, tables: Tables, job: NewJob) -> Pushed:
    """
    Write the job and its key, unless another job holds the key.

    The key goes first: the insert waits for nobody but an open transaction with the same key, its verdict is newer than
    any snapshot, and a duplicate takes no id.
    """
    assert job.key is not None
    if server_of(connection.dialect).writes_in_with:
        id = _insert_both(connection, tables, job)
        if id is not None:
            return Pushed(id, created=True)
    for _ in range(KEY_ROUNDS):
        holder = _holder(connection, tables, job.key)
        if holder is None:
            continue  # it was settled between the two statements
        if holder.alive:
            return Pushed(holder.job_id, created=False)
        id = insert_job(connection, tables, job)
        connection.execute(_own_key(tables), {"taken": job.key, "id": id})
        return Pushed(id, created=True)
    raise LockTimeout("the unique key changed hands at every look; nothing was written, push again")


def _insert_both(connection: sa.Connection, tables: Tables, job: NewJob) -> int | None:
    """
    The job and its key in one statement; None when the key is taken, perhaps by a job that is gone.
    """
    wakes = wakes_by_push(connection)
    statement = _insert_keyed(tables, *_fixed_times(job.terms), wakes)
    with _silent_about_values():
        id: int | None = connection.execute(statement, _parameters(job)).scalar_one_or_none()
    return id


def take_key(connection: sa.Connection, tables: Tables, key: str, job_id: int) -> bool:
    """
    Give the key to a job that is written in this transaction, if it is free.
    """
    holder = _holder(connection, tables, key)
    if holder is None or holder.alive:
        return False
    connection.execute(_own_key(tables), {"taken": key, "id": job_id})
    return True


def insert_jobs(connection: sa.Connection, tables: Tables, jobs: Sequence[NewJob]) -> int:
    """
    Write jobs without keys in as few statements as their size allows; how many were written.

    The clock is read once and bound: a function in VALUES would make some drivers send a statement for every row.
    """
    if not jobs:
        return 0
    terms = {id(job.terms): job.terms for job in jobs}  # by identity: to compare them takes longer than to write a row
    moment = _moment(connection, tables, {one.queue for one in terms.values()})
    values = {known_as: _bound_values(one, moment) for known_as, one in terms.items()}
    for chunk in _chunks(jobs):
        shared, listed = _by_column([values[id(job.terms)] for job in chunk])
        with _silent_about_values():
            insert_rows(connection, tables.jobs, shared, {**listed, "payload": [job.payload for job in chunk]})
    return len(jobs)


@contextmanager
def _silent_about_values() -> Iterator[None]:
    """
    The database's own error, but SQLAlchemy does not print the job's arguments in its text.
    """
    try:
        yield
    except StatementError as error:
        error.hide_parameters = True
        raise


@dataclass(frozen=True, slots=True)
class _Holder:
    job_id: int
    alive: bool


def _holder(connection: sa.Connection, tables: Tables, key: str) -> _Holder | None:
    """
    Take the key for us (not alive: a job id has to be written into it), or say who holds it, or None to look again.
    """
    if insert_if_absent(connection, tables.keys, {"key": key}):
        return _Holder(0, alive=False)
    current = _read_key(connection, tables, key)
    if current is None:
        return None
    if current.alive:
        return _Holder(current.job_id, alive=True)
    taken = connection.execute(_take_over(tables), {"taken": key, "old": current.job_id}).rowcount
    return _Holder(0, alive=False) if taken else None


def _read_key(connection: sa.Connection, tables: Tables, key: str) -> _Holder | None:
    """
    Who holds the key: a job that exists, or one that is gone and kept it for a time, or nobody (not alive).
    """
    seen = connection.execute(_look(tables), {"taken": key}).one_or_none()
    if not server_of(connection.dialect).snapshot_reads:
        return None if seen is None else _Holder(seen.job_id or 0, alive=seen.present is not None or bool(seen.kept))
    # The snapshot may be older than the key row. A job is written with its key: when the snapshot shows both the key
    # with this id and no job, the job is gone; when it does not show that key, the job came later and is there.
    locked = connection.execute(_look_locked(tables), {"taken": key}).one_or_none()
    if locked is None:
        return None
    # A key without any job is what remains when the caller commits in spite of an error between key and job.
    gone = locked.job_id is None or (seen is not None and seen.job_id == locked.job_id and seen.present is None)
    return _Holder(locked.job_id or 0, alive=not gone or bool(locked.kept))


def _kept(tables: Tables) -> sa.ColumnElement[bool]:
    return sa.and_(tables.keys.c.expires_at.is_not(None), tables.keys.c.expires_at > now()).label("kept")


@lru_cache(maxsize=256)
def _look(tables: Tables) -> sa.Select[Any]:
    keys, jobs = tables.keys.c, tables.jobs.c
    joined = tables.keys.outerjoin(tables.jobs, jobs.id == keys.job_id)
    return (
        sa.select(keys.job_id, jobs.id.label("present"), _kept(tables))
        .select_from(joined)
        .where(keys.key == sa.bindparam("taken"))
        .order_by(keys.job_id.desc())  # our own before the former holder's that an old snapshot still shows: see _own_key
        .limit(1)
    )


@lru_cache(maxsize=256)
def _look_locked(tables: Tables) -> sa.Select[Any]:
    keys = tables.keys.c
    return sa.select(keys.job_id, _kept(tables)).where(keys.key == sa.bindparam("taken")).with_for_update(read=True)


@lru_cache(maxsize=256)
def _take_over(tables: Tables) -> sa.Update:
    keys = tables.keys.c
    return (
        sa.update(tables.keys)
        .where(keys.key == sa.bindparam("taken"), sa.func.coalesce(keys.job_id, 0) == sa.bindparam("old"))
        .values(job_id=None, expires_at=None)
    )


@lru_cache(maxsize=256)
def _own_key(tables: Tables) -> sa.Update:
    """
    Of two rows with this key the one without a job is ours: an old snapshot on PostgreSQL also shows the former holder's,
    and whoever touches a row that was deleted since gets a serialization error.
    """
    keys = tables.keys.c
    return sa.update(tables.keys).where(keys.key == sa.bindparam("taken"), keys.job_id.is_(None)).values(job_id=sa.bindparam("id"))


@lru_cache(maxsize=256)
def _insert(tables: Tables, fixed_due: bool, fixed_deadline: bool, wakes: bool) -> Any:
    statement = sa.insert(tables.jobs).values(_new_row(tables, fixed_due, fixed_deadline))
    return statement.returning(tables.jobs.c.id, wake_row_of(tables)) if wakes else statement


@lru_cache(maxsize=256)
def _insert_keyed(tables: Tables, fixed_due: bool, fixed_deadline: bool, wakes: bool) -> Any:
    row = _new_row(tables, fixed_due, fixed_deadline)
    statement = insert_with_key(tables.jobs, row, tables.keys, row["unique_key"])
    return statement.returning(wake_row_of(tables)) if wakes else statement


def _new_row(tables: Tables, fixed_due: bool, fixed_deadline: bool) -> dict[str, sa.ColumnElement[Any]]:
    due = sa.bindparam("due", type_=tables.jobs.c.due_at.type) if fixed_due else after(sa.bindparam("due"))
    deadline = sa.bindparam("until", type_=tables.jobs.c.due_at.type) if fixed_deadline else after(sa.bindparam("until"))
    given = ("queue", "name", "payload", "priority", "max_attempts", "unique_key", "headers")
    row: dict[str, sa.ColumnElement[Any]] = {name: sa.bindparam(name, type_=tables.jobs.c[name].type) for name in given}
    row |= {"fair_by": sa.literal(""), "attempts": sa.literal(0)}
    return row | {"due_at": due, "available_at": due, "deadline": deadline, "created_at": now()}


def _fixed_times(terms: Terms) -> tuple[bool, bool]:
    return isinstance(terms.due, datetime), isinstance(terms.deadline, datetime | None)


def _parameters(job: NewJob) -> dict[str, Any]:
    terms = job.terms
    return {
        "queue": terms.queue,
        "name": terms.name,
        "payload": job.payload,
        "priority": terms.priority,
        "max_attempts": terms.max_attempts,
        "unique_key": job.key,
        "headers": terms.headers,
        "due": terms.due if isinstance(terms.due, datetime) else microseconds(terms.due),
        "until": terms.deadline if isinstance(terms.deadline, datetime | None) else microseconds(terms.deadline),
    }


def microseconds(seconds: float) -> int:
    """
    Seconds in the unit that the clock's arithmetic takes.
    """
    return round(seconds * MICROSECONDS)


def _moment(connection: sa.Connection, tables: Tables, queues: set[str]) -> datetime:
    """
    This statement's moment. It announces the rows, too: that is heard at the commit, and costs no statement of its own.
    """
    wakes = wakes_by_push(connection)
    moment: datetime | None = connection.execute(_clock(tables, wakes), {"queues": sorted(queues)} if wakes else {}).scalar_one()
    assert moment is not None
    return moment


@lru_cache(maxsize=256)
def _clock(tables: Tables, wakes: bool) -> sa.Select[Any]:
    clock: sa.Select[Any] = sa.select(now())
    return clock.add_columns(wake_sleepers(tables)) if wakes else clock


def _bound_values(terms: Terms, moment: datetime) -> dict[str, Any]:
    """
    By the names of the columns, all that these jobs' rows have but the payload.
    """
    due = _instant(terms.due, moment)
    return {
        "queue": terms.queue,
        "name": terms.name,
        "priority": terms.priority,
        "fair_by": "",
        "attempts": 0,
        "max_attempts": terms.max_attempts,
        "unique_key": None,
        "headers": terms.headers,
        "due_at": due,
        "available_at": due,
        "deadline": None if terms.deadline is None else _instant(terms.deadline, moment),
        "created_at": moment,
    }


def _instant(when: datetime | float, moment: datetime) -> datetime:
    return when if isinstance(when, datetime) else moment + timedelta(seconds=when)


def _by_column(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """
    What all rows have in common, and of the other columns the list of their values.
    """
    first = rows[0]
    different = {id(row): row for row in rows}.values()
    varying = [name for name, value in first.items() if any(row[name] != value for row in different)]
    shared = {name: value for name, value in first.items() if name not in varying}
    return shared, {name: [row[name] for row in rows] for name in varying}


def _chunks(jobs: Sequence[NewJob]) -> Iterator[Sequence[NewJob]]:
    begin = size = 0
    for place, job in enumerate(jobs):
        length = len(job.payload) + len(job.terms.headers or "")
        if place > begin and (place - begin == MANY_ROWS or size + length > MANY_BYTES):
            yield jobs[begin:place]
            begin, size = place, 0
        size += length
    yield jobs[begin:]
