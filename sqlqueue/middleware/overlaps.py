"""
How many may run at once: `WithoutOverlapping`, and the option `limit` of a job.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from .._backoff import seconds
from .._driver.slots import SUFFIX, Blocked, Holder, Lost, free_slot, stand_in_line, take_slot
from .._job import CallNext, JobContext, Release, Store
from .._options import Key, check_key
from .keys import LONGEST, AnyKey, jittered, key_of, released_in_trouble, warn

__all__ = ["ConcurrencyLimit", "WithoutOverlapping"]


class WithoutOverlapping:
    """
    Lets one job of a key run at a time, anywhere.

    The lock is held as long as the handler runs and its worker keeps the lease: a handler may take as long as it likes, and the lock
    of a worker that has died is free when the lease ends. A worker that was stopped for longer than its lease has lost its
    lock with the job, as `context.lost` tells the handler.

    Args:
        key: a text, or a function of the context; jobs that name the same key keep each other out. Each job has its own if not given.
        expire_after: the lock is free after so long (seconds or a timedelta) even while its holder runs; 30 days if not given.
        release_after: a job that finds the lock taken is due again after so long, more or less a quarter. If not given, the jobs that
            wait stand in line: whoever gives up the lock calls the next one, and should that fail they come back one after another,
            the later the longer the lock has been held, at most a second apart.

    Example:
        `@queue.job(middleware=[WithoutOverlapping(lambda context: f"account:{context.arguments['account_id']}")])`
    """

    def __init__(
        self,
        key: str | Callable[[JobContext], str | int] | Key | None = None,
        expire_after: float | timedelta | None = None,
        release_after: float | timedelta | None = None,
    ) -> None:
        self._key: AnyKey | None = None if key is None else check_key("key", key)
        self._expire_after = LONGEST if expire_after is None else seconds(expire_after, "expire_after", minimum=0.001)
        self._release_after = None if release_after is None else seconds(release_after, "release_after", maximum=LONGEST)

    def __call__(self, context: JobContext, call_next: CallNext) -> Any:
        base = key_of("overlap", self._key, context, spare=SUFFIX)
        with _Places(base, 1, self._expire_after, self._release_after).taken_by(context):
            return call_next()


class ConcurrencyLimit:
    """
    What the options `limit` and `limit_key` put around everything else.
    """

    def __init__(self, limit: int, key: AnyKey | None) -> None:
        self._limit = limit
        self._key = key

    def __call__(self, context: JobContext, call_next: CallNext) -> Any:
        base = key_of("limit", self._key, context, of_job=True, spare=SUFFIX)
        with _Places(base, self._limit).taken_by(context):
            return call_next()


@dataclass(frozen=True, slots=True)
class _Places:
    """
    So many rows that begin with `base`.
    """

    base: str
    limit: int
    expire_after: float = LONGEST
    release_after: float | None = None

    @contextmanager
    def taken_by(self, context: JobContext) -> Iterator[None]:
        """
        Run the block in one of the places.

        Raises:
            Release: all of them are taken.
        """
        store = context._store
        if store is None:
            yield
            return
        holder = Holder(context.id, context._token, self.expire_after)
        key = self._take(store, context, holder)
        try:
            yield
        finally:
            self._free(store, context, key, holder)

    def _take(self, store: Store, context: JobContext, holder: Holder) -> str:
        numbers = random.sample(range(self.limit), self.limit)  # so that not everybody tries the same one first
        with released_in_trouble("its place cannot be asked for", context):
            found = store.write(lambda connection, tables: take_slot(connection, tables, self.base, numbers, holder))
            if isinstance(found, Blocked):
                raise Release(self._delay(store, context, found.held_for))
        if isinstance(found, Lost):
            raise Release  # it will not be written: the job is not ours any more
        return found.key

    def _delay(self, store: Store, context: JobContext, held_for: timedelta) -> float:
        if self.release_after is not None:
            return jittered(self.release_after)
        stand = partial(stand_in_line, base=self.base, slots=self.limit, id=context.id, held_for=held_for)
        return jittered(store.write(stand), 0.1)

    def _free(self, store: Store, context: JobContext, key: str, holder: Holder) -> None:
        """
        Give the place up. If that fails it is free as soon as the job is settled: what became of the job is not changed by it.
        """
        try:
            store.write(lambda connection, tables: free_slot(connection, tables, self.base, key, holder))
        except Exception as error:
            warn("job %d (%s): its place is free when its lease ends: %s", context.id, context.name, type(error).__name__)
