"""
Ends of keys: freed by the claim or the settlement of their jobs.

Rows of keys that somebody else has locked are passed over, so that nobody here waits for a producer's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import among, delete_by_primary_key, lock_by_primary_key
from .._tables import Tables
from .holders import LET_GO, UNTIL_STARTED, kept

__all__ = ["free_keys", "let_go"]

GROUP = 500


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


def _groups(jobs: Sequence[tuple[int, str]]) -> Iterator[Sequence[tuple[int, str]]]:
    for start in range(0, len(jobs), GROUP):
        yield jobs[start : start + GROUP]


def _end_keys(connection: sa.Connection, tables: Tables, ending: list[str], kept: list[str]) -> None:
    if ending:
        connection.execute(_delete_keys(tables, connection.dialect), {"ids": sorted(ending)})
    if kept:
        connection.execute(_mark_let_go(tables, connection.dialect), {"ids": sorted(kept)})


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
