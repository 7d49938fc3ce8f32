"""
From one delivery to one outcome: find the job, restore its arguments, run it, judge how it ended.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from sqlalchemy.orm import Session

from ._backoff import seconds
from ._driver.settle import Complete, Move, Outcome
from ._driver.settle import Release as ReleaseRow
from ._failure import Failure, Reason, one_line
from ._job import Delivery, Discard, Fail, Job, JobContext, Release, make_current
from ._queue import Queue
from ._queue.handler_sessions import NotStarted, run_in_session

__all__ = ["Ended", "Status", "run_delivery"]


class Status(StrEnum):
    """
    How a delivery ended, for people.
    """

    DONE = "done"
    RETRYING = "retrying"
    FAILED = "failed"
    RELEASED = "released"
    RETURNED = "returned"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class Ended:
    """
    One outcome of one delivery: what to write, and what to say about it.
    """

    status: Status
    outcome: Outcome
    note: str = ""
    committed: bool = False
    """The handler's own transaction has written it."""


DONE = Ended(Status.DONE, Complete())
DONE_AND_COMMITTED = Ended(Status.DONE, Complete(), committed=True)
NOT_STARTED_DELAY = 1.0
OUTCOMES = (Release, Fail, Discard)
UNFINISHED = (CoroutineType, GeneratorType, AsyncGeneratorType)


def run_delivery(
    queue: Queue, delivery: Delivery, context: JobContext, worker: str, *, caught: Callable[[BaseException], None] | None = None
) -> Ended:
    """
    Run a delivery's job in this thread. Whatever the handler does becomes an outcome; nothing is raised.

    Args:
        caught: is handed what the handler raised. An outcome does not keep it: it holds on to the handler's variables.
    """
    secrets: tuple[str, ...] = ()
    try:
        job = queue.registry.find(delivery.name)
        secrets = _secrets(job, delivery.payload)
        arguments = job.signature.decode(delivery.payload)
        secrets += _secrets(job, arguments)
        call = partial(_run, job, context, arguments)
        if job.signature.session_type is not None:
            run_in_session(queue, delivery, context, job.signature.session_type, call)
            return DONE_AND_COMMITTED
        call()
    except BaseException as error:  # sys.exit() and KeyboardInterrupt of a handler end the job, not the worker
        if caught is not None:
            caught(error)
        return _judge(queue, delivery, worker, error, secrets)
    return DONE


def _run(job: Job[..., Any], context: JobContext, arguments: Mapping[str, Any], *session: Session) -> None:
    leading = (context, *session) if job.signature.takes_context else session
    # A copy: context variables that a handler sets must not reach the next job of this thread.
    result = contextvars.copy_context().run(_call, job, context, leading, arguments)
    if result is not None:
        _raise_outcome(result)


def _call(job: Job[..., Any], context: JobContext, leading: tuple[Any, ...], arguments: Mapping[str, Any]) -> Any:
    make_current(context)
    return job.function(*leading, **arguments)


def _raise_outcome(result: object) -> None:
    """
    To return an outcome is to raise it. A coroutine or generator is work that has not been done.
    """
    kind = type(result)
    if issubclass(kind, OUTCOMES) or (kind is type and issubclass(result, OUTCOMES)):  # type: ignore[arg-type]
        raise result  # type: ignore[misc]
    if issubclass(kind, UNFINISHED):
        with contextlib.suppress(BaseException):
            result.close()  # type: ignore[attr-defined]
        raise TypeError(f"the handler returned a {kind.__name__} that nobody runs: its work has not been done")


def _judge(queue: Queue, delivery: Delivery, worker: str, error: BaseException, secrets: tuple[str, ...]) -> Ended:
    kind = type(error)  # not isinstance: an exception may refuse to say what its class is
    if issubclass(kind, Discard):
        return Ended(Status.DISCARDED, Complete())
    if issubclass(kind, Release):
        with contextlib.suppress(BaseException):  # a delay that somebody spoilt after it was checked is a failure like any other
            delay = seconds(error.delay, "delay")  # type: ignore[attr-defined]
            return Ended(Status.RELEASED, ReleaseRow(delay, None), f"due again in {delay:g} s")
    if issubclass(kind, NotStarted):
        note = f"again in {NOT_STARTED_DELAY:g} s, there was no transaction for it: {one_line(str(error))}"
        return Ended(Status.RETRYING, ReleaseRow(NOT_STARTED_DELAY, None), note)
    if issubclass(kind, Fail):
        failure = Failure.from_exception(error, Reason.FAILED_BY_JOB, secrets)
        return Ended(Status.FAILED, Move(failure, worker), one_line(failure.message))
    failure = Failure.from_exception(error, Reason.EXCEPTION, secrets)
    if delivery.last_attempt:
        return Ended(Status.FAILED, Move(failure, worker), one_line(failure.last_error))
    delay = queue.backoff(delivery.name, delivery.attempt)
    return Ended(Status.RETRYING, ReleaseRow(delay, failure.last_error), f"again in {delay:.1f} s: {one_line(failure.last_error)}")


def _secrets(job: Job[..., Any], values: Mapping[str, Any]) -> tuple[str, ...]:
    """
    The texts as which sensitive arguments may show up in an error: whole, in their parts, and as Python and JSON quote them.
    """
    names = job.signature.sensitive
    if not names:
        return ()
    parts = (part for name in names if name in values for part in _parts(values[name]))
    return tuple({text for part in parts for text in _texts(part)})


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None:  # their texts are everywhere, and no secret
        return
    yield value
    if isinstance(value, dict):
        for inner in value.values():
            yield from _parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parts(inner)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        yield from (quoted[1:-1] for quoted in (repr(value), ascii(value), json.dumps(value)))
        return
    for text in (str, repr):
        with contextlib.suppress(Exception):  # a user's own class
            yield text(value)
