"""
Places that only so many jobs may take at once, as rows of the table of keys: `BASE/0`, `BASE/1` and so on.

A place is taken by a delivery: a job's id and token. It is free when that delivery's lease is over, or the delivery; nobody needs to
guess how long a handler takes. `expires_at` is far away, so that the place is not swept while somebody has it.

Who finds all places taken stands in line: `BASE/line` says when the last one is due again, and `BASE/wait/ID` that job ID waits. Who
gives up a place lets the first of them be due at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import after, insert_if_absent, now, server_of
from .._tables import Tables
from .permits import lock_key
from .push import microseconds

__all__ = ["SUFFIX", "Blocked", "Holder", "Lost", "Taken", "free_slot", "stand_in_line", "take_slot"]

SUFFIX = 26  # the most characters that follow the base
ROUNDS = 3
LOOKED_AT = 20
PATIENCE = timedelta(hours=1)  # after which a job is not waited for that nobody has seen since it was due
CLOSEST, FARTHEST = timedelta(milliseconds=5), timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Holder:
    """
    Who takes a place, and for how long at most.
    """

    id: int
    token: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Taken:
    """
    The row that is the holder's now.
    """

    key: str


@dataclass(frozen=True, slots=True)
class Blocked:
    """
    All places are taken.
    """

    held_for: timedelta
    """How long their holders have had them, on average."""


@dataclass(frozen=True, slots=True)
class Lost:
    """
    Whoever asks has lost its lease: its place would not count.
    """


def take_slot(connection: sa.Connection, tables: Tables, base: str, numbers: Sequence[int], holder: Holder) -> Taken | Blocked | Lost:
    """
    Take one of these places, the first in their order that is free.

    A look without locks comes first: whoever finds all places taken has locked nothing, and has kept nobody waiting.
    """
    keys = [f"{base}/{number}" for number in numbers]
    waiting = _waiting(base, holder.id)
    held: list[timedelta] = []
    for _ in range(ROUNDS):
        found = connection.execute(_look(tables), {"keys": [*keys, waiting]}).all()
        rows = [row for row in found if row.key != waiting]
        free = {row.key: row for row in rows if not row.alive or row.expired}
        known = {row.key for row in rows}
        ours = [row.key for row in rows if row.alive and (row.job_id, row.owner) == (holder.id, holder.token)]
        if ours:
            return Taken(ours[0])
        held = [row.moment - row.expires_at + timedelta(seconds=holder.seconds) for row in rows if row.key not in free]
        if len(held) == len(keys):
            break
        if not connection.execute(_own_lease(tables), {"held": holder.id, "token": holder.token}).first():
            return Lost()
        for key in keys:
            if key in free:
                taken = _take_over(connection, tables, free[key], holder)
            else:
                taken = key not in known and _insert(connection, tables, key, holder)
            if taken:
                if len(found) > len(rows):
                    connection.execute(_forget(tables), {"named": waiting})
                return Taken(key)
    # Three times somebody was faster: as good as taken.
    return Blocked(sum(held, timedelta()) / len(held) if held else timedelta())


def free_slot(connection: sa.Connection, tables: Tables, base: str, key: str, holder: Holder) -> None:
    """
    Give a place up, if it is still the holder's, and let the job that is the first in line be due.
    """
    if connection.execute(_free(tables), {"named": key, "held": holder.id, "token": holder.token}).rowcount != 1:
        return
    for waiting in connection.execute(_first_in_line(tables), _range(base)).all():
        if connection.execute(_lock_waiting(tables, connection.dialect), {"waiting": waiting.job_id}).first():
            connection.execute(_forget(tables), {"named": waiting.key})
            connection.execute(_make_due(tables), {"waiting": waiting.job_id})
            # Those who are due late because it took so long before are going to be called: nobody has to stand behind them.
            connection.execute(_shorten(tables), {"named": f"{base}/line"})
            return
        if not waiting.exists:
            connection.execute(_forget(tables), {"named": waiting.key})
        # Else it is just asking for a place, or has been blocked and is not back on its queue yet: somebody will call it later.


def stand_in_line(connection: sa.Connection, tables: Tables, base: str, *, slots: int, id: int, held_for: timedelta) -> float:
    """
    Seconds after which a job that was blocked should come back, should nobody call it before.

    They come back one after another, about twice as often as a place becomes free. How often that is, those tell that have the
    places: who has had one for so long is likely to need as long again. So a thousand jobs that wait for something long cost no
    more than one that does.
    """
    line = f"{base}/line"
    row = lock_key(connection, tables, line)
    apart = min(max(held_for, CLOSEST * slots), FARTHEST) / slots
    turn = max(row.expires_at, row.moment) + apart
    connection.execute(_extend(tables), {"named": line, "until": turn})
    waiting, until = _waiting(base, id), turn + PATIENCE
    if not connection.execute(_extend(tables), {"named": waiting, "until": until}).rowcount:
        insert_if_absent(connection, tables.keys, {"key": waiting, "job_id": id, "expires_at": until})
    return float((turn - row.moment).total_seconds())


def _waiting(base: str, id: int) -> str:
    return f"{base}/wait/{id:020d}"


def _range(base: str) -> dict[str, str]:
    """
    Between which keys those of waiting jobs are. A locale may see others between them, which `prefix` leaves out.
    """
    prefix = f"{base}/wait/"
    return {"first": f"{prefix}{'0' * 20}", "last": f"{prefix}{'9' * 20}", "prefix": prefix}


def _take_over(connection: sa.Connection, tables: Tables, row: sa.Row[Any], holder: Holder) -> bool:
    """
    Take a place whose holder is gone.
    """
    if row.leased and not row.expired and not connection.execute(_locked_end(tables, connection.dialect), {"held": row.job_id}).first():
        return False  # a renewal is about to commit, or a transactional handler holds its row: it is alive
    values = {"named": row.key, "old_id": row.job_id, "old_token": row.owner, **_values(holder)}
    return connection.execute(_replace(tables), values).rowcount == 1


def _insert(connection: sa.Connection, tables: Tables, key: str, holder: Holder) -> bool:
    until = after(microseconds(holder.seconds))
    return insert_if_absent(connection, tables.keys, {"key": key, "job_id": holder.id, "owner": holder.token, "expires_at": until})


def _values(holder: Holder) -> dict[str, Any]:
    return {"held": holder.id, "token": holder.token, "length": microseconds(holder.seconds)}


def _leased(tables: Tables) -> sa.ColumnElement[bool]:
    """
    The job is this delivery's, its lease may have ended.
    """
    jobs, keys = tables.jobs.c, tables.keys.c
    return sa.and_(jobs.id == keys.job_id, jobs.reserved_token == keys.owner, jobs.reserved_until.is_not(None))


@lru_cache(maxsize=256)
def _look(tables: Tables) -> sa.Select[Any]:
    jobs, keys = tables.jobs.c, tables.keys.c
    return (
        sa.select(
            keys.key,
            keys.job_id,
            keys.owner,
            keys.expires_at,
            (keys.expires_at <= now()).label("expired"),
            jobs.id.is_not(None).label("leased"),
            sa.func.coalesce(jobs.available_at > now(), sa.false()).label("alive"),
            now().label("moment"),
        )
        .select_from(sa.outerjoin(tables.keys, tables.jobs, _leased(tables)))
        .where(keys.key.in_(sa.bindparam("keys", expanding=True)))
    )


@lru_cache(maxsize=256)
def _own_lease(tables: Tables) -> sa.Select[Any]:
    jobs = tables.jobs.c
    ours = (jobs.id == sa.bindparam("held"), jobs.reserved_token == sa.bindparam("token"), jobs.reserved_until.is_not(None))
    return sa.select(jobs.id).where(*ours, jobs.available_at > now())


@lru_cache(maxsize=256)
def _locked_end(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    """
    The job's row, if its lease has ended and nobody is about to change that.
    """
    jobs, server = tables.jobs.c, server_of(dialect)
    query = sa.select(jobs.id).where(jobs.id == sa.bindparam("held"), jobs.available_at <= now())
    return query.with_for_update(skip_locked=server.skip_locked) if server.row_locks else query


@lru_cache(maxsize=256)
def _replace(tables: Tables) -> sa.Update:
    keys = tables.keys.c
    old_id, old_token = sa.bindparam("old_id", type_=keys.job_id.type), sa.bindparam("old_token", type_=keys.owner.type)
    return (
        sa.update(tables.keys)
        .where(keys.key == sa.bindparam("named"), keys.job_id == old_id, keys.owner == old_token)
        .values(job_id=sa.bindparam("held"), owner=sa.bindparam("token"), expires_at=after(sa.bindparam("length")))
    )


@lru_cache(maxsize=256)
def _free(tables: Tables) -> sa.Delete:
    keys = tables.keys.c
    return sa.delete(tables.keys).where(
        keys.key == sa.bindparam("named"), keys.job_id == sa.bindparam("held"), keys.owner == sa.bindparam("token")
    )


@lru_cache(maxsize=256)
def _forget(tables: Tables) -> sa.Delete:
    return sa.delete(tables.keys).where(tables.keys.c.key == sa.bindparam("named"))


@lru_cache(maxsize=256)
def _extend(tables: Tables) -> sa.Update:
    keys = tables.keys.c
    until = sa.bindparam("until", type_=keys.expires_at.type)
    return sa.update(tables.keys).where(keys.key == sa.bindparam("named")).values(expires_at=until)


@lru_cache(maxsize=256)
def _shorten(tables: Tables) -> sa.Update:
    keys = tables.keys.c
    return sa.update(tables.keys).where(keys.key == sa.bindparam("named"), keys.expires_at > now()).values(expires_at=now())


@lru_cache(maxsize=256)
def _first_in_line(tables: Tables) -> sa.Select[Any]:
    jobs, keys = tables.jobs.c, tables.keys.c
    prefix: sa.BindParameter[str] = sa.bindparam("prefix", type_=sa.String())
    ours = sa.func.substr(keys.key, 1, sa.func.length(prefix)) == prefix
    between = keys.key.between(sa.bindparam("first"), sa.bindparam("last"))
    exists = sa.exists().where(jobs.id == keys.job_id).label("exists")
    return sa.select(keys.key, keys.job_id, exists).where(between, ours).order_by(keys.key).limit(LOOKED_AT)


@lru_cache(maxsize=256)
def _lock_waiting(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    """
    The row of a job that waits to be due: not one that has been claimed, or that somebody is claiming.
    """
    jobs, server = tables.jobs.c, server_of(dialect)
    query = sa.select(jobs.id).where(jobs.id == sa.bindparam("waiting"), jobs.reserved_until.is_(None), jobs.available_at > now())
    return query.with_for_update(skip_locked=server.skip_locked) if server.row_locks else query


@lru_cache(maxsize=256)
def _make_due(tables: Tables) -> sa.Update:
    jobs = tables.jobs.c
    return sa.update(tables.jobs).where(jobs.id == sa.bindparam("waiting")).values(available_at=now())
