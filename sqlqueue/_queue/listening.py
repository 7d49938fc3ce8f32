"""
`Queue.on`: hearing of what happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from .._events import Event
from ..errors import RegistrationError
from .database import Configured
from .listeners import plain_function

__all__ = ["Listening"]

R = TypeVar("R")
A = TypeVar("A", bound=Event)
B = TypeVar("B", bound=Event)
C = TypeVar("C", bound=Event)


class Listening(Configured):
    """
    A queue that tells what happens.
    """

    @overload
    def on(self, kind: type[A], /) -> Callable[[Callable[[A], R]], Callable[[A], R]]: ...
    @overload
    def on(self, kind: type[A], second: type[B], /) -> Callable[[Callable[[A | B], R]], Callable[[A | B], R]]: ...
    @overload
    def on(self, kind: type[A], second: type[B], third: type[C], /) -> Callable[[Callable[[A | B | C], R]], Callable[[A | B | C], R]]: ...
    @overload
    def on(self, *kinds: type[Event]) -> Callable[[Callable[[Any], R]], Callable[[Any], R]]: ...
    def on(self, *kinds: type[Event]) -> Callable[[Callable[[Any], R]], Callable[[Any], R]]:
        """
        Let a function hear of events: `@queue.on(JobFailed)`, or `queue.on(JobFailed)(function)`. A base class stands for all
        events below it. `off` ends it.

        A listener hears what happens in its own process: pushes where something is pushed, the rest in the worker. It runs in
        the thread where it happens; final events are told by the thread that settles, in the order of settlement, after each
        has been written, and those of a transactional handler that is done by its own. That thread waits meanwhile, so be
        quick: leases are renewed, but nothing else is settled. What a listener raises is logged and changes nothing. Where a
        process dies, what it had not told yet is never told.

        Raises:
            RegistrationError: not an event class of `sqlqueue.events`, or not a plain function.

        Example:
            ```python
            @queue.on(JobFailed)
            def alert(event: JobFailed) -> None:
                print(f"{event.name} {event.id} failed: {event.reason}")
            ```
        """
        if not kinds:
            raise RegistrationError("on: name at least one event class of sqlqueue.events")

        def register(listener: Callable[[Any], R]) -> Callable[[Any], R]:
            self.listeners.add(kinds, plain_function(listener, "a listener"))
            return listener

        return register

    def off(self, listener: Callable[[Any], object], /) -> None:
        """
        Let a listener hear of nothing any more. One that never listened is passed over.
        """
        self.listeners.remove(listener)
