"""
A worker's life: how it starts, what it says, when it stops.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import AssertionPool, Pool, QueuePool, SingletonThreadPool, StaticPool

from sqlqueue import Fail, JobContext, OptionError, Queue, Release, Worker, current_job
from sqlqueue._dialects import server_of
from tests.servers import Database, never_wait_long
from tests.workers import PATIENCE, Gate, change, eventually, failures, jobs, push, work_off, working

# --- it runs jobs


def test_every_job_runs_once_and_is_gone(queue: Queue, observer: Engine) -> None:
    runs: Counter[int] = Counter()

    @queue.job(name="count")
    def count(context: JobContext) -> None:
        runs[context.id] += 1

    ids = push(queue, "count", 100)
    summary = work_off(queue)
    assert runs == Counter(ids)
    assert summary.counts == {"done": 100}
    assert (jobs(observer, queue), failures(observer, queue)) == ([], [])


def test_jobs_run_side_by_side_up_to_the_concurrency(queue: Queue) -> None:
    gate = Gate()
    running: list[int] = []

    @queue.job(name="wait")
    def wait(context: JobContext) -> None:
        running.append(context.id)
        gate.pass_through()

    push(queue, "wait", 7)
    with working(queue, concurrency=3):
        gate.await_arrivals(3)
        assert len(running) == 3
        assert queue.stats()[0].reserved == 3
        gate.open()
        assert queue.wait_empty(PATIENCE)


def test_queues_are_served_in_the_order_in_which_they_are_named(queue: Queue) -> None:
    order: list[str] = []

    @queue.job(name="note")
    def note(context: JobContext) -> None:
        order.append(context.queue)

    push(queue, "note", 2, queue="low")
    push(queue, "note", 2, queue="high")
    push(queue, "note", 2, queue="other")
    work_off(queue, queues=["high", "low"], concurrency=1)
    assert order == ["high", "high", "low", "low"]
    assert queue.size("other") == 2


def test_a_job_that_is_due_later_runs_when_it_is_due(queue: Queue) -> None:
    ran = threading.Event()
    queue.job(name="later")(ran.set)
    with working(queue):
        push(queue, "later", delay=0.3)
        assert ran.wait(PATIENCE)


def test_the_registry_of_what_is_held_is_empty_when_idle(queue: Queue, observer: Engine) -> None:
    seen = []

    @queue.job(name="mixed", max_attempts=1)
    def mixed(context: JobContext) -> None:
        match context.id % 3:
            case 0:
                raise ValueError
            case 1:
                raise Release(3600)
        if context.id % 2:  # somebody else holds it by now
            change(observer, queue, {"reserved_token": "another"}, queue.tables.jobs.c.id == context.id)

    push(queue, "mixed", 60)
    with working(queue) as worker:
        seen.append(worker._shift)
        eventually(lambda: worker._shift is not None and worker._shift.counts.total() == 60 and not worker._shift.holdings)
        assert seen[0] is not None
        assert seen[0].holdings.all() == []
        assert seen[0].holdings.busy == 0
        assert seen[0].counts == {"done": 10, "failed": 20, "released": 20, "lost": 10}


def test_no_transaction_is_open_while_a_handler_runs(queue: Queue) -> None:
    gate = Gate()
    queue.job(name="wait")(gate.pass_through)
    push(queue, "wait")
    with working(queue, concurrency=1):
        gate.await_arrivals()
        eventually(lambda: queue.consumer.engine.pool.checkedout() == 0)  # type: ignore[attr-defined]
        gate.open()


def test_pushes_and_commits_of_others_go_on_while_handlers_run(queue: Queue, database: Database) -> None:
    gate = Gate()
    wait = queue.job(name="wait")(gate.pass_through)
    hasty = create_engine(database.url)
    push(queue, "wait", 4)
    with working(queue, concurrency=3, lease=1):
        gate.await_arrivals(3)
        with hasty.connect() as connection:
            never_wait_long(connection)
            if not server_of(hasty.dialect).row_locks:
                connection.exec_driver_sql("PRAGMA busy_timeout = 1000")
            for _ in range(30):
                wait.push(connection)
                connection.commit()
        gate.open()
        assert queue.wait_empty(PATIENCE)
    hasty.dispose()


def test_handlers_that_hold_every_connection_of_the_application(queue: Queue, database: Database) -> None:
    """The queue has a pool of its own: leases are renewed, and outcomes written, all the same."""
    theirs = create_engine(database.url, pool_size=2, max_overflow=0, pool_timeout=PATIENCE, poolclass=QueuePool)
    own = Queue(theirs)
    lost: list[bool] = []

    @own.job(name="hold", max_attempts=1)
    def hold(context: JobContext) -> None:
        with theirs.connect() as connection:
            connection.execute(sa.select(1))
            connection.commit()
            until = own.consumer.read(lambda reader: lease_end(reader, own, context.id))
            eventually(lambda: own.consumer.read(lambda reader: lease_end(reader, own, context.id)) > until)
            lost.append(context.lost)

    queue.job(name="hold", max_attempts=1)(lambda: None)
    push(queue, "hold", 4)
    assert work_off(own, concurrency=4, lease=3).counts == {"done": 4}
    assert lost == [False] * 4
    own.consumer.close()
    theirs.dispose()


def lease_end(connection: sa.Connection, queue: Queue, id: int) -> Any:
    jobs = queue.tables.jobs.c
    return connection.scalar(sa.select(jobs.reserved_until).where(jobs.id == id))


@pytest.mark.parametrize("kind", [StaticPool, AssertionPool, SingletonThreadPool])
def test_each_thread_has_a_connection_of_its_own_also_where_the_application_has_one_for_all(
    queue: Queue, database: Database, kind: type[Pool]
) -> None:
    """What one thread commits or rolls back would be what another has done half of."""
    theirs = create_engine(database.url, poolclass=kind)
    pool = Queue(theirs).consumer.engine.pool
    connections = []
    try:
        for _ in range(3):
            connections.append(pool.connect())
        assert len({id(connection.driver_connection) for connection in connections}) == 3
    finally:
        for connection in connections:
            connection.close()
        pool.dispose()
        theirs.dispose()


# --- limits


def test_jobs_that_are_delayed_or_held_by_others_do_not_keep_it(queue: Queue, observer: Engine) -> None:
    queue.job(name="noop")(lambda: None)
    push(queue, "noop", 2)
    (held,) = queue.claim()
    push(queue, "noop", delay=3600)
    summary = work_off(queue)
    assert (summary.reason, summary.counts["done"]) == ("empty", 1)
    assert [row["id"] for row in jobs(observer, queue)] == [held.id, held.id + 2]


def test_a_job_that_is_released_for_later_does_not_keep_it(queue: Queue) -> None:
    @queue.job(name="later")
    def later() -> None:
        raise Release(3600)

    push(queue, "later")
    assert work_off(queue).counts == {"released": 1}
    assert queue.size("default") == 1


def test_it_stops_only_when_its_own_jobs_are_settled(queue: Queue) -> None:
    @queue.job(name="often", backoff=lambda attempt: 0, max_attempts=3)
    def often() -> None:
        raise ValueError

    push(queue, "often", 5)
    assert work_off(queue).counts == {"retrying": 10, "failed": 5}


def test_a_lock_that_hides_a_pending_job_does_not_fool_it(queue: Queue, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = threading.Event()
    queue.job(name="hidden")(ran.set)
    (id,) = push(queue, "hidden")
    looks = threading.Semaphore(0)
    due_in = queue.consumer.due_in

    def looked(queues: Any) -> float | None:
        looks.release()
        return due_in(queues)

    monkeypatch.setattr(queue.consumer, "due_in", looked)
    locks = server_of(queue.consumer.engine.dialect).row_locks
    worker = Worker(queue, stop_when_empty=True)
    with engine.connect() as connection:
        if locks:
            table = queue.tables.jobs
            connection.execute(sa.select(table.c.id).where(table.c.id == id).with_for_update())
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        worker.start()
        if locks:
            for _ in range(3):
                assert looks.acquire(timeout=PATIENCE)
            assert not ran.is_set()
        connection.rollback()
    assert ran.wait(PATIENCE)
    eventually(lambda: worker.summary)
    assert worker.summary is not None
    assert (worker.summary.reason, worker.summary.counts) == ("empty", {"done": 1})


@pytest.mark.parametrize("concurrency", [1, 3, 10])
def test_max_jobs_is_exact(queue: Queue, observer: Engine, concurrency: int) -> None:
    queue.job(name="noop")(lambda: None)
    push(queue, "noop", 12)
    for most in (1, 4):
        worker = Worker(queue, max_jobs=most, concurrency=concurrency)
        assert worker.run() == 0
        assert worker.summary is not None
        assert (worker.summary.reason, worker.summary.counts) == ("max jobs", {"done": most})
    rows = jobs(observer, queue)
    assert len(rows) == 7
    assert all(row["attempts"] == 0 and row["reserved_token"] is None for row in rows)


def test_max_time_lets_the_running_job_finish(queue: Queue) -> None:
    gate = Gate()
    queue.job(name="wait")(gate.pass_through)
    push(queue, "wait", 2)
    worker = Worker(queue, max_time=timedelta(seconds=0.5), concurrency=1)
    worker.start()
    gate.await_arrivals()
    eventually(lambda: worker._shift is not None and worker._shift.reason)
    gate.open()
    eventually(lambda: worker.summary)
    assert worker.summary is not None
    assert (worker.summary.reason, worker.summary.counts) == ("max time", {"done": 1})
    assert queue.pending() == 1


def test_max_memory(queue: Queue) -> None:
    worker = Worker(queue, max_memory=1)
    assert worker.run() == 0
    assert worker.summary is not None
    assert worker.summary.reason == "max memory"


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": 1001},
        {"concurrency": True},
        {"lease": 0.5},
        {"max_jobs": 0},
        {"max_time": -1},
        {"max_memory": 0},
        {"queues": []},
        {"queues": ["a", "a"]},
        {"queues": "no spaces"},
        {"wait_for_database": "long"},
        {"poll_max": 0},
        {"poll_max": "often"},
        {"notify": 1},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Worker(Queue(), **options)


# --- what it says


def test_the_first_line_says_what_is_watched_and_what_is_not(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sqlqueue")
    queue.job(name="mail", queue="mail")(lambda: None)
    queue.job(name="here")(lambda: None)
    work_off(queue, concurrency=3)
    first, *_, last = (record.getMessage() for record in caplog.records)
    assert "queue default, 3 at once" in first
    assert first.endswith("not watched here, although registered jobs go there: mail")
    assert last.startswith("stopped (empty) after ")
    assert last.endswith(": 0 done")


def test_one_line_a_job(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sqlqueue.jobs")

    @queue.job(name="talk")
    def talk(context: JobContext) -> None:
        if context.id == last:
            raise Fail("it was\nthe last one")

    first, last = push(queue, "talk", 2)
    work_off(queue, concurrency=1)
    lines = [record for record in caplog.records if record.name == "sqlqueue.jobs"]
    assert [record.levelname for record in lines] == ["INFO", "ERROR"]
    assert lines[0].getMessage().startswith(f"done {first} talk, attempt 1 of 5 in 0.")
    assert lines[1].getMessage().startswith(f"failed {last} talk, attempt 1 of 5 in 0.")
    assert lines[1].getMessage().endswith(": it was")


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise SystemExit("no disk for logs")


def test_a_log_handler_that_raises_changes_nothing(queue: Queue) -> None:
    loggers = [logging.getLogger(name) for name in ("sqlqueue", "sqlqueue.jobs")]
    handler = Raising()
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        queue.job(name="noop")(lambda: None)
        push(queue, "noop", 10)
        assert work_off(queue).counts == {"done": 10}
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


# --- starting and stopping


def test_stop_lets_the_running_job_finish_and_settles_it(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    queue.job(name="wait")(gate.pass_through)
    push(queue, "wait", 3)
    worker = Worker(queue, concurrency=1)
    worker.start()
    gate.await_arrivals()
    worker.stop(timeout=0)
    assert worker.summary is None
    gate.open()
    worker.stop(PATIENCE)
    assert worker.summary is not None
    assert (worker.summary.reason, worker.summary.counts["done"]) == ("asked to", 1)
    assert [(row["attempts"], row["reserved_token"] is None or row["reserved_until"] is None) for row in jobs(observer, queue)] == [
        (0, True),
        (0, True),
    ]


def test_what_a_claim_under_way_brings_after_the_stop_is_handed_back(
    queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.job(name="never")(lambda: None)
    push(queue, "never", 3)
    worker = Worker(queue)
    claim = queue.consumer.claim

    def late(*arguments: Any, **options: Any) -> Any:
        found = claim(*arguments, **options)
        if found:
            assert worker._shift is not None
            worker._shift.ask_to_stop("while it claimed")
        return found

    monkeypatch.setattr(queue.consumer, "claim", late)
    assert worker.run() == 0
    assert worker.summary is not None
    assert worker.summary.counts == {"returned": 3}
    assert [(row["attempts"], row["reserved_until"]) for row in jobs(observer, queue)] == [(0, None)] * 3
    assert queue.pending() == 3


def test_stop_at_once_after_start_stops(queue: Queue) -> None:
    for _ in range(20):
        worker = Worker(queue)
        worker.start()
        worker.stop(PATIENCE)
        assert worker.summary is not None


def test_stop_before_the_first_run_ends_that_one(queue: Queue) -> None:
    queue.job(name="noop")(lambda: None)
    push(queue, "noop")
    worker = Worker(queue, stop_when_empty=True)
    worker.stop()
    assert worker.run() == 0
    assert queue.pending() == 1
    worker.stop()  # nothing to stop: of no effect on the next run
    assert worker.run() == 0
    assert queue.pending() == 0


def test_a_handler_may_stop_its_worker(queue: Queue) -> None:
    worker = Worker(queue, concurrency=1)
    queue.job(name="stop")(worker.stop)
    push(queue, "stop", 2)
    assert worker.run() == 0
    assert worker.summary is not None
    assert worker.summary.counts["done"] == 1
    assert queue.pending() == 1


def test_one_worker_runs_again_and_again_but_once_at_a_time(queue: Queue) -> None:
    queue.job(name="noop")(lambda: None)
    worker = Worker(queue, stop_when_empty=True)
    for _ in range(2):
        push(queue, "noop", 3)
        assert worker.run() == 0
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 3}
    busy = Worker(queue)
    busy.start()
    for again in (busy.start, busy.run, busy.run_once):
        with pytest.raises(RuntimeError, match="running already"):
            again()
    busy.stop(PATIENCE)
    busy.start()
    busy.stop(PATIENCE)


def test_it_runs_in_a_thread_that_is_not_the_main_one(queue: Queue) -> None:
    queue.job(name="noop")(lambda: None)
    push(queue, "noop", 3)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(Worker(queue, stop_when_empty=True).run()))
    thread.start()
    thread.join(PATIENCE)
    assert codes == [0]
    assert queue.pending() == 0


def test_no_thread_is_left_when_it_has_stopped(queue: Queue) -> None:
    queue.job(name="noop")(lambda: None)
    push(queue, "noop", 20)
    work_off(queue)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("sqlqueue-")] == []


async def test_as_a_context_manager_of_a_lifespan(queue: Queue) -> None:
    ran = threading.Event()
    queue.job(name="noop")(ran.set)
    push(queue, "noop")
    async with Worker(queue) as worker:
        assert ran.wait(PATIENCE)
    assert worker.summary is not None
    assert worker.summary.counts == {"done": 1}


def test_run_once_runs_one_job_in_this_thread(queue: Queue) -> None:
    seen: list[tuple[int, bool]] = []

    @queue.job(name="here")
    def here() -> None:
        seen.append((threading.get_ident(), current_job() is not None))

    push(queue, "here", 2)
    worker = Worker(queue)
    assert worker.run_once()
    assert seen == [(threading.get_ident(), True)]
    assert worker.run_once()
    assert not worker.run_once()
    assert len(seen) == 2
    assert queue.stats() == []


def test_run_once_contains_what_the_handler_does(queue: Queue, observer: Engine) -> None:
    @queue.job(name="leave", max_attempts=1)
    def leave() -> None:
        raise SystemExit(3)

    push(queue, "leave")
    assert Worker(queue).run_once()
    assert [row["error_class"] for row in failures(observer, queue)] == ["SystemExit"]


def test_the_modules_of_the_queue_are_imported_at_the_start(
    database: Any, queue: Queue, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs_of_the_test.py").write_text("raise ZeroDivisionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazy = Queue(database.url, imports=["jobs_of_the_test"])
    with pytest.raises(ZeroDivisionError):
        Worker(lazy).run()
    with pytest.raises(ZeroDivisionError):
        Worker(lazy).run_once()


# --- a fault of our own


@pytest.mark.parametrize("place", ["claim", "settle", "renew", "slot"])
def test_a_fault_in_any_thread_ends_the_run_with_it(queue: Queue, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    def fault(*arguments: Any, **options: Any) -> Any:
        raise MemoryError(place)

    queue.job(name="noop")(gate.pass_through)
    push(queue, "noop")
    worker = Worker(queue, lease=1)
    if place == "slot":
        monkeypatch.setattr("sqlqueue._worker.crew.run_delivery", fault)
    else:
        monkeypatch.setattr(queue.consumer, place, fault)
    if place != "renew":
        gate.open()
    with pytest.raises(MemoryError, match=place):
        worker.run()
    gate.open()
    assert worker.summary is not None
    assert worker.summary.reason == "error"


def test_what_has_ended_is_settled_when_the_worker_has_to_stop(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    queue.job(name="wait")(gate.pass_through)
    push(queue, "wait")
    worker = Worker(queue, concurrency=1)

    def die() -> None:
        gate.await_arrivals()
        shift = worker._shift
        assert shift is not None
        settle = queue.consumer.settle

        def slow(*arguments: Any, **options: Any) -> Any:
            shift.die(MemoryError("elsewhere"))
            return settle(*arguments, **options)

        monkeypatch.setattr(queue.consumer, "settle", slow)
        gate.open()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(MemoryError, match="elsewhere"):
        worker.run()
    thread.join()
    assert jobs(observer, queue) == []


def test_a_handler_that_still_runs_then_is_told(queue: Queue, observer: Engine) -> None:
    gate = Gate()
    contexts: list[JobContext] = []

    @queue.job(name="wait")
    def wait(context: JobContext) -> None:
        contexts.append(context)
        gate.pass_through()

    push(queue, "wait")
    worker = Worker(queue)
    worker.start()
    gate.await_arrivals()
    assert worker._shift is not None
    worker._shift.die(MemoryError("elsewhere"))
    with pytest.raises(MemoryError, match="elsewhere"):
        worker.stop(PATIENCE)
    assert contexts[0].lost
    gate.open()
    assert [row["attempts"] for row in jobs(observer, queue)] == [1]
