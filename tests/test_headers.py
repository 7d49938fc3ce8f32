"""
Headers: filled at the push, read at the run, and harmless in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sqlqueue import ArgumentError, Job, JobContext, NotConfigured, Queue, RegistrationError, Worker
from sqlqueue._arguments import from_json
from sqlqueue.events import JobProcessing, JobPushing
from tests.workers import failures, jobs, push, work_off

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
trace: ContextVar[str] = ContextVar("trace", default="none")


@pytest.fixture
def seen(queue: Queue) -> list[dict[str, Any]]:
    """What the job `look` has seen at its runs."""
    runs: list[dict[str, Any]] = []

    @queue.job(name="look")
    def look(context: JobContext) -> None:
        runs.append({"headers": dict(context.headers), "tenant": tenant.get(), "trace": trace.get()})
        tenant.set("of the handler")

    return runs


def headers_of(observer: Engine, queue: Queue) -> list[dict[str, Any]]:
    return [from_json(row["headers"] or "{}") for row in jobs(observer, queue)]


def test_a_tenant_travels_from_the_push_to_the_run(queue: Queue, seen: list[dict[str, Any]]) -> None:
    @queue.headers.fill
    def add_tenant(name: str) -> dict[str, str]:
        return {"tenant": tenant.get(), "job": name}

    @queue.headers.read
    def as_tenant(headers: Mapping[str, str]) -> Iterator[None]:
        token = tenant.set(headers["tenant"])
        yield
        tenant.reset(token)

    for name in ("ann", "bob"):
        token = tenant.set(name)
        push(queue, "look")
        tenant.reset(token)
    work_off(queue, concurrency=1)
    assert seen == [{"headers": {"tenant": name, "job": "look"}, "tenant": name, "trace": "none"} for name in ("ann", "bob")]


def test_the_call_site_beats_the_functions_and_a_later_one_an_earlier(queue: Queue, observer: Engine, seen: list[dict[str, Any]]) -> None:
    queue.headers.fill(lambda name: {"a": "first", "b": "first", "c": "first"})
    queue.headers.fill(lambda name: {"b": "second", "c": "second"})
    queue.headers.fill(lambda name: None)
    push(queue, "look", headers={"c": "own", "d": "own"})
    assert headers_of(observer, queue) == [{"a": "first", "b": "second", "c": "own", "d": "own"}]


def test_every_way_to_push_fills(queue: Queue, engine: Engine, observer: Engine, seen: list[dict[str, Any]]) -> None:
    calls: list[str] = []

    @queue.headers.fill
    def fill(name: str) -> dict[str, str]:
        calls.append(name)
        return {"trace": "t1"}

    look: Job[[], None] = queue.registry.find("look")
    with Session(engine) as session, session.begin():
        look.push(session)
        look.options(unique="a", headers={"own": "1"}).push(session)
        queue.push_named(session, "look", {})
        queue.push_many(session, [look.bind() for _ in range(10)])
    found = headers_of(observer, queue)
    assert len(found) == 13
    assert all(one["trace"] == "t1" for one in found)
    assert [one for one in found if "own" in one] == [{"trace": "t1", "own": "1"}]
    assert calls == ["look"] * 4  # many with the same options are one call


@pytest.mark.parametrize(
    "broken",
    [
        lambda name: 1 / 0,
        lambda name: exec("raise SystemExit(3)"),
        lambda name: 5,
        lambda name: {"a": 1},
        lambda name: {"a": "x" * 20_000},
        lambda name: {"a": "half \ud800"},
    ],
    ids=["raises", "leaves", "no mapping", "no text", "too long", "no unicode"],
)
def test_a_fill_that_fails_is_logged_and_the_push_goes_on(
    queue: Queue, observer: Engine, seen: list[dict[str, Any]], broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    queue.headers.fill(broken)
    queue.headers.fill(lambda name: {"tenant": "a"})
    push(queue, "look", headers={"own": "1"})
    assert headers_of(observer, queue) == [{"tenant": "a", "own": "1"}]
    assert "headers.fill, " in caplog.text
    assert "which changes nothing" in caplog.text


def test_headers_that_are_too_long_together_do_without_the_function(
    queue: Queue, observer: Engine, seen: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    queue.headers.fill(lambda name: {"a": "x" * 9_000})
    push(queue, "look", headers={"own": "y" * 9_000})
    assert headers_of(observer, queue) == [{"own": "y" * 9_000}]
    assert "at most 16384" in caplog.text


def test_events_and_the_testing_kit_show_filled_headers(queue: Queue, seen: list[dict[str, Any]]) -> None:
    told: list[Any] = []
    queue.on(JobPushing, JobProcessing)(told.append)
    queue.headers.fill(lambda name: {"tenant": "a"})
    push(queue, "look")
    queue.drain()
    assert [one.headers for one in told] == [{"tenant": "a"}] * 2
    with queue.fake() as pushed, queue.begin() as session:
        queue.push_named(session, "look", {})
    assert pushed[0].headers == {"tenant": "a"}
    with queue.inline(), queue.begin() as session:
        queue.push_named(session, "look", {})
    assert [run["headers"] for run in seen] == [{"tenant": "a"}] * 2


def test_readers_nest_in_the_order_of_their_registration(queue: Queue) -> None:
    steps: list[str] = []

    @queue.headers.read
    @contextlib.contextmanager
    def outer(headers: Mapping[str, str]) -> Iterator[None]:
        steps.append("outer")
        yield
        steps.append("outer ends")

    @queue.headers.read
    def inner(headers: Mapping[str, str]) -> Iterator[None]:
        steps.append("inner")
        yield
        steps.append("inner ends")

    queue.job(name="step")(lambda: steps.append("handler"))
    push(queue, "step")
    assert work_off(queue).counts == {"done": 1}
    assert steps == ["outer", "inner", "handler", "inner ends", "outer ends"]


class Manager:
    """A context manager that does what a test wants."""

    def __init__(self, enter: Any = None, leave: Any = None) -> None:
        self.enter, self.leave = enter, leave
        self.error: Any = "not left"

    def __enter__(self) -> None:
        if self.enter is not None:
            raise self.enter

    def __exit__(self, kind: Any, error: Any, place: Any) -> bool:
        self.error = error
        if self.leave is not None:
            raise self.leave
        return True  # "do not let it out"


def twice(headers: Mapping[str, str]) -> Iterator[None]:
    yield
    yield


def never(headers: Mapping[str, str]) -> Iterator[None]:
    yield from ()


READERS: dict[str, Any] = {
    "raises": lambda headers: 1 / 0,
    "no manager": lambda headers: None,
    "raises at the begin": lambda headers: Manager(enter=SystemExit(1)),
    "raises at the end": lambda headers: Manager(leave=KeyboardInterrupt()),
    "yields twice": twice,
    "yields never": never,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("raises", [False, True])
def test_a_reader_that_fails_is_logged_and_the_job_runs(
    queue: Queue, observer: Engine, reader: str, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[str] = []

    @queue.job(name="step", max_attempts=1)
    def step() -> None:
        runs.append("run")
        if raises:
            raise ValueError("of the handler")

    queue.headers.read(READERS[reader])
    push(queue, "step")
    assert work_off(queue).counts == ({"failed": 1} if raises else {"done": 1})
    assert runs == ["run"]
    assert [row["error_message"] for row in failures(observer, queue)] == (["of the handler"] if raises else [])
    if not (raises and reader == "yields twice"):  # then it has not come to its second yield
        assert "headers.read, " in caplog.text


@pytest.mark.parametrize("error", [ValueError("of the handler"), SystemExit(3), StopIteration(5)])
def test_a_reader_sees_what_the_handler_raises_and_cannot_stop_it(queue: Queue, observer: Engine, error: BaseException) -> None:
    manager = Manager()
    queue.headers.read(lambda headers: manager)

    @queue.headers.read
    def passes(headers: Mapping[str, str]) -> Iterator[None]:
        yield

    @queue.job(name="step", max_attempts=1)
    def step() -> None:
        raise error

    push(queue, "step")
    assert work_off(queue).counts == {"failed": 1}
    assert manager.error is error
    assert [row["error_class"] for row in failures(observer, queue)] == [type(error).__name__]


def test_a_transactional_handler_runs_inside_of_the_readers(queue: Queue) -> None:
    found: list[str] = []

    @queue.headers.read
    def as_tenant(headers: Mapping[str, str]) -> Iterator[None]:
        tenant.set(headers.get("tenant", ""))
        yield

    @queue.job(name="step", headers={"tenant": "ann"})
    def step(session: Session) -> None:
        found.append(tenant.get())

    push(queue, "step")
    assert work_off(queue).counts == {"done": 1}
    assert found == ["ann"]


def test_a_reader_cannot_change_what_the_handler_sees(queue: Queue, seen: list[dict[str, Any]]) -> None:
    @queue.headers.read
    def meddle(headers: dict[str, str]) -> Iterator[None]:
        headers["tenant"] = "b"
        yield

    push(queue, "look", headers={"tenant": "a"})
    Worker(queue).run_once()
    assert seen[0]["headers"] == {"tenant": "a"}


def test_only_plain_functions_fill_and_read() -> None:
    queue = Queue()

    async def later(anything: Any) -> Any: ...
    async def generate(anything: Any) -> Any:
        yield

    for function in (later, generate, 5):
        for register in (queue.headers.fill, queue.headers.read):
            with pytest.raises(RegistrationError):
                register(function)  # type: ignore[type-var]


def test_without_functions_nothing_is_entered_and_what_was_given_is_stored(queue: Queue, observer: Engine, seen: list[Any]) -> None:
    given = {"own": "1"}
    assert queue.headers.filled("look", given) is given
    assert queue.headers.filled("look", None) is None
    assert not queue.headers.are_read
    push(queue, "look")
    assert [row["headers"] for row in jobs(observer, queue)] == [None]


def test_a_push_that_is_refused_has_asked_nobody_twice() -> None:
    queue = Queue()
    calls: list[str] = []
    queue.headers.fill(lambda name: calls.append(name) or {})  # type: ignore[func-returns-value]
    with pytest.raises(ArgumentError):
        queue.push_named(None, "look", {"a": object()})  # type: ignore[arg-type]
    with pytest.raises(NotConfigured), queue.begin():
        pass
    assert calls == []
