"""
How full the queues are, and emptying them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import by_primary_key, by_ready_index, delete_by_primary_key, lock_by_primary_key, now
from .._tables import Tables
from .keys import free_keys
from .lanes import Lane, find_lanes, in_lane

__all__ = ["QueueStats", "clear_group", "count_pending", "count_size", "has_jobs", "limited_stats", "queue_stats"]

GROUP = 500


@dataclass(frozen=True, slots=True)
class QueueStats:
    """
    One queue's backlog.
    """

    queue: str
    pending: int
    """Due, and not held under a lease that is running."""
    delayed: int
    """Not due yet."""
    reserved: int
    """Held under a lease that is running."""
    total: int
    oldest_due: datetime | None
    """Since when the job that has waited longest has been due."""


def queue_stats(connection: sa.Connection, tables: Tables) -> list[QueueStats]:
    """
    Exact counts, a row a queue, by name.
    """
    return [QueueStats(*row) for row in connection.execute(_stats(tables))]


def limited_stats(connection: sa.Connection, tables: Tables, limit: int) -> list[QueueStats]:
    """
    As `queue_stats`, but no figure is counted further than to `limit`: lane by lane, so a long backlog costs no more.
    """
    found = []
    last = ""
    while queue := connection.execute(_next_queue(tables), {"last": last}).scalar_one_or_none():
        lanes = find_lanes(connection, tables, [queue])
        found.append(_limited(queue, [_count_lane(connection, tables, lane, limit) for lane in lanes], limit))
        last = queue
    return [stats for stats in found if stats.total]


def has_jobs(connection: sa.Connection, tables: Tables, queue: str | None) -> bool:
    """
    Whether there is any job, of this queue or at all.
    """
    query = sa.select(tables.jobs.c.id).limit(1)
    return connection.execute(query if queue is None else query.where(tables.jobs.c.queue == queue)).first() is not None


def count_pending(connection: sa.Connection, tables: Tables, queue: str | None) -> int:
    """
    Due and not held under a running lease.
    """
    query = sa.select(sa.func.count()).select_from(tables.jobs).where(_due(tables))
    return connection.execute(query if queue is None else query.where(tables.jobs.c.queue == queue)).scalar_one()


def count_size(connection: sa.Connection, tables: Tables, queue: str) -> int:
    """
    Pending and delayed.
    """
    jobs = tables.jobs.c
    waiting = sa.or_(jobs.reserved_until.is_(None), jobs.available_at <= now())
    return connection.execute(sa.select(sa.func.count()).select_from(tables.jobs).where(jobs.queue == queue, waiting)).scalar_one()


def clear_group(connection: sa.Connection, tables: Tables, queue: str, above: int) -> tuple[int, int | None]:
    """
    Delete the next waiting jobs of a queue: how many, and the id to go on above (None: that was all).

    Held rows, running or ended, and rows that somebody has locked stay.
    """
    found = connection.execute(_waiting(tables), {"queue": queue, "above": above}).scalars().all()
    if not found:
        return 0, None
    locked = connection.execute(_still_waiting(tables, connection.dialect), {"ids": found}).all()
    keyed = [row.id for row in locked if row.keyed]
    staying = free_keys(connection, tables, keyed) if keyed else set()
    leaving = [row.id for row in locked if row.id not in staying]
    if leaving:
        connection.execute(delete_by_primary_key(connection.dialect, tables.jobs), {"ids": leaving})
    return len(leaving), found[-1]


def _due(tables: Tables) -> sa.ColumnElement[bool]:
    return tables.jobs.c.available_at <= now()


@lru_cache(maxsize=256)
def _stats(tables: Tables) -> sa.Select[Any]:
    jobs = tables.jobs.c
    due = _due(tables)
    waiting = jobs.reserved_until.is_(None)

    def count(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return sa.func.count(sa.case((condition, 1)))

    oldest = sa.func.min(sa.case((due, jobs.available_at)), type_=jobs.available_at.type)
    return (
        sa.select(
            jobs.queue,
            count(due),
            count(sa.and_(sa.not_(due), waiting)),
            count(sa.and_(sa.not_(due), sa.not_(waiting))),
            sa.func.count(),
            oldest,
        )
        .group_by(jobs.queue)
        .order_by(jobs.queue)
    )


def _limited(queue: str, lanes: list[sa.Row[Any]], limit: int) -> QueueStats:
    pending = min(sum(lane.due for lane in lanes), limit)
    reserved = min(sum(lane.held for lane in lanes), limit)
    delayed = min(sum(lane.later - lane.held for lane in lanes), limit)
    oldest = min((lane.oldest for lane in lanes if lane.oldest is not None), default=None)
    return QueueStats(queue, pending, delayed, reserved, min(pending + reserved + delayed, limit), oldest)


def _count_lane(connection: sa.Connection, tables: Tables, lane: Lane, limit: int) -> sa.Row[Any]:
    where = {"in_queue": lane.queue, "in_priority": lane.priority, "in_fair_by": lane.fair_by}
    return connection.execute(_lane_counts(tables), where | {"most": limit}).one()


@lru_cache(maxsize=256)
def _lane_counts(tables: Tables) -> sa.Select[Any]:
    jobs = tables.jobs.c
    most = sa.bindparam("most", type_=sa.Integer())

    def up_to(condition: sa.ColumnElement[bool], name: str) -> sa.Subquery:
        query = sa.select(jobs.available_at, jobs.reserved_until).where(*in_lane(tables), condition)
        return by_ready_index(query.order_by(jobs.available_at).limit(most), tables).subquery(name)

    due, later = up_to(jobs.available_at <= now(), "due"), up_to(jobs.available_at > now(), "later")
    return sa.select(
        sa.select(sa.func.count()).select_from(due).scalar_subquery().label("due"),
        sa.select(sa.func.min(due.c.available_at, type_=jobs.available_at.type)).scalar_subquery().label("oldest"),
        sa.select(sa.func.count()).select_from(later).scalar_subquery().label("later"),
        sa.select(sa.func.count(later.c.reserved_until)).scalar_subquery().label("held"),
    )


@lru_cache(maxsize=256)
def _next_queue(tables: Tables) -> sa.Select[Any]:
    jobs = tables.jobs.c
    return by_ready_index(sa.select(jobs.queue).where(jobs.queue > sa.bindparam("last")).order_by(jobs.queue).limit(1), tables)


@lru_cache(maxsize=256)
def _waiting(tables: Tables) -> sa.Select[Any]:
    """
    Without locks: on the way to a queue's jobs there may be everybody else's.
    """
    jobs = tables.jobs.c
    query = (
        sa.select(jobs.id)
        .where(jobs.queue == sa.bindparam("queue"), jobs.id > sa.bindparam("above"), jobs.reserved_until.is_(None))
        .order_by(jobs.id)
        .limit(GROUP)
    )
    return by_primary_key(query, tables.jobs)


@lru_cache(maxsize=256)
def _still_waiting(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    jobs = tables.jobs.c
    query = sa.select(jobs.id, jobs.unique_key.is_not(None).label("keyed")).where(jobs.reserved_until.is_(None))
    return lock_by_primary_key(dialect, query, tables.jobs)
