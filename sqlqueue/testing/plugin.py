"""
Fixtures for pytest, found by itself where sqlqueue is installed.

Say once which queue the tests are about, in `conftest.py`:

    @pytest.fixture
    def sqlqueue_queue():
        return shop.queue
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .._queue import Queue
    from . import Clock, InlineRuns, Pushes

__all__ = ["pushed", "ran_inline", "sqlqueue_clock", "sqlqueue_queue"]


@pytest.fixture
def sqlqueue_queue() -> Queue:
    """The queue that the other fixtures of sqlqueue are about. Override it in conftest.py."""
    raise pytest.UsageError("override the fixture sqlqueue_queue in your conftest.py, and let it return your Queue")


@pytest.fixture
def pushed(sqlqueue_queue: Queue) -> Iterator[Pushes]:
    """Nothing that the test pushes is written; here is what it was."""
    with sqlqueue_queue.fake() as pushes:
        yield pushes


@pytest.fixture
def ran_inline(sqlqueue_queue: Queue) -> Iterator[InlineRuns]:
    """Jobs run at the commit of their push; here is how they ended. What they raised fails the test at its end."""
    with sqlqueue_queue.inline() as runs:
        yield runs


@pytest.fixture
def sqlqueue_clock(sqlqueue_queue: Queue) -> Clock:
    """Lets time go by for the jobs in the queue's database: `sqlqueue_clock.advance(hours=1)`."""
    from . import Clock

    return Clock(sqlqueue_queue)
