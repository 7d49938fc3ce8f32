"""
The worker: claims for its free slots, runs jobs in threads, renews their leases, settles them in groups.

Threads, signals and the clock of this process live here and nowhere else. The thread of `run()` only conducts: it listens
to signals and watches the clock, and never talks to the database, so that it can always be stopped. One thread claims, one
a slot runs handlers, one settles what has ended, one renews what is held.
"""

from __future__ import annotations

from .summary import Summary
from .trouble import first_line, unusable
from .worker import Worker

__all__ = ["Summary", "Worker", "first_line", "unusable"]
