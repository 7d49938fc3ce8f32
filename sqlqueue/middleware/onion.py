"""
The layers around a handler, one inside of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._job import CallNext, JobContext, Middleware
from .._options import CodeOptions
from .overlaps import ConcurrencyLimit

__all__ = ["layers_of", "run_through"]


def layers_of(queue: Sequence[Middleware], code: CodeOptions) -> tuple[Middleware, ...]:
    """
    What is around a job's handler, the outermost first: the limit, as a job that has to wait should use up nothing else; the
    queue's; the job's.
    """
    limit = () if code.limit is None else (ConcurrencyLimit(code.limit, code.limit_key),)
    return (*limit, *queue, *(code.middleware or ()))


def run_through(layers: Sequence[Middleware], context: JobContext, handle: CallNext, check: Callable[[object], None]) -> Any:
    """
    Run the layers, and inside of them the handler.

    Args:
        check: raises what a layer has returned if that is an outcome, so that the layers outside of it hear of it.
    """
    call: CallNext = handle
    for layer in reversed(layers):
        call = _around(layer, context, _Once(call), check)
    return call()


def _around(layer: Middleware, context: JobContext, call_next: CallNext, check: Callable[[object], None]) -> CallNext:
    def call() -> Any:
        result = layer(context, call_next)
        if result is not None:
            check(result)
        return result

    return call


class _Once:
    """
    What a middleware gets as `call_next`.
    """

    __slots__ = ("_call", "_called")

    def __init__(self, call: CallNext) -> None:
        self._call = call
        self._called = False

    def __call__(self) -> Any:
        if self._called:
            raise RuntimeError("call_next() may be called once: a job that is to run again has attempts for that")
        self._called = True
        return self._call()
