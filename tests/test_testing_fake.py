"""
`queue.fake()`: pushes are checked and recorded, and nothing is written.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from unittest.mock import AsyncMock, Mock
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqlqueue import ArgumentError, Job, Key, OptionError, Queue, Sensitive
from tests.producers import job_ids, statements

ORDER = UUID("12345678-1234-5678-1234-567812345678")


@pytest.fixture
def shop() -> Queue:
    """A queue without a database."""
    return Queue()


@pytest.fixture
def send(shop: Queue) -> Job[..., None]:
    @shop.job(name="orders.send", queue="mail", max_attempts=3)
    def send(order: UUID, copies: int = 1, *, word: Annotated[str | None, Sensitive] = None) -> None: ...

    return send


def test_a_push_is_recorded_and_nothing_is_written(engine: Engine, observer: Engine, queue: Queue) -> None:
    @queue.job(name="send")
    def send(number: int) -> None: ...

    with statements(engine) as seen, queue.fake() as pushed, Session(engine) as session, session.begin():
        first = send.push(session, 1)
        second = send.bind(2).push(session)
        assert queue.push_many(session, [send.bind(3), send.bind(4)]) == 2
        third = queue.push_named(session, "send", {"number": 5})
    assert seen == []
    assert job_ids(observer, queue) == []
    assert [record.arguments.number for record in pushed] == [1, 2, 3, 4, 5]
    assert first.created
    assert first.id < second.id < third.id
    with Session(engine) as session, session.begin():
        send.push(session, 6)
    assert len(job_ids(observer, queue)) == 1
    assert len(pushed) == 5


@pytest.mark.parametrize("session", [None, Mock(), Mock(spec=Session), "anything"])
def test_any_session_will_do(send: Job[..., None], shop: Queue, session: Any) -> None:
    with shop.fake() as pushed:
        send.push(session, ORDER)
    pushed.assert_pushed_once(send)


@pytest.mark.parametrize("session", [None, AsyncMock(spec=AsyncSession)])
async def test_the_asynchronous_twins_are_recorded(send: Job[..., None], shop: Queue, session: Any) -> None:
    with shop.fake() as pushed:
        await send.push_async(session, ORDER)
        await send.bind(ORDER).push_async(session)
        assert await shop.push_many_async(session, [send.bind(ORDER)]) == 1
        await shop.push_named_async(session, "orders.send", {"order": str(ORDER)})
    assert [record.arguments for record in pushed] == [{"order": ORDER, "copies": 1, "word": None}] * 4


def test_a_predicate_sees_restored_arguments_defaults_and_options(send: Job[..., None], shop: Queue) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    with shop.fake() as pushed:
        send.options(delay=timedelta(minutes=1), priority=7, unique="once", headers={"tenant": "a"}).push(None, ORDER, 2)  # type: ignore[arg-type]
        send.options(available_at=later, deadline=90, unique=Key("x")).push(None, ORDER)  # type: ignore[arg-type]
    first = pushed.assert_pushed_once(
        send, lambda a: (a.order, a.copies, a.word, a.queue, a.delay, a.priority) == (ORDER, 2, None, "mail", 60, 7)
    )
    assert (first.name, first.queue, first.delay, first.available_at, first.priority) == ("orders.send", "mail", 60, None, 7)
    assert (first.max_attempts, first.unique, first.headers, first.deadline) == (3, "once", {"tenant": "a"}, None)
    second = pushed.assert_pushed_once("orders.send", lambda a: a.copies == 1 and a.available_at == later)
    assert (second.delay, second.unique, second.deadline) == (0, Key("x"), 90)
    assert dict(second.arguments) == {"order": ORDER, "copies": 1, "word": None}
    assert second.arguments["order"] == ORDER
    assert "order" in second.arguments
    assert copy.deepcopy(second) == second != first


def test_a_parameter_comes_before_an_option_of_its_name(shop: Queue) -> None:
    @shop.job(name="route", queue="slow")
    def route(queue: str, items: list[int]) -> None: ...

    with shop.fake() as pushed:
        route.push(None, "a string", [1])  # type: ignore[arg-type]
    pushed.assert_pushed(route, lambda a: a.queue == "a string" and a.items == [1])
    assert pushed[0].queue == "slow"


def test_a_predicate_that_asks_for_nothing_that_is_there_is_told_so(send: Job[..., None], shop: Queue) -> None:
    with shop.fake() as pushed:
        send.push(None, ORDER)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no argument or option 'ordre'; arguments: order, copies, word"):
        pushed.assert_pushed(send, lambda a: a.ordre)


def test_what_a_real_push_refuses_is_refused(send: Job[..., None], shop: Queue) -> None:
    with shop.fake() as pushed:
        with pytest.raises(ArgumentError, match="misses the argument 'order'"):
            send.push(None)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="copies"):
            send.push(None, ORDER, {1})  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="priority"):
            send.options(priority=1000).push(None, ORDER)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="max_payload"):
            shop.push_named(None, "big", {"text": "x" * 2**20})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bound job"):
            shop.push_many(None, [send.bind(ORDER), "no job"])  # type: ignore[arg-type,list-item]
    pushed.assert_nothing_pushed()


def test_a_unique_key_is_held_until_the_block_ends(send: Job[..., None], shop: Queue) -> None:
    once = send.options(unique="once")
    with shop.fake() as pushed:
        first = once.push(None, ORDER)  # type: ignore[arg-type]
        second = once.push(None, ORDER)  # type: ignore[arg-type]
        assert (second.id, second.created) == (first.id, False)
        assert shop.push_many(None, [once.bind(ORDER), send.bind(ORDER)]) == 1  # type: ignore[arg-type]
        pushed.assert_pushed(send, times=2)
        pushed.clear()
        assert once.push(None, ORDER).created  # type: ignore[arg-type]
    with shop.fake():
        assert once.push(None, ORDER).created  # type: ignore[arg-type]


def test_a_replacing_push_takes_the_place_of_the_first(send: Job[..., None], shop: Queue) -> None:
    replacing = send.options(unique="once", on_conflict="replace")
    with shop.fake() as pushed:
        first = replacing.push(None, ORDER, 1)  # type: ignore[arg-type]
        send.push(None, ORDER, 2)  # type: ignore[arg-type]
        second = replacing.options(delay=60).push(None, ORDER, 3)  # type: ignore[arg-type]
    assert (second.id, second.created) == (first.id, False)
    assert [(one.id, one.arguments.copies, one.delay) for one in pushed.of(send)] == [(first.id, 3, 60), (pushed[1].id, 2, 0)]


def test_assertions_fail_and_say_what_was_pushed(send: Job[..., None], shop: Queue) -> None:
    with shop.fake() as pushed:
        with pytest.raises(AssertionError, match=r"orders\.send was not pushed; pushed were: nothing"):
            pushed.assert_pushed(send)
        with pytest.raises(AssertionError, match=r"orders\.send was pushed 0 times, not once; pushed were: nothing"):
            pushed.assert_pushed_once(send)
        pushed.assert_nothing_pushed()
        pushed.assert_not_pushed(send)
        send.options(delay=5).push(None, ORDER, word="s3cret-word")  # type: ignore[arg-type]
        send.push(None, ORDER, word="s3cret-word")  # type: ignore[arg-type]
        shop.push_named(None, "stranger", {"pin": "s3cret-word"})  # type: ignore[arg-type]
    assertions: list[tuple[Callable[[], object], str]] = [
        (lambda: pushed.assert_pushed(send, lambda a: a.copies == 9), "orders.send was not pushed with arguments that fit"),
        (lambda: pushed.assert_pushed_once(send), "orders.send was pushed 2 times, not once"),
        (lambda: pushed.assert_pushed("stranger", times=3), "stranger was pushed once, not 3 times"),
        (
            lambda: pushed.assert_not_pushed(send, lambda a: a.delay == 5),
            "orders.send was pushed once with arguments that fit, not 0 times",
        ),
        (lambda: pushed.assert_nothing_pushed(), "something was pushed"),
    ]
    for assertion, said in assertions:
        with pytest.raises(AssertionError, match=said) as failed:
            assertion()
        text = str(failed.value)
        assert f"orders.send(order=UUID('{str(ORDER)[:3]}" in text
        assert "word=[redacted]) on queue mail, delay=5" in text
        assert "stranger(pin=[redacted]) on queue default" in text
        assert "s3cret-word" not in text + repr(pushed) + repr(list(pushed))
    assert pushed[0].arguments.word == "s3cret-word"


def test_what_is_no_job_is_refused(shop: Queue) -> None:
    with shop.fake() as pushed, pytest.raises(TypeError, match="name a job, itself or as text, not a function"):
        pushed.assert_not_pushed(lambda: None)  # type: ignore[arg-type]


def test_the_innermost_block_records(send: Job[..., None], shop: Queue) -> None:
    with shop.fake() as outer:
        send.push(None, ORDER, 1)  # type: ignore[arg-type]
        with shop.fake() as inner:
            send.push(None, ORDER, 2)  # type: ignore[arg-type]
        send.push(None, ORDER, 3)  # type: ignore[arg-type]
    assert [record.arguments.copies for record in outer] == [1, 3]
    assert [record.arguments.copies for record in inner] == [2]
    with pytest.raises(TypeError, match="push takes a Session"):
        send.push(None, ORDER)  # type: ignore[arg-type]


def test_other_queues_are_left_alone(send: Job[..., None], shop: Queue) -> None:
    with Queue().fake() as pushed, pytest.raises(TypeError, match="push takes a Session"):
        send.push(None, ORDER)  # type: ignore[arg-type]
    assert list(pushed) == []


def test_pushes_of_all_threads_are_recorded(send: Job[..., None], shop: Queue) -> None:
    def push_some() -> None:
        for number in range(100):
            send.push(None, ORDER, number)  # type: ignore[arg-type]

    threads = [threading.Thread(target=push_some) for _ in range(4)]
    with shop.fake() as pushed:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({record.id for record in pushed}) == 400
    pushed.assert_pushed(send, lambda a: a.copies == 99, times=4)
