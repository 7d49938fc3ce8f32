"""
A small shop that shows the promise: committed orders get their receipts, an order that was rolled back gets none.

Everything in it is real: the push, the worker, the failed table. Only the database is a temporary file.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from ._backoff import Fixed
from ._queue import Queue
from ._worker import Worker
from .cli.failed_jobs import failed_lines
from .cli.queues import status_lines
from .errors import SqlQueueError

__all__ = ["DemoFailed", "run"]

Echo = Callable[[str], object]

WIDTH = 110
PATIENCE = 30


class DemoFailed(SqlQueueError):
    """
    Something is not as promised.
    """


queue = Queue()


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    receipts: Mapped[int] = mapped_column(default=0)


@queue.job(name="send_receipt", max_attempts=2, backoff=Fixed(0.1))
def send_receipt(order_id: int) -> None:
    with queue.begin() as session:
        order = session.get_one(Order, order_id)
        if "@" not in order.email:
            raise ValueError("the address has no @")
        order.receipts += 1  # here a shop would send the mail


def place_order(session: Session, email: str) -> Order:
    order = Order(email=email)
    session.add(order)
    session.flush()  # the order gets its id
    send_receipt.push(session, order.id)  # the order and its job: both, or neither
    return order


def run(echo: Echo) -> None:
    """
    Tell and show the whole story, a line at a time, in a few seconds.

    Raises:
        DemoFailed: a count is not what the promise says.
    """
    with tempfile.TemporaryDirectory(prefix="sqlqueue-demo-") as folder:
        path = Path(folder) / "shop.db"
        engine = create_engine(f"sqlite:///{path}")
        queue.reconfigure(engine)
        try:
            echo(f"A shop in a temporary SQLite file: {path}")
            Base.metadata.create_all(engine)
            queue.metadata.create_all(engine)
            _tell(echo, engine)
        finally:
            queue.consumer.close()
            engine.dispose()


def _tell(echo: Echo, engine: Engine) -> None:
    _order(echo, engine)
    _roll_back(echo, engine)
    _work_off(echo, "A worker runs them. A job whose handler raises is tried again, here once, after 0.1 s.")
    _expect("receipts", _receipts(engine), {"ann@example.com": 1, "bob@example.com": 1, "carol": 0})
    _expect("failed jobs", queue.failed.count(), 1)
    _say(echo, "Ann and Bob have their receipts. Carol's job has used its two attempts and waits for somebody to look:")
    _show(echo, "sqlqueue status", status_lines(queue))
    _show(echo, "sqlqueue failed list", failed_lines(queue.failed.list(), WIDTH))
    _repair(echo, engine)
    _work_off(echo, "The worker runs it again, from its first attempt:")
    _expect("receipts", _receipts(engine), {"ann@example.com": 1, "bob@example.com": 1, "carol@example.com": 1})
    _show(echo, "sqlqueue status", status_lines(queue))
    _expect("jobs", sum(row.total for row in queue.stats()), 0)
    _expect("failed jobs", queue.failed.count(), 0)
    _say(echo, "Three orders were committed and each got one receipt. One was rolled back and got none. Nothing is left.")


def _order(echo: Echo, engine: Engine) -> None:
    _say(echo, "Three customers order. Each order and its receipt job are committed in one transaction:")
    for email in ("ann@example.com", "bob@example.com", "carol"):
        with Session(engine) as session, session.begin():
            order = place_order(session, email)
            echo(f"    order {order.id} for {email}: committed")
    _expect("jobs", queue.size("default"), 3)


def _roll_back(echo: Echo, engine: Engine) -> None:
    with Session(engine) as session:
        number = place_order(session, "dave@example.com").id
        session.rollback()
    echo(f"    order {number} for dave@example.com: rolled back, and its job with it")
    _expect("jobs", queue.size("default"), 3)
    _show(echo, "sqlqueue status", status_lines(queue))


def _repair(echo: Echo, engine: Engine) -> None:
    (failed,) = queue.failed.list()
    with Session(engine) as session, session.begin():
        session.execute(select(Order).where(Order.email == "carol")).scalar_one().email = "carol@example.com"
    _say(echo, "The address was the cause. It is repaired, and the job put back:")
    _expect("jobs put back", queue.failed.retry(id=failed.id), 1)
    _show(echo, f"sqlqueue failed retry --id {failed.id}", ["1 job put back"])


def _work_off(echo: Echo, title: str) -> None:
    _say(echo, title)
    worker = Worker(queue, concurrency=2)
    with _job_lines(echo):
        worker.start()
        try:
            done = queue.wait_empty(PATIENCE)
        finally:
            worker.stop(PATIENCE)
    if not done:
        raise DemoFailed(f"the demo failed: the queue is not empty after {PATIENCE} s")


def _receipts(engine: Engine) -> dict[str, int]:
    with Session(engine) as session:
        return {order.email: order.receipts for order in session.scalars(select(Order))}


def _expect(what: str, found: object, promised: object) -> None:
    if found != promised:
        raise DemoFailed(f"the demo failed: {what}: promised was {promised}, found was {found}")


def _say(echo: Echo, text: str) -> None:
    echo("")
    echo(text)


def _show(echo: Echo, command: str, lines: Iterable[str]) -> None:
    _say(echo, f"    $ {command}")
    for line in lines:
        echo(f"    {line}")


class _Lines(logging.Handler):
    def __init__(self, echo: Echo) -> None:
        super().__init__()
        self.echo = echo

    def emit(self, record: logging.LogRecord) -> None:
        self.echo(f"    {record.getMessage()}")


@contextmanager
def _job_lines(echo: Echo) -> Iterator[None]:
    """
    Show the worker's line about each job, as `sqlqueue work --verbose` does.
    """
    log = logging.getLogger("sqlqueue.jobs")
    handler = _Lines(echo)
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
