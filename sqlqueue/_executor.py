"""
From one delivery to one outcome: find the job, restore its arguments, run it, judge how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from sqlalchemy.orm import Session

from ._backoff import seconds
from ._driver.settle import Complete, Move, Outcome
from ._driver.settle import Release as ReleaseRow
from ._failure import Failure, Reason, one_line
from ._job import Delivery, Discard, Fail, Job, JobContext, Middleware, Release, make_current
from ._queue import Queue
from ._queue.handler_sessions import NotStarted, run_in_plain_session, run_in_session
from ._secrets import secrets_of
from ._timeouts import AsyncWatch, ThreadWatch, Timeouts, Watch
from .errors import JobTimeout
from .middleware.onion import layers_of, run_through

__all__ = ["Ended", "Status", "run_delivery", "run_delivery_async"]

log = logging.getLogger("sqlqueue")


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
    failure: Failure | None = field(default=None, repr=False, compare=False)
    """What went wrong, if something did."""


DONE = Ended(Status.DONE, Complete())
DONE_AND_COMMITTED = Ended(Status.DONE, Complete(), committed=True)
NOT_STARTED_DELAY = 1.0
LONGEST_CHAIN = 50
OUTCOMES = (Release, Fail, Discard)
UNFINISHED = (CoroutineType, GeneratorType, AsyncGeneratorType)


def run_delivery(
    queue: Queue,
    delivery: Delivery,
    context: JobContext,
    worker: str,
    *,
    caught: Callable[[BaseException], None] | None = None,
    timeouts: Timeouts | None = None,
    own_store: bool = True,
) -> Ended:
    """
    Run a delivery's job in this thread, an async handler in a loop of its own beside it. Whatever the handler does becomes an
    outcome; nothing is raised.

    Args:
        caught: is handed what the handler raised. An outcome does not keep it: it holds on to the handler's variables.
        timeouts: who watches the clock.
        own_store: middleware writes to the queue's own database, and not where the context says. If that says nowhere, the
            job has no row either.
    """
    run = _Run(queue, delivery, context, worker, caught=caught, timeouts=timeouts)
    try:
        job = run.prepare()
        if job.signature.is_async:
            return _complete_beside(run.call_async())
        run.work(own_store=own_store)
    except BaseException as error:  # sys.exit() and KeyboardInterrupt of a handler end the job, not the worker
        if context._committed:
            with contextlib.suppress(BaseException):  # a handler of the log's
                log.warning("job %d (%s) is done; then its middleware raised %s", delivery.id, delivery.name, type(error).__name__)
            return DONE_AND_COMMITTED
        return run.judge(error)
    finally:
        run.close()
    return DONE_AND_COMMITTED if context._committed else DONE


async def run_delivery_async(queue: Queue, delivery: Delivery, context: JobContext, worker: str, *, timeouts: Timeouts) -> Ended:
    """
    `run_delivery` for an async handler, in a task of its own.
    """
    run = _Run(queue, delivery, context, worker, timeouts=timeouts)
    try:
        run.prepare()
    except BaseException as error:
        return run.judge(error)
    return await run.call_async()


def _through(layers: Sequence[Middleware], context: JobContext, handle: Callable[[], Any]) -> None:
    """
    Run the handler inside of its middleware, which shares its context variables.
    """

    def run() -> None:
        make_current(context)
        run_through(layers, context, handle, _raise_outcome)

    contextvars.copy_context().run(run)


class _Run:
    """
    One run of a handler, and what is needed to judge its end.
    """

    def __init__(
        self,
        queue: Queue,
        delivery: Delivery,
        context: JobContext,
        worker: str,
        *,
        caught: Callable[[BaseException], None] | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._queue = queue
        self._delivery = delivery
        self._context = context
        self._worker = worker
        self._caught = caught
        self._timeouts = timeouts
        self._own_timeouts: Timeouts | None = None
        self._watch: Watch | None = None
        self._secrets: tuple[str, ...] = ()

    def prepare(self) -> Job[..., Any]:
        """
        Find the job, and restore its arguments.
        """
        payload = self._delivery.payload
        self._job = job = self._queue.registry.find(self._delivery.name)
        self._secrets = secrets_of(job.signature, payload)
        self._arguments = job.signature.decode(payload)
        self._secrets += secrets_of(job.signature, self._arguments)
        self._context._arguments = partial(job.signature.complete, self._arguments)
        return job

    def work(self, *, own_store: bool) -> None:
        """
        Run the handler, inside of its middleware if it has any.
        """
        context, queue = self._context, self._queue
        layers = layers_of(queue.middleware, queue.registry.code(self._delivery.name))
        handle = partial(self._handle, has_row=own_store or context._store is not None)
        if layers:
            context._token, context._store = self._delivery.token, queue.store if own_store else context._store
            _through(layers, context, handle)
        else:
            handle()

    def _handle(self, *, has_row: bool) -> Any:
        """
        Run the handler, a transactional one in its transaction; what it returned.
        """
        kind = self._job.signature.session_type
        if kind is None:
            return self.call()
        if not has_row:
            return run_in_plain_session(self._queue, kind, self.call_in_session)
        result = run_in_session(self._queue, self._delivery, self._context, kind, self.call_in_session)
        self._context._committed = True
        return result

    def call(self, *session: Session) -> Any:
        leading = (self._context, *session) if self._job.signature.takes_context else session
        handler = partial(self._job.function, *leading, **self._arguments)
        if (timeout := self._queue.registry.code(self._delivery.name).timeout) is not None:
            self._watch = watch = ThreadWatch(self._watching(), timeout, self._delivery)
            self._context._renew = watch.shielded(self._context._renew)
            handler = partial(watch.around, handler)
        # A copy: context variables that a handler sets must not reach the next job of this thread.
        result = contextvars.copy_context().run(_call, self._queue, self._context, handler)
        if result is not None:
            _raise_outcome(result)
        return result

    def call_in_session(self, session: Session) -> Any:
        try:
            result = self.call(session)
        finally:
            if self._watch is not None and self._watch.fired:
                # It may have come in the middle of an exchange with the database: what is read next could be an earlier answer.
                with contextlib.suppress(Exception):
                    session.invalidate()
        if self._watch is not None and self._watch.fired:
            raise JobTimeout(f"{self._watch.text}; what it has written is rolled back, although it has returned")
        return result

    async def call_async(self) -> Ended:
        """
        Call, await and judge. Nothing is raised: the loop would end of a SystemExit.
        """
        try:
            leading = (self._context,) if self._job.signature.takes_context else ()
            make_current(self._context)
            work = self._job.function(*leading, **self._arguments)
            if (timeout := self._queue.registry.code(self._delivery.name).timeout) is not None:
                self._watch = watch = AsyncWatch(self._watching(), timeout, self._delivery)
                work = watch.around(work)
            if self._queue.headers.are_read:
                with self._queue.headers.reading(self._context.headers):
                    result = await work
            else:
                result = await work
            if result is not None:
                _raise_outcome(result)
        except BaseException as error:
            return self.judge(error)
        return DONE

    def judge(self, error: BaseException) -> Ended:
        if self._caught is not None:
            self._caught(error)
        return _judge(self._queue, self._delivery, self._worker, error, self._secrets, timed_out=_has_timed_out(error, self._watch))

    def close(self) -> None:
        if self._own_timeouts is not None:
            self._own_timeouts.close()

    def _watching(self) -> Timeouts:
        if self._timeouts is None:
            self._timeouts = self._own_timeouts = Timeouts()
        return self._timeouts


def _call(queue: Queue, context: JobContext, handler: Callable[[], Any]) -> Any:
    make_current(context)
    if not queue.headers.are_read:
        return handler()
    with queue.headers.reading(context.headers):
        return handler()


def _complete_beside(work: Coroutine[Any, Any, Ended]) -> Ended:
    """
    Run a coroutine that raises nothing, in a loop and a thread of its own: here may be a loop already, or a test's.
    """
    ended: list[Ended] = []

    async def work_through() -> None:
        ended.append(await work)

    def run() -> None:
        with contextlib.suppress(BaseException):  # of tasks that the handler has left behind
            asyncio.run(work_through())

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="sqlqueue-async", daemon=True)
    thread.start()
    thread.join()
    return ended[0]


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


def _has_timed_out(error: BaseException, watch: Watch | None) -> bool:
    """
    Whether the handler has let a JobTimeout pass. Drivers make errors of their own of it: it is a TimeoutError, which they know.
    """
    link: BaseException | None = error
    for _ in range(LONGEST_CHAIN if watch is not None and watch.fired else 1):
        if link is None or issubclass(type(link), JobTimeout):
            break
        try:
            link = link.__cause__ or link.__context__
        except BaseException:  # a stranger's attributes may do anything
            return False
    return link is not None and issubclass(type(link), JobTimeout)


def _judge(
    queue: Queue, delivery: Delivery, worker: str, error: BaseException, secrets: tuple[str, ...], *, timed_out: bool = False
) -> Ended:
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
        return Ended(Status.FAILED, Move(failure, worker), one_line(failure.message), failure=failure)
    failure = Failure.from_exception(error, Reason.TIMED_OUT if timed_out else Reason.EXCEPTION, secrets)
    if delivery.last_attempt or (timed_out and queue.registry.code(delivery.name).fail_on_timeout):
        return Ended(Status.FAILED, Move(failure, worker), one_line(failure.last_error), failure=failure)
    delay = queue.backoff(delivery.name, delivery.attempt)
    note = f"again in {delay:.1f} s: {one_line(failure.last_error)}"
    return Ended(Status.RETRYING, ReleaseRow(delay, failure.last_error), note, failure=failure)
