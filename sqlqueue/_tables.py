"""
The tables: the one source of truth that `create_all`, the emitted migration and the snapshots are made from.

Types that differ between databases are variants here, so that no other module needs to know. Every variant names MySQL *and*
MariaDB: under a `mariadb+pymysql://` URL SQLAlchemy does not look at the variants for MySQL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine

from .errors import OptionError

__all__ = ["INNODB", "POSTGRESQL_STORAGE", "Instant", "Tables", "build_tables"]

INNODB = ("mysql", "mariadb")

NAME_LENGTH = 190  # what older InnoDB can index in utf8mb4; ours are ASCII, yet a job's name should fit wherever it is copied to
QUEUE_LENGTH = 80
TOKEN_LENGTH = 64

# A claim rewrites the row it takes: room on the page lets the new version stay beside the old one, and vacuum must come
# while the dead rows are a part of the backlog, not a part of all that has ever passed through.
POSTGRESQL_STORAGE = ", ".join(
    (
        "fillfactor = 70",
        "autovacuum_vacuum_scale_factor = 0.02",
        "autovacuum_vacuum_threshold = 500",
        "autovacuum_analyze_scale_factor = 0.05",
        "autovacuum_vacuum_cost_delay = 0",
    )
)


class Instant(TypeDecorator[datetime]):
    """
    A moment in UTC: aware datetimes in Python, whatever the database calls it.

    PostgreSQL stores `timestamptz`, MySQL and MariaDB `DATETIME(6)` in UTC, SQLite SQLAlchemy's text with six digits,
    which sorts as text; the clock in `_dialects` writes the same format.
    """

    impl = sa.DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in INNODB:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True))
        return dialect.type_descriptor(sa.DateTime())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise OptionError("a naive datetime cannot be stored: give it a time zone")
        utc = value.astimezone(UTC)
        # Drivers of MySQL and MariaDB disagree about what an offset means; a plain UTC value has one meaning.
        return utc if dialect.name == "postgresql" else utc.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


@dataclass(frozen=True, eq=False, slots=True)
class Tables:
    """
    The tables of one queue. Compared and hashed by identity.
    """

    metadata: sa.MetaData
    jobs: sa.Table
    failed: sa.Table
    keys: sa.Table
    workers: sa.Table
    controls: sa.Table
    ready_index: str

    @property
    def all(self) -> tuple[sa.Table, ...]:
        """
        Every table, in an order in which they can be created.
        """
        return (self.jobs, self.failed, self.keys, self.workers, self.controls)


def build_tables(metadata: sa.MetaData, *, prefix: str = "sqlqueue_", schema: str | None = None) -> Tables:
    """
    Add the queue's tables to `metadata` and return them.

    Raises:
        OptionError: the prefix or the schema is not a name that every database can carry.
    """
    _check_name("prefix", prefix, 30)
    if schema is not None:
        _check_name("schema", schema, 63)
        if not schema:
            raise OptionError("schema: must not be empty; leave it out for the database's default")
    ready = f"{prefix}jobs_ready"
    jobs = _table(metadata, f"{prefix}jobs", schema, _job_columns(), [(ready, READY_COLUMNS)], sqlite_autoincrement=True)
    if not sa.event.contains(jobs, "after_create", _STORAGE):
        sa.event.listen(jobs, "after_create", _STORAGE)
    return Tables(
        metadata=metadata,
        jobs=jobs,
        failed=_table(
            metadata,
            f"{prefix}failed_jobs",
            schema,
            _failed_columns(),
            [(f"{prefix}failed_jobs_failed_at", ("failed_at",)), (f"{prefix}failed_jobs_queue", ("queue", "failed_at"))],
        ),
        keys=_table(metadata, f"{prefix}keys", schema, _key_columns(), [(f"{prefix}keys_expires_at", ("expires_at",))]),
        workers=_table(metadata, f"{prefix}workers", schema, _worker_columns(), []),
        controls=_table(metadata, f"{prefix}controls", schema, _control_columns(), []),
        ready_index=ready,
    )


# Ready jobs of one lane (queue, priority, fair_by) are one range of this index, in the order in which they are due.
READY_COLUMNS = ("queue", "priority", "fair_by", "available_at", "id")


def _check_name(option: str, value: str, length: int) -> None:
    if not isinstance(value, str) or len(value) > length or not re.fullmatch(r"[A-Za-z0-9_ -]*", value):
        raise OptionError(f"{option}: at most {length} letters, digits, spaces, hyphens and underscores, not {value!r}")


def _table(
    metadata: sa.MetaData,
    name: str,
    schema: str | None,
    columns: list[sa.Column[Any]],
    indexes: list[tuple[str, tuple[str, ...]]],
    **options: Any,
) -> sa.Table:
    known = metadata.tables.get(name if schema is None else f"{schema}.{name}")
    if known is not None:  # a second queue over the same metadata shares the tables
        return known
    # Error texts hold any character, whatever the database's own default; the exact columns are ascii_bin.
    for database in INNODB:
        options |= {f"{database}_engine": "InnoDB", f"{database}_charset": "utf8mb4", f"{database}_collate": "utf8mb4_bin"}
    table = sa.Table(name, metadata, *columns, schema=schema, **options)
    for index_name, index_columns in indexes:
        sa.Index(index_name, *(table.c[column] for column in index_columns))
    return table


# CREATE TABLE cannot carry these options on every supported SQLAlchemy.
_STORAGE = sa.DDL(f"ALTER TABLE %(fullname)s SET ({POSTGRESQL_STORAGE})").execute_if(dialect="postgresql")  # type: ignore[no-untyped-call,unused-ignore]  # SQLAlchemy's


def _ascii(length: int) -> sa.String:
    """
    Text compared byte for byte. The other collations of MySQL and MariaDB fold case or ignore trailing spaces.
    """
    return sa.String(length).with_variant(mysql.VARCHAR(length, charset="ascii", collation="ascii_bin"), *INNODB)


def _text() -> sa.Text:
    """
    Text of any length: a plain TEXT holds 64 KiB on MySQL and MariaDB, and cuts silently where strict mode is off.
    """
    return sa.Text().with_variant(mysql.LONGTEXT(), *INNODB)


def _id() -> sa.BigInteger:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _described_job() -> list[sa.Column[Any]]:
    """
    What a job is, apart from where it stands: kept in both tables.
    """
    return [
        sa.Column("queue", _ascii(QUEUE_LENGTH), nullable=False),
        sa.Column("name", _ascii(NAME_LENGTH), nullable=False),
        sa.Column("payload", _text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("fair_by", _ascii(NAME_LENGTH), nullable=False),
        sa.Column("ordered_by", _ascii(NAME_LENGTH)),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("unique_key", _ascii(NAME_LENGTH)),
        sa.Column("due_at", Instant(), nullable=False),
        sa.Column("deadline", Instant()),
        sa.Column("headers", _text()),
        sa.Column("chain", _text()),
        sa.Column("batch_id", sa.BigInteger()),
        sa.Column("created_at", Instant(), nullable=False),
    ]


def _job_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", _id(), primary_key=True, autoincrement=True),
        *_described_job(),
        sa.Column("available_at", Instant(), nullable=False),
        sa.Column("reserved_until", Instant()),
        sa.Column("reserved_by", _ascii(NAME_LENGTH)),
        sa.Column("reserved_token", _ascii(TOKEN_LENGTH)),
        sa.Column("last_error", _text()),
    ]


def _failed_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", _id(), primary_key=True, autoincrement=False),
        *_described_job(),
        sa.Column("reason", _ascii(64), nullable=False),
        sa.Column("error_class", sa.String(255)),
        sa.Column("error_message", _text()),
        sa.Column("traceback", _text()),
        sa.Column("token", _ascii(TOKEN_LENGTH)),
        sa.Column("worker", _ascii(NAME_LENGTH)),
        sa.Column("failed_at", Instant(), nullable=False),
    ]


def _key_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("key", _ascii(NAME_LENGTH), primary_key=True),
        sa.Column("job_id", sa.BigInteger()),
        sa.Column("owner", _ascii(TOKEN_LENGTH)),
        sa.Column("count", sa.Integer()),
        sa.Column("expires_at", Instant()),
    ]


def _worker_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", _ascii(NAME_LENGTH), primary_key=True),
        sa.Column("queues", _text(), nullable=False),
        sa.Column("since", Instant(), nullable=False),
        sa.Column("heartbeat", Instant(), nullable=False),
        sa.Column("asleep", sa.Boolean(), nullable=False),
    ]


def _control_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("name", _ascii(NAME_LENGTH), primary_key=True),
        sa.Column("value", _text()),
        sa.Column("created_at", Instant(), nullable=False),
    ]
