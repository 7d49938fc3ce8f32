"""
What the server behind a connection can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from .._tables import INNODB, Tables

__all__ = ["Server", "by_primary_key", "by_ready_index", "delete_by_primary_key", "server_of"]


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
    lanes_by_recursion: bool
    """A recursive statement hops through an index, a seek a hop; elsewhere each hop is a statement."""
    snapshot_reads: bool
    """A plain SELECT above READ COMMITTED may be older than a locking one in the same transaction."""
    lease_grace: float
    """How much longer than its lease a job stays out of reach, as a part of the lease, so that live workers renew first."""
    poll_max: float
    """The longest pause between two looks at an empty queue, in seconds."""


def server_of(dialect: Dialect) -> Server:
    """
    The capabilities of the server that this dialect has connected to.
    """
    return _server(dialect.name, bool(getattr(dialect, "is_mariadb", False)), tuple(dialect.server_version_info or ()))


@lru_cache(maxsize=64)
def _server(name: str, is_mariadb: bool, version: tuple[Any, ...]) -> Server:
    innodb = name in INNODB
    if name == "sqlite":
        return Server(
            row_locks=False,
            skip_locked=False,
            claim_in_one_statement=False,
            lanes_by_recursion=True,
            snapshot_reads=False,
            lease_grace=1 / 3,
            poll_max=0.2,
        )
    return Server(
        row_locks=True,
        skip_locked=version >= ((10, 6) if is_mariadb else (8, 0, 1)) if innodb else True,
        claim_in_one_statement=not innodb,
        lanes_by_recursion=not innodb,
        snapshot_reads=innodb,
        lease_grace=0.0,
        poll_max=0.5 if innodb else 1.0,
    )


def by_primary_key(query: sa.Select[Any], table: sa.Table) -> sa.Select[Any]:
    """
    Keep InnoDB from scanning the table, and waiting for strangers' rows, where the ids are a good part of it.
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


def delete_by_primary_key(dialect: Dialect, table: sa.Table) -> sa.Executable:
    """
    DELETE … WHERE primary key IN (:ids), at most 500 of them.

    InnoDB scans the whole table, and waits for every locked row in it, when the ids are a good part of a small table; its
    DELETE takes an index hint only in the form that names the table twice.
    """
    ids: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
    (key,) = table.primary_key.columns
    if dialect.name not in INNODB:
        return sa.delete(table).where(key.in_(ids))
    quote = dialect.identifier_preparer
    statement = f"DELETE t FROM {quote.format_table(table)} t FORCE INDEX (PRIMARY) WHERE t.{quote.quote(key.name)} IN :ids"
    return sa.text(statement).bindparams(ids)
