"""
Signals, sent to real processes.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Queue, Worker
from sqlqueue._dialects import now
from tests.acceptance.processes import ROOT, Process, Site, site_on
from tests.servers import Database
from tests.workers import eventually, failures, jobs

FIRST = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]


@pytest.fixture
def site(queue: Queue, database: Database, observer: Engine, tmp_path: Path) -> Iterator[Site]:
    with site_on(queue, database, observer, tmp_path) as site:
        yield site


def begin_a_long_job(site: Site, count: int = 1, concurrency: int = 2) -> tuple[Process, list[int]]:
    ids = site.push("wait", count, {"folder": str(site.folder)}, max_attempts=1)
    process = site.start(concurrency=concurrency)
    for id in ids[:concurrency]:
        eventually((site.folder / f"began-{id}").exists)
    return process, ids


@pytest.mark.parametrize("number", FIRST, ids=lambda number: number.name)
def test_a_signal_lets_the_running_job_finish(site: Site, number: signal.Signals) -> None:
    process, ids = begin_a_long_job(site, count=3)
    process.send(number)
    process.await_words(f"{number.name}: no more jobs are taken, 2 are running")
    (site.folder / "go").touch()
    assert process.wait() == 0
    assert f"stopped ({number.name})" in process.said
    assert "2 done" in process.said
    (left,) = jobs(site.observer, site.queue)
    assert (left["id"], left["attempts"], left["reserved_until"]) == (ids[2], 0, None)


def test_a_second_signal_hands_the_running_jobs_back(site: Site) -> None:
    process, _ = begin_a_long_job(site, count=2)
    process.send(signal.SIGTERM)
    process.await_words("no more jobs are taken, 2 are running")
    process.send(signal.SIGTERM)
    assert process.wait() == 1
    assert "second signal: handing back 2 running jobs" in process.said
    rows = jobs(site.observer, site.queue)
    assert [(row["attempts"], row["reserved_until"], row["last_error"]) for row in rows] == [(0, None, None)] * 2
    with site.observer.connect() as connection:
        moment = connection.execute(sa.select(now())).scalar_one()
    assert all(timedelta(0) < row["available_at"] - moment <= timedelta(seconds=5) for row in rows)
    assert failures(site.observer, site.queue) == []


def test_an_idle_worker_stops_at_once(site: Site) -> None:
    process = site.start()
    process.await_words("worker ")
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert "stopped (SIGTERM)" in process.said


def test_a_worker_that_still_waits_for_its_database_stops_at_once(tmp_path: Path) -> None:
    process = Process(f"sqlite:///{tmp_path}/not/there/queue.db", tmp_path / "log", {"wait_for_database": 3600})
    process.await_words("cannot be reached yet")
    process.send(signal.SIGTERM)
    assert process.wait() == 0


def test_a_signal_ends_a_slow_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(3600)\n")
    program = "from sqlqueue import Queue, Worker\nimport sys\nsys.exit(Worker(Queue('sqlite:///q.db', imports=['slow'])).run())"
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": ""}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    eventually((tmp_path / "importing").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


def test_four_workers_that_are_stopped_together_leave_nothing_leased(site: Site) -> None:
    ids = site.push("effect", 3000)
    processes = [site.start(concurrency=5) for _ in range(4)]
    for process in processes:
        process.await_words("5 at once")
    eventually(lambda: site.count_effects() > 100)
    for process in processes:
        process.send(signal.SIGTERM)
    assert [process.wait() for process in processes] == [0] * 4
    rows = jobs(site.observer, site.queue)
    assert [row["id"] for row in rows if row["reserved_until"] is not None or row["attempts"]] == []
    done = site.effects()
    assert {id for id, _ in done} == set(ids) - {row["id"] for row in rows}
    assert {attempt for _, attempt in done} == {1}
    assert len(done) == len({id for id, _ in done})
    assert failures(site.observer, site.queue) == []


def test_the_signal_handlers_of_the_program_come_back(queue: Queue) -> None:
    before = [signal.getsignal(number) for number in FIRST]
    Worker(queue, stop_when_empty=True).run()
    assert [signal.getsignal(number) for number in FIRST] == before


def test_systems_with_fewer_signals(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGQUIT")
    assert Worker(queue, stop_when_empty=True).run() == 0
