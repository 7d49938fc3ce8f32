"""
Which lanes of the queues there are. A lane is one range of the index: (queue, priority, fair_by), by due time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import by_ready_index, moment_of, now, raw_moment, server_of
from .._tables import Tables

__all__ = ["Lane", "announced_lane", "find_lanes", "in_lane"]

HOPS = 50
EVER = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Lane:
    """
    One lane with rows in it, and when its first row may be claimed.
    """

    queue: str
    priority: int
    fair_by: str
    first: Any
    """When its first row may be claimed, as the driver reads a moment."""
    due_in: float
    """Seconds from the time of the look until then; not above 0 if it may be claimed now."""


def find_lanes(connection: sa.Connection, tables: Tables, queues: Sequence[str]) -> list[Lane]:
    """
    The lanes of these queues in the order of precedence: queues as named, higher priorities first.

    Reads a few index entries a lane, however long the lanes are.
    """
    if server_of(connection.dialect).lanes_by_recursion:
        rows = connection.execute(_recursing(tables, len(queues)), {f"queue_{n}": name for n, name in enumerate(queues)}).all()
    else:
        rows = _hop(connection, tables, queues)
    lanes = [Lane(row.queue, row.priority, row.fair_by, row.next_at, _seconds_between(row.moment, row.next_at)) for row in rows]
    rank = {name: place for place, name in enumerate(queues)}
    return sorted(lanes, key=lambda lane: (rank[lane.queue], -lane.priority, lane.fair_by))


def announced_lane(queue: str, priority: int, fair_by: str) -> Lane:
    """
    A lane that nobody has looked at, in which something is due.
    """
    return Lane(queue, priority, fair_by, EVER, 0.0)


def in_lane(tables: Tables) -> tuple[sa.ColumnElement[bool], ...]:
    """
    What makes a row one of the lane that the parameters name.
    """
    jobs = tables.jobs.c
    return (
        jobs.queue == sa.bindparam("in_queue"),
        jobs.priority == sa.bindparam("in_priority"),
        jobs.fair_by == sa.bindparam("in_fair_by"),
    )


def _seconds_between(earlier: Any, later: Any) -> float:
    begin, end = moment_of(earlier), moment_of(later)
    assert begin is not None
    assert end is not None
    return (end - begin).total_seconds()


def _hop(connection: sa.Connection, tables: Tables, queues: Sequence[str]) -> Sequence[sa.Row[Any]]:
    """
    An index seek a lane: the first ones in one statement, so that empty queues cost no more; of the others each in a
    statement of its own, or all in one when there turn out to be very many.
    """
    first: list[sa.Row[Any]] = []
    for start in range(0, len(queues), HOPS):
        names = {f"queue_{n}": name for n, name in enumerate(queues[start : start + HOPS])}
        first += connection.execute(_first_lanes(tables, len(names)), names).all()
    found = list(first)
    for row in first:
        last = row
        while there := connection.execute(_next_lane(tables), _place(last)).one_or_none():
            if len(found) == HOPS:
                return connection.execute(_grouped(tables), {"queues": list(queues)}).all()
            found.append(there)
            last = there
    return found


def _place(lane: sa.Row[Any]) -> dict[str, Any]:
    return {"in_queue": lane.queue, "priority": lane.priority, "fair_by": lane.fair_by}


@lru_cache(maxsize=256)
def _first_lanes(tables: Tables, queues: int) -> sa.Select[Any] | sa.CompoundSelect[Any]:
    parts = [_lanes_in_order(tables, sa.bindparam(f"queue_{number}")) for number in range(queues)]
    return sa.union_all(*parts) if queues > 1 else parts[0]


@lru_cache(maxsize=256)
def _next_lane(tables: Tables) -> sa.Select[Any]:
    jobs = tables.jobs.c
    priority: sa.BindParameter[int] = sa.bindparam("priority")
    fair_by: sa.BindParameter[str] = sa.bindparam("fair_by")
    # Spelled out: InnoDB finds no range in a comparison of tuples.
    behind = sa.or_(jobs.priority > priority, sa.and_(jobs.priority == priority, jobs.fair_by > fair_by))
    return _lanes_in_order(tables, sa.bindparam("in_queue")).where(behind)


def _lanes_in_order(tables: Tables, queue: sa.BindParameter[str]) -> sa.Select[Any]:
    jobs = tables.jobs.c
    columns = (jobs.queue, jobs.priority, jobs.fair_by, raw_moment(jobs.available_at).label("next_at"), raw_moment(now()).label("moment"))
    query = sa.select(*columns).where(jobs.queue == queue).order_by(jobs.priority, jobs.fair_by, jobs.available_at).limit(1)
    return by_ready_index(query, tables)


@lru_cache(maxsize=256)
def _grouped(tables: Tables) -> sa.Select[Any]:
    """
    InnoDB can jump from group to group, but MariaDB does so only as long as the table's statistics are true.
    """
    jobs = tables.jobs.c
    lane = (jobs.queue, jobs.priority, jobs.fair_by)
    next_at = raw_moment(sa.func.min(jobs.available_at))
    query = sa.select(*lane, next_at.label("next_at"), raw_moment(now()).label("moment")).group_by(*lane)
    return by_ready_index(query.where(jobs.queue.in_(sa.bindparam("queues", expanding=True))), tables)


@lru_cache(maxsize=256)
def _recursing(tables: Tables, queues: int) -> sa.Select[Any]:
    """
    A recursion that hops from each queue's last lane to the one before it, an index seek a hop.
    """
    seeds = [_last_id(tables, sa.bindparam(f"queue_{number}")) for number in range(queues)]
    lanes = sa.select(seeds[0].label("id")).cte("lane", recursive=True)
    here = tables.jobs.alias("here")
    step = sa.select(_last_id(tables, here.c.queue, before=here)).select_from(lanes.join(here, here.c.id == lanes.c.id))
    lanes = lanes.union_all(*(sa.select(seed) for seed in seeds[1:]), step)
    found = tables.jobs.alias("found")
    first = tables.jobs.alias("first")
    next_at = (
        sa.select(raw_moment(first.c.available_at))
        .where(first.c.queue == found.c.queue, first.c.priority == found.c.priority, first.c.fair_by == found.c.fair_by)
        .order_by(first.c.available_at)
        .limit(1)
        .scalar_subquery()
    )
    columns = (found.c.queue, found.c.priority, found.c.fair_by, next_at.label("next_at"), raw_moment(now()).label("moment"))
    return sa.select(*columns).select_from(lanes.join(found, found.c.id == lanes.c.id))


def _last_id(tables: Tables, queue: Any, before: sa.FromClause | None = None) -> sa.ScalarSelect[int]:
    row = tables.jobs.alias()
    query = sa.select(row.c.id).where(row.c.queue == queue).order_by(row.c.priority.desc(), row.c.fair_by.desc()).limit(1)
    if before is not None:
        query = query.where(sa.tuple_(row.c.priority, row.c.fair_by) < sa.tuple_(before.c.priority, before.c.fair_by))
    return query.scalar_subquery()
