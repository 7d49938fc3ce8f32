"""
Ends of keys: freed by the claim or the settlement of their jobs, or swept when their time is over.

Rows of keys that somebody else has locked are passed over, so that nobody here waits for a producer's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import among, delete_by_primary_key, lock_by_primary_key, now
from .._tables import Tables
from .holders import LET_GO, UNTIL_STARTED, kept

__all__ = ["LONGEST_AGO", "delete_expired", "expired_keys", "free_keys", "let_go"]

GROUP = 500
SWEPT, LOOKED_AT = 100, 1000
LONGEST_AGO = datetime(1000, 1, 2, tzinfo=UTC)


def free_keys(connection: sa.Connection, tables: Tables, ids: Sequence[int]) -> set[int]:
    """
    Free the keys of these jobs, which leave the table; the ids whose key somebody else has locked, so that they have to stay.
    """
    if not ids:
        return set()
    names = {row.id: row.unique_key for row in connection.execute(_key_names(tables, connection.dialect), {"ids": ids})}
    if not names:
        return set()
    held = connection.execute(_locking_keys(tables, connection.dialect), {"ids": sorted(set(names.values()))}).all()
    free = {row.key for row in held}
    missing = sorted(set(names.values()) - free)
    # Not returned: gone, or locked by somebody. A read without locks tells one from the other.
    locked = set(connection.execute(_keys_present(tables, connection.dialect), {"ids": missing}).scalars()) if missing else set()
    ending = sorted(row.key for row in held if not row.kept and names.get(row.job_id) == row.key)
    if ending:
        connection.execute(_delete_keys(tables, connection.dialect), {"ids": ending})
    return {id for id, name in names.items() if name in locked}


def let_go(connection: sa.Connection, tables: Tables, jobs: Collection[tuple[int, str]]) -> tuple[set[int], set[int]]:
    """
    Of jobs (id, key) that this transaction has claimed, free the keys that are held until the job starts.

    Returns:
        The ids whose key is theirs no more, and the ids whose key somebody else has locked: a push that is a duplicate of a
        job that waits, and may have more to tell than the job would see if it started now.
    """
    free: set[int] = set()
    blocked: set[int] = set()
    for group in _groups(sorted(jobs)):
        ids = {id for id, _ in group}
        marked = connection.execute(_keys_until_started(tables, connection.dialect), {"ids": sorted({key for _, key in group})})
        starting = {row.key: row.job_id for row in marked if row.job_id in ids}
        if not starting:
            continue
        locked = connection.execute(_locking_keys(tables, connection.dialect), {"ids": sorted(starting)}).all()
        ours = [row for row in locked if row.job_id in ids]
        _end_keys(connection, tables, [row.key for row in ours if not row.kept], [row.key for row in ours if row.kept])
        freed = sorted(row.job_id for row in ours)
        if freed:
            connection.execute(_forget_key(tables, connection.dialect), {"ids": freed})
        free.update(freed)
        blocked |= set(starting.values()) - {row.job_id for row in locked}
    return free, blocked


def expired_keys(connection: sa.Connection, tables: Tables, since: datetime) -> tuple[list[str], datetime]:
    """
    Some of the keys whose time was over after `since` and that no job holds.

    Returns:
        The keys, and since when to look next time: many keys that waiting jobs hold must not hide the others for ever.
    """
    rows = sorted(connection.execute(_expired(tables), {"since": since}), key=lambda row: row.expires_at)
    free = [row.key for row in rows if not row.held]
    if len(free) > SWEPT:
        return free[:SWEPT], since
    return free, rows[-1].expires_at if len(rows) == LOOKED_AT else LONGEST_AGO


def delete_expired(connection: sa.Connection, tables: Tables, keys: Sequence[str]) -> int:
    """
    Delete those of the keys that are still expired, and that nobody has locked; how many.
    """
    ending = list(connection.execute(_locking_expired(tables, connection.dialect), {"ids": sorted(keys)}).scalars())
    if ending:
        connection.execute(_delete_keys(tables, connection.dialect), {"ids": sorted(ending)})
    return len(ending)


def _groups(jobs: Sequence[tuple[int, str]]) -> Iterator[Sequence[tuple[int, str]]]:
    for start in range(0, len(jobs), GROUP):
        yield jobs[start : start + GROUP]


def _end_keys(connection: sa.Connection, tables: Tables, ending: list[str], kept: list[str]) -> None:
    if ending:
        connection.execute(_delete_keys(tables, connection.dialect), {"ids": sorted(ending)})
    if kept:
        connection.execute(_mark_let_go(tables, connection.dialect), {"ids": sorted(kept)})


def _unheld(tables: Tables) -> sa.ColumnElement[bool]:
    jobs, keys = tables.jobs.c, tables.keys.c
    return ~sa.exists().where(jobs.id == keys.job_id, jobs.unique_key == keys.key)


@lru_cache(maxsize=256)
def _key_names(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    jobs = tables.jobs.c
    return sa.select(jobs.id, jobs.unique_key).where(among(dialect, jobs.id), jobs.unique_key.is_not(None))


@lru_cache(maxsize=256)
def _locking_keys(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    keys = tables.keys.c
    return lock_by_primary_key(dialect, sa.select(keys.key, keys.job_id, kept(tables)), tables.keys)


@lru_cache(maxsize=256)
def _keys_present(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    return sa.select(tables.keys.c.key).where(among(dialect, tables.keys.c.key))


@lru_cache(maxsize=256)
def _keys_until_started(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    keys = tables.keys.c
    return sa.select(keys.key, keys.job_id).where(among(dialect, keys.key), keys.owner == UNTIL_STARTED)


@lru_cache(maxsize=256)
def _delete_keys(tables: Tables, dialect: sa.Dialect) -> sa.Executable:
    return delete_by_primary_key(dialect, tables.keys)


@lru_cache(maxsize=256)
def _mark_let_go(tables: Tables, dialect: sa.Dialect) -> sa.Update:
    return sa.update(tables.keys).where(among(dialect, tables.keys.c.key)).values(owner=LET_GO)


@lru_cache(maxsize=256)
def _forget_key(tables: Tables, dialect: sa.Dialect) -> sa.Update:
    return sa.update(tables.jobs).where(among(dialect, tables.jobs.c.id)).values(unique_key=None)


@lru_cache(maxsize=256)
def _expired(tables: Tables) -> sa.Select[Any]:
    keys, jobs = tables.keys.c, tables.jobs.c
    first = (
        sa.select(keys.key, keys.job_id, keys.expires_at)
        .where(keys.expires_at <= now(), keys.expires_at > sa.bindparam("since", type_=keys.expires_at.type))
        .order_by(keys.expires_at)
        .limit(LOOKED_AT)
        .subquery("expired")
    )
    holding = sa.and_(jobs.id == first.c.job_id, jobs.unique_key == first.c.key)
    return sa.select(first.c.key, first.c.expires_at, jobs.id.is_not(None).label("held")).select_from(first.outerjoin(tables.jobs, holding))


@lru_cache(maxsize=256)
def _locking_expired(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    keys = tables.keys.c
    still = sa.select(keys.key).where(keys.expires_at <= now(), _unheld(tables))
    return lock_by_primary_key(dialect, still, tables.keys)
