"""
The session of a transactional handler: what it writes and the job's completion are one transaction.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from .._dialects import Trouble, left_when_undone, trouble_of
from .._driver.fenced import Fate, complete_own, fate_of, lock_delivery, needs_lock
from .._job import Delivery, JobContext
from ..errors import NotTransactional, StaleDelivery
from .database import Configured
from .sessions import producer_connection

__all__ = ["NotStarted", "run_in_plain_session", "run_in_session"]

TRIES = 5
PAUSE = 0.02
LONGEST_PAUSE = 1.0
PATIENCE = 300.0  # for the answer what a COMMIT has done
PASSES = (Trouble.CONFLICT, Trouble.LOST, Trouble.UNAVAILABLE)


class NotStarted(Exception):
    """
    There was no transaction to run the handler in. It has done nothing, and the trouble may pass.
    """


def run_in_session(
    queue: Configured, delivery: Delivery, context: JobContext, kind: type[Session], work: Callable[[Session], object]
) -> object:
    """
    Run `work` and complete the job in one transaction. Returns what `work` has returned when that is committed, raises when it
    is rolled back.

    Args:
        kind: the class of the session where the queue has no session_factory.

    Raises:
        NotStarted: `work` did not run.
        StaleDelivery: the job was not ours any more when it was to be completed.
    """
    with contextlib.ExitStack() as closing:
        begun = _begin(queue, delivery, kind, closing)
        session, context._locked = begun.session, begun.has_lock
        committing = False
        try:
            result = work(session)
            session.flush()
            connection = begun.connection if begun.goes_on() else _connection(session, queue.tables.jobs)
            if not complete_own(connection, queue.tables, delivery.id, delivery.token, keyed=delivery.unique):
                raise StaleDelivery("complete", delivery.id)
            committing = True
            session.commit()
        except BaseException:
            if committing:  # nobody rolls back what a COMMIT has left open, as SQLite's when it is busy
                with contextlib.suppress(Exception):
                    connection.invalidate()
            closing.close()
            # The answer may be lost, or a listener of the application's may have raised after the fact.
            if not (committing and _was_committed(queue, delivery)):
                raise
        return result


def run_in_plain_session(queue: Configured, kind: type[Session], work: Callable[[Session], Any]) -> Any:
    """
    Run `work` in a transaction that is committed, for a job that has no row. Returns what it returned.
    """
    with _closed_at_last(queue.new_session(kind)) as session:
        if not session.in_transaction():
            session.begin()
        result = work(session)
        session.commit()
        return result


@dataclass(frozen=True, slots=True)
class _Begun:
    """
    A session, and the transaction in which its handler starts.
    """

    session: Session
    connection: sa.Connection
    transaction: SessionTransaction | None
    locked: bool

    def goes_on(self) -> bool:
        """
        The handler has neither committed nor rolled back by itself.
        """
        return self.session.get_transaction() is self.transaction

    def has_lock(self) -> bool:
        """
        It has locked the job's row. Asked by other threads, too.
        """
        return self.locked and self.goes_on()


def _begin(queue: Configured, delivery: Delivery, kind: type[Session], closing: contextlib.ExitStack) -> _Begun:
    """
    A session in a transaction, which has locked the job's row where that is needed.

    A lock costs a statement, and keeps the lease from being renewed and the job from being handed back. A second attempt locks in any
    case: the first may have failed because its handler changed the level of isolation.
    """
    for left in reversed(range(TRIES)):
        with contextlib.ExitStack() as opened:
            session = opened.enter_context(_closed_at_last(queue.new_session(kind)))
            try:
                connection = _connection(session, queue.tables.jobs)
                opened.enter_context(left_when_undone(connection))
                locked = delivery.attempt > 1 or needs_lock(connection)
                ours = not locked or lock_delivery(connection, queue.tables, delivery.id, delivery.token)
            except (DBAPIError, PoolTimeout) as error:
                trouble = _trouble_of(error)
                if trouble not in PASSES:
                    raise
                if trouble is not Trouble.CONFLICT or isinstance(error, PoolTimeout) or not left:
                    raise NotStarted(str(getattr(error, "orig", None) or error)) from error
            else:
                if not ours:  # if it is gone, the settlement will find out
                    raise NotTransactional(
                        f"the session of a transactional handler does not see job {delivery.id} as this worker's: "
                        "it leads to another database than the queue, or comes too late"
                    )
                closing.push(opened.pop_all())
                return _Begun(session, connection, session.get_transaction(), locked)
        time.sleep(PAUSE * (TRIES - left) * (0.5 + random.random()))
    raise AssertionError("unreachable")


@contextmanager
def _closed_at_last(made: Any) -> Iterator[Session]:
    session = made() if isinstance(made, scoped_session) else made
    if not isinstance(session, Session):
        raise TypeError(f"session_factory: it has to make a Session, not a {type(session).__name__}")
    try:
        if session.in_transaction():
            session.rollback()  # of a scoped_session: what an earlier handler of this thread has left must not be committed
        yield session
    finally:
        # Whatever is wrong with it: the pool looks after its connection.
        with contextlib.suppress(Exception):
            session.close()


def _connection(session: Session, table: sa.Table) -> sa.Connection:
    if not session.in_transaction():
        session.begin()  # not every session begins by itself
    try:
        return producer_connection(session, table, "A transactional handler")
    except NotTransactional as error:
        raise NotTransactional(f"the session of a transactional handler will not do: {error}") from None


def _was_committed(queue: Configured, delivery: Delivery) -> bool:
    """
    Whether the COMMIT has been applied; asks until the database answers. False also when it does not for too long: then nothing
    is known, and a settlement with the token does no harm.
    """
    until = time.monotonic() + PATIENCE
    pause = PAUSE
    while time.monotonic() < until:
        try:
            fate = queue.consumer.write(lambda connection: fate_of(connection, queue.tables, delivery.id))
        except (DBAPIError, PoolTimeout) as error:
            if _trouble_of(error) not in PASSES:
                return False
        else:
            if fate is not Fate.OPEN:
                return fate is Fate.COMMITTED
        time.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
    return False


def _trouble_of(error: Any) -> Trouble:
    return trouble_of(error) if isinstance(error, DBAPIError) else Trouble.CONFLICT
