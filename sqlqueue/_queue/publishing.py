"""
Publishing events: a job for each subscriber, in the transaction of what has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from sqlalchemy.orm import Session

from .._arguments import is_shaped, to_json
from .._job import BoundJob, Job, JobContext, Middleware
from .._options import NO_ROW_OPTIONS, JobOptionValues
from .._tables import Tables
from ..errors import UnknownJob
from .producer import Producer
from .sessions import AnySession, check_async
from .subscribers import Subscribers, check_event, check_takes

if TYPE_CHECKING:
    from typing import Unpack

    from .sessions import AnyAsyncSession

__all__ = ["Publishing"]

E = TypeVar("E")
S = TypeVar("S", bound=Session)
R = TypeVar("R")
T = TypeVar("T", bound=type)
P = ParamSpec("P")


class Publishing(Producer):
    """
    A queue that events are published to.
    """

    def __init__(
        self,
        tables: Tables,
        session_factory: Callable[[], Session] | None,
        imports: Iterable[str],
        max_payload: int,
        middleware: Sequence[Middleware],
    ) -> None:
        super().__init__(tables, session_factory, imports, max_payload, middleware)
        self.subscribers = Subscribers()

    def event(self, name: str, /) -> Callable[[T], T]:
        """
        Give an event class a name that stays when the class is renamed or moved; `module.qualname` is its name otherwise.

        Raises:
            RegistrationError: not a dataclass or pydantic model, or the name is taken.

        Example:
            ```python
            @queue.event("orders.paid")
            @dataclass(frozen=True)
            class OrderPaid:
                order_id: int
            ```
        """

        def register(kind: T) -> T:
            self.subscribers.name(kind, name)
            return kind

        return register

    @overload
    def subscribe(self, event: type[E], /, *, name: str | None = None, **options: Unpack[JobOptionValues]) -> Subscriber[E]: ...
    @overload
    def subscribe(self, event: str, /, *, name: str | None = None, **options: Unpack[JobOptionValues]) -> Subscriber[Any]: ...
    def subscribe(self, event: type[Any] | str, /, *, name: str | None = None, **options: Any) -> Subscriber[Any]:
        """
        Register a function as a job that every `publish` of this event pushes, with options of its own: `@queue.subscribe(OrderPaid)`.

        Its first parameter after context and session is annotated with the event's class, exactly, and others have defaults. Who
        subscribes to the name of an event, because the class is not there, takes a class of its own that reads the same fields.

        Args:
            name: what rows call the job; `module.qualname` if not given.
            options: as of `job`.

        Raises:
            RegistrationError: not an event, or the function cannot be its job.
            OptionError: an option is not valid.
        """
        check_event(event)

        def register(function: Callable[..., Any]) -> Job[..., Any]:
            job: Job[..., Any] = self.job(name=name, **options)(function)
            self.registry.check(job, lambda: check_takes(job, event))
            self.subscribers.add(event, job)
            return job

        return Subscriber(register)

    def publish(self, session: AnySession, event: object, /, *, required: bool = False) -> int:
        """
        Write a job for each subscriber of this event, in the caller's transaction. Each has its own retries.

        Subscribers of exactly its class count, or of the name of that, as this process knows them: the queue's `imports` are imported
        first, once; what is registered elsewhere has to be imported by the program.

        Args:
            required: raise when there is no subscriber. Otherwise nothing is written then.

        Returns:
            How many jobs were written: one a subscriber, but for those whose unique key another job holds.

        Raises:
            ArgumentError: a field cannot travel. Nothing was written.
            UnknownJob: `required`, and there is no subscriber.

        Example:
            ```python
            with Session(engine) as session, session.begin():
                order.paid = True
                queue.publish(session, OrderPaid(order.id))
            ```
        """
        bound = self._bind_event(event, required)
        return self._push_many(session, bound, "publish") if bound else 0

    async def publish_async(self, session: AnyAsyncSession, event: object, /, *, required: bool = False) -> int:
        """
        `publish` for an AsyncSession or AsyncConnection.
        """
        if self._takes_any_session:
            return self.publish(session, event, required=required)  # type: ignore[arg-type]
        checked = check_async(session, "publish")
        written: int = await checked.run_sync(lambda sync: self.publish(sync, event, required=required))
        return written

    def _bind_event(self, event: object, required: bool) -> list[BoundJob]:
        kind = type(event)
        if not is_shaped(kind):
            raise TypeError(f"publish takes an event, an instance of a dataclass or pydantic model, not a {kind.__name__}")
        self.registry.import_all()
        jobs = self.subscribers.of(kind)
        if not jobs and required:
            raise UnknownJob(f"nobody in this process subscribes to {self.subscribers.name_of(kind)}")
        encoded = self.subscribers.shape(kind).encode(event) if jobs else None
        return [self._bind_subscriber(job, kind, encoded) for job in jobs]

    def _bind_subscriber(self, job: Job[..., Any], kind: type, encoded: Any) -> BoundJob:
        parameter, annotation = job.signature.sole_parameter()
        payload = {parameter: encoded}
        if annotation is not kind:  # what it could not read would be noticed long after the commit
            job.signature.decode(payload)
        return BoundJob(job.name, to_json(payload), self.effective(job.name, NO_ROW_OPTIONS, job.decorated), self)


class Subscriber(Generic[E]):
    """
    `@queue.subscribe(…)`: takes a leading context and session off; what is left begins with the event.
    """

    def __init__(self, register: Callable[[Callable[..., Any]], Job[..., Any]]) -> None:
        self._register = register

    @overload
    def __call__(self, function: Callable[Concatenate[JobContext, S, E, P], R], /) -> Job[Concatenate[E, P], R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, E, P], R], /) -> Job[Concatenate[E, P], R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[JobContext, E, P], R], /) -> Job[Concatenate[E, P], R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[E, P], R], /) -> Job[Concatenate[E, P], R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        return self._register(function)
