"""
PgBouncer in transaction mode, with the settings of docs/deployment.md: each transaction may get another session of the server, and
each session serves everybody.
"""

from __future__ import annotations

import configparser
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from sqlqueue import JobContext, Queue
from sqlqueue.cli import main
from tests.producers import Order, job_ids, make_orders, order_ids
from tests.rows import moment_of
from tests.servers import Database, PgBouncer, Server, find_pgbouncer, needed, pooler_before
from tests.workers import PATIENCE, Gate, eventually, failures, push, work_off, working

MANUAL = (Path(__file__).parent.parent / "docs/deployment.md").read_text()

pytestmark = pytest.mark.databases("postgresql")


def block_of_manual(language: str, word: str) -> str:
    (found,) = (code for code in re.findall(rf"^```{language}\n(.*?)^```$", MANUAL, re.MULTILINE | re.DOTALL) if word in code)
    return str(found)


@pytest.fixture(scope="module")
def pooler(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PgBouncer]:
    needed(find_pgbouncer(), "pgbouncer", server.name)
    settings = configparser.ConfigParser()
    settings.read_string(block_of_manual("ini", "[pgbouncer]"))
    with pooler_before(server.database(tmp_path_factory.mktemp("pooler")), settings["pgbouncer"]) as pooler:
        yield pooler


@pytest.fixture
def one(pooler: PgBouncer, queue: Queue) -> Database:
    """The tables through one session of the server, which everybody shares."""
    return pooler.pool_of(1)


@pytest.fixture
def two(pooler: PgBouncer, queue: Queue) -> Database:
    return pooler.pool_of(2)


def engine_of_manual(database: Database) -> Engine:
    """The producer's engine as the manual makes it, for this database."""
    names: dict[str, Any] = {}
    code, count = re.subn(r"create_engine\(\"[^\"]+\"", f'create_engine("{database.url}"', block_of_manual("python", "create_engine"))
    assert count == 1
    exec(code, names)
    assert isinstance(names["engine"], Engine)
    return names["engine"]


@pytest.fixture
def through(one: Database) -> Iterator[Callable[[], Queue]]:
    """Makes queues with connections of their own, all through the one session of the server."""
    queues: list[Queue] = []

    def make() -> Queue:
        queues.append(Queue(engine_of_manual(one)))
        queues[-1].job(name="note")(lambda: None)
        return queues[-1]

    yield make
    for queue in queues:
        queue.consumer.close()


def state_left(database: Database) -> dict[str, Any]:
    """All that a session of the server remembers after a transaction."""
    with create_engine(database.url, poolclass=NullPool).connect() as connection:
        state = {row.name: row.setting for row in connection.execute(sa.text("SELECT name, setting FROM pg_settings"))}
        state["statements"] = connection.scalar(sa.text("SELECT count(*) FROM pg_prepared_statements"))
        state["locks"] = connection.scalar(sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"))
        state["channels"] = connection.scalar(sa.text("SELECT count(*) FROM pg_listening_channels()"))
        state["session"] = connection.scalar(sa.text("SELECT pg_backend_pid()"))
    return state


def operations(queue: Queue) -> Iterator[Callable[[], Any]]:
    """Whatever a consumer does, one after the other, with something to do it to."""
    push(queue, "note", 5)
    done, failed, released, kept, retried = queue.claim(limit=5)
    yield lambda: queue.claim(limit=5)
    yield lambda: queue.complete(done)
    yield lambda: queue.fail(failed, "no")
    yield lambda: queue.release(released, delay=60)
    yield lambda: queue.renew(kept)
    yield lambda: queue.release(retried, error="no")
    yield lambda: queue.failed.retry(id=failed.id)
    yield lambda: queue.failed.list()
    yield lambda: queue.failed.forget(all=True)
    yield lambda: queue.stats()
    yield lambda: queue.wait_empty(0)
    yield lambda: queue.clear("default")


def restart(pooler: PgBouncer, name: str) -> None:
    pooler.stop()
    pooler.start()


def kill_sessions(pooler: PgBouncer, name: str) -> None:
    pooler.order(f"KILL {name}")
    pooler.order(f"RESUME {name}")


def reconnect(pooler: PgBouncer, name: str) -> None:
    pooler.order(f"RECONNECT {name}")


def pause(pooler: PgBouncer, name: str) -> None:
    pooler.order(f"PAUSE {name}")
    pooler.order(f"RESUME {name}")


# --- pushes -------------------------------------------------------------------------------------------------------------


def test_a_push_joins_the_caller_s_transaction(observer: Engine, queue: Queue, one: Database) -> None:
    engine = engine_of_manual(one)
    queue.job(name="note")(lambda: None)
    make_orders(engine)
    for note, ends, expected in (("kept", Session.commit, ((0, 0), (1, 2))), ("undone", Session.rollback, ((1, 2), (1, 2)))):
        with Session(engine) as session:
            session.add(Order(note=note))
            session.flush()
            queue.push_named(session, "note", {})
            queue.push_named(session, "note", {}, unique=note)
            before = (len(order_ids(observer)), len(job_ids(observer, queue)))
            ends(session)
        assert (before, (len(order_ids(observer)), len(job_ids(observer, queue)))) == expected


def test_a_key_is_held_by_one_job_whoever_pushes_it_through_whatever_session(
    observer: Engine, queue: Queue, one: Database, two: Database
) -> None:
    engines = [engine_of_manual(one), engine_of_manual(two), engine_of_manual(two)]
    pushed = []
    for _ in range(8):  # more often than the driver runs a statement before it prepares it
        for engine in engines:
            with engine.begin() as connection:
                pushed.append(queue.push_named(connection, "note", {}, unique="one"))
    assert [push.created for push in pushed] == [True] + 23 * [False]
    assert {push.id for push in pushed} == set(job_ids(observer, queue))


# --- one session for all --------------------------------------------------------------------------------------------------


def test_many_clients_of_one_session_prepare_nothing_in_it(observer: Engine, through: Callable[[], Queue], one: Database) -> None:
    """A statement that is prepared under one name by two clients is an error; one that another session has prepared, too."""
    queues = [through() for _ in range(3)]
    for _ in range(8):
        for queue in queues:
            push(queue, "note")
        for queue in queues:
            (delivery,) = queue.claim()
            queue.complete(delivery)
    assert state_left(one)["statements"] == 0
    assert job_ids(observer, queues[0]) == []


def test_a_consumer_that_was_given_a_url_prepares_nothing_either(queue: Queue, one: Database) -> None:
    queues = [Queue(one.url) for _ in range(2)]
    queue.job(name="note")(lambda: None)
    push(queue, "note", 16)
    for _ in range(8):
        for own in queues:
            (delivery,) = own.claim()
            own.complete(delivery)
    assert state_left(one)["statements"] == 0
    for own in queues:
        own.consumer.close()


def test_a_producer_that_was_given_a_url_prepares_nothing_either(one: Database) -> None:
    queues = [Queue(one.url) for _ in range(2)]
    try:
        for _ in range(8):
            for own in queues:
                with own.begin() as session:
                    own.push_named(session, "note", {})
    finally:
        for own in queues:
            own.consumer.close()


def test_without_a_pooler_statements_are_prepared(queue: Queue) -> None:
    """A claim takes a fifth less time with them."""
    for _ in range(8):
        queue.claim()
    with queue.consumer.engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM pg_prepared_statements")) > 0


def test_the_look_for_a_pooler_bears_a_transaction_that_a_listener_has_begun(one: Database) -> None:
    begun: list[object] = []

    def begin(connection: Any, record: Any) -> None:
        begun.append(connection.execute("SELECT 1"))

    own = Queue(one.url)
    sa.event.listen(Engine, "connect", begin)  # every engine's, ours too
    try:
        assert (own.pending(), len(begun)) == (0, 1)
    finally:
        sa.event.remove(Engine, "connect", begin)
        own.consumer.close()


def test_an_operation_leaves_nothing_behind_in_the_session(through: Callable[[], Queue], pooler: PgBouncer, one: Database) -> None:
    """Its level of isolation, its limit for locks, its time zone would be the next client's."""
    reconnect(pooler, pooler.database_of(1))  # a session that nobody has used
    queue = through()
    before = state_left(one)
    for operation in operations(queue):
        operation()
        assert state_left(one) == before


def test_what_others_leave_behind_in_the_session_does_not_change_an_operation(
    through: Callable[[], Queue], one: Database, observer: Engine
) -> None:
    queue = through()
    seen: set[tuple[Any, ...]] = set()
    question = "SELECT current_setting('transaction_isolation'), current_setting('lock_timeout'), current_setting('TimeZone')"

    def look(cursor: Any, statement: str, parameters: Any, context: Any) -> None:
        if not statement.startswith("SELECT set_config"):
            seen.add(tuple(context.root_connection.connection.dbapi_connection.execute(question).fetchone()))

    settings = {"default_transaction_isolation": "serializable", "lock_timeout": "1ms", "TimeZone": "Pacific/Kiritimati"}
    with create_engine(one.url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as stranger:
        for name, value in settings.items():
            stranger.exec_driver_sql(f"SET {name} = '{value}'")
        try:
            (first, *others) = operations(queue)
            sa.event.listen(queue.consumer.engine, "do_execute", look)
            first()
            for operation in others:
                operation()
            push(queue, "note")
            earliest = moment_of(observer)
            (delivery,) = queue.claim(lease=60)
            assert 59 < (delivery.lease_until - earliest).total_seconds() < 60 + PATIENCE
        finally:
            for name in settings:
                stranger.exec_driver_sql(f"RESET {name}")
    assert seen == {("read committed", "10s", "UTC")}


# --- workers ------------------------------------------------------------------------------------------------------------------


def test_a_worker_with_more_slots_than_the_pool_has_sessions(queue: Queue, two: Database) -> None:
    engine = engine_of_manual(two)
    own = Queue(engine)
    runs: Counter[int] = Counter()

    @own.job(name="note")
    def note(context: JobContext) -> None:
        with engine.begin() as connection:
            connection.execute(sa.text("SELECT 1"))
        assert context.renew()
        runs[context.id] += 1

    queue.job(name="note")(lambda: None)
    ids = push(queue, "note", 60)
    assert work_off(own, concurrency=12).counts == {"done": 60}
    assert runs == Counter(ids)
    own.consumer.close()


SHOP = """
from sqlqueue import Fixed, Queue
queue = Queue()
@queue.job(name="note")
def note() -> None: ...
@queue.job(name="bad", max_attempts=2, backoff=Fixed(0))
def bad() -> None:
    raise ValueError("no")
"""


def test_the_program_drains_a_queue_and_retries_what_failed(
    queue: Queue, observer: Engine, two: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pooled_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    for name in ("note", "bad"):
        queue.job(name=name, max_attempts=2)(lambda: None)
    work = re.search(r"^sqlqueue (work .*)$", block_of_manual("sh", "sqlqueue work"), re.MULTILINE)
    assert work is not None
    ours = ["--app", "pooled_shop:queue", "--url", two.url]
    arguments = [*re.sub(r"--app \S+ --url \S+", "", work[1]).split(), *ours, "--stop-when-empty", "--verbose"]
    push(queue, "note", 20)
    push(queue, "bad")
    retry = ["failed", "retry", "--all", *ours]
    for command, words in ((arguments, "20 done, 1 retrying, 1 failed"), (retry, "1"), (arguments, " s: 0 done, 1 retrying, 1 failed")):
        result = CliRunner().invoke(main, command)
        assert (result.exit_code, words in result.output) == (0, True), result.output
    assert queue.stats() == []
    assert [row["attempts"] for row in failures(observer, queue)] == [2]


@pytest.mark.parametrize("how", [restart, kill_sessions, reconnect, pause], ids=lambda how: how.__name__)
def test_what_is_done_to_the_pooler_under_a_running_worker_is_survived(
    pooler: PgBouncer, queue: Queue, observer: Engine, two: Database, how: Callable[[PgBouncer, str], None]
) -> None:
    own = Queue(two.url)
    gate, late = Gate(), threading.Event()
    runs: Counter[int] = Counter()

    @own.job(name="wait", max_attempts=1)
    def wait(context: JobContext) -> None:
        runs[context.id] += 1
        gate.pass_through()

    own.job(name="late")(late.set)
    for name in ("wait", "late"):
        queue.job(name=name, max_attempts=1)(lambda: None)
    ids = push(queue, "wait", 2)
    with working(own, concurrency=3, lease=30) as worker:
        gate.await_arrivals(2)
        how(pooler, pooler.database_of(2))
        gate.open()
        push(queue, "late")
        assert late.wait(PATIENCE)
        eventually(lambda: queue.size("default") == 0)
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 3}
    assert runs == Counter(ids)
    assert failures(observer, queue) == []
    own.consumer.close()


def test_settings_in_the_url_are_refused_by_the_pooler(one: Database) -> None:
    engine = create_engine(sa.make_url(one.url).update_query_dict({"options": "-c lock_timeout=5s"}), poolclass=NullPool)
    with pytest.raises(OperationalError, match="unsupported startup parameter: options"):
        engine.connect()


def test_a_worker_does_not_listen_where_it_would_hear_nothing(
    through: Callable[[], Queue], one: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sqlqueue")
    queue = through()
    with working(queue):
        eventually(lambda: "a pooler stands before the server" in caplog.text)
        push(queue, "note")
        eventually(lambda: queue.size("default") == 0)
    assert state_left(one)["channels"] == 0
    with queue.consumer.engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(queue.tables.workers)) == 0
