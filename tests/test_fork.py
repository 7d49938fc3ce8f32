"""
A queue that was in use before a fork, one that is shared between threads, and processes that are started in other ways.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event

from sqlqueue import Queue, Worker
from sqlqueue._dialects import server_of
from tests.rows import in_threads, jobs_in, lock_of
from tests.servers import Database
from tests.workers import PATIENCE, Gate, push, work_off, working

# Newer Pythons warn of what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
]


class Child:
    """A fork of this process that does one thing and ends."""

    def __init__(self, work: Callable[[], Any], folder: Path) -> None:
        self.said = folder / f"child-{len(list(folder.iterdir()))}"
        self.said.touch()
        self.pid = os.fork()
        if self.pid:
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # one that hangs is seen to hang
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            self.said.write_text(traceback.format_exc())
        finally:
            os._exit(code)

    def join(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code == 0, "it hangs" if code == -signal.SIGALRM else self.said.read_text() or f"exit code {code}"


Fork = Callable[[Callable[[], Any]], Child]


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    folder = tmp_path / "children"
    folder.mkdir()
    return lambda work: Child(work, folder)


@pytest.fixture
def own_connections() -> Iterator[None]:
    """To use a connection that another process has opened is an error."""

    def opened(connection: Any, record: Any) -> None:
        record.info["process"] = os.getpid()

    def used(connection: Connection) -> None:
        # Without a note: opened before these tests listened, and never by a queue of theirs.
        if connection.info.get("process", os.getpid()) != os.getpid():
            raise AssertionError("this connection is another process's")

    event.listen(Engine, "connect", opened)
    event.listen(Engine, "begin", used)
    yield
    event.remove(Engine, "connect", opened)
    event.remove(Engine, "begin", used)


@pytest.fixture
def shop(queue: Queue, database: Database, own_connections: None) -> Iterator[Queue]:
    """A queue that knows a URL and has made all of its connections itself."""
    shop = Queue(database.url)
    shop.job(name="noop")(lambda: None)
    yield shop
    shop.consumer.close()


def use(queue: Queue, rounds: int = 1) -> None:
    """Everything that there is: push, claim, renew, settle, look."""
    for _ in range(rounds):
        push(queue, "noop", 2)
        queue.stats()
        for delivery in queue.claim(limit=2, wait=PATIENCE):
            queue.complete(queue.renew(delivery))


def test_a_queue_that_was_in_use_before_a_fork_works_on_both_sides_at_once(shop: Queue, observer: Engine, fork: Fork) -> None:
    """As a server that loads the application once, uses it, and then forks its workers."""
    use(shop)
    push(shop, "noop", 3)
    held = shop.claim()
    children = [fork(lambda: use(shop, 10)) for _ in range(3)]
    use(shop, 10)
    for child in children:
        child.join()
    shop.complete(held[0])
    assert len(jobs_in(observer, shop)) == 2
    use(shop)


def test_a_child_that_only_claims_and_settles_has_connections_of_its_own(shop: Queue, observer: Engine, fork: Fork) -> None:
    push(shop, "noop", 40)
    assert shop.pending() == 40

    def work() -> None:
        assert shop.pending() > 0
        for _ in range(10):
            (delivery,) = shop.claim()
            shop.complete(delivery)

    children = [fork(work) for _ in range(3)]
    work()
    for child in children:
        child.join()
    assert jobs_in(observer, shop) == {}
    assert shop.pending() == 0


def test_an_application_s_own_engine_is_the_application_s_to_renew(
    queue: Queue, engine: Engine, observer: Engine, own_connections: None, fork: Fork
) -> None:
    queue.job(name="noop")(lambda: None)
    use(queue)
    engine.dispose()  # before or after the fork, as SQLAlchemy says

    def work() -> None:
        engine.dispose(close=False)
        use(queue, 5)

    child = fork(work)
    use(queue, 5)
    child.join()
    assert jobs_in(observer, queue) == {}


@pytest.mark.databases("sqlite")
def test_what_a_child_commits_to_a_file_stays_when_the_parent_closes_it(shop: Queue, observer: Engine, engine: Engine, fork: Fork) -> None:
    """With a write-ahead log: whoever believes to be the last to close the file removes the log."""
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    for application in (engine, observer):
        application.dispose()  # what the application has opened it has to close
    assert shop.pending() == 0
    began, closed = Signal(), Signal()

    def work() -> None:
        commit(shop, 1)
        began.send()
        closed.wait()
        commit(shop, 100)

    child = fork(work)
    began.wait()
    shop.consumer.close()
    closed.send()
    child.join()
    assert len(jobs_in(observer, shop)) == 101


class Signal:
    """From one side of a fork to the other."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()

    def send(self) -> None:
        os.write(self._in, b"!")

    def wait(self) -> None:
        assert select.select([self._out], [], [], PATIENCE)[0], "the other side says nothing"
        os.close(self._out)
        os.close(self._in)


def commit(queue: Queue, count: int) -> None:
    for _ in range(count):
        with queue.consumer.engine.begin() as connection:
            queue.push_named(connection, "noop", {})


def test_a_fork_while_another_thread_makes_the_engine(shop: Queue, fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    make = sa.create_engine

    def slowly(*arguments: Any, **options: Any) -> Engine:
        gate.pass_through()
        return make(*arguments, **options)

    monkeypatch.setattr(sa, "create_engine", slowly)
    thread = threading.Thread(target=shop.pending)
    thread.start()
    gate.await_arrivals()
    monkeypatch.undo()
    child = fork(lambda: use_consumer(shop))
    gate.open()
    thread.join(PATIENCE)
    child.join()


def use_consumer(queue: Queue) -> None:
    assert queue.pending() == 0
    assert queue.claim() == []


def test_a_fork_in_the_middle_of_another_thread_s_transaction(shop: Queue, fork: Fork) -> None:
    """Where the database is a server: in a file the child would wait for that thread's lock, which nobody will release."""
    if not server_of(shop.consumer.engine.dialect).row_locks:
        pytest.skip("documented: no fork while a transaction is under way")
    push(shop, "noop")
    gate = Gate()

    def hold(connection: Connection) -> None:
        connection.execute(lock_of(shop.tables.jobs)).all()
        gate.pass_through()

    thread = threading.Thread(target=shop.consumer.write, args=(hold,))
    thread.start()
    gate.await_arrivals()
    child = fork(lambda: use_consumer_beside(shop))
    child.join()
    gate.open()
    thread.join(PATIENCE)
    assert len(shop.claim()) == 1


def use_consumer_beside(queue: Queue) -> None:
    assert queue.pending() == 1
    assert queue.claim() == []  # it is locked


def test_a_worker_that_runs_in_the_parent_is_not_running_in_the_child(shop: Queue, fork: Fork) -> None:
    ran = threading.Event()
    shop.job(name="tell")(ran.set)
    with working(shop) as worker:

        def work() -> None:
            worker.stop()  # as a server does in its own end
            assert Worker(shop, "other", stop_when_empty=True).run() == 0

        fork(work).join()
        push(shop, "tell")
        assert ran.wait(PATIENCE)


def test_a_handler_may_fork(queue: Queue, fork: Fork) -> None:
    """And its child may end as it likes: it has none of the worker's threads, and settles nothing."""
    children: list[Child] = []

    @queue.job(name="forks")
    def forks() -> None:
        children.append(fork(lambda: None))
        children[-1].join()

    push(queue, "forks", 3)
    assert work_off(queue, concurrency=1).counts == {"done": 3}
    assert len(children) == 3


# --- other ways to start a process


def double(number: int) -> int:
    return 2 * number


queue_of_this_module = Queue()
doubled = queue_of_this_module.job(name="doubled")(double)


@queue_of_this_module.job(name="tripled")
def tripled(number: int) -> None:
    sys.exit(3 * number)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_job_may_be_what_another_process_runs(method: str) -> None:
    process = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=tripled, args=(7,)
    )
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 21


# --- threads

THREADS = 20


def test_a_queue_may_be_shared_between_threads_from_its_first_use_on(shop: Queue, observer: Engine) -> None:
    """All at once: the first connections, pushes, claims, settlements and looks."""
    together = threading.Barrier(THREADS)
    pushed, done = Counter[int](), Counter[int]()

    def work(number: int) -> None:
        together.wait(PATIENCE)
        for _ in range(5):
            pushed.update(push(shop, "noop", 2))
            shop.stats()
            for delivery in shop.claim(limit=2):
                shop.complete(delivery)
                done[delivery.id] += 1

    in_threads(THREADS, work)
    for delivery in shop.claim(limit=1000):
        shop.complete(delivery)
        done[delivery.id] += 1
    assert len(pushed) == THREADS * 10
    assert done == pushed
    assert jobs_in(observer, shop) == {}


def test_threads_may_register_at_once() -> None:
    queue = Queue()
    together = threading.Barrier(THREADS)

    def work(number: int) -> None:
        together.wait(PATIENCE)
        for other in range(50):
            queue.job(name=f"job-{number}-{other}")(lambda number: None)
            queue.job(name="shared")(double)
            queue.registry.load()

    in_threads(THREADS, work)
    assert len(queue.registry.queues("default")["default"]) == THREADS * 50 + 1


def test_a_job_that_is_registered_while_a_worker_lists_its_queues(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    options, late = queue.registry.row_options, iter(range(3))

    def meanwhile(*arguments: Any) -> Any:
        for number in late:
            queue.job(name=f"late-{number}")(lambda: None)
        return options(*arguments)

    monkeypatch.setattr(queue.registry, "row_options", meanwhile)
    queue.job(name="early")(lambda: None)
    assert work_off(queue).counts == {}
