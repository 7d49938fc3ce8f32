"""
Handlers that do what no handler should: the next jobs run, and what this one did is recorded.
"""

from __future__ import annotations

import contextlib
import decimal
import gc
import io
import locale
import logging
import os
import signal
import socket
import sys
import textwrap
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.pool import NullPool

from sqlqueue import Delivery, Fixed, JobContext, Queue, Release, Worker
from sqlqueue._dialects import server_of
from sqlqueue._executor import Status
from tests.rows import lock_of
from tests.servers import Database
from tests.test_cli_work import Process as Program
from tests.test_executor import run
from tests.workers import PATIENCE, eventually, jobs, push, work_off, working

# --- what they raise


class Refusing(Exception):
    def __getattribute__(self, name: str) -> NoReturn:
        raise RuntimeError(f"who asks for {name}?")


class WithoutCause(Exception):
    @property
    def __cause__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no cause")


class WithoutContext(Exception):
    @property
    def __context__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no context")


class WithoutClass(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no class")


class WithoutTraceback(Exception):
    @property
    def __traceback__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no traceback")


class Incomparable:
    def __eq__(self, other: object) -> NoReturn:
        raise RuntimeError("nothing is like me")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        sys.exit(3)


class Unplaced(Exception):
    __module__ = Incomparable()  # type: ignore[assignment]


class Annotated(Exception):
    def __init__(self) -> None:
        self.__notes__ = [Incomparable(), 3, "a note"]  # type: ignore[list-item]


class Unnoted(Exception):
    @property
    def __notes__(self) -> NoReturn:  # type: ignore[override]
        sys.exit(3)


class Members(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> NoReturn:
        raise RuntimeError("no members")


class Undecided(Release):
    def __init__(self) -> None:
        pass

    @property
    def delay(self) -> NoReturn:  # type: ignore[override]
        sys.exit(3)


def members() -> Members:
    return Members("several", [ValueError("one")])


@pytest.mark.parametrize(
    "make",
    [
        MemoryError,
        GeneratorExit,
        StopIteration,
        Annotated,
        Unnoted,
        WithoutTraceback,
        Refusing,
        WithoutCause,
        WithoutContext,
        WithoutClass,
        Unplaced,
        members,
        Undecided,
    ],
)
def test_whatever_an_exception_does_when_it_is_looked_at_it_is_the_jobs_failure(make: Callable[[], BaseException]) -> None:
    def handler() -> NoReturn:
        raise make()

    for attempt, status in ((1, Status.RETRYING), (3, Status.FAILED)):
        ended = None
        with contextlib.suppress(BaseException):  # what comes through would end pytest, too
            ended = run(Queue(), handler, attempt=attempt)
        assert ended is not None, "it came through"
        assert ended.status is status


# --- what they change in the process


@pytest.fixture
def same_process_after(tmp_path: Path) -> Iterator[None]:
    """Put back what the handlers of these tests change."""
    folder, streams, environment = os.getcwd(), (sys.stdin, sys.stdout, sys.stderr), dict(os.environ)
    umask, timeout, hooks = os.umask(0o022), socket.getdefaulttimeout(), (threading.excepthook, sys.excepthook, sys.unraisablehook)
    numbers, interval, raising, disabled = (
        locale.setlocale(locale.LC_ALL),
        sys.getswitchinterval(),
        logging.raiseExceptions,
        logging.root.manager.disable,
    )
    with warnings.catch_warnings():
        yield
    os.chdir(folder)
    os.umask(umask)
    sys.stdin, sys.stdout, sys.stderr = streams
    os.environ.clear()
    os.environ.update(environment)
    socket.setdefaulttimeout(timeout)
    threading.excepthook, sys.excepthook, sys.unraisablehook = hooks
    locale.setlocale(locale.LC_ALL, numbers)
    sys.setswitchinterval(interval)
    logging.raiseExceptions = raising
    logging.disable(disabled)
    gc.enable()


class Unwritable(io.StringIO):
    def write(self, text: str) -> NoReturn:
        raise RuntimeError("not a word")


def unwritable_streams() -> None:
    sys.stdout = sys.stderr = Unwritable()


def no_streams() -> None:
    sys.stdin = sys.stdout = sys.stderr = None


def closed_streams() -> None:
    sys.stdout = sys.stderr = io.StringIO()
    sys.stderr.close()


def raising_hooks() -> None:
    def hook(*arguments: object) -> NoReturn:
        raise RuntimeError("hook")

    threading.excepthook = sys.excepthook = sys.unraisablehook = hook


def other_decimals() -> None:
    decimal.getcontext().prec = 1
    decimal.getcontext().traps[decimal.Inexact] = True


CHANGES: dict[str, Callable[[], object]] = {
    "the folder": lambda: os.chdir("/"),
    "the umask": lambda: os.umask(0o777),
    "the environment": os.environ.clear,
    "the locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "unwritable streams": unwritable_streams,
    "closed streams": closed_streams,
    "no streams": no_streams,
    "logging off": lambda: logging.disable(logging.CRITICAL),
    "logging on": lambda: logging.disable(logging.NOTSET),
    "logging shut down": logging.shutdown,
    "warnings": lambda: warnings.simplefilter("error"),
    "time-outs": lambda: socket.setdefaulttimeout(0.000_001),
    "no garbage collection": gc.disable,
    "hooks": raising_hooks,
    "decimals": other_decimals,
    "long turns": lambda: sys.setswitchinterval(0.1),
}


@pytest.mark.usefixtures("same_process_after")
def test_what_a_handler_changes_in_the_process_does_not_reach_the_next_jobs(
    queue: Queue, observer: Engine, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Each change is followed by a job that pushes another one. Every transaction opens a connection of its own."""
    queue = Queue(sa.create_engine(database.url, poolclass=NullPool))
    log, ran = logging.getLogger("sqlqueue"), Counter[str]()
    handler = logging.StreamHandler(Unwritable())
    handler.handleError = raise_again  # type: ignore[method-assign]

    @queue.job(name="change")
    def change(what: str) -> None:
        CHANGES[what]()

    @queue.job(name="pushes")
    def pushes() -> None:
        with queue.begin() as session:
            pushed.push(session)

    @queue.job(name="pushed")
    def pushed() -> None:
        ran["pushed"] += 1

    with queue.begin() as session:
        for what in CHANGES:
            change.push(session, what)
            pushes.push(session)
    caplog.set_level(logging.INFO, "sqlqueue")  # one line a job
    log.addHandler(handler)
    try:
        assert work_off(queue, concurrency=1).counts == {"done": 3 * len(CHANGES)}
    finally:
        log.removeHandler(handler)
    assert ran["pushed"] == len(CHANGES)
    assert jobs(observer, queue) == []


def raise_again(record: logging.LogRecord) -> NoReturn:
    raise RuntimeError("the log is full")


def change_signal_handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def change_wakeup() -> None:
    signal.set_wakeup_fd(-1)


@pytest.mark.parametrize("change", [change_signal_handler, change_wakeup])
def test_a_handler_cannot_change_signal_handlers(queue: Queue, observer: Engine, change: Callable[[], None]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    queue.job(name="deaf", backoff=Fixed(3600))(change)
    push(queue, "deaf")
    assert work_off(queue).counts == {"retrying": 1}
    assert "main thread" in jobs(observer, queue)[0]["last_error"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.databases("sqlite")
@pytest.mark.usefixtures("same_process_after")
@pytest.mark.parametrize("later", ["push", "claim"])
def test_a_relative_path_means_the_folder_in_which_the_queue_was_made(
    queue: Queue, database: Database, later: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    mine = Queue(f"sqlite:///{Path(sa.make_url(database.url).database or '').name}")
    mine.job(name="noop")(lambda: None)

    @mine.job(name="move")
    def move() -> None:
        os.chdir(elsewhere)
        if later == "push":  # the first one over the queue's own sessions
            push(mine, "noop")

    with Queue(database.url).begin() as session:
        move.push(session)
    if later == "claim":
        move()
    try:
        assert work_off(mine).counts == {"done": 2 if later == "push" else 1}
    finally:
        mine.consumer.close()
    assert list(elsewhere.iterdir()) == []


# --- what they leave open


def in_hand(engine: Engine, connection: sa.Connection) -> Callable[[], None]:
    return connection.close


def in_the_pool(engine: Engine, connection: sa.Connection) -> Callable[[], None]:
    """Another job gets the connection in the middle of a transaction, and commits."""
    engine.pool._reset_on_return = None
    connection.connection.close()

    def use() -> None:
        found = engine.raw_connection()
        found.commit()
        found.close()

    return use


def in_a_circle(engine: Engine, connection: sa.Connection) -> Callable[[], None]:
    circle: list[Any] = [connection]
    circle.append(circle)

    def collect() -> None:
        gc.collect()

    return collect


@pytest.mark.parametrize("leave", [in_hand, in_the_pool, in_a_circle])
def test_a_transaction_that_is_left_open_keeps_one_job_waiting_until_somebody_ends_it(
    queue: Queue, engine: Engine, observer: Engine, leave: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the job's own row where rows have locks, the whole database elsewhere."""
    opened, waiting = threading.Event(), threading.Event()
    ends: list[Callable[[], None]] = []
    ran: list[str] = []
    table, settle = queue.tables.jobs, queue.consumer.settle
    rows = server_of(queue.consumer.engine.dialect).row_locks

    def watched(group: Any, **options: Any) -> Any:
        if not rows:
            waiting.set()  # it will not come back before the lock is free
        results = settle(group, **options)
        if results.blocked:
            waiting.set()
        return results

    monkeypatch.setattr(queue.consumer, "settle", watched)

    @queue.job(name="untidy", max_attempts=1)
    def untidy(context: JobContext) -> None:
        ran.append("untidy")
        connection = engine.connect()
        if rows:
            connection.execute(lock_of(table, table.c.id == context.id)).all()
        else:
            connection.execute(sa.update(table).values(priority=table.c.priority))
        ends.append(leave(engine, connection))
        opened.set()

    @queue.job(name="tidy", max_attempts=1)
    def tidy() -> None:
        ran.append("tidy")
        assert opened.wait(PATIENCE)
        assert waiting.wait(PATIENCE), "nothing had to wait"
        ends[0]()

    push(queue, "untidy")
    push(queue, "tidy")
    gc.disable()  # so that the circle lives until somebody looks for it
    try:
        assert work_off(queue, concurrency=2, max_time=PATIENCE).counts == {"done": 2}
    finally:
        gc.enable()
        queue.consumer.close()
    assert sorted(ran) == ["tidy", "untidy"]
    assert jobs(observer, queue) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_left_behind_and_dies_is_nobody_s_failure(queue: Queue) -> None:
    threads: list[threading.Thread] = []
    end = threading.Event()

    def die() -> None:
        end.wait(PATIENCE)
        raise RuntimeError("nobody hears me")

    @queue.job(name="leaves")
    def leaves() -> None:
        thread = threading.Thread(target=die)
        thread.start()
        threads.append(thread)

    push(queue, "leaves")
    with working(queue) as worker:
        eventually(lambda: threads)
        end.set()
        threads[0].join(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 1}


THREADS = """
    import threading

    from sqlqueue import Queue

    queue = Queue()

    @queue.job(name="leaves")
    def leaves(daemon: bool | None) -> None:
        threading.Thread(target=threading.Event().wait, name="left-behind", daemon=daemon).start()
"""


@pytest.fixture
def leaving(tmp_path: Path) -> Iterator[Callable[[bool | None], Program]]:
    """A worker whose job starts a thread that never ends; the worker stops when it has run."""
    queue = Queue(f"sqlite:///{tmp_path}/queue.db")
    queue.metadata.create_all(queue.consumer.engine)
    (tmp_path / "shop.py").write_text(textwrap.dedent(THREADS))
    started: list[Program] = []

    def start(daemon: bool | None) -> Program:
        with queue.begin() as session:
            queue.push_named(session, "leaves", {"daemon": daemon})
        started.append(Program(tmp_path, "work", "--app", "shop:queue", "--url", f"sqlite:///{tmp_path}/queue.db", "--stop-when-empty"))
        return started[0]

    yield start
    queue.consumer.close()
    for program in started:
        program.process.kill()
        with program.process:  # closes its streams
            program.process.wait()


def test_a_thread_that_is_left_behind_does_not_keep_the_process(leaving: Callable[[bool | None], Program]) -> None:
    """It is a daemon as the thread that started it, unless the handler says otherwise."""
    code, lines = leaving(None).wait()
    assert code == 0
    assert "1 done" in lines[-1]


def test_a_thread_that_keeps_the_process_is_named_and_a_signal_ends_it(leaving: Callable[[bool | None], Program], tmp_path: Path) -> None:
    program = leaving(False)
    assert program.process.stderr is not None
    lines = iter(program.process.stderr.readline, "")
    assert any("1 done" in line for line in lines)
    watch = threading.Timer(2, program.process.kill)  # without a word, the line would never come
    watch.start()
    assert any("left-behind" in line for line in lines)
    watch.cancel()
    program.send(signal.SIGTERM)
    assert program.process.wait(PATIENCE) == 1


def test_a_handler_that_claims_and_settles_behind_its_worker_s_back(queue: Queue, observer: Engine) -> None:
    """Its own job included: what is then left of its settlement is stale, and nothing else is touched."""
    seen: list[Delivery] = []

    @queue.job(name="meddles")
    def meddles(context: JobContext) -> None:
        with observer.connect() as connection:
            connection.execute(sa.delete(queue.tables.jobs).where(queue.tables.jobs.c.id == context.id))
        seen.extend(queue.claim("other"))
        queue.complete(seen[0])

    queue.job(name="noop")(lambda: None)
    push(queue, "meddles")
    push(queue, "noop", queue="other")
    worker = Worker(queue, concurrency=1, stop_when_empty=True)
    assert worker.run() == 0
    assert worker.summary is not None
    assert worker.summary.counts == {"lost": 1}
    assert len(seen) == 1
    assert jobs(observer, queue) == []
