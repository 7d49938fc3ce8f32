"""
Oban for Python: on psycopg and uvloop, 100 jobs at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psycopg
from oban import Oban, worker
from oban.schema import install

from .base import serve
from .peers import BUSINESS, ORDER, PsycopgPeer, chunks, run_fast, until_sigterm

LIMIT = 100
stamps: list[Callable[[int], None]] = []


@worker(queue="default")
class Noop:
    async def process(self, job: Any) -> None:
        stamps[0](job.args["number"])


class ObanPeer(PsycopgPeer):
    tables = "oban_jobs"
    left = "SELECT FROM oban_jobs WHERE state IN ('available', 'executing', 'scheduled', 'retryable')"

    def pooled(self, body: Callable[[Any, Oban], Coroutine[Any, Any, Any]]) -> Any:
        async def run() -> Any:
            pool = await Oban.create_pool(self.url)
            try:
                return await body(pool, Oban(pool=pool))
            finally:
                await pool.close()

        return run_fast(run())

    def install(self) -> None:
        self.pooled(lambda pool, oban: install(pool))
        self.execute(BUSINESS)

    def push_each(self, count: int) -> float:
        async def push_all(pool: Any, oban: Oban) -> float:
            began = 0.0
            async with await psycopg.AsyncConnection.connect(self.url) as connection:
                for number in range(-20, count):
                    began = time.perf_counter() if number == 0 else began
                    await connection.execute(ORDER)
                    await oban.enqueue(Noop.new({"number": number}), conn=connection)
                    await connection.commit()
            return time.perf_counter() - began

        return float(self.pooled(push_all))

    def push_bulk(self, count: int) -> float:
        async def push_all(pool: Any, oban: Oban) -> float:
            began = time.perf_counter()
            for chunk in chunks(count):
                await oban.enqueue_many([Noop.new({"number": number}) for number in chunk])
            return time.perf_counter() - began

        return float(self.pooled(push_all))

    @contextlib.contextmanager
    def pusher(self) -> Iterator[Callable[[int], object]]:
        loop = asyncio.new_event_loop()

        async def connect() -> Oban:
            return Oban(pool=await Oban.create_pool(self.url))

        oban = loop.run_until_complete(connect())
        yield lambda number: loop.run_until_complete(oban.enqueue(Noop.new({"number": number})))

    def work(self, stamp: Callable[[int], None]) -> None:
        stamps.append(stamp)

        async def run() -> None:
            pool = await Oban.create_pool(self.url)
            stop = asyncio.Event()
            await until_sigterm(stop.set)
            async with Oban(pool=pool, queues={"default": LIMIT}):
                await stop.wait()
            await pool.close()

        run_fast(run())


if __name__ == "__main__":
    serve(ObanPeer)
