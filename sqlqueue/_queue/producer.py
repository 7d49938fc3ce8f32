"""
Registering jobs and pushing them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from sqlalchemy.orm import Session

from .._arguments import check_json, to_json
from .._backoff import Backoff, delay_after, seconds
from .._dialects import closed_when_undone
from .._driver import push as driver
from .._driver.holders import Hold, take_once
from .._driver.push import NewJob, Terms, microseconds
from .._job import BoundJob, Job, JobContext, JobDecorator, Middleware, Pushed, default_name
from .._options import (
    JobOptionValues,
    RowOptions,
    RowOptionValues,
    check_job_name,
    check_middleware,
    split_options,
    stored_once_key,
)
from .._tables import Tables
from ..errors import ArgumentError, OptionError
from .headers import Headers
from .interception import Interception
from .listening import Listening
from .pushing import tell_pushed, tell_pushing
from .registry import Registry
from .sessions import AnySession, check_async, producer_connection
from .wakes import Wakes

if TYPE_CHECKING:
    from typing import Unpack

    from .sessions import AnyAsyncSession

__all__ = ["DEFAULT_QUEUE", "Producer"]

P = ParamSpec("P")
S = TypeVar("S", bound=Session)
R_co = TypeVar("R_co", covariant=True)

DEFAULT_QUEUE = "default"
DEFAULT_PRIORITY = 0
DEFAULT_ATTEMPTS = 5


class Producer(Listening):
    """
    The producer's side of a queue.
    """

    def __init__(
        self,
        tables: Tables,
        session_factory: Callable[[], Session] | None,
        imports: Iterable[str],
        max_payload: int,
        middleware: Sequence[Middleware],
    ) -> None:
        if isinstance(imports, str):
            raise OptionError("imports: a list of module names, not one text")
        if type(max_payload) is not int or max_payload < 1:
            raise OptionError("max_payload: a whole number of bytes of at least 1")
        super().__init__(tables, session_factory)
        self.middleware = check_middleware(middleware)
        self.registry = Registry(imports, wraps_all=bool(self.middleware))
        self.wakes = Wakes()
        self.interception = Interception()
        self.headers = Headers()
        self._max_payload = max_payload

    @overload
    def job(self, function: Callable[Concatenate[JobContext, S, P], R_co], /) -> Job[P, R_co]: ...
    @overload
    def job(self, function: Callable[Concatenate[S, P], R_co], /) -> Job[P, R_co]: ...
    @overload
    def job(self, function: Callable[Concatenate[JobContext, P], R_co], /) -> Job[P, R_co]: ...
    @overload
    def job(self, function: Callable[P, R_co], /) -> Job[P, R_co]: ...
    @overload
    def job(self, /, *, name: str | None = None, **options: Unpack[JobOptionValues]) -> JobDecorator: ...
    def job(self, function: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any) -> Any:
        """
        Register a function as a job: `@queue.job`, or `@queue.job(…)` with options.

        A first parameter annotated with JobContext receives the run's context; all others are the job's arguments, but for a Session
        (or a class derived from it) at the beginning or right after the context. That makes the handler transactional: a session in a
        transaction, from `session_factory` or on the queue's engine, in which the job's completion is written after the handler has
        returned. They are committed together, or rolled back when the handler raises, returns Release, Fail or Discard, or when the
        job is not this worker's any more. So in this database each job takes effect once. What the handler commits itself stays
        committed, whatever becomes of the job. A COMMIT that fails was an attempt like one that raises.

        Args:
            name: what rows call the job; `module.qualname` if not given.
            options: row options (see `Job.options`) and code options. `backoff`: a policy, or a function from the number of
                the attempt that failed to seconds. `on_worker_lost`: what becomes of a job whose worker died or lost the
                lease while it had it; `"retry"` runs it again while it has attempts left, `"fail"` moves it to the failed table.
                `timeout`: seconds or a timedelta that the handler may run; then an async one is cancelled, and a plain one has
                JobTimeout raised in its thread. `fail_on_timeout`: True if that is not worth another attempt. `aliases`: names that
                the job has had; rows under them run it.
                `middleware`: callables `(context, call_next)` around the handler, the first one outermost; see
                `sqlqueue.middleware`. `limit`: how many deliveries may run at once, everywhere together, 1 to 1000;
                `limit_key`: as many for each key: a text, `Key(…)` that jobs share, or a function of the context that
                returns a text. What comes when all places are taken is released for a while; that costs no attempt.

        Raises:
            RegistrationError: the signature or an annotation cannot travel, or the name is taken.
            OptionError: an option is not valid.
        """
        row, code = split_options(options)
        if code.limit_key is not None and code.limit is None:
            raise OptionError("limit_key: say with limit how many may run at once")

        def register(function: Callable[..., Any]) -> Job[..., Any]:
            if isinstance(function, Job):
                raise OptionError(f"{function.name} is a job already")
            known_as = check_job_name(name) if name is not None else check_job_name(default_name(function))
            job: Job[..., Any] = Job(self, function, known_as, row, code)
            self.registry.add(job)
            return job

        return register if function is None else register(function)

    def route(self, job: Job[..., Any] | str, **options: Unpack[JobOptionValues]) -> None:
        """
        Override options of a job, by name or object, without touching its code. A call site's own options still win.

        Example:
            `queue.route("reports.build", queue="heavy", max_attempts=2)`
        """
        row, code = split_options(options)
        self.registry.route(job.name if isinstance(job, Job) else job, row, code)

    @property
    def routing(self) -> object:
        """
        Another object after every `route`.
        """
        return self.registry.routing

    def effective(self, name: str, options: RowOptions, decorated: RowOptions) -> RowOptions:
        """
        The options that a push with these would use.

        Raises:
            OptionError: they do not go together.
        """
        effective = self.registry.row_options(name, options, decorated)
        effective.check_together()
        return effective

    def push_bound(self, session: AnySession, bound: BoundJob, /) -> Pushed:
        """
        Write one bound job in the caller's transaction.
        """
        (job,) = self._new_jobs([bound])
        if (interceptor := self.interception.current) is not None:
            return interceptor.push(session, bound, job)
        connection = producer_connection(session, self.tables.jobs, "push")
        tell_pushing(self.listeners, (job,))
        with closed_when_undone(connection):
            if job.key is None:
                pushed = Pushed(driver.insert_job(connection, self.tables, job), created=True)
            else:
                pushed = driver.insert_keyed_job(connection, self.tables, job)
        if pushed.created or job.terms.hold.replaces:
            self.wakes.pushed(session, connection, (job.terms.queue,))
        if pushed.created:
            tell_pushed(self.listeners, session, connection, ((job, pushed.id),))
        return pushed

    async def push_bound_async(self, session: AnyAsyncSession, bound: BoundJob, /) -> Pushed:
        """
        `push_bound` for an AsyncSession or AsyncConnection.
        """
        if self._takes_any_session:
            return self.push_bound(session, bound)  # type: ignore[arg-type]
        checked = check_async(session, "push")
        pushed: Pushed = await checked.run_sync(lambda sync: self.push_bound(sync, bound))
        return pushed

    def push_many(self, session: AnySession, jobs: Iterable[BoundJob], /) -> int:
        """
        Write many bound jobs in the caller's transaction, in as few statements as their size allows.

        Jobs with a unique key are written one by one, in the order of their keys, so that two such calls cannot lock each
        other out. Everything is checked before anything is written.

        Returns:
            How many were written: all but those whose unique key another job holds, which stays or is replaced.
        """
        return self._push_many(session, list(jobs), "push_many")

    def _push_many(self, session: AnySession, bound: Sequence[BoundJob], method: str) -> int:
        rows = self._new_jobs(bound)
        if (interceptor := self.interception.current) is not None:
            return sum(interceptor.push(session, one, row).created for one, row in zip(bound, rows, strict=True))
        connection = producer_connection(session, self.tables.jobs, method)
        keyed = sorted((row for row in rows if row.key is not None), key=lambda row: row.key or "")
        plain = [row for row in rows if row.key is None]
        tell_pushing(self.listeners, rows)
        with closed_when_undone(connection):
            pushed = [driver.insert_keyed_job(connection, self.tables, row) for row in keyed]
            written = sum(one.created for one in pushed) + driver.insert_jobs(connection, self.tables, plain)
        if written or any(row.terms.hold.replaces for row in keyed):
            self.wakes.pushed(session, connection, {row.terms.queue for row in rows})
        if written and self.listeners.kinds:
            created = [(row, one.id) for row, one in zip(keyed, pushed, strict=True) if one.created]
            tell_pushed(self.listeners, session, connection, [*created, *((row, None) for row in plain)])
        return written

    async def push_many_async(self, session: AnyAsyncSession, jobs: Iterable[BoundJob], /) -> int:
        """
        `push_many` for an AsyncSession or AsyncConnection.
        """
        if self._takes_any_session:
            return self.push_many(session, jobs)  # type: ignore[arg-type]
        checked = check_async(session, "push_many")
        written: int = await checked.run_sync(lambda sync: self.push_many(sync, jobs))
        return written

    def push_named(self, session: AnySession, name: str, payload: Mapping[str, Any], /, **options: Unpack[RowOptionValues]) -> Pushed:
        """
        Push a job by name, for a producer that does not have its code. The payload is the arguments as JSON values.

        Raises:
            ArgumentError: JSON cannot carry the payload.
            OptionError: the name or an option is not valid.

        Example:
            `queue.push_named(session, "invoices.send", {"invoice_id": 7}, queue="mail")`
        """
        return self.push_bound(session, self._bind_named(name, payload, options))

    async def push_named_async(
        self, session: AnyAsyncSession, name: str, payload: Mapping[str, Any], /, **options: Unpack[RowOptionValues]
    ) -> Pushed:
        """
        `push_named` for an AsyncSession or AsyncConnection.
        """
        return await self.push_bound_async(session, self._bind_named(name, payload, options))

    def once(self, session: AnySession, key: str, /, *, expire_after: float | timedelta | None = None) -> bool:
        """
        Whether this is the first time for this key, in a transaction that commits: a guard for handlers with outside effects.

        The answer belongs to the caller's transaction: if that rolls back, it was not the first time. Somebody who asks
        meanwhile waits for its end. Keys are shared by everything that uses the queue's tables.

        Args:
            expire_after: seconds or a timedelta after which the key is forgotten; never if not given.

        Raises:
            OptionError: the key is no text, or the duration is none.
            NotTransactional: this connection would not commit the answer together with your work.

        Example:
            ```python
            with Session(engine) as session, session.begin():
                if queue.once(session, f"paid:{order_id}"):
                    session.add(Payment(order_id=order_id))
            ```
        """
        stored = stored_once_key(key)
        kept_for = None if expire_after is None else microseconds(seconds(expire_after, "expire_after"))
        connection = producer_connection(session, self.tables.jobs, "once")  # the keys are where the jobs are
        with closed_when_undone(connection):
            return take_once(connection, self.tables, stored, kept_for)

    async def once_async(self, session: AnyAsyncSession, key: str, /, *, expire_after: float | timedelta | None = None) -> bool:
        """
        `once` for an AsyncSession or AsyncConnection.
        """
        checked = check_async(session, "once")
        first: bool = await checked.run_sync(lambda sync: self.once(sync, key, expire_after=expire_after))
        return first

    @property
    def _takes_any_session(self) -> bool:
        interceptor = self.interception.current
        return interceptor is not None and interceptor.takes_any_session

    def _bind_named(self, name: str, payload: Mapping[str, Any], options: Mapping[str, Any]) -> BoundJob:
        check_job_name(name)
        if not isinstance(payload, Mapping):
            raise ArgumentError(f"payload: a mapping of argument names to JSON values, not a {type(payload).__name__}")
        arguments = dict(payload)
        for parameter, value in arguments.items():
            if type(parameter) is not str:
                raise ArgumentError("payload: the names of arguments are text")
            check_json(value, parameter)
        return BoundJob(name, to_json(arguments), self.effective(name, RowOptions.of(options), RowOptions()), self)

    def _new_jobs(self, jobs: Sequence[BoundJob]) -> list[NewJob]:
        """
        Check them, and work out the terms of those that were bound with the same options once.
        """
        known: dict[tuple[str, int], Terms] = {}  # by identity: `jobs` keeps the options alive meanwhile
        new = []
        for bound in jobs:
            self._check_bound(bound)
            options = bound.options
            place = (bound.name, id(options))
            terms = known.get(place)
            if terms is None:
                terms = known[place] = _terms(bound.name, options, self.headers.filled(bound.name, options.headers))
            new.append(NewJob(terms, bound.payload, bound.key))
        return new

    def _check_bound(self, bound: BoundJob) -> None:
        if not isinstance(bound, BoundJob):
            raise TypeError(f"a bound job is made with job.bind(…), not a {type(bound).__name__}")
        if len(bound.payload) > self._max_payload:
            raise ArgumentError(
                f"payload: the arguments of {bound.name} take {len(bound.payload)} bytes as JSON, more than max_payload={self._max_payload}"
            )

    def backoff(self, name: str, attempt: int) -> float:
        """
        Seconds until the next attempt of a job whose attempt number `attempt` failed, by today's policy.
        """
        policy: Backoff = self.registry.backoff(name)
        return delay_after(policy, attempt)


def _terms(name: str, options: RowOptions, headers: Mapping[str, str] | None) -> Terms:
    return Terms(
        queue=options.queue or DEFAULT_QUEUE,
        name=name,
        priority=DEFAULT_PRIORITY if options.priority is None else options.priority,
        max_attempts=options.max_attempts or DEFAULT_ATTEMPTS,
        due=options.available_at if options.available_at is not None else options.delay or 0.0,
        deadline=options.deadline,
        headers=to_json(dict(headers)) if headers else None,
        hold=_hold(options),
    )


def _hold(options: RowOptions) -> Hold:
    return Hold(
        until_started=options.unique_until == "started",
        kept_for=microseconds(options.unique_for) if options.unique_for else None,
        replaces=options.on_conflict == "replace",
    )
