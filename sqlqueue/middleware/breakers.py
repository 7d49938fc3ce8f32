"""
What becomes of exceptions, and of jobs that need not run: `ThrottlesExceptions`, `FailOn`, `SkipIf`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .._backoff import seconds
from .._driver.permits import closed_for, note_exception
from .._failure import Failure
from .._job import CallNext, Discard, Fail, JobContext, Release, Store
from .._options import Key, check_key
from .._queue.handler_sessions import NotStarted
from ..errors import OptionError
from .keys import LONGEST, AnyKey, jittered, key_of, released_in_trouble, warn

__all__ = ["FailOn", "SkipIf", "ThrottlesExceptions"]

OUTCOMES = (Release, Fail, Discard, NotStarted)
MOST = 1_000_000


class ThrottlesExceptions:
    """
    Stops running the jobs of a key for a while after `limit` exceptions within `per` seconds: they are released until then.

    The time begins with the first exception. Exceptions count as attempts of their jobs; being released does not.

    Args:
        limit: how many exceptions.
        per: in what time, seconds or a timedelta, at most 30 days.
        key: a text, or a function of the context. Each job has its own if not given.
        pause: for how long no job of the key runs, seconds or a timedelta, at most 30 days; as long as `per` if not given.
        on: the exceptions that count.

    Example:
        `@queue.job(middleware=[ThrottlesExceptions(5, per=60, key="payment-service", pause=300, on=(ConnectionError,))])`
    """

    def __init__(
        self,
        limit: int,
        per: float | timedelta,
        key: str | Callable[[JobContext], str | int] | Key | None = None,
        *,
        pause: float | timedelta | None = None,
        on: type[Exception] | tuple[type[Exception], ...] = Exception,
    ) -> None:
        if type(limit) is not int or not 1 <= limit <= MOST:
            raise OptionError(f"limit: a whole number from 1 to {MOST}")
        self._limit = limit
        self._per = seconds(per, "per", minimum=0.001, maximum=LONGEST)
        self._pause = self._per if pause is None else seconds(pause, "pause", minimum=0.001, maximum=LONGEST)
        self._key: AnyKey | None = None if key is None else check_key("key", key)
        self._on = _check_exceptions("on", on if isinstance(on, tuple) else (on,))

    def __call__(self, context: JobContext, call_next: CallNext) -> Any:
        store = context._store
        if store is None:
            return call_next()
        key = key_of("exceptions", self._key, context)
        with released_in_trouble("its exceptions cannot be counted", context):
            closed = store.read(lambda connection, tables: closed_for(connection, tables, key))
        if closed:
            raise Release(closed + jittered(min(closed, 1.0) / 8, 1))
        try:
            return call_next()
        except OUTCOMES:
            raise
        except self._on:
            self._note(context, store, key)
            raise

    def _note(self, context: JobContext, store: Store, key: str) -> None:
        """
        Count it. If that fails it is not counted: it has to reach the worker as it is.
        """

        def note(connection: Any, tables: Any) -> bool:
            return note_exception(connection, tables, key, limit=self._limit, per=self._per, pause=self._pause)

        try:
            closed = store.write(note)
        except Exception as error:
            warn("job %d (%s): its exception was not counted: %s", context.id, context.name, type(error).__name__)
        else:
            if closed:
                warn("%s: %d exceptions; no job of this key runs for %g s", context.name, self._limit, self._pause)


class SkipIf:
    """
    Discards the job instead of running it when the condition holds: it is neither done nor failed.

    Args:
        condition: a function of the context, or a truth value of the moment at which the job was registered.

    Example:
        `@queue.job(middleware=[SkipIf(lambda context: not feature_is_on(context.arguments["tenant"]))])`
    """

    def __init__(self, condition: Callable[[JobContext], object] | bool) -> None:
        if not callable(condition) and not isinstance(condition, bool):
            raise OptionError("condition: a function of the context, or a bool")
        self._condition = condition

    def __call__(self, context: JobContext, call_next: CallNext) -> Any:
        if self._condition(context) if callable(self._condition) else self._condition:
            raise Discard
        return call_next()


class FailOn:
    """
    Moves the job to the failed table at once, whatever attempts are left, when it raises one of these exceptions.

    Example:
        `@queue.job(middleware=[FailOn(ValueError, LookupError)])`
    """

    def __init__(self, *exceptions: type[Exception]) -> None:
        self._exceptions = _check_exceptions("exceptions", exceptions)

    def __call__(self, context: JobContext, call_next: CallNext) -> Any:
        try:
            return call_next()
        except OUTCOMES:
            raise
        except self._exceptions as error:
            raise Fail(Failure.from_exception(error).last_error) from error


def _check_exceptions(name: str, kinds: tuple[Any, ...]) -> tuple[type[Exception], ...]:
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise OptionError(f"{name}: one or more classes of exceptions")
    return kinds
