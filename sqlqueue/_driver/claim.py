"""
Taking ready jobs of one lane for a lease.

Two bodies: one statement where a server can update from a locking read and return the rows, elsewhere a locking read and a
guarded UPDATE in one short transaction. Either way safety rests on the guard in the UPDATE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from .._dialects import Server, after, among, by_ready_index, fetch_raw, moment_of, now, raw_moment, raw_parameter, server_of
from .._tables import Tables
from .lanes import Lane, in_lane
from .push import microseconds
from .settle import GROUP

__all__ = ["ClaimedRow", "Company", "Lease", "claim_lane", "claim_plain", "company_of", "put_back", "taken_under"]

READABLE = datetime(1000, 1, 2, tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


class Company(IntEnum):
    """
    What else runs in this process that came from a worker that died. One of those may be what killed it.

    A job on its last attempt must not die for a neighbour's fault, so it runs beside no other such job.
    """

    NONE = 0
    RECLAIMED = 1
    ON_LAST_ATTEMPT = 2


@dataclass(frozen=True, slots=True)
class Lease:
    """
    What a claim writes into the rows it takes.
    """

    token: str
    worker: str
    seconds: float
    not_repeated: frozenset[str] = frozenset()
    """The names of jobs that have failed when a lease on them has ended."""


class ClaimedRow(NamedTuple):
    """
    A row as it was found, and the lease it is under now. Moments are as the driver reads them.
    """

    id: int
    name: str
    payload: Any
    attempts: int
    max_attempts: int
    headers: str | None
    deadline: Any
    unique_key: str | None
    due: Any
    """Since when it could be claimed; good for comparing."""
    reserved_until: Any
    reserved_by: str | None
    reserved_token: str | None
    doom: str | None
    """Why the job is not to be run: "damaged", "exhausted", "lost" or "deadline"."""
    lease_until: Any

    @property
    def reclaimed(self) -> bool:
        """
        A lease on it ended before it was settled.
        """
        return self.reserved_until is not None

    @property
    def comes_back(self) -> bool:
        """
        It is to be run, and a lease on it ended before.
        """
        return self.reclaimed and self.doom is None

    @property
    def last_attempt(self) -> bool:
        return self.attempts + 1 >= self.max_attempts


@dataclass(frozen=True, slots=True)
class _Terms:
    """
    What the statement of a claim depends on, beside its parameters.
    """

    company: Company
    ahead: bool
    choosy: bool
    """There are jobs that must not be run again after their worker died."""
    plain: bool = False
    """Only jobs that nobody has had, that may be run, and that hold no key."""


def claim_lane(
    connection: sa.Connection,
    tables: Tables,
    lane: Lane,
    limit: int,
    lease: Lease,
    *,
    begin: Any,
    company: Company = Company.NONE,
    ahead: bool = False,
) -> list[ClaimedRow]:
    """
    Take up to `limit` of the lane's ready rows, those that are due first, and those that must not run at all; in no order.

    Rows that may not run beside `company`, or beside each other, are left exactly as they were found.

    Args:
        begin: rows that may have been claimed before this moment are not looked for: the lane's `first`, or a row's `due`.
        ahead: the rows will wait in memory. Those that the death of this process would cost more than an attempt are left.
    """
    server = server_of(connection.dialect)
    parameters = _parameters(server, lane, limit, lease, begin)
    if lease.not_repeated:
        parameters["not_repeated"] = sorted(lease.not_repeated)
    terms = _Terms(company, ahead, bool(lease.not_repeated))
    body = _claim_in_one_statement if server.claim_in_one_statement else _claim_in_two_statements
    return body(connection, tables, server, terms, parameters)


def claim_plain(connection: sa.Connection, tables: Tables, lane: Lane, limit: int, lease: Lease) -> list[ClaimedRow]:
    """
    Take up to `limit` ready rows of the lane that nobody has had, that may be run, and that hold no key, in one statement
    that needs no transaction around it. For servers that can claim in one.
    """
    server = server_of(connection.dialect)
    terms = _Terms(Company.NONE, ahead=False, choosy=False, plain=True)
    return _claim_in_one_statement(connection, tables, server, terms, _parameters(server, lane, limit, lease, lane.first))


def company_of(rows: Iterable[tuple[bool, bool]], company: Company = Company.NONE) -> Company:
    """
    The company that (reclaimed, on its last attempt) jobs make, added to what is there already.
    """
    for reclaimed, last in rows:
        if reclaimed:
            company = max(company, Company.ON_LAST_ATTEMPT if last else Company.RECLAIMED)
    return company


def put_back(connection: sa.Connection, tables: Tables, rows: Iterable[ClaimedRow], pause: float) -> None:
    """
    Leave rows that this transaction has taken as they were found, but out of reach for `pause` seconds.
    """
    for row in rows:
        values = {
            "back": row.id,
            "used": row.attempts,
            "until": moment_of(row.reserved_until),
            "by": row.reserved_by,
            "found_token": row.reserved_token,
            "pause": microseconds(pause),
        }
        connection.execute(_put_back(tables), values)


def taken_under(connection: sa.Connection, tables: Tables, lanes: Iterable[Lane], lease: Lease) -> list[int]:
    """
    The jobs of these lanes that a claim with this lease has taken, in case nobody heard its answer.
    """
    ids: list[int] = []
    reach = microseconds(lease.seconds * (1 + server_of(connection.dialect).lease_grace))
    for lane in lanes:
        where = {"in_queue": lane.queue, "in_priority": lane.priority, "in_fair_by": lane.fair_by}
        ids += connection.execute(_taken_under(tables), where | {"reach": reach, "token": lease.token}).scalars()
    return ids


def _parameters(server: Server, lane: Lane, limit: int, lease: Lease, begin: Any) -> dict[str, Any]:
    return {
        "in_queue": lane.queue,
        "in_priority": lane.priority,
        "in_fair_by": lane.fair_by,
        "begin": begin,
        "most": limit,
        "lease": microseconds(lease.seconds),
        "reach": microseconds(lease.seconds * (1 + server.lease_grace)),
        "worker": lease.worker,
        "token": lease.token,
    }


def _claim_in_one_statement(
    connection: sa.Connection, tables: Tables, server: Server, terms: _Terms, parameters: dict[str, Any]
) -> list[ClaimedRow]:
    return [ClaimedRow._make(row) for row in fetch_raw(connection.execute(_claim(tables, server, terms), parameters))]


def _claim_in_two_statements(
    connection: sa.Connection, tables: Tables, server: Server, terms: _Terms, parameters: dict[str, Any]
) -> list[ClaimedRow]:
    names = ("in_queue", "in_priority", "in_fair_by", "begin", "most", "lease", "not_repeated")
    reading = {name: parameters[name] for name in names if name in parameters}
    found = [ClaimedRow._make(row) for row in fetch_raw(connection.execute(_candidates(tables, server, terms), reading))]
    picked = _pick(found)
    if not picked:
        return []
    starting = [row.id for row in picked if row.doom is None]
    doomed = [row.id for row in picked if row.doom is not None]
    taken: set[int] = set()
    for ids, started in ((starting, 1), (doomed, 0)):
        for start in range(0, len(ids), GROUP):
            taken |= _take(connection, tables, ids[start : start + GROUP], started, parameters)
    return [row for row in picked if row.id in taken]


def _take(connection: sa.Connection, tables: Tables, ids: list[int], started: int, parameters: dict[str, Any]) -> set[int]:
    values = {name: parameters[name] for name in ("lease", "reach", "worker", "token")} | {"ids": ids, "started": started}
    if connection.execute(_guarded_update(tables, connection.dialect), values).rowcount == len(ids):
        return set(ids)
    # Without row locks another claim may have come between the two statements: only what carries our token is ours.
    return set(connection.execute(_ours(tables, connection.dialect), {"ids": ids, "token": parameters["token"]}).scalars())


def _pick(found: Sequence[ClaimedRow]) -> list[ClaimedRow]:
    """
    Leave out what may not run beside the first row that comes back from a dead worker.
    """
    first = next((row for row in found if row.comes_back), None)
    if first is None:
        return list(found)
    if first.last_attempt:
        return [row for row in found if row is first or not row.comes_back]
    return [row for row in found if not row.comes_back or not row.last_attempt]


def _doom(jobs: Any, choosy: bool) -> sa.ColumnElement[str | None]:
    reasons = {
        "damaged": sa.or_(jobs.attempts < 0, jobs.max_attempts < 1),
        "exhausted": jobs.attempts >= jobs.max_attempts,
        "lost": sa.and_(jobs.reserved_until.is_not(None), jobs.name.in_(sa.bindparam("not_repeated", expanding=True))),
        "deadline": jobs.deadline <= now(),
    }
    if not choosy:
        del reasons["lost"]
    return sa.case(*((condition, sa.literal_column(f"'{word}'", sa.String())) for word, condition in reasons.items()), else_=sa.null())


def _last_attempt(jobs: Any) -> sa.ColumnElement[bool]:
    # A damaged row may hold the largest number that fits: one more must not be an error that stops the lane.
    last: sa.ColumnElement[bool] = sa.cast(jobs.attempts, sa.BigInteger()) + 1 >= jobs.max_attempts
    return last


def _may_wait(jobs: Any, choosy: bool) -> list[sa.ColumnElement[bool]]:
    """
    Should this process die, the job has another attempt.
    """
    repeated = [jobs.name.not_in(sa.bindparam("not_repeated", expanding=True))] if choosy else []
    return [sa.not_(_last_attempt(jobs)), *repeated]


@lru_cache(maxsize=256)
def _candidates(tables: Tables, server: Server, terms: _Terms) -> sa.Select[Any]:
    """
    Ready rows of a lane in due order, locked, without those that may not be taken on these terms.
    """
    jobs = tables.jobs.c
    doom = _doom(jobs, terms.choosy)
    query = (
        sa.select(
            jobs.id,
            jobs.name,
            jobs.payload,
            jobs.attempts,
            jobs.max_attempts,
            jobs.headers,
            # Not what no datetime can hold, as PostgreSQL's infinity: reading it would fail, and stop the lane.
            sa.case((jobs.deadline.between(*READABLE), jobs.deadline)).label("deadline"),
            jobs.unique_key,
            raw_moment(jobs.available_at).label("due"),
            jobs.reserved_until,
            jobs.reserved_by,
            jobs.reserved_token,
            doom.label("doom"),
            raw_moment(after(sa.bindparam("lease"))).label("lease_until"),
        )
        .where(*in_lane(tables), jobs.available_at >= raw_parameter("begin"), jobs.available_at <= now())
        .order_by(jobs.available_at, jobs.id)
        .limit(sa.bindparam("most", type_=sa.Integer()))
    )
    fresh = jobs.reserved_until.is_(None)
    if terms.plain:
        query = query.where(fresh, doom.is_(None), jobs.unique_key.is_(None))  # a key may have to be freed as well
    elif terms.ahead:
        query = query.where(sa.or_(doom.is_not(None), sa.and_(fresh, *_may_wait(jobs, terms.choosy))))
    elif terms.company is Company.RECLAIMED:
        query = query.where(sa.or_(fresh, doom.is_not(None), sa.not_(_last_attempt(jobs))))
    elif terms.company is Company.ON_LAST_ATTEMPT:
        query = query.where(sa.or_(fresh, doom.is_not(None)))
    if server.row_locks:
        query = query.with_for_update(skip_locked=server.skip_locked)
    return by_ready_index(query, tables)


@lru_cache(maxsize=256)
def _claim(tables: Tables, server: Server, terms: _Terms) -> sa.Update:
    """
    `_candidates`, `_pick` and the guarded UPDATE in one statement.
    """
    found = _candidates(tables, server, terms).cte("found").prefix_with("MATERIALIZED")
    if terms.ahead or terms.plain:
        return _take_all_of(found, tables)
    comes_back = sa.and_(found.c.reserved_until.is_not(None), found.c.doom.is_(None)).label("comes_back")
    last = _last_attempt(found.c).label("last")
    # Numbered as they come, which is the order of the index: a window with an order of its own would sort.
    numbered = sa.select(found, comes_back, last, sa.func.row_number().over().label("place")).cte("numbered")
    first = sa.select(numbered.c.place, numbered.c.last).where(numbered.c.comes_back).limit(1).cte("first")
    alone = sa.or_(numbered.c.place == first.c.place, sa.not_(sa.or_(numbered.c.last, first.c.last)))
    picked = (
        sa.select(numbered)
        .select_from(numbered.outerjoin(first, sa.true()))
        .where(sa.or_(sa.not_(numbered.c.comes_back), alone))
        .cte("picked")
    )
    return _take_all_of(picked, tables)


def _take_all_of(picked: sa.CTE, tables: Tables) -> sa.Update:
    return (
        _lease(sa.update(tables.jobs), tables, sa.case((picked.c.doom.is_(None), 1), else_=0))
        .where(tables.jobs.c.id == picked.c.id, tables.jobs.c.available_at <= now())
        .returning(*(column for column in picked.c if column.name in ClaimedRow._fields))
    )


@lru_cache(maxsize=256)
def _guarded_update(tables: Tables, dialect: sa.Dialect) -> sa.Update:
    jobs = tables.jobs.c
    return _lease(sa.update(tables.jobs), tables, sa.bindparam("started", type_=sa.Integer())).where(
        among(dialect, jobs.id), jobs.available_at <= now()
    )


def _lease(update: sa.Update, tables: Tables, started: sa.ColumnElement[int]) -> sa.Update:
    return update.values(
        attempts=tables.jobs.c.attempts + started,
        reserved_until=after(sa.bindparam("lease")),
        available_at=after(sa.bindparam("reach")),
        reserved_by=sa.bindparam("worker"),
        reserved_token=sa.bindparam("token"),
    )


@lru_cache(maxsize=256)
def _ours(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    jobs = tables.jobs.c
    return sa.select(jobs.id).where(among(dialect, jobs.id), jobs.reserved_token == sa.bindparam("token"))


@lru_cache(maxsize=256)
def _put_back(tables: Tables) -> sa.Update:
    jobs = tables.jobs.c
    return (
        sa.update(tables.jobs)
        .where(jobs.id == sa.bindparam("back"))
        .values(
            attempts=sa.bindparam("used"),
            reserved_until=sa.bindparam("until"),
            reserved_by=sa.bindparam("by"),
            reserved_token=sa.bindparam("found_token"),
            available_at=after(sa.bindparam("pause")),
        )
    )


@lru_cache(maxsize=256)
def _taken_under(tables: Tables) -> sa.Select[Any]:
    jobs = tables.jobs.c
    query = sa.select(jobs.id).where(
        *in_lane(tables),
        jobs.available_at > now(),
        jobs.available_at <= after(sa.bindparam("reach")),
        jobs.reserved_token == sa.bindparam("token"),
    )
    return by_ready_index(query, tables)
