"""
`push_many`: as few statements as the size of the rows allows, and the same rows that single pushes would write.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from sqlqueue import BoundJob, Job, Queue
from sqlqueue._arguments import contract
from sqlqueue._dialects import server_of
from sqlqueue._options import RowOptions
from sqlqueue._queue import producer
from tests.producers import inserts_at_server, job_ids, make_orders, statements, wait_at_most
from tests.rows import treat_server_as

JobOfNumber = Job[[int], None]
INSTANT = datetime(2031, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"priority": -7, "queue": "mail"},
    {"max_attempts": 1, "headers": {"trace": '"\\\N{GRINNING FACE}\x00'}},
    {"available_at": INSTANT},
    {"available_at": INSTANT.replace(microsecond=0), "deadline": INSTANT + timedelta(days=365 * 3000)},
    {"deadline": INSTANT, "headers": {}},
]
WRITTEN = ("queue", "name", "payload", "priority", "max_attempts", "due_at", "deadline", "headers")


@pytest.fixture
def send_invoice(engine: Engine, queue: Queue) -> JobOfNumber:
    make_orders(engine)

    @queue.job(name="invoices.send")
    def send_invoice(number: int) -> None: ...

    return send_invoice


@pytest.fixture(params=["as JSON", "as parameters"])
def rows_travel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older servers cannot read the rows from JSON."""
    if request.param == "as parameters":
        treat_server_as(monkeypatch, reads_rows=False)


def stored(connection: Connection, queue: Queue) -> list[sa.Row[Any]]:
    jobs = queue.tables.jobs
    return list(connection.execute(sa.select(*(jobs.c[name] for name in WRITTEN)).order_by(jobs.c.id)))


def of_all_kinds(job: JobOfNumber, count: int) -> list[BoundJob]:
    """Neighbours differ in their options."""
    kinds = [job.options(**options) for options in OPTIONS]
    return [kinds[number % len(kinds)].bind(number) for number in range(count)]


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rows_travel")
def test_many_jobs_are_the_rows_that_single_pushes_write(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    fixed = [send_invoice.options(**{"available_at": INSTANT} | options) for options in OPTIONS]
    bound = [job.bind(number) for number, job in enumerate(fixed)]
    with engine.connect() as connection:
        assert queue.push_many(connection, bound) == len(bound)
        together = stored(connection, queue)
        connection.rollback()
        for one in bound:
            one.push(connection)
        assert together == stored(connection, queue)
        connection.rollback()


@pytest.mark.usefixtures("rows_travel")
def test_ids_follow_the_order_of_the_jobs_whatever_their_options(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with engine.connect() as connection:
        assert queue.push_many(connection, of_all_kinds(send_invoice, 1_203)) == 1_203
        assert [row.payload for row in stored(connection, queue)] == [f'{{"number":{number}}}' for number in range(1_203)]
        connection.rollback()


@pytest.mark.usefixtures("rows_travel")
def test_delays_of_many_jobs_count_from_one_moment(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    delays = [0, 0.0015, 60, 86_400.25]
    with engine.begin() as connection:
        queue.push_many(connection, [send_invoice.options(delay=delay, deadline=delay + 1).bind(1) for delay in delays])
    jobs = queue.tables.jobs
    with observer.connect() as connection:
        rows = connection.execute(sa.select(jobs).order_by(jobs.c.id)).all()
    assert len({row.created_at for row in rows}) == 1
    for row, delay in zip(rows, delays, strict=True):
        assert row.due_at == row.available_at == row.created_at + timedelta(seconds=delay)
        assert row.deadline == row.due_at + timedelta(seconds=1)
        assert (row.attempts, row.fair_by, row.unique_key) == (0, "", None)


def test_jobs_of_two_names_with_no_options_keep_their_names(engine: Engine, observer: Engine, queue: Queue) -> None:
    jobs = [queue.job(name=name)(lambda number: None) for name in ("one", "two")]
    with engine.begin() as connection:
        queue.push_many(connection, (job.bind(number) for number in range(50) for job in jobs))  # a generator keeps nothing alive
    with observer.connect() as connection:
        rows = stored(connection, queue)
    assert [(row.name, row.payload) for row in rows] == [
        (name, f'{{"number":{number}}}') for number in range(50) for name in ("one", "two")
    ]


def test_a_text_of_a_mebibyte_travels_among_others(engine: Engine, observer: Engine, queue: Queue) -> None:
    @queue.job(name="large")
    def large(text: str) -> None: ...

    texts = ["a", '"\\' * 250_000, "\N{GRINNING FACE}" * 80_000, "b"]
    with engine.begin() as connection:
        assert queue.push_many(connection, [large.bind(text) for text in texts]) == 4
    assert [delivery.payload["text"] for delivery in queue.claim(limit=9)] == texts


# --- in how many statements -------------------------------------------------------------------------------------------


def alike(job: JobOfNumber, count: int) -> list[BoundJob]:
    return [job.bind(number) for number in range(count)]


@pytest.mark.parametrize("make", [alike, of_all_kinds])
def test_many_jobs_are_the_clock_and_one_insert_for_each_500(
    make: Callable[[JobOfNumber, int], list[BoundJob]], engine: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    """Also as the server counts: some drivers send a statement for each row where SQLAlchemy shows one."""
    for count, chunks in ((0, 0), (1, 1), (500, 1), (501, 2), (1_250, 3)):
        bound = make(send_invoice, count)
        with engine.connect() as connection:
            inserts = inserts_at_server(connection, queue.tables.jobs)
            with statements(engine) as sent:
                assert queue.push_many(connection, bound) == count
            assert [statement.split()[0] for statement in sent] == (["SELECT"] if count else []) + ["INSERT"] * chunks
            assert inserts() == chunks
            connection.rollback()


@pytest.mark.databases("mysql", "mariadb")
@pytest.mark.usefixtures("rows_travel")
def test_the_server_is_asked_no_question_more(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    def questions(connection: Connection) -> int:
        return int(connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Questions'").one()[1])

    with engine.connect() as connection:
        questions(connection)
        before = questions(connection)
        assert queue.push_many(connection, alike(send_invoice, 1_250)) == 1_250
        sent = questions(connection) - before - 1
        connection.rollback()
    assert sent == 1 + 3, "the clock, and three INSERTs"


def test_many_large_jobs_are_split_by_their_size(engine: Engine, queue: Queue) -> None:
    @queue.job(name="large")
    def large(text: str) -> None: ...

    with engine.begin() as connection:
        inserts = inserts_at_server(connection, queue.tables.jobs)
        with statements(engine) as sent:
            assert queue.push_many(connection, [large.bind("x" * 300_000)] * 7) == 7
        assert [statement.split()[0] for statement in sent] == ["SELECT", "INSERT", "INSERT", "INSERT"]
        assert inserts() == 3
        connection.rollback()


def test_jobs_with_keys_are_written_one_by_one_and_all_others_together(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    keyed = [send_invoice.options(unique=str(number)).bind(number) for number in range(3)]
    with engine.connect() as connection, statements(engine) as sent:
        assert queue.push_many(connection, [*alike(send_invoice, 700), *keyed]) == 703
        connection.rollback()
    assert len(sent) == 3 * (1 if server_of(engine.dialect).writes_in_with else 3) + 1 + 2


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_many_jobs_that_are_not_committed_keep_no_other_producer_waiting(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    """InnoDB may lock the counter of the ids for such an INSERT, but until its end only."""
    with engine.connect() as open_one, engine.connect() as other:
        queue.push_many(open_one, alike(send_invoice, 600))
        wait_at_most(other, 1)
        send_invoice.push(other, 1)
        queue.push_many(other, of_all_kinds(send_invoice, 600))
        other.commit()
        open_one.rollback()
    assert len(job_ids(observer, queue)) == 601


# --- what is done once ------------------------------------------------------------------------------------------------


def test_options_are_checked_and_resolved_once_however_many_jobs_are_bound(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            done.append(name)
            return real(*arguments)

        return count

    monkeypatch.setattr(RowOptions, "of", counted("checked", RowOptions.of))
    monkeypatch.setattr(queue.registry, "row_options", counted("resolved", queue.registry.row_options))
    monkeypatch.setattr(producer, "to_json", counted("headers written", contract.to_json))
    queue.route("invoices.send", priority=3, max_attempts=2)
    done.clear()
    job = send_invoice.options(headers={"trace": "a"}, delay=5)
    with engine.begin() as connection:
        queue.push_many(connection, [job.bind(number) for number in range(600)])
    assert done == ["checked", "resolved", "headers written"]
    with observer.connect() as connection:
        rows = stored(connection, queue)
    assert {(row.priority, row.max_attempts, row.headers) for row in rows} == {(3, 2, '{"trace":"a"}')}


def test_a_route_is_heeded_by_jobs_that_were_pushed_before(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    urgent = send_invoice.options(priority=9)
    with engine.begin() as connection:
        for queue_name in (None, "mail", "post"):
            if queue_name is not None:
                queue.route(send_invoice, queue=queue_name)
            queue.push_many(connection, [job.bind(1) for job in (send_invoice, urgent)])
    with observer.connect() as connection:
        assert [(row.queue, row.priority) for row in stored(connection, queue)] == [
            (name, priority) for name in ("default", "mail", "post") for priority in (0, 9)
        ]


def test_nothing_is_written_for_no_jobs(engine: Engine, observer: Engine, queue: Queue) -> None:
    with engine.begin() as connection:
        assert queue.push_many(connection, []) == 0
    assert job_ids(observer, queue) == []
