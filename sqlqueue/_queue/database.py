"""
The database that a queue lives in, and the sessions and connections to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine
from sqlalchemy.orm import Session

from .._dialects import consumer_url, producer_engine
from .._tables import Tables
from ..errors import NotConfigured, OptionError
from .consumer import Consumer
from .keys import KeyStore, store_of
from .listeners import Listeners
from .own_engine import OwnEngine

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["Configured"]

NOT_CONFIGURED = "this queue has no database: give Queue(…) a URL or an engine, or call queue.configure(…)"


class Configured:
    """
    What knows its tables, and its database as soon as somebody says which.
    """

    def __init__(self, tables: Tables, session_factory: Callable[[], Session] | None) -> None:
        self.tables = tables
        self.listeners = Listeners()
        self._session_factory = session_factory
        self._source: URL | Engine | None = None
        self._consumer: Consumer | None = None
        self._store: KeyStore | None = None
        self._producer: OwnEngine | None = None

    def __repr__(self) -> str:
        url = self._source if isinstance(self._source, URL) else getattr(self._source, "url", None)
        return f"<Queue {url.render_as_string(hide_password=True) if url is not None else 'not configured'}>"

    @property
    def metadata(self) -> sa.MetaData:
        """
        The MetaData that holds the tables: for `create_all`, and for Alembic's `target_metadata`.
        """
        return self.tables.metadata

    def configure(self, engine: str | URL | Engine | AsyncEngine, *, session_factory: Callable[[], Session] | None = None) -> None:
        """
        Say which database the queue lives in.

        Raises:
            NotConfigured: it was configured with a different database before.
            OptionError: not the URL of a database that sqlqueue serves.
        """
        source = _source(engine)
        if self._source is not None and not _same(self._source, source):
            raise NotConfigured(f"this queue is configured for {self!r} already; use a second Queue for a second database")
        if self._source is None:
            self._set_source(source)
        if session_factory is not None:
            self._session_factory = session_factory

    def reconfigure(self, engine: str | URL | Engine | AsyncEngine) -> None:
        """
        Move the queue to another database, for tools that are told one beside the application's own. Not while it is in use.
        """
        if self._consumer is not None:
            self._consumer.close()
        if self._producer is not None:
            self._producer.close()
        self._set_source(_source(engine))

    def _set_source(self, source: URL | Engine) -> None:
        self._source = source
        self._consumer = Consumer(source, self.tables, self.listeners)
        self._store = store_of(self._consumer, self.tables)
        self._producer = OwnEngine(lambda: producer_engine(consumer_url(source if isinstance(source, URL) else source.url)))

    @property
    def source(self) -> URL | Engine | None:
        """
        The database as it was configured.
        """
        return self._source

    @property
    def configured(self) -> bool:
        """
        Whether the queue knows its database.
        """
        return self._source is not None

    @property
    def consumer(self) -> Consumer:
        """
        The queue's own connections.

        Raises:
            NotConfigured: the queue has no database.
        """
        if self._consumer is None:
            raise NotConfigured(NOT_CONFIGURED)
        return self._consumer

    @property
    def store(self) -> KeyStore | None:
        """
        Where middleware keeps what all workers have to know; None when the queue has no database.
        """
        return self._store

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """
        A session in a transaction of its own, for a producer with nothing else to write: commits at the end of the block.

        Example:
            ```python
            with queue.begin() as session:
                send_receipt.push(session, 42)
            ```
        """
        with self.new_session() as session, session.begin():
            yield session

    def new_session(self, kind: type[Session] = Session) -> Session:
        """
        What `session_factory` makes, or else a session of this kind on an engine of ours, or on the application's own.

        Raises:
            NotConfigured: the queue has neither.
        """
        if self._session_factory is not None:
            return self._session_factory()
        source = self._source
        if source is None or self._producer is None:
            raise NotConfigured(NOT_CONFIGURED)
        if isinstance(source, Engine) and not source.dialect.is_async:
            return kind(source)
        return kind(self._producer.get())


def _source(engine: Any) -> URL | Engine:
    if isinstance(engine, str | URL):
        return consumer_url(engine)
    if isinstance(engine, Engine):
        return engine
    sync = getattr(engine, "sync_engine", None)
    if isinstance(sync, Engine):
        return sync
    raise OptionError(f"engine: a database URL, an Engine or an AsyncEngine, not a {type(engine).__name__}")


def _same(one: URL | Engine, other: URL | Engine) -> bool:
    return one is other or (isinstance(one, URL) and one == other)
