"""
What only tests ask of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from .._dialects import before
from .._tables import Instant, Tables
from .push import microseconds

__all__ = ["failed_under", "move_back", "queue_names"]


def move_back(connection: sa.Connection, tables: Tables, seconds: float) -> None:
    """
    Let every moment in the tables be so many seconds earlier: to the rows it is as if the clock had gone on by that.
    """
    for table in tables.all:
        moments = [column for column in table.c if isinstance(column.type, Instant)]
        connection.execute(sa.update(table).values({column: before(column, microseconds(seconds)) for column in moments}))


def queue_names(connection: sa.Connection, tables: Tables) -> list[str]:
    """
    The queues that have jobs, in the order of their names.
    """
    return sorted(connection.scalars(sa.select(tables.jobs.c.queue).distinct()))


def failed_under(connection: sa.Connection, tables: Tables, token: str) -> Sequence[Any]:
    """
    The jobs that a claim with this token has moved to the failed table instead of handing them out.
    """
    failed = tables.failed.c
    query = sa.select(failed.id, failed.name, failed.queue, failed.attempts, failed.reason, failed.error_message)
    return connection.execute(query.where(failed.token == token).order_by(failed.id)).all()
