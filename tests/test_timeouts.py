"""
Handlers that run longer than they may.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import gc
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sqlqueue import Delivery, Discard, Fail, Fixed, JobContext, JobTimeout, OptionError, Queue, Reason, Release, Worker
from sqlqueue import _timeouts as timeouts
from sqlqueue._driver.settle import Move
from sqlqueue._executor import Status, run_delivery
from sqlqueue._timeouts import ThreadWatch, Timeouts, Watch
from tests.acceptance.processes import Site, site_on
from tests.producers import ORDERS, make_orders
from tests.servers import Database
from tests.test_executor import error_of, run
from tests.workers import PATIENCE, Gate, eventually, failures, jobs, push, work_off, working

SHORT = 0.05
SECRET = "hunter2"


@pytest.fixture
def plain() -> Queue:
    return Queue()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler has a tenth of a second to react."""
    monkeypatch.setattr(timeouts, "PATIENCE", 0.1)


def delivery(number: int = 7) -> Delivery:
    return Delivery(number, "tested", "default", {}, 1, 3, "token", datetime.now(UTC), {})


def wait_for_ever() -> None:
    while True:
        time.sleep(0.001)


# --- what the handler makes of it


def test_a_handler_that_lets_it_pass_has_timed_out(plain: Queue) -> None:
    ended = run(plain, wait_for_ever, timeout=SHORT, backoff=Fixed(60))
    assert ended.status is Status.RETRYING
    assert error_of(ended) == "sqlqueue.errors.JobTimeout: the handler ran longer than its timeout of 0.05 s"


def test_a_timedelta_is_a_timeout_too(plain: Queue) -> None:
    assert "0.05 s" in error_of(run(plain, wait_for_ever, timeout=timedelta(seconds=SHORT)))


@pytest.mark.parametrize("options", [{"fail_on_timeout": True}, {"attempt": 3}])
def test_it_fails_when_asked_to_or_with_the_last_attempt(plain: Queue, options: dict[str, Any]) -> None:
    ended = run(plain, wait_for_ever, timeout=SHORT, **options)
    assert isinstance(ended.outcome, Move)
    assert ended.outcome.failure.reason is Reason.TIMED_OUT
    assert ended.outcome.failure.error_class == "sqlqueue.errors.JobTimeout"


def test_other_errors_are_retried_all_the_same(plain: Queue) -> None:
    assert run(plain, lambda: 1 / 0, timeout=60, fail_on_timeout=True).status is Status.RETRYING


def test_a_handler_may_clean_up_and_be_done(plain: Queue) -> None:
    cleaned = []

    def handler() -> None:
        try:
            wait_for_ever()
        except TimeoutError:  # JobTimeout is one
            cleaned.append(True)

    assert run(plain, handler, timeout=SHORT).status is Status.DONE
    assert cleaned == [True]


@pytest.mark.parametrize("how", ["raised", "returned"])
@pytest.mark.parametrize(
    ("outcome", "status"), [(Release(5), Status.RELEASED), (Fail("enough"), Status.FAILED), (Discard(), Status.DISCARDED)]
)
def test_an_outcome_raised_in_consequence_counts_as_such(plain: Queue, how: str, outcome: Exception, status: Status) -> None:
    def handler() -> object:
        try:
            wait_for_ever()
        except JobTimeout:
            if how == "raised":
                raise outcome from None
        return outcome

    ended = run(plain, handler, timeout=SHORT, fail_on_timeout=True)
    assert ended.status is status
    if isinstance(ended.outcome, Move):
        assert ended.outcome.failure.reason is Reason.FAILED_BY_JOB


def test_an_error_that_a_driver_makes_of_it_is_a_timeout(plain: Queue) -> None:
    def handler() -> None:
        try:
            wait_for_ever()
        except OSError as error:  # as PyMySQL does
            raise ConnectionError("lost") from error

    ended = run(plain, handler, timeout=SHORT, fail_on_timeout=True)
    assert isinstance(ended.outcome, Move)
    assert (ended.outcome.failure.reason, ended.outcome.failure.message) == (Reason.TIMED_OUT, "lost")


def test_an_unrelated_error_after_it_was_caught_is_none(plain: Queue) -> None:
    def handler() -> None:
        with contextlib.suppress(JobTimeout):
            wait_for_ever()
        raise ValueError("something else")

    assert run(plain, handler, timeout=SHORT, fail_on_timeout=True).status is Status.RETRYING


def test_a_handler_that_is_quick_hears_nothing(plain: Queue) -> None:
    assert run(plain, lambda: None, timeout=60).status is Status.DONE
    assert not any(thread.name == "sqlqueue-timeouts" for thread in threading.enumerate())


def test_no_thread_watches_handlers_without_a_timeout(queue: Queue) -> None:
    seen: list[bool] = []
    queue.job(name="look")(lambda: seen.append(any(thread.name == "sqlqueue-timeouts" for thread in threading.enumerate())))
    push(queue, "look")
    work_off(queue)
    assert seen == [False]


# --- it comes between the handler's own lines, and nowhere else


LONGEST = 10_000  # rounds of a loop: several times as long as it takes to switch to another thread


class Hammer(Timeouts):
    """Interrupts at random moments, without a clock."""

    def __init__(self) -> None:
        super().__init__()
        self._targets: SimpleQueue[tuple[Watch, int, SimpleQueue[None]] | None] = SimpleQueue()
        self._hammering = threading.Thread(target=self._hammer, daemon=True)
        self._hammering.start()

    def add(self, watch: Watch) -> None:
        self._met: SimpleQueue[None] = SimpleQueue()  # another one each time: the last handler may not have come to it
        self._targets.put((watch, random.randrange(LONGEST), self._met))

    def meet(self) -> None:
        """In the handler: both begin."""
        self._met.get(timeout=PATIENCE)

    def close(self) -> None:
        self._targets.put(None)
        self._hammering.join(PATIENCE)

    def _hammer(self) -> None:
        while (target := self._targets.get()) is not None:
            watch, pause, met = target
            met.put(None)
            spin(pause)
            for _ in range(20):
                if watch.interrupt():
                    break


@pytest.fixture
def hammer() -> Iterator[Hammer]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    gc.disable()  # an exception that comes into the callback of a weak reference is printed and forgotten
    hammer = Hammer()
    try:
        yield hammer
    finally:
        hammer.close()
        gc.enable()
        sys.setswitchinterval(interval)


ENDS = {"returned", "interrupted", "raised"}


def spin(rounds: int) -> int:
    for _ in range(rounds):
        pass
    return rounds


def test_it_never_comes_after_the_end_of_the_handler(hammer: Hammer) -> None:
    ends: Counter[str] = Counter()

    def handler(rounds: int) -> int:
        hammer.meet()
        spin(rounds)
        if rounds % 5 == 0:
            raise LookupError
        return rounds

    for number in range(20_000):
        if number >= 2_000 and min(ends[end] for end in ENDS) >= 10:
            break
        rounds = random.randrange(LONGEST)
        watch = ThreadWatch(hammer, 1, delivery())
        try:
            assert watch.around(lambda rounds=rounds: handler(rounds)) == rounds  # type: ignore[misc]
            ends["returned"] += 1
        except JobTimeout as error:
            ends["interrupted" if watch.fired and error.args == (watch.text,) else "confused"] += 1
        except LookupError:
            ends["raised"] += 1
        spin(1000)  # what is still to come would come here
    assert set(ends) == ENDS


def test_it_never_comes_in_the_middle_of_a_renewal(hammer: Hammer) -> None:
    begun = whole = interrupted = 0
    for number in range(20_000):
        if number >= 1_000 and min(whole, interrupted) >= 10:
            break
        steps: list[str] = []
        watch = ThreadWatch(hammer, 1, delivery())

        def renew(steps: list[str] = steps) -> bool:
            steps.append("begun")
            spin(LONGEST // 3)
            steps.append("ended")
            return True

        shielded = watch.shielded(renew)

        def handler(shielded: Callable[[], bool] = shielded) -> None:
            hammer.meet()
            spin(LONGEST // 3)
            assert shielded()
            spin(LONGEST // 3)

        try:
            watch.around(handler)
        except JobTimeout:
            interrupted += 1
        begun += "begun" in steps
        whole += "ended" in steps
    assert begun == whole > 0
    assert interrupted > 0


class AtOpcode:
    """
    Interrupts a run at one of the opcodes at which Python looks whether it should, those of the handler and of the lines around it
    counted together.
    """

    def __init__(self, watch: ThreadWatch, number: int, timer: ThreadPoolExecutor) -> None:
        self._watch = watch
        self._timer = timer
        self.left = number
        self._opcodes: dict[Any, str] = {}
        self._sources = (timeouts.__file__, __file__)

    def run(self, handler: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return self._watch.around(handler)
        finally:
            sys.settrace(before)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._sources or frame.f_code.co_name == "run":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self._has_looked(frame):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self._interrupt()
        return self._trace

    def _has_looked(self, frame: Any) -> bool:
        before = self._opcodes.get(frame, "RESUME")
        self._opcodes[frame] = now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return now != "PUSH_EXC_INFO" and before.startswith(("RESUME", "CALL", "JUMP_BACKWARD"))

    def _interrupt(self) -> None:
        asked: SimpleQueue[bool] = SimpleQueue()
        self._timer.submit(lambda: asked.put(self._watch.interrupt()))
        asked.get()


class NoClock(Timeouts):
    def add(self, watch: Watch) -> None: ...


@pytest.mark.parametrize("kind", ["returns", "raises", "swallows", "renews"])
def test_wherever_it_is_raised_nothing_is_left_of_it(kind: str) -> None:
    steps: list[str] = []

    def handler() -> str:
        steps.append("begun")
        if kind == "raises":
            raise LookupError
        with contextlib.suppress(JobTimeout) if kind == "swallows" else contextlib.nullcontext():
            spin(1)
        if kind == "renews":
            shielded()
        steps.append("ended")
        return kind

    ends: Counter[str] = Counter()
    number, there_are_more = 0, True
    with ThreadPoolExecutor(1) as timer:
        while there_are_more:
            number += 1
            steps.clear()
            watch = ThreadWatch(NoClock(), 1, delivery())
            shielded = watch.shielded(lambda: True)
            run = AtOpcode(watch, number, timer)
            try:
                assert run.run(handler) == kind
                assert steps == ["begun", "ended"]
                ends["returned"] += 1
            except JobTimeout:
                assert watch.fired
                ends["interrupted"] += 1
            except LookupError:
                ends["raised"] += 1
            spin(10)  # what is still to come would come here
            assert not watch._take(), "somebody could still interrupt"
            assert sys.exc_info() == (None, None, None)
            there_are_more = run.left <= 0
    assert ends["interrupted"] >= 3
    assert ends["raised" if kind == "raises" else "returned"] >= 3


def test_the_context_that_a_handler_renews_with_is_shielded(plain: Queue) -> None:
    renewed: list[bool] = []

    def renew() -> bool:
        time.sleep(3 * SHORT)
        renewed.append(True)
        return True

    @plain.job(name="tested", timeout=SHORT)
    def tested(context: JobContext) -> None:
        context.renew()
        wait_for_ever()

    context = JobContext(id=7, name="tested", queue="default", attempt=1, max_attempts=3, _renew=renew)
    assert "JobTimeout" in error_of(run_delivery(plain, delivery(), context, "worker"))
    assert renewed == [True]


# --- async handlers


def test_an_async_handler_is_cancelled(plain: Queue) -> None:
    seen: list[str] = []

    async def handler() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cleaned")

    ended = run(plain, handler, timeout=SHORT)
    assert error_of(ended) == "sqlqueue.errors.JobTimeout: the handler ran longer than its timeout of 0.05 s"
    assert seen == ["cleaned"]


def test_what_an_async_handler_makes_of_it_is_the_outcome(plain: Queue) -> None:
    def that(answer: Any) -> Any:
        async def handler() -> object:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if isinstance(answer, Exception):
                    raise answer from None
            return None

        return handler

    assert run(plain, that(None), timeout=SHORT).status is Status.DONE
    assert run(Queue(), that(Release(5)), timeout=SHORT).status is Status.RELEASED
    ended = run(Queue(), that(ValueError("on purpose")), timeout=SHORT, fail_on_timeout=True)
    assert (ended.status, error_of(ended)) == (Status.RETRYING, "ValueError: on purpose")


def test_a_cancellation_of_its_own_is_no_timeout(plain: Queue) -> None:
    async def handler() -> None:
        raise asyncio.CancelledError

    ended = run(plain, handler, timeout=60, fail_on_timeout=True)
    assert "CancelledError" in error_of(ended)


# --- in a worker


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_failed_table_says_that_it_timed_out(queue: Queue, observer: Engine, kind: str) -> None:
    async def sleep_for_ever() -> None:
        await asyncio.sleep(60)

    queue.job(name="slow", timeout=SHORT, max_attempts=2, backoff=Fixed(0))(wait_for_ever if kind == "sync" else sleep_for_ever)
    push(queue, "slow")
    assert work_off(queue).counts == {"retrying": 1, "failed": 1}
    (row,) = failures(observer, queue)
    assert (row["reason"], row["attempts"]) == ("timed_out", 2)
    assert row["error_class"] == "sqlqueue.errors.JobTimeout"
    assert "timeout of 0.05 s" in row["error_message"]


def test_a_route_sets_the_timeout_of_jobs_that_wait(queue: Queue, observer: Engine) -> None:
    queue.job(name="slow", timeout=60)(wait_for_ever)
    push(queue, "slow")
    queue.route("slow", timeout=SHORT, fail_on_timeout=True)
    assert work_off(queue).counts == {"failed": 1}
    assert failures(observer, queue)[0]["reason"] == "timed_out"


def test_many_timeouts_beside_each_other_hit_the_right_jobs(queue: Queue, observer: Engine) -> None:
    @queue.job(name="sometimes", max_attempts=1, timeout=0.1)
    def sometimes(is_slow: bool) -> None:
        if is_slow:
            wait_for_ever()

    with queue.begin() as session:
        slow = {sometimes.push(session, number % 10 == 0).id for number in range(200) if number % 10 == 0}
        for _ in range(180):
            sometimes.push(session, False)
    assert work_off(queue, concurrency=5).counts == {"done": 180, "failed": 20}
    assert {row["id"] for row in failures(observer, queue)} == slow


def test_drain_keeps_to_timeouts(queue: Queue) -> None:
    queue.job(name="slow", timeout=SHORT, fail_on_timeout=True)(wait_for_ever)
    push(queue, "slow")
    (ran,) = queue.drain()
    assert (str(ran.status), type(ran.error)) == ("failed", JobTimeout)


# --- what it leaves in a database


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_transactional_handler_that_was_told_commits_nothing(queue: Queue, engine: Engine, observer: Engine, swallowed: bool) -> None:
    make_orders(observer)
    drivers: list[Any] = []

    @queue.job(name="write", timeout=0.1, max_attempts=2, backoff=Fixed(0))
    def write(context: JobContext, session: Session) -> None:
        session.execute(ORDERS.insert().values(id=context.attempt, note=""))
        drivers.append(session.connection().connection.driver_connection)
        if context.attempt == 1:
            with contextlib.suppress(JobTimeout) if swallowed else contextlib.nullcontext():
                wait_for_ever()

    push(queue, "write")
    assert work_off(queue).counts == {"retrying": 1, "done": 1}
    assert drivers[0] is not drivers[1]
    with observer.connect() as connection:
        assert list(connection.scalars(sa.select(ORDERS.c.id))) == [2]


SLEEPS = {"postgresql": "SELECT pg_sleep(0.3)", "mysql": "SELECT SLEEP(0.3)", "mariadb": "SELECT SLEEP(0.3)"}


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_a_connection_that_was_in_an_exchange_is_not_used_again(queue: Queue, engine: Engine, observer: Engine) -> None:
    answers: list[Any] = []

    @queue.job(name="ask", timeout=0.1, max_attempts=1)
    def ask(session: Session) -> None:
        session.execute(sa.text(SLEEPS[engine.dialect.name]))
        wait_for_ever()

    @queue.job(name="own", timeout=0.1, max_attempts=1)
    def own() -> None:
        with engine.connect() as connection:
            for _ in range(50):
                connection.execute(sa.text(SLEEPS[engine.dialect.name]))

    @queue.job(name="check", max_attempts=1)
    def check(session: Session, number: int) -> None:
        answers.append(session.scalar(sa.select(sa.literal(number, sa.Integer))))

    for number in range(3):
        with queue.begin() as session:
            ask.push(session)
            own.push(session)
            check.push(session, number)
        assert work_off(queue, concurrency=1).counts == {"failed": 2, "done": 1}
    assert answers == [0, 1, 2]
    assert {row["reason"] for row in failures(observer, queue)} == {"timed_out"}


# --- handlers that do not react


@pytest.mark.usefixtures("impatient")
def test_a_thread_that_does_not_react_keeps_its_slot_and_lease_and_is_logged_once(
    queue: Queue, observer: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    @queue.job(name="deaf", timeout=SHORT, max_attempts=1)
    def deaf(text: str) -> None:
        with contextlib.suppress(JobTimeout):
            wait_for_ever()
        gate.pass_through()

    with queue.begin() as session:
        id = deaf.push(session, SECRET).id
    with caplog.at_level(logging.ERROR, "sqlqueue"), working(queue, lease=3):
        line = eventually(lambda: next((text for text in caplog.messages if "is stuck" in text), None))
        assert line.startswith(f"job {id} (deaf) is stuck: its timeout of 0.05 s ended 0.1 s ago")
        assert "pass_through" in line
        assert SECRET not in line
        (row,) = jobs(observer, queue)
        first = row["reserved_until"]
        eventually(lambda: jobs(observer, queue)[0]["reserved_until"] > first, "its lease is renewed")
        gate.open()
        eventually(lambda: not jobs(observer, queue))
    assert sum("is stuck" in text for text in caplog.messages) == 1
    assert failures(observer, queue) == []


@pytest.mark.usefixtures("impatient")
def test_an_async_handler_that_swallows_the_cancellation_is_logged(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    come = threading.Event()

    async def linger() -> None:
        while not come.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    @queue.job(name="deaf", timeout=SHORT)
    async def deaf() -> None:
        await linger()

    push(queue, "deaf")
    with caplog.at_level(logging.ERROR, "sqlqueue"), working(queue):
        line = eventually(lambda: next((text for text in caplog.messages if "is stuck" in text), None))
        come.set()
    assert "linger (" in line
    assert "deaf (" in line


@pytest.mark.usefixtures("impatient")
def test_an_async_handler_that_blocks_the_loop_is_logged_with_its_place(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()

    @queue.job(name="blocking", timeout=SHORT)
    async def blocking() -> None:
        gate.pass_through()

    push(queue, "blocking")
    with caplog.at_level(logging.ERROR, "sqlqueue"), working(queue):
        line = eventually(lambda: next((text for text in caplog.messages if "is stuck" in text), None))
        gate.open()
    assert "pass_through (" in line


@pytest.mark.usefixtures("impatient")
def test_a_worker_may_end_when_a_job_is_stuck_once_the_others_are_done(
    queue: Queue, observer: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    gate, other = Gate(), Gate()

    @queue.job(name="deaf", timeout=SHORT, max_attempts=2)
    def deaf() -> None:
        with contextlib.suppress(JobTimeout):
            wait_for_ever()
        gate.pass_through()

    queue.job(name="other")(other.pass_through)
    (stuck,) = push(queue, "deaf")
    push(queue, "other")
    worker = Worker(queue, exit_on_stuck=True, concurrency=2)
    codes: list[int] = []
    running = threading.Thread(target=lambda: codes.append(worker.run()))
    with caplog.at_level(logging.INFO, "sqlqueue"):
        running.start()
        other.await_arrivals()
        eventually(lambda: f"job {stuck} (deaf) is stuck: no more jobs are taken, 2 are running" in caplog.text)
        (late,) = push(queue, "other")
        other.open()
        running.join(PATIENCE)
    gate.open()
    assert codes == [1]
    assert worker.summary is not None
    assert worker.summary.counts["done"] == 1
    assert f"job {stuck} (deaf) is left behind" in caplog.text
    left = {row["id"]: row for row in jobs(observer, queue)}
    assert set(left) == {stuck, late}
    assert (left[stuck]["attempts"], left[stuck]["reserved_until"] is None) == (1, False)
    assert (left[late]["attempts"], left[late]["reserved_until"]) == (0, None)


@pytest.fixture
def site(queue: Queue, database: Database, observer: Engine, tmp_path: Path) -> Iterator[Site]:
    with site_on(queue, database, observer, tmp_path) as site:
        yield site


@pytest.mark.databases("sqlite")
def test_the_program_ends_when_a_job_is_stuck(database: Database, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(
        "import contextlib, time\n"
        "from sqlqueue import JobTimeout, Queue, _timeouts\n"
        "_timeouts.PATIENCE = 0.1\n"
        f"queue = Queue({database.url!r})\n"
        "@queue.job(name='deaf', timeout=0.05)\n"
        "def deaf():\n"
        "    while True:\n"
        "        with contextlib.suppress(JobTimeout):\n"
        "            time.sleep(0.01)\n"
    )
    with queue.begin() as session:
        queue.push_named(session, "deaf", {})
    program = [sys.executable, "-m", "sqlqueue", "work", "--app", "deaf:queue", "--exit-on-stuck", "--async-concurrency", "20"]
    ended = subprocess.run(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert "job 1 (deaf) is stuck: no more jobs are taken" in ended.stderr
    assert "job 1 (deaf) is left behind" in ended.stderr


def test_without_the_option_a_stuck_job_does_not_end_the_worker(site: Site) -> None:
    """A second signal does, and hands it back like any other."""
    (id,) = site.push("linger", 1, {"folder": str(site.folder)})
    process = site.start()
    eventually((site.folder / f"told-{id}").exists)
    process.send(signal.SIGTERM)
    process.await_words("no more jobs are taken, 1 are running")
    process.send(signal.SIGTERM)
    assert process.wait() == 1
    (row,) = jobs(site.observer, site.queue)
    assert (row["attempts"], row["reserved_until"]) == (0, None)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "1", timedelta(0)])
def test_a_timeout_that_is_none_is_refused(plain: Queue, wrong: object) -> None:
    for way in (lambda: plain.job(name="a", timeout=wrong), lambda: plain.route("a", timeout=wrong)):  # type: ignore[call-overload,arg-type]
        with pytest.raises(OptionError, match=r"^timeout"):
            way()


@pytest.mark.parametrize("wrong", [0, 1, "yes"])
def test_a_choice_that_is_none_is_refused(plain: Queue, wrong: object) -> None:
    with pytest.raises(OptionError, match=r"^fail_on_timeout"):
        plain.job(name="a", fail_on_timeout=wrong)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match=r"^exit_on_stuck"):
        Worker(plain, exit_on_stuck=wrong)  # type: ignore[arg-type]


def test_a_handler_that_cannot_be_watched_is_not_called(plain: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(watching: Timeouts, watch: Watch) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Timeouts, "add", refuse)
    called: list[bool] = []
    assert "can't start new thread" in error_of(run(plain, lambda: called.append(True), timeout=1))
    assert called == []
