"""
Short transactions on an engine of the queue's own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DBAPIError

from .._dialects import Trouble, consumer_engine, consumer_options, trouble_of
from .own_engine import OwnEngine

__all__ = ["Transactions"]

T = TypeVar("T")

TRIES = 5
PAUSE = 0.02


class Transactions:
    """
    Runs operations, each in a transaction, again when the database says that another one was in the way.
    """

    def __init__(self, source: URL | Engine) -> None:
        self._own = OwnEngine(lambda: consumer_engine(source))

    @property
    def engine(self) -> Engine:
        """
        The queue's own engine in this process.
        """
        return self._own.get()

    def close(self) -> None:
        """
        Give up the connections. The next operation opens new ones.
        """
        self._own.close()

    def read(self, operation: Callable[[sa.Connection], T]) -> T:
        """
        Run a reading transaction.
        """
        return self.run(lambda connection, repeated: operation(connection), read_only=True)

    def write(self, operation: Callable[[sa.Connection], T], *, lock_wait: float | None = None) -> T:
        """
        Run a writing transaction, again after a conflict; a connection that is lost at its COMMIT is the caller's to judge.
        """
        return self.run(lambda connection, repeated: operation(connection), lock_wait=lock_wait)

    def run(
        self,
        operation: Callable[[sa.Connection, bool], T],
        *,
        lock_wait: float | None = None,
        read_only: bool = False,
        repeat_lost: bool = False,
        repeated: bool = False,
    ) -> T:
        """
        Run a transaction, again after a conflict or when the connection is lost before the COMMIT: then nothing has happened.

        Args:
            repeat_lost: run it again when the connection is lost at the COMMIT, too. The operation is told that it may
                have been applied.
            repeated: an earlier call ended with a lost connection.
        """
        for left in reversed(range(TRIES)):
            committing = False
            try:
                with self.engine.connect() as connection:
                    consumer_options(connection, lock_wait=lock_wait, read_only=read_only)
                    with connection.begin():  # a conflict may first show at COMMIT
                        result = operation(connection, repeated)
                        committing = True
                return result
            except DBAPIError as error:
                trouble = trouble_of(error)
                lost = trouble is Trouble.LOST
                again = trouble is Trouble.CONFLICT or (lost and (repeat_lost or read_only or not committing))
                if not again or not left:
                    raise
                repeated = repeated or (lost and committing)
                time.sleep(PAUSE * (TRIES - left) * (0.5 + random.random()))
        raise AssertionError("unreachable")
