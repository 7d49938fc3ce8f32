"""
The onion around a handler: in which order, what goes in and out, and what is refused.
"""

from __future__ import annotations

import contextvars
import functools
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import pytest
from sqlalchemy import create_engine

from sqlqueue import Discard, Fail, JobContext, Key, OptionError, Queue, RegistrationError, Release, Sensitive, current_job
from sqlqueue._driver.settle import Complete, Move
from sqlqueue._driver.settle import Release as ReleaseRow
from sqlqueue._executor import Ended, Status
from sqlqueue.middleware import CallNext, FailOn, Middleware, RateLimited, SkipIf, ThrottlesExceptions, WithoutOverlapping
from tests.test_executor import error_of, run, run_named

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="untouched")


@pytest.fixture
def queue() -> Queue:
    return Queue()


def noting(log: list[str], name: str) -> Middleware:
    def middleware(context: JobContext, call_next: CallNext) -> Any:
        log.append(f"{name} in")
        try:
            return call_next()
        finally:
            log.append(f"{name} out")

    return middleware


def passing(context: JobContext, call_next: CallNext) -> Any:
    return call_next()


def test_the_queues_middleware_is_outside_and_the_jobs_is_inside() -> None:
    log: list[str] = []
    queue = Queue(middleware=[noting(log, "a"), noting(log, "b")])
    ended = run(queue, lambda: log.append("handler"), middleware=[noting(log, "c"), noting(log, "d")])
    assert ended == Ended(Status.DONE, Complete())
    assert log == ["a in", "b in", "c in", "d in", "handler", "d out", "c out", "b out", "a out"]


def test_call_next_returns_what_the_handler_returned(queue: Queue) -> None:
    seen: list[object] = []

    def middleware(context: JobContext, call_next: CallNext) -> None:
        seen.append(call_next())

    assert run(queue, lambda: {"a": 1}, middleware=[middleware, passing]).status is Status.DONE
    assert seen == [{"a": 1}]


def test_call_next_raises_what_the_handler_raised(queue: Queue) -> None:
    def middleware(context: JobContext, call_next: CallNext) -> Any:
        with pytest.raises(ZeroDivisionError):
            call_next()

    assert run(queue, lambda: 1 / 0, middleware=[middleware]).status is Status.DONE


@pytest.mark.parametrize("outcome", [Release(30), Fail("no"), Discard, Discard()])
def test_an_outcome_that_the_handler_returned_is_not_lost_in_a_middleware_that_returns_nothing(queue: Queue, outcome: Any) -> None:
    def careless(context: JobContext, call_next: CallNext) -> None:
        call_next()

    assert run(queue, lambda: outcome, middleware=[careless]).status is not Status.DONE


@pytest.mark.parametrize("how", ["raised", "returned"])
@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize(
    ("outcome", "status", "written"),
    [
        (Release(30), Status.RELEASED, ReleaseRow(30.0, None)),
        (Discard, Status.DISCARDED, Complete()),
        (Fail("by middleware"), Status.FAILED, None),
    ],
)
def test_what_a_middleware_raises_or_returns_is_the_outcome(
    queue: Queue, how: str, calls: bool, outcome: Any, status: Status, written: Any
) -> None:
    def middleware(context: JobContext, call_next: CallNext) -> Any:
        if calls:
            call_next()
        if how == "raised":
            raise outcome
        return outcome

    heard: list[type] = []

    def outside(context: JobContext, call_next: CallNext) -> Any:
        try:
            return call_next()
        except Exception as error:
            heard.append(type(error))
            raise

    ended = run(queue, lambda: None, middleware=[outside, middleware], attempt=3)
    assert ended.status is status
    assert written is None or ended.outcome == written
    assert heard == [outcome if isinstance(outcome, type) else type(outcome)]


def test_an_exception_of_a_middleware_is_a_failed_attempt(queue: Queue) -> None:
    def middleware(context: JobContext, call_next: CallNext) -> Any:
        call_next()
        raise LookupError("after the fact")

    ended = run(queue, lambda: None, middleware=[middleware])
    assert ended.status is Status.RETRYING
    assert "LookupError: after the fact" in error_of(ended)


def test_a_middleware_that_does_not_call_next_ends_the_job_without_running_it(queue: Queue) -> None:
    ran: list[int] = []
    assert run(queue, lambda: ran.append(1), middleware=[lambda context, call_next: None]).status is Status.DONE
    assert ran == []


def test_the_rest_runs_once(queue: Queue) -> None:
    ran: list[int] = []

    def twice(context: JobContext, call_next: CallNext) -> Any:
        call_next()
        return call_next()

    ended = run(queue, lambda: ran.append(1), middleware=[twice])
    assert "call_next() may be called once" in error_of(ended)
    assert ran == [1]


def test_context_variables_reach_the_handler_and_no_other_job(queue: Queue) -> None:
    seen: list[object] = []

    def middleware(context: JobContext, call_next: CallNext) -> Any:
        assert current_job() is context
        variable.set("by middleware")
        return call_next()

    def handler() -> None:
        current = current_job()
        seen.append((variable.get(), current and current.id))

    run(queue, handler, middleware=[middleware])
    assert seen == [("by middleware", 7)]
    assert variable.get() == "untouched"


def test_work_that_nobody_would_do_is_not_called_done(queue: Queue) -> None:
    def generator(context: JobContext, call_next: CallNext) -> Iterator[Any]:
        yield call_next()

    assert "nobody runs" in error_of(run(queue, lambda: None, middleware=[generator]))


# --- the context ---------------------------------------------------------------------------------------------------------


def test_the_context_knows_the_arguments_with_their_defaults(queue: Queue) -> None:
    seen: list[Any] = []

    def middleware(context: JobContext, call_next: CallNext) -> Any:
        seen.append(dict(context.arguments))
        with pytest.raises(TypeError):
            context.arguments["account"] = 2  # type: ignore[index]
        return call_next()

    def handler(context: JobContext, account: int, region: str = "north") -> None:
        seen.append(dict(context.arguments))

    run(queue, handler, {"account": 1}, middleware=[middleware])
    run_named(queue, "tested", {"account": 1, "region": "south"})
    assert seen == [{"account": 1, "region": "north"}] * 2 + [{"account": 1, "region": "south"}] * 2


def test_the_context_shows_no_arguments_and_no_token(queue: Queue) -> None:
    shown: list[str] = []

    def middleware(context: JobContext, call_next: CallNext) -> Any:
        shown.append(repr(context))
        return call_next()

    def handler(word: Annotated[str, Sensitive]) -> None: ...

    run(queue, handler, {"word": "s3cret-word"}, middleware=[middleware])
    assert "s3cret-word" not in shown[0]
    assert "token" not in shown[0]


def test_a_context_made_by_hand_has_no_arguments() -> None:
    assert JobContext(id=1, name="a", queue="", attempt=1, max_attempts=1).arguments == {}


# --- what is refused -----------------------------------------------------------------------------------------------------


async def asynchronous(context: JobContext, call_next: CallNext) -> Any: ...


class Asynchronous:
    async def __call__(self, context: JobContext, call_next: CallNext) -> Any: ...


BAD: list[Any] = [
    "text",
    {passing},
    passing,
    [1],
    [passing, None],
    [WithoutOverlapping],
    [asynchronous],
    [Asynchronous()],
    [functools.partial(asynchronous)],
    [lambda: None],
    [lambda context: None],
    [lambda context, call_next, more: None],
]


@pytest.mark.parametrize("middleware", BAD)
def test_middleware_is_checked_when_it_is_named(queue: Queue, middleware: Any) -> None:
    for register in (
        lambda: queue.job(name="a", middleware=middleware),
        lambda: queue.route("a", middleware=middleware),
        lambda: Queue(middleware=middleware),
    ):
        with pytest.raises(OptionError, match=r"^middleware"):
            register()


def test_an_asynchronous_middleware_is_told_why_it_is_refused(queue: Queue) -> None:
    with pytest.raises(OptionError, match=r"^middleware\[1\]: async def cannot be around a handler that is a plain function$"):
        queue.job(name="a", middleware=[passing, asynchronous])


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": True}, {"limit": "3"}, {"limit": 1001}, {"limit_key": "x"}])
def test_a_limit_is_checked_when_it_is_named(queue: Queue, options: Any) -> None:
    with pytest.raises(OptionError, match=r"^limit"):
        queue.job(name="a", **options)


@pytest.mark.parametrize("key", ["", 1, None, Key(""), str, "\ud800"])
def test_keys_are_checked_when_they_are_named(queue: Queue, key: Any) -> None:
    if key is not None:
        with pytest.raises(OptionError, match=r"^limit_key: "):
            queue.job(name="a", limit=1, limit_key=key)
        with pytest.raises(OptionError, match=r"^key: "):
            WithoutOverlapping(key)


@pytest.mark.parametrize("name", ["middleware", "limit", "limit_key"])
def test_what_belongs_to_the_code_is_refused_at_the_push(queue: Queue, name: str) -> None:
    job = queue.job(name="a")(lambda: None)
    with pytest.raises(OptionError, match=rf"^{name}: belongs to the job's code"):
        job.options(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: WithoutOverlapping("a", expire_after=0), "expire_after"),
        (lambda: WithoutOverlapping("a", release_after=-1), "release_after"),
        (lambda: RateLimited(0, per=1), "limit"),
        (lambda: RateLimited(1.5, per=1), "limit"),  # type: ignore[arg-type]
        (lambda: RateLimited(1, per=0), "per"),
        (lambda: RateLimited(1, per=float("nan")), "per"),
        (lambda: RateLimited(1, per=1, key=""), "key"),
        (lambda: RateLimited(1, per=1, burst=0), "burst"),
        (lambda: RateLimited(1, per=86_400, burst=1_000_000), "burst"),
        (lambda: RateLimited(1, per=timedelta(days=31)), "per"),
        (lambda: ThrottlesExceptions(0, per=1), "limit"),
        (lambda: ThrottlesExceptions(1, per=-1), "per"),
        (lambda: ThrottlesExceptions(1, per=1, pause=0), "pause"),
        (lambda: ThrottlesExceptions(1, per=1, on=()), "on"),
        (lambda: ThrottlesExceptions(1, per=1, on=(int,)), "on"),  # type: ignore[arg-type]
        (lambda: SkipIf(None), "condition"),  # type: ignore[arg-type]
        (FailOn, "exceptions"),
        (lambda: FailOn(ValueError("made")), "exceptions"),  # type: ignore[arg-type]
        (lambda: FailOn(KeyboardInterrupt), "exceptions"),  # type: ignore[arg-type]
    ],
)
def test_what_is_built_in_checks_its_options(make: Callable[[], object], option: str) -> None:
    with pytest.raises(OptionError, match=rf"^{option}: |^{option} must"):
        make()


def test_a_route_replaces_the_jobs_middleware(queue: Queue) -> None:
    log: list[str] = []
    run(queue, lambda: None, middleware=[noting(log, "decorator")])
    queue.route("tested", middleware=[noting(log, "route")])
    run_named(queue, "tested")
    queue.route("tested", middleware=[])
    run_named(queue, "tested")
    assert log == ["decorator in", "decorator out", "route in", "route out"]


def test_the_examples_of_the_manual_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs/middleware.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        names: dict[str, Any] = {"__name__": "manual"}
        exec(compile(example, "middleware.md", "exec"), names)
        names["queue"].metadata.create_all(create_engine("sqlite:///shop.db"))
        job, arguments = (names["resize"], (1,)) if "resize" in names else (names["charge"], (1, "north", 5))
        with names["queue"].begin() as session:
            job.push(session, *arguments)
        assert names["queue"].drain().counts == {"done": 1}
        names["queue"].consumer.close()


# --- those that need no database -----------------------------------------------------------------------------------------


def test_skip_if(queue: Queue) -> None:
    ran: list[int] = []

    def handler(number: int) -> None:
        ran.append(number)

    skip = SkipIf(lambda context: context.arguments["number"] > 1)
    assert run(queue, handler, {"number": 1}, middleware=[skip]).status is Status.DONE
    assert run_named(queue, "tested", {"number": 2}).status is Status.DISCARDED
    assert ran == [1]
    assert run(Queue(), lambda: None, middleware=[SkipIf(True)]).status is Status.DISCARDED
    assert run(Queue(), lambda: None, middleware=[SkipIf(False)]).status is Status.DONE


def raising(error: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise error

    return handler


def test_fail_on_fails_at_once_and_keeps_the_error() -> None:
    middleware = [FailOn(ValueError, LookupError)]
    ended = run(Queue(), raising(ValueError("no such thing")), middleware=middleware)
    assert ended.status is Status.FAILED
    assert isinstance(ended.outcome, Move)
    assert ended.outcome.failure.message == "ValueError: no such thing"
    assert "test_middleware.py" in (ended.outcome.failure.traceback or "")
    assert run(Queue(), raising(KeyError("x")), middleware=middleware).status is Status.FAILED
    assert run(Queue(), raising(OSError("x")), middleware=middleware).status is Status.RETRYING


@pytest.mark.parametrize(("outcome", "status"), [(Release(1), Status.RELEASED), (Discard(), Status.DISCARDED)])
def test_fail_on_leaves_outcomes_alone(outcome: Exception, status: Status) -> None:
    assert run(Queue(), raising(outcome), middleware=[FailOn(Exception)]).status is status


@pytest.mark.parametrize("options", [{"middleware": [FailOn(LookupError)]}, {"limit": 3}])
def test_nothing_can_be_around_an_async_handler_yet(options: dict[str, Any]) -> None:
    async def handler() -> None: ...

    with pytest.raises(RegistrationError, match=r"async_job: middleware and limit are for plain functions"):
        Queue().job(name="async_job", **options)(handler)
    with pytest.raises(RegistrationError):
        Queue(middleware=[FailOn(LookupError)]).job(name="async_job")(handler)
    queue = Queue()
    queue.job(name="async_job")(handler)
    with pytest.raises(RegistrationError):
        queue.route("async_job", **options)
