"""
`queue.failed`: the jobs that ended for good without being done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from .._driver import failed as driver
from .._driver.failed import FailedJob
from .._options import check_job_name, check_queue_name
from .._tables import Tables
from ..errors import OptionError
from .consumer import Consumer

__all__ = ["FailedJobs"]

Ids = int | Iterable[int]
LARGEST_ID = 2**63 - 1  # no job has a larger one, and some drivers fail over it


class FailedJobs:
    """
    Read, retry and forget failed jobs. An `id` is the job's own, as the push returned it; one, or several.
    """

    def __init__(self, consumer: Callable[[], Consumer], tables: Tables) -> None:
        self._consumer = consumer
        self._tables = tables

    def list(self, *, queue: str | None = None, name: str | None = None, limit: int = 50) -> list[FailedJob]:
        """
        The newest first, at most `limit`.
        """
        if type(limit) is not int or limit < 1:
            raise OptionError("limit: a whole number of at least 1")
        queue = None if queue is None else check_queue_name(queue)
        name = None if name is None else check_job_name(name)
        return self._consumer().read(lambda connection: driver.list_failed(connection, self._tables, queue=queue, name=name, limit=limit))

    def get(self, id: int) -> FailedJob | None:
        """
        One failed job with its traceback, or None.
        """
        if not 0 < id <= LARGEST_ID:
            return None
        return self._consumer().read(lambda connection: driver.get_failed(connection, self._tables, id))

    def count(self, queue: str | None = None, *, limit: int | None = None) -> int:
        """
        How many there are, counted no further than to `limit`.
        """
        queue = None if queue is None else check_queue_name(queue)
        return self._consumer().read(lambda connection: driver.count_failed(connection, self._tables, queue=queue, limit=limit))

    def retry(self, *, id: Ids | None = None, all: bool = False) -> int:
        """
        Put failed jobs back on their queues, each in a transaction of its own; how many were put back.

        A retried job starts over under its own id: no attempts used, due now, its deadline as far away as it was from the
        push. It holds its unique key again only if no other job has taken it meanwhile.

        Raises:
            OptionError: not exactly one of `id` and `all`.
        """
        _one_selector(id=id is not None, all=all)
        retried = 0
        for group in self._selected(id, None):
            for number in group:
                retried += self._consumer().write(
                    lambda connection, number=number: driver.retry_failed(connection, self._tables, number)  # type: ignore[misc]
                )
        return retried

    def forget(self, *, id: Ids | None = None, before: datetime | None = None, all: bool = False) -> int:
        """
        Delete failed jobs; how many were deleted.

        Args:
            before: those that failed before this aware datetime.

        Raises:
            OptionError: not exactly one of `id`, `before` and `all`.
        """
        _one_selector(id=id is not None, before=before is not None, all=all)
        if before is not None and before.utcoffset() is None:
            raise OptionError("before: a naive datetime could mean any instant; give it a time zone")
        forgotten = 0
        for group in self._selected(id, before):
            forgotten += self._consumer().write(
                lambda connection, group=group: driver.forget_failed(connection, self._tables, group)  # type: ignore[misc]
            )
        return forgotten

    def _selected(self, id: Ids | None, before: datetime | None) -> Iterator[Sequence[int]]:
        """
        Ids in groups, in ascending order: whoever works through them at the same time does so in the same order.
        """
        if id is not None:
            wanted = {id} if isinstance(id, int) else set(id)
            yield from driver.groups(sorted(number for number in wanted if 0 < number <= LARGEST_ID))
            return
        above = 0
        while group := self._consumer().read(
            lambda connection, above=above: driver.select_failed(connection, self._tables, above=above, before=before)  # type: ignore[misc]
        ):
            yield group
            above = group[-1]


def _one_selector(**given: bool) -> None:
    if sum(given.values()) != 1:
        raise OptionError(f"{', '.join(given)}: give exactly one of these")
