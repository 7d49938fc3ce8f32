"""
Options of a job: which are taken, which are refused, and which one wins.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from sqlqueue import Fixed, Job, Key, OptionError, Queue
from tests.producers import only_job, statements

INSTANT = datetime(2031, 1, 1, tzinfo=UTC)
SECRET = "hunter2" * 100

ROW_OPTIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "queue": (["default", "a", "A-b_9", "q" * 80], ["", "a b", "a.b", "a/b", "ä", "a\n", "q" * 81, 1, b"a", ["a"]]),
    "priority": ([-100, -1, 0, 1, 100], [-101, 101, 2**31, 10**30, 1.0, True, "1", "high"]),
    "delay": ([0, 0.5, 60, timedelta(days=1)], [-1, -0.001, float("nan"), float("inf"), True, "1", INSTANT, timedelta(-1), 10**400]),
    "available_at": ([INSTANT], [INSTANT.replace(tzinfo=None), INSTANT.date(), "2031-01-01", 5, timedelta(1)]),
    "unique": (["a", Key("a"), True, False, "x" * 10_000], ["", Key(""), "\ud800", 1, 0, b"a", ["a"]]),
    "unique_until": (["finished", "started"], ["", "ended", "Started", True, 1, b"started", ["started"], "x" * 1000]),
    "unique_for": ([0, 0.5, 60, timedelta(days=1)], [-1, -0.001, float("nan"), float("inf"), True, "1", INSTANT, timedelta(-1), 10**400]),
    "on_conflict": (["keep", "replace"], ["", "Replace", "error", True, 1, ["keep"]]),
    "max_attempts": ([1, 2, 1_000_000], [0, -1, 1_000_001, 10**30, 1.0, True, "1"]),
    "deadline": ([INSTANT, 0, 0.5, 60, timedelta(1)], [INSTANT.replace(tzinfo=None), -1, float("nan"), True, "1", timedelta(-1)]),
    "headers": (
        [{}, {"a": "b"}, {"ä": "\N{GRINNING FACE}"}, {"": ""}, {"a": "x" * 16_383}],
        [{"a": 1}, {1: "a"}, [("a", "b")], "a", {"a": None}, {"a": "x" * 16_384}, {"a": "\ud800"}, {"\ud800": "a"}, {"a": b"b"}],
    ),
}
LATER = [
    *("ordered_by", "fair_by"),
]


@pytest.fixture
def job() -> Job[[], None]:
    return Queue().job(name="a")(_nothing)


def _nothing() -> None: ...


def every_way(options: dict[str, Any]) -> list[Any]:
    """All places where row options are given."""
    queue = Queue()
    job = queue.job(name="a")(_nothing)
    return [
        lambda: Queue().job(name="a", **options)(_nothing),
        lambda: job.options(**options),
        lambda: queue.route("a", **options),
        lambda: queue.push_named(None, "a", {}, **options),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("option", ROW_OPTIONS)
def test_a_row_option_takes_what_it_can_keep(option: str, job: Job[[], None]) -> None:
    for value in ROW_OPTIONS[option][0]:
        given = {"unique": True, option: value}  # some say how a key is held
        assert getattr(job.options(**given).bind().options, option) == value or isinstance(value, timedelta)


@pytest.mark.parametrize("option", ROW_OPTIONS)
def test_a_row_option_refuses_anything_else_and_names_itself(option: str) -> None:
    for value in ROW_OPTIONS[option][1]:
        for way in every_way({option: value}):
            with pytest.raises(OptionError, match=f"^{option}"):
                way()


@pytest.mark.parametrize("option", ROW_OPTIONS)
def test_a_refusal_does_not_print_long_values(option: str) -> None:
    for value in (SECRET + "\ud800", [SECRET], Key(SECRET + "\ud800"), {SECRET: 1}):
        for way in every_way({option: value}):
            with pytest.raises(OptionError) as caught:
                way()
            assert SECRET not in str(caught.value)


def test_none_means_not_given(job: Job[[], None]) -> None:
    assert job.options(**dict.fromkeys(ROW_OPTIONS)).bind() == job.bind()  # type: ignore[arg-type]


@pytest.mark.parametrize("option", LATER)
def test_an_option_that_is_promised_and_not_built_yet_is_refused(option: str) -> None:
    for way in every_way({option: 1}):
        with pytest.raises(OptionError, match=f"^{option}.*not available"):
            way()


def test_an_option_that_nobody_knows_is_refused() -> None:
    for way in every_way({"prority": 1}):
        with pytest.raises(OptionError, match=r"^prority.*no such option"):
            way()


def test_an_option_of_the_code_is_refused_where_a_row_is_pushed(job: Job[[], None]) -> None:
    with pytest.raises(OptionError, match=r"^backoff.*@queue\.job"):
        job.options(backoff=Fixed(1))  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"^backoff.*@queue\.job"):
        Queue().push_named(None, "a", {}, backoff=Fixed(1))  # type: ignore[arg-type, call-arg]
    for wrong in (1, "fast", (1, 2)):
        with pytest.raises(OptionError, match=r"^backoff"):
            Queue().job(name="a", backoff=wrong)  # type: ignore[call-overload]
        with pytest.raises(OptionError, match=r"^backoff"):
            Queue().route("a", backoff=wrong)  # type: ignore[arg-type]


def test_a_delay_and_an_instant_contradict_each_other() -> None:
    for way in every_way({"delay": 1, "available_at": INSTANT}):
        with pytest.raises(OptionError, match=r"^delay, available_at"):
            way()


HOLDS: dict[str, Any] = {"unique_until": "started", "unique_for": 60, "on_conflict": "replace"}


@pytest.mark.parametrize("option", HOLDS)
def test_how_a_key_is_held_says_nothing_without_a_key(option: str) -> None:
    """Asked of a push's options, wherever they were given: one place may say what is the key, and another how it is held."""
    given = {option: HOLDS[option]}
    queue = Queue()
    job = queue.job(name="a", **given)(_nothing)
    for way in (job.bind, job.options(priority=1).bind, lambda: queue.push_named(None, "b", {}, **given)):  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=f"^{option}.*unique="):
            way()
    assert getattr(job.options(unique="one").bind().options, option) == HOLDS[option]
    assert job.options(unique=False).bind().key is None
    queue.route("a", unique=True)
    assert job.bind().key is not None


def test_a_key_that_is_kept_for_a_time_leaves_nothing_to_replace() -> None:
    queue = Queue()
    job = queue.job(name="a", unique=True, unique_for=60)(_nothing)
    replacing = job.options(on_conflict="replace")
    with pytest.raises(OptionError, match=r"^unique_for, on_conflict"):
        replacing.bind()
    for harmless in ({"on_conflict": "keep"}, {"unique_for": 0}, {"unique": False}):
        assert replacing.options(**harmless).bind()


def test_a_refused_option_changes_nothing() -> None:
    queue = Queue()
    job = queue.job(name="a", priority=1)(_nothing)
    with pytest.raises(OptionError):
        queue.route("a", priority=5, queue="")
    with pytest.raises(OptionError):
        job.options(priority=5, queue="")
    assert job.bind().options.priority == 1


# --- which one wins ---------------------------------------------------------------------------------------------------


def test_the_call_site_beats_the_route_beats_the_decorator() -> None:
    queue = Queue()
    job = queue.job(name="a", queue="decorated", priority=1, max_attempts=1)(_nothing)
    queue.route("a", queue="routed", priority=2)
    options = job.options(queue="called").bind().options
    assert (options.queue, options.priority, options.max_attempts) == ("called", 2, 1)
    assert job.bind().options.queue == "routed"


def test_a_call_site_can_give_back_what_others_set() -> None:
    queue = Queue()
    job = queue.job(name="a", priority=5, unique=True, delay=60, headers={"a": "b"})(_nothing)
    options = job.options(priority=0, unique=False, delay=0, headers={}).bind().options
    assert (options.priority, options.unique, options.delay, options.headers) == (0, False, 0, {})
    assert job.options(unique=False).bind().key is None


def test_a_delay_replaces_an_instant_and_the_other_way_round() -> None:
    queue = Queue()
    job = queue.job(name="a", delay=60)(_nothing)
    assert job.options(available_at=INSTANT).bind().options.delay is None
    queue.route("a", available_at=INSTANT)
    assert (job.bind().options.delay, job.bind().options.available_at) == (None, INSTANT)
    assert (job.options(delay=1).bind().options.delay, job.options(delay=1).bind().options.available_at) == (1, None)


def test_options_add_up_and_leave_the_job_as_it_was(job: Job[[], None]) -> None:
    urgent = job.options(priority=50)
    both = urgent.options(queue="fast").options(priority=60)
    assert (both.bind().options.priority, both.bind().options.queue) == (60, "fast")
    assert (urgent.bind().options.priority, urgent.bind().options.queue) == (50, None)
    assert job.bind().options.priority is None


def test_a_later_route_adds_to_an_earlier_one() -> None:
    queue = Queue()
    job = queue.job(name="a")(_nothing)
    queue.route("a", queue="first", priority=1)
    queue.route(job, queue="second")
    assert (job.bind().options.queue, job.bind().options.priority) == ("second", 1)


def test_a_route_may_come_before_the_job_and_serves_named_pushes(engine: Engine, observer: Engine, queue: Queue) -> None:
    queue.route("a", queue="routed", max_attempts=7)
    job = queue.job(name="a", queue="decorated")(_nothing)
    assert job.bind().options.queue == "routed"
    with engine.begin() as connection:
        queue.push_named(connection, "a", {})
    row = only_job(observer, queue)
    assert (row["queue"], row["max_attempts"]) == ("routed", 7)


def test_a_route_by_a_name_that_is_no_name_is_refused() -> None:
    for wrong in ("", "a b", None, 1):
        with pytest.raises(OptionError, match=r"^name"):
            Queue().route(wrong, queue="b")  # type: ignore[arg-type]


def test_a_route_changes_the_code_options_too() -> None:
    queue = Queue()
    queue.job(name="a", backoff=Fixed(1))(_nothing)
    assert queue.backoff("a", 1) == 1
    queue.route("a", backoff=Fixed(2), priority=1)
    queue.route("a", priority=2)
    assert queue.backoff("a", 1) == 2


def test_mappings_given_as_options_are_copied(job: Job[[], None]) -> None:
    headers = {"a": "b"}
    bound = job.options(headers=headers).bind()
    headers["a"] = "changed"
    assert bound.options.headers == {"a": "b"}


# --- what the row says ------------------------------------------------------------------------------------------------


def test_a_push_without_options_has_the_defaults(engine: Engine, observer: Engine, queue: Queue) -> None:
    job = queue.job(name="a")(_nothing)
    with engine.connect() as connection:
        for push in (lambda: job.push(connection), lambda: queue.push_many(connection, [job.bind()])):
            push()
            connection.commit()
            row = only_job(observer, queue)
            expected = {"queue": "default", "name": "a", "priority": 0, "max_attempts": 5, "attempts": 0, "payload": "{}", "fair_by": ""}
            assert {name: row[name] for name in expected} == expected
            for empty in ("deadline", "headers", "unique_key", "ordered_by", "reserved_until", "reserved_by", "reserved_token"):
                assert row[empty] is None
            queue.clear("default")


def test_the_row_says_what_the_options_said(engine: Engine, observer: Engine, queue: Queue) -> None:
    job = queue.job(name="a")(_nothing).options(queue="mail", priority=-100, max_attempts=1_000_000, available_at=INSTANT)
    job = job.options(deadline=INSTANT, headers={"trace": "\N{GRINNING FACE}", "": ""}, unique="one")
    with engine.connect() as connection:
        for push in (lambda: job.push(connection), lambda: queue.push_many(connection, [job.options(unique=False).bind()])):
            push()
            connection.commit()
            row = only_job(observer, queue)
            assert (row["queue"], row["priority"], row["max_attempts"]) == ("mail", -100, 1_000_000)
            assert (row["due_at"], row["available_at"], row["deadline"]) == (INSTANT, INSTANT, INSTANT)
            queue.clear("mail")


def test_headers_travel_with_the_job_through_failure_and_retry(engine: Engine, queue: Queue) -> None:
    headers = {"traceparent": "00-4bf9", "who": "\N{GRINNING FACE} \x00"}
    with engine.begin() as connection:
        queue.job(name="a", headers=headers)(_nothing).push(connection)
    (delivery,) = queue.claim()
    queue.fail(delivery, ValueError("no"))
    queue.failed.retry(all=True)
    (again,) = queue.claim()
    assert delivery.headers == again.headers == headers


def test_wrong_options_are_refused_before_any_sql(engine: Engine, queue: Queue) -> None:
    job = queue.job(name="a")(_nothing)
    with engine.connect() as connection, statements(engine) as sent:
        for option, (_, wrong) in ROW_OPTIONS.items():
            for value in wrong:
                with pytest.raises(OptionError, match=f"^{option}"):
                    job.options(**{option: value}).push(connection)
                with pytest.raises(OptionError, match=f"^{option}"):
                    queue.push_named(connection, "a", {}, **{option: value})
        assert sent == []
        assert not connection.in_transaction()
