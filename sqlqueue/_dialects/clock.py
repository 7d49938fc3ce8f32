"""
The one clock: the database's, in UTC, the same format that bound values have.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from .._tables import INNODB, Instant

__all__ = ["after", "before", "now"]


class now(FunctionElement[datetime]):
    """
    This statement's moment.
    """

    name = "sqlqueue_now"
    type = Instant()
    inherit_cache = True


class after(FunctionElement[datetime]):
    """
    This statement's moment plus an expression or bound parameter in microseconds.
    """

    name = "sqlqueue_after"
    type = Instant()
    inherit_cache = True

    def __init__(self, microseconds: Any) -> None:
        super().__init__(sa.type_coerce(microseconds, sa.BigInteger()))


class before(FunctionElement[datetime]):
    """
    A column's moment minus an expression or bound parameter in microseconds.
    """

    name = "sqlqueue_before"
    type = Instant()
    inherit_cache = True

    def __init__(self, moment: sa.ColumnElement[datetime], microseconds: Any) -> None:
        super().__init__(moment, sa.type_coerce(microseconds, sa.BigInteger()))


# PostgreSQL's now() stands still in a transaction, and clock_timestamp() cannot bound an index scan.
@compiles(now, "postgresql")
def _(element: now, compiler: Any, **options: Any) -> str:
    return "statement_timestamp()"


@compiles(after, "postgresql")
def _(element: after, compiler: Any, **options: Any) -> str:
    return f"(statement_timestamp() + {compiler.process(element.clauses, **options)} * interval '1 microsecond')"


# NOW() and CURRENT_TIMESTAMP follow the session's time zone there.
@compiles(now, *INNODB)
def _(element: now, compiler: Any, **options: Any) -> str:
    return "UTC_TIMESTAMP(6)"


@compiles(after, *INNODB)
def _(element: after, compiler: Any, **options: Any) -> str:
    return f"(UTC_TIMESTAMP(6) + INTERVAL {compiler.process(element.clauses, **options)} MICROSECOND)"


# SQLite counts milliseconds; the zeros make it the text that SQLAlchemy writes for a bound datetime.
@compiles(now, "sqlite")
def _(element: now, compiler: Any, **options: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


@compiles(after, "sqlite")
def _(element: after, compiler: Any, **options: Any) -> str:
    # Rounded up: a delay is a floor.
    seconds = f"printf('%.3f seconds', ({compiler.process(element.clauses, **options)} + 999) / 1000 / 1000.0)"
    return f"(strftime('%Y-%m-%d %H:%M:%f', 'now', {seconds}) || '000')"


@compiles(before, "postgresql")
def _(element: before, compiler: Any, **options: Any) -> str:
    moment, length = (compiler.process(part, **options) for part in element.clauses)
    return f"({moment} - {length} * interval '1 microsecond')"


@compiles(before, *INNODB)
def _(element: before, compiler: Any, **options: Any) -> str:
    moment, length = (compiler.process(part, **options) for part in element.clauses)
    return f"({moment} - INTERVAL {length} MICROSECOND)"


@compiles(before, "sqlite")
def _(element: before, compiler: Any, **options: Any) -> str:
    # Counts milliseconds and rounds: the last three digits, which a bound datetime may have, stay out of it.
    moment, length = (compiler.process(part, **options) for part in element.clauses)
    seconds = f"printf('%.3f seconds', {length} / -1000000.0)"
    return f"(strftime('%Y-%m-%d %H:%M:%f', substr({moment}, 1, 23), {seconds}) || substr({moment}, 24))"
