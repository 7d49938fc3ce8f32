"""
What ends the pause of a worker that has found nothing. Wherever a pause would hide what is tested, every pause is an hour.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session, sessionmaker

from sqlqueue import Queue
from sqlqueue._dialects import after, open_watch, server_of
from sqlqueue._queue import commits
from sqlqueue._worker import claiming, waking
from sqlqueue._worker.bell import Bell
from sqlqueue._worker.crew import Crew
from sqlqueue._worker.shift import Shift
from sqlqueue._worker.summary import Limits
from tests.producers import job_ids
from tests.rows import statements_of
from tests.workers import PATIENCE, Gate, eventually, push, working

HOUR = 3600


class Runs:
    """A job that only says that it has run."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._runs = threading.Semaphore(0)
        queue.job(name="note")(self._runs.release)

    def await_one(self) -> None:
        assert self._runs.acquire(timeout=PATIENCE), "nobody woke up"


@pytest.fixture
def runs(queue: Queue) -> Runs:
    return Runs(queue)


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause is an hour."""
    monkeypatch.setattr(claiming, "FIRST_PAUSE", 2 * HOUR)


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released whenever a worker has nothing to do and begins to wait."""
    begun = threading.Semaphore(0)

    def say_so(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waits(bell: Bell, *arguments: Any) -> Any:
            if threading.current_thread().name == "sqlqueue-claim":
                begun.release()
            return wait(bell, *arguments)

        return waits

    monkeypatch.setattr(Bell, "wait_beside", say_so(Bell.wait_beside))
    return begun


def from_elsewhere(engine: Engine, queue: Queue, name: str = "default", **options: Any) -> None:
    """A push on a plain Connection, of which no worker of this process hears by itself."""
    with engine.begin() as connection:
        queue.push_named(connection, "note", {}, queue=name, **options)


def wait_for(semaphore: threading.Semaphore) -> None:
    assert semaphore.acquire(timeout=PATIENCE), "it never happened"


# --- from any process


@pytest.mark.databases("postgresql", "sqlite")
@pytest.mark.parametrize("options", [{}, {"unique": "one"}], ids=["plain", "with a key"])
def test_a_push_from_elsewhere_wakes_a_worker(
    runs: Runs, engine: Engine, hours: None, asleep: threading.Semaphore, options: dict[str, Any]
) -> None:
    with working(runs.queue, poll_max=HOUR):
        wait_for(asleep)
        from_elsewhere(engine, runs.queue, **options)
        runs.await_one()


@pytest.mark.databases("postgresql", "sqlite")
def test_many_pushed_from_elsewhere_wake_a_worker(runs: Runs, engine: Engine, hours: None, asleep: threading.Semaphore) -> None:
    with working(runs.queue, poll_max=HOUR):
        wait_for(asleep)
        with engine.begin() as connection:
            runs.queue.push_many(connection, [runs.queue.registry.find("note").bind() for _ in range(3)])
        for _ in range(3):
            runs.await_one()


@pytest.mark.databases("postgresql", "sqlite")
def test_a_delayed_push_shortens_the_pause(runs: Runs, engine: Engine, hours: None, asleep: threading.Semaphore) -> None:
    with working(runs.queue, poll_max=HOUR):
        wait_for(asleep)
        from_elsewhere(engine, runs.queue, delay=0.2)
        runs.await_one()


@pytest.mark.databases("postgresql", "sqlite")
def test_what_is_pushed_while_a_worker_falls_asleep_is_found(
    runs: Runs, engine: Engine, hours: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has found nothing, and nobody knows yet that it sleeps."""
    opens = open_watch

    def open_between_two_pushes(*arguments: Any) -> Any:
        from_elsewhere(engine, runs.queue)
        watch = opens(*arguments)
        from_elsewhere(engine, runs.queue)
        return watch

    monkeypatch.setattr(waking, "open_watch", open_between_two_pushes)
    with working(runs.queue, poll_max=HOUR):
        runs.await_one()
        runs.await_one()


def test_a_transaction_that_was_open_when_the_worker_fell_asleep_is_found(runs: Runs, engine: Engine, observer: Engine) -> None:
    """It saw no sleeper to announce itself to. So the pauses begin short, and grow with the silence."""
    with engine.connect() as connection:
        runs.queue.push_named(connection, "note", {})
        with working(runs.queue, poll_max=HOUR):
            if server_of(engine.dialect).notifies:
                eventually(lambda: sleepers(observer, runs.queue) == [True])
            connection.commit()
            runs.await_one()


@pytest.mark.databases("sqlite")
def test_a_file_that_cannot_be_watched_is_looked_at(runs: Runs, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_watch(*arguments: Any) -> Any:
        raise OSError("no more files")

    monkeypatch.setattr(waking, "open_watch", no_watch)
    with working(runs.queue):
        from_elsewhere(engine, runs.queue)
        runs.await_one()


def test_without_notify_a_worker_looks(runs: Runs, engine: Engine, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_watch(*arguments: Any) -> Any:
        raise AssertionError("not wanted")

    monkeypatch.setattr(waking, "open_watch", no_watch)
    with working(runs.queue, notify=False, poll_max=0.05):
        assert not runs.queue.wakes._listeners
        from_elsewhere(engine, runs.queue)
        runs.await_one()
    assert sleepers(observer, runs.queue) == []


# --- from this process


@contextmanager
def heard(queue: Queue, *queues: str) -> Iterator[list[int]]:
    """A list that gets an entry whenever a worker of these queues would be woken."""
    calls: list[int] = []
    with queue.wakes.heard_by(queues or ("default",), lambda: calls.append(1)):
        yield calls


def test_a_push_of_this_process_wakes_a_worker(runs: Runs, hours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "open_watch", lambda *arguments: None)
    looked = threading.Semaphore(0)
    look = claiming.Claimer._look

    def look_and_say(claimer: claiming.Claimer, *arguments: Any) -> None:
        look(claimer, *arguments)
        looked.release()

    monkeypatch.setattr(claiming.Claimer, "_look", look_and_say)
    with working(runs.queue, poll_max=HOUR):
        wait_for(looked)
        push(runs.queue, "note")
        runs.await_one()


def test_a_worker_is_woken_after_the_commit(runs: Runs, engine: Engine, observer: Engine) -> None:
    seen: list[int] = []
    look = runs.queue.wakes.heard_by(["default"], lambda: seen.append(len(job_ids(observer, runs.queue))))
    with look, sessionmaker(engine)() as session:
        for _ in range(2):
            runs.queue.push_named(session, "note", {})
            runs.queue.push_many(session, [runs.queue.registry.find("note").bind()])
            assert seen in ([], [2])
            session.commit()
    assert seen == [2, 4], "once a transaction, and when others can see the jobs"


def test_a_rollback_wakes_nobody(runs: Runs, engine: Engine) -> None:
    with heard(runs.queue) as calls, Session(engine) as session:
        runs.queue.push_named(session, "note", {})
        session.rollback()
        session.execute(sa.select(1))
        session.commit()
        assert calls == []


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_the_end_of_a_savepoint_wakes_nobody(runs: Runs, engine: Engine) -> None:
    with heard(runs.queue) as calls, Session(engine) as session:
        with session.begin_nested():
            runs.queue.push_named(session, "note", {})
        assert calls == []
        session.commit()
        assert calls == [1]


def test_a_session_inside_a_connections_transaction_wakes_nobody(runs: Runs, engine: Engine) -> None:
    with heard(runs.queue) as calls, engine.begin() as connection:
        with Session(connection, join_transaction_mode="rollback_only") as session:
            runs.queue.push_named(session, "note", {})
            session.commit()
        assert calls == []


def test_only_new_jobs_of_watched_queues_wake_a_worker(runs: Runs, engine: Engine) -> None:
    with runs.queue.begin() as session:
        runs.queue.push_named(session, "note", {}, unique="one")
    with heard(runs.queue, "mail", "urgent") as calls:
        with runs.queue.begin() as session:
            runs.queue.push_named(session, "note", {}, queue="slow")
            runs.queue.push_named(session, "note", {}, queue="mail", unique="one")
        assert calls == []
        with runs.queue.begin() as session:
            runs.queue.push_named(session, "note", {}, queue="mail")
        assert calls == [1]


def test_a_wake_that_fails_is_not_the_pushers_trouble(runs: Runs, observer: Engine) -> None:
    def fails() -> None:
        raise RuntimeError("no")

    with runs.queue.wakes.heard_by(["default"], fails), runs.queue.begin() as session:
        runs.queue.push_named(session, "note", {})
    assert len(job_ids(observer, runs.queue)) == 1


def test_nothing_is_kept_of_sessions_that_have_pushed(runs: Runs, engine: Engine) -> None:
    def rounds() -> int:
        for end in ("commit", "rollback", "close") * 5:
            session = Session(engine)
            runs.queue.push_named(session, "note", {})
            getattr(session, end)()
            session.close()
        del session
        gc.collect()
        return len(event.registry._key_to_collection)

    with heard(runs.queue):
        before = rounds()
        assert rounds() == before
    assert len(commits._open) == 0


def test_a_session_that_nobody_listens_to_gets_no_listener(runs: Runs, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        runs.queue.push_named(session, "note", {})
        assert not event.contains(session, "after_commit", commits._after_commit)


# --- the register of sleepers


def sleepers(observer: Engine, queue: Queue) -> list[bool]:
    with observer.connect() as connection:
        return list(connection.scalars(sa.select(queue.tables.workers.c.asleep)))


@contextmanager
def announcements(observer: Engine) -> Iterator[Callable[[], list[str]]]:
    """What was announced since it was last asked. Its own announcement goes last, so it does not wait for what never comes."""
    with observer.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.execute("LISTEN sqlqueue_jobs")

        def ask() -> list[str]:
            driver.execute("SELECT pg_notify('sqlqueue_jobs', '.end')")
            told = [note.payload for note in driver.notifies(timeout=PATIENCE, stop_after=1)]
            while ".end" not in told:
                told += [note.payload for note in driver.notifies(timeout=PATIENCE, stop_after=1)]
            return told[:-1]

        yield ask
        driver.execute("UNLISTEN *")


@pytest.fixture
def told(observer: Engine) -> Iterator[Callable[[], list[str]]]:
    with announcements(observer) as ask:
        yield ask


def write_down(observer: Engine, queue: Queue, queues: str = ",default,", silent_for: float = 0, asleep: bool = True) -> None:
    """A worker, as it is written down."""
    moment = after(-int(silent_for * 1_000_000))
    with observer.connect() as connection:
        values = {"id": f"w{queues}{silent_for}", "queues": queues, "since": moment, "heartbeat": moment, "asleep": asleep}
        connection.execute(sa.insert(queue.tables.workers).values(values))


@pytest.mark.databases("postgresql")
def test_a_push_announces_itself_to_a_sleeper_of_its_queue(
    runs: Runs, engine: Engine, observer: Engine, told: Callable[[], list[str]]
) -> None:
    queue = runs.queue
    write_down(observer, queue, ",mail,default,")
    from_elsewhere(engine, queue)
    assert told() == ["default 0 "]
    from_elsewhere(engine, queue, unique="one", priority=7)
    assert told() == ["default 7 "]
    from_elsewhere(engine, queue, unique="one")
    assert told() == [], "nothing was pushed"
    from_elsewhere(engine, queue, "mail", delay=60)
    assert told() == ["mail 0 "]
    from_elsewhere(engine, queue, "ai")
    from_elsewhere(engine, queue, "mail-default")
    assert told() == []
    bind = queue.registry.find("note").options
    with engine.begin() as connection:
        queue.push_many(connection, [bind(queue=name).bind() for name in ("mail", "slow") for _ in range(600)])
    assert told() == ["mail"]
    with engine.connect() as connection:
        queue.push_named(connection, "note", {})
        connection.rollback()
    assert told() == []


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize("worker", [{"silent_for": 90}, {"asleep": False}], ids=["dead", "awake"])
def test_no_push_announces_itself_to_one_that_does_not_sleep(
    runs: Runs, engine: Engine, observer: Engine, told: Callable[[], list[str]], worker: dict[str, Any]
) -> None:
    write_down(observer, runs.queue, **worker)
    from_elsewhere(engine, runs.queue)
    assert told() == []


@pytest.mark.databases("postgresql")
def test_a_two_phase_session_announces_nothing(runs: Runs, engine: Engine, observer: Engine, told: Callable[[], list[str]]) -> None:
    """The server would refuse to prepare it."""
    write_down(observer, runs.queue)
    with Session(engine, twophase=True) as session:
        runs.queue.push_named(session, "note", {})
        runs.queue.push_named(session, "note", {}, unique="one")
        runs.queue.push_many(session, [runs.queue.registry.find("note").bind()])
        session.prepare()
        session.commit()
    assert len(job_ids(observer, runs.queue)) == 3
    assert told() == []


@pytest.mark.databases("postgresql")
def test_pushes_beside_a_busy_worker_announce_nothing(
    queue: Queue, engine: Engine, observer: Engine, told: Callable[[], list[str]]
) -> None:
    gate = Gate()
    queue.job(name="note")(gate.pass_through)
    with working(queue, concurrency=1):
        eventually(lambda: sleepers(observer, queue) == [True])
        from_elsewhere(engine, queue)
        gate.await_arrivals()
        eventually(lambda: sleepers(observer, queue) == [False])
        told()
        from_elsewhere(engine, queue)
        assert told() == []
        gate.open()
        eventually(lambda: sleepers(observer, queue) == [True])
    assert sleepers(observer, queue) == [], "it has struck itself off"


@pytest.mark.databases("postgresql")
def test_a_worker_strikes_off_the_dead(runs: Runs, observer: Engine) -> None:
    write_down(observer, runs.queue, silent_for=HOUR, asleep=False)
    with working(runs.queue):
        eventually(lambda: sleepers(observer, runs.queue) == [True], "the worker alone")


@pytest.mark.databases("postgresql")
def test_a_sleeper_gives_signs_of_life(runs: Runs, observer: Engine, hours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And writes itself down again, should somebody have taken it for dead."""
    monkeypatch.setattr(waking, "SIGN_OF_LIFE", 0.05)
    with working(runs.queue, poll_max=HOUR):
        eventually(lambda: sleepers(observer, runs.queue) == [True])
        with observer.connect() as connection:
            connection.execute(sa.delete(runs.queue.tables.workers))
        eventually(lambda: sleepers(observer, runs.queue) == [True])


@pytest.mark.databases("postgresql")
def test_a_lost_connection_is_replaced_and_no_job_waits(
    runs: Runs, engine: Engine, observer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waking, "FIRST_PAUSE", 0.05)
    opened: list[Any] = []
    opens = open_watch

    def remember(*arguments: Any) -> Any:
        opened.append(opens(*arguments))
        return opened[-1]

    monkeypatch.setattr(waking, "open_watch", remember)
    with working(runs.queue):
        eventually(lambda: sleepers(observer, runs.queue) == [True])
        (watch,) = opened
        with observer.connect() as connection:
            connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": watch._driver.info.backend_pid})
        from_elsewhere(engine, runs.queue)
        runs.await_one()
        eventually(lambda: len(opened) == 2)


@pytest.mark.databases("postgresql")
def test_without_rights_on_the_register_a_worker_looks(runs: Runs, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise sa.exc.ProgrammingError("UPDATE", {}, Exception("permission denied"))

    monkeypatch.setattr(waking, "note_worker", refused)
    with working(runs.queue):
        from_elsewhere(engine, runs.queue)
        runs.await_one()


# --- what it costs


def test_a_look_in_vain_is_one_statement_and_the_pauses_grow(queue: Queue) -> None:
    shift = Shift(queue, ("default", "mail"), Limits(), concurrency=2, lease=60, name="tested")
    claimer = Crew(shift, wait_for_database=0)._claimer
    server = server_of(queue.consumer.engine.dialect)
    claimer.claim(2)
    with statements_of(queue.consumer.engine) as sent:
        claimer.claim(2)
    assert len(sent) == 1
    for _ in range(20):
        assert 0.01 < claimer._poll_pause(0.9) <= 0.03
        assert server.poll_max / 2 < claimer._poll_pause(60) <= server.poll_max
    if claimer._waking.looked(False):
        for _ in range(20):
            assert claimer._poll_pause(60) > 2
    claimer._waking.close()
    shift.claim_bell.close()


def test_a_worker_with_many_slots_has_few_connections(queue: Queue, engine: Engine) -> None:
    gate = Gate()
    queue.job(name="note")(gate.pass_through)
    opened: list[object] = []
    event.listen(queue.consumer.engine, "connect", lambda connection, record: opened.append(connection))
    with working(queue, concurrency=50, lease=1):
        for _ in range(50):
            from_elsewhere(engine, queue)
        gate.await_arrivals(50)
        gate.open()
        eventually(lambda: queue.size("default") == 0 and not queue.stats())
    assert len(opened) <= 5, "four, and one for the questions of this test"
