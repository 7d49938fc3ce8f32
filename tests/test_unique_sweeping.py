"""
Expired keys that no job holds are swept by the workers.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from sqlqueue import Queue
from sqlqueue._driver import keys as driver
from sqlqueue._driver.keys import LONGEST_AGO
from sqlqueue._worker import sweeping
from sqlqueue._worker.shift import Shift
from sqlqueue._worker.summary import Limits
from sqlqueue._worker.sweeping import Sweeping
from tests.producers import key_names
from tests.rows import Trap, at_commit, holding, lock_of, moment_of, put, statements_of
from tests.workers import eventually, working


def write_keys(observer: Engine, queue: Queue, names: list[str], *, expired_for: float | None, job_id: int | None = None) -> None:
    """The first of them has expired first."""
    moment = moment_of(observer)
    rows = [
        {
            "key": name,
            "job_id": job_id,
            "expires_at": None if expired_for is None else moment - timedelta(seconds=expired_for) + timedelta(milliseconds=place),
        }
        for place, name in enumerate(names)
    ]
    with observer.connect() as connection:
        connection.execute(sa.insert(queue.tables.keys), rows)


def test_a_hundred_expired_keys_are_swept_at_once_the_oldest_first(observer: Engine, queue: Queue) -> None:
    names = [f"once:{number:03}" for number in range(250)]
    write_keys(observer, queue, names, expired_for=60)
    for left in (150, 50, 0):
        assert queue.consumer.sweep_keys() == LONGEST_AGO
        assert key_names(observer, queue) == names[250 - left :]


def test_what_has_not_expired_or_never_will_stays(observer: Engine, queue: Queue) -> None:
    write_keys(observer, queue, ["once:ahead"], expired_for=-60)
    write_keys(observer, queue, ["once:never"], expired_for=None)
    queue.consumer.sweep_keys()
    assert key_names(observer, queue) == ["once:ahead", "once:never"]


def test_a_key_that_a_job_holds_stays(observer: Engine, queue: Queue) -> None:
    held, other = put(observer, queue, 1, unique_key="unique:job/held") + put(observer, queue, 1)
    write_keys(observer, queue, ["unique:job/held"], expired_for=60, job_id=held)
    write_keys(observer, queue, ["unique:job/let-go"], expired_for=60, job_id=other)
    write_keys(observer, queue, ["unique:job/gone"], expired_for=60, job_id=10**12)
    queue.consumer.sweep_keys()
    assert key_names(observer, queue) == ["unique:job/held"]


def test_many_keys_that_jobs_hold_hide_the_others_only_for_a_while(observer: Engine, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LOOKED_AT", 10)
    driver._expired.cache_clear()
    for number, id in enumerate(put(observer, queue, 25)):
        with observer.connect() as connection:
            connection.execute(queue.tables.jobs.update().where(queue.tables.jobs.c.id == id).values(unique_key=f"unique:job/{number}"))
        write_keys(observer, queue, [f"unique:job/{number}"], expired_for=100 - number, job_id=id)
    write_keys(observer, queue, ["once:a"], expired_for=10)
    since = queue.consumer.sweep_keys()
    since = queue.consumer.sweep_keys(since)
    assert len(key_names(observer, queue)) == 26
    assert queue.consumer.sweep_keys(since) == LONGEST_AGO
    assert len(key_names(observer, queue)) == 25
    driver._expired.cache_clear()


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_a_key_that_somebody_has_locked_is_left_for_the_next_time(engine: Engine, observer: Engine, queue: Queue) -> None:
    write_keys(observer, queue, ["once:a", "once:b", "once:c"], expired_for=60)
    keys = queue.tables.keys
    with holding(engine, lock_of(keys, keys.c.key == "once:b")):
        queue.consumer.sweep_keys()
        assert key_names(observer, queue) == ["once:b"]
    queue.consumer.sweep_keys()
    assert key_names(observer, queue) == []


def test_a_key_that_is_taken_again_after_the_look_stays(engine: Engine, observer: Engine, queue: Queue) -> None:
    write_keys(observer, queue, ["once:a", "once:b", "unique:job/a"], expired_for=60, job_id=10**12)
    tables, consumer = queue.tables, queue.consumer
    found, _ = consumer.read(lambda connection: driver.expired_keys(connection, tables, LONGEST_AGO))
    assert len(found) == 3
    with engine.begin() as caller:
        assert queue.once(caller, "a", expire_after=60)
        assert queue.push_named(caller, "job", {}, unique="a").created
    assert consumer.write(lambda connection: driver.delete_expired(connection, tables, found)) == 1
    assert key_names(observer, queue) == ["once:a", "unique:job/a"]


def test_a_look_that_finds_nothing_is_one_statement_that_writes_nothing(observer: Engine, queue: Queue) -> None:
    write_keys(observer, queue, ["once:ahead"], expired_for=-60)
    with statements_of(queue.consumer.engine) as seen:
        queue.consumer.sweep_keys()
    assert [statement.split()[0] for statement, _ in seen] == ["SELECT"]


# --- the worker ---------------------------------------------------------------------------------------------------------


def test_a_worker_sweeps_while_it_waits(observer: Engine, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "INTERVAL", 0.05)
    write_keys(observer, queue, [f"once:{number}" for number in range(150)], expired_for=60)
    write_keys(observer, queue, ["once:ahead"], expired_for=-60)
    with working(queue):
        eventually(lambda: key_names(observer, queue) == ["once:ahead"])


def test_it_looks_about_once_a_minute_and_not_when_it_starts(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(monotonic=lambda: now))
    swept = Sweeping(Shift(queue, ("default",), Limits(), concurrency=2, lease=60, name="tested"))
    with statements_of(queue.consumer.engine) as seen:
        counts = []
        for _ in range(600):
            swept.sweep_when_due()
            counts.append(len(seen))
            now += 1
    assert counts[0] == 0
    assert 8 <= counts[-1] <= 14
    assert all(after <= before + 1 for before, after in zip(counts, counts[44:], strict=False))


def test_trouble_with_the_sweeping_is_not_the_workers(
    observer: Engine, queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sweeping, "INTERVAL", 0.0)
    swept = Sweeping(Shift(queue, ("default",), Limits(), concurrency=2, lease=60, name="tested"))
    write_keys(observer, queue, ["once:a"], expired_for=60)

    def fail(connection: Connection) -> None:
        raise sa.exc.TimeoutError("made up")

    with caplog.at_level("INFO", logger="sqlqueue"), at_commit(queue.consumer.engine, Trap(fail)):
        swept.sweep_when_due()
    assert "could not be swept: " in caplog.text
    swept.sweep_when_due()
    assert key_names(observer, queue) == []
