"""
The queue's own connections: for claiming, settling and reporting, apart from the application's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
from importlib.util import find_spec
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.pool import AssertionPool, Pool, QueuePool, SingletonThreadPool, StaticPool

from .._tables import INNODB
from ..errors import NotConfigured, OptionError
from .trouble import Trouble, trouble_of

__all__ = [
    "close_before_fork",
    "consumer_engine",
    "consumer_options",
    "consumer_url",
    "database_label",
    "driver_extra",
    "is_behind_a_pooler",
    "producer_engine",
]

_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql", "sqlite": "pysqlite"}
_PACKAGES = {"postgresql": ("psycopg", "postgresql"), "mysql": ("pymysql", "mysql"), "mariadb": ("pymysql", "mysql")}
_LOCK_WAIT = "sqlqueue_lock_wait"
_READ_ONLY = "sqlqueue_read_only"
_POOLED = "sqlqueue_pooled"
_DEFAULT_LOCK_WAIT = 10.0
_SILENCE = 30  # seconds after which the other end of a connection is taken for gone
_PROBES = (("TCP_KEEPIDLE", _SILENCE // 3), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", _SILENCE * 1000))


def consumer_url(url: str | URL) -> URL:
    """
    The URL with the driver that the worker uses.

    Raises:
        OptionError: not a URL of a database that sqlqueue serves, or an in-memory SQLite, which no worker could share.
    """
    try:
        parsed = make_url(url)
    except sa.exc.ArgumentError:
        raise OptionError("url: this is not a database URL; it looks like postgresql://user:password@host/database") from None
    backend = "postgresql" if parsed.drivername == "postgres" else parsed.get_backend_name()
    if backend not in _DRIVERS:
        raise OptionError(f"url: {parsed.drivername} is not supported; use postgresql, mysql, mariadb or sqlite")
    parsed = parsed.set(drivername=f"{backend}+{_DRIVERS[backend]}")
    if backend == "sqlite" and _in_memory(parsed):
        raise OptionError("url: an in-memory SQLite database cannot be shared with a worker; name a file, as in sqlite:///queue.db")
    return _absolute(parsed) if backend == "sqlite" else parsed


def driver_extra(url: URL) -> str | None:
    """
    The extra of sqlqueue-outbox that holds the missing driver, or None when it is there.
    """
    package, extra = _PACKAGES.get(url.get_backend_name(), ("sqlite3", ""))
    return None if find_spec(package) else extra


def consumer_engine(source: URL | Engine) -> Engine:
    """
    An engine of the queue's own: READ COMMITTED, bounded waits for locks, and on SQLite transactions that lock at BEGIN.

    From an Engine with one of our drivers it takes the way of connecting, with the application's own connect listeners,
    but none of its connections.
    """
    url = consumer_url(source if isinstance(source, URL) else source.url)
    extra = driver_extra(url)
    if extra is not None:
        raise NotConfigured(f"the driver for {url.get_backend_name()} is not installed: pip install 'sqlqueue-outbox[{extra}]'")
    options: dict[str, Any] = {"hide_parameters": True}
    if isinstance(source, Engine) and source.driver == url.get_driver_name() and not source.dialect.is_async:
        options["pool"] = pool = _pool_like(source.pool)
        # Before SQLAlchemy's own listeners: what the application's have set must not be rolled back, nor stand in the way.
        event.listen(pool, "connect", _end_transaction)
    if url.get_backend_name() != "sqlite":
        options["isolation_level"] = "READ COMMITTED"
    engine = sa.create_engine(url, **options)
    if "pool" not in options:
        event.listen(engine, "connect", _end_transaction, insert=True)  # some listen to every engine
        event.listen(engine, "do_connect", _connect)
    _prepare(engine)
    return engine


def producer_engine(url: URL) -> Engine:
    """
    An engine for pushes by somebody who gave the queue a URL and no engine of their own.
    """
    engine = sa.create_engine(url)
    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _end_transaction, insert=True)
        event.listen(engine, "connect", _prepare_nothing_behind_a_pooler)
    return engine


def close_before_fork(engine: Engine) -> None:
    """
    Close what must not be open when this process forks.

    SQLite counts the locks of a process by file: in the child it would believe to hold those of the parent, take none, and
    lose what the child commits, or wait for ever. A server's connection is not touched by a child that does not use it.
    """
    if engine.dialect.name == "sqlite":
        engine.dispose()


def consumer_options(connection: sa.Connection, *, lock_wait: float | None = None, read_only: bool = False) -> sa.Connection:
    """
    Say before the transaction begins how many seconds it may wait for a lock, and whether it only reads.
    """
    return connection.execution_options(**{_LOCK_WAIT: lock_wait or _DEFAULT_LOCK_WAIT, _READ_ONLY: read_only})


def database_label(connection: sa.Connection) -> str:
    """
    The server and its version, for people.
    """
    dialect = connection.dialect
    name = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name
    known = {"postgresql": "PostgreSQL", "mysql": "MySQL", "mariadb": "MariaDB", "sqlite": "SQLite"}
    return f"{known[name]} {'.'.join(str(part) for part in dialect.server_version_info or () if isinstance(part, int))}"


def _pool_like(theirs: Pool) -> Pool:
    pool = theirs.recreate()
    if not isinstance(pool, StaticPool | AssertionPool | SingletonThreadPool):
        return pool
    # One connection for all threads: what one of them commits or rolls back is what another has done half of. A pool of
    # a connection a thread closes those of other threads when there are more threads than it has room for.
    return QueuePool(pool._creator, pre_ping=pool._pre_ping, recycle=pool._recycle, dialect=pool._dialect, _dispatch=pool.dispatch)


def _absolute(url: URL) -> URL:
    # Now: an engine is made when it is first needed, and a daemon or a handler may have changed the folder by then.
    path = url.database or ""
    return url if path.startswith("file:") else url.set(database=os.path.abspath(path))


def _in_memory(url: URL) -> bool:
    database = url.database or ""
    return database in ("", ":memory:") or "mode=memory" in database or url.query.get("mode") == "memory"


def _prepare(engine: Engine) -> None:
    event.listen(engine, "handle_error", _leave_a_server_that_refuses)
    if engine.dialect.name != "sqlite":
        event.listen(engine, "connect", _watch_silence)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _leave_transactions_to_us)
        event.listen(engine, "begin", _begin_sqlite)
    elif engine.dialect.name in INNODB:
        event.listen(engine, "connect", _speak_utf8mb4)
        event.listen(engine, "begin", _bound_waits_innodb)
    else:
        event.listen(engine, "connect", _prepare_nothing_behind_a_pooler)
        event.listen(engine, "begin", _bound_waits_postgresql)
        event.listen(engine, "rollback", _forget_waits)
        event.listen(engine, "handle_error", _forget_waits_after_error)


def _leave_a_server_that_refuses(context: sa.engine.ExceptionContext) -> None:
    # After a failover the next connection may lead to a server that writes; those that there are still lead to the old one.
    error = context.sqlalchemy_exception
    if isinstance(error, sa.exc.DBAPIError) and trouble_of(error) is Trouble.UNAVAILABLE:
        context.is_disconnect = True


def _connect(dialect: sa.Dialect, record: Any, arguments: Any, parameters: dict[str, Any]) -> Any:
    """
    Bound the handshake, too: a network that went dark answers nothing, and the drivers would wait for hours.
    """
    if dialect.driver == "psycopg":
        parameters.setdefault("connect_timeout", _SILENCE)
    if dialect.driver != "pymysql" or {"unix_socket", "bind_address", "read_default_file", "defer_connect"} & parameters.keys():
        return None
    driver: Any = dialect.loaded_dbapi
    connection = driver.connect(*arguments, **parameters, defer_connect=True)
    try:
        made = socket.create_connection((connection.host, connection.port), connection.connect_timeout)
    except OSError as error:
        raise driver.OperationalError(2003, f"Can't connect to MySQL server on {connection.host!r} ({error})") from error
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _probe(made)
    connection.connect(made)
    return connection


def _watch_silence(connection: Any, record: Any) -> None:
    # Of an application's own engine as well, unless it has said how long itself.
    with contextlib.suppress(AttributeError, OSError):
        if hasattr(connection, "_sock"):
            # Not through a second socket object: with a default time-out in the process, one more makes both non-blocking.
            _probe(connection._sock)
            return
        with socket.socket(fileno=os.dup(connection.fileno())) as it:  # libpq's, which never block
            _probe(it)


def _probe(it: socket.socket) -> None:
    # Not a limit for an answer, which may wait for a lock: the other end's kernel acknowledges and answers probes at once.
    limit = getattr(socket, "TCP_USER_TIMEOUT", None)
    if it.family not in (socket.AF_INET, socket.AF_INET6) or (limit and it.getsockopt(socket.IPPROTO_TCP, limit)):
        return
    it.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):  # not everywhere
            it.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _end_transaction(connection: Any, record: Any) -> None:
    connection.commit()


def _is_bound_by(connection: sa.Connection, wait: int) -> bool:
    # An application may set or discard settings whenever a connection comes from the pool or goes back.
    listeners: Any = connection.engine.pool.dispatch
    touched = listeners.checkout or listeners.checkin or listeners.reset
    return not touched and connection.info.get(_LOCK_WAIT) == wait


def _leave_transactions_to_us(connection: Any, record: Any) -> None:
    # The stock driver begins a transaction only before some statements, and never one that locks at once.
    if hasattr(connection, "autocommit"):
        connection.autocommit = sqlite3.LEGACY_TRANSACTION_CONTROL  # type: ignore[attr-defined,unused-ignore]
    connection.isolation_level = None


def _begin_sqlite(connection: sa.Connection) -> None:
    options = connection.get_execution_options()
    milliseconds = int(options.get(_LOCK_WAIT, _DEFAULT_LOCK_WAIT) * 1000)
    if not _is_bound_by(connection, milliseconds):
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {milliseconds}")
        connection.info[_LOCK_WAIT] = milliseconds
    if connection.connection.dbapi_connection.in_transaction:  # type: ignore[union-attr]
        connection.exec_driver_sql("ROLLBACK")  # the BEGIN of a recipe that listens to every engine; nothing has happened in it
    # A transaction that reads first and then writes fails at once when another one wrote in between, whatever the timeout.
    connection.exec_driver_sql("BEGIN" if options.get(_READ_ONLY) else "BEGIN IMMEDIATE")


def _speak_utf8mb4(connection: Any, record: Any) -> None:
    # An application may connect with a smaller character set; error texts hold any character.
    if getattr(connection, "charset", "utf8mb4") != "utf8mb4":
        connection.set_character_set("utf8mb4")


def _bound_waits_innodb(connection: sa.Connection) -> None:
    seconds = max(1, int(connection.get_execution_options().get(_LOCK_WAIT, _DEFAULT_LOCK_WAIT)))
    if not _is_bound_by(connection, seconds):
        connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {seconds}, SESSION lock_wait_timeout = {seconds}")
        connection.info[_LOCK_WAIT] = seconds


def _prepare_nothing_behind_a_pooler(connection: Any, record: Any) -> None:
    # A pooler may give each transaction to another session of the server, which does not know what this connection has prepared,
    # and knows what others have under the same names. Without a pooler a prepared claim takes a fifth less time.
    before, connection.autocommit = connection.autocommit, True
    pooled = is_behind_a_pooler(connection)
    connection.autocommit = before
    if pooled:
        connection.prepare_threshold = None
    record.info[_POOLED] = pooled


def is_behind_a_pooler(connection: Any) -> bool:
    """
    Ask a connection of psycopg's, in autocommit. A pooler makes up process ids: the one that answers is not the one of the login.
    """
    (answering,) = connection.execute("SELECT pg_backend_pid()").fetchone()
    return bool(answering != connection.info.backend_pid)


def _bound_waits_postgresql(connection: sa.Connection) -> None:
    # The time zone: far in the future or past, another one leads beyond the years that Python has, and reading the row
    # would fail. An application may connect with a smaller character set; error texts hold any character.
    options = connection.get_execution_options()
    if options.get("isolation_level") == "AUTOCOMMIT":
        return  # there is no transaction
    milliseconds = int(options.get(_LOCK_WAIT, _DEFAULT_LOCK_WAIT) * 1000)
    # Behind a pooler for this transaction only: a session's settings would be handed on to strangers.
    once = connection.info.get(_POOLED, True)
    if not once and _is_bound_by(connection, milliseconds):
        return
    settings = {"lock_timeout": str(milliseconds), "TimeZone": "UTC", "client_encoding": "UTF8"}
    calls = (f"set_config('{name}', '{value}', {str(once).lower()})" for name, value in settings.items())
    connection.exec_driver_sql(f"SELECT {', '.join(calls)}")
    connection.info[_LOCK_WAIT] = milliseconds


def _forget_waits(connection: sa.Connection) -> None:
    # What a transaction has set for the session goes when it is rolled back.
    if not connection.invalidated:
        connection.info.pop(_LOCK_WAIT, None)


def _forget_waits_after_error(context: sa.engine.ExceptionContext) -> None:
    # A COMMIT that fails is a rollback, and nobody else says so.
    if context.connection is not None and not context.connection.closed:
        with contextlib.suppress(NotImplementedError):  # the connection with which the dialect looks at its server has no memory
            _forget_waits(context.connection)
