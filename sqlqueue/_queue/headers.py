"""
`queue.headers`: what fills the headers of a job at its push, and what reads them at its run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

from .._options import RowOptions
from ..errors import OptionError
from .listeners import complain, plain_function

__all__ = ["Headers"]

Fill = Callable[[str], Mapping[str, str] | None]
Read = Callable[[dict[str, str]], AbstractContextManager[object]]
F = TypeVar("F", bound=Callable[[str], Mapping[str, str] | None])
G = TypeVar("G", bound=Callable[[dict[str, str]], object])


class Headers:
    """
    The hooks of a queue's headers: text by names that travels with each job, for trace contexts and tenants.

    Example:
        ```python
        tenant = ContextVar("tenant", default="")

        @queue.headers.fill
        def add_tenant(name: str) -> dict[str, str]:
            return {"tenant": tenant.get()}

        @queue.headers.read
        def as_tenant(headers: Mapping[str, str]) -> Iterator[None]:
            tenant.set(headers.get("tenant", ""))
            yield
        ```
    """

    def __init__(self) -> None:
        self._fills: tuple[Fill, ...] = ()
        self._reads: tuple[tuple[object, Read], ...] = ()

    def fill(self, function: F) -> F:
        """
        Register a function that is called at each push with the job's name; `push_many` and `publish` call it once for all jobs
        of a name that have their options in common.

        It returns headers, or None. Those of a later function beat those of an earlier one, those of the push itself all. If it raises,
        or if what it returns are no headers, that is logged and the push goes on without.
        """
        self._fills = (*self._fills, plain_function(function, "headers.fill"))
        return function

    def read(self, function: G) -> G:
        """
        Register a function that is called with the headers of each job before its handler, and returns a context manager in which the
        handler runs; or a generator that yields once. Context variables that it sets are the handler's, and of no other job.

        The first function is the outermost. Whatever it raises is logged, and the job runs; what the handler raises is not stopped by it.
        """
        plain_function(function, "headers.read")
        read: Read = contextmanager(function) if inspect.isgeneratorfunction(function) else function  # type: ignore[assignment]
        self._reads = (*self._reads, (function, read))
        return function

    @property
    def are_read(self) -> bool:
        """
        Whether a run has to enter `reading`.
        """
        return bool(self._reads)

    def filled(self, name: str, given: Mapping[str, str] | None) -> Mapping[str, str] | None:
        """
        The headers of a push: what the functions return, under what the push itself gives.
        """
        if not self._fills:
            return given
        headers: Mapping[str, str] = {}
        own = given or {}
        for fill in self._fills:
            try:
                more = fill(name)
                if more is not None:
                    headers = _checked({**headers, **_checked(more), **own})
            except BaseException as error:  # telemetry must not stop a business transaction
                complain("headers.fill", fill, error)
        return {**headers, **own}

    def reading(self, headers: Mapping[str, str]) -> AbstractContextManager[object]:
        """
        What a run is to be inside of. It neither stops the run, nor keeps what that raises from coming out.
        """
        entered = contextlib.ExitStack()
        for function, read in self._reads:
            try:
                manager = read(dict(headers))
                manager.__enter__()
            except BaseException as error:
                complain("headers.read", function, error)
            else:
                entered.push(partial(_leave, function, manager))
        return entered


def _leave(function: object, manager: AbstractContextManager[object], kind: Any, error: Any, place: Any) -> None:
    try:
        manager.__exit__(kind, error, place)
    except BaseException as raised:
        if raised is not error:
            complain("headers.read", function, raised)


def _checked(headers: object) -> Mapping[str, str]:
    """
    Raises:
        OptionError: not headers.
    """
    checked = RowOptions.of({"headers": headers}).headers
    if checked is None:
        raise OptionError("headers: a mapping of text to text")
    return checked
