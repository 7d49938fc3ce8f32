"""
Worker processes, from their start to their exit code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Queue
from tests.acceptance import app
from tests.servers import Database
from tests.workers import eventually

ROOT = Path(__file__).parent.parent.parent
EXIT_PATIENCE = 180.0


class Process:
    """One worker process of the application."""

    def __init__(self, url: str, log: Path, options: dict[str, Any]) -> None:
        self.log = log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, ROOT / "tests/acceptance/app.py", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | {"APP_URL": url, "PYTHONPATH": str(ROOT)},
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def complaints(self) -> list[str]:
        """Lines of its log that are no ordinary news."""
        return [line for line in self.said.splitlines() if not line.startswith("INFO ") and "not watched here" not in line]

    def await_words(self, words: str) -> None:
        eventually(lambda: words in self.said, f"it says «{words}»")

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait(self) -> int:
        """Its exit code; minus the signal that ended it."""
        return self.popen.wait(timeout=EXIT_PATIENCE)


class Site:
    """An application on one database: its tables, its queue, its worker processes."""

    def __init__(self, queue: Queue, database: Database, observer: Engine, folder: Path) -> None:
        self.queue = queue
        self.observer = observer
        self.folder = folder
        self.engine = app.connect(database.url)
        self._url = database.url
        self._processes: list[Process] = []
        app.metadata.drop_all(self.engine)
        app.metadata.create_all(self.engine)

    def use_write_ahead_log(self) -> None:
        """Where the database is a file: what people use there who have several processes."""
        if self.engine.dialect.name == "sqlite":
            with self.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")

    def start(self, **options: Any) -> Process:
        process = Process(self._url, self.folder / f"worker-{len(self._processes)}.log", options)
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        app.metadata.drop_all(self.engine)
        self.engine.dispose()

    def push(self, name: str, count: int = 1, payload: dict[str, Any] | None = None, **options: Any) -> list[int]:
        """Push that many jobs in one transaction; their ids."""
        bound = [self.queue._bind_named(name, payload or {}, options) for _ in range(count)]
        with self.queue.begin() as session:
            self.queue.push_many(session, bound)
        table = self.queue.tables.jobs
        with self.observer.connect() as connection:
            return list(connection.scalars(sa.select(table.c.id).where(table.c.name == name).order_by(table.c.id)))

    def effects(self) -> list[tuple[int, int]]:
        """What the handlers have committed: (job, attempt)."""
        with self.observer.connect() as connection:
            rows = connection.execute(sa.select(app.EFFECTS).order_by(app.EFFECTS.c.job_id, app.EFFECTS.c.attempt))
            return [(row.job_id, row.attempt) for row in rows]

    def count_effects(self) -> int:
        with self.observer.connect() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(app.EFFECTS)) or 0


@contextmanager
def site_on(queue: Queue, database: Database, observer: Engine, folder: Path) -> Iterator[Site]:
    site = Site(queue, database, observer, folder)
    try:
        yield site
    finally:
        site.close()
