"""
`sqlqueue work` as a real process, under real signals.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from sqlqueue import Queue
from tests.servers import Database

ROOT = Path(__file__).parent.parent

SHOP = """
    import time
    from pathlib import Path

    from sqlqueue import Queue

    queue = Queue()
    here = Path(__file__).parent

    @queue.job(name="note")
    def note(text: str) -> None:
        with open(here / "notes", "a") as file:
            file.write(text + chr(10))

    @queue.job(name="bad", max_attempts=1)
    def bad(secret: str) -> None:
        raise ValueError("escape" + chr(27) + chr(10) + "second line")

    @queue.job(name="slow")
    def slow(seconds: float) -> None:
        (here / "started").touch()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
        (here / "finished").touch()

    @queue.job(name="heavy", queue="heavy")
    def heavy() -> None: ...
"""

IMPORT_TIME = """
    import time
    from pathlib import Path

    try:
        Path("importing").touch()
        time.sleep(60)
    except BaseException:
        time.sleep(60)
"""

LOGGED = """
    import logging.config

    from shop import queue

    formatters = {"mine": {"format": "mine %(levelname)s %(message)s"}}
    handlers = {"mine": {"class": "logging.StreamHandler", "formatter": "mine"}}
    loggers = {OWN}
    logging.config.dictConfig(
        {"version": 1, "formatters": formatters, "handlers": handlers, "loggers": loggers, "root": {"handlers": ["mine"]}}
    )
"""
OWN_LOGGER = '"sqlqueue": {"handlers": ["mine"], "level": "INFO", "propagate": False}'


class Process:
    """The program, in a directory of its own."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*program(), *arguments], cwd=directory, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 20) -> tuple[int, list[str]]:
        """Exit code and lines on stderr. On stdout a worker prints nothing."""
        stdout, stderr = self.process.communicate(timeout=timeout)
        assert stdout == ""
        return self.process.returncode, stderr.splitlines()


def program() -> list[str]:
    script = Path(sysconfig.get_path("scripts")) / "sqlqueue"
    return [str(script)] if script.exists() else [sys.executable, "-P", "-c", "from sqlqueue.__main__ import main; main()"]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SQLQUEUE_")}
    return kept | {"PYTHONPATH": str(ROOT)}


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start the program in the test's directory, where the shop is."""
    (tmp_path / "shop.py").write_text(textwrap.dedent(SHOP))
    processes: list[Process] = []

    def start(*arguments: str) -> Process:
        processes.append(Process(tmp_path, *arguments))
        return processes[-1]

    yield start
    for started in processes:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()


def push(queue: Queue, engine: Engine, *names: str, **payload: object) -> None:
    with engine.begin() as connection:
        for name in names:
            queue.push_named(connection, name, payload, max_attempts=1 if name == "bad" else 5)


def test_a_worker_drains_its_queue_and_stops(
    start: Callable[..., Process], database: Database, engine: Engine, queue: Queue, tmp_path: Path
) -> None:
    push(queue, engine, *["note"] * 20, text="hello")
    push(queue, engine, "bad", secret="s3cret-value")
    code, lines = start("work", "--app", "shop:queue", "--url", database.url, "--stop-when-empty", "--verbose").wait()
    assert code == 0
    assert (tmp_path / "notes").read_text() == "hello\n" * 20
    assert queue.stats() == []
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d sqlqueue [\d.]+: \w+ [\d.]+, queue default, 10 at once, worker [^ ;]+; not watched .*: heavy", lines[0]
    )
    assert sum(" done " in line for line in lines[:-1]) == 20
    (failure,) = [line for line in lines if " failed " in line and " bad" in line]
    assert r"ValueError: escape\x1b" in failure
    assert re.search(r" stopped \(empty\) after [\d.]+ s: 20 done, 1 failed$", lines[-1])
    assert "s3cret" not in "".join(lines)


def test_a_running_job_finishes_after_the_first_signal(
    start: Callable[..., Process], database: Database, engine: Engine, queue: Queue, tmp_path: Path
) -> None:
    push(queue, engine, "slow", seconds=0.5)
    worker = start("work", "--app", "shop:queue", "--url", database.url)
    wait_for((tmp_path / "started").exists)
    worker.send(signal.SIGTERM)
    code, lines = worker.wait()
    assert code == 0
    assert (tmp_path / "finished").exists()
    assert queue.stats() == []
    assert "stopped (SIGTERM)" in lines[-1]


def test_a_second_signal_hands_the_running_job_back(
    start: Callable[..., Process], database: Database, engine: Engine, queue: Queue, tmp_path: Path
) -> None:
    push(queue, engine, "slow", seconds=60)
    worker = start("work", "--app", "shop:queue", "--url", database.url)
    wait_for((tmp_path / "started").exists)
    worker.send(signal.SIGTERM)
    time.sleep(0.3)
    worker.send(signal.SIGTERM)
    began = time.monotonic()
    code, _ = worker.wait()
    assert code == 1
    assert time.monotonic() - began < 4
    assert not (tmp_path / "finished").exists()
    (row,) = queue.stats()
    assert (row.delayed, row.reserved, row.total) == (1, 0, 1)
    jobs = queue.tables.jobs
    with engine.connect() as connection:
        assert connection.execute(select(jobs.c.attempts)).scalar_one() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_slow_import_ends_the_process_at_once(
    start: Callable[..., Process], tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "slow_app.py").write_text(textwrap.dedent(IMPORT_TIME))
    worker = start("work", "--app", "slow_app:queue")
    wait_for((tmp_path / "importing").exists)
    worker.send(number)
    began = time.monotonic()
    code, lines = worker.wait()
    assert time.monotonic() - began < 2
    assert (code, lines) == (0, [f"stopped ({number.name}) before it began"])


CAN_BE_FIRST = shutil.which("unshare") is not None and os.name == "posix" and os.geteuid() == 0


@pytest.mark.skipif(not CAN_BE_FIRST, reason="needs root and unshare, to be the first process of a container")
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.6])
def test_the_first_process_of_a_container_hears_a_signal_while_it_still_loads(tmp_path: Path, delay: float) -> None:
    (tmp_path / "slow_app.py").write_text(textwrap.dedent(IMPORT_TIME))
    arguments = ["unshare", "--pid", "--fork", "--kill-child", *program(), "work", "--app", "slow_app:queue"]
    outer = subprocess.Popen(arguments, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    wait_for(lambda: children.read_text() != "")
    first = int(children.read_text())
    # Before Python itself runs our first line nothing can be done: wait until it has set its handler.
    wait_for(lambda: _handles(first, signal.SIGTERM))
    time.sleep(delay)
    os.kill(first, signal.SIGTERM)
    try:
        assert outer.wait(timeout=3) == 0
    finally:
        outer.kill()
        outer.wait()


def _handles(process: int, number: int) -> bool:
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{process}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.databases("sqlite")
def test_a_job_that_never_ends_does_not_outlive_a_second_signal(
    start: Callable[..., Process], database: Database, engine: Engine, queue: Queue, tmp_path: Path
) -> None:
    # A pool's threads keep a process from ending, and this one waits for ever.
    (tmp_path / "stuck.py").write_text(
        textwrap.dedent("""
            import threading
            from concurrent.futures import ThreadPoolExecutor
            from pathlib import Path

            from shop import queue

            @queue.job(name="stuck")
            def stuck() -> None:
                with ThreadPoolExecutor() as pool:
                    pool.submit(lambda: (Path("started").touch(), threading.Event().wait())).result()
        """)
    )
    push(queue, engine, "stuck")
    worker = start("work", "--app", "shop:queue", "--url", database.url, "--import", "stuck")
    wait_for((tmp_path / "started").exists)
    worker.send(signal.SIGINT)
    time.sleep(0.3)
    worker.send(signal.SIGINT)
    assert worker.wait()[0] == 1


@pytest.mark.databases("sqlite")
def test_an_application_that_sets_up_logging_keeps_its_own(
    start: Callable[..., Process], database: Database, engine: Engine, queue: Queue, tmp_path: Path
) -> None:
    push(queue, engine, "note", text="hello")
    for own, expected in (("", r"\d\d:\d\d:\d\d done "), (OWN_LOGGER, "mine INFO done ")):
        (tmp_path / "logged.py").write_text(textwrap.dedent(LOGGED).replace("OWN", own))
        push(queue, engine, "note", text="hello")
        code, lines = start("work", "--app", "logged:queue", "--url", database.url, "--stop-when-empty", "-v").wait()
        assert code == 0
        jobs = [line for line in lines if " note" in line]
        assert jobs
        assert all(re.match(expected, line) for line in jobs)
