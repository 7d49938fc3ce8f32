"""
`work`: a worker as a process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from .._queue import DEFAULT_QUEUE
from .._worker import Worker
from .._worker.logs import log
from .application import Target, open_queue, takes_app
from .problems import Misuse
from .text import printable
from .usercode import user_code

__all__ = ["work"]


@click.command()
@takes_app
@click.option("--queue", "queues", multiple=True, metavar="QUEUE,…", help="Queues in order of precedence; repeatable.  [default: default]")
@click.option("--concurrency", type=int, default=10, show_default=True, help="How many jobs run at once, each in a thread.")
@click.option("--async-concurrency", type=int, metavar="N", help="How many async jobs run at once.  [default: 100, or the concurrency]")
@click.option("--lease", type=float, metavar="SECONDS", help="How long a claim lasts; renewed while the job runs.  [default: 60]")
@click.option("--once", is_flag=True, help="Run at most one job.")
@click.option("--stop-when-empty", is_flag=True, help="Stop when no job of the queues is pending.")
@click.option("--max-jobs", type=int, metavar="N", help="Stop after so many jobs.")
@click.option("--max-time", type=float, metavar="SECONDS", help="Take no more jobs after so many seconds, finish, and stop.")
@click.option("--max-memory", type=int, metavar="MIB", help="Stop when the process uses more.")
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Import this module for the jobs in it; repeatable.")
@click.option(
    "--wait-for-database", type=float, default=60, show_default=True, metavar="SECONDS", help="How long to wait for it at the start."
)
@click.option("--shutdown-timeout", type=float, metavar="SECONDS", help="How long to wait for running jobs; then hand them back, exit 1.")
@click.option("--poll-max", type=float, metavar="SECONDS", help="The longest pause between two looks at empty queues.")
@click.option("--notify/--no-notify", default=True, help="Let pushes wake the worker, or only look.  [default: notify]")
@click.option("--exit-on-stuck", is_flag=True, help="Stop, exit 1, when a job does not react to the end of its timeout.")
@click.option("--verbose", "-v", is_flag=True, help="One line a job.")
def work(target: Target, *, queues: Sequence[str], once: bool, imports: Sequence[str], verbose: bool, **limits: Any) -> None:
    """
    Run jobs until told to stop.

    SIGTERM or SIGINT: take no more jobs, finish the running ones, exit 0. A second one, or --shutdown-timeout, hands the
    running ones back and exits 1.
    """
    names = [name.strip() for part in queues for name in part.split(",")] or [DEFAULT_QUEUE]
    if once:
        limits |= _only_one(limits)
    with _Departure() as departure:
        queue = open_queue(target, needs_app=True)
        with user_code("imports"):
            queue.registry.load(imports)
        worker = Worker(queue, names, **limits)
        others = threading.enumerate()
        with _logging_to_stderr(verbose):
            departure.code = 1  # what comes through now is a third signal
            departure.code = worker.run()
            if departure.code:
                _leave_now(departure.code)
            departure.code = 1  # a signal from now on cuts short what jobs have left running
            _wait_for_threads(others)


def _only_one(limits: dict[str, Any]) -> dict[str, Any]:
    if limits["max_jobs"] is not None:
        raise Misuse("--once and --max-jobs contradict each other")
    return {"concurrency": 1, "async_concurrency": 1, "max_jobs": 1, "stop_when_empty": True}


# --- signals


class _Departure:
    """
    Leave at once when a signal comes that the worker does not catch: before it has begun, even from inside a slow import.

    The first process of a container needs this: the kernel drops signals for which it has no handler.
    """

    def __init__(self) -> None:
        self.code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Departure:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGINT", "SIGQUIT", "SIGBREAK"):
                if (number := getattr(signal, name, None)) is not None:
                    self._before[number] = signal.signal(number, self._leave)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _leave(self, number: int, frame: object) -> NoReturn:
        # Not through an exception, which the module that is being imported could swallow; not through a stream, which may be in use.
        when = "at once" if self.code else "before it began"
        os.write(2, f"stopped ({signal.Signals(number).name}) {when}\n".encode())
        os._exit(self.code)


def _leave_now(code: int) -> NoReturn:
    """
    Without waiting for threads: handlers that were cut short may run for ever.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_for_threads(others: Sequence[threading.Thread]) -> None:
    """
    As Python does at its end, but not without a word.
    """
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread not in others]
    if left:
        names = ", ".join(printable(thread.name) for thread in left)
        log.warning("waiting for threads that jobs have left running; a signal ends them: %s", names)
    for thread in left:
        thread.join()


# --- logging


class _Lines(logging.Formatter):
    """
    One line a record, a traceback aside, with nothing in it that a terminal would obey.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return printable(super().formatException(ei), keep_newlines=True)


@contextmanager
def _logging_to_stderr(verbose: bool) -> Iterator[None]:
    """
    Show what the library logs, unless the application has set up its loggers.
    """
    library, jobs = logging.getLogger("sqlqueue"), logging.getLogger("sqlqueue.jobs")
    # An application's dictConfig disables every logger that it does not name.
    library.disabled = jobs.disabled = False
    if jobs.level == logging.NOTSET or verbose:
        jobs.setLevel(logging.INFO if verbose else logging.WARNING)
    if library.handlers:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines("%(asctime)s %(message)s", "%H:%M:%S"))
    level, propagate = library.level, library.propagate
    library.addHandler(handler)
    library.propagate = False
    if level == logging.NOTSET:
        library.setLevel(logging.INFO)
    try:
        yield
    finally:
        library.removeHandler(handler)
        library.setLevel(level)
        library.propagate = propagate
