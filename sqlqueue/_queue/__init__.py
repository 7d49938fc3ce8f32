"""
Queue: what an application has in its hands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine
from sqlalchemy.orm import Session

from .._job import Middleware
from .._tables import build_tables
from .failed import FailedJobs
from .operations import Operations, check_lease, check_queues
from .producer import DEFAULT_QUEUE
from .publishing import Publishing
from .reports import Reports
from .sessions import AnySession
from .testing import Testing

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["DEFAULT_QUEUE", "AnySession", "Queue", "check_lease", "check_queues"]

MAX_PAYLOAD = 1024 * 1024


class Queue(Testing, Publishing, Operations, Reports):
    """
    A job queue in the application's own database.

    Pushing needs no configuration: a push goes wherever the caller's session goes. Workers, reports and `begin()` need
    the database, given here or later with `configure`.

    Args:
        engine: a database URL, an Engine or an AsyncEngine.
        imports: modules that register jobs; a worker imports them at its start, `publish` before its first event.
        metadata: the MetaData to add the tables to, for instance `Base.metadata`.
        prefix: what the names of the tables begin with.
        schema: the schema that the tables are in.
        max_payload: the most bytes that the arguments of one job may take as JSON.
        session_factory: what `begin()` and transactional handlers get their sessions from.
        middleware: callables `(context, call_next)` around every handler, outside of its job's own.

    Example:
        ```python
        queue = Queue("postgresql://localhost/shop", imports=["shop.jobs"])

        @queue.job(max_attempts=3)
        def send_receipt(order_id: int) -> None: ...

        with Session(engine) as session, session.begin():
            session.add(order)
            session.flush()
            send_receipt.push(session, order.id)
        ```
    """

    def __init__(
        self,
        engine: str | URL | Engine | AsyncEngine | None = None,
        *,
        imports: Iterable[str] = (),
        metadata: sa.MetaData | None = None,
        prefix: str = "sqlqueue_",
        schema: str | None = None,
        max_payload: int = MAX_PAYLOAD,
        session_factory: Callable[[], Session] | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        tables = build_tables(metadata if metadata is not None else sa.MetaData(), prefix=prefix, schema=schema)
        super().__init__(tables, session_factory, imports, max_payload, middleware)
        self.failed = FailedJobs(lambda: self.consumer, self.tables)
        if engine is not None:
            self.configure(engine)
