"""
Keys as users give them, and what to do when the database does not answer.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeAlias

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from .._dialects import Trouble, trouble_of
from .._job import JobContext, Release
from .._options import Key, shared_key

__all__ = ["LONGEST", "AnyKey", "jittered", "key_of", "released_in_trouble", "warn"]

_log = logging.getLogger("sqlqueue")

AnyKey: TypeAlias = "str | Key | Callable[[JobContext], str | int]"
LONGEST = timedelta(days=30).total_seconds()
TROUBLE_DELAY = 1.0
PASSES = (Trouble.CONFLICT, Trouble.LOST, Trouble.UNAVAILABLE)


def key_of(kind: str, key: AnyKey | None, context: JobContext, *, of_job: bool = False, spare: int = 0) -> str:
    """
    The row that a key stands for.

    Args:
        of_job: a text is a key of this job's only.

    Raises:
        TypeError: a function has returned what is not a text.
    """
    if key is None:
        return shared_key(kind, context.name, "", spare=spare)
    found = key if isinstance(key, str | Key) else key(context)
    if isinstance(found, Key):
        return shared_key(kind, "", found.text, spare=spare)
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise TypeError(f"the function for the key of {kind} returned a {type(found).__name__}; it has to return a text or a number")
    text = str(found).encode("utf-8", "replace").decode()
    return shared_key(kind, context.name if of_job else "", text, spare=spare)


def jittered(delay: float, part: float = 0.25) -> float:
    """
    The delay, more or less, so that those who were sent away together do not come back together.
    """
    return delay * (1 + part * (2 * random.random() - 1))


def warn(text: str, *values: object) -> None:
    """
    Log, whatever the log's handlers do: nothing of it reaches the job.
    """
    with contextlib.suppress(BaseException):
        _log.warning(text, *values)


@contextlib.contextmanager
def released_in_trouble(what: str, context: JobContext) -> Iterator[None]:
    """
    The database does not answer before the handler has started: the job has done nothing, and the trouble may pass.
    """
    try:
        yield
    except (DBAPIError, PoolTimeout) as error:
        if isinstance(error, DBAPIError) and trouble_of(error) not in PASSES:
            raise
        warn("job %d (%s) waits %g s: %s: %s", context.id, context.name, TROUBLE_DELAY, what, type(error).__name__)
        raise Release(jittered(TROUBLE_DELAY)) from None
