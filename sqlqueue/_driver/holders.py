"""
Who holds a unique key: asked and changed by those who push, in the caller's transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import after, insert_if_absent, insert_or_lock, now, server_of
from .._tables import Tables
from ..errors import LockTimeout

__all__ = [
    "KEY_ROUNDS",
    "LET_GO",
    "PLAIN",
    "UNTIL_STARTED",
    "Hold",
    "Holder",
    "find_holder",
    "hold_columns",
    "hold_differently",
    "hold_values",
    "kept",
    "own_key",
    "pass_on",
    "take_key",
    "take_once",
]

KEY_ROUNDS = 5
UNTIL_STARTED, LET_GO = "until-started", "let-go"
"""What a key's row says in `owner`: its job frees the key when it is claimed; it has done so, and only time keeps the key."""


@dataclass(frozen=True, slots=True)
class Hold:
    """
    How a job holds its key, and what becomes of a push that finds it taken.
    """

    until_started: bool = False
    kept_for: int | None = None
    """Microseconds from the push for which the key stays taken, whatever becomes of the job."""
    replaces: bool = False
    """The waiting job that holds the key becomes the job that is pushed."""

    @property
    def owner(self) -> str | None:
        return UNTIL_STARTED if self.until_started else None


PLAIN = Hold()


@dataclass(frozen=True, slots=True)
class Holder:
    """
    What a key's row says. Neither present nor kept: nobody holds the key, it has been taken for us, and a job has to be
    written into it.
    """

    key: str
    job_id: int | None = None
    present: bool = False
    """The job exists and holds the key."""
    waiting: bool = False
    """As far as a read without a lock can tell, the job has not started."""
    kept: bool = False
    """The key is taken for a time, whether the job exists or not."""
    owner: str | None = None

    @property
    def alive(self) -> bool:
        return self.present or self.kept


def find_holder(connection: sa.Connection, tables: Tables, key: str, *, replacing: bool = False) -> Holder | None:
    """
    Take the key for us, or say who holds it, or None to look again.

    Args:
        replacing: the row is going to be changed, so it is locked for us alone: neither the holder's settlement nor another
            push changes it before our transaction ends.
    """
    insert = insert_or_lock if replacing else insert_if_absent
    if insert(connection, tables.keys, {"key": key}):
        return Holder(key)
    holder = _read_key(connection, tables, key, replacing)
    if holder is None or holder.alive or (replacing and holder.job_id is None):
        return holder
    taken = connection.execute(_take_over(tables), {"taken": key, "old": holder.job_id or 0}).rowcount
    return Holder(key) if taken else None


def take_key(connection: sa.Connection, tables: Tables, key: str, job_id: int) -> bool:
    """
    Give the key to a job that is written in this transaction, if it is free or has been kept for that very job.
    """
    holder = find_holder(connection, tables, key)
    if holder is None:
        return False
    if holder.alive:
        if holder.job_id != job_id:
            return False
        locked = connection.execute(_look_locked(tables, True), {"taken": key}).one_or_none()
        return locked is not None and locked.job_id == job_id
    own_key(connection, tables, key, job_id, PLAIN)
    return True


def own_key(connection: sa.Connection, tables: Tables, key: str, job_id: int, hold: Hold) -> None:
    """
    Write the job into the key that has been taken for it. Not before the job is there: a caller who commits in spite of an
    error in between leaves a key that nobody holds.
    """
    values = {"taken": key, "id": job_id, **hold_values(hold)}
    connection.execute(_own_key(tables, hold.kept_for is not None), values)


def pass_on(connection: sa.Connection, tables: Tables, holder: Holder, job_id: int, hold: Hold) -> None:
    """
    Let the new job hold the key that we have locked instead of one that has started. A time that it is kept for goes on.
    """
    values = {"taken": holder.key, "old": holder.job_id, "id": job_id, "owner": hold.owner}
    connection.execute(_pass_on(tables), values)


def hold_differently(connection: sa.Connection, tables: Tables, holder: Holder, hold: Hold) -> None:
    """
    Let the holder of the key that we have locked hold it as the new push says.
    """
    if holder.owner != hold.owner and holder.job_id is not None:
        pass_on(connection, tables, holder, holder.job_id, hold)


def hold_columns(tables: Tables, keeps: bool) -> dict[str, sa.ColumnElement[Any]]:
    """
    What a key's row says beside its job.
    """
    ends = after(sa.bindparam("kept_for")) if keeps else sa.null()
    return {"owner": sa.bindparam("owner", type_=tables.keys.c.owner.type), "expires_at": ends}


def hold_values(hold: Hold) -> dict[str, Any]:
    """
    The parameters of `hold_columns`.
    """
    return {"owner": hold.owner} | ({} if hold.kept_for is None else {"kept_for": hold.kept_for})


def take_once(connection: sa.Connection, tables: Tables, key: str, kept_for: int | None) -> bool:
    """
    Whether nobody has taken this key, which no job holds, in a committed transaction and for a time that is not over.
    """
    ends = None if kept_for is None else after(kept_for)
    for _ in range(KEY_ROUNDS):
        if insert_if_absent(connection, tables.keys, {"key": key, "expires_at": ends}):
            return True
        expired = connection.execute(_look_whether_expired(tables, server_of(connection.dialect).snapshot_reads), {"taken": key}).scalar()
        if expired is None:
            continue  # it was swept between the two statements
        if not expired:
            return False
        if connection.execute(_take_again(tables).values(expires_at=ends), {"taken": key}).rowcount:
            return True
    raise LockTimeout("the key changed hands at every look; nothing was written, try again")


def kept(tables: Tables) -> sa.ColumnElement[bool]:
    """
    Whether the time that a key is taken for is not over.
    """
    return sa.and_(tables.keys.c.expires_at.is_not(None), tables.keys.c.expires_at > now()).label("kept")


def _read_key(connection: sa.Connection, tables: Tables, key: str, replacing: bool) -> Holder | None:
    server = server_of(connection.dialect)
    if server.snapshot_reads or (replacing and server.row_locks):
        return _read_locked(connection, tables, key, replacing)
    seen = connection.execute(_look(tables), {"taken": key}).one_or_none()
    if seen is None:
        return None
    holder = Holder(key, seen.job_id, seen.present is not None, bool(seen.waiting), bool(seen.kept), seen.owner)
    if not holder.present or holder.owner != UNTIL_STARTED or not server.row_locks:
        return holder
    # The job must not start before the caller commits: it would not see what the caller has written, and this push, which
    # was to tell of it, would be the duplicate of a job that has read already.
    locked = connection.execute(_look_locked(tables, False), {"taken": key}).one_or_none()
    return holder if locked is not None and (locked.job_id, locked.owner) == (seen.job_id, seen.owner) else None


def _read_locked(connection: sa.Connection, tables: Tables, key: str, replacing: bool) -> Holder | None:
    """
    The key's row as it is now, and whether its job is there although a snapshot may be older than both.

    A job is written with its key: when the snapshot shows both the key with this id and no job, the job is gone; when it
    does not show that key, the job came later and is there.
    """
    locked = connection.execute(_look_locked(tables, replacing), {"taken": key}).one_or_none()
    if locked is None:
        return None
    if locked.job_id is None:  # what remains when the caller commits in spite of an error between key and job
        return Holder(key, kept=bool(locked.kept))
    seen = connection.execute(_look(tables), {"taken": key}).one_or_none()
    gone = locked.owner == LET_GO or (seen is not None and seen.job_id == locked.job_id and seen.present is None)
    waiting = seen is None or seen.job_id != locked.job_id or bool(seen.waiting)
    return Holder(key, locked.job_id, not gone, waiting, bool(locked.kept), locked.owner)


@lru_cache(maxsize=256)
def _look(tables: Tables) -> sa.Select[Any]:
    keys, jobs = tables.keys.c, tables.jobs.c
    joined = tables.keys.outerjoin(tables.jobs, sa.and_(jobs.id == keys.job_id, jobs.unique_key == keys.key))
    waiting = sa.and_(jobs.id.is_not(None), jobs.reserved_until.is_(None)).label("waiting")
    return (
        sa.select(keys.job_id, keys.owner, jobs.id.label("present"), waiting, kept(tables))
        .select_from(joined)
        .where(keys.key == sa.bindparam("taken"))
        .order_by(keys.job_id.desc())  # our own before the former holder's that an old snapshot still shows: see _own_key
        .limit(1)
    )


@lru_cache(maxsize=256)
def _look_locked(tables: Tables, alone: bool) -> sa.Select[Any]:
    keys = tables.keys.c
    query = sa.select(keys.job_id, keys.owner, kept(tables)).where(keys.key == sa.bindparam("taken"))
    return query.with_for_update(read=not alone)


@lru_cache(maxsize=256)
def _take_over(tables: Tables) -> sa.Update:
    keys = tables.keys.c
    return (
        sa.update(tables.keys)
        .where(keys.key == sa.bindparam("taken"), sa.func.coalesce(keys.job_id, 0) == sa.bindparam("old"))
        .values(job_id=None, owner=None, expires_at=None)
    )


@lru_cache(maxsize=256)
def _own_key(tables: Tables, keeps: bool) -> sa.Update:
    """
    Of two rows with this key the one without a job is ours: an old snapshot on PostgreSQL also shows the former holder's,
    and whoever touches a row that was deleted since gets a serialization error.
    """
    keys = tables.keys.c
    ours = sa.update(tables.keys).where(keys.key == sa.bindparam("taken"), keys.job_id.is_(None))
    return ours.values(job_id=sa.bindparam("id"), **hold_columns(tables, keeps))


@lru_cache(maxsize=256)
def _pass_on(tables: Tables) -> sa.Update:
    keys = tables.keys.c
    theirs = sa.update(tables.keys).where(keys.key == sa.bindparam("taken"), keys.job_id == sa.bindparam("old"))
    return theirs.values(job_id=sa.bindparam("id"), owner=sa.bindparam("owner"))


@lru_cache(maxsize=256)
def _look_whether_expired(tables: Tables, locking: bool) -> sa.Select[Any]:
    keys = tables.keys.c
    over = sa.case((sa.and_(keys.expires_at.is_not(None), keys.expires_at <= now()), 1), else_=0)
    query = sa.select(over).where(keys.key == sa.bindparam("taken"))
    # One row, though an old snapshot on PostgreSQL may show the former one beside our own.
    query = query.order_by(over).limit(1)
    return query.with_for_update(read=True) if locking else query


@lru_cache(maxsize=256)
def _take_again(tables: Tables) -> sa.Update:
    keys = tables.keys.c
    return sa.update(tables.keys).where(keys.key == sa.bindparam("taken"), keys.expires_at <= now())
