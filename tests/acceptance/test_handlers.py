"""
Handlers that misbehave in a process of their own.
"""

from __future__ import annotations

import os
import signal

from tests.acceptance.processes import Site
from tests.workers import eventually, failures, jobs


def test_the_settlement_of_a_handler_that_kept_the_gil_longer_than_the_lease_is_refused(site: Site) -> None:
    """Nothing else ran in that process, so nothing was renewed: what it held is somebody else's now, its neighbour too."""
    folder = {"folder": str(site.folder)}
    os.mkfifo(site.folder / "pipe")
    (neighbour,) = site.push("wait", 1, folder, max_attempts=2)
    process = site.start(concurrency=2, lease=1)
    eventually((site.folder / f"began-{neighbour}").exists)
    (frozen,) = site.push("freeze", 1, folder)
    eventually((site.folder / f"began-{frozen}").exists)
    deliveries = [eventually(lambda: site.queue.claim(lease=60))[0] for _ in range(2)]
    assert {delivery.id for delivery in deliveries} == {frozen, neighbour}
    assert all(delivery.reclaimed_from and delivery.reclaimed_from in process.said for delivery in deliveries)
    before = jobs(site.observer, site.queue)
    (site.folder / "pipe").write_bytes(b"!")
    eventually((site.folder / f"lost-{frozen}").exists)
    (site.folder / "go").touch()
    for id in (frozen, neighbour):
        process.await_words(f"the outcome of job {id} ")
    assert process.said.count("came too late") == 2
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert "2 lost" in process.said
    assert jobs(site.observer, site.queue) == before
    for delivery in deliveries:
        site.queue.complete(delivery)
    assert failures(site.observer, site.queue) == []


def test_a_handler_that_stops_listening_to_signals_does_not_make_its_worker_deaf(site: Site) -> None:
    site.push("deaf", 4)
    process = site.start(concurrency=2)
    assert site.queue.wait_empty(20)
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert "4 done" in process.said


def test_a_handler_may_send_its_own_process_a_signal(site: Site) -> None:
    site.push("stop")
    process = site.start(concurrency=2)
    assert process.wait() == 0
    assert "stopped (SIGTERM)" in process.said
    assert "1 done" in process.said
    assert jobs(site.observer, site.queue) == []
