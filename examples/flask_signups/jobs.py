"""
The queue, and everything that is done later than in a request.
"""

import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Annotated

from sqlalchemy import select
from sqlalchemy.orm import Session

from sqlqueue import Queue, Sensitive, Steps
from sqlqueue.events import JobFailed, JobRetrying

from .models import Account, Base, engine

log = logging.getLogger("signups")
tenant = ContextVar("tenant", default="")

queue = Queue(engine, metadata=Base.metadata)  # its tables are created, and migrated, with those of the application


@queue.job(
    name="send_welcome",
    queue="mail",
    max_attempts=4,
    backoff=Steps([10, 60, 600]),  # seconds to wait after each attempt that failed
)
def send_welcome(account_id: int) -> None:
    """A mail cannot be rolled back. `once` remembers that it is out: only a death right before the commit lets it go out again."""
    with queue.begin() as session:
        if queue.once(session, f"welcome:{account_id}"):
            send_mail(session.get_one(Account, account_id).email, "Welcome!")


@queue.job(name="send_password_link", queue="mail", priority=10)
def send_password_link(email: str, token: Annotated[str, Sensitive]) -> None:
    """Whatever goes wrong here, the token is in no log line and in no traceback of sqlqueue."""
    send_mail(email, f"https://example.com/password?token={token}")


@queue.job(name="give_bonus")
def give_bonus(session: Session, email: str) -> None:
    """Transactional, as its session comes first: the credit, what it pushes and the end of the job commit together, exactly once."""
    account = session.scalars(select(Account).where(Account.email == email).with_for_update()).one()
    account.credit += 5
    update_search.push(session, account.id)


@queue.job(
    name="update_search",
    unique=True,  # one for the same arguments,
    on_conflict="replace",  # and a later push takes its place, due time and all:
    delay=5,  # it runs when the account has been left alone for five seconds
)
def update_search(account_id: int) -> None:
    with queue.begin() as session:
        account = session.get_one(Account, account_id)
        account.found_as = f"{account.name} {account.email} {account.credit}".strip()


@queue.headers.fill
def add_tenant(job_name: str) -> dict[str, str]:
    return {"tenant": tenant.get()}


@queue.headers.read
def as_tenant(headers: Mapping[str, str]) -> Iterator[None]:
    tenant.set(headers.get("tenant", ""))  # for the handler and for what it pushes
    yield


@queue.on(JobFailed, JobRetrying)
def report(event: JobFailed | JobRetrying) -> None:
    what = "failed" if isinstance(event, JobFailed) else f"to be tried again in {event.delay:.0f} s"
    log.error("%s %s of tenant %s: %s, %s", event.name, event.id, event.headers.get("tenant"), what, event.message)


def send_mail(email: str, text: str) -> None:
    """Stands for a mail server."""
    if "@" not in email:
        raise ValueError("the address has no @")
    print(f"mail to {email} in the name of {tenant.get()}", flush=True)
