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
from .holders import KEY_ROUNDS, PLAIN, Hold, Holder, find_holder, hold_columns, hold_differently, hold_values, own_key, pass_on

__all__ = ["NewJob", "Terms", "insert_job", "insert_jobs", "insert_keyed_job"]

MANY_ROWS = 500
MANY_BYTES = 1024 * 1024
MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Terms:
    """
    What a row says beside its arguments and its key, and how it holds that. Times are aware datetimes or seconds from the push.
    """

    queue: str
    name: str
    priority: int
    max_attempts: int
    due: datetime | float
    deadline: datetime | float | None
    headers: str | None
    hold: Hold = PLAIN


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
    Write the job and its key, unless another job holds the key: then that one stays, or becomes this one if it still waits.

    The key goes first: the insert waits for nobody but an open transaction with the same key, its verdict is newer than
    any snapshot, and a duplicate takes no id.
    """
    assert job.key is not None
    hold = job.terms.hold
    if server_of(connection.dialect).writes_in_with:
        id = _insert_both(connection, tables, job)
        if id is not None:
            return Pushed(id, created=True)
    for _ in range(KEY_ROUNDS):
        holder = find_holder(connection, tables, job.key, replacing=hold.replaces)
        if holder is None:
            continue  # it was settled between the two statements
        if holder.present and hold.replaces:
            return _replace(connection, tables, job, holder)
        if holder.alive:
            return Pushed(holder.job_id or 0, created=False)
        id = insert_job(connection, tables, job)
        own_key(connection, tables, job.key, id, hold)
        return Pushed(id, created=True)
    raise LockTimeout("the unique key changed hands at every look; nothing was written, push again")


def _replace(connection: sa.Connection, tables: Tables, job: NewJob, holder: Holder) -> Pushed:
    """
    Let the job that holds the key become this one, or write this one behind it if it has started or is being claimed.

    The key is locked, so nobody settles the holder, or passes its key on.
    """
    assert holder.job_id is not None
    if holder.waiting and _lock_waiting(connection, tables, holder.job_id) and _become(connection, tables, job, holder.job_id):
        hold_differently(connection, tables, holder, job.terms.hold)
        return Pushed(holder.job_id, created=False)
    id = insert_job(connection, tables, job)
    pass_on(connection, tables, holder, id, job.terms.hold)
    return Pushed(id, created=True)


def _lock_waiting(connection: sa.Connection, tables: Tables, id: int) -> bool:
    """
    Whether the job still waits, and stays so. A lease that has ended is no waiting: its worker may yet complete the job.

    An UPDATE would wait for a claim that is under way and then, although it changes nothing, keep the row of the running
    job locked, so that its lease could not be renewed before the caller commits. That is also why only jobs are locked
    that were seen waiting: a snapshot of the caller's that is older than the claim can still make InnoDB lock one.
    """
    server = server_of(connection.dialect)
    if not server.row_locks:
        return True
    return connection.execute(_waiting(tables, server.skip_locked), {"waiting": id}).first() is not None


def _become(connection: sa.Connection, tables: Tables, job: NewJob, id: int) -> bool:
    """
    Whether the job has become the one that is pushed.
    """
    wakes = wakes_by_push(connection)
    statement = _update_waiting(tables, *_fixed_times(job.terms), wakes)
    with _silent_about_values():
        result = connection.execute(statement, _parameters(job) | {"waiting": id})
        return result.first() is not None if wakes else result.rowcount == 1


def _insert_both(connection: sa.Connection, tables: Tables, job: NewJob) -> int | None:
    """
    The job and its key in one statement; None when the key is taken, perhaps by a job that is gone.
    """
    wakes = wakes_by_push(connection)
    hold = job.terms.hold
    statement = _insert_keyed(tables, *_fixed_times(job.terms), hold.kept_for is not None, wakes)
    with _silent_about_values():
        id: int | None = connection.execute(statement, _parameters(job) | hold_values(hold)).scalar_one_or_none()
    return id


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


@lru_cache(maxsize=256)
def _insert(tables: Tables, fixed_due: bool, fixed_deadline: bool, wakes: bool) -> Any:
    statement = sa.insert(tables.jobs).values(_new_row(tables, fixed_due, fixed_deadline))
    return statement.returning(tables.jobs.c.id, wake_row_of(tables)) if wakes else statement


@lru_cache(maxsize=256)
def _insert_keyed(tables: Tables, fixed_due: bool, fixed_deadline: bool, keeps: bool, wakes: bool) -> Any:
    row = _new_row(tables, fixed_due, fixed_deadline)
    statement = insert_with_key(tables.jobs, row, tables.keys, row["unique_key"], hold_columns(tables, keeps))
    return statement.returning(wake_row_of(tables)) if wakes else statement


@lru_cache(maxsize=256)
def _waiting(tables: Tables, skip_locked: bool) -> sa.Select[Any]:
    jobs = tables.jobs.c
    query = sa.select(jobs.id).where(jobs.id == sa.bindparam("waiting"), jobs.reserved_until.is_(None))
    return query.with_for_update(skip_locked=skip_locked)


@lru_cache(maxsize=256)
def _update_waiting(tables: Tables, fixed_due: bool, fixed_deadline: bool, wakes: bool) -> Any:
    """
    All that a new row would say. The token stays: it may prove that a release, whose answer was lost, was applied.
    """
    jobs = tables.jobs.c
    row = _new_row(tables, fixed_due, fixed_deadline) | {"last_error": sa.null()}
    statement = sa.update(tables.jobs).where(jobs.id == sa.bindparam("waiting"), jobs.reserved_until.is_(None)).values(row)
    return statement.returning(jobs.id, wake_row_of(tables)) if wakes else statement


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
