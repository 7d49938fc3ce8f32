"""
Where middleware keeps what all workers have to know: transactions that are not the handler's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import sqlalchemy as sa

from .._tables import Tables
from .consumer import Consumer

__all__ = ["KeyStore", "store_of"]

T = TypeVar("T")

LOCK_WAIT = 5.0  # seconds; nobody holds these rows for longer than a transaction of ours takes


class Run(Protocol):
    """
    Runs an operation in a transaction.
    """

    def __call__(self, operation: Callable[[sa.Connection], T], /) -> T: ...


class KeyStore:
    """
    Runs operations on the table of keys.
    """

    def __init__(self, tables: Tables, read: Run, write: Run) -> None:
        self._tables = tables
        self._read = read
        self._write = write

    def read(self, operation: Callable[[sa.Connection, Tables], T], /) -> T:
        return self._read(lambda connection: operation(connection, self._tables))

    def write(self, operation: Callable[[sa.Connection, Tables], T], /) -> T:
        return self._write(lambda connection: operation(connection, self._tables))


def store_of(consumer: Consumer, tables: Tables) -> KeyStore:
    """
    The store on a queue's own connections.
    """

    def write(operation: Callable[[sa.Connection], T], /) -> T:
        return consumer.write(operation, lock_wait=LOCK_WAIT)

    return KeyStore(tables, consumer.read, write)
