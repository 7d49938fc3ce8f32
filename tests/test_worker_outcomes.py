"""
What becomes of a job, as its rows tell it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from sqlqueue import Discard, Fail, Fixed, JobContext, Queue, Reason, Release, Sensitive, Steps, Worker
from sqlqueue._driver.settle import Complete
from sqlqueue._executor import Ended, Status
from sqlqueue._worker.crew import Crew
from sqlqueue._worker.shift import Shift
from sqlqueue._worker.summary import Limits
from tests.workers import PATIENCE, change, expire, failures, jobs, make_due, push, work_off


def raises() -> None:
    raise ValueError("as always")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def unspeakable() -> None:
    raise Unspeakable


def leave() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def cancel() -> None:
    raise asyncio.CancelledError


def base() -> None:
    raise BaseException("the root of all")


def huge() -> None:
    raise ValueError("begin" + "é" * 5_000_000 + "end")


def strange() -> None:
    raise ValueError("NUL \x00, half \ud800, whole 😀")


def group() -> None:
    raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])


def causes() -> None:
    error: Exception = ValueError("first")
    for number in range(1000):
        outer = ValueError(f"number {number}")
        outer.__cause__ = error
        error = outer
    raise error


HOSTILE: list[Callable[[], None]] = [unspeakable, leave, interrupt, cancel, base, huge, strange, group, causes]


def test_whatever_handlers_do_their_jobs_are_recorded_and_the_worker_lives(queue: Queue, observer: Engine) -> None:
    for handler in HOSTILE:
        queue.job(name=f"{handler.__name__}.once", max_attempts=1)(handler)
        queue.job(name=f"{handler.__name__}.twice", max_attempts=2, backoff=Fixed(3600))(handler)
        push(queue, f"{handler.__name__}.once")
        push(queue, f"{handler.__name__}.twice")
    assert work_off(queue).counts == {"failed": len(HOSTILE), "retrying": len(HOSTILE)}
    gone = {row["name"]: row for row in failures(observer, queue)}
    waiting = {row["name"]: row for row in jobs(observer, queue)}
    for handler in HOSTILE:
        failed, back = gone[f"{handler.__name__}.once"], waiting[f"{handler.__name__}.twice"]
        assert (failed["reason"], failed["attempts"]) == ("exception", 1)
        assert failed["error_class"]
        assert failed["traceback"]
        assert failed["worker"]
        assert (back["attempts"], back["reserved_until"]) == (1, None)
        assert back["last_error"]
    assert gone["leave.once"]["error_class"] == "SystemExit"
    assert gone["cancel.once"]["error_class"].endswith("CancelledError")
    assert "no words" not in gone["unspeakable.once"]["error_message"]
    assert "Unspeakable" in gone["unspeakable.once"]["error_message"]
    assert gone["huge.once"]["error_message"].startswith("beginé")
    assert gone["huge.once"]["error_message"].endswith("éend")
    assert gone["strange.once"]["error_message"] == "NUL ␀, half ?, whole 😀"
    assert waiting["strange.twice"]["last_error"] == "ValueError: NUL ␀, half ?, whole 😀"
    assert gone["causes.once"]["error_message"] == "number 999"


@pytest.mark.parametrize("how", ["raised", "returned"])
def test_the_outcomes_that_handlers_choose(queue: Queue, observer: Engine, how: str) -> None:
    def answers(outcome: Exception) -> Callable[[], object]:
        def handler() -> object:
            if how == "raised":
                raise outcome
            return outcome

        return handler

    for name, outcome in (("release", Release(3600)), ("fail", Fail("no such customer")), ("discard", Discard())):
        queue.job(name=name, max_attempts=1)(answers(outcome))
        push(queue, name)
    assert work_off(queue).counts == {"released": 1, "failed": 1, "discarded": 1}
    (back,) = jobs(observer, queue)
    assert (back["name"], back["attempts"], back["last_error"], back["reserved_until"]) == ("release", 0, None, None)
    assert back["available_at"] - back["due_at"] > timedelta(minutes=59)
    (failed,) = failures(observer, queue)
    assert (failed["name"], failed["reason"], failed["error_message"]) == ("fail", "failed_by_job", "no such customer")


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_max_attempts_is_the_number_of_starts(queue: Queue, observer: Engine, attempts: int) -> None:
    seen: list[tuple[int, int]] = []

    @queue.job(name="raise", max_attempts=attempts, backoff=Fixed(0))
    def fails(context: JobContext) -> None:
        seen.append((context.attempt, context.max_attempts))
        raise ValueError("always")

    push(queue, "raise")
    work_off(queue)
    assert seen == [(number, attempts) for number in range(1, attempts + 1)]
    (failed,) = failures(observer, queue)
    assert (failed["attempts"], failed["reason"], failed["error_message"]) == (attempts, Reason.EXCEPTION, "always")
    assert jobs(observer, queue) == []


def test_releases_between_the_attempts_are_not_counted(queue: Queue, observer: Engine) -> None:
    seen: list[int] = []

    @queue.job(name="both", max_attempts=2, backoff=Fixed(0))
    def both(context: JobContext) -> None:
        seen.append(context.attempt)
        if len(seen) % 2:
            raise Release
        raise ValueError

    push(queue, "both")
    work_off(queue)
    assert seen == [1, 1, 2, 2]
    assert [row["attempts"] for row in failures(observer, queue)] == [2]


@pytest.mark.parametrize(
    ("policy", "least", "most"),
    [
        (Fixed(100), 100, 100),
        (Steps([200, 300]), 200, 200),
        (None, 3.75, 6.25),
        (lambda attempt: timedelta(seconds=400), 400, 400),
        (lambda attempt: 1 / 0, 3.75, 6.25),
        (lambda attempt: float("nan"), 3.75, 6.25),
        (lambda attempt: float("inf"), 3.75, 6.25),
        (lambda attempt: -1, 3.75, 6.25),
        (lambda attempt: 10**400, 3.75, 6.25),
        (lambda attempt: "soon", 3.75, 6.25),
        (lambda attempt: timedelta(days=365), 30 * 86_400, 30 * 86_400),
    ],
)
def test_the_next_attempt_is_due_when_the_policy_says(queue: Queue, observer: Engine, policy: Any, least: float, most: float) -> None:
    queue.job(name="raise", **({} if policy is None else {"backoff": policy}))(raises)
    push(queue, "raise")
    before = datetime.now(UTC)
    assert work_off(queue).counts == {"retrying": 1}
    (row,) = jobs(observer, queue)
    slack = timedelta(seconds=2)
    assert before + timedelta(seconds=least) - slack <= row["available_at"] <= datetime.now(UTC) + timedelta(seconds=most) + slack


def test_whatever_a_policy_does_the_last_attempt_fails(queue: Queue, observer: Engine) -> None:
    asked: list[int] = []

    def policy(attempt: int) -> float:
        asked.append(attempt)
        sys.exit(3)

    queue.job(name="raise", backoff=policy, max_attempts=2)(raises)
    push(queue, "raise")
    assert work_off(queue).counts == {"retrying": 1}
    make_due(observer, queue)
    assert work_off(queue).counts == {"failed": 1}
    assert asked == [1]


def test_a_job_that_this_worker_does_not_know_is_named_and_retried(queue: Queue, observer: Engine) -> None:
    with queue.begin() as session:
        queue.push_named(session, "not.deployed.yet", {"number": 1}, max_attempts=2)
    assert work_off(queue).counts == {"retrying": 1}
    (row,) = jobs(observer, queue)
    assert "not.deployed.yet" in row["last_error"]
    assert row["payload"] == '{"number":1}'
    make_due(observer, queue)
    assert work_off(queue).counts == {"failed": 1}
    (failed,) = failures(observer, queue)
    assert "not.deployed.yet" in failed["error_message"]
    assert failed["payload"] == '{"number":1}'


def test_arguments_that_do_not_fit_any_more_are_the_jobs_failure(queue: Queue, observer: Engine) -> None:
    @queue.job(name="takes.number")
    def takes(number: int) -> None: ...

    with queue.begin() as session:
        queue.push_named(session, "takes.number", {"text": "seven"})
    assert work_off(queue).counts == {"retrying": 1}
    (row,) = jobs(observer, queue)
    assert "text" in row["last_error"]
    assert "seven" not in row["last_error"]


def test_a_damaged_row_does_not_stop_the_others(queue: Queue, observer: Engine) -> None:
    queue.job(name="noop")(lambda: None)
    first, *_ = push(queue, "noop", 3)
    change(observer, queue, {"payload": '{"torn'}, queue.tables.jobs.c.id == first)
    assert work_off(queue).counts == {"done": 2}
    (failed,) = failures(observer, queue)
    assert (failed["reason"], failed["payload"]) == ("damaged", '{"torn')


def test_sensitive_values_are_not_recorded(queue: Queue, observer: Engine, caplog: pytest.LogCaptureFixture) -> None:
    @queue.job(name="login", max_attempts=2, backoff=Fixed(0))
    def login(user: str, password: Annotated[str, Sensitive]) -> None:
        try:
            raise KeyError(password)
        except KeyError:
            raise ValueError(f"{user} came with {password!r}") from None

    with queue.begin() as session:
        login.push(session, "ann", "s3cr3t")
    work_off(queue)
    (failed,) = failures(observer, queue)
    assert failed["error_message"] == "ann came with '[redacted]'"
    assert "s3cr3t" not in failed["traceback"]
    assert "s3cr3t" in failed["payload"]
    assert "s3cr3t" not in caplog.text


def test_values_in_sql_errors_are_not_recorded(queue: Queue, engine: Engine, observer: Engine, caplog: pytest.LogCaptureFixture) -> None:
    @queue.job(name="query", max_attempts=1)
    def query(number: str) -> None:
        with engine.connect() as connection:
            connection.execute(sa.text("SELECT * FROM no_such_table WHERE number = :number"), {"number": number})

    with queue.begin() as session:
        query.push(session, "4111-1111")
    work_off(queue)
    (failed,) = failures(observer, queue)
    assert "no_such_table" in failed["error_message"]
    assert "4111" not in failed["error_message"] + failed["traceback"]
    assert "4111" not in caplog.text


def test_a_handler_that_leaves_a_transaction_and_a_thread_behind(queue: Queue, engine: Engine) -> None:
    forgotten = sa.create_engine(engine.url)
    connections: list[sa.Connection] = []
    end = threading.Event()

    @queue.job(name="untidy")
    def untidy() -> None:
        connection = forgotten.connect()
        connections.append(connection)
        connection.execute(sa.select(sa.func.count()).select_from(queue.tables.failed))
        threading.Thread(target=end.wait, args=(PATIENCE,)).start()

    push(queue, "untidy")
    assert work_off(queue).counts == {"done": 1}
    end.set()
    for connection in connections:
        connection.close()
    forgotten.dispose()


@pytest.mark.parametrize("answer", ["raised", "swallowed"])
def test_a_handler_whose_own_transaction_has_failed(queue: Queue, engine: Engine, observer: Engine, answer: str) -> None:
    """After an error some databases take no statement of that transaction any more: the outcome is not written in it."""

    @queue.job(name="broken", max_attempts=1)
    def broken() -> None:
        with engine.connect() as connection:
            connection.execute(sa.insert(queue.tables.controls).values(name="lost", created_at=datetime.now(UTC)))
            try:
                connection.execute(sa.text("SELECT nothing FROM nowhere"))
            except sa.exc.DBAPIError:
                if answer == "raised":
                    raise

    push(queue, "broken")
    assert work_off(queue).counts == {"done" if answer == "swallowed" else "failed": 1}
    assert [row["name"] for row in failures(observer, queue)] == (["broken"] if answer == "raised" else [])
    with observer.connect() as connection:
        assert connection.execute(sa.select(queue.tables.controls)).all() == []


def test_a_handler_that_pushes_a_key_that_is_taken(queue: Queue) -> None:
    """Its own, which it holds while it runs, and another's; what it pushed beside them is committed."""
    seen: list[bool] = []

    @queue.job(name="again")
    def again() -> None:
        with queue.begin() as session:
            seen.append(again.options(unique="mine").push(session).created)
            seen.append(beside.push(session).created)
            seen.append(waiting.options(unique="theirs").push(session).created)

    beside = queue.job(name="beside", queue="elsewhere")(lambda: None)
    waiting = queue.job(name="waiting", queue="elsewhere")(lambda: None)
    push(queue, "waiting", unique="theirs")
    push(queue, "again", unique="mine")
    assert work_off(queue).counts == {"done": 1}
    assert seen == [False, True, False]
    assert queue.size("elsewhere") == 2


def test_a_push_from_a_handler_is_worked_off_too(queue: Queue) -> None:
    runs: Counter[int] = Counter()

    @queue.job(name="chain")
    def chain(left: int = 3) -> None:
        runs[left] += 1
        if left:
            with queue.begin() as session:
                chain.push(session, left - 1)

    push(queue, "chain")
    work_off(queue)
    assert runs == {3: 1, 2: 1, 1: 1, 0: 1}


# --- settlements that cannot be written


def test_an_outcome_that_cannot_be_written_does_not_take_the_others_with_it(queue: Queue, observer: Engine) -> None:
    queue.job(name="noop")(lambda: None)
    queue.job(name="bad", max_attempts=1)(raises)
    first, second = push(queue, "bad", 2)
    push(queue, "noop", 20)
    # A row of that id is there already: what is written once more is refused.
    with observer.connect() as connection:
        columns = [column.name for column in queue.tables.failed.c if column.name in queue.tables.jobs.c]
        source = sa.select(*(queue.tables.jobs.c[name] for name in columns), sa.literal("exception"), queue.tables.jobs.c.created_at)
        connection.execute(
            sa.insert(queue.tables.failed).from_select([*columns, "reason", "failed_at"], source.where(queue.tables.jobs.c.id == first))
        )
    assert work_off(queue).counts == {"done": 20, "failed": 1, "lost": 1}
    assert [row["id"] for row in jobs(observer, queue)] == [first]
    assert [row["id"] for row in failures(observer, queue)] == [first, second]


def test_a_settlement_whose_answer_was_lost_is_known_as_settled(queue: Queue, observer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.job(name="done")(lambda: None)
    queue.job(name="back", backoff=Fixed(3600))(raises)
    queue.job(name="bad", max_attempts=1)(raises)
    settle = queue.consumer.settle
    tries: list[bool] = []

    def lossy(group: Any, **options: Any) -> Any:
        tries.append(options["repeated"])
        found = settle(group, **options)
        if not options["repeated"]:
            raise sa.exc.OperationalError("COMMIT", {}, ConnectionError("reset by peer"), connection_invalidated=True)
        return found

    monkeypatch.setattr(queue.consumer, "settle", lossy)
    for name in ("done", "back", "bad"):
        push(queue, name)
    assert work_off(queue).counts == {"done": 1, "retrying": 1, "failed": 1}
    assert True in tries
    assert [row["name"] for row in jobs(observer, queue)] == ["back"]
    assert [row["name"] for row in failures(observer, queue)] == ["bad"]


def test_two_leases_of_one_job_are_settled_apart(queue: Queue, observer: Engine) -> None:
    """One group, both outcomes of a job that came to this worker twice: the younger one counts."""
    queue.job(name="noop")(lambda: None)
    push(queue, "noop")
    shift = Shift(queue, ("default",), Limits(), concurrency=2, lease=60, name="tested")
    crew = Crew(shift, wait_for_database=0)
    (first,) = crew._claimer.claim(1)
    expire(observer, queue)
    (second,) = crew._claimer.claim(1)
    assert first.delivery.id == second.delivery.id
    for held in (first, second):
        held.ended = Ended(Status.DONE, Complete())
    again = crew._settler.settle([first, second])
    assert again == [second]
    assert crew._settler.settle(again) == []
    assert shift.counts == {"lost": 1, "done": 1}
    assert shift.holdings.all() == []
    assert jobs(observer, queue) == []


def test_the_move_of_a_job_names_the_worker(queue: Queue, observer: Engine) -> None:
    queue.job(name="bad", max_attempts=1)(raises)
    push(queue, "bad")
    worker = Worker(queue, stop_when_empty=True)
    worker.run()
    assert [row["worker"] for row in failures(observer, queue)] == [worker.name]
