"""
procrastinate: asynchronous worker on psycopg, 20 jobs at once, finished jobs deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import procrastinate
import psycopg

from .base import seconds_of, serve
from .peers import BUSINESS, ORDER, PsycopgPeer, chunks

CONCURRENCY = 20


class Procrastinate(PsycopgPeer):
    tables = "procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers"
    left = "SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"

    def app(self, connector: Any, stamp: Callable[[int], None] = lambda number: None) -> tuple[procrastinate.App, Any]:
        app = procrastinate.App(connector=connector)

        @app.task(name="noop")
        async def noop(number: int) -> None:
            stamp(number)

        return app, noop

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[procrastinate.App, Any]]:
        app, noop = self.app(procrastinate.SyncPsycopgConnector(conninfo=self.url))
        with app.open():
            yield app, noop

    def install(self) -> None:
        with self.opened() as (app, _):
            app.schema_manager.apply_schema()
        self.execute(BUSINESS)

    def push_each(self, count: int) -> float:
        with self.opened() as (_, noop), psycopg.connect(self.url) as connection:

            def push_all(numbers: range) -> None:
                for number in numbers:
                    connection.execute(ORDER)
                    noop.configure(connection=connection).defer(number=number)
                    connection.commit()

            push_all(range(20))
            return seconds_of(lambda: push_all(range(count)))

    def push_bulk(self, count: int) -> float:
        with self.opened() as (_, noop):
            return seconds_of(lambda: [noop.batch_defer(*({"number": number} for number in chunk)) for chunk in chunks(count)])

    @contextlib.contextmanager
    def pusher(self) -> Iterator[Callable[[int], object]]:
        with self.opened() as (_, noop):
            yield lambda number: noop.defer(number=number)

    def work(self, stamp: Callable[[int], None]) -> None:
        app, _ = self.app(procrastinate.PsycopgConnector(conninfo=self.url, min_size=CONCURRENCY + 2, max_size=CONCURRENCY + 2), stamp)
        app.run_worker(concurrency=CONCURRENCY, delete_jobs="always")


if __name__ == "__main__":
    serve(Procrastinate)
