"""
The tables on each database: types, collations, names.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sqlqueue import OptionError, Queue
from sqlqueue._dialects import server_of
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
