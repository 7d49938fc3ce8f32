"""
The failed table: what it keeps, and putting jobs back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine

from sqlqueue import Fixed, Queue
from sqlqueue._dialects import after
from sqlqueue._driver import failed as driver
from sqlqueue._failure import Reason
from sqlqueue._tables import INNODB
from sqlqueue.errors import OptionError
from tests.rows import (
    PATIENCE,
    can_lock_rows,
    failed_in,
    holding,
    in_processes,
    in_threads,
    jobs_in,
    keys_in,
    lock_of,
    moment_of,
    put,
    statements_of,
)
from tests.servers import Database, Server
from tests.test_plans import BOUND, Crowd, metering
from tests.workers import push, work_off


def fail(queue: Queue, error: BaseException | str = "no", limit: int = 1) -> list[int]:
    deliveries = queue.claim(limit=limit)
    for delivery in deliveries:
        queue.fail(delivery, error)
    return [delivery.id for delivery in deliveries]


def put_failed(observer: Engine, queue: Queue, count: int) -> list[int]:
    """Failed jobs, written in one go."""
    ids = put(observer, queue, count)
    jobs, failed = queue.tables.jobs, queue.tables.failed
    kept = [column.name for column in failed.c if column.name in jobs.c]
    with observer.connect() as connection:
        copied = sa.select(*(jobs.c[name] for name in kept), sa.literal("exception"), jobs.c.due_at)
        connection.execute(sa.insert(failed).from_select([*kept, "reason", "failed_at"], copied))
        connection.execute(sa.delete(jobs))
    return ids


# --- what is recorded -------------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def cycle() -> Exception:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


HARD_TO_WRITE = [
    (ValueError("x" * 1_000_000), "characters cut"),
    (ValueError("\u20ac" * 30_000), "\u20ac"),
    (ValueError("\U0001f4a5" * 200_000), "\U0001f4a5"),
    (ValueError("a\x00b"), "a\u2400b"),
    (ValueError("lone \ud800 surrogate"), "lone ? surrogate"),
    (ValueError(b"\xff\xfe".decode("latin1")), "ÿþ"),
    (ValueError("'; DROP TABLE x; -- \\ %s %(a)s :b ?"), "'; DROP TABLE x; -- \\ %s %(a)s :b ?"),
    (Unspeakable(), "could not be made"),
    (cycle(), "first"),
]


def test_error_texts_of_any_length_and_code_point_are_recorded(queue: Queue, observer: Engine) -> None:
    put(observer, queue, len(HARD_TO_WRITE))
    for error, expected in HARD_TO_WRITE:
        (id,) = fail(queue, error)
        failed = queue.failed.get(id)
        assert failed is not None
        assert failed.error_message is not None
        assert expected in failed.error_message
        assert len(failed.error_message) <= 32 * 1024
        assert (failed.error_class or "").endswith(type(error).__name__)
        assert type(error).__name__ in (failed.traceback or "")
        assert failed.reason is Reason.EXCEPTION


def test_a_text_that_is_no_exception_is_cut_and_cleaned_too(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    (id,) = fail(queue, "text \x00 \ud800 of " + "y" * 1_000_000)
    failed = queue.failed.get(id)
    assert failed is not None
    assert failed.error_message is not None
    assert failed.error_message.startswith("text \u2400 ? of yyy")
    assert len(failed.error_message) <= 32 * 1024
    assert failed.reason is Reason.FAILED_BY_JOB


def test_a_hundred_megabytes_of_error_are_cut(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    (id,) = fail(queue, ValueError("begin" + "x" * 100_000_000 + "end"))
    failed = queue.failed.get(id)
    assert failed is not None
    assert failed.error_message is not None
    assert failed.error_message.startswith("begin")
    assert failed.error_message.endswith("end")


@pytest.mark.databases("mysql", "mariadb")
@pytest.mark.parametrize("charset", ["latin1", "utf8mb3"])
@pytest.mark.parametrize("sql_mode", ["STRICT_ALL_TABLES", ""])
def test_the_database_s_default_character_set_does_not_matter(server: Server, charset: str, sql_mode: str) -> None:
    there = server.create_database()
    url = sa.make_url(there.url).update_query_dict({"charset": charset})
    theirs = create_engine(url, connect_args={"init_command": f"SET sql_mode = '{sql_mode}'"})
    observer = create_engine(there.url, isolation_level="AUTOCOMMIT")
    with observer.connect() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {url.database} CHARACTER SET {charset}")
    queue = Queue(theirs)
    queue.metadata.create_all(theirs)
    text = "\U0001f4a5 \u20ac 漢字 " + "\U0001f4a5" * 30_000
    put(observer, queue, payload='{"n": "\\ud83d\\udca5"}')
    (id,) = fail(queue, ValueError(text))
    failed = queue.failed.get(id)
    assert failed is not None
    assert failed.error_message is not None
    assert failed.error_message.startswith("\U0001f4a5 \u20ac 漢字 \U0001f4a5")
    assert failed.error_message.endswith("\U0001f4a5")
    queue.failed.retry(id=id)
    queue.release(queue.claim()[0], error=text)
    assert jobs_in(observer, queue)[id]["last_error"].startswith("\U0001f4a5 \u20ac")
    queue.consumer.close()
    theirs.dispose()
    observer.dispose()
    server.drop_database(there)


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize(
    ("encoding", "client_encoding"),
    [("UTF8", None), ("UTF8", "latin1"), ("LATIN1", None), ("LATIN1", "utf8")],
)
def test_the_encoding_of_the_database_and_of_the_application_does_not_matter(
    server: Server, encoding: str, client_encoding: str | None
) -> None:
    name = f"{server.shared.name}_in_{encoding}_{client_encoding}".lower()
    maintenance = create_engine(server.url or "", isolation_level="AUTOCOMMIT")
    with maintenance.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    url = sa.make_url(server.shared.url).set(database=name)
    theirs = create_engine(url if client_encoding is None else url.update_query_dict({"client_encoding": client_encoding}))
    queue = Queue(theirs)
    queue.metadata.create_all(theirs)
    queue.job(name="bad", max_attempts=2, backoff=Fixed(0))(raises_any_character)
    try:
        push(queue, "bad")
        assert work_off(queue).counts == {"retrying": 1, "failed": 1}
        (failed,) = queue.failed.list()
        assert "boom" in (failed.error_message or "")
        assert "raises_any_character" in (failed.traceback or "")
        if encoding == "UTF8":
            assert failed.error_message == "boom \U0001f4a5 \u20ac 漢字"
    finally:
        queue.consumer.close()
        theirs.dispose()
        server.drop_database(Database(server.name, url.render_as_string(hide_password=False)))


def raises_any_character() -> None:
    raise ValueError("boom \U0001f4a5 \u20ac 漢字")


def test_the_largest_payload_goes_to_the_failed_table_and_back(queue: Queue, observer: Engine) -> None:
    """A column that holds 64 KiB refuses or cuts it; the quotes take twice the room on the way."""
    for text in ('"\\' * 250_000, "\U0001f4a5" * 80_000):
        with queue.begin() as session:
            pushed = queue.push_named(session, "job", {"text": text}, max_attempts=1)
        before = jobs_in(observer, queue)[pushed.id]["payload"]
        assert len(before) > 900_000
        fail(queue)
        assert failed_in(observer, queue)[pushed.id]["payload"] == before
        assert queue.failed.retry(id=pushed.id) == 1
        (delivery,) = queue.claim()
        assert delivery.payload == {"text": text}
        queue.complete(delivery)


def test_a_failed_job_is_the_job_as_it_was(queue: Queue, observer: Engine) -> None:
    now = moment_of(observer)
    full: dict[str, Any] = {
        "queue": "heavy",
        "name": "reports.build",
        "payload": '{"a": "\\u00e9", "b": [1, null]}',
        "priority": -7,
        "fair_by": "tenant-1",
        "ordered_by": "customer-2",
        "max_attempts": 9,
        "unique_key": "unique:reports.build/x",
        "deadline": now + timedelta(hours=3),
        "headers": '{"trace": "abc"}',
        "chain": "[]",
        "batch_id": 2**40,
    }
    (id,) = put(observer, queue, **full)
    before = jobs_in(observer, queue)[id]
    (delivery,) = queue.claim("heavy")
    queue.fail(delivery, ValueError("no"))
    failed = queue.failed.get(id)
    assert failed is not None
    for name in ("queue", "name", "payload", "priority", "max_attempts", "unique_key", "deadline", "headers", "due_at", "created_at"):
        assert getattr(failed, name) == before[name]
    assert failed.attempts == 1
    assert failed.worker
    assert timedelta(0) <= failed.failed_at - before["created_at"] < timedelta(minutes=1)
    # … and what is put back is that job again.
    assert queue.failed.retry(id=id) == 1
    row = jobs_in(observer, queue)[id]
    kept = {name: value for name, value in full.items() if name not in ("deadline",)}
    assert {name: row[name] for name in kept} == kept
    assert row["attempts"] == 0
    moment = moment_of(observer)
    assert row["due_at"] == row["available_at"] == row["created_at"] <= moment
    assert row["deadline"] - row["created_at"] == full["deadline"] - before["created_at"]
    assert [row[name] for name in ("reserved_until", "reserved_by", "reserved_token", "last_error")] == [None] * 4
    assert keys_in(observer, queue) == {"unique:reports.build/x": id}
    assert queue.failed.get(id) is None


# --- retrying ---------------------------------------------------------------------------------------------------------


def test_a_retried_job_starts_over_and_is_claimed_at_once(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, max_attempts=1)
    fail(queue)
    assert queue.failed.retry(id=id) == 1
    (delivery,) = queue.claim()
    assert (delivery.id, delivery.attempt, delivery.reclaimed_from) == (id, 1, None)


def test_a_key_that_another_job_has_taken_is_left_to_it(queue: Queue, observer: Engine) -> None:
    queue.job(name="job")(lambda: None)
    with queue.begin() as session:
        first = queue.push_named(session, "job", {}, unique="a").id
    fail(queue)
    with queue.begin() as session:
        second = queue.push_named(session, "job", {}, unique="a")
    assert second.created
    assert queue.failed.retry(id=first) == 1
    jobs = jobs_in(observer, queue)
    assert (jobs[first]["unique_key"], jobs[second.id]["unique_key"]) == (None, "unique:job/a")
    assert keys_in(observer, queue) == {"unique:job/a": second.id}


def test_of_two_failed_jobs_with_one_key_the_first_that_is_retried_holds_it(queue: Queue, observer: Engine) -> None:
    queue.job(name="job")(lambda: None)
    ids = []
    for _ in range(2):
        with queue.begin() as session:
            ids.append(queue.push_named(session, "job", {}, unique="a").id)
        fail(queue)
    assert queue.failed.retry(all=True) == 2
    assert [jobs_in(observer, queue)[id]["unique_key"] for id in ids] == ["unique:job/a", None]
    with queue.begin() as session:
        assert queue.push_named(session, "job", {}, unique="a").id == ids[0]


def test_a_deadline_at_the_end_of_time_moves_no_further(queue: Queue, observer: Engine) -> None:
    latest = datetime.max.replace(tzinfo=UTC)
    (id,) = put(observer, queue, deadline=latest, created_at=moment_of(observer) - timedelta(days=1))
    fail(queue)
    assert queue.failed.retry(id=id) == 1
    assert queue.claim()[0].deadline == latest


def test_a_deadline_that_had_passed_is_as_far_away_as_at_the_push(queue: Queue, observer: Engine) -> None:
    (id,) = put(observer, queue, due_in=-3600, deadline=moment_of(observer) - timedelta(seconds=3540))
    assert queue.claim() == []
    assert queue.failed.retry(id=id) == 1
    (delivery,) = queue.claim()
    assert delivery.deadline is not None
    assert timedelta(seconds=30) < delivery.deadline - moment_of(observer) <= timedelta(seconds=61)


def test_two_operators_who_retry_one_job_at_once_make_one_job(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 5)
    ids = fail(queue, limit=5)
    counts = in_threads(4, lambda number: queue.failed.retry(id=ids))
    assert sum(counts) == 5
    assert sorted(jobs_in(observer, queue)) == ids
    assert failed_in(observer, queue) == {}


def test_a_job_that_another_operator_has_in_hand_is_left_to_him(queue: Queue, observer: Engine, engine: Engine) -> None:
    if not can_lock_rows(engine):
        pytest.skip("there are no row locks here")
    put(observer, queue, 3)
    taken, *others = fail(queue, limit=3)
    failed = queue.tables.failed
    with holding(engine, lock_of(failed, failed.c.id == taken)):
        assert queue.failed.retry(id=[taken, others[0]]) == 1
        assert queue.failed.forget(all=True) == 1
    assert queue.failed.retry(all=True) == 1


def test_somebody_who_pushes_the_same_key_is_waited_for(queue: Queue, observer: Engine, engine: Engine) -> None:
    queue.job(name="job")(lambda: None)
    with queue.begin() as session:
        id = queue.push_named(session, "job", {}, unique="a").id
    fail(queue)
    counts: list[int] = []
    with engine.connect() as connection, connection.begin() as transaction:
        other = queue.push_named(connection, "job", {}, unique="a").id
        retrying = threading.Thread(target=lambda: counts.append(queue.failed.retry(id=id)))
        retrying.start()
        retrying.join(0.1)
        assert retrying.is_alive()
        transaction.commit()
        retrying.join(PATIENCE)
    assert counts == [1]
    assert {job: row["unique_key"] for job, row in jobs_in(observer, queue).items()} == {id: None, other: "unique:job/a"}


RETRY_ALL = """
print(queue.failed.retry(all=True))
queue.consumer.close()
"""


def test_everything_is_more_than_one_group(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "GROUP", 4)
    ids = put_failed(observer, queue, 10)
    assert queue.failed.retry(all=True) == 10
    assert sorted(jobs_in(observer, queue)) == ids


def test_three_processes_that_retry_everything_at_once_retry_each_once(queue: Queue, observer: Engine, database: Database) -> None:
    ids = put_failed(observer, queue, 250)
    counts = [int(output) for output in in_processes(3, database.url, RETRY_ALL)]
    assert sum(counts) == len(ids)
    assert sorted(jobs_in(observer, queue)) == ids
    assert failed_in(observer, queue) == {}


def test_retrying_and_forgetting_at_once_leaves_each_job_in_one_place(queue: Queue, observer: Engine) -> None:
    ids = put_failed(observer, queue, 300)
    operations = [
        lambda: queue.failed.retry(id=ids[:150]),
        lambda: queue.failed.forget(all=True),
        lambda: queue.failed.forget(before=datetime.now(UTC) + timedelta(hours=1)),
    ]
    counts = in_threads(3, lambda number: operations[number]())
    left = len(failed_in(observer, queue))  # passed over because another one had it in hand
    assert sum(counts) + left == len(ids)
    assert len(jobs_in(observer, queue)) == counts[0]


# --- forgetting and reading ---------------------------------------------------------------------------------------------


def test_jobs_are_forgotten_by_id_by_time_and_altogether(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 4)
    one, two, three, four = fail(queue, limit=4)
    failed = queue.tables.failed
    old = moment_of(observer) - timedelta(days=8)
    with observer.connect() as connection:
        connection.execute(sa.update(failed).where(failed.c.id == two).values(failed_at=old))
    assert queue.failed.forget(id=one) == 1
    assert queue.failed.forget(id=[one, 10**12]) == 0
    assert queue.failed.forget(before=old) == 0
    assert queue.failed.forget(before=moment_of(observer) - timedelta(days=7)) == 1
    assert sorted(failed_in(observer, queue)) == [three, four]
    assert queue.failed.forget(all=True) == 2
    assert queue.failed.count() == 0


def test_many_jobs_are_forgotten_a_group_at_a_time(queue: Queue, observer: Engine) -> None:
    put_failed(observer, queue, 1200)
    with statements_of(queue.consumer.engine) as seen:
        assert queue.failed.forget(all=True) == 1200
    assert len(seen) == 10  # three times: which, lock, delete; and the look that finds no more


def test_the_newest_failure_comes_first(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 3)
    put(observer, queue, queue="mail", name="mail.send", priority=5)
    ids = fail(queue, limit=3)
    queue.fail(queue.claim("mail")[0], "no")
    newest = max(failed_in(observer, queue))
    assert [job.id for job in queue.failed.list()] == [newest, *reversed(ids)]
    assert [job.id for job in queue.failed.list(limit=2)] == [newest, ids[-1]]
    assert [job.name for job in queue.failed.list(queue="mail")] == ["mail.send"]
    assert [job.queue for job in queue.failed.list(name="mail.send")] == ["mail"]
    assert (queue.failed.count(), queue.failed.count("mail"), queue.failed.count("other")) == (4, 1, 0)


def test_a_long_failed_table_is_read_by_its_indexes(queue: Queue, observer: Engine, server: Server) -> None:
    ids = put_failed(observer, queue, 3000)
    failed = queue.tables.failed
    with observer.connect() as connection:
        connection.execute(sa.update(failed).values(failed_at=after(failed.c.id * 1_000_000), traceback="x" * 3000))
        connection.exec_driver_sql(f"ANALYZE TABLE {failed.name}" if connection.dialect.name in INNODB else "ANALYZE")
    crowd = Crowd(queue, observer, server)
    readings: dict[str, Callable[[], object]] = {
        "the newest": lambda: queue.failed.list(),
        "the newest of a queue": lambda: queue.failed.list(queue="default"),
        "one": lambda: queue.failed.get(ids[7]),
        "retrying one": lambda: queue.failed.retry(id=ids[7]),
        "forgetting one": lambda: queue.failed.forget(id=ids[8]),
    }
    for what, read in readings.items():
        with metering(crowd) as seen:
            read()
        for reading in seen:
            assert reading.rows <= BOUND, f"{what}: {reading.rows} rows read by {reading.statement}"
            assert not any("TEMP B-TREE" in step for step in reading.scans), f"{what}: {reading.scans}"


def test_a_job_that_is_not_there_is_not_found(queue: Queue) -> None:
    for id in (0, -1, 10**12, 2**63, 2**70):
        assert queue.failed.get(id) is None
        assert queue.failed.retry(id=id) == 0
        assert queue.failed.forget(id=[id]) == 0


def test_exactly_one_selector_is_wanted(queue: Queue) -> None:
    for call in (
        queue.failed.retry,
        lambda: queue.failed.retry(id=1, all=True),
        queue.failed.forget,
        lambda: queue.failed.forget(id=1, all=True),
        lambda: queue.failed.forget(before=datetime.now(UTC), all=True),
    ):
        with pytest.raises(OptionError, match="exactly one"):
            call()
    with pytest.raises(OptionError, match="naive"):
        queue.failed.forget(before=datetime(2026, 1, 1))
    with pytest.raises(OptionError, match="limit"):
        queue.failed.list(limit=0)


def test_a_reason_of_a_later_version_is_shown_as_it_is(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    (id,) = fail(queue)
    with observer.connect() as connection:
        connection.execute(sa.update(queue.tables.failed).values(reason="eaten_by_dog"))
    failed = queue.failed.get(id)
    assert failed is not None
    assert failed.reason == "eaten_by_dog"
    assert failed.payload not in repr(failed)
