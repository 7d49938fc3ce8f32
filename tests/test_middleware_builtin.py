"""
Middleware over a database: around transactions, and those that are built in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlqueue import Delivery, Fail, Fixed, JobContext, Key, Queue, Release
from sqlqueue._driver.permits import Permit, Rate, closed_for, note_exception, take_permits
from sqlqueue._driver.slots import Blocked, Holder, Lost, Taken, free_slot, stand_in_line, take_slot
from sqlqueue._queue.keys import KeyStore
from sqlqueue.middleware import (
    CallNext,
    FailOn,
    Middleware,
    RateLimited,
    ThrottlesExceptions,
    WithoutOverlapping,
    breakers,
    overlaps,
    rates,
)
from tests.rows import can_lock_rows, conflicts, expire, holding, in_threads, lock_of, moment_of, put
from tests.workers import PATIENCE, Gate, failures, jobs, make_due, push, work_off, working


def keys_in(observer: Engine, queue: Queue) -> dict[str, Any]:
    with observer.connect() as connection:
        return {row.key: row for row in connection.execute(sa.select(queue.tables.keys))}


def let_pass(observer: Engine, queue: Queue, seconds: float) -> None:
    """Let so many seconds pass for the keys."""
    from sqlqueue._dialects import before

    table = queue.tables.keys
    with observer.connect() as connection:
        connection.execute(sa.update(table).values(expires_at=before(table.c.expires_at, round(seconds * 1_000_000))))


def store_of(queue: Queue) -> KeyStore:
    assert queue.store is not None
    return queue.store


# --- around a transactional handler --------------------------------------------------------------------------------------


def register_writer(queue: Queue, outcome: Any, middleware: list[Middleware]) -> None:
    @queue.job(name="writes", middleware=middleware)
    def writes(session: Session) -> Any:
        session.execute(sa.insert(queue.tables.controls).values(name="written", created_at=sa.func.current_timestamp()))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    push(queue, "writes")


def written(observer: Engine, queue: Queue) -> int:
    with observer.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(queue.tables.controls)) or 0


def test_middleware_is_outside_of_the_handlers_transaction(queue: Queue, observer: Engine) -> None:
    seen: list[Any] = []

    def middleware(context: JobContext, call_next: CallNext) -> Any:
        result = call_next()
        seen.append((result, len(jobs(observer, queue)), written(observer, queue)))
        return result

    register_writer(queue, 42, [middleware])
    assert work_off(queue).counts == {"done": 1}
    assert seen == [(42, 0, 1)]


def test_what_happens_after_the_commit_changes_nothing(queue: Queue, observer: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def middleware(context: JobContext, call_next: CallNext) -> Any:
        call_next()
        raise LookupError("too late")

    register_writer(queue, None, [middleware])
    assert work_off(queue).counts == {"done": 1}
    assert written(observer, queue) == 1
    assert "is done; then its middleware raised LookupError" in caplog.text


def test_an_outcome_rolls_back_and_passes_through(queue: Queue, observer: Engine) -> None:
    heard: list[type] = []

    def middleware(context: JobContext, call_next: CallNext) -> Any:
        try:
            return call_next()
        except Exception as error:
            heard.append(type(error))
            raise

    register_writer(queue, Fail("no"), [middleware])
    assert work_off(queue).counts == {"failed": 1}
    assert (heard, written(observer, queue), len(failures(observer, queue))) == ([Fail], 0, 1)


def test_a_lock_and_a_permit_are_taken_outside_of_the_handlers_transaction(queue: Queue, observer: Engine) -> None:
    register_writer(queue, None, [WithoutOverlapping("a"), RateLimited(10, per=1), ThrottlesExceptions(1, per=1)])
    assert work_off(queue).counts == {"done": 1}
    assert written(observer, queue) == 1


# --- places: who has one, and when it is free ----------------------------------------------------------------------------


def delivered(queue: Queue, observer: Engine, count: int) -> list[Delivery]:
    put(observer, queue, count)
    return queue.claim(limit=count)


def take(queue: Queue, delivery: Delivery, slots: int = 1, base: str = "a", seconds: float = 3600) -> Any:
    holder = Holder(delivery.id, delivery.token, seconds)
    return store_of(queue).write(lambda connection, tables: take_slot(connection, tables, base, range(slots), holder))


def test_a_place_is_taken_once(queue: Queue, observer: Engine) -> None:
    first, second = delivered(queue, observer, 2)
    assert first.token == second.token, "the token alone does not tell them apart"
    assert take(queue, first) == Taken("a/0")
    assert isinstance(take(queue, second), Blocked)
    assert take(queue, first) == Taken("a/0"), "its own: asked for again after an answer that was lost"
    assert take(queue, second, 2) == Taken("a/1")


def test_a_place_is_given_up_by_its_holder_only(queue: Queue, observer: Engine) -> None:
    first, second = delivered(queue, observer, 2)
    take(queue, first)
    for delivery, left in ((second, ["a/0"]), (first, [])):
        holder = Holder(delivery.id, delivery.token, 1)
        store_of(queue).write(lambda connection, tables, holder=holder: free_slot(connection, tables, "a", "a/0", holder))  # type: ignore[misc]
        assert list(keys_in(observer, queue)) == left


def test_a_place_is_free_when_its_holders_lease_has_ended(queue: Queue, observer: Engine) -> None:
    first, second, third = delivered(queue, observer, 3)
    take(queue, first)
    expire(observer, queue, [first.id])
    assert take(queue, second) == Taken("a/0")
    assert isinstance(take(queue, third), Blocked)
    assert take(queue, first, base="b") == Lost(), "without a lease it could not keep anything"


@pytest.mark.parametrize("end", ["complete", "release", "fail", "reclaim"])
def test_a_place_that_was_not_given_up_is_free_when_its_delivery_is_over(queue: Queue, observer: Engine, end: str) -> None:
    first, second = delivered(queue, observer, 2)
    take(queue, first)
    if end == "complete":
        queue.complete(first)
    elif end == "release":
        queue.release(first, delay=60)
    elif end == "fail":
        queue.fail(first, "no")
    else:
        expire(observer, queue, [first.id])
        assert [again.id for again in queue.claim(limit=5)] == [first.id]
    assert take(queue, second) == Taken("a/0")


def test_a_place_is_kept_by_a_transaction_that_has_locked_the_jobs_row(queue: Queue, engine: Engine, observer: Engine) -> None:
    if not can_lock_rows(engine):
        pytest.skip("whoever writes there waits until that transaction has ended")
    first, second = delivered(queue, observer, 2)
    take(queue, first)
    expire(observer, queue, [first.id])
    with holding(engine, lock_of(queue.tables.jobs, queue.tables.jobs.c.id == first.id)):
        assert isinstance(take(queue, second), Blocked)
    assert take(queue, second) == Taken("a/0")


def test_a_place_is_free_when_its_time_is_over(queue: Queue, observer: Engine) -> None:
    first, second = delivered(queue, observer, 2)
    take(queue, first, seconds=60)
    let_pass(observer, queue, 59)
    assert isinstance(take(queue, second), Blocked)
    let_pass(observer, queue, 2)
    assert take(queue, second) == Taken("a/0")


def test_threads_that_take_at_once_take_each_place_once(queue: Queue, observer: Engine) -> None:
    deliveries = delivered(queue, observer, 8)
    found = in_threads(8, lambda number: take(queue, deliveries[number], 3))
    assert sorted(one.key for one in found if isinstance(one, Taken)) == ["a/0", "a/1", "a/2"]
    assert sum(isinstance(one, Blocked) for one in found) == 5
    for delivery in deliveries:
        queue.complete(delivery)
    late = delivered(queue, observer, 8)
    found = in_threads(8, lambda number: take(queue, late[number], 3))
    assert sorted(one.key for one in found if isinstance(one, Taken)) == ["a/0", "a/1", "a/2"], "left behind by others"


def test_who_is_blocked_comes_back_one_after_another_and_later_the_longer_it_takes(queue: Queue, observer: Engine) -> None:
    def wait(slots: int, held_for: float) -> float:
        stand = partial(stand_in_line, base=f"base {slots}", slots=slots, id=1, held_for=timedelta(seconds=held_for))
        return store_of(queue).write(stand)

    short = [wait(1, 0.0) for _ in range(20)]
    assert short[0] >= 0.005
    assert short[-1] <= 0.1
    many = [wait(3, 0.3) for _ in range(10)]  # three places, each free after 0.6 s: every 0.2 s one of them, twice as often somebody asks
    assert 0.6 < many[-1] - many[0] <= 0.91
    few = [wait(2, 3600.0) for _ in range(5)]
    assert 1.5 < few[-1] - few[0] <= 2.01, "never more than a second for a place"


def test_who_gives_up_a_place_calls_the_first_in_line(queue: Queue, observer: Engine) -> None:
    holder, *waiting = delivered(queue, observer, 4)
    take(queue, holder)
    for one in reversed(waiting):
        store_of(queue).write(partial(stand_in_line, base="a", slots=1, id=one.id, held_for=timedelta(0)))
        queue.release(one, delay=60)
    queue.clear("default")
    give_up(queue, holder)
    assert [one.id for one in queue.claim(limit=9)] == []
    assert sorted(keys_in(observer, queue)) == ["a/line"], "those that are not there any more were passed over"


def give_up(queue: Queue, delivery: Delivery) -> None:
    holder = Holder(delivery.id, delivery.token, 1)
    store_of(queue).write(lambda connection, tables: free_slot(connection, tables, "a", "a/0", holder))


def test_who_is_called_is_due_at_once_and_out_of_the_line(queue: Queue, observer: Engine) -> None:
    holder, *waiting = delivered(queue, observer, 4)
    for one in reversed(waiting):
        store_of(queue).write(partial(stand_in_line, base="a", slots=1, id=one.id, held_for=timedelta(0)))
        queue.release(one, delay=60)
    for number, one in enumerate(waiting):
        take(queue, holder)
        give_up(queue, holder)
        (claimed,) = queue.claim(limit=9)
        assert claimed.id == one.id
        assert len(keys_in(observer, queue)) == len(waiting) - number
        queue.complete(claimed)


def test_who_takes_a_place_does_not_wait_any_more(queue: Queue, observer: Engine) -> None:
    (one,) = delivered(queue, observer, 1)
    store_of(queue).write(partial(stand_in_line, base="a", slots=1, id=one.id, held_for=timedelta(0)))
    assert len(keys_in(observer, queue)) == 2
    take(queue, one)
    assert sorted(keys_in(observer, queue)) == ["a/0", "a/line"]


# --- WithoutOverlapping --------------------------------------------------------------------------------------------------


class Running:
    """A handler that counts how many of it run at once."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.now = self.most = 0
        self.attempts: list[int] = []
        self._seconds = seconds
        self._guard = threading.Lock()

    def __call__(self, context: JobContext) -> None:
        with self._guard:
            self.now += 1
            self.most = max(self.most, self.now)
            self.attempts.append(context.attempt)
        time.sleep(self._seconds)
        with self._guard:
            self.now -= 1


def register(queue: Queue, function: Callable[..., Any], name: str = "job", **options: Any) -> None:
    def handler(context: JobContext) -> Any:
        return function(context)

    queue.job(name=name, **options)(handler)


def test_jobs_of_one_key_do_not_overlap_and_lose_no_attempt(queue: Queue, observer: Engine) -> None:
    running = Running()
    register(queue, running, "one", middleware=[WithoutOverlapping("a")])
    register(queue, running, "two", middleware=[WithoutOverlapping(lambda context: "a")])
    push(queue, "one", 10)
    push(queue, "two", 10)
    with working(queue, concurrency=5), working(queue, concurrency=5):
        wait_until_empty(observer, queue)
    assert running.most == 1
    assert running.attempts == [1] * 20
    assert set(keys_in(observer, queue)) <= {"overlap:/a/line"}


def wait_until_empty(observer: Engine, queue: Queue) -> None:
    until = time.monotonic() + PATIENCE
    while jobs(observer, queue):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_jobs_of_different_keys_run_at_once(queue: Queue) -> None:
    gate = Gate()

    @queue.job(name="job", middleware=[WithoutOverlapping(lambda context: context.arguments["number"])])
    def job(number: int) -> None:
        gate.pass_through()

    register(queue, lambda context: gate.pass_through(), "own", middleware=[WithoutOverlapping()])
    with queue.begin() as session:
        job.push(session, 1)
        job.push(session, 2)
    push(queue, "own")
    with working(queue, concurrency=3):
        gate.await_arrivals(3)
        gate.open()


def test_release_after_says_when_to_look_again(queue: Queue, observer: Engine) -> None:
    (holder,) = delivered(queue, observer, 1)
    take(queue, holder, base="overlap:/a")
    register(queue, lambda context: None, middleware=[WithoutOverlapping("a", release_after=100)])
    (waiting,) = push(queue, "job")
    assert work_off(queue, concurrency=1).counts == {"released": 1}
    row = next(row for row in jobs(observer, queue) if row["id"] == waiting)
    assert row["attempts"] == 0
    assert 70 < (row["available_at"] - moment_of(observer)).total_seconds() <= 125


def test_a_lock_that_cannot_be_given_up_changes_nothing(
    queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def free(*arguments: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(overlaps, "free_slot", free)
    register(queue, lambda context: None, middleware=[WithoutOverlapping("a")])
    push(queue, "job", 3)
    with working(queue, concurrency=1) as worker:
        wait_until_empty(observer, queue)
    assert worker.summary is not None
    assert set(worker.summary.counts) <= {"done", "released"}
    assert "its place is free when its lease ends: RuntimeError" in caplog.text


def test_a_job_that_cannot_ask_the_database_is_released(queue: Queue, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> Any:
        raise DBAPIError("", {}, next(iter(conflicts(engine).values()))())

    for module, name in ((overlaps, "take_slot"), (rates, "take_permits"), (breakers, "closed_for")):
        monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr("sqlqueue._queue.transactions.PAUSE", 0.0)
    for number, middleware in enumerate([WithoutOverlapping(), RateLimited(1, per=1), ThrottlesExceptions(1, per=1)]):
        register(queue, lambda context: None, f"job-{number}", middleware=[middleware])
        push(queue, f"job-{number}")
    assert work_off(queue).counts == {"released": 3}


def test_a_function_for_a_key_that_returns_no_text_is_the_jobs_failure(queue: Queue, observer: Engine) -> None:
    register(queue, lambda context: None, middleware=[WithoutOverlapping(lambda context: None)], max_attempts=1)  # type: ignore[arg-type,return-value]
    push(queue, "job")
    assert work_off(queue).counts == {"failed": 1}
    assert "has to return a text or a number" in failures(observer, queue)[0]["error_message"]


def test_keys_of_different_kinds_and_of_any_length_do_not_meet(queue: Queue, observer: Engine) -> None:
    seen: list[set[str]] = []
    for number, key in enumerate(["a", "a/0", "ä" * 1000, "x" * 180, "sha256:0"]):
        everything = [WithoutOverlapping(key), RateLimited(1, per=3600, key=key), ThrottlesExceptions(1, per=60, key=key)]
        options: dict[str, Any] = {"middleware": everything, "limit": 2, "limit_key": Key(key), "unique": Key(key)}
        register(queue, lambda context: seen.append(set(keys_in(observer, queue))), f"job-{number}", **options)
        push(queue, f"job-{number}")
        assert work_off(queue, concurrency=1).counts["done"] == 1
    kinds = [sorted(key.split(":")[0] for key in keys) for keys in seen]
    assert kinds == [["limit", "overlap", *["rate"] * (number + 1), "unique"] for number in range(5)]
    assert max(len(key) for keys in seen for key in keys) <= 190


# --- RateLimited ---------------------------------------------------------------------------------------------------------

TENTHS = Rate(timedelta(milliseconds=100), burst=3, ahead=timedelta(milliseconds=100))


def ask(queue: Queue, count: int, rate: Rate = TENTHS) -> list[Permit]:
    return store_of(queue).write(lambda connection, tables: take_permits(connection, tables, "rate:/a", count, rate))


def test_permits_come_at_once_up_to_the_burst_and_then_evenly(queue: Queue, observer: Engine) -> None:
    permits = ask(queue, 8)
    assert [permit.granted for permit in permits] == [True] * 4 + [False] * 4
    starts = [permit.at for permit in permits if permit.at is not None]
    assert starts[0] == starts[1] == starts[2]
    assert starts[3] - starts[2] == timedelta(milliseconds=100)
    waits = [permit.wait for permit in permits]
    assert waits == pytest.approx([0, 0, 0, 0.1, 0.15, 0.25, 0.35, 0.45])
    assert keys_in(observer, queue)["rate:/a"].expires_at - starts[0] == timedelta(milliseconds=400)


def test_permits_that_are_asked_for_one_by_one_never_exceed_limit_and_burst(queue: Queue, observer: Engine) -> None:
    rate = Rate(timedelta(milliseconds=10), burst=4, ahead=timedelta(milliseconds=30))
    until = time.monotonic() + 0.5
    starts = []
    while time.monotonic() < until:
        starts += [permit.at for permit in ask(queue, 2, rate) if permit.at is not None]
    assert len(starts) > 40
    assert_rate([start.timestamp() for start in starts], 0.01, 4)


@pytest.mark.parametrize(("per", "burst"), [(timedelta(days=30), 100), (0.001, 1_000_000)])
def test_the_slowest_and_the_largest_rates_do(queue: Queue, observer: Engine, per: float, burst: int) -> None:
    register(queue, lambda context: None, middleware=[RateLimited(1, per=per, key="b", burst=burst)])
    push(queue, "job")
    assert work_off(queue).counts == {"done": 1}
    permits = ask(queue, 1000, Rate(timedelta(days=30), 1, timedelta(milliseconds=100)))
    assert [permit.granted for permit in permits] == [True] + [False] * 999
    change_line(observer, queue, 2_000_000_000)
    assert ask(queue, 1, Rate(timedelta(days=30), 1, timedelta(0)))[0].wait < 3e9
    assert ask(queue, 1, Rate(timedelta(microseconds=1), 1, timedelta(0)))[0].wait < 3e9


def change_line(observer: Engine, queue: Queue, length: int) -> None:
    with observer.connect() as connection:
        connection.execute(sa.update(queue.tables.keys).values(count=length))


def test_permits_that_many_ask_for_at_once_are_given_out_once(queue: Queue) -> None:
    rate = Rate(timedelta(milliseconds=10), burst=4, ahead=timedelta(seconds=10))
    answers = in_threads(6, lambda number: [ask(queue, 2, rate) for _ in range(10)])
    starts = sorted(permit.at.timestamp() for permits in answers for two in permits for permit in two if permit.at is not None)
    assert len(starts) == 120
    assert_rate(starts, 0.01, 4)
    assert len(set(starts)) >= 115, "all but the burst one after another"


def assert_rate(starts: list[float], interval: float, burst: int) -> None:
    """In no interval more than the burst, and one for each interval of the rate."""
    starts = sorted(starts)
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            assert last - first + 1 <= burst + (starts[last] - starts[first]) / interval + 1e-3


def test_after_a_pause_the_row_may_be_gone(queue: Queue, observer: Engine) -> None:
    ask(queue, 8)
    let_pass(observer, queue, 3600)
    assert sum(permit.granted for permit in ask(queue, 8)) == 4
    with observer.connect() as connection:
        connection.execute(sa.delete(queue.tables.keys))
    assert sum(permit.granted for permit in ask(queue, 8)) == 4


def test_the_line_grows_and_shrinks_with_those_who_wait(queue: Queue, observer: Engine) -> None:
    ask(queue, 14)
    assert keys_in(observer, queue)["rate:/a"].count == 10
    let_pass(observer, queue, 0.3)
    assert sum(permit.granted for permit in ask(queue, 3)) >= 2
    assert keys_in(observer, queue)["rate:/a"].count <= 9
    let_pass(observer, queue, 3600)
    ask(queue, 1)
    assert keys_in(observer, queue)["rate:/a"].count == 0


def test_no_handler_starts_before_its_permit_and_throttling_costs_no_attempt(queue: Queue, observer: Engine) -> None:
    permits: list[float] = []
    starts: list[float] = []
    attempts: list[int] = []

    class Recorded(RateLimited):
        def _await_permit(self, context: JobContext, *rest: Any) -> Permit:
            permit = super()._await_permit(context, *rest)
            assert permit.at is not None
            permits.append(permit.at.timestamp())
            starts.append(moment_of(observer).timestamp() - permit.at.timestamp())
            return permit

    register(queue, lambda context: attempts.append(context.attempt), middleware=[Recorded(100, per=1, key="a", burst=5)], max_attempts=1)
    push(queue, "job", 60)
    with working(queue, concurrency=8):
        wait_until_empty(observer, queue)
    assert attempts == [1] * 60
    assert min(starts) >= 0
    assert_rate(permits, 0.01, 5)


def test_threads_that_ask_at_once_get_their_permits_together(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def counted(connection: Any, tables: Any, key: str, count: int, rate: Rate) -> list[Permit]:
        groups.append(count)
        begun.set()
        assert go_on.wait(PATIENCE)
        return take_permits(connection, tables, key, count, rate)

    monkeypatch.setattr(rates, "take_permits", counted)
    limiter = RateLimited(1000, per=1, key="a", burst=10)
    store = store_of(queue)

    def call(number: int) -> None:
        if number:
            assert begun.wait(PATIENCE)
        context = JobContext(id=number, name="job", queue="", attempt=1, max_attempts=1, _store=store)
        if number == 7:
            while len(limiter._counters[store]["rate:/a"].waiting) < 6:
                time.sleep(0.001)
            go_on.set()
        limiter(context, lambda: None)

    in_threads(8, call)
    assert sum(groups) == 8
    assert groups[0] == 1
    assert max(groups) >= 6
    assert limiter._counters[store] == {}, "nothing is remembered of a key that nobody asks for"


def test_a_permit_that_comes_too_late_is_not_used(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    asked: list[int] = []

    def oversleep(seconds: float) -> None:
        clock[0] += seconds + 1

    def grant(connection: Any, tables: Any, key: str, count: int, rate: Rate) -> list[Permit]:
        asked.append(count)
        return [Permit(True, 0.05)] * count

    monkeypatch.setattr(rates, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=oversleep))
    monkeypatch.setattr(rates, "take_permits", grant)
    context = JobContext(id=1, name="job", queue="", attempt=1, max_attempts=1, _store=store_of(queue))
    ran: list[int] = []
    with pytest.raises(Release):
        RateLimited(1, per=1)(context, lambda: ran.append(1))
    assert (asked, ran) == ([1, 1, 1], [])


# --- ThrottlesExceptions -------------------------------------------------------------------------------------------------


def test_after_so_many_exceptions_jobs_of_the_key_do_not_run_for_a_while(queue: Queue, observer: Engine) -> None:
    ran: list[str] = []
    down = threading.Event()
    down.set()

    def handler(context: JobContext) -> None:
        ran.append(context.name)
        if context.name == "bad" and down.is_set():
            raise ConnectionError("down")

    for name in ("bad", "good"):
        middleware = [ThrottlesExceptions(3, per=60, key="service", pause=300)]
        register(queue, handler, name, middleware=middleware, backoff=Fixed(60), max_attempts=9)
    push(queue, "bad", 3)
    assert work_off(queue, concurrency=1).counts == {"retrying": 3}
    push(queue, "good", 2)
    make_due(observer, queue)
    ran.clear()
    assert work_off(queue, concurrency=1).counts == {"released": 5}
    assert ran == []
    assert sorted(row["attempts"] for row in jobs(observer, queue)) == [0, 0, 1, 1, 1]
    waits = [(row["available_at"] - moment_of(observer)).total_seconds() for row in jobs(observer, queue)]
    assert min(waits) > 290
    down.clear()
    let_pass(observer, queue, 300)
    make_due(observer, queue)
    assert work_off(queue, concurrency=1).counts == {"done": 5}


def test_exceptions_count_in_the_window_that_began_with_the_first(queue: Queue, observer: Engine) -> None:
    def note() -> bool:
        return store_of(queue).write(lambda connection, tables: note_exception(connection, tables, "a", limit=2, per=60, pause=30))

    def closed() -> float:
        return store_of(queue).read(lambda connection, tables: closed_for(connection, tables, "a"))

    assert (closed(), note(), closed()) == (0.0, False, 0.0)
    let_pass(observer, queue, 61)
    assert (note(), note()) == (False, True)
    assert 25 < closed() <= 30
    assert note() is False, "it was running when the others failed: the pause does not begin anew"
    let_pass(observer, queue, 20)
    assert 5 < closed() <= 10


def test_outcomes_and_other_exceptions_do_not_count(queue: Queue, observer: Engine) -> None:
    errors: list[Exception] = [Release(60), ValueError("x"), ConnectionError("x")]
    register(
        queue, lambda context: raise_(errors.pop(0)), middleware=[ThrottlesExceptions(9, per=60, on=ConnectionError)], backoff=Fixed(60)
    )
    for count in (0, 0, 1):
        push(queue, "job")
        work_off(queue)
        assert len(keys_in(observer, queue)) == count


def raise_(error: Exception) -> None:
    raise error


def test_an_exception_that_cannot_be_counted_reaches_the_worker(queue: Queue, monkeypatch: pytest.MonkeyPatch, observer: Engine) -> None:
    monkeypatch.setattr(breakers, "note_exception", lambda *arguments, **options: raise_(RuntimeError("no")))
    register(queue, lambda context: raise_(KeyError("x")), middleware=[FailOn(OSError), ThrottlesExceptions(1, per=1)], max_attempts=1)
    push(queue, "job")
    work_off(queue)
    assert failures(observer, queue)[0]["error_class"] == "KeyError"


# --- the testing kit -----------------------------------------------------------------------------------------------------


def test_a_drain_keeps_everything_in_the_tests_own_transaction(queue: Queue, engine: Engine, observer: Engine) -> None:
    everything = [WithoutOverlapping("a"), RateLimited(1, per=3600, key="a"), ThrottlesExceptions(1, per=1, key="a")]
    register(queue, lambda context: None, middleware=everything, limit=1)
    with Session(engine) as session:
        session.execute(sa.insert(queue.tables.controls).values(name="x", created_at=sa.func.current_timestamp()))
        job: Any = queue.registry.find("job")
        job.push(session)
        job.push(session)
        assert queue.drain(session).counts == {"done": 1, "released": 1}
        session.rollback()
    assert keys_in(observer, queue) == {}


def test_inline_runs_through_middleware_that_holds_nobody_up(queue: Queue, engine: Engine, observer: Engine) -> None:
    seen: list[str] = []

    def middleware(context: JobContext, call_next: CallNext) -> Any:
        seen.append("in")
        return call_next()

    everything = [middleware, WithoutOverlapping("a"), RateLimited(1, per=3600, key="a"), ThrottlesExceptions(1, per=1, key="a")]
    register(queue, lambda context: seen.append("ran"), middleware=everything, limit=1)
    with queue.inline() as ran, Session(engine) as session, session.begin():
        job: Any = queue.registry.find("job")
        job.push(session)
        job.push(session)
    assert [run.status for run in ran] == ["done", "done"]
    assert seen == ["in", "ran"] * 2
    assert keys_in(observer, queue) == {}
