"""
Uses that mypy has to accept, strict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import assert_type

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from sqlqueue import BoundJob, Exponential, Fixed, Job, JobContext, Key, Pushed, Queue, Reason, Steps
from sqlqueue.events import Event, FinalEvent, JobFailed, JobPushed, JobRetrying, WorkerEvent
from sqlqueue.middleware import CallNext, FailOn, RateLimited, SkipIf, ThrottlesExceptions, WithoutOverlapping

queue = Queue(imports=["shop.jobs"])


@queue.job
def bare(number: int, copy: bool = False) -> str:
    return str(number)


@queue.job(name="named", queue="mail", priority=5, max_attempts=3, backoff=Exponential(base=2), delay=timedelta(minutes=1))
def named(number: int, *, note: str | None = None) -> None: ...


@queue.job
def bare_with_context(context: JobContext, number: int) -> int:
    return context.attempt + number


@queue.job(unique=True, deadline=datetime(2031, 1, 1, tzinfo=UTC), headers={"a": "b"})
def with_context(context: JobContext, number: int, names: Mapping[str, list[int]]) -> None: ...


@queue.job(backoff=Fixed(5), on_worker_lost="fail")
def nothing() -> None: ...


@queue.job(backoff=lambda attempt: attempt * 2.0)
def only_context(context: JobContext) -> None: ...


def around(context: JobContext, call_next: CallNext) -> object:
    return call_next() if context.arguments else None


@queue.job(
    limit=3,
    limit_key=lambda context: f"{context.arguments['number']}",
    middleware=[
        around,
        WithoutOverlapping("a", expire_after=60, release_after=timedelta(seconds=5)),
        WithoutOverlapping(lambda context: context.id),
        RateLimited(100, per=timedelta(seconds=1), key=Key("a"), burst=10),
        ThrottlesExceptions(5, 60, on=(OSError, ValueError)),
        SkipIf(lambda context: context.attempt > 1),
        FailOn(LookupError),
    ],
)
def surrounded(number: int) -> None: ...


@queue.job
def transactional(session: Session, number: int) -> int:
    return number


@queue.job(name="both", max_attempts=2)
def context_and_session(context: JobContext, session: Session, number: int, *, note: str | None = None) -> None: ...


@queue.job(name="asynchronous", timeout=timedelta(minutes=1), fail_on_timeout=True, aliases=["old"])
async def asynchronous(context: JobContext, number: int) -> str:
    assert_type(await context.renew_async(), bool)
    return str(number)


@queue.job
async def bare_asynchronous(number: int) -> int:
    return number


class OwnSession(Session): ...


@queue.job
def own_session(session: OwnSession) -> None: ...


@queue.job
def context_and_own_session(context: JobContext, session: OwnSession, number: int) -> None: ...


def push(session: Session, scoped: scoped_session[Session], connection: sa.Connection) -> None:
    assert_type(bare.push(session, 1), Pushed)
    bare.push(scoped, 1, copy=True)
    bare.push(connection, number=1)
    named.push(session, 1, note="x")
    bare_with_context.push(session, 1)
    bare_with_context.push(session, number=1)
    with_context.push(session, 1, {"a": [1]})
    with_context.push(session, 1, names={})
    nothing.push(session)
    only_context.push(session)
    asynchronous.push(session, 1)
    bare_asynchronous.push(session, number=1)
    transactional.push(session, 1)
    transactional.push(session, number=1)
    context_and_session.push(session, 1, note="x")
    own_session.push(session)
    context_and_own_session.push(scoped, 1)
    pushed = bare.push(session, 1)
    assert_type(pushed.id, int)
    assert_type(pushed.created, bool)


async def push_async(session: AsyncSession, connection: AsyncConnection, scoped: async_scoped_session[AsyncSession]) -> None:
    assert_type(await bare.push_async(session, 1), Pushed)
    await bare.push_async(scoped, 1)
    await asynchronous.push_async(session, 1)
    assert_type(await asynchronous(1), str)
    assert_type(await bare_asynchronous(1), int)
    await bare_with_context.push_async(connection, number=1)
    await with_context.options(priority=1).push_async(session, 1, names={})
    await bare.bind(1).push_async(session)
    assert_type(await queue.push_many_async(session, [bare.bind(1), nothing.bind()]), int)
    await queue.push_named_async(session, "a", {"b": 1}, unique="one")


def bind(session: Session) -> None:
    assert_type(bare.bind(1, True), BoundJob)
    with_context.bind(1, names={"a": []})
    only_context.bind().push(session)
    transactional.options(priority=1).bind(1).push(session)
    assert_type(queue.push_many(session, (bare.bind(number) for number in range(3))), int)


def options(session: Session) -> None:
    assert_type(bare.options(delay=1, unique="a", max_attempts=2).push(session, 1), Pushed)
    bare.options(unique=Key("a"), deadline=60, headers={"a": "b"}).options(queue="q").push(session, 1, copy=True)
    with_context.options(available_at=datetime.now(UTC)).bind(1, {})
    bare.options(unique=True, unique_until="started", unique_for=timedelta(hours=1), on_conflict="keep").bind(1)
    assert_type(queue.once(session, "a", expire_after=60), bool)
    queue.route(bare, queue="slow", backoff=Steps([1, 2]), timeout=5)
    queue.route("named", max_attempts=2)
    queue.push_named(session, "a", {"b": [1]}, priority=3)


def call() -> None:
    assert_type(bare(1), str)
    assert_type(bare_with_context(1), int)
    nothing()
    only_context()


def jobs_as_values(job: Job[[int], object], session: Session) -> None:
    job.push(session, 1)


def pass_jobs_on(session: Session) -> None:
    jobs_as_values(bare_with_context, session)
    jobs_as_values(transactional, session)


@queue.event("orders.paid")
@dataclass
class OrderPaid:
    order_id: int


@queue.subscribe(OrderPaid)
def send_receipt(event: OrderPaid) -> str:
    return str(event.order_id)


@queue.subscribe(OrderPaid, name="stock.reduce", max_attempts=3)
def reduce_stock(context: JobContext, session: Session, event: OrderPaid, times: int = 1) -> None: ...


@queue.subscribe("orders.paid", name="by.name")
def by_name(session: Session, event: OrderPaid) -> None: ...


async def publish(session: Session, asynchronous: AsyncSession) -> None:
    assert_type(queue.publish(session, OrderPaid(1)), int)
    assert_type(await queue.publish_async(asynchronous, OrderPaid(1), required=True), int)
    send_receipt.push(session, OrderPaid(1))
    reduce_stock.push(session, OrderPaid(1), times=2)
    by_name.push(session, OrderPaid(1))
    assert_type(send_receipt(OrderPaid(1)), str)


@queue.on(JobFailed)
def on_one(event: JobFailed) -> None:
    assert_type(event.reason, Reason)


@queue.on(JobFailed, JobRetrying)
def on_two(event: JobFailed | JobRetrying) -> None:
    assert_type(event.message, str)


@queue.on(JobFailed, JobRetrying, JobPushed, WorkerEvent)
def on_many(event: Event) -> None:
    queue.off(on_many)


queue.on(FinalEvent)(print)


@queue.headers.fill
def fill(name: str) -> dict[str, str]:
    return {"tenant": name}


@queue.headers.read
def read(headers: Mapping[str, str]) -> Iterator[None]:
    yield


@queue.headers.read
@contextmanager
def read_in_manager(headers: dict[str, str]) -> Iterator[None]:
    yield
