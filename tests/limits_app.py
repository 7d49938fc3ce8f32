"""
The worker processes of `test_limits_processes.py`, which says by environment variables what they have to do.

What the handlers saw by the database's clock is written down when the worker has stopped.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from sqlqueue import JobContext, Queue, Worker
from sqlqueue._dialects import now
from sqlqueue._driver.permits import Permit
from sqlqueue.middleware import RateLimited, WithoutOverlapping

URL, FOLDER = os.environ.get("LIMITS_URL"), os.environ.get("LIMITS_FOLDER", "")
SETTINGS: dict[str, Any] = json.loads(os.environ.get("LIMITS_OPTIONS", "{}"))
RATE, BURST, LIMIT = SETTINGS.pop("rate", 100), 10, 3

queue = Queue(URL)
records: list[dict[str, Any]] = []
here = threading.local()


def moment(clock: sa.Engine) -> float:
    with clock.connect() as connection:
        return float(connection.scalar(sa.select(now())).timestamp())  # type: ignore[union-attr]


class Recorded(RateLimited):
    """Tells the handler which permit it has."""

    def _await_permit(self, *arguments: Any) -> Permit:
        here.permit = super()._await_permit(*arguments)
        return here.permit  # type: ignore[no-any-return]


@queue.job(name="rated", middleware=[Recorded(RATE, per=1, key="rated", burst=BURST)])
def rated(context: JobContext) -> None:
    record(context, "rated", permit=here.permit.at.timestamp())


@queue.job(name="alone", middleware=[WithoutOverlapping(lambda context: context.arguments["key"])])
def alone(context: JobContext, key: str) -> None:
    record(context, key, seconds=0.001)


@queue.job(name="limited", limit=LIMIT, limit_key=lambda context: context.arguments["key"])
def limited(context: JobContext, key: str) -> None:
    record(context, key, seconds=0.01)


@queue.job(name="hold_lock", max_attempts=1, middleware=[WithoutOverlapping("held")])
def hold_lock(context: JobContext) -> None:
    hold(context)


@queue.job(name="hold_place", max_attempts=1, limit=1)
def hold_place(context: JobContext) -> None:
    hold(context)


def record(context: JobContext, key: str, seconds: float = 0.0, **more: float) -> None:
    began = moment(CLOCK)
    if seconds:
        time.sleep(seconds)
    records.append({"id": context.id, "key": key, "attempt": context.attempt, "began": began, "ended": moment(CLOCK), **more})


def hold(context: JobContext) -> None:
    """Say that it has come, and stay until it may go."""
    (Path(FOLDER) / f"came-{context.id}").touch()
    while not (Path(FOLDER) / f"go-{context.id}").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    assert URL is not None
    CLOCK = sa.create_engine(URL, isolation_level="AUTOCOMMIT", pool_size=20)
    worker = Worker(queue, **SETTINGS)
    code = worker.run()
    (Path(FOLDER) / f"records-{os.getpid()}").write_text(json.dumps(records))
    sys.exit(code)
