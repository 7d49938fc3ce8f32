"""
Reports: how many jobs there are of which kind, and emptying queues.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from sqlqueue import Queue
from sqlqueue._dialects import server_of
from sqlqueue.errors import OptionError
from tests.rows import PATIENCE, change, expire, jobs_in, keys_in, moment_of, put, put_each, put_key, statements_of


def test_jobs_are_counted_by_what_they_wait_for(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 2, due_in=-30)
    put(observer, queue, 3, due_in=600)
    put(observer, queue, 4, lease_in=600)
    put(observer, queue, 5, lease_in=-60)
    put(observer, queue, queue="other", due_in=60)
    default, other = queue.stats()
    assert (default.queue, default.pending, default.delayed, default.reserved, default.total) == ("default", 7, 3, 4, 14)
    assert default.oldest_due is not None
    assert timedelta(seconds=60) <= moment_of(observer) - default.oldest_due < timedelta(seconds=90)
    assert (other.queue, other.pending, other.delayed, other.reserved, other.total, other.oldest_due) == ("other", 0, 1, 0, 1, None)
    assert (queue.pending(), queue.pending("default"), queue.pending("other"), queue.pending("none")) == (7, 7, 0, 0)
    assert (queue.size("default"), queue.size("other"), queue.size("none")) == (10, 1, 0)


def test_limited_counts_are_the_same_as_long_as_they_are_below_the_limit(queue: Queue, observer: Engine) -> None:
    for priority in (-5, 0, 7):
        put(observer, queue, 2, due_in=-30, priority=priority)
        put(observer, queue, 3, due_in=600, priority=priority)
        put(observer, queue, 1, lease_in=600, priority=priority)
        put(observer, queue, 2, lease_in=-60, priority=priority, queue="other")
    put(observer, queue, due_in=60, queue="third")
    assert queue.stats(limit=100) == queue.stats()


def test_no_figure_is_counted_beyond_the_limit(queue: Queue, observer: Engine) -> None:
    for priority in (0, 1):
        put(observer, queue, 20, due_in=-30, priority=priority)
        put(observer, queue, 20, due_in=600, priority=priority)
        put(observer, queue, 20, lease_in=600, priority=priority)
    (limited,) = queue.stats(limit=30)
    (exact,) = queue.stats()
    assert (limited.pending, limited.total, limited.oldest_due) == (30, 30, exact.oldest_due)
    assert max(limited.delayed, limited.reserved) <= 30
    for wrong in (0, -1, True, 1.5, "1"):
        with pytest.raises(OptionError, match=r"^limit"):
            queue.stats(limit=wrong)  # type: ignore[arg-type]


def test_limited_counts_read_no_more_of_a_long_backlog(queue: Queue, observer: Engine) -> None:
    with statements_of(queue.consumer.engine) as few:
        put(observer, queue, 5)
        queue.stats(limit=10)
    put(observer, queue, 5000, due_in=600)
    with statements_of(queue.consumer.engine) as many:
        queue.stats(limit=10)
    assert len(few) == len(many)
    assert all("LIMIT" in statement.upper() for statement, _ in many)


def test_what_is_pending_is_what_a_claim_gets(queue: Queue, observer: Engine) -> None:
    put_each(observer, queue, [{"due_in": -5}, {"due_in": 5}, {"lease_in": -5}, {"lease_in": 5}, {"payload": "[]"}])
    assert queue.pending() == 3
    assert len(queue.claim(limit=9)) == 2
    assert queue.pending() == 0
    assert queue.stats()[0].reserved == 3


def test_a_released_job_is_not_held(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 2)
    one, other = queue.claim(limit=2)
    queue.release(one)
    queue.release(other, delay=60)
    (stats,) = queue.stats()
    assert (stats.pending, stats.delayed, stats.reserved) == (1, 1, 0)


def test_a_lease_in_its_grace_is_still_held(queue: Queue, observer: Engine, engine: Engine) -> None:
    """Where live workers may have to wait to renew, nobody may take the job for a while, and no report says otherwise."""
    (id,) = put(observer, queue)
    queue.claim(lease=60)
    row = jobs_in(observer, queue)[id]
    grace = server_of(engine.dialect).lease_grace
    assert abs((row["available_at"] - row["reserved_until"]) - timedelta(seconds=60 * grace)) < timedelta(seconds=1)
    change(observer, queue, [id], reserved_until=moment_of(observer) - timedelta(seconds=1))
    (stats,) = queue.stats()
    assert (stats.pending, stats.reserved) == (0, 1)
    assert queue.claim() == []


def test_an_empty_queue_is_not_listed(queue: Queue) -> None:
    assert queue.stats() == []
    assert queue.pending() == 0


def test_clearing_deletes_what_waits_and_never_what_is_held(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 3)
    put(observer, queue, 2, due_in=600)
    running = put(observer, queue, 2, lease_in=600)
    ended = put(observer, queue, 2, lease_in=-60)
    other = put(observer, queue, queue="other")
    assert queue.clear("default") == 5
    assert sorted(jobs_in(observer, queue)) == running + ended + other
    assert queue.clear("default") == 0
    assert queue.clear("none") == 0


def test_clearing_frees_the_keys_of_what_it_deletes(queue: Queue, observer: Engine) -> None:
    (waiting,) = put(observer, queue)
    (held,) = put(observer, queue, lease_in=600)
    put_key(observer, queue, waiting, "unique:job/a")
    put_key(observer, queue, held, "unique:job/b")
    assert queue.clear("default") == 1
    assert keys_in(observer, queue) == {"unique:job/b": held}


def test_a_long_queue_is_cleared_in_parts(queue: Queue, observer: Engine) -> None:
    ids = put(observer, queue, 1300)
    put(observer, queue, 1300, queue="other")
    kept = ids[::100]
    change(observer, queue, kept, reserved_until=moment_of(observer) + timedelta(hours=1))
    assert queue.clear("default") == 1300 - len(kept)
    assert queue.size("other") == 1300


def test_a_retried_job_is_cleared_like_any_other(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    queue.release(queue.claim()[0], error="no")
    assert queue.clear("default") == 1


def test_waiting_for_an_empty_queue_ends_when_it_is_empty(queue: Queue, observer: Engine) -> None:
    put(observer, queue)
    put(observer, queue, queue="other")
    assert not queue.wait_empty(0)
    (delivery,) = queue.claim()
    assert not queue.wait_empty(0, queue="default")
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(queue.wait_empty(PATIENCE, queue="default")))
    waiting.start()
    queue.complete(delivery)
    waiting.join(PATIENCE)
    assert answers == [True]
    assert not queue.wait_empty(0)
    expire(observer, queue)


@pytest.mark.parametrize("name", ["", "two words", "x" * 81, "a;b"])
def test_reports_take_names_of_queues(name: str) -> None:
    queue = Queue("sqlite:///nowhere/queue.db")
    for call in (queue.size, queue.clear, queue.pending, queue.failed.count):
        with pytest.raises(OptionError, match="queue"):
            call(name)
