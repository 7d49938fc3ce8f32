"""
What is told about pushes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import sqlalchemy as sa

from .._arguments import from_json
from .._driver.push import NewJob
from .._events import Event, JobCommitted, JobPushed, JobPushing
from .commits import open_transaction
from .listeners import Listeners

__all__ = ["tell_pushed", "tell_pushing"]


def tell_pushing(listeners: Listeners, jobs: Iterable[NewJob]) -> None:
    """
    Tell that these are about to be written.
    """
    if listeners.hear(JobPushing):
        for job in jobs:
            listeners.tell(JobPushing(**_about(job)))


def tell_pushed(listeners: Listeners, session: object, connection: sa.Connection, jobs: Sequence[tuple[NewJob, int | None]]) -> None:
    """
    Tell that these are written; and once more when the session has committed them.
    """
    if listeners.hear(JobPushed):
        for job, id in jobs:
            listeners.tell(JobPushed(**_about(job), id=id))
    if listeners.hear(JobCommitted):
        with suppress(Exception):  # the push has not gone wrong
            if (opened := open_transaction(session, connection)) is not None:
                opened.do_if_kept(partial(_tell_all, listeners, [JobCommitted(**_about(job), id=id) for job, id in jobs]))


def _tell_all(listeners: Listeners, told: Iterable[Event]) -> None:
    for one in told:
        listeners.tell(one)


def _about(job: NewJob) -> dict[str, Any]:
    terms = job.terms
    return {"name": terms.name, "queue": terms.queue, "headers": from_json(terms.headers or "{}")}
