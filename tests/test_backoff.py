"""
Backoff policies and durations: pure, no database.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from sqlqueue._backoff import Backoff, Exponential, Fixed, Steps, delay_after, seconds
from sqlqueue.errors import OptionError

THIRTY_DAYS = 30 * 86_400
HUNDRED_YEARS = 36_525 * 86_400

NO_DURATION = [True, False, None, "5", b"5", [5], math.nan, math.inf, -math.inf, -1, -0.001, timedelta(seconds=-1), 10**400, timedelta.max]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(0, 0.0), (5, 5.0), (0.25, 0.25), (timedelta(minutes=2, milliseconds=500), 120.5), (HUNDRED_YEARS, float(HUNDRED_YEARS))],
)
def test_a_duration_becomes_float_seconds(given: object, expected: float) -> None:
    result = seconds(given, "delay")
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize("given", [*NO_DURATION, HUNDRED_YEARS + 1])
def test_what_is_no_duration_is_refused_by_name(given: object) -> None:
    with pytest.raises(OptionError, match=r"^lease "):
        seconds(given, "lease")


@pytest.mark.parametrize("given", [0.5, 61])
def test_a_duration_stays_within_the_bounds_that_the_caller_sets(given: float) -> None:
    with pytest.raises(OptionError, match=r"^poll must be between 1 and 60 seconds"):
        seconds(given, "poll", minimum=1, maximum=60)


def test_fixed_always_waits_the_same() -> None:
    policy = Fixed(timedelta(seconds=90))
    assert policy == Fixed(90)
    assert policy.seconds == 90.0
    assert [policy(attempt) for attempt in (1, 2, 10_000)] == [90.0] * 3


@pytest.mark.parametrize(("attempt", "expected"), [(1, 5), (2, 10), (8, 640), (9, 900), (10_000, 900), (10**30, 900), (0, 5), (-3, 5)])
def test_exponential_doubles_up_to_its_cap(attempt: int, expected: float) -> None:
    assert Exponential(jitter=0)(attempt) == expected


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 7.5), (0.5, 10.0), (1.0, 12.5)])
def test_exponential_spreads_by_its_jitter(chance: float, expected: float) -> None:
    assert Exponential()(2, lambda: chance) == expected


def test_exponential_never_waits_longer_than_its_cap_and_the_jitter() -> None:
    policy = Exponential(base=7.3, cap=33.1, jitter=1)
    assert all(0 <= policy(attempt) <= 33.1 * 2 for attempt in range(1, 2000))


def test_exponential_takes_the_largest_and_the_smallest_base() -> None:
    assert Exponential(base=HUNDRED_YEARS, cap=HUNDRED_YEARS, jitter=0)(10_000) == HUNDRED_YEARS
    assert Exponential(base=0)(10_000) == 0


def test_steps_repeat_their_last_entry() -> None:
    policy = Steps([5, timedelta(minutes=1), 3600])
    assert policy.steps == (5.0, 60.0, 3600.0)
    assert [policy(attempt) for attempt in (0, 1, 2, 3, 4, 10_000)] == [5, 5, 60, 3600, 3600, 3600]


@pytest.mark.parametrize("bad", NO_DURATION)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Fixed, "seconds"),
        (lambda value: Exponential(base=value), "base"),
        (lambda value: Exponential(cap=value), "cap"),
        (lambda value: Steps([5, value]), r"steps\[1\]"),
    ],
)
def test_a_policy_refuses_what_is_no_duration(make: Callable[[Any], object], name: str, bad: object) -> None:
    with pytest.raises(OptionError, match=f"^{name} "):
        make(bad)


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, math.inf, True, "0.2", None])
def test_exponential_refuses_a_jitter_outside_zero_to_one(bad: Any) -> None:
    with pytest.raises(OptionError, match=r"^jitter "):
        Exponential(jitter=bad)


@pytest.mark.parametrize("bad", [[], (), "", "555", b"5", None, 5, {5}, {5: 6}, iter([5])])
def test_steps_refuse_what_is_no_list_of_durations(bad: Any) -> None:
    with pytest.raises(OptionError, match=r"^steps "):
        Steps(bad)


@pytest.mark.parametrize("policy", [Fixed(5), Exponential(), Steps([1, 2])])
def test_policies_are_values(policy: Any) -> None:
    assert hash(policy) == hash(pickle.loads(pickle.dumps(policy)))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert not hasattr(policy, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, dataclasses.fields(policy)[0].name, 3)


def test_policies_show_how_they_were_made() -> None:
    assert repr(Exponential()) == "Exponential(base=5.0, cap=900.0, jitter=0.25)"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Fixed(7), 7.0), (Steps([1, 2]), 2.0), (lambda _: 3, 3.0), (lambda _: timedelta(minutes=1), 60.0), (lambda attempt: attempt / 2, 1.0)],
)
def test_the_delay_is_what_the_policy_says(policy: Backoff, expected: float, caplog: pytest.LogCaptureFixture) -> None:
    delay = delay_after(policy, 2)
    assert delay == expected
    assert type(delay) is float
    assert not caplog.records


@pytest.mark.parametrize("answer", [*NO_DURATION, object(), 5j])
def test_an_answer_that_is_no_duration_waits_as_the_default_policy_does(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert 3.75 <= delay_after(lambda _: answer, 1) <= 6.25
    assert [record.name for record in caplog.records] == ["sqlqueue"]
    assert "OptionError" in caplog.text


@pytest.mark.parametrize("error", [ValueError, RecursionError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_policy_that_raises_waits_as_the_default_policy_does(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def policy(attempt: int) -> float:
        raise error("hunter2")

    assert 7.5 <= delay_after(policy, 2) <= 12.5
    assert error.__name__ in caplog.text
    assert "hunter2" not in caplog.text


def test_a_policy_that_takes_no_attempt_loses_no_job() -> None:
    assert 3.75 <= delay_after(lambda: 5, 1) <= 6.25  # type: ignore[arg-type,misc]


def test_an_error_whose_text_raises_loses_no_job(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def policy(attempt: int) -> float:
        raise Broken

    assert delay_after(policy, 1) > 0
    assert "Broken" in caplog.text


def test_a_delay_of_more_than_thirty_days_is_cut_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert delay_after(Fixed(timedelta(days=31)), 1) == THIRTY_DAYS
    assert "30 days" in caplog.text


def test_logging_that_raises_loses_no_job() -> None:
    class Raising(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError

    raising = Raising()
    logging.getLogger("sqlqueue").addFilter(raising)
    try:
        assert delay_after(lambda _: -1, 1) > 0
    finally:
        logging.getLogger("sqlqueue").removeFilter(raising)
