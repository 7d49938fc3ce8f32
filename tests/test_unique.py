"""
P3 without races: what is a key, who holds it, and when it is free again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sqlqueue import Delivery, Job, Key, OptionError, Pushed, Queue
from tests.producers import Order, job_ids, key_names, make_orders, order_ids, statements

JobOfNumber = Job[[int], None]


@pytest.fixture
def send_invoice(engine: Engine, queue: Queue) -> JobOfNumber:
    make_orders(engine)

    @queue.job(name="invoices.send", max_attempts=3)
    def send_invoice(number: int) -> None: ...

    return send_invoice


def push(engine: Engine, job: JobOfNumber, unique: str | Key | bool, number: int = 1) -> Pushed:
    with Session(engine) as session, session.begin():
        return job.options(unique=unique).push(session, number)


# --- a duplicate ------------------------------------------------------------------------------------------------------


def test_a_duplicate_names_the_holder_and_leaves_the_callers_transaction_usable(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    held = push(engine, send_invoice, "one")
    with Session(engine) as session, session.begin():
        session.add(Order(id=1))
        session.flush()
        again = send_invoice.options(unique="one").push(session, 2)
        session.add(Order(id=2))
    assert (held.created, again.created, again.id) == (True, False, held.id)
    assert order_ids(observer) == [1, 2]
    assert job_ids(observer, queue) == [held.id]


def test_a_duplicate_in_the_same_transaction_is_one_too(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with Session(engine) as session, session.begin():
        first = send_invoice.options(unique="one").push(session, 1)
        again = send_invoice.options(unique="one").push(session, 2)
        assert (again.id, again.created) == (first.id, False)
        assert queue.push_many(session, [send_invoice.options(unique=key).bind(1) for key in ("two", "one", "two", "three")]) == 2
    assert len(job_ids(observer, queue)) == 3


def test_a_duplicate_burns_no_id(engine: Engine, send_invoice: JobOfNumber) -> None:
    held = push(engine, send_invoice, "one")
    for _ in range(5):
        assert not push(engine, send_invoice, "one").created
    assert push(engine, send_invoice, "two").id == held.id + 1


def test_a_job_and_its_key_are_rolled_back_together(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    with Session(engine) as session:
        send_invoice.options(unique="one").push(session, 1)
        session.rollback()
    assert key_names(observer, queue) == []
    assert push(engine, send_invoice, "one").created


def test_a_running_job_still_holds_its_key(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    held = push(engine, send_invoice, "one")
    (delivery,) = queue.claim()
    assert delivery.unique
    again = push(engine, send_invoice, "one")
    assert (again.id, again.created) == (held.id, False)


# --- what is a key ----------------------------------------------------------------------------------------------------

LONG = "x" * 10_000

TWINS = [
    ("a", "a "),
    ("a", " a"),
    ("a", "A"),
    ("ä", "a"),
    ("ä", "a\u0308"),
    ("ß", "ss"),
    ("\N{GRINNING FACE}", "\N{WINKING FACE}"),
    ("a\n", "a"),
    ("a\x00", "a"),
    (LONG, LONG + "x"),
    (LONG, LONG + " "),
    ("sha256:1", "sha256:2"),
    ("a/b", "a:b"),
    ("%", "_"),
    ("x" * 168, "x" * 169),
    ("1", "01"),
    ("null", "None"),
]


def test_keys_compare_byte_for_byte(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    keys = sorted({key for pair in TWINS for key in pair})
    with engine.begin() as connection:
        first = [send_invoice.options(unique=key).push(connection, 1) for key in keys]
    assert [pushed.created for pushed in first] == [True] * len(keys)
    with engine.begin() as connection:
        again = [send_invoice.options(unique=key).push(connection, 1) for key in keys]
    assert again == [Pushed(pushed.id, created=False) for pushed in first]
    for delivery in queue.claim(limit=len(keys)):
        queue.complete(delivery)
    assert key_names(observer, queue) == []


def test_a_key_is_not_mistaken_for_anothers_digest(engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    push(engine, send_invoice, LONG)
    (stored,) = key_names(observer, queue)
    digest = stored.removeprefix("unique:/")
    assert digest.startswith("sha256:")
    for disguised in (digest, f"/{digest}", stored):
        assert push(engine, send_invoice, disguised).created
        assert push(engine, send_invoice, Key(disguised)).created


def test_a_key_is_the_jobs_own_unless_it_is_shared(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    @queue.job(name="reminders.send")
    def send_reminder(number: int) -> None: ...

    assert push(engine, send_invoice, "one").created
    assert push(engine, send_reminder, "one").created
    shared = push(engine, send_invoice, Key("one"))
    assert shared.created
    assert push(engine, send_reminder, Key("one")) == Pushed(shared.id, created=False)


def test_true_takes_the_key_from_the_arguments(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    first = push(engine, send_invoice, True, 1)
    assert push(engine, send_invoice, True, 2).created
    assert push(engine, send_invoice, True, 1) == Pushed(first.id, created=False)
    assert push(engine, send_invoice, False, 1).created


def test_the_order_in_which_arguments_are_written_makes_no_other_key(engine: Engine, queue: Queue) -> None:
    @queue.job(name="many", unique=True)
    def many(first: int, second: dict[str, int]) -> None: ...

    with engine.begin() as connection:
        held = many.push(connection, 1, {"a": 1, "b": 2})
        assert held.created
        assert not many.push(connection, first=1, second={"b": 2, "a": 1}).created
        assert not many.push(connection, second={"b": 2, "a": 1}, first=1).created
        assert not queue.push_named(connection, "many", {"second": {"b": 2, "a": 1}, "first": 1}, unique=True).created


def test_a_key_that_is_no_text_is_refused_before_any_sql(engine: Engine, send_invoice: JobOfNumber) -> None:
    wrong: list[Any] = ["", Key(""), "\ud800", "a\udfff", Key("\ud800"), 1, b"a", ("a",), Key(1), Key(True)]  # type: ignore[arg-type]
    with statements(engine) as sent:
        for key in wrong:
            with pytest.raises(OptionError, match=r"^unique"):
                push(engine, send_invoice, key)
    assert sent == []


# --- when it is free again --------------------------------------------------------------------------------------------


def completed(queue: Queue, delivery: Delivery) -> None:
    queue.complete(delivery)


def failed(queue: Queue, delivery: Delivery) -> None:
    queue.fail(delivery, ValueError("no"))


def failed_and_forgotten(queue: Queue, delivery: Delivery) -> None:
    queue.fail(delivery, ValueError("no"))
    queue.failed.forget(id=delivery.id)


def failed_retried_and_completed(queue: Queue, delivery: Delivery) -> None:
    queue.fail(delivery, ValueError("no"))
    queue.failed.retry(id=delivery.id)
    (again,) = queue.claim()
    queue.complete(again)


def released_and_cleared(queue: Queue, delivery: Delivery) -> None:
    queue.release(delivery)
    assert queue.clear("default") == 1


def out_of_attempts(queue: Queue, delivery: Delivery) -> None:
    jobs = queue.tables.jobs
    queue.release(delivery)
    with queue.begin() as session:
        session.execute(jobs.update().values(attempts=jobs.c.max_attempts))
    assert queue.claim() == []


def past_its_deadline(queue: Queue, delivery: Delivery) -> None:
    queue.release(delivery)
    with queue.begin() as session:
        session.execute(queue.tables.jobs.update().values(deadline=datetime.now(UTC) - timedelta(hours=1)))
    assert queue.claim() == []


def damaged(queue: Queue, delivery: Delivery) -> None:
    queue.release(delivery)
    with queue.begin() as session:
        session.execute(queue.tables.jobs.update().values(payload="[broken"))
    assert queue.claim() == []


def deleted_by_hand(queue: Queue, delivery: Delivery) -> None:
    with queue.begin() as session:
        session.execute(queue.tables.jobs.delete())


@pytest.mark.parametrize(
    "ended",
    [
        completed,
        failed,
        failed_and_forgotten,
        failed_retried_and_completed,
        released_and_cleared,
        out_of_attempts,
        past_its_deadline,
        damaged,
        deleted_by_hand,
    ],
)
def test_a_key_is_free_when_its_job_has_left_the_table(
    ended: Callable[[Queue, Delivery], None], engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    held = push(engine, send_invoice, "one")
    (delivery,) = queue.claim()
    ended(queue, delivery)
    again = push(engine, send_invoice, "one")
    assert again.created
    assert again.id > held.id
    assert push(engine, send_invoice, "one") == Pushed(again.id, created=False)
    assert job_ids(observer, queue) == [again.id]
    assert len(key_names(observer, queue)) == 1


def test_a_released_job_keeps_its_key(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    held = push(engine, send_invoice, "one")
    for error in (None, ValueError("no")):
        queue.release(queue.claim()[0], error=error)
        assert push(engine, send_invoice, "one") == Pushed(held.id, created=False)
    queue.complete(queue.claim()[0])
    assert push(engine, send_invoice, "one").created


def test_a_retried_job_takes_its_key_again(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    held = push(engine, send_invoice, "one")
    queue.fail(queue.claim()[0], ValueError("no"))
    assert queue.failed.retry(all=True) == 1
    assert push(engine, send_invoice, "one") == Pushed(held.id, created=False)


def test_a_retried_job_leaves_the_key_to_the_job_that_took_it_meanwhile(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    first = push(engine, send_invoice, "one")
    queue.fail(queue.claim()[0], ValueError("no"))
    second = push(engine, send_invoice, "one")
    assert second.created
    assert queue.failed.retry(all=True) == 1
    assert job_ids(observer, queue) == [first.id, second.id]
    for delivery in sorted(queue.claim(limit=2), key=lambda delivery: delivery.id):
        assert delivery.unique is (delivery.id == second.id)
        queue.complete(delivery)
        assert len(key_names(observer, queue)) == (1 if delivery.id == first.id else 0)


# --- rows that no push of ours left -----------------------------------------------------------------------------------


def write_key(queue: Queue, **values: object) -> None:
    with queue.begin() as session:
        session.execute(queue.tables.keys.insert().values(key="unique:invoices.send/one", **values))


def test_a_key_row_without_its_job_is_free_and_taken_over(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    for job_id in (None, 0, 10**12):
        write_key(queue, job_id=job_id)
        taken = push(engine, send_invoice, "one")
        assert taken.created
        assert push(engine, send_invoice, "one") == Pushed(taken.id, created=False)
        queue.complete(queue.claim()[0])


def test_a_key_that_is_kept_for_a_time_is_held_without_its_job(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: JobOfNumber
) -> None:
    held = push(engine, send_invoice, "one")
    keys = queue.tables.keys
    with queue.begin() as session:
        session.execute(keys.update().values(expires_at=datetime.now(UTC) + timedelta(hours=1)))
    queue.complete(queue.claim()[0])
    assert push(engine, send_invoice, "one") == Pushed(held.id, created=False)
    assert job_ids(observer, queue) == []
    with queue.begin() as session:
        session.execute(keys.update().values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    again = push(engine, send_invoice, "one")
    assert again.created
    with observer.connect() as connection:
        assert connection.execute(sa.select(keys.c.job_id, keys.c.expires_at)).one() == (again.id, None)


def test_a_job_that_outlives_the_time_its_key_is_kept_still_holds_it(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    held = push(engine, send_invoice, "one")
    with queue.begin() as session:
        session.execute(queue.tables.keys.update().values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    assert push(engine, send_invoice, "one") == Pushed(held.id, created=False)


def test_a_key_that_is_taken_over_and_rolled_back_is_still_free(engine: Engine, queue: Queue, send_invoice: JobOfNumber) -> None:
    write_key(queue, job_id=10**12)
    with Session(engine) as session:
        assert send_invoice.options(unique="one").push(session, 1).created
        session.rollback()
    assert push(engine, send_invoice, "one").created
