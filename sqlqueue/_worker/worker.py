"""
Worker: what an application starts and stops.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .._backoff import seconds
from .._queue import DEFAULT_QUEUE, Queue, check_lease, check_queues
from .._queue.consumer import host_name
from ..errors import OptionError
from .crew import Crew
from .logs import log
from .shift import Idling, Shift
from .signals import Interrupted, Signals
from .summary import Limits, Summary

__all__ = ["Worker"]

DEFAULT_ASYNC, MOST_ASYNC = 100, 10_000
SHORTEST_POLL, LONGEST_POLL = 0.005, 86_400.0


class Worker:
    """
    Runs the jobs of some queues until it is told to stop.

    Args:
        queue: where the jobs are.
        queues: the names to watch, in order of precedence.
        concurrency: how many jobs run at once, each in a thread.
        async_concurrency: how many jobs run at once if they are `async def`, all on one event loop, the others among them: at
            least `concurrency`, since each may take the place of one in a thread. 100 if not given, or `concurrency` if that
            is more.
        lease: seconds or a timedelta that a claim lasts; renewed at a third of it while the job runs.
        stop_when_empty: stop when none of the queues has a pending job and no job is running here.
        max_jobs: stop after starting so many.
        max_time: stop claiming after so many seconds.
        max_memory: stop when the process uses more than so many MiB.
        wait_for_database: seconds to wait for a database that cannot be reached at the start.
        shutdown_timeout: seconds that running jobs have to finish after a signal or `stop()`; then they are handed back,
            due in 5 s and with their attempts given back. As long as it takes if not given.
        poll_max: the longest pause between two looks at queues that are empty, in seconds. Right after a job the pauses are
            short; they never go beyond the moment at which the next known job is due.
        notify: let pushes end such a pause: those of this process, and on PostgreSQL and SQLite of any. Otherwise only look.
        exit_on_stuck: stop when a handler has not reacted 30 s after the end of its `timeout`. The others finish; that job has used
            an attempt, and comes back when its lease ends.

    Example:
        `Worker(queue, ["high", "default"], concurrency=4).run()`
    """

    def __init__(
        self,
        queue: Queue,
        queues: str | Sequence[str] = DEFAULT_QUEUE,
        *,
        concurrency: int = 10,
        lease: float | timedelta | None = None,
        stop_when_empty: bool = False,
        max_jobs: int | None = None,
        max_time: float | timedelta | None = None,
        max_memory: int | None = None,
        wait_for_database: float | timedelta = 60,
        shutdown_timeout: float | timedelta | None = None,
        poll_max: float | timedelta | None = None,
        notify: bool = True,
        async_concurrency: int | None = None,
        exit_on_stuck: bool = False,
    ) -> None:
        self.queue = queue
        self.queues = check_queues(queues)
        self.concurrency = _count("concurrency", concurrency, 1000)
        self.async_concurrency = _async_count(async_concurrency, self.concurrency)
        self.lease = check_lease(lease)
        self.name = f"{host_name()}:{secrets.token_hex(3)}"
        self.summary: Summary | None = None
        """What the last run did."""
        self._limits = Limits(
            stop_when_empty=stop_when_empty,
            max_jobs=None if max_jobs is None else _count("max_jobs", max_jobs, sys.maxsize),
            max_time=None if max_time is None else seconds(max_time, "max_time"),
            max_memory=None if max_memory is None else _count("max_memory", max_memory, sys.maxsize),
        )
        self._wait_for_database = seconds(wait_for_database, "wait_for_database")
        self._shutdown_timeout = None if shutdown_timeout is None else seconds(shutdown_timeout, "shutdown_timeout")
        for name, value in (("notify", notify), ("exit_on_stuck", exit_on_stuck)):
            if type(value) is not bool:
                raise OptionError(f"{name}: True or False")
        self._exit_on_stuck = exit_on_stuck
        longest = None if poll_max is None else seconds(poll_max, "poll_max", minimum=SHORTEST_POLL, maximum=LONGEST_POLL)
        self._idling = Idling(longest, notify)
        self._guard = threading.Lock()
        self._shift: Shift | None = None
        self._stopped_early = False
        self._has_run = False
        self._error: BaseException | None = None

    def run(self) -> int:
        """
        Work until a limit, a signal or `stop()`; the exit code: 0, or 1 if a second signal or `shutdown_timeout` cut
        running jobs short, or one was stuck.

        In the main thread SIGTERM, SIGINT and SIGQUIT are caught meanwhile, and the garbage collector leaves alone what was
        there before. After a 1 running handlers are still under way in their threads: end the process with `os._exit`, so
        that it does not wait for them.

        Raises:
            UnusableDatabase: the database cannot be used.
        """
        shift = self._begin()
        try:
            return self._run(shift)
        finally:
            self._end(shift)

    def run_once(self) -> bool:
        """
        Run at most one job in this thread; whether there was one.

        Raises:
            UnusableDatabase: the database cannot be used.
        """
        shift = self._begin()
        began = time.monotonic()
        try:
            self.queue.registry.load()
            found = self._crew(shift).run_one()
            self.summary = Summary("once", time.monotonic() - began, shift.counts)
        finally:
            self._end(shift)
        return found

    def start(self) -> None:
        """
        Run in a thread of its own, inside another program. Signals are left to that program.

        Raises:
            RuntimeError: it is running already.
        """
        self._stopped_early = False
        self._error = None
        shift = self._begin()
        threading.Thread(target=self._run_beside, args=(shift,), name="sqlqueue-worker", daemon=True).start()

    def stop(self, timeout: float | None = None) -> None:
        """
        Stop claiming, let running jobs finish and settle, and wait for that at most `timeout` seconds.

        From a handler of this worker it only asks. Before the first `run()` it lets that one end at once.

        Raises:
            UnusableDatabase: a worker that was started with `start()` had to stop by itself.
        """
        with self._guard:
            shift = self._shift
            self._stopped_early = not self._has_run
        if shift is not None and shift.process == os.getpid():  # the child of a fork has none of its threads
            shift.ask_to_stop("asked to")
            if threading.get_ident() not in shift.own_threads:
                shift.finished.wait(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def __aenter__(self) -> Worker:
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.stop)

    def _begin(self) -> Shift:
        with self._guard:
            if self._shift is not None and self._shift.process == os.getpid():
                raise RuntimeError("this worker is running already")
            self._shift = shift = Shift(
                self.queue,
                self.queues,
                self._limits,
                concurrency=self.concurrency,
                async_concurrency=self.async_concurrency,
                lease=self.lease,
                name=self.name,
                idling=self._idling,
                exit_on_stuck=self._exit_on_stuck,
            )
            shift.own_threads.add(threading.get_ident())
            self._has_run = True
            self.summary = None
            stopped_early, self._stopped_early = self._stopped_early, False
        if stopped_early:
            shift.ask_to_stop("asked to")
        return shift

    def _end(self, shift: Shift) -> None:
        with self._guard:
            self._shift = None
        shift.finished.set()

    def _run(self, shift: Shift) -> int:
        began = time.monotonic()
        with Signals(shift) as signals:
            try:
                with signals.interrupting():
                    self.queue.registry.load()
                with signals.process_is_ours():
                    clean = self._crew(shift).work()
            except Interrupted:
                clean = True
        self.summary = Summary(shift.reason or "error", time.monotonic() - began, shift.counts)
        if shift.fatal is not None:
            raise shift.fatal
        log.info("%s", self.summary)
        return 0 if clean else 1

    def _crew(self, shift: Shift) -> Crew:
        return Crew(shift, wait_for_database=self._wait_for_database, shutdown_timeout=self._shutdown_timeout)

    def _run_beside(self, shift: Shift) -> None:
        shift.own_threads = {threading.get_ident()}
        try:
            self._run(shift)
        except BaseException as error:
            self._error = error
            log.error("the worker has stopped: %s", error)
        finally:
            self._end(shift)


def _async_count(given: int | None, concurrency: int) -> int:
    if given is None:
        return max(DEFAULT_ASYNC, concurrency)
    if _count("async_concurrency", given, MOST_ASYNC) < concurrency:
        raise OptionError(f"async_concurrency: at least the concurrency, {concurrency}, as an async job may take the place of any other")
    return given


def _count(name: str, value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise OptionError(f"{name}: a whole number of at least 1" + ("" if most == sys.maxsize else f" and at most {most}"))
    return value
