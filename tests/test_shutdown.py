"""
Ends that do not wait for running jobs as long as those like.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from sqlqueue import JobContext, OptionError, Queue, Worker
from tests.acceptance.processes import ROOT, Site, site_on
from tests.servers import Database
from tests.workers import PATIENCE, Gate, eventually, failures, jobs, make_due, push


@pytest.fixture
def site(queue: Queue, database: Database, observer: Engine, tmp_path: Path) -> Iterator[Site]:
    with site_on(queue, database, observer, tmp_path) as site:
        yield site


def test_jobs_that_take_longer_than_the_shutdown_may_are_handed_back(site: Site) -> None:
    site.push("wait", 3, {"folder": str(site.folder)}, max_attempts=1)
    process = site.start(concurrency=2, shutdown_timeout=0.3)
    eventually(lambda: len(list(site.folder.glob("began-*"))) == 2)
    process.send(signal.SIGTERM)
    assert process.wait() == 1
    assert "0.3 s to shut down are over: handing back 2 running jobs, due again in 5 s" in process.said
    rows = jobs(site.observer, site.queue)
    assert [(row["attempts"], row["reserved_until"], row["last_error"]) for row in rows] == [(0, None, None)] * 3
    assert failures(site.observer, site.queue) == []


def test_a_job_that_ends_in_time_is_settled(site: Site) -> None:
    site.push("wait", 1, {"folder": str(site.folder)})
    process = site.start(shutdown_timeout=60)
    eventually(lambda: list(site.folder.glob("began-*")))
    process.send(signal.SIGTERM)
    process.await_words("no more jobs are taken, 1 are running")
    (site.folder / "go").touch()
    assert process.wait() == 0
    assert jobs(site.observer, site.queue) == []


def test_five_deploys_in_a_row_neither_fail_nor_lose_a_long_job(site: Site) -> None:
    (id,) = site.push("wait", 1, {"folder": str(site.folder)}, max_attempts=2)
    began = site.folder / f"began-{id}"
    for bounded in (True, False, True, False, True):
        process = site.start(**({"shutdown_timeout": 0.1} if bounded else {}))
        eventually(began.exists)
        began.unlink()
        process.send(signal.SIGTERM)
        if not bounded:
            process.await_words("no more jobs are taken")
            process.send(signal.SIGTERM)
        assert process.wait() == 1
        (row,) = jobs(site.observer, site.queue)
        assert (row["id"], row["attempts"], row["reserved_until"]) == (id, 0, None)
        make_due(site.observer, site.queue)
    (site.folder / "go").touch()
    assert site.start(stop_when_empty=True).wait() == 0
    assert jobs(site.observer, site.queue) == failures(site.observer, site.queue) == []


def test_the_program_takes_the_time_as_an_option(site: Site, database: Database) -> None:
    site.push("wait", 1, {"folder": str(site.folder)})
    arguments = [sys.executable, "-m", "sqlqueue", "work", "--app", "tests.acceptance.app:queue", "--shutdown-timeout", "0"]
    process = subprocess.Popen(arguments, cwd=ROOT, env=os.environ | {"APP_URL": database.url}, stderr=subprocess.PIPE, text=True)
    eventually(lambda: list(site.folder.glob("began-*")))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "0 s to shut down are over: handing back 1 running jobs" in said


def test_a_worker_in_a_thread_gives_up_its_running_jobs_too(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    lost: list[bool] = []

    @queue.job(name="long")
    def long(context: JobContext) -> None:
        gate.pass_through()
        lost.append(context.lost)

    push(queue, "long")
    worker = Worker(queue, shutdown_timeout=0.1)
    worker.start()
    gate.await_arrivals()
    worker.stop(PATIENCE)
    (row,) = jobs(observer, queue)
    assert (row["attempts"], row["reserved_until"]) == (0, None)
    gate.open()
    eventually(lambda: lost)
    assert lost == [True]


def test_a_limit_leaves_running_jobs_their_time(queue: Queue, observer: Engine) -> None:
    @queue.job(name="long")
    def long() -> None:
        time.sleep(0.3)

    push(queue, "long", 2)
    worker = Worker(queue, concurrency=1, max_jobs=1, shutdown_timeout=0.1)
    assert worker.run() == 0
    assert len(jobs(observer, queue)) == 1


@pytest.mark.parametrize("wrong", [-1, float("nan"), True, "1"])
def test_a_time_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(OptionError, match=r"^shutdown_timeout"):
        Worker(Queue(), shutdown_timeout=wrong)  # type: ignore[arg-type]
