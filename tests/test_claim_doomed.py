"""
Jobs that a claim must not hand out: their attempts are used, their deadline has passed, their row is damaged.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Queue
from sqlqueue._queue import claims
from sqlqueue._queue import consumer as consumers
from sqlqueue.errors import StaleDelivery
from tests.rows import (
    PATIENCE,
    can_lock_rows,
    change,
    expire,
    failed_in,
    holding,
    jobs_in,
    keys_in,
    lock_of,
    make_due,
    moment_of,
    put,
    put_each,
    put_key,
)

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
DAMAGED: dict[str, dict[str, Any]] = {
    "cut short": {"payload": "{"},
    "empty": {"payload": ""},
    "a list": {"payload": "[1]"},
    "null": {"payload": "null"},
    "a text": {"payload": '"x"'},
    "not a number": {"payload": '{"n": NaN}'},
    "too deep": {"payload": DEEP},
    "a number without end": {"payload": '{"n": ' + "9" * 5000 + "}"},
    "no JSON at all": {"payload": "pickled \U0001f4a5\n\t'\"\\"},
    "negative attempts": {"attempts": -1},
    "no attempt allowed": {"max_attempts": 0},
    "negative attempts allowed": {"attempts": -5, "max_attempts": -4},
    "headers that are a list": {"headers": "[]"},
    "headers that are numbers": {"headers": '{"a": 1}'},
}


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_a_job_whose_attempts_are_used_is_moved_with_its_last_error(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, attempts=3, max_attempts=3, last_error="ValueError: no stock")
    before = jobs_in(observer, queue)[id]
    assert queue.claim() == []
    assert jobs_in(observer, queue) == {}
    failed = failed_in(observer, queue)[id]
    assert failed["reason"] == "max_attempts_exceeded"
    assert failed["error_message"] == "all 3 attempts are used; the last error was: ValueError: no stock"
    assert {name: failed[name] for name in before if name in failed} == {name: before[name] for name in before if name in failed}


def test_a_job_whose_worker_died_on_its_last_attempt_names_that_worker(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, lease_in=-1, attempts=2, max_attempts=2, last_error="OSError: first try")
    assert queue.claim() == []
    failed = failed_in(observer, queue)[id]
    assert failed["reason"] == "worker_lost"
    assert failed["worker"] == "dead:1"
    assert failed["attempts"] == 2
    assert failed["error_message"] == "worker dead:1 died or lost its lease during attempt 2 of 2; the last error was: OSError: first try"
    assert failed["failed_at"] <= moment_of(observer)


def test_a_last_attempt_is_nobody_else_s_business_until_its_lease_ends_and_then_it_fails_once(queue: Queue, observer: Engine) -> None:
    """All attempts are used while the last one runs: another worker that looks must not take that for the end."""
    id, other = put(observer, queue, 2, max_attempts=1)
    (delivery,) = queue.claim(lease=600)
    before = jobs_in(observer, queue)[id]
    (another,) = queue.claim(limit=5)
    assert another.id == other
    assert (jobs_in(observer, queue)[id], failed_in(observer, queue)) == (before, {})
    queue.complete(another)
    expire(observer, queue)
    assert queue.claim() == []
    failed = failed_in(observer, queue)
    assert [(row["id"], row["reason"]) for row in failed.values()] == [(id, "worker_lost")]
    for late in (lambda: queue.complete(delivery), lambda: queue.fail(delivery, "too late")):
        with pytest.raises(StaleDelivery):
            late()
    assert (jobs_in(observer, queue), failed_in(observer, queue)) == ({}, failed)


def test_the_job_behind_one_that_is_moved_is_handed_out_by_the_same_claim(queue: Queue, observer: Engine) -> None:
    put(observer, queue, attempts=3, max_attempts=3, due_in=-60)
    (good,) = put(observer, queue)
    assert [delivery.id for delivery in queue.claim()] == [good]


def test_lowering_the_attempts_of_a_waiting_job_ends_it(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, max_attempts=5)
    for _ in range(2):
        queue.release(queue.claim()[0], error="x")
    change(observer, queue, [id], max_attempts=1)
    assert queue.claim() == []
    assert failed_in(observer, queue)[id]["attempts"] == 2


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_job_past_its_deadline_is_never_handed_out(queue: Queue, observer: Engine) -> None:
    now = moment_of(observer)
    (late,) = put(observer, queue, deadline=now - timedelta(seconds=1))
    (early,) = put(observer, queue, deadline=now + timedelta(hours=1))
    (delivery,) = queue.claim(limit=2)
    assert delivery.id == early
    assert delivery.deadline == now + timedelta(hours=1)
    failed = failed_in(observer, queue)[late]
    assert (failed["reason"], failed["attempts"]) == ("deadline_exceeded", 0)


def test_a_deadline_that_passes_between_two_attempts_ends_the_job(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, deadline=moment_of(observer) + timedelta(hours=1))
    queue.release(queue.claim()[0], error="try again")
    change(observer, queue, [id], deadline=moment_of(observer) - timedelta(seconds=1))
    assert queue.claim() == []
    failed = failed_in(observer, queue)[id]
    assert (failed["reason"], failed["attempts"]) == ("deadline_exceeded", 1)
    assert failed["error_message"].endswith("the last error was: try again")


def test_a_running_job_may_pass_its_deadline(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, deadline=moment_of(observer) + timedelta(hours=1))
    (delivery,) = queue.claim()
    change(observer, queue, [id], deadline=moment_of(observer) - timedelta(seconds=1))
    queue.complete(delivery)
    assert failed_in(observer, queue) == {}


def test_a_deadline_at_the_end_of_time_harms_nobody(queue: Queue, observer: Engine) -> None:
    put(observer, queue, deadline=datetime.max.replace(tzinfo=UTC))
    (delivery,) = queue.claim()
    assert delivery.deadline == datetime.max.replace(tzinfo=UTC)


def test_a_deadline_that_no_datetime_can_hold_stops_nobody(queue: Queue, observer: Engine) -> None:
    unreadable = {"postgresql": "'infinity'", "sqlite": "'some day'"}.get(observer.dialect.name, "'9999-12-31 23:59:59.999999'")
    ids = put(observer, queue, 2)
    with observer.connect() as connection:
        table = observer.dialect.identifier_preparer.format_table(queue.tables.jobs)
        connection.exec_driver_sql(f"UPDATE {table} SET deadline = {unreadable} WHERE id = {ids[0]}")
    assert [delivery.id for delivery in queue.claim(limit=5)] == ids


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True], ids=["fresh", "reclaimed"])
def test_damaged_rows_are_moved_at_once_as_they_are(queue: Queue, observer: Engine, held: bool) -> None:
    lease = {"lease_in": -1} if held else {}
    damaged = put_each(observer, queue, [lease | values for values in DAMAGED.values()])
    before = jobs_in(observer, queue)
    good = put(observer, queue)
    assert [delivery.id for delivery in queue.claim(limit=50)] == good
    failed = failed_in(observer, queue)
    assert sorted(failed) == damaged
    for id in damaged:
        assert failed[id]["reason"] == "damaged"
        assert failed[id]["error_message"].startswith("the row is damaged: ")
        kept = [name for name in before[id] if name in failed[id]]
        assert {name: failed[id][name] for name in kept} == {name: before[id][name] for name in kept}


def test_a_payload_of_bytes_is_moved_byte_for_byte(queue: Queue, observer: Engine, engine: Engine) -> None:
    """Only SQLite stores what it is given, whatever the type of the column."""
    if can_lock_rows(engine):
        pytest.skip("the column holds text only")
    blob = b"\x80\x04\x95\x00\xff\xfe"
    (id,) = put(observer, queue)
    with observer.connect() as connection:
        connection.exec_driver_sql("UPDATE sqlqueue_jobs SET payload = ?", (blob,))
    assert queue.claim() == []
    with observer.connect() as connection:
        assert connection.exec_driver_sql("SELECT payload, typeof(payload) FROM sqlqueue_failed_jobs").one() == (blob, "blob")
    assert queue.failed.retry(id=id) == 1
    with observer.connect() as connection:
        assert connection.exec_driver_sql("SELECT payload FROM sqlqueue_jobs").one() == (blob,)


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_many_damaged_rows_do_not_keep_a_claim_from_the_good_one_behind(queue: Queue, observer: Engine, limit: int) -> None:
    put(observer, queue, 50, payload="[]", due_in=-60)
    good = put(observer, queue)
    assert [delivery.id for delivery in queue.claim(limit=limit)] == good
    assert len(failed_in(observer, queue)) == 50


def test_a_thousand_jobs_past_their_deadline_are_moved_by_one_claim(
    queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "CLEARING_TIME", PATIENCE)
    put(observer, queue, 1000, due_in=-60, deadline=moment_of(observer) - timedelta(hours=1))
    good = put(observer, queue)
    assert [delivery.id for delivery in queue.claim(limit=1000)] == good
    assert queue.failed.count() == 1000


def test_jobs_that_must_not_run_do_not_starve_the_lanes_below(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "DOOMED_ROUNDS", 2)
    monkeypatch.setattr(consumers, "CLEARING_TIME", 0.0)
    put(observer, queue, 10, payload="[]", priority=5)
    good = put(observer, queue)
    assert [delivery.id for delivery in queue.claim()] == good
    assert queue.failed.count() == 2


@pytest.mark.parametrize("attempts", [2**31 - 1, 2**31 - 2])
def test_the_largest_counts_that_fit_stop_nobody(queue: Queue, observer: Engine, attempts: int) -> None:
    largest = put(observer, queue, attempts=attempts, max_attempts=2**31 - 1)
    largest += put(observer, queue, attempts=attempts, max_attempts=2**31 - 1, lease_in=-1)
    good = put(observer, queue)
    assert good[0] in [delivery.id for delivery in queue.claim(limit=5)]


def test_rows_without_a_worker_s_name_are_reclaimed_all_the_same(queue: Queue, observer: Engine) -> None:
    put(observer, queue, lease_in=-1, reserved_by=None, reserved_token=None)
    (delivery,) = queue.claim()
    assert delivery.reclaimed_from is not None


def test_a_job_that_cannot_be_moved_stops_nobody(queue: Queue, observer: Engine) -> None:
    """A failed job has its id already: somebody has emptied the jobs table so that ids began again, or restored the other one."""
    (id,) = put(observer, queue, payload="[]", due_in=-60)
    tables = queue.tables
    columns = [column.name for column in tables.failed.c if column.name in tables.jobs.c]
    source = sa.select(*(tables.jobs.c[name] for name in columns), sa.literal("exception"), tables.jobs.c.created_at)
    with observer.connect() as connection:
        connection.execute(sa.insert(tables.failed).from_select([*columns, "reason", "failed_at"], source.where(tables.jobs.c.id == id)))
    good = put(observer, queue)
    assert [delivery.id for delivery in queue.claim(limit=5)] == good
    assert id in failed_in(observer, queue)


# --- a unique key that somebody else has locked -----------------------------------------------------------------------


def test_moving_a_job_frees_its_key(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, payload="[]")
    put_key(observer, queue, id, "unique:job/a")
    assert queue.claim() == []
    assert keys_in(observer, queue) == {}


@pytest.mark.parametrize(
    ("doomed", "reason", "worker"),
    [
        ({"payload": "[]"}, "damaged", None),
        ({"attempts": 5}, "max_attempts_exceeded", None),
        ({"attempts": 5, "lease_in": -1}, "worker_lost", "dead:1"),
    ],
    ids=["damaged", "exhausted", "worker lost"],
)
def test_a_job_whose_key_is_locked_stays_as_it_was_and_the_others_go_on(
    queue: Queue, observer: Engine, engine: Engine, doomed: dict[str, Any], reason: str, worker: str | None
) -> None:
    if not can_lock_rows(engine):
        pytest.skip("there are no row locks here")
    (id,) = put_each(observer, queue, [{"due_in": -60} | doomed])
    put_key(observer, queue, id, "unique:job/a")
    before = jobs_in(observer, queue)[id]
    good = put(observer, queue)
    keys = queue.tables.keys
    with holding(engine, lock_of(keys, keys.c.key == "unique:job/a")):
        assert [delivery.id for delivery in queue.claim()] == good
        row = jobs_in(observer, queue)[id]
        # For a moment it is out of reach, so that it is not found first by every claim.
        assert row.pop("available_at") > before.pop("available_at")
        assert row == before
        assert failed_in(observer, queue) == {}
        assert queue.claim() == []
    change(observer, queue, [id], available_at=moment_of(observer) - timedelta(seconds=1))
    assert queue.claim() == []
    failed = failed_in(observer, queue)[id]
    assert failed["reason"] == reason
    assert worker is None or failed["worker"] == worker
    assert failed["attempts"] == before["attempts"]
    assert keys_in(observer, queue) == {}


# --- together ---------------------------------------------------------------------------------------------------------


def test_a_mixture_is_sorted_out_in_one_claim(queue: Queue, observer: Engine) -> None:
    now = moment_of(observer)
    kinds: list[dict[str, Any]] = [
        {"payload": "{"},
        {},
        {"attempts": 5},
        {"deadline": now - timedelta(seconds=5)},
        {"attempts": -1},
        {},
        {"lease_in": -1, "attempts": 5},
        {"lease_in": -1, "attempts": 2},
        {},
    ]
    ids = put_each(observer, queue, [kind | {"due_in": -100 + n} for n, kind in enumerate(kinds)])
    found = {delivery.id for delivery in queue.claim(limit=9)}
    assert found == {ids[1], ids[5], ids[7], ids[8]}
    reasons = {id: row["reason"] for id, row in failed_in(observer, queue).items()}
    assert reasons == {
        ids[0]: "damaged",
        ids[2]: "max_attempts_exceeded",
        ids[3]: "deadline_exceeded",
        ids[4]: "damaged",
        ids[6]: "worker_lost",
    }


def test_a_released_job_with_used_attempts_is_moved_when_it_is_due(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, max_attempts=1)
    (delivery,) = queue.claim()
    queue.release(delivery, error=RuntimeError("no luck"), delay=60)
    assert queue.claim() == []
    assert failed_in(observer, queue) == {}
    make_due(observer, queue)
    expire(observer, queue)
    assert queue.claim() == []
    failed = failed_in(observer, queue)[id]
    assert (failed["reason"], failed["attempts"]) == ("max_attempts_exceeded", 1)
    assert "RuntimeError: no luck" in failed["error_message"]


@pytest.mark.databases("sqlite")
def test_a_thousand_are_moved_where_a_statement_takes_999_parameters(queue: Queue, observer: Engine) -> None:
    """As SQLite does before 3.32."""

    def limit(connection: Any, record: object) -> None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)

    sa.event.listen(queue.consumer.engine, "connect", limit)
    ids = put(observer, queue, 1000, payload="[]")
    assert queue.claim(limit=1000) == []
    assert sorted(failed_in(observer, queue)) == ids
