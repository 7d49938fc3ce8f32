"""
pgqueuer: asynchronous worker on asyncpg and uvloop; how many jobs it takes at once is a setting.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from .base import serve
from .peers import BUSINESS, ORDER, PostgreSQLPeer, chunks, run_fast, until_sigterm


class Pgqueuer(PostgreSQLPeer):
    tables = "pgqueuer, pgqueuer_log, pgqueuer_statistics"
    left = "SELECT FROM pgqueuer"
    _loop: Any = None

    def execute(self, statement: str) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._connection = self._loop.run_until_complete(asyncpg.connect(self.url))
        return self._loop.run_until_complete(self._connection.fetchval(statement))

    def connected(self, body: Callable[[Any, Queries], Coroutine[Any, Any, Any]]) -> Any:
        async def run() -> Any:
            connection = await asyncpg.connect(self.url)
            return await body(connection, Queries(AsyncpgDriver(connection)))

        return run_fast(run())

    def install(self) -> None:
        self.connected(lambda connection, queries: queries.install())
        self.execute(BUSINESS)

    def push_each(self, count: int) -> float:
        async def push_all(connection: Any, queries: Queries) -> float:
            began = 0.0
            for number in range(-20, count):
                began = time.perf_counter() if number == 0 else began
                async with connection.transaction():
                    await connection.execute(ORDER)
                    await queries.enqueue("noop", str(number).encode())
            return time.perf_counter() - began

        return float(self.connected(push_all))

    def push_bulk(self, count: int) -> float:
        async def push_all(connection: Any, queries: Queries) -> float:
            began = time.perf_counter()
            for chunk in chunks(count):
                await queries.enqueue(["noop"] * len(chunk), [str(number).encode() for number in chunk], [0] * len(chunk))
            return time.perf_counter() - began

        return float(self.connected(push_all))

    @contextlib.contextmanager
    def pusher(self) -> Iterator[Callable[[int], object]]:
        self.execute("SELECT 1")
        queries = Queries(AsyncpgDriver(self._connection))
        yield lambda number: self._loop.run_until_complete(queries.enqueue("noop", str(number).encode()))

    def work(self, stamp: Callable[[int], None]) -> None:
        async def run() -> None:
            worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.url)))

            @worker.entrypoint("noop")
            async def noop(job: Any) -> None:
                stamp(int(job.payload))

            await until_sigterm(worker.shutdown.set)
            await worker.run(batch_size=self.settings["group"])

        run_fast(run())


if __name__ == "__main__":
    serve(Pgqueuer)
