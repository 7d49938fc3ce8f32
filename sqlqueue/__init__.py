"""
A job queue in the database that your data is in: a push commits with your transaction, or never happened.
"""

from __future__ import annotations

from ._arguments import Sensitive
from ._backoff import Exponential, Fixed, Steps
from ._driver.failed import FailedJob
from ._driver.reports import QueueStats
from ._failure import Reason
from ._job import BoundJob, Delivery, Discard, Fail, Job, JobContext, Pushed, Release, current_job
from ._options import Key
from ._queue import Queue
from ._version import __version__
from ._worker import Worker
from .errors import (
    ArgumentError,
    JobTimeout,
    LockTimeout,
    NotConfigured,
    NotTransactional,
    OptionError,
    RegistrationError,
    SqlQueueError,
    StaleDelivery,
    UnknownJob,
    UnusableDatabase,
)

__all__ = [
    "ArgumentError",
    "BoundJob",
    "Delivery",
    "Discard",
    "Exponential",
    "Fail",
    "FailedJob",
    "Fixed",
    "Job",
    "JobContext",
    "JobTimeout",
    "Key",
    "LockTimeout",
    "NotConfigured",
    "NotTransactional",
    "OptionError",
    "Pushed",
    "Queue",
    "QueueStats",
    "Reason",
    "RegistrationError",
    "Release",
    "Sensitive",
    "SqlQueueError",
    "StaleDelivery",
    "Steps",
    "UnknownJob",
    "UnusableDatabase",
    "Worker",
    "__version__",
    "current_job",
]
