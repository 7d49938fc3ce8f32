"""
A job queue in the database that your data is in: a push commits with your transaction, or never happened.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from ._arguments import Sensitive
    from ._backoff import Exponential, Fixed, Steps
    from ._driver.failed import FailedJob
    from ._driver.reports import QueueStats
    from ._failure import Reason
    from ._job import BoundJob, Delivery, Discard, Fail, Job, JobContext, Pushed, Release, current_job
    from ._options import Key
    from ._queue import Queue
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

# Where each name is found, looked up when it is first used: the program must be able to set its signal handlers before it
# loads SQLAlchemy. As the first process of a container it would not hear a SIGTERM meanwhile.
_HOMES = {
    "._arguments": ("Sensitive",),
    "._backoff": ("Exponential", "Fixed", "Steps"),
    "._driver.failed": ("FailedJob",),
    "._driver.reports": ("QueueStats",),
    "._failure": ("Reason",),
    "._job": ("BoundJob", "Delivery", "Discard", "Fail", "Job", "JobContext", "Pushed", "Release", "current_job"),
    "._options": ("Key",),
    "._queue": ("Queue",),
    "._worker": ("Worker",),
    ".errors": (
        "ArgumentError",
        "JobTimeout",
        "LockTimeout",
        "NotConfigured",
        "NotTransactional",
        "OptionError",
        "RegistrationError",
        "SqlQueueError",
        "StaleDelivery",
        "UnknownJob",
        "UnusableDatabase",
    ),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
