"""
Reading many rows at little cost: as the driver hands them out, without an object of SQLAlchemy's for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from .._tables import INNODB

__all__ = ["fetch_raw", "moment_of", "raw_moment", "raw_parameter"]


def fetch_raw(result: sa.CursorResult[Any]) -> Sequence[tuple[Any, ...]]:
    """
    All rows of a result, nothing in them converted.
    """
    rows: Sequence[tuple[Any, ...]] = result.cursor.fetchall()  # type: ignore[attr-defined,unused-ignore]
    result.close()
    return rows


class raw_moment(FunctionElement[Any]):
    """
    A moment in the form that the driver reads fastest: good for comparing, and for `moment_of`.
    """

    name = "sqlqueue_raw_moment"
    type = sa.types.NULLTYPE
    inherit_cache = True


@compiles(raw_moment)
def _(element: raw_moment, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.clauses, **options))


# PyMySQL takes a regular expression to every datetime.
@compiles(raw_moment, *INNODB)
def _(element: raw_moment, compiler: Any, **options: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **options)} AS CHAR)"


class _Raw(sa.types.TypeEngine[Any]):
    """
    What the driver has handed out, and takes again as it is.
    """

    cache_ok = True


def raw_parameter(name: str) -> sa.BindParameter[Any]:
    """
    A bound parameter for a `raw_moment`.
    """
    return sa.bindparam(name, type_=_Raw())


def moment_of(value: Any) -> datetime | None:
    """
    An unconverted moment as an aware datetime.
    """
    if value is None:
        return None
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
