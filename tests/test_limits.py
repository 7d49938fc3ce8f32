"""
`limit` and `limit_key`: how many deliveries run at once.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import pytest
from sqlalchemy import Engine

from sqlqueue import JobContext, Key, Queue
from sqlqueue.middleware import RateLimited
from tests.rows import statements_of
from tests.test_middleware_builtin import Running, keys_in, register, wait_until_empty
from tests.workers import Gate, eventually, failures, jobs, push, work_off, working


def test_no_more_than_so_many_run_at_once_whatever_worker_they_are_in(queue: Queue, observer: Engine) -> None:
    running = Running()
    register(queue, running, limit=3)
    push(queue, "job", 40)
    with working(queue, concurrency=6), working(queue, concurrency=6):
        wait_until_empty(observer, queue)
    assert running.most <= 3
    assert running.attempts == [1] * 40
    assert set(keys_in(observer, queue)) <= {"limit:job//line"}, "nothing is left but where the last one stood in line"


def test_all_places_are_used(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    register(queue, lambda context: gate.pass_through(), limit=3)
    push(queue, "job", 5)
    with working(queue, concurrency=5):
        gate.await_arrivals(3)
        eventually(lambda: len([row for row in jobs(observer, queue) if row["reserved_until"] is None]) == 2, "two are released")
        assert {key.split("/")[2] for key in keys_in(observer, queue)} == {"0", "1", "2", "line", "wait"}
        gate.open()
        gate.await_arrivals(2)


def test_each_key_has_its_places(queue: Queue, observer: Engine) -> None:
    running: dict[str, Running] = defaultdict(lambda: Running(0.05))
    everything = Running(0.05)

    @queue.job(name="job", limit=2, limit_key=lambda context: context.arguments["tenant"])
    def job(context: JobContext, tenant: str) -> None:
        everything(context)
        running[tenant](context)

    with queue.begin() as session:
        for number in range(12):
            job.push(session, f"tenant {number % 3}")
    with working(queue, concurrency=12):
        wait_until_empty(observer, queue)
    assert [one.most <= 2 for one in running.values()] == [True] * 3
    assert everything.most > 2


def test_a_key_is_one_jobs_own_unless_it_is_shared(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    for name in ("one", "two"):
        register(queue, lambda context: gate.pass_through(), f"own-{name}", limit=1, limit_key="a")
        register(queue, lambda context: gate.pass_through(), f"shared-{name}", limit=1, limit_key=Key("a"))
        push(queue, f"own-{name}")
        push(queue, f"shared-{name}")
    with working(queue, concurrency=4):
        gate.await_arrivals(3)
        eventually(lambda: any("/wait/" in key for key in keys_in(observer, queue)), "the fourth is blocked")
        assert {key for key in keys_in(observer, queue) if key.endswith("/0")} == {"limit:own-one/a/0", "limit:own-two/a/0", "limit:/a/0"}
        gate.open()
        gate.await_arrivals(1)


def test_a_route_sets_the_limit(queue: Queue, observer: Engine) -> None:
    running = Running()
    register(queue, running, limit=3)
    queue.route("job", limit=1)
    push(queue, "job", 8)
    with working(queue, concurrency=8):
        wait_until_empty(observer, queue)
    assert running.most == 1


def test_a_job_that_is_blocked_uses_no_permit(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    register(queue, lambda context: gate.pass_through(), limit=1, middleware=[RateLimited(10, per=3600, key="a", burst=10)])
    push(queue, "job", 5)
    with working(queue, concurrency=5):
        gate.await_arrivals()
        eventually(lambda: "limit:job//line" in keys_in(observer, queue), "somebody is blocked")
        row = keys_in(observer, queue)["rate:/a"]
        gate.open()
        wait_until_empty(observer, queue)
    assert (keys_in(observer, queue)["rate:/a"].expires_at - row.expires_at).total_seconds() == pytest.approx(4 * 360, abs=2)


def test_a_function_for_the_key_that_raises_is_the_jobs_failure(queue: Queue, observer: Engine) -> None:
    register(queue, lambda context: None, limit=1, limit_key=lambda context: context.arguments["no such"], max_attempts=1)
    push(queue, "job")
    assert work_off(queue).counts == {"failed": 1}
    assert failures(observer, queue)[0]["error_class"] == "KeyError"


def test_fifty_blocked_jobs_at_the_head_starve_nobody(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    tries: Counter[int] = Counter()
    finished: list[float] = []

    def key(context: JobContext) -> str:
        tries[context.id] += 1
        return "a"

    register(queue, lambda context: gate.pass_through(), "blocked", limit=1, limit_key=key)
    register(queue, lambda context: finished.append(time.monotonic()), "other")
    ids = push(queue, "blocked", 51, priority=100)
    push(queue, "other", 200)
    began = time.monotonic()
    with working(queue, concurrency=4):
        gate.await_arrivals()
        eventually(lambda: len(finished) == 200, "the others are done")
        took = finished[-1] - began
        time.sleep(1.0)  # what the blocked ones do meanwhile
        rate = sum(tries.values())
        time.sleep(1.0)
        rate = sum(tries.values()) - rate
        opened = time.monotonic()
        gate.open()
        wait_until_empty(observer, queue)
        last = time.monotonic() - opened
    print(f"200 others in {took:.2f} s; then {rate} tries a second of 50 blocked jobs; the 50 in {last:.2f} s")
    assert took < 6
    assert rate < 50, "each of them would ask again every second"
    assert last < 6
    assert sorted(tries) == ids


def test_jobs_that_wait_for_short_ones_lose_little_time(queue: Queue, observer: Engine) -> None:
    running = Running(0.005)
    register(queue, running, limit=3)
    push(queue, "job", 150)
    began = time.monotonic()
    with working(queue, concurrency=10):
        wait_until_empty(observer, queue)
    print(f"150 jobs, 3 at once: {time.monotonic() - began:.2f} s")
    assert running.most <= 3


def test_a_job_without_middleware_and_limit_asks_nothing_of_the_table_of_keys(queue: Queue) -> None:
    register(queue, lambda context: None)
    push(queue, "job", 3)
    with statements_of(queue.consumer.engine) as statements:
        assert queue.drain().counts == {"done": 3}
    assert statements
    assert not [statement for statement, _ in statements if queue.tables.keys.name in statement]
