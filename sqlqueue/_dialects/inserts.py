"""
INSERTs that every server needs told in its own way: unless the primary key is taken, together with a key, many rows at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.functions import FunctionElement

from .._tables import INNODB
from .server import server_of
from .trouble import Trouble, trouble_of

__all__ = ["insert_if_absent", "insert_or_lock", "insert_rows", "insert_with_key"]


def insert_if_absent(connection: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> bool:
    """
    Whether the row was written. Waits for another open transaction that inserted the same key.

    On InnoDB the plain INSERT and its error 1062 are the way: the error undoes only its own statement and locks only the
    row in question. INSERT IGNORE would swallow other errors, ON DUPLICATE KEY UPDATE reports one row either way.
    """
    if connection.dialect.name in INNODB:
        try:
            connection.execute(sa.insert(table).values(dict(values)))
        except IntegrityError as error:
            if trouble_of(error) is not Trouble.DUPLICATE:
                raise
            return False
        return True
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    # inline: without it SQLAlchemy asks for the key back. Without preserve_rowcount a closed cursor may have forgotten the count.
    statement = insert(table).values(dict(values)).on_conflict_do_nothing().inline()
    return connection.execute(statement, execution_options={"preserve_rowcount": True}).rowcount == 1


def insert_or_lock(connection: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> bool:
    """
    `insert_if_absent` for who is going to change the row that is there: on InnoDB that is locked, and the answer always False.

    The error 1062 leaves a shared lock, and two who have one and both want to change the row are a deadlock. ON DUPLICATE
    KEY UPDATE, of the primary key alone, locks that one row for its caller alone.
    """
    if connection.dialect.name not in INNODB:
        return insert_if_absent(connection, table, values)
    (key,) = table.primary_key.columns
    connection.execute(mysql.insert(table).values(dict(values)).on_duplicate_key_update({key.name: key}))
    return False


def insert_with_key(
    table: sa.Table,
    row: Mapping[str, sa.ColumnElement[Any]],
    keys: sa.Table,
    key: sa.ColumnElement[str],
    hold: Mapping[str, sa.ColumnElement[Any]],
) -> ReturningInsert[Any]:
    """
    INSERT of a row together with the key that it holds, or of neither when the key is taken. Returns the new row's id.

    For servers that can write in WITH.

    Args:
        hold: what else the row of the key says, by column.
    """
    (id,) = table.primary_key.columns
    quoted = postgresql.dialect().identifier_preparer.format_table(table)  # type: ignore[no-untyped-call]
    drawn = sa.cast(sa.func.nextval(sa.func.pg_get_serial_sequence(quoted, id.name)), id.type)
    # A key that is seen to be taken uses up no id. What is not seen, because it is new, the conflict tells.
    free = sa.select(key, drawn, *hold.values()).where(~sa.exists().where(keys.c.key == key))
    claim = postgresql.insert(keys).from_select([keys.c.key, keys.c.job_id, *(keys.c[name] for name in hold)], free)
    taken = claim.on_conflict_do_nothing().returning(keys.c.job_id).cte("taken")
    source = sa.select(taken.c.job_id, *(value.label(name) for name, value in row.items()))
    return sa.insert(table).from_select([id.name, *row], source).returning(id)


def insert_rows(connection: sa.Connection, table: sa.Table, shared: Mapping[str, Any], listed: Mapping[str, Sequence[Any]]) -> None:
    """
    Write many rows in one statement; their ids follow the order of the rows.

    A parameter of each column of each row costs more, in SQLAlchemy and in the driver, than the server needs for the row; and
    some drivers turn executemany into a statement a row. So what the rows have in common is bound once, and the rest is
    one parameter, a JSON array of rows.

    Args:
        shared: values by the names of the columns in which all rows have the same.
        listed: of the other columns the values, row by row. All lists have one length, at least 1.
    """
    if server_of(connection.dialect).reads_rows:
        text = _rows_as_json(connection.dialect, table, listed)
        connection.execute(_insert_from_rows(table, tuple(shared), tuple(listed)), {**shared, "rows": text})
    else:
        rows = zip(*listed.values(), strict=True)
        connection.execute(sa.insert(table), [{**shared, **dict(zip(listed, row, strict=True))} for row in rows])


@lru_cache(maxsize=256)
def _insert_from_rows(table: sa.Table, shared: tuple[str, ...], listed: tuple[str, ...]) -> sa.Insert:
    columns = [sa.column(name, table.c[name].type) for name in listed]
    rows = _json_rows(sa.bindparam("rows", type_=sa.Text()), *columns).table_valued(*columns).alias("listed")
    values = [sa.bindparam(name, type_=table.c[name].type) for name in shared]
    return sa.insert(table).from_select([*shared, *listed], sa.select(*values, *rows.c))


def _rows_as_json(dialect: Dialect, table: sa.Table, listed: Mapping[str, Sequence[Any]]) -> str:
    columns = (_as_stored(dialect, table.c[name], values) for name, values in listed.items())
    # What JSON does not know is a moment: its text, which every server reads back.
    return json.dumps(list(zip(*columns, strict=True)), default=str)


def _as_stored(dialect: Dialect, column: sa.Column[Any], values: Sequence[Any]) -> Sequence[Any]:
    """
    What a bound parameter of the column's type would hand to the driver.
    """
    convert = column.type.dialect_impl(dialect).bind_processor(dialect)
    return values if convert is None else [convert(value) for value in values]


class _json_rows(FunctionElement[Any]):
    """
    A parameter, and the columns that its rows have: to be selected from.
    """

    name = "sqlqueue_json_rows"
    inherit_cache = True


def _typed_columns(element: _json_rows, compiler: Any) -> list[tuple[int, str, str]]:
    _, *columns = element.clauses
    kind = compiler.dialect.type_compiler_instance.process
    return [(place, compiler.preparer.quote(column.name), kind(column.type)) for place, column in enumerate(columns)]


def _parameter(element: _json_rows, compiler: Any, options: dict[str, Any]) -> str:
    (parameter, *_) = element.clauses
    return str(compiler.process(parameter, **options))


@compiles(_json_rows, "postgresql")
def _(element: _json_rows, compiler: Any, **options: Any) -> str:
    cells = ", ".join(f"CAST(value ->> {place} AS {kind}) AS {name}" for place, name, kind in _typed_columns(element, compiler))
    return f"(SELECT {cells} FROM json_array_elements(CAST({_parameter(element, compiler, options)} AS json)))"


@compiles(_json_rows, *INNODB)
def _(element: _json_rows, compiler: Any, **options: Any) -> str:
    # Without ERROR ON ERROR what does not fit the column would be NULL.
    cells = ", ".join(f"{name} {kind} PATH '$[{place}]' ERROR ON ERROR" for place, name, kind in _typed_columns(element, compiler))
    return f"JSON_TABLE({_parameter(element, compiler, options)}, '$[*]' COLUMNS ({cells}))"


@compiles(_json_rows, "sqlite")
def _(element: _json_rows, compiler: Any, **options: Any) -> str:
    cells = ", ".join(f"json_extract(value, '$[{place}]') AS {name}" for place, name, _ in _typed_columns(element, compiler))
    return f"(SELECT {cells} FROM json_each({_parameter(element, compiler, options)}))"
