"""
Jobs as Python sees them: what is registered, bound, pushed, delivered, and how a handler may end.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import update_wrapper
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from ._arguments import Signature, to_json
from ._backoff import seconds
from ._options import NO_ROW_OPTIONS, CodeOptions, RowOptions, RowOptionValues, stored_key
from .errors import RegistrationError

if TYPE_CHECKING:
    from typing import Unpack

    from sqlalchemy.orm import Session

    from ._queue.sessions import AnyAsyncSession, AnySession

P = ParamSpec("P")
S = TypeVar("S", bound="Session")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
JSON = Any


# --- how a handler may end, other than by returning -------------------------------------------------------------------


class Release(Exception):
    """
    Raise it (or return it) to put the job back on the queue without costing an attempt. What a transactional handler has written
    is rolled back.

    Args:
        delay: seconds or a timedelta until it is due again.
    """

    def __init__(self, delay: float | timedelta = 0) -> None:
        self.delay = seconds(delay, "delay")
        super().__init__(f"released by its handler for {self.delay:g} s")


class Fail(Exception):
    """
    Raise it (or return it) to move the job to the failed table now, whatever attempts are left. What a transactional handler has
    written is rolled back.
    """

    def __init__(self, reason: str = "failed by its handler") -> None:
        super().__init__(reason)


class Discard(Exception):
    """
    Raise it (or return it) to delete the job: neither done nor failed. What a transactional handler has written is rolled back.
    """


# --- a job and what is made of it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pushed:
    """
    What a push answers.
    """

    id: int
    """The job's id; of the job that holds the unique key if `created` is False."""
    created: bool
    """False when another job holds the unique key: nothing was written, or with `on_conflict="replace"` that job was changed."""


@dataclass(frozen=True, slots=True)
class BoundJob:
    """
    A job with its arguments and options, checked and not pushed yet.
    """

    name: str
    payload: str = field(repr=False)
    options: RowOptions = field(repr=False)
    producer: Producer = field(repr=False, compare=False)

    def push(self, session: AnySession, /) -> Pushed:
        """
        Write the job in the caller's transaction.
        """
        return self.producer.push_bound(session, self)

    async def push_async(self, session: AnyAsyncSession, /) -> Pushed:
        """
        `push` for an AsyncSession or AsyncConnection.
        """
        return await self.producer.push_bound_async(session, self)

    @property
    def key(self) -> str | None:
        return stored_key(self.options.unique, self.name, self.payload)


class Producer(Protocol):
    """
    What a job needs of its queue.
    """

    @property
    def routing(self) -> object: ...
    def push_bound(self, session: AnySession, bound: BoundJob, /) -> Pushed: ...
    async def push_bound_async(self, session: AnyAsyncSession, bound: BoundJob, /) -> Pushed: ...
    def effective(self, name: str, options: RowOptions, decorated: RowOptions) -> RowOptions: ...


class Job(Generic[P, R_co]):
    """
    A registered function. Calling it runs the function here and now; `push` asks for a run by a worker. The session of a
    transactional handler is the caller's then, and nothing is committed.

    Example:
        ```python
        @queue.job(max_attempts=3)
        def send_invoice(invoice_id: int) -> None: ...

        with Session(engine) as session, session.begin():
            send_invoice.push(session, 42)
        ```
    """

    def __init__(self, producer: Producer, function: Callable[..., R_co], name: str, row: RowOptions, code: CodeOptions) -> None:
        self.name = name
        self.function = function
        self.signature = Signature(function, context_type=JobContext)
        self.code = code
        self._producer = producer
        self.decorated = row
        self._row = NO_ROW_OPTIONS
        self._resolved: tuple[object, RowOptions] | None = None
        update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<Job {self.name}>"

    def __reduce__(self) -> str:
        # As a function: by the place where another process finds it, so that it is the job of that process's queue.
        return str(getattr(self, "__qualname__", self.name))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        if self.signature.takes_context and not (args and isinstance(args[0], JobContext)):
            return self.function(JobContext(id=0, name=self.name, queue="", attempt=1, max_attempts=1), *args, **kwargs)
        return self.function(*args, **kwargs)

    def options(self, **options: Unpack[RowOptionValues]) -> Job[P, R_co]:
        """
        This job with other row options, for one push or many.

        Args:
            queue: the queue's name.
            priority: -100 to 100, higher first.
            delay: seconds or a timedelta from the push until it is due.
            available_at: the aware datetime at which it is due, instead of a delay.
            unique: a key that at most one waiting or running job holds: text (per job name), `Key(…)` (shared), True (the arguments).
            unique_until: `"finished"`, or `"started"`: the claim frees the key, so that a change pushed while the job runs makes
                another job. A job that comes back, to be retried or because its worker was stopped, holds its key no more.
            unique_for: seconds or a timedelta from the push for which the key stays taken, whatever becomes of the job.
            on_conflict: `"keep"` the job that holds the key, or `"replace"` it: as long as it waits it becomes this job, with
                everything that this push says, under its own id; behind one that has started this job waits and takes the key.
            max_attempts: how often it may be started, the first time included.
            deadline: an aware datetime, or seconds from the push, after which it is not started any more.
            headers: a mapping of text to text that travels with the job.

        Raises:
            OptionError: an option is not valid. What options say together is checked at the push.

        Example:
            `send_invoice.options(delay=60, unique=f"invoice:{number}").push(session, number)`
        """
        copy: Job[P, R_co] = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._row = RowOptions.of(options).over(self._row)
        copy._resolved = None
        return copy

    def bind(self, /, *args: P.args, **kwargs: P.kwargs) -> BoundJob:
        """
        The job with these arguments, for `Queue.push_many` or a later push.

        Raises:
            ArgumentError: the arguments do not fit, or JSON cannot carry them.
        """
        payload = to_json(self.signature.encode(args, kwargs))
        return BoundJob(self.name, payload, self._effective(), self._producer)

    def _effective(self) -> RowOptions:
        """
        The options that a push now has: resolved once, until something is routed. So jobs bound one after another share
        the object, which `push_many` knows to use.
        """
        routing = self._producer.routing  # asked first: what is routed meanwhile is found next time
        resolved = self._resolved
        if resolved is None or resolved[0] is not routing:
            resolved = self._resolved = (routing, self._producer.effective(self.name, self._row, self.decorated))
        return resolved[1]

    def push(self, session: AnySession, /, *args: P.args, **kwargs: P.kwargs) -> Pushed:
        """
        Write the job in the transaction of `session` (a Session, scoped_session or Connection).

        If that rolls back, there never was a job; if it commits, the job exists. Nothing is flushed, no savepoint is
        opened, and an error of the database reaches you as it is.

        Raises:
            ArgumentError: the arguments do not fit, or JSON cannot carry them. Nothing was written.
            NotTransactional: this connection would not commit the job together with your work.
        """
        return self._producer.push_bound(session, self.bind(*args, **kwargs))

    async def push_async(self, session: AnyAsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> Pushed:
        """
        `push` for an AsyncSession or AsyncConnection.
        """
        return await self._producer.push_bound_async(session, self.bind(*args, **kwargs))


class JobDecorator(Protocol):
    """
    `@queue.job(…)`: takes a leading context and session off the parameters that a push is checked against.
    """

    @overload
    def __call__(self, function: Callable[Concatenate[JobContext, S, P], R_co], /) -> Job[P, R_co]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, P], R_co], /) -> Job[P, R_co]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[JobContext, P], R_co], /) -> Job[P, R_co]: ...
    @overload
    def __call__(self, function: Callable[P, R_co], /) -> Job[P, R_co]: ...


def default_name(function: Callable[..., Any]) -> str:
    """
    The name of a job that was not named.

    Raises:
        RegistrationError: the function's place is not one that another process could find.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module in (None, "__main__") or qualname is None or "<locals>" in qualname or "<lambda>" in qualname:
        where = "in __main__" if module == "__main__" else "inside a function"
        raise RegistrationError(f"a job defined {where} has no name that a worker would find: give it one with @queue.job(name=…)")
    return f"{module}.{qualname}"


# --- what a worker is handed ------------------------------------------------------------------------------------------


@dataclass(slots=True)  # not frozen, which takes seven times as long to make; there are thousands a second
class Delivery:
    """
    What a claim hands out: the row, the number of the attempt, and the token that only this claim knows. To be read only.
    """

    id: int
    name: str
    queue: str
    payload: Mapping[str, JSON] = field(repr=False)
    attempt: int
    max_attempts: int
    token: str = field(repr=False)
    lease_until: datetime
    headers: Mapping[str, str] = field(repr=False)
    deadline: datetime | None = None
    unique: bool = field(default=False, repr=False)
    """Whether the job holds a unique key."""
    reclaimed_from: str | None = None
    """The worker whose lease on this job ended before it settled; None for a job that nobody had."""

    @property
    def last_attempt(self) -> bool:
        return self.attempt >= self.max_attempts


class Store(Protocol):
    """
    Short transactions beside the handler's.
    """

    def read(self, operation: Callable[[Any, Any], T], /) -> T:
        """
        Run `operation(connection, tables)` in a transaction that reads.
        """

    def write(self, operation: Callable[[Any, Any], T], /) -> T:
        """
        Run `operation(connection, tables)` in a transaction, again after a conflict.
        """


def _cannot_renew() -> NoReturn:
    raise RuntimeError("this job does not run under a lease: it was called directly")


def _is_not_locked() -> bool:
    return False


@dataclass(slots=True, kw_only=True)
class JobContext:
    """
    What a handler may know about its run. Ask for it by annotating the first parameter: `context: JobContext`.
    """

    id: int
    name: str
    queue: str
    attempt: int
    max_attempts: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    deadline: datetime | None = None
    lost: bool = False
    """True once the lease is known or feared to be gone: stop, your result may be refused."""
    _arguments: Callable[[], Mapping[str, Any]] = field(default=dict, repr=False)
    _token: str = field(default="", repr=False)
    _store: Store | None = field(default=None, repr=False)
    """Where built-in middleware keeps what all workers have to know; None where nothing may be written."""
    _committed: bool = field(default=False, repr=False)
    """The handler's own transaction has completed the job."""
    _renew: Callable[[], bool] = field(default=_cannot_renew, repr=False)
    _locked: Callable[[], bool] = field(default=_is_not_locked, repr=False)
    """Whether the transaction of the handler holds the job's row: then nobody else can take it, whatever the lease says."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """
        The job's arguments by name, restored as the handler gets them, with the defaults of those that were left out. To be
        read only.
        """
        return MappingProxyType(dict(self._arguments()))

    def renew(self) -> bool:
        """
        Extend the lease now, beyond what the worker does by itself. False: the job is not ours any more, stop.

        It waits for the database: in an async handler await `renew_async`.
        """
        return self._locked() or self._renew()

    async def renew_async(self) -> bool:
        """
        `renew`, while the event loop goes on.
        """
        import asyncio

        return await asyncio.to_thread(self.renew)


CallNext: TypeAlias = Callable[[], Any]
Middleware: TypeAlias = Callable[[JobContext, CallNext], Any]
"""
What stands around a handler. `call_next()` runs the rest, once, and returns what the handler returned.
"""

_current: contextvars.ContextVar[JobContext | None] = contextvars.ContextVar("sqlqueue_current_job", default=None)


def current_job() -> JobContext | None:
    """
    The context of the job that this code runs in, or None outside a worker.
    """
    return _current.get()


def make_current(context: JobContext) -> None:
    """
    Make `context` the current job, for the rest of a copy of the context variables that is thrown away after the run.
    """
    _current.set(context)
