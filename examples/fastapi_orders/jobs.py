"""
The queue of the shop, and everything that it does later than in a request.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated

from sqlalchemy.orm import Session

from sqlqueue import Discard, Exponential, Fail, JobContext, Queue, Release, Sensitive
from sqlqueue.events import JobFailed

from .models import Base, Order, Shipment, engine, handler_sessions

log = logging.getLogger("orders")
request_id = ContextVar("request_id", default="")

queue = Queue(engine, metadata=Base.metadata)  # its tables are created, and migrated, with those of the shop


# --- paying ---------------------------------------------------------------------------------------------------------------


@queue.event("orders.paid")
@dataclass(frozen=True)
class OrderPaid:
    order_id: int


@queue.job(
    name="charge",
    max_attempts=5,
    backoff=Exponential(base=2, cap=60),
    timeout=10,  # seconds; then it is cancelled, and that was an attempt
)
async def charge(context: JobContext, order_id: int, token: Annotated[str, Sensitive]) -> None:
    """First the provider, then the database: no transaction is open while we wait for somebody else."""
    try:
        # The id is the same at each attempt, and the provider knows a reference again: nobody is charged twice.
        await call_provider(token, reference=f"{context.name}-{context.id}")
    except ProviderBusy:
        raise Release(delay=30) from None  # this was no attempt
    except CardDeclined:
        raise Fail("the card was declined") from None  # trying again is of no use
    async with handler_sessions.begin() as session:
        if await queue.once_async(session, f"paid:{order_id}"):  # any job may run again: True for the first that commits
            order = await session.get_one(Order, order_id)
            order.status = "paid"
            await queue.publish_async(session, OrderPaid(order_id))  # a job for each subscriber, or none


@queue.job(name="remind_to_pay")
def remind_to_pay(order_id: int) -> None:
    with queue.begin() as session:
        order = session.get_one(Order, order_id)
        if order.status != "placed":
            raise Discard  # nothing to remind of
        email = order.email
    send_mail(email, f"Your order {order_id} waits for its payment.")


# --- what happens when an order is paid: each subscriber is a job of its own ----------------------------------------------


@queue.subscribe(OrderPaid, name="send_receipt")
def send_receipt(event: OrderPaid) -> None:
    """A mail cannot be rolled back. `once` remembers that it is out: only a death right before the commit lets it go out again."""
    with queue.begin() as session:
        if queue.once(session, f"receipt:{event.order_id}"):
            send_mail(session.get_one(Order, event.order_id).email, f"Thanks! Order {event.order_id} is paid.")


@queue.subscribe(OrderPaid, name="prepare_shipment")
def prepare_shipment(session: Session, event: OrderPaid) -> None:
    """Transactional, as its session comes first: the shipment and the end of the job commit together, exactly once."""
    session.add(Shipment(order_id=event.order_id))


# --- around all jobs --------------------------------------------------------------------------------------------------------


@queue.headers.fill
def add_request_id(job_name: str) -> dict[str, str]:
    return {"request_id": request_id.get()}


@queue.headers.read
def as_request(headers: Mapping[str, str]) -> Iterator[None]:
    request_id.set(headers.get("request_id", ""))  # for the handler and for what it pushes
    yield


@queue.on(JobFailed)
def report_failure(event: JobFailed) -> None:
    log.error("%s %s of request %s has failed: %s", event.name, event.id, event.headers.get("request_id"), event.message)


# --- stand-ins for other people's services ----------------------------------------------------------------------------------


class ProviderBusy(Exception):
    pass


class CardDeclined(Exception):
    pass


async def call_provider(token: str, *, reference: str) -> None:
    await asyncio.sleep(0.05)
    if token == "tok_declined":
        raise CardDeclined
    if token == "tok_busy":
        raise ProviderBusy


def send_mail(email: str, text: str) -> None:
    print(f"mail to {email}: {text} (request {request_id.get()})", flush=True)
