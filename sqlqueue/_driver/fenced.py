"""
A job's row in the transaction of its own handler: deleted as the last thing, and locked as the first where that is needed.

Deleting it first would fence as well. But what ends the transaction early (a commit of the handler's, on InnoDB any CREATE or
TRUNCATE) would complete a job that is half done, and lose it if the handler raises or dies then.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import now, server_of, snapshot_is_strict
from .._tables import Tables

__all__ = ["Fate", "complete_own", "fate_of", "lock_delivery", "needs_lock"]


class Fate(Enum):
    """
    What became of a transaction that was to delete a job's row, and whose COMMIT got no answer.
    """

    COMMITTED = "the row is gone"
    UNDONE = "the row is there, and nobody holds it"
    OPEN = "the row is locked: the server may still be about to commit"


def needs_lock(connection: sa.Connection) -> bool:
    """
    Whether the row has to be locked before the handler starts: a renewal meanwhile would spoil the DELETE, or, where rows cannot be
    locked, whoever reads first could not write later.
    """
    return not server_of(connection.dialect).row_locks or snapshot_is_strict(connection)


def lock_delivery(connection: sa.Connection, tables: Tables, id: int, token: str) -> bool:
    """
    Lock the row until the transaction ends; False when it is not this delivery's any more.

    Claims and renewals pass over a locked row: nobody else can take the job, however long it takes, and nothing changes the row
    after the transaction's snapshot. Where rows cannot be locked, the whole database is, by a write that changes nothing.
    """
    if server_of(connection.dialect).row_locks:
        return connection.execute(_lock(tables), {"locked": id, "token": token}).first() is not None
    return connection.execute(_touch(tables), {"locked": id, "token": token}).rowcount == 1


def complete_own(connection: sa.Connection, tables: Tables, id: int, token: str, *, keyed: bool) -> bool:
    """
    Delete the row, and free the unique key that the job holds; False when it is not this delivery's: then roll back.

    The row first, as every settlement does. Freeing the key waits for open transactions that have pushed a duplicate of it.
    """
    values = {"locked": id, "token": token}
    key = connection.execute(_key_of(tables), values).scalar_one_or_none() if keyed else None
    if connection.execute(_delete(tables), values).rowcount != 1:
        return False
    if key is not None:
        connection.execute(_free(tables), {"id": id, "name": key})
    return True


def fate_of(connection: sa.Connection, tables: Tables, id: int) -> Fate:
    """
    Look in a transaction of its own, one that writes, after the connection of the one in question is closed.
    """
    server = server_of(connection.dialect)
    row = sa.select(tables.jobs.c.id).where(tables.jobs.c.id == id)
    locking = row.with_for_update(skip_locked=server.skip_locked) if server.row_locks else row
    if connection.execute(locking).first() is not None:
        return Fate.UNDONE
    if connection.execute(row).first() is not None:
        return Fate.OPEN
    # Another claim has moved it away: ours has not been committed.
    failed = connection.execute(sa.select(tables.failed.c.id).where(tables.failed.c.id == id)).first()
    return Fate.COMMITTED if failed is None else Fate.UNDONE


def _ours(tables: Tables) -> tuple[sa.ColumnElement[bool], ...]:
    jobs = tables.jobs.c
    return (jobs.id == sa.bindparam("locked"), jobs.reserved_token == sa.bindparam("token"), jobs.reserved_until.is_not(None))


@lru_cache(maxsize=256)
def _lock(tables: Tables) -> sa.Select[Any]:
    return sa.select(tables.jobs.c.id).where(*_ours(tables)).with_for_update()


@lru_cache(maxsize=256)
def _touch(tables: Tables) -> sa.Update:
    return sa.update(tables.jobs).where(*_ours(tables)).values(reserved_token=tables.jobs.c.reserved_token)


@lru_cache(maxsize=256)
def _key_of(tables: Tables) -> sa.Select[Any]:
    return sa.select(tables.jobs.c.unique_key).where(*_ours(tables))


@lru_cache(maxsize=256)
def _delete(tables: Tables) -> sa.Delete:
    return sa.delete(tables.jobs).where(*_ours(tables))


@lru_cache(maxsize=256)
def _free(tables: Tables) -> sa.Delete:
    keys = tables.keys.c
    kept = sa.and_(keys.expires_at.is_not(None), keys.expires_at > now())
    return sa.delete(tables.keys).where(keys.key == sa.bindparam("name"), keys.job_id == sa.bindparam("id"), sa.not_(kept))
