"""
Where a test wants the kit to work: transactions of an engine's, or savepoints in the test's own transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session, scoped_session

from .._dialects import begin_at_server, check_transactional
from .._queue import AnySession, Queue
from .._queue.consumer import Consumer
from .._queue.sessions import producer_connection
from ..errors import OptionError

__all__ = ["Steps", "Target", "steps_on"]

T = TypeVar("T")

LOCK_WAIT = 1.0  # seconds: what a test has to wait for is mostly a transaction that it has forgotten to commit

Target: TypeAlias = "Engine | AnySession | None"


class Steps(Protocol):
    """
    Runs operations, each of them whole or not at all.
    """

    def run(self, operation: Callable[[sa.Connection], T], /) -> T: ...


@contextmanager
def steps_on(queue: Queue, on: Target, method: str) -> Iterator[Steps]:
    """
    Steps on what the test has given; on the queue's own database if that is None.

    Raises:
        TypeError: not an engine, session or connection.
        NotTransactional: on this connection nothing could be rolled back.
    """
    if on is None or (isinstance(on, Engine) and on is queue.source and not on.dialect.is_async):
        yield _own_steps(queue)
    elif isinstance(on, Engine):
        yield _EngineSteps(on)
    else:
        session = on() if isinstance(on, scoped_session) else on
        if isinstance(session, Session):
            session.flush()  # as a commit would
        yield _SavepointSteps(producer_connection(session, queue.tables.jobs, method))
        if isinstance(session, Session):
            session.flush()
            if session.expire_on_commit:
                session.expire_all()


def _own_steps(queue: Queue) -> Steps:
    consumer = queue.consumer
    try:
        consumer.engine  # noqa: B018  # made now
    except OptionError:
        source = queue.source
        if not isinstance(source, Engine) or source.dialect.is_async:
            raise
        return _EngineSteps(source)  # in-memory SQLite: connections that are not the engine's would not see it
    return _ConsumerSteps(consumer)


class _ConsumerSteps:
    """
    Transactions as a worker makes them.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def run(self, operation: Callable[[sa.Connection], T], /) -> T:
        return self._consumer.write(operation, lock_wait=LOCK_WAIT)


class _EngineSteps:
    """
    Transactions of a test's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, operation: Callable[[sa.Connection], T], /) -> T:
        with self._engine.begin() as connection:
            check_transactional(connection)
            return operation(connection)


class _SavepointSteps:
    """
    Savepoints in a transaction that the test will end.
    """

    def __init__(self, connection: sa.Connection) -> None:
        begin_at_server(connection)
        self._connection = connection
        self._transaction = connection.get_transaction()

    def run(self, operation: Callable[[sa.Connection], T], /) -> T:
        if self._connection.get_transaction() is not self._transaction:
            raise RuntimeError(
                "a handler has ended the transaction that its queue is drained in: its sessions on this connection "
                'need join_transaction_mode="create_savepoint"'
            )
        with self._connection.begin_nested():
            return operation(self._connection)
