"""
What the peers on PostgreSQL share. Standard library only; psycopg or asyncpg come with the peer.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from .base import Contestant

BUSINESS = "CREATE TABLE bench_orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)"
ORDER = "INSERT INTO bench_orders (note) VALUES ('an order')"
CHUNK = 1000


def chunks(count: int) -> list[range]:
    return [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]


class PostgreSQLPeer(Contestant):
    tables: str
    left: str
    """A query that finds a job which is not settled."""

    def execute(self, statement: str) -> Any:
        raise NotImplementedError

    def clear(self) -> None:
        self.execute(f"TRUNCATE {self.tables}, bench_orders")

    def is_empty(self) -> bool:
        return not self.execute(f"SELECT EXISTS ({self.left})")


class PsycopgPeer(PostgreSQLPeer):
    _connection: Any = None

    def execute(self, statement: str) -> Any:
        import psycopg

        if self._connection is None:
            self._connection = psycopg.connect(self.url, autocommit=True)
        cursor = self._connection.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None


async def until_sigterm(then: Callable[[], object]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, then)


def run_fast(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """On uvloop, which the asynchronous peers recommend."""
    import uvloop

    return uvloop.run(coroutine)
