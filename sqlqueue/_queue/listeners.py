"""
Who listens to what, and telling them so that nothing can come of it.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .. import _events
from .._events import Event
from .._failure import Failure, one_line
from .._logs import log
from ..errors import RegistrationError

__all__ = ["Listeners", "complain", "plain_function"]

F = TypeVar("F", bound=Callable[..., Any])

Listener = Callable[[Any], object]
LONG = 1.0
KINDS = tuple(kind for name in _events.__all__ if not (kind := getattr(_events, name)).__subclasses__())


class Listeners:
    """
    Functions by the events that they want to hear of.
    """

    def __init__(self) -> None:
        self.kinds: dict[type[Event], tuple[Listener, ...]] = {}
        """Empty as long as nobody listens: to ask that is all that it costs then."""
        self._guard = threading.Lock()

    def add(self, kinds: Iterable[Any], listener: Listener) -> None:
        """
        Let a function hear of these events, and of those below them. Once each, however often it asks.
        """
        wanted = {one for kind in kinds for one in _below(kind)}
        with self._guard:
            self.kinds = self.kinds | {
                kind: (*known, listener) for kind in KINDS if kind in wanted and listener not in (known := self.kinds.get(kind, ()))
            }

    def remove(self, listener: Listener) -> None:
        """
        Let a function hear of nothing any more.
        """
        with self._guard:
            left = {kind: tuple(one for one in known if one != listener) for kind, known in self.kinds.items()}
            self.kinds = {kind: known for kind, known in left.items() if known}

    def hear(self, kind: type[Event]) -> bool:
        """
        Whether anybody wants to hear of this. If not, no event need be made.
        """
        return kind in self.kinds

    def tell(self, event: Event) -> None:
        """
        Call the listeners, in the order in which they were registered. What they raise is logged.
        """
        for listener in self.kinds.get(type(event), ()):
            began = time.monotonic()
            try:
                listener(event)
            except BaseException as error:  # sys.exit() of a listener ends the listener
                complain(f"a listener to {type(event).__name__}", listener, error)
            if (took := time.monotonic() - began) > LONG:
                log.warning("%s took %.1f s for a %s: whoever told it waited", name_of(listener), took, type(event).__name__)


def plain_function(function: F, what: str) -> F:
    """
    Raises:
        RegistrationError: it cannot be called, or would have to be awaited.
    """
    if not callable(function):
        raise RegistrationError(f"{what} is a function, not a {type(function).__name__}")
    for one in (function, getattr(function, "__call__", None)):  # noqa: B004  # not a test for callability
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise RegistrationError(f"{what} is a plain function: nobody would await {name_of(function)}")
    return function


def complain(what: str, function: object, error: BaseException) -> None:
    """
    Log what a function of the application has raised that must not disturb anything.
    """
    failure = Failure.from_exception(error)
    log.error("%s, %s, has raised, which changes nothing: %s", what, name_of(function), one_line(failure.last_error))
    log.debug("%s", failure.traceback)


def name_of(function: object) -> str:
    """
    A function's name, for people.
    """
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _below(kind: Any) -> list[type[Event]]:
    if not (isinstance(kind, type) and issubclass(kind, Event)):
        given = kind.__name__ if isinstance(kind, type) else type(kind).__name__
        raise RegistrationError(f"a listener listens to event classes of sqlqueue.events, not to {given}")
    return [one for one in KINDS if issubclass(one, kind)]
