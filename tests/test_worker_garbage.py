"""
The garbage collector leaves alone what was there before a worker began, and is left as it was found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlqueue import Queue, UnusableDatabase, Worker
from tests.workers import push, work_off, working


@pytest.fixture
def frozen(queue: Queue) -> Iterator[list[int]]:
    """How many objects the collector leaves alone while a job runs."""
    seen: list[int] = []
    queue.job(name="look")(lambda: seen.append(gc.get_freeze_count()))
    push(queue, "look")
    assert gc.get_freeze_count() == 0
    yield seen
    gc.unfreeze()


def test_a_worker_in_the_main_thread_freezes_what_was_there_and_thaws_it(queue: Queue, frozen: list[int]) -> None:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    work_off(queue)
    assert frozen[0] > 1000
    assert (gc.get_freeze_count(), gc.isenabled(), gc.get_threshold()) == (0, enabled, thresholds)


def test_what_an_application_has_frozen_stays_frozen(queue: Queue, frozen: list[int]) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    work_off(queue)
    assert frozen[0] <= before, "nothing is added to it"
    assert gc.get_freeze_count() > before / 2


def test_a_worker_beside_a_program_freezes_nothing(queue: Queue, frozen: list[int]) -> None:
    with working(queue, stop_when_empty=True) as worker:
        worker.stop()
    work_in_thread = frozen or [0]
    assert work_in_thread == [0]
    assert gc.get_freeze_count() == 0


def test_a_worker_that_fails_thaws_too(tmp_path: Path) -> None:
    with pytest.raises(UnusableDatabase):
        Worker(Queue(f"sqlite:///{tmp_path}/without-tables.db"), wait_for_database=0).run()
    assert gc.get_freeze_count() == 0
