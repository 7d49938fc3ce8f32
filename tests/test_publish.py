"""
Publish and subscribe: a job for each subscriber, in the transaction of what has happened.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock
from uuid import UUID

import pydantic
import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlqueue import ArgumentError, Job, JobContext, NotTransactional, OptionError, Queue, RegistrationError, Sensitive, UnknownJob
from sqlqueue.events import JobPushed
from tests.producers import ORDERS, inserts_at_server, job_ids, make_orders, order_ids, statements
from tests.servers import Database
from tests.test_push_async import ASYNC_DRIVERS
from tests.workers import failures, jobs, work_off

ORDER = UUID("12345678-1234-5678-1234-567812345678")


@dataclass(frozen=True)
class Amount:
    value: Decimal
    currency: str = "EUR"


@dataclass(frozen=True)
class OrderPaid:
    order: UUID
    amount: Amount
    at: datetime
    note: str | None = None


class OrderShipped(pydantic.BaseModel):
    order: UUID
    parcels: list[str] = []


class OrderPaidTwice(OrderPaid): ...


@dataclass
class Login:
    tokens: Annotated[dict[str, Any], Sensitive]


@dataclass
class Refund:
    """How another program reads what this one calls OrderRefunded."""

    order: UUID
    reason: str = ""


PAID = OrderPaid(ORDER, Amount(Decimal("12.50")), datetime(2030, 1, 1, tzinfo=UTC))
SHIPPED = OrderShipped(order=ORDER, parcels=["a", "b"])


@pytest.fixture
def handled(queue: Queue) -> list[tuple[str, Any]]:
    """What the two subscribers of OrderPaid and the one of OrderShipped were handed."""
    handled: list[tuple[str, Any]] = []

    @queue.subscribe(OrderPaid, name="receipts.send", queue="mail", max_attempts=3)
    def send_receipt(event: OrderPaid) -> None:
        handled.append(("receipt", event))

    @queue.subscribe(OrderPaid, name="stock.reduce", priority=5)
    def reduce_stock(context: JobContext, session: Session, event: OrderPaid, times: int = 1) -> None:
        handled.append((f"stock {context.attempt} {times} {session.in_transaction()}", event))

    @queue.subscribe(OrderShipped, name="parcels.track")
    def track(event: OrderShipped) -> None:
        handled.append(("track", event))

    return handled


def test_each_subscriber_gets_a_job_with_its_own_options_and_the_event(
    queue: Queue, engine: Engine, observer: Engine, handled: list[tuple[str, Any]]
) -> None:
    with Session(engine) as session, session.begin():
        assert queue.publish(session, PAID) == 2
    rows = jobs(observer, queue)
    assert [(row["name"], row["queue"], row["priority"], row["max_attempts"]) for row in rows] == [
        ("receipts.send", "mail", 0, 3),
        ("stock.reduce", "default", 5, 5),
    ]
    assert work_off(queue, queues=["mail", "default"], concurrency=1).counts == {"done": 2}
    assert handled == [("receipt", PAID), ("stock 1 1 True", PAID)]


def test_a_pydantic_model_is_an_event(queue: Queue, engine: Engine, handled: list[tuple[str, Any]]) -> None:
    with engine.begin() as connection:
        assert queue.publish(connection, SHIPPED) == 1
    work_off(queue)
    assert handled == [("track", SHIPPED)]


def test_subscribers_fail_and_are_tried_again_each_by_itself(
    queue: Queue, engine: Engine, observer: Engine, handled: list[tuple[str, Any]]
) -> None:
    @queue.subscribe(OrderPaid, name="broken", max_attempts=1)
    def broken(event: OrderPaid) -> None:
        raise ValueError("no")

    with Session(engine) as session, session.begin():
        assert queue.publish(session, PAID) == 3
    assert work_off(queue, queues=["mail", "default"]).counts == {"done": 2, "failed": 1}
    assert [row["name"] for row in failures(observer, queue)] == ["broken"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_publish_is_part_of_the_callers_transaction(
    queue: Queue, engine: Engine, observer: Engine, handled: list[tuple[str, Any]], end: str
) -> None:
    make_orders(engine)
    with Session(engine) as session:
        session.execute(ORDERS.insert().values(id=1))
        queue.publish(session, PAID)
        getattr(session, end)()
    found = (len(order_ids(observer)), len(job_ids(observer, queue)))
    assert found == ((1, 2) if end == "commit" else (0, 0))


def test_subscribers_whose_options_are_alike_are_written_by_one_statement(queue: Queue, engine: Engine) -> None:
    for number in range(20):

        @queue.subscribe(OrderPaid, name=f"subscriber-{number}")
        def handle(event: OrderPaid) -> None: ...

    with engine.connect() as connection, connection.begin():
        queue.publish(connection, PAID)
        count = inserts_at_server(connection, queue.tables.jobs)
        assert queue.publish(connection, PAID) == 20
        assert count() == 1


def test_without_subscribers_nothing_is_written_and_nothing_asked(queue: Queue, engine: Engine, handled: list[tuple[str, Any]]) -> None:
    @dataclass
    class Unheard:
        number: int

    with statements(engine) as seen, Session(engine) as session, session.begin():
        assert queue.publish(session, Unheard(1)) == 0
        assert queue.publish(session, OrderPaidTwice(ORDER, PAID.amount, PAID.at)) == 0  # exactly the class counts
        with pytest.raises(UnknownJob, match=r"nobody in this process subscribes to tests\.test_publish.*Unheard"):
            queue.publish(session, Unheard(1), required=True)
    assert seen == []


def test_a_unique_subscriber_whose_job_waits_is_not_pushed_again(queue: Queue, engine: Engine, handled: list[tuple[str, Any]]) -> None:
    @queue.subscribe(OrderPaid, name="once", unique=True)
    def once(event: OrderPaid) -> None: ...

    with Session(engine) as session, session.begin():
        assert queue.publish(session, PAID) == 3
        assert queue.publish(session, PAID) == 2


@pytest.mark.parametrize("event", [5, {"order": 1}, None, OrderPaid, "orders.paid"])
def test_only_events_can_be_published(queue: Queue, engine: Engine, event: object) -> None:
    with Session(engine) as session, pytest.raises(TypeError, match="publish takes an event"):
        queue.publish(session, event)


def test_a_field_that_cannot_travel_is_refused_before_any_sql(queue: Queue, engine: Engine, handled: list[tuple[str, Any]]) -> None:
    wrong = OrderPaid(ORDER, Amount("s3cret"), PAID.at)  # type: ignore[arg-type]
    with statements(engine) as seen, Session(engine) as session, pytest.raises(ArgumentError) as refused:
        queue.publish(session, wrong)
    assert str(refused.value) == "OrderPaid.amount.value is of type str, not Decimal"
    assert seen == []


def test_a_sensitive_event_is_refused_without_saying_where(queue: Queue) -> None:
    @queue.subscribe(Login, name="login")
    def login(event: Login) -> None: ...

    with pytest.raises(ArgumentError) as refused:
        queue.publish(None, Login({"s3cret": object()}))  # type: ignore[arg-type]
    assert "s3cret" not in str(refused.value)


def test_the_wrong_kind_of_session_is_named(queue: Queue, handled: list[tuple[str, Any]]) -> None:
    with pytest.raises(TypeError, match=r"await publish_async"):
        queue.publish(AsyncSession(), PAID)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="publish takes a Session"):
        queue.publish(None, PAID)  # type: ignore[arg-type]


async def test_a_session_that_is_not_asynchronous_is_named(queue: Queue, engine: Engine) -> None:
    with Session(engine) as session, pytest.raises(TypeError, match="call publish"):
        await queue.publish_async(session, PAID)  # type: ignore[arg-type]


def test_an_autocommit_connection_is_refused(queue: Queue, observer: Engine, handled: list[tuple[str, Any]]) -> None:
    with observer.connect() as connection, pytest.raises(NotTransactional):
        queue.publish(connection, PAID)


@pytest.mark.parametrize("kind", ["session", "connection"])
async def test_asynchronous_publishing(
    queue: Queue, database: Database, observer: Engine, handled: list[tuple[str, Any]], kind: str
) -> None:
    engine = create_async_engine(sa.make_url(database.url).set(drivername=ASYNC_DRIVERS[database.name][0]))
    holder: AsyncSession | AsyncConnection
    async with AsyncSession(engine) if kind == "session" else engine.connect() as holder:
        assert await queue.publish_async(holder, PAID) == 2
        await holder.commit()
        assert await queue.publish_async(holder, SHIPPED) == 1
        await holder.rollback()
    await engine.dispose()
    assert len(job_ids(observer, queue)) == 2


# --- names


def test_an_event_is_known_by_its_place_unless_it_has_a_name() -> None:
    queue = Queue()
    assert queue.subscribers.name_of(OrderPaid) == f"{__name__}.OrderPaid"
    assert queue.event("orders.paid")(OrderPaid) is OrderPaid
    queue.event("orders.paid")(OrderPaid)
    assert queue.subscribers.name_of(OrderPaid) == "orders.paid"
    with pytest.raises(RegistrationError, match=r"known as an event already, as orders\.paid"):
        queue.event("orders.paid.2")(OrderPaid)
    with pytest.raises(RegistrationError, match=r"two events are named orders\.paid"):
        queue.event("orders.paid")(OrderShipped)
    with pytest.raises(OptionError, match="event: a name"):
        queue.event("orders paid")(Amount)


def test_an_event_is_named_before_anybody_subscribes_to_it(queue: Queue, handled: list[tuple[str, Any]]) -> None:
    with pytest.raises(RegistrationError, match="known as an event already"):
        queue.event("orders.paid")(OrderPaid)


def test_who_does_not_have_the_class_subscribes_to_its_name(queue: Queue, engine: Engine, handled: list[tuple[str, Any]]) -> None:
    @queue.event("orders.refunded")
    @dataclass
    class OrderRefunded:
        order: UUID
        reason: str

    @queue.subscribe("orders.refunded", name="refund")
    def refund(event: Refund) -> None:
        handled.append(("refund", event))

    with Session(engine) as session, session.begin():
        assert queue.publish(session, OrderRefunded(ORDER, "late")) == 1
    work_off(queue)
    assert handled == [("refund", Refund(ORDER, "late"))]


def test_a_class_that_cannot_read_the_event_is_found_before_any_sql(queue: Queue, engine: Engine) -> None:
    @queue.event("orders.refunded")
    @dataclass
    class OrderRefunded:
        order: UUID

    @queue.subscribe("orders.refunded", name="other")
    def other(event: Amount) -> None: ...

    with statements(engine) as seen, Session(engine) as session, pytest.raises(ArgumentError, match="is missing"):
        queue.publish(session, OrderRefunded(ORDER))
    assert seen == []


@pytest.mark.parametrize("event", [int, 5, None, dict])
def test_only_events_can_be_subscribed_to(event: Any) -> None:
    with pytest.raises(RegistrationError, match="an event is a dataclass or pydantic model"):
        Queue().subscribe(event)
    with pytest.raises(RegistrationError, match="an event is a dataclass or pydantic model"):
        Queue().event("a.b")(event)


def nothing() -> None: ...
def unannotated(event) -> None: ...
def another(event: OrderShipped) -> None: ...
def optional(event: OrderPaid | None) -> None: ...
def two(event: OrderPaid, number: int) -> None: ...
def by_name(*, event: OrderPaid) -> None: ...


@pytest.mark.parametrize("function", [nothing, unannotated, another, optional, two, by_name])
def test_a_subscriber_takes_the_event_and_nothing_else(function: Any) -> None:
    with pytest.raises(RegistrationError, match=r"annotated as OrderPaid|it has to take one argument, the event"):
        Queue().subscribe(OrderPaid, name="subscriber")(function)


def test_a_subscriber_that_is_annotated_with_a_name_that_comes_later_is_checked_later() -> None:
    queue = Queue()

    def later(event: NotYet) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    queue.subscribe(OrderPaid, name="later")(later)
    try:
        globals()["NotYet"] = OrderShipped
        with pytest.raises(RegistrationError, match="annotated as OrderPaid"):
            queue.registry.load()
    finally:
        del globals()["NotYet"]


def test_a_subscriber_is_a_job_like_any_other(queue: Queue, engine: Engine, observer: Engine) -> None:
    def handle(event: OrderShipped) -> str:
        return event.parcels[0]

    handle.__qualname__ = "handle"
    job: Job[[OrderShipped], str] = queue.subscribe(OrderShipped)(handle)
    assert job.name == f"{__name__}.handle"
    assert job(SHIPPED) == "a"
    queue.route(job, queue="slow")
    with Session(engine) as session, session.begin():
        queue.publish(session, SHIPPED)
        job.options(queue="own").push(session, SHIPPED)
    slow, own = jobs(observer, queue)
    assert (slow["queue"], own["queue"]) == ("slow", "own")
    assert slow["payload"] == own["payload"]
    with pytest.raises(OptionError, match="is a job already"):
        queue.subscribe(OrderShipped)(job)
    with pytest.raises(OptionError, match="prority"):
        queue.subscribe(OrderShipped, prority=1)(handle)  # type: ignore[call-overload]


# --- where subscribers are registered


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("published_app", "published_subscribers"):
        sys.modules.pop(name, None)


APP = """
from dataclasses import dataclass
from sqlqueue import Queue
queue = Queue(imports=["published_subscribers"])

@dataclass
class Happened:
    number: int
"""
SUBSCRIBERS = """
from published_app import Happened, queue

@queue.subscribe(Happened)
def handle(event: Happened) -> None: ...
"""


def test_a_process_that_only_publishes_imports_the_subscribers_of_its_queue(modules: Path, queue: Queue, engine: Engine) -> None:
    (modules / "published_app.py").write_text(APP)
    (modules / "published_subscribers.py").write_text(SUBSCRIBERS)
    import published_app  # type: ignore[import-not-found]

    assert "published_subscribers" not in sys.modules
    with Session(engine) as session, session.begin():
        assert published_app.queue.publish(session, published_app.Happened(1)) == 1


def test_an_import_that_fails_fails_the_publish_each_time(modules: Path, engine: Engine) -> None:
    queue = Queue(imports=["published_subscribers"])
    (modules / "published_subscribers.py").write_text("1 / 0")
    for _ in range(2):
        with Session(engine) as session, pytest.raises(ZeroDivisionError):
            queue.publish(session, PAID)


# --- with events and the testing kit


def test_what_is_published_is_told(queue: Queue, engine: Engine, handled: list[tuple[str, Any]]) -> None:
    told: list[str] = []
    queue.on(JobPushed)(lambda event: told.append(event.name))
    with Session(engine) as session, session.begin():
        queue.publish(session, PAID)
    assert told == ["receipts.send", "stock.reduce"]


async def test_a_fake_records_what_is_published(queue: Queue, handled: list[tuple[str, Any]]) -> None:
    with queue.fake() as pushed:
        assert queue.publish(Mock(), PAID) == 2
        assert await queue.publish_async(None, SHIPPED) == 1  # type: ignore[arg-type]
    pushed.assert_pushed_once("receipts.send", lambda a: a.event == PAID and a.queue == "mail")
    pushed.assert_pushed_once("parcels.track", lambda a: a.event.parcels == ["a", "b"])


def test_inline_runs_the_subscribers_after_the_commit(queue: Queue, engine: Engine, handled: list[tuple[str, Any]]) -> None:
    with queue.inline() as ran, Session(engine) as session:
        queue.publish(session, SHIPPED)
        assert handled == []
        session.commit()
    assert handled == [("track", SHIPPED)]
    assert [run.status for run in ran] == ["done"]


def test_a_drain_works_the_subscribers(queue: Queue, engine: Engine, handled: list[tuple[str, Any]]) -> None:
    with Session(engine) as session, session.begin():
        queue.publish(session, PAID)
    queue.drain().assert_all_done()
    assert len(handled) == 2
