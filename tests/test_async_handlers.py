"""
`async def` handlers, on the one event loop of a worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from sqlqueue import Discard, Fail, Fixed, JobContext, OptionError, Queue, RegistrationError, Release, Worker, current_job
from sqlqueue._executor import Status
from tests.acceptance.processes import Site, site_on
from tests.servers import Database
from tests.test_executor import error_of, run, run_named
from tests.workers import Gate, eventually, expire, failures, jobs, make_due, push, work_off, working

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="untouched")


@pytest.fixture
def plain() -> Queue:
    return Queue()


class Crowd:
    """Counts who is inside, and lets nobody out before the door is opened."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.is_open = False

    async def enter(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        while not self.is_open:
            await asyncio.sleep(0.01)
        self.inside -= 1


# --- where and how they run


def test_they_share_one_loop_in_a_thread_that_handlers_without_async_do_not_start(queue: Queue) -> None:
    seen: list[tuple[str, int]] = []

    async def on_the_loop() -> None:
        await asyncio.sleep(0)
        seen.append((threading.current_thread().name, id(asyncio.get_running_loop())))

    queue.job(name="async")(on_the_loop)
    queue.job(name="sync")(lambda: seen.append((",".join(thread.name for thread in threading.enumerate()), 0)))
    push(queue, "sync")
    work_off(queue)
    assert "sqlqueue-slot-1" in seen[0][0]
    assert "sqlqueue-loop" not in seen[0][0]
    push(queue, "async", 20)
    assert work_off(queue).counts == {"done": 20}
    assert len(set(seen[1:])) == 1
    assert seen[1][0] == "sqlqueue-loop"
    assert not any(thread.name == "sqlqueue-loop" for thread in threading.enumerate())


def test_more_run_at_once_than_there_are_threads_up_to_their_own_number(queue: Queue) -> None:
    crowd = Crowd()
    queue.job(name="enter")(crowd.enter)
    push(queue, "enter", 30)
    with working(queue, concurrency=2, async_concurrency=12) as worker:
        eventually(lambda: crowd.inside == 12)
        # A slot that an async job keeps is free for anybody when one of them ends.
        crowd.is_open = True
        eventually(lambda: worker._shift is not None and worker._shift.counts[Status.DONE] == 30)
    assert crowd.most == 12


def test_those_in_threads_go_on_beside_them(queue: Queue) -> None:
    crowd, gate = Crowd(), Gate()
    queue.job(name="enter")(crowd.enter)
    queue.job(name="thread")(gate.pass_through)
    push(queue, "enter", 5)
    with working(queue, concurrency=2):
        eventually(lambda: crowd.inside == 5)
        push(queue, "thread", 2)
        gate.await_arrivals(2)
        push(queue, "enter", 3)  # no thread is free to start them
        gate.open()
        eventually(lambda: crowd.inside == 8)
        crowd.is_open = True


def test_nothing_that_was_claimed_waits_for_the_loop(queue: Queue, observer: Engine) -> None:
    crowd = Crowd()
    queue.job(name="enter")(crowd.enter)
    push(queue, "enter", 10)
    with working(queue, concurrency=2, async_concurrency=4):
        eventually(lambda: crowd.inside == 4)
        eventually(lambda: sum(row["reserved_until"] is not None for row in jobs(observer, queue)) == 4, "what waits is handed back")
        crowd.is_open = True
        eventually(lambda: not jobs(observer, queue))


def test_a_job_of_a_dead_worker_starts_at_once_or_is_not_taken(queue: Queue, observer: Engine) -> None:
    crowd = Crowd()
    queue.job(name="enter", max_attempts=2)(crowd.enter)
    push(queue, "enter", 3)
    with observer.connect():
        queue.claim(limit=3)
    expire(observer, queue)
    with working(queue, concurrency=1, async_concurrency=2):
        # Each is on its last attempt: they run one after another, whatever places there are.
        eventually(lambda: crowd.inside == 1)
        crowd.is_open = True
        eventually(lambda: not jobs(observer, queue))
    assert crowd.most == 1
    assert failures(observer, queue) == []


def test_run_once_runs_them_too(queue: Queue) -> None:
    crowd = Crowd()
    crowd.is_open = True
    queue.job(name="enter")(crowd.enter)
    push(queue, "enter")
    worker = Worker(queue)
    assert worker.run_once() is True
    assert worker.run_once() is False
    assert crowd.most == 1


class Callee:
    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    async def __call__(self, number: int) -> None:
        await asyncio.sleep(0)
        self._seen.append(number)


async def add(seen: list[int], number: int) -> None:
    seen.append(number)


def test_whatever_makes_a_coroutine_by_declaration_is_async(plain: Queue) -> None:
    seen: list[int] = []
    assert run(plain, Callee(seen), {"number": 1}).status is Status.DONE
    plain.job(name="partial")(functools.partial(add, seen))
    assert run_named(plain, "partial", {"number": 2}).status is Status.DONE
    assert seen == [1, 2]


def test_a_plain_function_that_returns_a_coroutine_is_not(plain: Queue) -> None:
    assert "nobody runs" in error_of(run(plain, lambda number: add([], number), {"number": 1}))


def test_a_coroutine_that_returns_another_one_has_not_done_its_work(plain: Queue) -> None:
    async def handler(number: int) -> Any:
        return add([], number)

    assert "nobody runs" in error_of(run(plain, handler, {"number": 1}))


def test_to_call_the_job_is_to_call_the_function(plain: Queue) -> None:
    @plain.job(name="double")
    async def double(context: JobContext, number: int) -> int:
        return number * 2 + context.id

    assert asyncio.run(double(4)) == 8


@pytest.mark.usefixtures("plain")
def test_generators_and_sessions_are_refused() -> None:
    async def generator() -> Any:
        yield

    with pytest.raises(RegistrationError, match="a generator function cannot be a job"):
        Queue().job(name="a")(generator)


# --- how they end


@pytest.mark.parametrize("how", ["raised", "returned"])
@pytest.mark.parametrize(("outcome", "status"), [(Release(3600), "released"), (Fail("no"), "failed"), (Discard(), "discarded")])
def test_the_outcomes_that_they_choose(queue: Queue, how: str, outcome: Exception, status: str) -> None:
    @queue.job(name="choose")
    async def choose() -> object:
        await asyncio.sleep(0)
        if how == "raised":
            raise outcome
        return outcome

    push(queue, "choose")
    assert work_off(queue).counts == {status: 1}


async def leave() -> None:
    await asyncio.sleep(0)
    sys.exit(3)


async def interrupt() -> None:
    raise KeyboardInterrupt


async def cancel() -> None:
    raise asyncio.CancelledError


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def stop_iteration() -> None:
    raise StopIteration


async def group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(cancel())
        tasks.create_task(divide())


async def divide() -> None:
    raise ZeroDivisionError


HOSTILE: list[Callable[[], Any]] = [leave, interrupt, cancel, cancel_itself, stop_iteration, group, divide]


def test_whatever_they_do_their_jobs_are_recorded_and_the_loop_goes_on(queue: Queue, observer: Engine) -> None:
    @queue.job(name="fine")
    async def fine() -> None:
        await asyncio.sleep(0.2)

    push(queue, "fine", 2)
    for handler in HOSTILE:
        queue.job(name=handler.__name__, max_attempts=1)(handler)
        push(queue, handler.__name__)
    push(queue, "fine", 2)
    assert work_off(queue).counts == {"failed": len(HOSTILE), "done": 4}
    assert {row["name"]: row["error_class"] for row in failures(observer, queue)} == {
        "leave": "SystemExit",
        "interrupt": "KeyboardInterrupt",
        "cancel": "asyncio.exceptions.CancelledError",
        "cancel_itself": "asyncio.exceptions.CancelledError",
        "stop_iteration": "RuntimeError",
        "group": "ExceptionGroup",
        "divide": "ZeroDivisionError",
    }


def test_a_cancellation_that_nobody_awaits_does_not_undo_the_end(queue: Queue) -> None:
    @queue.job(name="odd")
    async def odd() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    push(queue, "odd")
    assert work_off(queue).counts == {"done": 1}


def test_what_stops_the_loop_does_not_stop_the_others(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    left: list[asyncio.Task[None]] = []

    @queue.job(name="rude")
    async def rude() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        left.append(asyncio.create_task(leave()))  # its SystemExit comes out of the loop

    @queue.job(name="fine")
    async def fine() -> None:
        await asyncio.sleep(0.1)

    push(queue, "fine", 2)
    push(queue, "rude")
    push(queue, "fine", 2)
    with caplog.at_level(logging.ERROR, "sqlqueue"):
        assert work_off(queue).counts == {"done": 5}
    assert "a task that a job has left on the event loop raised SystemExit" in caplog.text
    with pytest.raises(SystemExit):
        left[0].result()


def test_who_cancels_all_tasks_fails_the_others_and_the_worker_lives(queue: Queue, observer: Engine) -> None:
    crowd = Crowd()

    @queue.job(name="rude")
    async def rude() -> None:
        while crowd.inside < 3:
            await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    queue.job(name="enter", max_attempts=1)(crowd.enter)
    push(queue, "enter", 3)
    push(queue, "rude")
    assert work_off(queue).counts == {"failed": 3, "done": 1}
    assert {row["error_class"] for row in failures(observer, queue)} == {"asyncio.exceptions.CancelledError"}


def test_they_are_retried_like_others(queue: Queue, observer: Engine) -> None:
    @queue.job(name="again", backoff=Fixed(3600))
    async def again(context: JobContext) -> None:
        if context.attempt == 1:
            raise ValueError("on purpose")

    push(queue, "again")
    assert work_off(queue).counts == {"retrying": 1}
    assert jobs(observer, queue)[0]["last_error"] == "ValueError: on purpose"
    make_due(observer, queue)
    assert work_off(queue).counts == {"done": 1}


# --- what they know


def test_each_has_its_own_context_variables(queue: Queue) -> None:
    seen: list[tuple[str, int | None]] = []

    @queue.job(name="look")
    async def look(context: JobContext) -> None:
        before = variable.get()
        variable.set(str(context.id))
        await asyncio.sleep(0.01)
        assert current_job() is context
        assert variable.get() == str(context.id)
        child = asyncio.create_task(asyncio.sleep(0, current_job()))
        assert await child is context
        seen.append((before, context.id))

    ids = push(queue, "look", 20)
    assert work_off(queue).counts == {"done": 20}
    assert sorted(seen, key=str) == sorted((("untouched", id) for id in ids), key=str)


def test_they_renew_without_blocking_the_loop_and_learn_that_they_have_lost(queue: Queue, observer: Engine) -> None:
    seen: list[Any] = []
    gate = threading.Event()

    @queue.job(name="long")
    async def long(context: JobContext) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        seen.append(await context.renew_async())
        ticking.cancel()
        seen.append(ticks > 1)
        while not gate.is_set():
            await asyncio.sleep(0.01)
        seen.append((await context.renew_async(), context.lost))

    push(queue, "long")
    with working(queue):
        eventually(lambda: len(seen) == 2)
        with observer.connect() as connection:
            connection.execute(queue.tables.jobs.delete())
        gate.set()
        eventually(lambda: len(seen) == 3)
    assert seen == [True, True, (False, True)]


# --- how the worker ends


@pytest.fixture
def site(queue: Queue, database: Database, observer: Engine, tmp_path: Path) -> Iterator[Site]:
    with site_on(queue, database, observer, tmp_path) as site:
        yield site


def test_a_signal_lets_running_ones_finish(site: Site) -> None:
    site.push("wait_async", 3, {"folder": str(site.folder)})
    process = site.start(concurrency=1)
    eventually(lambda: len(list(site.folder.glob("began-*"))) == 3)
    process.send(signal.SIGTERM)
    process.await_words("no more jobs are taken, 3 are running")
    (site.folder / "go").touch()
    assert process.wait() == 0
    assert jobs(site.observer, site.queue) == failures(site.observer, site.queue) == []


def test_a_second_signal_hands_them_back(site: Site) -> None:
    site.push("wait_async", 4, {"folder": str(site.folder)})
    process = site.start(concurrency=2, async_concurrency=3)
    eventually(lambda: len(list(site.folder.glob("began-*"))) == 3)
    process.send(signal.SIGTERM)
    process.await_words("no more jobs are taken")
    process.send(signal.SIGTERM)
    assert process.wait() == 1
    rows = jobs(site.observer, site.queue)
    assert [(row["attempts"], row["reserved_until"]) for row in rows] == [(0, None)] * 4


def test_tasks_that_a_job_has_left_do_not_keep_the_worker(queue: Queue) -> None:
    cancelled: list[bool] = []

    async def go_on() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.append(True)

    @queue.job(name="leave")
    async def leave_behind() -> None:
        leave_behind.task = asyncio.create_task(go_on())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    push(queue, "leave")
    assert work_off(queue).counts == {"done": 1}
    assert cancelled == [True]


@pytest.mark.parametrize("wrong", [0, 9, 10_001, True, "20", 20.0])
def test_a_number_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(OptionError, match=r"^async_concurrency"):
        Worker(Queue(), concurrency=10, async_concurrency=wrong)  # type: ignore[arg-type]


def test_the_number_follows_the_concurrency() -> None:
    assert Worker(Queue()).async_concurrency == 100
    assert Worker(Queue(), concurrency=200).async_concurrency == 200


# --- in tests


def test_drain_and_inline_run_them(queue: Queue, engine: Engine) -> None:
    seen: list[str] = []

    @queue.job(name="note")
    async def note(what: str) -> None:
        await asyncio.sleep(0)
        job = current_job()
        seen.append(f"{what} {job.name if job else None}")

    with queue.begin() as session:
        note.push(session, "drained")
    queue.drain().assert_all_done()
    with queue.inline(), queue.begin() as session:
        note.push(session, "inline")
    assert seen == ["drained note", "inline note"]


async def test_drain_runs_them_where_a_loop_is_running(queue: Queue) -> None:
    seen: list[object] = []

    @queue.job(name="note")
    async def note() -> None:
        await asyncio.sleep(0)
        seen.append(asyncio.get_running_loop())

    push(queue, "note")
    queue.drain().assert_all_done()
    assert seen != [asyncio.get_running_loop()]
    assert len(seen) == 1


def test_drain_keeps_what_they_raise(queue: Queue) -> None:
    queue.job(name="divide")(divide)
    push(queue, "divide")
    (ran,) = queue.drain()
    assert isinstance(ran.error, ZeroDivisionError)
