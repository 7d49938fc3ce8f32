"""
huey on SQLite: one thread, results not kept, the disk waited for as we do. It deletes a job when it takes it, so that a job
whose worker dies is lost, and a push cannot join the caller's transaction; it has no push of many.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from huey import SqliteHuey

from .base import Contestant, seconds_of, serve


class Huey(Contestant):
    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self.file = url.removeprefix("sqlite:///")
        self.stamp: Callable[[int], None] = lambda number: None

    def huey(self) -> tuple[SqliteHuey, Any]:
        huey = SqliteHuey("bench", filename=self.file, results=False, fsync=self.settings["fsync"])

        @huey.task(name="noop")
        def noop(number: int) -> None:
            self.stamp(number)

        return huey, noop

    def execute(self, statement: str) -> Any:
        with contextlib.closing(sqlite3.connect(self.file, timeout=30)) as connection, connection:
            return connection.execute(statement).fetchone()

    def install(self) -> None:
        self.huey()

    def clear(self) -> None:
        self.execute("DELETE FROM task")
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def push_each(self, count: int) -> float:
        _, noop = self.huey()
        noop(0)
        return seconds_of(lambda: [noop(number) for number in range(count)])

    def push_bulk(self, count: int) -> float:
        _, noop = self.huey()
        return seconds_of(lambda: [noop(number) for number in range(count)])

    @contextlib.contextmanager
    def pusher(self) -> Iterator[Callable[[int], object]]:
        yield self.huey()[1]

    def is_empty(self) -> bool:
        return self.execute("SELECT 1 FROM task LIMIT 1") is None

    def work(self, stamp: Callable[[int], None]) -> None:
        self.stamp = stamp
        huey, _ = self.huey()
        huey.create_consumer(workers=1, periodic=False).run()


if __name__ == "__main__":
    serve(Huey)
