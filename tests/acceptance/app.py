"""
The application that the worker processes of these tests run: `python tests/acceptance/app.py '{"concurrency": 4}'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlqueue import Fixed, JobContext, JobTimeout, Queue, Worker

queue = Queue(os.environ.get("APP_URL"))
metadata = sa.MetaData()
INNODB: dict[str, Any] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}
EFFECTS = sa.Table(
    "test_effects",
    metadata,
    sa.Column("job_id", sa.BigInteger(), primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer(), primary_key=True, autoincrement=False),
    **INNODB,
)
ROWS = sa.Table("test_rows", metadata, sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False), **INNODB)


def connect(url: str) -> sa.Engine:
    """The application's own connections. In a file they wait for the workers' short transactions, and not for the disk."""
    if not url.startswith("sqlite"):
        return sa.create_engine(url, pool_size=10)
    engine = sa.create_engine(url, pool_size=10, connect_args={"timeout": 60})
    sa.event.listen(engine, "connect", lambda connection, record: connection.execute("PRAGMA synchronous = OFF"))
    return engine


engine = connect(os.environ["APP_URL"]) if "APP_URL" in os.environ else None


@queue.job(name="noop", max_attempts=2, backoff=Fixed(0))
def noop() -> None: ...


@queue.job(name="effect")
def effect(context: JobContext) -> None:
    assert engine is not None
    with engine.begin() as connection:
        connection.execute(EFFECTS.insert().values(job_id=context.id, attempt=context.attempt))


@queue.job(name="write", max_attempts=50, backoff=Fixed(0))
def write(context: JobContext, session: Session) -> None:
    """Takes a little while, so that many are under way whenever something happens to the process."""
    session.execute(EFFECTS.insert().values(job_id=context.id, attempt=context.attempt))
    time.sleep(0.02)


@queue.job(name="write_and_die", max_attempts=3)
def write_and_die(context: JobContext, session: Session, when: str) -> None:
    """At the first attempt its process is killed right before, or right after, what it has written is committed."""
    session.execute(EFFECTS.insert().values(job_id=context.id, attempt=context.attempt))
    if context.attempt == 1:
        sa.event.listen(session, when, lambda session: os.kill(os.getpid(), signal.SIGKILL))


@queue.job(name="see")
def see(context: JobContext, row: int) -> None:
    """Fails for good if the row that was written beside this job is not there."""
    assert engine is not None
    with engine.begin() as connection:
        found = connection.scalar(sa.select(sa.func.count()).where(ROWS.c.id == row))
        connection.execute(EFFECTS.insert().values(job_id=context.id, attempt=context.attempt if found else -1))


@queue.job(name="die", max_attempts=2)
def die(context: JobContext, how: str) -> None:
    """Takes the process with it. Its effect says that this attempt has begun."""
    effect.function(context)
    match how:
        case "exit":
            os._exit(137)
        case "segfault":
            faulthandler.disable()
            ctypes.string_at(0)
        case "kill":  # as the kernel does when memory runs out
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


@queue.job(name="die_once", max_attempts=5, on_worker_lost="fail")
def die_once(context: JobContext) -> None:
    die.function(context, "kill")


@queue.job(name="wait", max_attempts=1)
def wait(context: JobContext, folder: str) -> None:
    """Says that it has begun, and waits for leave to end."""
    Path(folder, f"began-{context.id}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)


@queue.job(name="wait_async", max_attempts=1)
async def wait_async(context: JobContext, folder: str) -> None:
    Path(folder, f"began-{context.id}").touch()
    while not Path(folder, "go").exists():
        await asyncio.sleep(0.01)


@queue.job(name="linger", timeout=0.05)
def linger(context: JobContext, folder: str) -> None:
    """Says that its time is over, and goes on."""
    with contextlib.suppress(JobTimeout):
        while True:
            time.sleep(0.01)
    Path(folder, f"told-{context.id}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)


@queue.job(name="freeze", max_attempts=2)
def freeze(context: JobContext, folder: str) -> None:
    """Keeps the GIL from all other threads until somebody writes to the pipe, and tells whether it learns that its lease is lost."""
    pipe = os.open(Path(folder, "pipe"), os.O_RDWR)
    Path(folder, f"began-{context.id}").touch()
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    os.close(pipe)
    while not context.lost:
        time.sleep(0.01)
    Path(folder, f"lost-{context.id}").touch()


@queue.job(name="deaf")
def deaf() -> None:
    """Wants to hear no signals."""
    faulthandler.register(signal.SIGUSR1)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@queue.job(name="stop")
def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("sqlqueue.jobs").setLevel(logging.WARNING)
    code = Worker(queue, **json.loads(sys.argv[1])).run()
    sys.stderr.flush()
    os._exit(code)  # handlers that were cut short may still run


if __name__ == "__main__":
    main()
