"""
How long a job waits after an attempt that failed, and how durations are read.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from sqlqueue.errors import OptionError

__all__ = ["Backoff", "Exponential", "Fixed", "Steps", "delay_after", "seconds"]

Backoff: TypeAlias = Callable[[int], float | int | timedelta]
"""
Takes the number of the attempt that failed, from 1, and answers how long to wait.
"""

_LONGEST_DURATION = timedelta(days=36_525).total_seconds()
_LONGEST_DELAY = timedelta(days=30).total_seconds()

# 2.0**1023 is the last power of two that a float holds; every cap is reached long before.
_LAST_DOUBLING = 1000

_logger = logging.getLogger("sqlqueue")


def seconds(value: object, name: str, *, minimum: float = 0, maximum: float = _LONGEST_DURATION) -> float:
    """
    Read a duration, seconds or a timedelta, or raise ``OptionError`` that names the option.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"{name} must be a number of seconds or a timedelta")
    # Compared before it is converted: an int may be larger than any float. NaN fails here too.
    if not minimum <= value <= maximum:
        raise OptionError(f"{name} must be between {minimum:g} and {maximum:g} seconds")
    return float(value)


def _set(policy: object, name: str, value: object) -> None:
    object.__setattr__(policy, name, value)


@dataclass(frozen=True, slots=True, init=False)
class Fixed:
    """
    The same wait after every attempt.
    """

    seconds: float

    def __init__(self, seconds: float | timedelta) -> None:
        _set(self, "seconds", _seconds(seconds, "seconds"))

    def __call__(self, attempt: int, random: Callable[[], float] = random.random) -> float:
        """
        Seconds to wait after this attempt, from 1.
        """
        return self.seconds


@dataclass(frozen=True, slots=True, init=False)
class Exponential:
    """
    Twice as long after every attempt, up to ``cap``, spread by ± ``jitter`` (0.25 = a quarter).
    """

    base: float
    cap: float
    jitter: float

    def __init__(self, base: float | timedelta = 5, cap: float | timedelta = 900, jitter: float = 0.25) -> None:
        _set(self, "base", _seconds(base, "base"))
        _set(self, "cap", _seconds(cap, "cap"))
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
            raise OptionError("jitter must be a number between 0 and 1")
        _set(self, "jitter", float(jitter))

    def __call__(self, attempt: int, random: Callable[[], float] = random.random) -> float:
        """
        Seconds to wait after this attempt, from 1.
        """
        doublings = min(max(attempt - 1, 0), _LAST_DOUBLING)
        wait = min(self.cap, self.base * 2.0**doublings)
        return wait * (1 + self.jitter * (2 * random() - 1))


@dataclass(frozen=True, slots=True, init=False)
class Steps:
    """
    One wait after another; the last one repeats.
    """

    steps: tuple[float, ...]

    def __init__(self, steps: Sequence[float | timedelta]) -> None:
        if isinstance(steps, str | bytes) or not isinstance(steps, Sequence) or not steps:
            raise OptionError("steps must be a list of at least one duration")
        _set(self, "steps", tuple(_seconds(step, f"steps[{index}]") for index, step in enumerate(steps)))

    def __call__(self, attempt: int, random: Callable[[], float] = random.random) -> float:
        """
        Seconds to wait after this attempt, from 1.
        """
        return self.steps[min(max(attempt, 1), len(self.steps)) - 1]


# The parameter of Fixed has the name of the function.
_seconds = seconds


def delay_after(policy: Backoff, attempt: int) -> float:
    """
    Ask a policy for the seconds to wait, 0 to 30 days. A broken policy is logged and waits as ``Exponential()`` does.
    """
    try:
        delay = seconds(policy(attempt), "delay")
    except BaseException as error:  # whatever user code does here, the job must go back on its queue
        _warn(policy, attempt, error, "waiting as the default policy does")
        delay = Exponential()(attempt)
    if delay > _LONGEST_DELAY:
        _warn(policy, attempt, OverflowError(), "waiting 30 days")
    return min(delay, _LONGEST_DELAY)


def _warn(policy: Backoff, attempt: int, error: BaseException, remedy: str) -> None:
    # The message of a stranger's error may hold anything, its text conversion may raise: its type has to do.
    with contextlib.suppress(Exception):
        _logger.warning(
            "backoff policy %s gave no usable delay after attempt %s (%s): %s",
            type(policy).__name__,
            attempt,
            type(error).__name__,
            remedy,
        )
