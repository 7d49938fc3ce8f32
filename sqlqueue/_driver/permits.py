"""
How often something may happen, as rows of the table of keys: permits by rate, and exceptions counted in a window.

A row whose `expires_at` has passed means what no row means, so that it may be swept at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import insert_if_absent, now, server_of
from .._tables import Tables

__all__ = ["Permit", "Rate", "closed_for", "lock_key", "note_exception", "take_permits"]

LONGEST_LINE = 2_000_000_000  # what the column holds
FARTHEST = timedelta(days=1)
ROUNDS = 5
OPEN = "open"


@dataclass(frozen=True, slots=True)
class Rate:
    """
    `burst` permits at once, and then one every `interval`.
    """

    interval: timedelta
    burst: int
    ahead: timedelta
    """How long before its moment a permit may be taken."""


@dataclass(frozen=True, slots=True)
class Permit:
    """
    What one job was told.
    """

    granted: bool
    wait: float
    """Seconds by the database's clock: until it may start, or until it should ask again."""
    at: datetime | None = None
    """From when on it may start."""


def take_permits(connection: sa.Connection, tables: Tables, key: str, count: int, rate: Rate) -> list[Permit]:
    """
    Ask for `count` permits at once.

    The generic cell rate algorithm: `expires_at` is the moment at which the permits would have been given out had they come one by
    one, and a permit may be taken `burst - 1` intervals before that. Who gets none is sent to the end of a line, as long as the row's
    count says: that they come back one after another is all that it is good for. It is no reservation, as nobody knows when a released
    job will be looked at again.
    """
    row = lock_key(connection, tables, key)
    planned = max(row.expires_at, row.moment)
    passed = max(row.moment - row.expires_at, timedelta())
    line = max((row.number or 0) - passed // rate.interval, 0)
    permits: list[Permit] = []
    for _ in range(count):
        at = max(row.moment, planned - (rate.burst - 1) * rate.interval)
        if at - row.moment <= rate.ahead:
            permits.append(Permit(True, (at - row.moment).total_seconds(), at))
            planned, line = planned + rate.interval, max(line - 1, 0)
        else:
            behind = FARTHEST if line > FARTHEST // rate.interval else line * rate.interval
            permits.append(Permit(False, (at + behind - rate.ahead / 2 - row.moment).total_seconds()))
            line = min(line + 1, LONGEST_LINE)
    connection.execute(_set(tables), {"named": key, "until": planned, "number": line, "whose": None})
    return permits


def note_exception(connection: sa.Connection, tables: Tables, key: str, *, limit: int, per: float, pause: float) -> bool:
    """
    Count an exception in the window that began with the first one; True when that was one too many, and the key is closed.
    """
    row = lock_key(connection, tables, key)
    over = row.expires_at <= row.moment
    if row.owner == OPEN and not over:
        return False  # it is closed already; this one had started before
    number = 1 if over else (row.number or 0) + 1
    if number >= limit:
        values = {"until": row.moment + timedelta(seconds=pause), "number": 0, "whose": OPEN}
    else:
        values = {"until": row.moment + timedelta(seconds=per) if over else row.expires_at, "number": number, "whose": None}
    connection.execute(_set(tables), {"named": key, **values})
    return number >= limit


def closed_for(connection: sa.Connection, tables: Tables, key: str) -> float:
    """
    Seconds until jobs of this key may run again; 0 when they may.
    """
    keys = tables.keys.c
    row = connection.execute(sa.select(keys.owner, keys.expires_at, now().label("moment")).where(keys.key == key)).one_or_none()
    if row is None or row.owner != OPEN or row.expires_at is None:
        return 0.0
    return float(max((row.expires_at - row.moment).total_seconds(), 0.0))


def lock_key(connection: sa.Connection, tables: Tables, key: str) -> sa.Row[Any]:
    """
    The key's row, locked: `expires_at`, its count as `number`, `owner`, and the clock as `moment`. One that was not there has just expired.
    """
    for _ in range(ROUNDS):
        row = connection.execute(_lock(tables, connection.dialect), {"named": key}).one_or_none()
        if row is not None:
            return row
        insert_if_absent(connection, tables.keys, {"key": key, "expires_at": now()})
    raise RuntimeError("a row of the table of keys is deleted again and again")


@lru_cache(maxsize=256)
def _lock(tables: Tables, dialect: sa.Dialect) -> sa.Select[Any]:
    keys = tables.keys.c
    query = sa.select(keys.expires_at, keys.count.label("number"), keys.owner, now().label("moment"))
    query = query.where(keys.key == sa.bindparam("named"))
    return query.with_for_update() if server_of(dialect).row_locks else query


@lru_cache(maxsize=256)
def _set(tables: Tables) -> sa.Update:
    keys = tables.keys.c
    values: dict[Any, Any] = {
        keys.expires_at: sa.bindparam("until", type_=keys.expires_at.type),
        keys.count: sa.bindparam("number", type_=keys.count.type),
        keys.owner: sa.bindparam("whose", type_=keys.owner.type),
    }
    return sa.update(tables.keys).where(keys.key == sa.bindparam("named")).values(values)
