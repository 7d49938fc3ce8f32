"""
What the server behind a connection can do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from .._tables import INNODB, Tables

__all__ = ["Server", "among", "by_primary_key", "by_ready_index", "delete_by_primary_key", "lock_by_primary_key", "server_of"]


@dataclass(frozen=True, slots=True)
class Server:
    """
    The capabilities that the statements are chosen by.
    """

    row_locks: bool
    """Rows can be locked; otherwise a transaction locks the whole database when it begins."""
    skip_locked: bool
    """A locking read can pass over rows that others hold."""
    claim_in_one_statement: bool
    """UPDATE … FROM a locking read … RETURNING works."""
    writes_in_with: bool
    """One statement can write to two tables."""
    reads_arrays: bool
    """A list is one parameter. Elsewhere its values are written out, or are a parameter each, which costs time at both ends."""
    reads_lists: bool
    """A JSON array can be joined as a table; needed only where IN with a list makes a scan."""
    reads_rows: bool
    """A JSON array of rows can be what an INSERT writes."""
    lanes_by_recursion: bool
    """A recursive statement hops through an index, a seek a hop; elsewhere each hop is a statement."""
    snapshot_reads: bool
    """A plain SELECT above READ COMMITTED may be older than a locking one in the same transaction."""
    lease_grace: float
    """How much longer than its lease a job stays out of reach, as a part of the lease, so that live workers renew first."""
    notifies: bool
    """A transaction can announce itself to connections that listen."""
    counts_changes: bool
    """A counter that costs next to nothing to read shows that somebody has committed."""
    poll_max: float
    """The longest pause between two looks at an empty queue, in seconds, where nothing wakes a worker."""


def server_of(dialect: Dialect) -> Server:
    """
    The capabilities of the server that this dialect has connected to.
    """
    return _server(dialect.name, bool(getattr(dialect, "is_mariadb", False)), tuple(dialect.server_version_info or ()))


@lru_cache(maxsize=64)
def _server(name: str, is_mariadb: bool, version: tuple[Any, ...]) -> Server:
    innodb = name in INNODB
    if is_mariadb and version[:3] == (5, 5, 5):
        version = version[3:]  # what MariaDB puts before its own version, for old replicas of MySQL
    if name == "sqlite":
        return Server(
            row_locks=False,
            skip_locked=False,
            claim_in_one_statement=False,
            writes_in_with=False,
            reads_arrays=False,
            reads_lists=False,
            reads_rows=version >= (3, 38),
            lanes_by_recursion=True,
            snapshot_reads=False,
            lease_grace=1 / 3,
            notifies=False,
            counts_changes=True,
            poll_max=0.2,
        )
    lists = innodb and version >= ((10, 6) if is_mariadb else (8, 0, 11))
    return Server(
        row_locks=True,
        skip_locked=version >= ((10, 6) if is_mariadb else (8, 0, 1)) if innodb else True,
        claim_in_one_statement=not innodb,
        writes_in_with=not innodb,
        reads_arrays=not innodb,
        reads_lists=lists,
        reads_rows=not innodb or lists,
        lanes_by_recursion=not innodb,
        snapshot_reads=innodb,
        lease_grace=0.0,
        notifies=not innodb,
        counts_changes=False,
        poll_max=0.3 if innodb else 1.0,
    )


def by_primary_key(query: sa.Select[Any], table: sa.Table) -> sa.Select[Any]:
    """
    Keep InnoDB from going through another index than the primary key.
    """
    return _hinted(query, table, "FORCE INDEX (PRIMARY)")


def by_ready_index(query: sa.Select[Any], tables: Tables) -> sa.Select[Any]:
    """
    Keep InnoDB from sorting: a filesort locks every row that it reads.
    """
    return _hinted(query, tables.jobs, f"FORCE INDEX (`{tables.ready_index}`)")


def _hinted(query: sa.Select[Any], table: sa.Table, hint: str) -> sa.Select[Any]:
    for name in INNODB:
        query = query.with_hint(table, hint, dialect_name=name)
    return query


def among(dialect: Dialect, column: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """
    Whether the column's value is in the parameter `ids`, a list of at most 500.
    """
    if server_of(dialect).reads_arrays:
        return column == sa.any_(sa.bindparam("ids", type_=sa.ARRAY(column.type)))
    # Numbers are written into the statement: a parameter each takes longer than all that the server does with it.
    return column.in_(sa.bindparam("ids", expanding=True, literal_execute=isinstance(column.type, sa.BigInteger)))


def lock_by_primary_key(dialect: Dialect, query: sa.Select[Any], table: sa.Table, *, counting: bool = False) -> sa.Select[Any]:
    """
    `query` about those rows of `table` whose primary keys are in the parameter `ids`, a sorted list of at most 500.

    The rows are locked in that order; those that somebody else has locked are passed over.

    Args:
        counting: the query counts the rows, which leaves it nothing to put in order.
    """
    server = server_of(dialect)
    (key,) = table.primary_key.columns
    if not server.reads_lists:
        query = by_primary_key(query.where(among(dialect, key)), table)
        query = query if counting else query.order_by(key)
        return query.with_for_update(skip_locked=server.skip_locked) if server.row_locks else query
    wanted = _listed(_json_ids(), sa.literal_column(_kind_of(key))).table_valued(sa.column("id", key.type)).alias("wanted")
    query = by_primary_key(query.prefix_with("STRAIGHT_JOIN").select_from(wanted).where(key == wanted.c.id), table)
    return query.with_for_update(skip_locked=server.skip_locked, of=table)


def delete_by_primary_key(dialect: Dialect, table: sa.Table) -> sa.Executable:
    """
    DELETE of those rows whose primary keys are in the parameter `ids`, a list of at most 500.
    """
    (key,) = table.primary_key.columns
    if dialect.name not in INNODB:
        return sa.delete(table).where(among(dialect, key))
    quote = dialect.identifier_preparer
    name, column = quote.format_table(table), quote.quote(key.name)
    if server_of(dialect).reads_lists:
        wanted = f"JSON_TABLE(:ids, '$[*]' COLUMNS (id {_kind_of(key)} PATH '$')) AS wanted"
        statement = f"DELETE t FROM {wanted} STRAIGHT_JOIN {name} AS t FORCE INDEX (PRIMARY) ON t.{column} = wanted.id"
        return sa.text(statement).bindparams(_json_ids())
    return sa.text(f"DELETE t FROM {name} t FORCE INDEX (PRIMARY) WHERE t.{column} IN :ids").bindparams(sa.bindparam("ids", expanding=True))


# InnoDB locks the rows that it reads, a DELETE waits for every one of them, and where the ids are a good part of a small
# table it reads all of it, whatever index is forced. From a list that is joined as a table it looks up one row after another.
class _listed(FunctionElement[Any]):
    name = "sqlqueue_listed"
    inherit_cache = True


@compiles(_listed, *INNODB)
def _(element: _listed, compiler: Any, **options: Any) -> str:
    values, kind = element.clauses
    return f"JSON_TABLE({compiler.process(values, **options)}, '$[*]' COLUMNS (id {kind} PATH '$'))"


class _JSONList(TypeDecorator[Sequence[Any]]):
    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> str:
        return json.dumps(value)


def _json_ids() -> sa.BindParameter[Any]:
    return sa.bindparam("ids", type_=_JSONList())


def _kind_of(key: sa.Column[Any]) -> str:
    return "BIGINT" if isinstance(key.type, sa.BigInteger) else f"VARCHAR({key.type.length}) CHARACTER SET ascii COLLATE ascii_bin"  # type: ignore[attr-defined]
