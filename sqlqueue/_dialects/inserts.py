"""
Insert a row unless its primary key is taken, without spoiling the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.dml import ReturningInsert

from .._tables import INNODB
from .trouble import Trouble, trouble_of

__all__ = ["insert_if_absent", "insert_with_key"]


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


def insert_with_key(
    table: sa.Table, row: Mapping[str, sa.ColumnElement[Any]], keys: sa.Table, key: sa.ColumnElement[str]
) -> ReturningInsert[Any]:
    """
    INSERT of a row together with the key that it holds, or of neither when the key is taken. Returns the new row's id.

    For servers that can write in WITH.
    """
    (id,) = table.primary_key.columns
    quoted = postgresql.dialect().identifier_preparer.format_table(table)  # type: ignore[no-untyped-call]
    drawn = sa.cast(sa.func.nextval(sa.func.pg_get_serial_sequence(quoted, id.name)), id.type)
    # A key that is seen to be taken uses up no id. What is not seen, because it is new, the conflict tells.
    free = sa.select(key, drawn).where(~sa.exists().where(keys.c.key == key))
    claim = postgresql.insert(keys).from_select([keys.c.key, keys.c.job_id], free)
    taken = claim.on_conflict_do_nothing().returning(keys.c.job_id).cte("taken")
    source = sa.select(taken.c.job_id, *(value.label(name) for name, value in row.items()))
    return sa.insert(table).from_select([id.name, *row], source).returning(id)
