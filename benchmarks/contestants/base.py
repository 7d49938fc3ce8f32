"""
What a contestant has to do, and the process that does it when the benchmark asks. Standard library only: it runs anywhere.

The process imports everything once and never connects to anything itself: whatever it is asked is done in a child that it
forks, so that no start of an interpreter is measured and no connection is shared.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..stamps import Stamps

GRACE = 8.0  # seconds that a worker has to end after SIGTERM


class Contestant:
    """
    A queue in a database. The methods run in a process of their own each.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self.url = url
        self.settings = settings

    def install(self) -> None:
        """Create the tables, and `bench_orders` (id, note) for business rows."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove every job, and what earlier ones have left behind."""
        raise NotImplementedError

    def push_each(self, count: int) -> float:
        """Push so many, each in a transaction with a business row; the seconds that it took, without the connecting."""
        raise NotImplementedError

    def push_bulk(self, count: int) -> float:
        """Push so many as fast as the interface allows; the seconds that it took, without the connecting."""
        raise NotImplementedError

    @contextlib.contextmanager
    def pusher(self) -> Iterator[Callable[[int], object]]:
        """A function that pushes and commits one job that stamps this number."""
        raise NotImplementedError

    def is_empty(self) -> bool:
        """No job is waiting or running."""
        raise NotImplementedError

    def work(self, stamp: Callable[[int], None]) -> None:
        """Run jobs until SIGTERM; each calls `stamp` with its number."""
        raise NotImplementedError

    def work_writing(self, stamp: Callable[[int], None]) -> None:
        """The same with jobs that write a business row, in one transaction with their settlement; four at once."""
        raise NotImplementedError

    def watch(self, flag: str, timeout: float) -> float:
        """
        The moment at which the last job was settled. Connects at once, and asks only when the file `flag` is there: a look
        a few milliseconds at a table full of dead rows would cost the workers time.
        """
        until = time.time() + timeout
        self.is_empty()
        while not (os.path.exists(flag) and self.is_empty()):
            if time.time() > until:
                raise TimeoutError("jobs are left")
            time.sleep(0.004)
        return time.time()

    def push_paced(self, count: int, first: int) -> list[tuple[int, float]]:
        """Push one job after the other with pauses in which an idle worker falls asleep; when each was committed."""
        pauses = random.Random(first)
        sent = []
        with self.pusher() as push:
            for number in range(first, first + count):
                push(number)
                sent.append((number, time.time()))
                time.sleep(pauses.uniform(0.035, 0.065))
        return sent


def seconds_of(body: Callable[[], object]) -> float:
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def serve(kind: type[Contestant]) -> None:
    """
    Answer a line of JSON with a line of JSON until there are no more.
    """
    url, settings = sys.argv[1], json.loads(sys.argv[2])
    contestant = kind(url, **settings)
    workers: list[int] = []
    for line in sys.stdin:
        asked = json.loads(line)
        method, arguments = asked["do"], asked["with"]
        if method == "start":
            workers += [_fork_worker(getattr(contestant, arguments[2]), Path(arguments[0])) for _ in range(arguments[1])]
            answer: dict[str, Any] = {"result": workers}
        elif method == "stop":
            _stop(workers)
            workers.clear()
            answer = {"result": None}
        else:
            answer = _in_child(partial(getattr(contestant, method), *arguments))
        print(json.dumps(answer), flush=True)
    _stop(workers)


def _in_child(body: Callable[[], Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = {"result": body()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process died"}


def _fork_worker(work: Callable[[Callable[[int], None]], None], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    log = os.open(folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(target, stream)
    with contextlib.suppress(BaseException):
        try:
            work(Stamps(folder))
        except BaseException:
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _stop(workers: list[int]) -> None:
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE
    for pid in workers:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.01)
