"""
C11 from the producer's side: one clock, the database's; delays are floors; instants are instants, whatever zone anybody is in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Job, OptionError, Queue
from sqlqueue._dialects import now
from tests.producers import only_job, statements

JobOfNumber = Job[[int], None]
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def send_invoice(queue: Queue) -> JobOfNumber:
    @queue.job(name="invoices.send")
    def send_invoice(number: int) -> None: ...

    return send_invoice


def clock(observer: Engine) -> datetime:
    with observer.connect() as connection:
        moment = connection.execute(sa.select(now())).scalar_one()
    assert moment is not None
    return moment


def empty(observer: Engine, queue: Queue) -> None:
    with observer.connect() as connection:
        connection.execute(queue.tables.jobs.delete())


def test_a_delay_counts_from_the_push_statement_and_is_a_floor(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    with engine.connect() as connection:
        connection.execute(sa.select(queue.tables.jobs)).all()  # on PostgreSQL now() stands still from here on
        for delay in (0, 0.0004, 0.25, 7, 86_400.5, timedelta(days=3650)):
            earliest = clock(observer)
            send_invoice.options(delay=delay).push(connection, 1)
            connection.commit()
            row = only_job(observer, queue)
            wanted = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
            assert row["created_at"] >= earliest
            assert row["available_at"] == row["due_at"]
            assert wanted <= row["due_at"] - row["created_at"] <= wanted + timedelta(milliseconds=2)
            empty(observer, queue)


def test_many_jobs_have_the_same_times_as_one(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    instant = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=timezone(timedelta(hours=-3)))
    with engine.connect() as connection:
        connection.execute(sa.select(queue.tables.jobs)).all()
        for job in (send_invoice.options(delay=90, deadline=180.5), send_invoice.options(available_at=instant, deadline=instant)):
            earliest = clock(observer)
            queue.push_many(connection, [job.bind(1)])
            connection.commit()
            many = only_job(observer, queue)
            empty(observer, queue)
            job.push(connection, 1)
            connection.commit()
            one = only_job(observer, queue)
            empty(observer, queue)
            assert earliest <= many["created_at"] <= one["created_at"]
            for column in ("due_at", "deadline"):
                for row in (many, one):
                    wanted = {"due_at": timedelta(seconds=90), "deadline": timedelta(seconds=180.5)}[column]
                    assert row[column] == instant if "123456" in str(row[column]) else row[column] - row["created_at"] >= wanted


INSTANTS = [
    datetime(2031, 1, 1, 12, 0, 0, 1, tzinfo=UTC),
    datetime(2031, 1, 1, 17, 30, 0, 2, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    datetime(2031, 1, 1, 9, 0, 0, 3, tzinfo=timezone(timedelta(hours=-3))),
    datetime(2031, 12, 31, 23, 59, 59, 999999, tzinfo=timezone(timedelta(hours=-12))),
    datetime(2032, 1, 1, 0, 0, 0, tzinfo=timezone(timedelta(hours=14))),
    datetime(2032, 1, 1, 0, 0, 0, tzinfo=timezone(timedelta(minutes=1))),
    datetime(2027, 3, 28, 2, 30, tzinfo=BERLIN),  # a local time that does not exist
    datetime(2027, 3, 28, 2, 30, fold=1, tzinfo=BERLIN),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN),  # one that comes twice
    datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(2100, 2, 28, 23, 59, 59, 500000, tzinfo=ZoneInfo("America/New_York")),
]


def test_an_instant_is_stored_as_the_same_instant_and_orders_as_one(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    jobs = queue.tables.jobs.c
    with engine.begin() as connection:
        for number, instant in enumerate(INSTANTS):
            send_invoice.options(available_at=instant, deadline=instant).push(connection, number)
        queue.push_many(connection, [send_invoice.options(available_at=instant, deadline=instant).bind(99) for instant in INSTANTS])
    with observer.connect() as connection:
        stored = connection.execute(sa.select(jobs.due_at, jobs.available_at, jobs.deadline).order_by(jobs.id)).all()
        in_order = connection.scalars(sa.select(jobs.available_at).order_by(jobs.available_at)).all()
    expected = [instant.astimezone(UTC) for instant in INSTANTS] * 2
    assert stored == [(instant, instant, instant) for instant in expected]
    assert in_order == sorted(expected)


def test_a_delay_counts_real_seconds_over_a_change_of_the_clocks(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    with engine.begin() as connection:
        send_invoice.options(delay=timedelta(days=365), deadline=timedelta(days=366)).push(connection, 1)
    row = only_job(observer, queue)
    assert timedelta(0) <= row["due_at"] - row["created_at"] - timedelta(days=365) < timedelta(milliseconds=2)
    assert timedelta(0) <= row["deadline"] - row["created_at"] - timedelta(days=366) < timedelta(milliseconds=2)


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_the_time_zone_of_the_callers_session_does_not_matter(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    zones = {"postgresql": ("Pacific/Kiritimati", "America/Adak"), "mysql": ("+13:00", "-11:00")}[engine.dialect.name]
    statement = {"postgresql": "SET TIME ZONE '{}'", "mysql": "SET time_zone = '{}'"}[engine.dialect.name]
    instant = datetime(2031, 1, 1, 12, tzinfo=UTC)
    for zone in zones:
        with engine.connect() as connection:
            connection.exec_driver_sql(statement.format(zone))
            earliest = clock(observer)
            send_invoice.push(connection, 1)
            queue.push_many(connection, [send_invoice.bind(2)])
            send_invoice.options(available_at=instant, deadline=instant).push(connection, 3)
            queue.push_many(connection, [send_invoice.options(available_at=instant, deadline=instant).bind(4)])
            connection.commit()
            connection.invalidate()
        latest = clock(observer)
        jobs = queue.tables.jobs.c
        with observer.connect() as connection:
            rows = connection.execute(sa.select(queue.tables.jobs).order_by(jobs.id)).all()
        assert all(earliest <= row.created_at <= latest for row in rows)
        assert all(earliest <= row.available_at <= latest for row in rows[:2])
        assert [(row.available_at, row.deadline) for row in rows[2:]] == [(instant, instant)] * 2
        assert [delivery.payload["number"] for delivery in queue.claim(limit=9)] == [1, 2]
        empty(observer, queue)


@pytest.fixture
def far_from_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host in another time zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/St_Johns")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_from_home")
def test_the_time_zone_of_the_host_does_not_matter(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    local = datetime(2031, 1, 1, 12, tzinfo=UTC).astimezone()
    assert local.utcoffset() == timedelta(hours=-3.5)
    earliest = clock(observer)
    for job, expected in ((send_invoice, None), (send_invoice.options(available_at=local), local)):
        with engine.begin() as connection:
            job.push(connection, 1)
        stored = only_job(observer, queue)["available_at"]
        assert stored == expected if expected else earliest <= stored <= clock(observer)
        empty(observer, queue)


def test_instants_and_durations_that_mean_nothing_are_refused_before_any_sql(engine: Engine, send_invoice: JobOfNumber) -> None:
    naive = datetime(2031, 1, 1)
    beyond = datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))
    before = datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))
    wrong: list[tuple[str, Any]] = [
        *((name, value) for name in ("available_at", "deadline") for value in (naive, beyond, before, "tomorrow")),
        *((name, datetime.max.replace(tzinfo=UTC)) for name in ("available_at", "deadline")),
        *((name, value) for name in ("delay", "deadline") for value in (-1, float("nan"), float("inf"), 10**400, True, "1", timedelta(-1))),
        ("available_at", 5),
    ]
    with engine.connect() as connection, statements(engine) as sent:
        for name, value in wrong:
            with pytest.raises(OptionError, match=f"^{name}"):
                send_invoice.options(**{name: value}).push(connection, 1)
        with pytest.raises(OptionError, match=r"^delay, available_at"):
            send_invoice.options(delay=1, available_at=datetime.now(UTC))
        assert sent == []


def test_a_job_parked_at_the_end_of_time_does_not_stop_its_queue(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    """Read back in a session east of Greenwich, the last day of the year 9999 is no date that Python has."""
    latest = datetime(9000, 1, 1, tzinfo=UTC)
    with engine.begin() as connection:
        send_invoice.options(available_at=latest).push(connection, 1)
        send_invoice.options(deadline=latest).push(connection, 2)
    (delivery,) = queue.claim(limit=9)
    assert (delivery.payload, delivery.deadline) == ({"number": 2}, latest)
    queue.fail(delivery, ValueError("no"))
    assert queue.failed.retry(all=True) == 1


def test_a_deadline_is_an_instant_or_a_duration_from_the_push(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    instant = datetime.now(UTC) + timedelta(hours=2)
    for deadline in (instant, 90, timedelta(minutes=1.5)):
        with engine.begin() as connection:
            send_invoice.options(deadline=deadline).push(connection, 1)
        row = only_job(observer, queue)
        (delivery,) = queue.claim()
        assert delivery.deadline == row["deadline"]
        if isinstance(deadline, datetime):
            assert row["deadline"] == instant
        else:
            assert timedelta(0) <= row["deadline"] - row["created_at"] - timedelta(seconds=90) < timedelta(milliseconds=2)
        queue.complete(delivery)


def test_a_job_that_is_pushed_past_its_deadline_fails_and_does_not_run(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with engine.begin() as connection:
        pushed = send_invoice.options(deadline=0).push(connection, 1)
        also = send_invoice.options(deadline=datetime(2001, 1, 1, tzinfo=UTC)).push(connection, 1)
    assert queue.claim(limit=9) == []
    assert {job.id for job in queue.failed.list()} == {pushed.id, also.id}


def test_without_a_deadline_or_headers_there_are_none(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with engine.begin() as connection:
        send_invoice.push(connection, 1)
    row = only_job(observer, queue)
    assert (row["deadline"], row["headers"], row["unique_key"]) == (None, None, None)
    (delivery,) = queue.claim()
    assert (delivery.deadline, delivery.headers) == (None, {})
