"""
Claiming from several places at once: no row to two claims, whatever the server can do.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from typing import Any

import pymysql
import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url

from sqlqueue import Queue
from tests.rows import PATIENCE, before_each, can_lock_rows, in_processes, in_threads, jobs_in, put, put_each, treat_server_as
from tests.servers import Database

CAPABILITIES = {
    "as it is": {},
    "in two statements": {"claim_in_one_statement": False},
    "without SKIP LOCKED": {"claim_in_one_statement": False, "skip_locked": False},
    "without row locks": {"claim_in_one_statement": False, "skip_locked": False, "row_locks": False},
    "in one statement without row locks": {"skip_locked": False, "row_locks": False},
}

CLAIM_ALL = """
found = []
while deliveries := queue.claim(limit=7):
    found += [[d.id, d.attempt] for d in deliveries]
print(json.dumps(found))
queue.consumer.close()
"""


def wait_for(barrier: threading.Barrier) -> None:
    barrier.wait(PATIENCE)


def drain(queue: Queue) -> list[int]:
    found: list[int] = []
    while deliveries := queue.claim(limit=3):
        found += [delivery.id for delivery in deliveries]
    return found


@pytest.mark.parametrize("treated", CAPABILITIES)
def test_threads_that_race_for_the_same_rows_never_get_one_twice(
    queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch, treated: str
) -> None:
    treat_server_as(monkeypatch, **CAPABILITIES[treated])
    expected = put(observer, queue, 60)

    def hold_apart(connection: Connection) -> None:
        time.sleep(0.005)  # between the candidates and the UPDATE

    with before_each(queue.consumer.engine, "UPDATE", hold_apart):
        found = Counter(id for ids in in_threads(4, lambda number: drain(queue)) for id in ids)
    # Some claims may have come back empty, the row that they wanted being locked: what they left is found now.
    found.update(drain(queue))
    assert found == Counter(expected)
    assert {row["attempts"] for row in jobs_in(observer, queue).values()} == {1}


def test_two_claims_that_have_read_the_same_candidates_share_none(
    queue: Queue, observer: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing locked, the condition in the UPDATE is all that there is."""
    if not can_lock_rows(engine):
        pytest.skip("one transaction at a time writes here: two cannot come so far")
    treat_server_as(monkeypatch, **CAPABILITIES["without row locks"])
    expected = put(observer, queue, 5)
    both_have_read = threading.Barrier(2)
    with before_each(queue.consumer.engine, "UPDATE", lambda connection: wait_for(both_have_read)):
        one, other = in_threads(2, lambda number: queue.claim(limit=5))
    assert sorted(delivery.id for delivery in one + other) == expected
    tokens = {row["id"]: row["reserved_token"] for row in jobs_in(observer, queue).values()}
    assert all(tokens[delivery.id] == delivery.token for delivery in one + other)


def test_processes_that_race_for_the_same_rows_never_get_one_twice(queue: Queue, observer: Engine, database: Database) -> None:
    expected = put_each(observer, queue, [{"lease_in": -60}, {}] * 150)
    outputs = in_processes(3, database.url, CLAIM_ALL)
    found = Counter(id for output in outputs for id, attempt in json.loads(output))
    found.update(drain(queue))
    assert found == Counter(expected)


def test_processes_share_a_sqlite_file_with_a_write_ahead_log(queue: Queue, observer: Engine, engine: Engine, database: Database) -> None:
    if can_lock_rows(engine):
        pytest.skip("there is no such mode here")
    with observer.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar_one() == "wal"
    expected = put(observer, queue, 300)
    found = Counter(id for output in in_processes(3, database.url, CLAIM_ALL) for id, attempt in json.loads(output))
    assert found == Counter(expected)


@pytest.mark.databases("mysql", "mariadb")
def test_a_driver_that_counts_changed_rows_instead_of_found_ones_does_no_harm(queue: Queue, observer: Engine, database: Database) -> None:
    url = make_url(database.url)
    arguments: dict[str, Any] = {
        "host": url.host,
        "port": url.port,
        "user": url.username,
        "password": url.password,
        "database": url.database,
    }
    theirs = create_engine(database.url, creator=lambda: pymysql.connect(**arguments))  # without SQLAlchemy's FOUND_ROWS
    own = Queue(theirs)
    expected = put(observer, own, 20)
    found = [delivery for _ in range(4) for delivery in own.claim(limit=5)]
    assert [delivery.id for delivery in found] == expected
    assert own.consumer.renew([(one.id, one.token) for one in found], 600)[0] == set(expected)
    for delivery in found:
        own.complete(delivery)
    own.consumer.close()
    theirs.dispose()
