"""
One delivery, one outcome.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest

from sqlqueue import Delivery, Discard, Fail, Fixed, JobContext, Queue, Reason, Release, Sensitive, Steps, current_job
from sqlqueue._driver.settle import Complete, Move
from sqlqueue._driver.settle import Release as ReleaseRow
from sqlqueue._executor import Ended, Status, run_delivery

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="untouched")


@pytest.fixture
def queue() -> Queue:
    return Queue()


def run(queue: Queue, function: Any, payload: dict[str, Any] | None = None, *, attempt: int = 1, **options: Any) -> Ended:
    """Register a function, and run one delivery of it."""
    job = queue.job(name="tested", **options)(function)
    return run_named(queue, job.name, payload, attempt=attempt)


def run_named(queue: Queue, name: str, payload: dict[str, Any] | None = None, *, attempt: int = 1) -> Ended:
    delivery = Delivery(
        id=7,
        name=name,
        queue="default",
        payload=payload or {},
        attempt=attempt,
        max_attempts=3,
        token="token",
        lease_until=datetime.now(UTC),
        headers={"tenant": "a"},
    )
    context = JobContext(id=7, name=name, queue="default", attempt=attempt, max_attempts=3, headers=delivery.headers)
    return run_delivery(queue, delivery, context, "worker")


def error_of(ended: Ended) -> str:
    assert isinstance(ended.outcome, ReleaseRow)
    assert ended.outcome.error is not None
    return ended.outcome.error


def test_a_handler_that_returns_is_done(queue: Queue) -> None:
    seen: list[int] = []

    def handler(number: int) -> None:
        seen.append(number)

    assert run(queue, handler, {"number": 3}) == Ended(Status.DONE, Complete())
    assert seen == [3]


@pytest.mark.parametrize("value", [0, "", False, object(), [], {"a": 1}, int, Exception("only returned")])
def test_what_a_handler_returns_is_of_no_interest(queue: Queue, value: object) -> None:
    assert run(queue, lambda: value).status is Status.DONE


@pytest.mark.parametrize("how", ["raised", "returned"])
@pytest.mark.parametrize(
    ("outcome", "status", "written"),
    [
        (Release(30), Status.RELEASED, ReleaseRow(30.0, None)),
        (Release(timedelta(minutes=2)), Status.RELEASED, ReleaseRow(120.0, None)),
        (Release, Status.RELEASED, ReleaseRow(0.0, None)),
        (Discard(), Status.DISCARDED, Complete()),
        (Discard, Status.DISCARDED, Complete()),
    ],
)
def test_release_and_discard(queue: Queue, how: str, outcome: Any, status: Status, written: Any) -> None:
    def handler() -> object:
        if how == "raised":
            raise outcome
        return outcome

    ended = run(queue, handler, attempt=3)
    assert (ended.status, ended.outcome) == (status, written)


@pytest.mark.parametrize("how", ["raised", "returned"])
@pytest.mark.parametrize("outcome", [Fail("no such customer"), Fail])
def test_fail_is_final_on_the_first_attempt(queue: Queue, how: str, outcome: Any) -> None:
    def handler() -> object:
        if how == "raised":
            raise outcome
        return outcome

    ended = run(queue, handler)
    assert ended.status is Status.FAILED
    assert isinstance(ended.outcome, Move)
    assert ended.outcome.failure.reason is Reason.FAILED_BY_JOB
    assert ended.outcome.failure.message in ("no such customer", "failed by its handler")
    assert ended.outcome.worker == "worker"


class Broken(Release):
    def __init__(self) -> None:
        pass  # no delay


class Spoilt(Release):
    def __init__(self) -> None:
        super().__init__()
        self.delay = float("nan")


class Demanding(Release):
    def __init__(self, reason: str) -> None:
        super().__init__()


@pytest.mark.parametrize("outcome", [Broken(), Spoilt(), Demanding])
def test_an_outcome_that_was_spoilt_is_a_failure(queue: Queue, outcome: Any) -> None:
    ended = run(queue, lambda: outcome)
    assert ended.status is Status.RETRYING
    assert error_of(ended)


def leave() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def cancel() -> None:
    raise asyncio.CancelledError


def group() -> None:
    raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])


def base() -> None:
    raise BaseException("the root of all")


@pytest.mark.parametrize("handler", [leave, interrupt, cancel, group, base])
def test_whatever_a_handler_raises_is_its_failure(queue: Queue, handler: Any) -> None:
    ended = run(queue, handler, backoff=Fixed(7))
    assert ended.status is Status.RETRYING
    assert isinstance(ended.outcome, ReleaseRow)
    assert ended.outcome.delay == 7
    assert error_of(ended)


def test_the_last_attempt_fails_for_good(queue: Queue) -> None:
    ended = run(queue, lambda: 1 / 0, attempt=3)
    assert ended.status is Status.FAILED
    assert isinstance(ended.outcome, Move)
    failure = ended.outcome.failure
    assert (failure.reason, failure.error_class, failure.message) == (Reason.EXCEPTION, "ZeroDivisionError", "division by zero")
    assert "ZeroDivisionError: division by zero" in (failure.traceback or "")


def test_work_that_nobody_would_do_is_not_called_done(queue: Queue) -> None:
    async def later() -> None: ...

    def steps() -> Iterator[int]:
        yield 1

    for number, start in enumerate((later, steps)):
        queue.job(name=f"starts-{number}")(lambda start=start: start())
        assert "nobody runs" in error_of(run_named(queue, f"starts-{number}"))


def test_an_unknown_job_is_named_and_retried_under_the_default_policy(queue: Queue) -> None:
    ended = run_named(queue, "not.deployed.yet")
    assert "not.deployed.yet" in error_of(ended)
    assert isinstance(ended.outcome, ReleaseRow)
    assert 3.75 <= ended.outcome.delay <= 6.25


@pytest.mark.parametrize("payload", [{}, {"number": 1, "more": 2}, {"other": 1}])
def test_arguments_that_do_not_fit_are_the_jobs_failure(queue: Queue, payload: dict[str, Any]) -> None:
    assert "ArgumentError" in error_of(run(queue, lambda number: None, payload))


@pytest.mark.parametrize(("attempt", "delay"), [(1, 10), (2, 60)])
def test_steps_follow_the_attempt(queue: Queue, attempt: int, delay: float) -> None:
    ended = run(queue, lambda: 1 / 0, attempt=attempt, backoff=Steps([10, 60]))
    assert isinstance(ended.outcome, ReleaseRow)
    assert ended.outcome.delay == delay


def broken_policy(attempt: int) -> float:
    raise SystemExit("no policy today")


def endless_policy(attempt: int) -> float:
    return float("inf")


@pytest.mark.parametrize("policy", [broken_policy, endless_policy])
def test_a_broken_policy_waits_as_the_default_does(queue: Queue, policy: Any) -> None:
    ended = run(queue, lambda: 1 / 0, backoff=policy)
    assert isinstance(ended.outcome, ReleaseRow)
    assert 3.75 <= ended.outcome.delay <= 6.25


def test_context_variables_do_not_reach_the_next_job(queue: Queue) -> None:
    seen: list[str] = []

    def handler() -> None:
        seen.append(variable.get())
        variable.set("touched")

    run(queue, handler)
    run_named(queue, "tested")
    assert seen == ["untouched", "untouched"]
    assert variable.get() == "untouched"


def test_the_current_job_is_known_while_it_runs(queue: Queue) -> None:
    seen: list[JobContext | None] = []

    def handler(context: JobContext) -> None:
        seen.append(current_job())
        assert current_job() is context
        thread = threading.Thread(target=lambda: seen.append(current_job()))
        thread.start()
        thread.join()

    run(queue, handler)
    assert seen[0] is not None
    assert (seen[0].id, seen[0].name, seen[0].queue, seen[0].attempt, seen[0].max_attempts) == (7, "tested", "default", 1, 3)
    assert (seen[0].headers, seen[0].deadline, seen[0].lost) == ({"tenant": "a"}, None, False)
    assert seen[1] is None
    assert current_job() is None


def whole_text(ended: Ended) -> str:
    assert isinstance(ended.outcome, Move)
    failure = ended.outcome.failure
    return f"{failure.message}\n{failure.traceback}\n{ended.note}"


SECRET = "s3cr3t\n\"'ü"


@pytest.mark.parametrize("show", [str, repr, ascii, KeyError])
def test_sensitive_texts_are_replaced_however_they_are_quoted(queue: Queue, show: Any) -> None:
    def handler(password: Annotated[str, Sensitive], user: str) -> None:
        raise ValueError(f"{user} may not: {show(password)}")

    text = whole_text(run(queue, handler, {"password": SECRET, "user": "ann"}, attempt=3))
    assert "s3cr3t" not in text
    assert "ann may not" in text
    assert "[redacted]" in text


def test_sensitive_parts_are_replaced(queue: Queue) -> None:
    def handler(card: Annotated[dict[str, Any], Sensitive]) -> None:
        raise ValueError(f"declined: {card['number']}, {card['codes'][0]}, {card}")

    text = whole_text(run(queue, handler, {"card": {"number": "4111-1111", "codes": [98765], "valid": True}}, attempt=3))
    assert "4111" not in text
    assert "98765" not in text


def test_sensitive_arguments_that_do_not_fit_are_replaced_too(queue: Queue) -> None:
    def handler(password: Annotated[str, Sensitive], other: int) -> None: ...

    text = whole_text(run(queue, handler, {"password": "s3cr3t", "wrong-s3cr3t": 1}, attempt=3))
    assert "s3cr3t" not in text


def test_a_note_is_one_harmless_line(queue: Queue) -> None:
    def handler() -> None:
        raise ValueError("first\x1b[2J\nsecond")

    assert "\n" not in run(queue, handler).note
    assert "\x1b" not in run_named(queue, "tested", attempt=3).note
