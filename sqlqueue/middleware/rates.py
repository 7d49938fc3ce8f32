"""
How many may start in a time: `RateLimited`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from .._backoff import seconds
from .._driver.permits import Permit, Rate, take_permits
from .._job import CallNext, JobContext, Release, Store
from .._options import Key, check_key
from ..errors import OptionError
from .keys import LONGEST, AnyKey, jittered, key_of, released_in_trouble

__all__ = ["RateLimited"]

AHEAD = timedelta(milliseconds=100)
LAPSES = 0.25  # seconds after which a permit that was not used is given up
TRIES = 3
MOST = 1_000_000
LONGEST_BURST = timedelta(days=3653)


class RateLimited:
    """
    Starts at most `limit` jobs of a key `per` second or timedelta, anywhere, evenly: one every `per / limit`. After a pause up to `burst`
    may start at once. So in any length of time at most `burst` jobs and `limit / per` for each second of it get their permit, by the
    database's clock. No handler starts before its permit, and one that would start more than 0.25 s after it needs another.

    A job whose turn is less than 0.1 s away waits for it; others are released until about their turn, one after another. The
    threads of a worker that ask at the same time get their permits together, in one transaction.

    Args:
        limit: how many, 1 to 1,000,000.
        per: in what time, seconds or a timedelta, at most 30 days.
        key: a text, or a function of the context. All who name a key should name the same rate. Each job has its own key if not given.
        burst: how many may start at once, 1 to 1,000,000.

    Example:
        `@queue.job(middleware=[RateLimited(100, per=60, key="mail-service", burst=10)])`
    """

    def __init__(
        self,
        limit: int,
        per: float | timedelta,
        key: str | Callable[[JobContext], str | int] | Key | None = None,
        *,
        burst: int = 1,
    ) -> None:
        for name, value in (("limit", limit), ("burst", burst)):
            if type(value) is not int or not 1 <= value <= MOST:
                raise OptionError(f"{name}: a whole number from 1 to {MOST}")
        length = seconds(per, "per", minimum=0.001, maximum=LONGEST)
        # Rounded up: never more often than was said.
        interval = timedelta(microseconds=math.ceil(length * 1_000_000 / limit))
        if burst > LONGEST_BURST // interval:
            raise OptionError("burst: at this rate it would take more than ten years until so many may start at once")
        self._rate = Rate(interval, burst, AHEAD)
        self._key: AnyKey | None = None if key is None else check_key("key", key)
        self._guard = threading.Lock()
        self._counters: WeakKeyDictionary[Store, dict[str, _Counter]] = WeakKeyDictionary()

    def __call__(self, context: JobContext, call_next: CallNext) -> Any:
        store = context._store
        if store is not None:
            key = key_of("rate", self._key, context)
            self._await_permit(context, store, key)
        return call_next()

    def _await_permit(self, context: JobContext, store: Store, key: str) -> Permit:
        """
        Raises:
            Release: its turn is not soon.
        """
        for _ in range(TRIES):
            with released_in_trouble("its permit cannot be asked for", context):
                permit, told = self._ask(store, key)
            if not permit.granted:
                raise Release(max(permit.wait, 0.0) + jittered(AHEAD.total_seconds() / 8, 1))
            # The database said so before we heard it: by its clock it is later than that now.
            starts = told + permit.wait
            while (left := starts - time.monotonic()) > 0:
                time.sleep(left)
            if time.monotonic() - starts <= LAPSES:
                return permit
        raise Release(jittered(AHEAD.total_seconds()))

    def _ask(self, store: Store, key: str) -> tuple[Permit, float]:
        """
        A permit, and when we were told, by the monotonic clock. One thread at a time asks, for all that have come meanwhile.
        """
        ticket = _Ticket()
        with self._at_counter(store, key) as counter:
            with self._guard:
                counter.waiting.append(ticket)
            with counter.turn:
                if ticket in counter.waiting:  # nobody has asked for us
                    with self._guard:
                        tickets, counter.waiting = counter.waiting, []
                    self._serve(store, key, tickets)
        if ticket.permit is None:
            raise Release(jittered(AHEAD.total_seconds()))  # whoever asked for us has failed, and said so
        return ticket.permit, ticket.told

    def _serve(self, store: Store, key: str, tickets: list[_Ticket]) -> None:
        permits = store.write(lambda connection, tables: take_permits(connection, tables, key, len(tickets), self._rate))
        told = time.monotonic()
        for ticket, permit in zip(tickets, permits, strict=True):
            ticket.told, ticket.permit = told, permit

    @contextmanager
    def _at_counter(self, store: Store, key: str) -> Iterator[_Counter]:
        with self._guard:
            counters = self._counters.setdefault(store, {})
            counter = counters.setdefault(key, _Counter())
            counter.users += 1
        try:
            yield counter
        finally:
            with self._guard:
                counter.users -= 1
                if not counter.users:
                    del counters[key]


@dataclass(slots=True, eq=False)
class _Ticket:
    permit: Permit | None = None
    told: float = 0.0


@dataclass(slots=True, eq=False)
class _Counter:
    """
    Where the threads of this process ask for permits of one key.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    waiting: list[_Ticket] = field(default_factory=list)
    users: int = 0
