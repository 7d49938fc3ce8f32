"""
How full the queues are, and emptying them.
"""

from __future__ import annotations

import time
from datetime import timedelta

from .._backoff import seconds
from .._driver import reports
from .._driver.reports import QueueStats
from .._options import check_queue_name
from ..errors import OptionError
from .database import Configured

__all__ = ["Reports"]

EMPTY_PAUSE = 0.05


class Reports(Configured):
    """
    What a queue tells about its backlog.
    """

    def stats(self, limit: int | None = None) -> list[QueueStats]:
        """
        Counts a queue, by name. Queues without jobs are not listed.

        Args:
            limit: stop counting there, so that a figure that is equal to it means "so many or more". Without it the counts
                are exact and read the whole table, however long it is.

        Raises:
            OptionError: not a whole number of at least 1.
        """
        if limit is None:
            return self.consumer.read(lambda connection: reports.queue_stats(connection, self.tables))
        if type(limit) is not int or limit < 1:
            raise OptionError("limit: a whole number of at least 1")
        return self.consumer.read(lambda connection: reports.limited_stats(connection, self.tables, limit))

    def pending(self, queue: str | None = None) -> int:
        """
        How many jobs could be claimed now: due, and not held under a running lease.
        """
        name = None if queue is None else check_queue_name(queue)
        return self.consumer.read(lambda connection: reports.count_pending(connection, self.tables, name))

    def size(self, queue: str) -> int:
        """
        How many jobs wait: pending and delayed.
        """
        check_queue_name(queue)
        return self.consumer.read(lambda connection: reports.count_size(connection, self.tables, queue))

    def clear(self, queue: str) -> int:
        """
        Delete a queue's waiting jobs, never held ones; how many were deleted.
        """
        check_queue_name(queue)
        deleted, above = 0, 0
        while True:
            count, last = self.consumer.write(
                lambda connection, above=above: reports.clear_group(connection, self.tables, queue, above)  # type: ignore[misc]
            )
            deleted += count
            if last is None:
                return deleted
            above = last

    def wait_empty(self, timeout: float | timedelta, queue: str | None = None) -> bool:
        """
        Wait until no job is left, held and delayed ones included: True then, False after `timeout` seconds.
        """
        name = None if queue is None else check_queue_name(queue)
        until = time.monotonic() + seconds(timeout, "timeout")
        while self.consumer.read(lambda connection: reports.has_jobs(connection, self.tables, name)):
            if time.monotonic() > until:
                return False
            time.sleep(EMPTY_PAUSE)
        return True
