"""
Every transaction of the queue's own is bound in how long it waits for a lock, whatever happened on its connection before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, create_engine, event

from sqlqueue import Queue
from sqlqueue._dialects import consumer_options
from tests.rows import listening, put
from tests.servers import Database


def wait_of(connection: Connection) -> Any:
    query = {"postgresql": "SHOW lock_timeout", "sqlite": "PRAGMA busy_timeout"}.get(
        connection.dialect.name, "SELECT @@innodb_lock_wait_timeout"
    )
    return connection.exec_driver_sql(query).scalar_one()


SEVEN_SECONDS = {"postgresql": "7s", "sqlite": 7000, "mysql": 7, "mariadb": 7}


def assert_bound(queue: Queue, seconds: float = 7) -> None:
    engine = queue.consumer.engine
    with engine.connect() as connection, consumer_options(connection, lock_wait=seconds).begin():
        assert wait_of(connection) == SEVEN_SECONDS[engine.dialect.name]


def test_the_next_transaction_waits_as_long_as_it_says(queue: Queue) -> None:
    for seconds in (3, 60, None):
        with queue.consumer.engine.connect() as connection, consumer_options(connection, lock_wait=seconds).begin():
            connection.exec_driver_sql("SELECT 1")
        assert_bound(queue)


def test_what_a_rollback_has_undone_is_set_again(queue: Queue) -> None:
    with queue.consumer.engine.connect() as connection:
        transaction = consumer_options(connection, lock_wait=7).begin()
        transaction.rollback()
    assert_bound(queue)


def test_a_statement_that_fails_undoes_nothing(queue: Queue) -> None:
    with (
        queue.consumer.engine.connect() as connection,
        pytest.raises(sa.exc.DBAPIError),
        consumer_options(connection, lock_wait=7).begin(),
    ):
        connection.exec_driver_sql("SELECT nothing FROM nowhere")
    assert_bound(queue)


@contextmanager
def refusing_commits(observer: Engine) -> Iterator[None]:
    body = "BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = 'P0001'; END"
    with observer.connect() as connection:
        connection.exec_driver_sql(f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON sqlqueue_jobs DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        try:
            yield
        finally:
            connection.exec_driver_sql("DROP TRIGGER refuse ON sqlqueue_jobs")
            connection.exec_driver_sql("DROP FUNCTION refuse")


@pytest.mark.databases("postgresql")
def test_a_commit_that_fails_is_a_rollback(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    with refusing_commits(observer), pytest.raises(sa.exc.DBAPIError, match="refused"):
        queue.consumer.claim(("default",), 1, 42.0, "worker")  # a sixth of the lease
    assert_bound(queue)


def spoil(name: str, driver: Any) -> None:
    statement = {"postgresql": "DISCARD ALL", "sqlite": "PRAGMA busy_timeout = 1"}.get(name, "SET SESSION innodb_lock_wait_timeout = 50")
    driver.rollback()
    if name == "postgresql":
        before, driver.autocommit = driver.autocommit, True
        driver.execute(statement)
        driver.autocommit = before
    else:
        driver.cursor().execute(statement)


@pytest.mark.parametrize("when", ["checkout", "checkin", "reset"])
def test_an_application_that_cleans_its_connections_does_not_undo_it(database: Database, queue: Queue, when: str) -> None:
    theirs = create_engine(database.url)
    event.listen(theirs, when, lambda driver, *rest: spoil(database.name, driver))
    own = Queue(theirs)
    for _ in range(3):
        assert_bound(own)
    own.consumer.close()
    theirs.dispose()


def test_it_is_said_once(queue: Queue) -> None:
    said: list[str] = []
    with listening(queue.consumer.engine, "before_cursor_execute", lambda *arguments: said.append(arguments[2])):
        for _ in range(5):
            queue.claim(lease=60)
    assert len([statement for statement in said if "_timeout" in statement]) == 1
