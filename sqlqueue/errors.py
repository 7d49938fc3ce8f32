"""
Everything that sqlqueue raises on purpose.

    SqlQueueError
    ├── RegistrationError (TypeError)    a function that cannot be a job
    ├── ArgumentError (TypeError)        arguments that the job or JSON cannot carry
    ├── OptionError (ValueError)         an option, name or setting that is not valid
    ├── UnknownJob (LookupError)         a job name that nobody registered
    ├── NotConfigured                    the queue has no database, or a different one already
    ├── NotTransactional                 this connection cannot keep the push with the caller's work
    ├── StaleDelivery                    the delivery belongs to another claim, or to none
    ├── LockTimeout (TimeoutError)       somebody else's open transaction holds what we need
    ├── UnusableDatabase                 unreachable, or its tables or privileges are missing
    └── JobTimeout (TimeoutError)        a handler ran longer than its timeout

Errors of the database itself are never wrapped on the producer's side: a deadlock looks like a deadlock.
"""

from __future__ import annotations

__all__ = [
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
]


class SqlQueueError(Exception):
    """
    The root of all errors of this library.
    """


class RegistrationError(SqlQueueError, TypeError):
    """
    A function that cannot be a job: its signature or its annotations cannot travel.
    """


class ArgumentError(SqlQueueError, TypeError):
    """
    Arguments that do not fit the job's signature or that JSON cannot carry.

    The message names the parameter and the place inside it, never the value.
    """


class OptionError(SqlQueueError, ValueError):
    """
    An option, a name or a setting that is not valid. The message names it.
    """


class UnknownJob(SqlQueueError, LookupError):
    """
    A job name that is not registered in this process.
    """


class NotConfigured(SqlQueueError):
    """
    The queue has no database yet, or was configured with another one before.
    """


class NotTransactional(SqlQueueError):
    """
    A push on this connection would not commit and roll back with the caller's work.
    """


class StaleDelivery(SqlQueueError):
    """
    The delivery's row is held by another claim, or is gone. Nothing was changed.
    """

    def __init__(self, operation: str, job_id: int) -> None:
        super().__init__(f"cannot {operation} job {job_id}: the delivery is stale, another claim holds the job or it is gone")
        self.operation = operation
        self.job_id = job_id


class LockTimeout(SqlQueueError, TimeoutError):
    """
    A row that has to be changed stayed locked by somebody else's open transaction. Nothing was changed; try again.
    """


class UnusableDatabase(SqlQueueError):
    """
    The database cannot be used: not reachable, or its tables or privileges are missing.
    """


class JobTimeout(SqlQueueError, TimeoutError):
    """
    A handler ran longer than its ``timeout``.
    """
