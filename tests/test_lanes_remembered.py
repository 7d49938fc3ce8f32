"""
What the look for ready jobs remembers between two claims.
"""

from __future__ import annotations

from sqlqueue import Queue


def test_who_claims_from_another_queue_each_time_does_not_fill_the_memory(queue: Queue) -> None:
    for number in range(300):
        assert queue.claim(f"tenant-{number}") == []
    assert len(queue.consumer._looks) <= 256
