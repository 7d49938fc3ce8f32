"""
Transactional handlers in processes that are killed or stopped: each job takes effect once.
"""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest

from sqlqueue._dialects import server_of
from tests.acceptance.processes import Site
from tests.rows import moment_of
from tests.workers import eventually, failures, jobs

LEASE = 1


@pytest.mark.parametrize(("when", "attempt"), [("before_commit", 2), ("after_commit", 1)])
def test_a_process_that_is_killed_beside_its_commit(site: Site, when: str, attempt: int) -> None:
    """What counts is whether the database has committed: then the job is gone, or else it runs again."""
    (id,) = site.push("write_and_die", 1, {"when": when})
    victim = site.start(concurrency=2, lease=LEASE)
    assert victim.wait() == -signal.SIGKILL
    assert site.effects() == ([(id, 1)] if attempt == 1 else [])
    assert len(jobs(site.observer, site.queue)) == attempt - 1
    heir = site.start(concurrency=2, lease=LEASE)
    heir.await_words("2 at once")
    assert site.queue.wait_empty(30)
    heir.send(signal.SIGTERM)
    assert heir.wait() == 0
    assert site.effects() == [(id, attempt)]
    assert jobs(site.observer, site.queue) == failures(site.observer, site.queue) == []


def test_processes_that_sleep_past_their_leases_write_each_job_once(site: Site) -> None:
    site.use_write_ahead_log()
    ids = site.push("write", 600 if server_of(site.queue.consumer.engine.dialect).row_locks else 150)
    processes = [site.start(concurrency=4, lease=LEASE) for _ in range(2)]
    for process in processes:
        process.await_words("4 at once")
    eventually(site.count_effects)
    for process in (*processes, processes[0]):
        process.send(signal.SIGSTOP)
        until = moment_of(site.observer) + timedelta(seconds=1.5 * LEASE)
        eventually(lambda until=until: moment_of(site.observer) > until)  # type: ignore[misc]
        process.send(signal.SIGCONT)
    assert site.queue.wait_empty(60)
    for process in processes:
        process.send(signal.SIGTERM)
    assert [process.wait() for process in processes] == [0, 0]
    assert [id for id, _ in site.effects()] == ids
    assert jobs(site.observer, site.queue) == failures(site.observer, site.queue) == []
