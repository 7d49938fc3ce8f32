"""
Trouble with the database: what passes, what does not, and how long to bear it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from .._dialects import Trouble, trouble_of
from ..errors import UnusableDatabase
from .logs import log

__all__ = ["PATIENCE", "TROUBLE", "Patience", "first_line", "kind_of", "passes", "unusable"]

PATIENCE = 300.0  # without one successful statement
REMINDER = 60.0  # after which trouble that goes on is told again
TROUBLE = (DBAPIError, PoolTimeout)


class Patience:
    """
    What all threads of a run have seen of the database: survives what passes, and says when to give up.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._answered = time.monotonic()
        self._asking: dict[int, float] = {}
        self._told: dict[str, float] = {}

    def succeeded(self) -> None:
        self._since = None
        self._answered = time.monotonic()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """
        This thread waits for an answer meanwhile.
        """
        thread = threading.get_ident()
        self._asking[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._asking[thread]

    def check(self) -> None:
        """
        For a thread that never waits for the database itself.

        Raises:
            UnusableDatabase: somebody waits for an answer, and nobody has got one for too long.
        """
        now = time.monotonic()
        since = min(self._asking.copy().values(), default=now)
        if now - max(since, self._answered) > PATIENCE:
            raise UnusableDatabase(f"no statement has succeeded for {PATIENCE:g} s: the database does not answer")

    def bear(self, error: Exception) -> None:
        """
        Note trouble that may pass.

        Raises:
            UnusableDatabase: it does not pass, or no statement of any thread has succeeded for too long.
        """
        trouble = kind_of(error)
        if not passes(trouble):
            raise unusable(error, trouble) from error
        now = time.monotonic()
        # Counted from the first failure: a worker that had nothing to ask for an hour has not been without an answer.
        since = self._since = now if self._since is None else self._since
        if now - since > PATIENCE:
            raise UnusableDatabase(f"no statement has succeeded for {PATIENCE:g} s: {first_line(error)}") from error
        self._tell(now, first_line(error))

    def _tell(self, now: float, what: str) -> None:
        # Whoever polls meets the same trouble again and again.
        if now - self._told.get(what, -REMINDER) >= REMINDER:
            self._told = {text: at for text, at in self._told.items() if now - at < REMINDER} | {what: now}
            log.warning("trouble with the database, trying again: %s", what)


def kind_of(error: Exception) -> Trouble:
    """
    Classify an error of the database, or of the pool when all of its connections are out.
    """
    return trouble_of(error) if isinstance(error, DBAPIError) else Trouble.CONFLICT


def passes(trouble: Trouble) -> bool:
    """
    Whether to try again later.
    """
    return trouble in (Trouble.LOST, Trouble.UNAVAILABLE, Trouble.CONFLICT)


def unusable(error: Exception, trouble: Trouble) -> UnusableDatabase:
    """
    One line that says what is wrong and what to do.
    """
    what = first_line(error)
    match trouble:
        case Trouble.MISSING_TABLES:
            return UnusableDatabase(
                f"the tables are missing or of another version: {what}; "
                "create them with «sqlqueue install» and «alembic upgrade head», or with «sqlqueue install --apply»"
            )
        case Trouble.REFUSED:
            return UnusableDatabase(f"the database refuses us: {what}; check user, password, database name and privileges")
        case Trouble.CONFLICT:
            return UnusableDatabase(f"the database stayed busy, somebody holds a lock: {what}; try again")
        case Trouble.LOST | Trouble.UNAVAILABLE:
            return UnusableDatabase(f"the database cannot be reached: {what}")
    return UnusableDatabase(f"the database refused a statement: {what}")


def first_line(error: Exception) -> str:
    """
    What the driver said, in one line, without SQL and values.
    """
    origin: BaseException = getattr(error, "orig", None) or error
    arguments: tuple[Any, ...] = origin.args
    text = str(arguments[1]) if len(arguments) > 1 and isinstance(arguments[0], int) else str(origin)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(origin).__name__)
