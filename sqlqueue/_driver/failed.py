"""
The failed table: reading it, putting jobs back, forgetting them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import delete_by_primary_key, lock_by_primary_key, now, server_of
from .._failure import Reason
from .._tables import Tables
from .holders import take_key

__all__ = ["FailedJob", "count_failed", "forget_failed", "get_failed", "list_failed", "retry_failed", "select_failed"]

GROUP = 500
LATEST = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class FailedJob:
    """
    A job in the failed table. `id` is the id that it had on the queue.
    """

    id: int
    queue: str
    name: str
    payload: str = field(repr=False)
    """The JSON text as it was pushed; damaged rows keep whatever was there."""
    priority: int
    attempts: int
    max_attempts: int
    unique_key: str | None
    due_at: datetime
    deadline: datetime | None
    headers: str | None = field(repr=False)
    created_at: datetime
    reason: Reason | str
    error_class: str | None
    error_message: str | None
    traceback: str | None = field(repr=False)
    worker: str | None
    failed_at: datetime


_SUMMARY = tuple(FailedJob.__dataclass_fields__)


def list_failed(connection: sa.Connection, tables: Tables, *, queue: str | None, name: str | None, limit: int) -> list[FailedJob]:
    """
    The newest first.
    """
    failed = tables.failed.c
    query = _reading(tables).order_by(failed.failed_at.desc(), failed.id.desc()).limit(limit)
    if queue is not None:
        query = query.where(failed.queue == queue)
    if name is not None:
        query = query.where(failed.name == name)
    return [_failed_job(row) for row in connection.execute(query)]


def get_failed(connection: sa.Connection, tables: Tables, id: int) -> FailedJob | None:
    """
    One failed job, or None.
    """
    row = connection.execute(_reading(tables).where(tables.failed.c.id == id)).one_or_none()
    return None if row is None else _failed_job(row)


def count_failed(connection: sa.Connection, tables: Tables, *, queue: str | None, limit: int | None) -> int:
    """
    How many jobs are in the failed table, counted no further than to `limit`.
    """
    query = sa.select(tables.failed.c.id)
    if queue is not None:
        query = query.where(tables.failed.c.queue == queue)
    return connection.execute(sa.select(sa.func.count()).select_from(query.limit(limit).subquery())).scalar_one()


def select_failed(
    connection: sa.Connection, tables: Tables, *, above: int, ids: Sequence[int] | None = None, before: datetime | None = None
) -> list[int]:
    """
    The next ids above `above`, in id order, a group at a time.
    """
    failed = tables.failed.c
    query = sa.select(failed.id).where(failed.id > above).order_by(failed.id).limit(GROUP)
    if ids is not None:
        query = query.where(failed.id.in_(ids))
    if before is not None:
        query = query.where(failed.failed_at < before)
    return list(connection.execute(query).scalars())


def retry_failed(connection: sa.Connection, tables: Tables, id: int) -> bool:
    """
    Put one job back as it was pushed: attempts 0, due now, the deadline as far away as it was from the push, its unique
    key only if that is free. False when somebody else was faster.
    """
    row = connection.execute(_locking(tables, connection), {"wanted": id}).mappings().one_or_none()
    if row is None:
        return False
    moment: datetime = row["moment"]
    values = {column.name: row[column.name] for column in tables.jobs.c if column.name in row}
    values |= {"attempts": 0, "due_at": moment, "available_at": moment, "created_at": moment}
    if row["deadline"] is not None:
        values["deadline"] = moment + min(row["deadline"] - row["created_at"], LATEST - moment)
    if row["unique_key"] is not None and not take_key(connection, tables, row["unique_key"], id):
        values["unique_key"] = None
    connection.execute(sa.insert(tables.jobs).values(values))
    connection.execute(delete_by_primary_key(connection.dialect, tables.failed), {"ids": [id]})
    return True


def forget_failed(connection: sa.Connection, tables: Tables, ids: Sequence[int]) -> int:
    """
    Delete these rows, at most `GROUP`; how many there were.
    """
    locking = lock_by_primary_key(connection.dialect, sa.select(tables.failed.c.id), tables.failed)
    locked = list(connection.execute(locking, {"ids": ids}).scalars())
    if locked:
        connection.execute(delete_by_primary_key(connection.dialect, tables.failed), {"ids": locked})
    return len(locked)


def groups(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """
    The ids in the portions that one statement may carry.
    """
    for start in range(0, len(ids), GROUP):
        yield ids[start : start + GROUP]


@lru_cache(maxsize=256)
def _reading(tables: Tables) -> sa.Select[Any]:
    return sa.select(*(tables.failed.c[name] for name in _SUMMARY))


def _locking(tables: Tables, connection: sa.Connection) -> sa.Select[Any]:
    query = sa.select(tables.failed, now().label("moment")).where(tables.failed.c.id == sa.bindparam("wanted"))
    server = server_of(connection.dialect)
    return query.with_for_update(skip_locked=server.skip_locked) if server.row_locks else query


def _failed_job(row: sa.Row[Any]) -> FailedJob:
    values = row._asdict()
    if values["reason"] in set(Reason):
        values["reason"] = Reason(values["reason"])
    return FailedJob(**values)
