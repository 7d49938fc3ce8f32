"""
Ending and extending deliveries, in groups, each row fenced by its own token.

Rows are locked first, in id order, passing over those that somebody else has locked; then exactly the locked ones are
changed. So a group never waits for a stranger, and groups never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from .._dialects import after, among, by_primary_key, delete_by_primary_key, fetch_raw, lock_by_primary_key, now, server_of, storable
from .._failure import CLASS_LENGTH, Failure
from .._tables import Tables
from .keys import free_keys
from .push import microseconds

__all__ = [
    "Complete",
    "Move",
    "Outcome",
    "Release",
    "Results",
    "Return",
    "Settlement",
    "failed_already",
    "last_errors",
    "lease_end",
    "lease_ended",
    "lost_leases",
    "move_to_failed",
    "renew",
    "settle",
]

GROUP = 500


@dataclass(frozen=True, slots=True)
class Complete:
    """
    Delete the row: done, or discarded.
    """


@dataclass(frozen=True, slots=True)
class Release:
    """
    Back on the queue.
    """

    delay: float
    error: str | None
    """What the attempt died of. None gives the attempt back."""


@dataclass(frozen=True, slots=True)
class Return:
    """
    Back to its place, as if it had not been claimed.
    """


@dataclass(frozen=True, slots=True)
class Move:
    """
    To the failed table.
    """

    failure: Failure
    worker: str | None
    attempts: int | None = None
    """What to record instead of the row's own count."""


Outcome = Complete | Release | Return | Move


class Settlement(NamedTuple):
    """
    How one delivery ends.
    """

    id: int
    token: str
    keyed: bool
    """The job holds a unique key."""
    outcome: Outcome


@dataclass(slots=True)
class Results:
    """
    What became of a group, by job id.
    """

    settled: set[int] = field(default_factory=set)
    stale: set[int] = field(default_factory=set)
    blocked: set[int] = field(default_factory=set)
    """Somebody else's open transaction holds the row or its key: try again."""


def settle(connection: sa.Connection, tables: Tables, group: Sequence[Settlement], *, repeated: bool = False) -> Results:
    """
    Settle at most `GROUP` deliveries.

    Args:
        repeated: an earlier try may have been applied although its answer was lost. What it would have left behind
            counts as settled.
    """
    results = Results()
    plain, others = _sort(group)
    for token, ids in plain.items():
        results.settled.update(_complete(connection, tables, token, ids))
    if others:
        _settle_others(connection, tables, others, results)
    if len(results.settled) < len(group):
        _sort_out_rest(connection, tables, group, results, repeated)
    return results


def _sort(group: Sequence[Settlement]) -> tuple[dict[str, list[int]], dict[int, Settlement]]:
    """
    What is only to be deleted, by token, which all jobs of a claim share; and everything else, by id.
    """
    plain: dict[str, list[int]] = {}
    others: dict[int, Settlement] = {}
    for settlement in group:
        if settlement.keyed or type(settlement.outcome) is not Complete:
            others[settlement.id] = settlement
        elif settlement.token in plain:
            plain[settlement.token].append(settlement.id)
        else:
            plain[settlement.token] = [settlement.id]
    return plain, others


def _complete(connection: sa.Connection, tables: Tables, token: str, ids: list[int]) -> Sequence[int]:
    """
    Delete those of the rows that carry the token and that nobody has locked; their ids.
    """
    ids.sort()
    fence = {"ids": ids, "token": token}
    if server_of(connection.dialect).writes_in_with:
        result = connection.execute(_delete_ours(tables, connection.dialect), fence)
        return ids if result.rowcount == len(ids) else [id for (id,) in fetch_raw(result)]
    # Nearly always all of them: not worth reading each.
    number = connection.execute(_lock_and_count_ours(tables, connection.dialect), fence).scalar_one()
    if number < len(ids):
        ids = [id for (id,) in fetch_raw(connection.execute(_lock_ours(tables, connection.dialect), fence))]
    if ids:
        connection.execute(_delete(tables.jobs, connection.dialect), {"ids": ids})
    return ids


def _settle_others(connection: sa.Connection, tables: Tables, by_id: dict[int, Settlement], results: Results) -> None:
    locked = _lock(connection, tables, list(by_id))
    ours = [by_id[row.id] for row in locked if row.held and row.reserved_token == by_id[row.id].token]
    blocked = free_keys(connection, tables, _leaving_with_keys(ours))
    ours = [settlement for settlement in ours if settlement.id not in blocked]
    _apply(connection, tables, ours)
    results.blocked |= blocked
    results.settled.update(settlement.id for settlement in ours)


def renew(connection: sa.Connection, tables: Tables, leases: Iterable[tuple[int, str]], seconds: float) -> set[int]:
    """
    Extend leases that are running and ours; the ids that were. Never shortens one, never revives one that has ended.
    """
    tokens = dict(leases)
    grace = server_of(connection.dialect).lease_grace
    ids = [row.id for row in _lock(connection, tables, list(tokens)) if row.held and row.running and row.reserved_token == tokens[row.id]]
    if ids:
        lengths = {"lease": microseconds(seconds), "reach": microseconds(seconds * (1 + grace))}
        connection.execute(_renew(tables, connection.dialect), lengths | {"ids": ids})
    return set(ids)


def lost_leases(connection: sa.Connection, tables: Tables, leases: Iterable[tuple[int, str]]) -> set[int]:
    """
    Those that are certainly not ours any more: gone, or under another token. A locked row may still be ours.
    """
    tokens = dict(leases)
    rows = connection.execute(_look(tables, connection.dialect), {"ids": list(tokens)}).all()
    return set(tokens) - {row.id for row in rows if row.held and row.reserved_token == tokens[row.id]}


def lease_end(connection: sa.Connection, tables: Tables, id: int, token: str) -> datetime | None:
    """
    When a lease ends, or None when it is not this token's.
    """
    jobs = tables.jobs.c
    query = sa.select(jobs.reserved_until).where(jobs.id == id, jobs.reserved_token == token)
    return connection.execute(query).scalar_one_or_none()


def lease_ended(connection: sa.Connection, tables: Tables, id: int) -> bool:
    """
    Whether the job may be claimed by anybody.
    """
    row = connection.execute(_look(tables, connection.dialect), {"ids": [id]}).one_or_none()
    return row is None or not row.running


def last_errors(connection: sa.Connection, tables: Tables, ids: Sequence[int]) -> dict[int, str | None]:
    """
    What the jobs' last failed attempts said, by id.
    """
    jobs = tables.jobs.c
    query = by_primary_key(sa.select(jobs.id, jobs.last_error).where(jobs.id.in_(ids)), tables.jobs)
    return {row.id: row.last_error for row in connection.execute(query)}


def failed_already(connection: sa.Connection, tables: Tables, ids: Sequence[int]) -> set[int]:
    """
    Those of the ids that the failed table has already.
    """
    return set(_failed_tokens(connection, tables, ids))


def move_to_failed(connection: sa.Connection, tables: Tables, moves: Sequence[Settlement]) -> set[int]:
    """
    Move rows that this transaction has locked or just taken; the ids of those whose key was not locked by somebody else.
    """
    blocked = free_keys(connection, tables, _leaving_with_keys(moves))
    moving = [move for move in moves if move.id not in blocked]
    _apply(connection, tables, moving)
    return {move.id for move in moving}


def _apply(connection: sa.Connection, tables: Tables, ours: Sequence[Settlement]) -> None:
    leaving: list[int] = []
    returning: list[int] = []
    released: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    for settlement in ours:
        match settlement.outcome:
            case Complete():
                leaving.append(settlement.id)
            case Return():
                returning.append(settlement.id)
            case Release() as release:
                released.append(_release_values(connection, settlement.id, release))
            case Move() as move:
                moved.append(_failed_values(connection, settlement.id, move))
                leaving.append(settlement.id)
    if released:
        connection.execute(_release(tables), released)
    if moved:
        connection.execute(_copy_to_failed(tables), moved)
    if returning:
        connection.execute(_return(tables, connection.dialect), {"ids": sorted(returning)})
    if leaving:
        connection.execute(_delete(tables.jobs, connection.dialect), {"ids": sorted(leaving)})


def _leaving_with_keys(settlements: Sequence[Settlement]) -> list[int]:
    return [settlement.id for settlement in settlements if settlement.keyed and isinstance(settlement.outcome, Complete | Move)]


def _lock(connection: sa.Connection, tables: Tables, ids: list[int]) -> Sequence[sa.Row[Any]]:
    return connection.execute(_locking_look(tables, connection.dialect), {"ids": sorted(ids)}).all() if ids else []


def _sort_out_rest(connection: sa.Connection, tables: Tables, group: Sequence[Settlement], results: Results, repeated: bool) -> None:
    """
    Those that could not be locked as ours: locked by somebody, stale, or settled by a try whose answer was lost.
    """
    by_id = {settlement.id: settlement for settlement in group}
    rest = set(by_id) - results.settled - results.blocked
    if not rest:
        return
    rows = {row.id: row for row in connection.execute(_look(tables, connection.dialect), {"ids": sorted(rest)})}
    failed = _failed_tokens(connection, tables, rest) if repeated else {}
    for id in rest:
        settlement, row = by_id[id], rows.get(id)
        mine = row is not None and row.reserved_token == settlement.token
        gone = row is None and id not in failed
        if mine and row is not None and row.held:
            results.blocked.add(id)
        elif repeated and _was_applied(settlement, mine, gone, failed.get(id)):
            results.settled.add(id)
        else:
            results.stale.add(id)


def _was_applied(settlement: Settlement, mine: bool, gone: bool, failed_token: str | None) -> bool:
    match settlement.outcome:
        case Complete():
            return gone
        case Release() | Return():
            return mine
        case Move():
            return failed_token == settlement.token


def _failed_tokens(connection: sa.Connection, tables: Tables, ids: Iterable[int]) -> dict[int, str | None]:
    failed = tables.failed.c
    rows = connection.execute(sa.select(failed.id, failed.token).where(failed.id.in_(sorted(ids))))
    return {row.id: row.token for row in rows}


def _state(tables: Tables) -> sa.Select[Any]:
    jobs = tables.jobs.c
    return sa.select(
        jobs.id,
        jobs.reserved_token,
        jobs.reserved_until.is_not(None).label("held"),
        (jobs.available_at > now()).label("running"),
    )


@lru_cache(maxsize=256)
def _look(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    return by_primary_key(_state(tables).where(among(dialect, tables.jobs.c.id)), tables.jobs)


@lru_cache(maxsize=256)
def _locking_look(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    return lock_by_primary_key(dialect, _state(tables), tables.jobs)


def _fenced(tables: Tables, what: sa.ColumnElement[Any]) -> sa.Select[Any]:
    jobs = tables.jobs.c
    return sa.select(what).where(jobs.reserved_token == sa.bindparam("token"), jobs.reserved_until.is_not(None))


@lru_cache(maxsize=256)
def _lock_ours(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    return lock_by_primary_key(dialect, _fenced(tables, tables.jobs.c.id), tables.jobs)


@lru_cache(maxsize=256)
def _lock_and_count_ours(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    return lock_by_primary_key(dialect, _fenced(tables, sa.func.count(tables.jobs.c.id)), tables.jobs, counting=True)


@lru_cache(maxsize=256)
def _delete_ours(tables: Tables, dialect: sa.Dialect) -> Any:
    """
    Lock and delete in one statement.
    """
    jobs = tables.jobs.c
    ours = _lock_ours(tables, dialect).cte("ours").prefix_with("MATERIALIZED")
    return sa.delete(tables.jobs).where(jobs.id == ours.c.id).returning(jobs.id)


@lru_cache(maxsize=256)
def _renew(tables: Tables, dialect: sa.Dialect) -> sa.Update:
    jobs = tables.jobs.c
    longer, reach = after(sa.bindparam("lease")), after(sa.bindparam("reach"))
    return (
        sa.update(tables.jobs)
        .where(among(dialect, jobs.id), jobs.reserved_until < longer)
        .values(reserved_until=longer, available_at=sa.case((jobs.available_at < reach, reach), else_=jobs.available_at))
    )


@lru_cache(maxsize=256)
def _release(tables: Tables) -> sa.Update:
    """
    The token stays: it proves, should the answer be lost, that it was this delivery that let go.
    """
    jobs = tables.jobs.c
    return (
        sa.update(tables.jobs)
        .where(jobs.id == sa.bindparam("released"))
        .values(
            reserved_until=None,
            reserved_by=None,
            available_at=after(sa.bindparam("delay")),
            attempts=sa.case((jobs.attempts >= sa.bindparam("back"), jobs.attempts - sa.bindparam("back")), else_=jobs.attempts),
            last_error=sa.func.coalesce(sa.bindparam("error", type_=sa.Text()), jobs.last_error),
        )
    )


@lru_cache(maxsize=256)
def _return(tables: Tables, dialect: sa.Dialect) -> sa.Update:
    jobs = tables.jobs.c
    return (
        sa.update(tables.jobs)
        .where(among(dialect, jobs.id))
        .values(
            reserved_until=None,
            reserved_by=None,
            # Claimed, so due: by the time that it was pushed for, it is where it was among the others.
            available_at=sa.case((jobs.due_at < now(), jobs.due_at), else_=now()),
            attempts=sa.case((jobs.attempts > 0, jobs.attempts - 1), else_=jobs.attempts),
        )
    )


def _release_values(connection: sa.Connection, id: int, release: Release) -> dict[str, Any]:
    back = 1 if release.error is None else 0
    error = None if release.error is None else storable(connection, release.error)
    return {"released": id, "delay": microseconds(release.delay), "back": back, "error": error}


@lru_cache(maxsize=256)
def _copy_to_failed(tables: Tables) -> sa.Insert:
    """
    The server copies the row, so a damaged payload arrives byte for byte.
    """
    jobs, failed = tables.jobs.c, tables.failed.c
    kept = [column.name for column in failed if column.name in jobs and column.name != "attempts"]
    added: dict[str, sa.ColumnElement[Any]] = {
        "attempts": sa.func.coalesce(sa.bindparam("attempts", type_=sa.Integer()), jobs.attempts),
        "reason": sa.bindparam("reason", type_=sa.String()),
        "error_class": sa.bindparam("error_class", type_=sa.String()),
        "error_message": sa.bindparam("message", type_=sa.Text()),
        "traceback": sa.bindparam("trace", type_=sa.Text()),
        "token": jobs.reserved_token,
        "worker": sa.bindparam("worker", type_=sa.String()),
        "failed_at": now(),
    }
    source = sa.select(*(jobs[name] for name in kept), *(value.label(name) for name, value in added.items()))
    return sa.insert(tables.failed).from_select([*kept, *added], source.where(jobs.id == sa.bindparam("moved")))


def _failed_values(connection: sa.Connection, id: int, move: Move) -> dict[str, Any]:
    failure = move.failure
    return {
        "moved": id,
        "attempts": move.attempts,
        "reason": failure.reason.value,
        "error_class": failure.error_class and storable(connection, failure.error_class)[:CLASS_LENGTH],
        "message": storable(connection, failure.message),
        "trace": failure.traceback and storable(connection, failure.traceback),
        "worker": move.worker,
    }


@lru_cache(maxsize=256)
def _delete(table: sa.Table, dialect: sa.Dialect) -> sa.Executable:
    return delete_by_primary_key(dialect, table)
