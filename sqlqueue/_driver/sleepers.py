"""
Which workers are asleep: pushes announce themselves only to these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from .._dialects import after, insert_if_absent, names_text, now
from .._tables import Tables

__all__ = ["note_worker", "strike_dead_workers", "strike_worker"]

DEAD_AFTER = 600.0


def note_worker(connection: sa.Connection, tables: Tables, worker: str, queues: Sequence[str], *, asleep: bool) -> None:
    """
    Write down that this worker is alive now, and whether it sleeps.
    """
    if not connection.execute(_note(tables), {"worker": worker, "sleeps": asleep}).rowcount:
        values = {"id": worker, "queues": names_text(queues), "since": now(), "heartbeat": now(), "asleep": asleep}
        insert_if_absent(connection, tables.workers, values)


def strike_worker(connection: sa.Connection, tables: Tables, worker: str) -> None:
    """
    Forget a worker that ends.
    """
    connection.execute(sa.delete(tables.workers).where(tables.workers.c.id == worker))


def strike_dead_workers(connection: sa.Connection, tables: Tables) -> None:
    """
    Forget those that were killed. One that was only slow writes itself down again.
    """
    silent_since = after(sa.literal(-int(DEAD_AFTER * 1_000_000), sa.BigInteger()))
    connection.execute(sa.delete(tables.workers).where(tables.workers.c.heartbeat < silent_since))


@lru_cache(maxsize=256)
def _note(tables: Tables) -> Any:
    workers = tables.workers
    return (
        sa.update(workers)
        .where(workers.c.id == sa.bindparam("worker"))
        .values(heartbeat=now(), asleep=sa.bindparam("sleeps", type_=sa.Boolean()))
    )
