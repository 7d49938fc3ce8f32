"""
The tables on each database: types, collations, names.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
import sqlalchemy as sa
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine

from sqlqueue import OptionError, Queue
from sqlqueue._dialects import server_of
from sqlqueue._tables import Instant
from sqlqueue.install import render_ddl
from tests.servers import Database


@pytest.mark.parametrize("prefix", ["order", "work queue", "Select", "a-b_", "", "group "])
def test_odd_prefixes_work_from_creation_to_removal(prefix: str, fresh_database: Database) -> None:
    queue = Queue(fresh_database.url, prefix=prefix)
    engine = queue.consumer.engine

    @queue.job(name="odd")
    def odd(n: int) -> None: ...

    queue.metadata.create_all(engine)
    with queue.begin() as session:
        odd.push(session, 1)
        odd.options(unique="key").push(session, 2)
        odd.options(unique="key").push(session, 3)
        queue.push_many(session, [odd.bind(4)])
    for delivery in queue.claim(limit=3):
        queue.fail(queue.renew(delivery), "odd")
    assert queue.failed.retry(all=True) == 3
    assert queue.clear("default") == 3
    queue.metadata.drop_all(engine)
    assert not sa.inspect(engine).get_table_names()
    queue.consumer.close()


@pytest.mark.parametrize("bad", ["drop;", "a'b", 'a"b', "a`b", "x" * 31, "é", "a.b", "a%b", "a\n"])
def test_names_that_no_identifier_should_have_are_refused(bad: str) -> None:
    with pytest.raises(OptionError, match="prefix"):
        Queue(prefix=bad)
    with pytest.raises(OptionError, match="schema"):
        Queue(schema=bad * 3)


def test_two_queues_share_the_tables_of_one_metadata() -> None:
    metadata = sa.MetaData()
    one, other = Queue(metadata=metadata), Queue(metadata=metadata)
    assert one.tables.jobs is other.tables.jobs
    assert Queue(metadata=metadata, prefix="other_").tables.jobs is not one.tables.jobs


def test_instants_keep_their_microseconds_and_their_moment(queue: Queue, engine: Engine) -> None:
    moment = datetime(2027, 3, 28, 2, 30, 59, 999999, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    controls = queue.tables.controls
    with engine.begin() as connection:
        connection.execute(sa.insert(controls).values(name="x", created_at=moment))
        stored = connection.execute(sa.select(controls.c.created_at)).scalar_one()
    assert stored == moment
    assert stored is not None
    assert stored.tzinfo is UTC


@pytest.mark.databases("mysql", "mariadb")
def test_instants_without_fractions_of_a_second_serve(fresh_database: Database) -> None:
    """An older schema, or an administrator, may have made them so. Nothing looks for the moment that it has just written."""
    queue = Queue(fresh_database.url)
    engine = queue.consumer.engine
    queue.metadata.create_all(engine)
    with engine.begin() as connection:
        for table in queue.tables.all:
            for column in table.columns:
                if isinstance(column.type, Instant):
                    null = "NULL" if column.nullable else "NOT NULL"
                    connection.exec_driver_sql(f"ALTER TABLE {table.name} MODIFY {column.name} DATETIME(0) {null}")
    job = queue.job(name="note", max_attempts=2)(lambda: None)
    with queue.begin() as session:
        ids = [
            job.options(available_at=datetime(2025, 1, 1, 0, 0, 1, 999999, tzinfo=UTC), deadline=3600).push(session).id for _ in range(3)
        ]
    done, back, failed = queue.claim(limit=9)
    assert [done.id, back.id, failed.id] == ids
    queue.complete(queue.renew(done, lease=600))
    queue.release(back, error="later")
    queue.fail(failed, "no")
    assert queue.failed.retry(id=failed.id) == 1
    found: list[int] = []
    until = time.monotonic() + 10
    while len(found) < 2:  # a moment may have been rounded up
        assert time.monotonic() < until
        found += (delivery.id for delivery in queue.claim(limit=9, wait=1))
    assert sorted(found) == [back.id, failed.id]
    queue.consumer.close()


@pytest.mark.databases("mysql", "mariadb")
def test_the_indexes_fit_where_rows_are_compact(fresh_database: Database) -> None:
    """The format of older servers, whose indexes take 767 bytes a column."""
    engine = create_engine(fresh_database.url)
    script = render_ddl(Queue().tables, fresh_database.name)
    with engine.begin() as connection:
        for statement in script.replace("ENGINE=InnoDB", "ENGINE=InnoDB ROW_FORMAT=COMPACT").split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
        formats = connection.exec_driver_sql("SELECT row_format FROM information_schema.tables WHERE table_schema = DATABASE()").scalars()
        assert set(formats) == {"Compact"}
    queue = Queue(engine)
    with queue.begin() as session:
        queue.push_named(session, "n" * 190, {}, queue="q" * 80, unique="u" * 190)
    queue.fail(queue.claim("q" * 80)[0], "no")
    assert queue.failed.retry(all=True) == 1
    queue.consumer.close()
    engine.dispose()


def test_naive_instants_never_reach_the_database(queue: Queue, engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(sa.exc.StatementError, match="naive"):
        connection.execute(sa.insert(queue.tables.controls).values(name="x", created_at=datetime(2027, 1, 1)))


def test_exact_columns_compare_byte_for_byte(queue: Queue, engine: Engine) -> None:
    keys = queue.tables.keys
    with engine.begin() as connection:
        for key in ("key", "Key", "KEY", "keY"):  # no spaces: the grammar of stored keys has none
            connection.execute(sa.insert(keys).values(key=key))
        found = connection.execute(sa.select(keys.c.key).where(keys.c.key == "key")).scalars().all()
    assert found == ["key"]


def test_error_texts_hold_any_character_whatever_the_database_defaults_to(queue: Queue, engine: Engine) -> None:
    text = "\N{GRINNING FACE} é \N{CJK UNIFIED IDEOGRAPH-4E2D}" * 30_000
    controls = queue.tables.controls
    with engine.begin() as connection:
        connection.execute(sa.insert(controls).values(name="x", value=text, created_at=datetime.now(UTC)))
        assert connection.execute(sa.select(controls.c.value)).scalar_one() == text


def test_ids_are_not_used_again(queue: Queue, engine: Engine) -> None:
    @queue.job(name="once")
    def once() -> None: ...

    with queue.begin() as session:
        first = once.push(session).id
    assert queue.clear("default") == 1
    with queue.begin() as session:
        assert once.push(session).id > first


def test_every_index_has_the_name_that_the_prefix_gives_it(queue: Queue, engine: Engine) -> None:
    inspector = sa.inspect(engine)
    found = {index["name"] for table in queue.tables.all for index in inspector.get_indexes(table.name)}
    assert found == {
        "sqlqueue_jobs_ready",
        "sqlqueue_failed_jobs_failed_at",
        "sqlqueue_failed_jobs_queue",
        "sqlqueue_keys_expires_at",
    }
    with engine.connect() as connection:
        assert server_of(connection.dialect).poll_max <= 1
