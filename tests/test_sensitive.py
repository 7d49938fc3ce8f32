"""
Values of `Sensitive` arguments appear nowhere but in the payload, and values of arguments in nothing that this library writes by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any
from urllib.parse import quote, quote_plus
from uuid import UUID

import pydantic
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sqlqueue import ArgumentError, Fail, Fixed, Job, Queue, Sensitive, StaleDelivery
from sqlqueue._arguments import Signature
from sqlqueue._job import JobContext
from sqlqueue.cli import main
from sqlqueue.events import Event, JobFailed, JobRetrying
from tests.servers import Database
from tests.workers import failures, jobs, make_due, work_off

SECRET = 'hunter2/ä "quoted" & more'
KEY = "-----BEGIN KEY-----\nMIIBVgIBADANBgkqh\nkiG9w0BAQEFAASC\n-----END KEY-----"


class Color(Enum):
    RED = "rubeus"


@dataclass
class Card:
    number: Annotated[str, Sensitive]
    expires: date
    limit: Decimal = Decimal(0)


@dataclass
class Wallet:
    owner: str
    card: Card


class Inner(pydantic.BaseModel):
    token: Annotated[str, Sensitive]
    at: datetime = datetime(2031, 2, 3, tzinfo=UTC)


class Outer(pydantic.BaseModel):
    inner: Inner | None = None


class Listed(pydantic.BaseModel):
    tokens: list[Annotated[str, Sensitive]]


class Perhaps(pydantic.BaseModel):
    token: Annotated[str, Sensitive] | None = None


class OfDataclass(pydantic.BaseModel):
    card: Card | None = None


class Harmless(pydantic.BaseModel):
    note: str
    inner: list[int] = []


def by_model(model: Outer) -> None: ...
def by_list(model: Listed) -> None: ...
def by_union(model: Perhaps) -> None: ...
def by_dataclass(model: OfDataclass) -> None: ...
def by_nested_dataclass(model: Wallet) -> None: ...
def optional(model: Outer | None) -> None: ...
def harmless(model: Harmless) -> None: ...


@pytest.mark.parametrize("function", [by_model, by_list, by_union, by_dataclass, by_nested_dataclass, optional])
def test_a_mark_anywhere_inside_is_found(function: Any) -> None:
    assert Signature(function, context_type=JobContext).sensitive == {"model"}


def test_what_has_no_mark_is_not_sensitive() -> None:
    assert Signature(harmless, context_type=JobContext).sensitive == frozenset()


# --- what a handler raises


def quoted(text: str) -> list[Callable[[], str]]:
    return [
        lambda: text,
        lambda: repr(text),
        lambda: ascii(text),
        lambda: repr(text.encode()),
        lambda: f"https://x.test/?token={quote(text)}",
        lambda: f"https://x.test/?token={quote(text, safe='')}",
        lambda: f"https://x.test/?token={quote_plus(text)}",
    ]


@pytest.mark.parametrize("way", range(7))
def test_however_it_is_quoted(queue: Queue, observer: Engine, way: int) -> None:
    @queue.job(name="login", max_attempts=1)
    def login(password: Annotated[str, Sensitive]) -> None:
        raise ValueError(f"came with {quoted(password)[way]()} today")

    with queue.begin() as session:
        login.push(session, SECRET)
    work_off(queue)
    (failed,) = failures(observer, queue)
    assert "hunter2" not in failed["error_message"] + failed["traceback"]
    assert "[redacted]" in failed["error_message"]
    assert "more" not in failed["error_message"]


def chained(text: str) -> None:
    try:
        raise KeyError(text)
    except KeyError as error:
        raise ValueError("cannot") from error


def during(text: str) -> None:
    try:
        raise KeyError(text)
    except KeyError:
        raise ValueError("cannot")  # noqa: B904  # the context is what this is about


def noted(text: str) -> None:
    error = ValueError("cannot")
    error.add_note(f"with {text}")
    raise error


def grouped(text: str) -> None:
    raise ExceptionGroup("cannot", [ValueError(text), ExceptionGroup("inner", [KeyError(text)])])


def noted_in_a_group(text: str) -> None:
    error = ValueError("cannot")
    error.add_note(f"with\n{text}")
    raise ExceptionGroup("cannot", [error])


def by_class(text: str) -> None:
    raise type(f"Bad_{text.splitlines()[1] if text == KEY else text}", (ValueError,), {})("cannot")


def by_fail(text: str) -> None:
    raise Fail(f"no login with {text}")


def by_group_message(text: str) -> None:
    raise BaseExceptionGroup(text, [ValueError("cannot")])


RAISERS = [chained, during, noted, grouped, noted_in_a_group, by_class, by_fail, by_group_message]


@pytest.mark.parametrize("secret", [SECRET, KEY], ids=["one line", "lines"])
@pytest.mark.parametrize("raiser", RAISERS)
def test_wherever_an_exception_carries_it(
    queue: Queue, observer: Engine, raiser: Callable[[str], None], secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    told: list[Event] = []
    queue.on(Event)(told.append)

    @queue.job(name="login", max_attempts=2, backoff=Fixed(0))
    def login(password: Annotated[str, Sensitive]) -> None:
        raiser(password)

    with queue.begin() as session:
        login.push(session, secret)
    work_off(queue)
    make_due(observer, queue)
    work_off(queue)
    (failed,) = failures(observer, queue)
    recorded = [failed["error_class"], failed["error_message"], failed["traceback"]]
    events = [f"{one!r} {getattr(one, 'message', '')} {getattr(one, 'traceback', '')}" for one in told]
    for text in (*recorded, *events, caplog.text):
        assert "hunter2" not in (text or "")
        assert "MIIB" not in (text or "")
        assert "kiG9w" not in (text or "")
    assert any(isinstance(one, JobFailed) for one in told)


@pytest.mark.parametrize("part", ["number", "expires", "limit", "whole", "as text"])
def test_parts_of_a_dataclass(queue: Queue, observer: Engine, part: str) -> None:
    card = Card("4111-1111", date(2031, 2, 3), Decimal("777.50"))

    @queue.job(name="pay", max_attempts=1)
    def pay(wallet: Wallet) -> None:
        found = {"whole": wallet, "as text": str(wallet.card)}
        value = found.get(part) or getattr(wallet.card, part, None)
        raise ValueError(f"cannot: {value} or {value!r}")

    with queue.begin() as session:
        pay.push(session, Wallet("ann", card))
    work_off(queue)
    (failed,) = failures(observer, queue)
    for text in ("4111", "2031", "777", "datetime.date"):
        assert text not in failed["error_message"] + failed["traceback"]
    assert "4111" in failed["payload"]


def test_parts_of_a_model(queue: Queue, observer: Engine) -> None:
    @queue.job(name="call", max_attempts=1)
    def call(outer: Outer) -> None:
        assert outer.inner is not None
        raise ValueError(f"{outer.inner.token} at {outer.inner.at} or {outer.inner.at!r}, {outer}, {outer.inner!r}")

    with queue.begin() as session:
        call.push(session, Outer(inner=Inner(token="hunter2")))
    work_off(queue)
    (failed,) = failures(observer, queue)
    for text in ("hunter2", "2031"):
        assert text not in failed["error_message"] + failed["traceback"]


KINDS: dict[str, Any] = {
    "int": (int, 41111111),
    "enum": (Color, Color.RED),
    "uuid": (UUID, UUID("12345678-1234-5678-1234-567812345678")),
    "list": (list[str], ["hunter2", "hunter3"]),
    "dict": (dict[str, Any], {"a": {"b": "hunter2"}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_values(queue: Queue, observer: Engine, kind: str) -> None:
    annotation, value = KINDS[kind]

    def use(value: Any) -> None:
        raise ValueError(f"{value} or {value!r} or {getattr(value, 'value', '')} or {list(value) if kind == 'list' else ''}")

    use.__annotations__["value"] = Annotated[annotation, Sensitive]
    queue.job(name="use", max_attempts=1)(use)
    with queue.begin() as session:
        queue.registry.find("use").push(session, value)
    work_off(queue)
    (failed,) = failures(observer, queue)
    for text in ("41111111", "RED", "rubeus", "12345678", "hunter"):
        assert text not in failed["error_message"]


def test_a_transactional_handler_whose_statement_fails(queue: Queue, observer: Engine, caplog: pytest.LogCaptureFixture) -> None:
    @queue.job(name="store", max_attempts=1)
    def store(session: Session, token: Annotated[str, Sensitive]) -> None:
        session.execute(sa.text(f"SELECT '{token}' FROM no_such_table WHERE a = :token"), {"token": token})

    with queue.begin() as session:
        store.push(session, "hunter2")
    work_off(queue)
    (failed,) = failures(observer, queue)
    assert "no_such_table" in failed["error_message"]
    assert "hunter2" not in failed["error_message"] + failed["traceback"] + caplog.text


# --- settled by hand


def test_what_is_settled_by_hand_is_redacted_as_far_as_the_code_is_known(queue: Queue, observer: Engine) -> None:
    @queue.job(name="login")
    def login(password: Annotated[str, Sensitive]) -> None: ...

    told: list[Any] = []
    queue.on(JobFailed, JobRetrying)(told.append)
    with queue.begin() as session:
        for _ in range(4):
            login.push(session, "hunter2")
        queue.push_named(session, "elsewhere", {"password": "hunter2"})
    one, two, three, four, five = queue.claim(limit=5)
    queue.fail(one, ValueError("not with hunter2"))
    queue.fail(two, "not with hunter2")
    queue.release(three, error=ValueError("not with hunter2"))
    queue.release(four, error="not with hunter2")
    queue.complete(five)
    recorded = [row["error_message"] for row in failures(observer, queue)] + [row["last_error"] for row in jobs(observer, queue)]
    texts = [*recorded, *(one.message for one in told)]
    assert len(texts) == 8
    assert all(text.endswith("not with [redacted]") for text in texts)
    with pytest.raises(StaleDelivery) as stale:
        queue.fail(one, "hunter2")
    assert "hunter2" not in f"{stale.value!r}"


# --- where nothing is redacted, because no values are shown


@pytest.fixture
def login(queue: Queue) -> Job[..., None]:
    @queue.job(name="login", max_attempts=1)
    def login(user: str, card: Card | None = None, password: Annotated[str | None, Sensitive] = None) -> None:
        raise ValueError(f"no login with {password} and {card}")

    return login


CARD = Card("hunter2-card", date(2031, 2, 3))


def test_reprs(queue: Queue, login: Job[..., None]) -> None:
    bound = login.options(headers={"a": "hunter2"}).bind("hunter2", CARD, password="hunter2")
    with queue.begin() as session:
        bound.push(session)
    (delivery,) = queue.claim()
    shown = [repr(one) for one in (bound, login, delivery, queue, queue.registry)]
    queue.fail(delivery, "no")
    shown += [repr(queue.failed.list()), repr(queue.failed.get(delivery.id)), repr(bound.options.over(bound.options).queue)]
    assert "hunter2" not in " ".join(shown)


def test_the_command_line(queue: Queue, database: Database, login: Job[..., None]) -> None:
    with queue.begin() as session:
        id = login.push(session, "ann-hunter2", CARD, password="hunter2").id
    work_off(queue)
    for arguments in (["list"], ["list", "--json"], ["show", str(id)]):
        shown = CliRunner().invoke(main, ["failed", *arguments, "--url", database.url], catch_exceptions=False)
        assert shown.exit_code == 0, shown.output
        assert "[redacted]" in shown.output
        assert "hunter2" not in shown.output
    assert "user, card, password" in shown.output


def test_log_lines_and_events(queue: Queue, login: Job[..., None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sqlqueue")
    told: list[Event] = []

    @queue.on(Event)
    def broken(event: Event) -> None:
        told.append(event)
        raise ValueError(f"{event!r}")

    with queue.begin() as session:
        login.push(session, "hunter2", CARD, password="hunter2")
    work_off(queue)
    assert "login" in caplog.text
    assert "broken, has raised" in caplog.text
    assert told
    assert "hunter2" not in caplog.text
    assert "hunter2" not in repr(told)


@pytest.mark.parametrize(
    "arguments",
    [
        ("hunter2", "hunter2"),
        ("hunter2", Card("hunter2", "hunter2")),  # type: ignore[arg-type]
        (b"hunter2",),
        ("a", None, b"hunter2"),
        ("hunter2",) * 4,
    ],
)
def test_refusals(login: Job[..., None], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError) as refused:
        login.bind(*arguments)
    assert "hunter2" not in f"{refused.value!r} {refused.value.__cause__!r}"


def test_arguments_that_do_not_fit_any_more(queue: Queue, observer: Engine, login: Job[..., None]) -> None:
    with queue.begin() as session:
        queue.push_named(session, "login", {"user": "hunter2", "card": {"number": "hunter2", "wrong": "hunter2"}}, max_attempts=1)
        queue.push_named(session, "login", {"user": "hunter2", "card": "hunter2"}, max_attempts=1)
        queue.push_named(session, "nobody", {"password": "hunter2"}, max_attempts=1)
    work_off(queue)
    found = failures(observer, queue)
    assert len(found) == 3
    assert "hunter2" not in " ".join(f"{row['error_message']} {row['traceback']}" for row in found)


def test_the_testing_kit(queue: Queue, login: Job[..., None]) -> None:
    with queue.fake() as pushed, queue.begin() as session:
        login.push(session, "ann", CARD, password="hunter2")
    assert "ann" in repr(pushed)
    assert "hunter2" not in f"{pushed!r} {pushed[0]}"
    push_one = queue.begin()
    with push_one as session:
        login.push(session, "ann", CARD, password="hunter2")
    drained = queue.drain()
    assert [run.status for run in drained] == ["failed"]
    assert "hunter2" not in f"{drained!r} {drained[0]} {drained[0]!r}"


def test_a_push_whose_statement_fails(queue: Queue, engine: Engine, login: Job[..., None]) -> None:
    queue.metadata.tables  # noqa: B018
    other = Queue(engine, prefix="no_such_")
    job = other.job(name="login")(login.function)
    with Session(engine) as session, pytest.raises(sa.exc.DBAPIError) as refused:
        job.push(session, "hunter2", CARD, password="hunter2")
    assert "hunter2" not in str(refused.value)
    with Session(engine) as session, pytest.raises(sa.exc.DBAPIError) as refused:
        other.push_many(session, [job.bind("hunter2", CARD), job.options(unique="a").bind("hunter2")])
    assert "hunter2" not in str(refused.value)


def test_a_hook_of_headers_that_raises_what_it_was_given(queue: Queue, login: Job[..., None], caplog: pytest.LogCaptureFixture) -> None:
    @queue.headers.fill
    def fill(name: str) -> dict[str, str]:
        raise ValueError(name)

    push_arguments = login.bind("hunter2", CARD, password="hunter2")
    with queue.begin() as session:
        push_arguments.push(session)
    assert "headers.fill" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_job_without_sensitive_arguments_shows_what_it_raises(queue: Queue, observer: Engine) -> None:
    @queue.job(name="plain", max_attempts=1)
    def plain(word: str) -> None:
        raise ValueError(f"plain {word}")

    with queue.begin() as session:
        plain.push(session, "text")
    work_off(queue)
    assert failures(observer, queue)[0]["error_message"] == "plain text"
