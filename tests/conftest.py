"""
Fixtures, and which databases the tests run on.

A test that takes `server`, `database`, `engine`, `observer` or `queue` runs once on each database. SQLQUEUE_TEST_DATABASES=sqlite,mysql
restricts them, SQLQUEUE_TEST_REQUIRE=postgresql,mysql turns a missing one into an error, `@pytest.mark.databases("mysql", "mariadb")`
restricts one test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import QueuePool

from tests.servers import NAMES, Database, Server, Servers, never_wait_long

if TYPE_CHECKING:
    from sqlqueue import Queue

SERVERS = pytest.StashKey[Servers]()
WANTED = pytest.StashKey[list[str]]()


def names_in(variable: str, default: str = "") -> list[str]:
    names = [name.strip() for name in os.environ.get(variable, default).split(",") if name.strip()]
    if unknown := sorted(set(names) - set(NAMES)):
        pytest.exit(f"{variable}: unknown database {', '.join(unknown)} (known: {', '.join(NAMES)})", returncode=1)
    return [name for name in NAMES if name in names]


def pytest_configure(config: pytest.Config) -> None:
    # PyMySQL loads the machine's certificates for each connection, a tenth of a second; our own servers show it none.
    # For the processes that tests start, too.
    if not any(os.environ.get(f"SQLQUEUE_TEST_{name.upper()}_URL") for name in NAMES):
        os.environ.update({"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull})
    selected = names_in("SQLQUEUE_TEST_DATABASES", ",".join(NAMES))
    servers = Servers(os.environ)
    config.stash[SERVERS] = servers
    config.add_cleanup(servers.close)
    for name in names_in("SQLQUEUE_TEST_REQUIRE"):
        reason = servers.missing(name) if name in selected else "left out by SQLQUEUE_TEST_DATABASES"
        if reason:
            pytest.exit(f"SQLQUEUE_TEST_REQUIRE: {name} cannot be tested: {reason}", returncode=1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("databases")
    servers = metafunc.config.stash[SERVERS]
    parameters = []
    for name in names_in("SQLQUEUE_TEST_DATABASES", ",".join(NAMES)):
        if mark is None or name in mark.args:
            reason = servers.missing(name)
            parameters.append(pytest.param(name, id=name, marks=[pytest.mark.skip(reason=f"{name}: {reason}")] if reason else []))
    # Of session scope, so that pytest groups the tests: all of one database, then all of the next.
    metafunc.parametrize("server", parameters, indirect=True, scope="session")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start together whatever the selected tests need, and let no test run beside a server that is still starting."""
    calls = [item.callspec.params for item in session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    wanted = {params["server"] for params in calls if "server" in params}
    session.config.stash[WANTED] = [name for name in NAMES if name in wanted]
    if session.config.option.collectonly:
        return
    servers = session.config.stash[SERVERS]
    starting = [servers.begin(name) for name in session.config.stash[WANTED] if not servers.missing(name)]
    for future in starting:
        future.exception()  # raised where a test asks for the server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    servers = config.stash[SERVERS]
    if running := servers.running():
        terminalreporter.line("databases: " + ", ".join(f"{server.name} {server.version}" for server in running))
    for name in config.stash.get(WANTED, []):
        if reason := servers.missing(name):
            terminalreporter.line(f"{name} not run: {reason}", yellow=True)


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test adds to the import path is forgotten: Alembic adds ".", which Python remembers as the first directory it meant."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield
    sys.path_importer_cache.pop(".", None)


@pytest.fixture(autouse=True)
def closed_engines() -> Iterator[None]:
    """Whatever engine a test has connected with is closed after it: psycopg warns of connections that are merely dropped."""
    engines: set[Engine] = set()

    def remember(connection: Connection) -> None:
        engines.add(connection.engine)

    event.listen(Engine, "engine_connect", remember)
    yield
    event.remove(Engine, "engine_connect", remember)
    for engine in engines:
        if not engine.dialect.is_async:
            engine.dispose()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Server:
    """The running server; its `instance`, where we started it ourselves, can be stopped, killed and started again."""
    try:
        return request.config.stash[SERVERS].get(request.param)
    except RuntimeError as error:  # its text says it all, and every test of this database will say it
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def database(server: Server, tmp_path: Path) -> Database:
    """Where the test writes: a new file on SQLite, elsewhere the one schema that all tests share."""
    return server.database(tmp_path)


@pytest.fixture
def fresh_database(server: Server, tmp_path: Path) -> Iterator[Database]:
    """A database of this test's own, without any tables."""
    if server.url is None:
        yield Database(server.name, f"sqlite:///{tmp_path}/fresh.db")
        return
    created = server.create_database()
    yield created
    server.drop_database(created)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """An engine with SQLAlchemy's defaults. The test must give back every connection."""
    engine = create_engine(database.url)
    yield engine
    left = engine.pool.checkedout() if isinstance(engine.pool, QueuePool) else 0
    engine.dispose()
    assert left == 0, f"the test left {left} connection(s) of its engine open"


@pytest.fixture
def observer(database: Database) -> Iterator[Engine]:
    """Looks from outside: in autocommit, so that each statement sees what others have committed, and only that."""
    engine = create_engine(database.url, isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


@pytest.fixture
def queue(engine: Engine, observer: Engine, server: Server) -> Iterator[Queue]:
    """A Queue without jobs on the engine; its tables are there, and empty."""
    from sqlqueue import Queue

    queue = Queue(engine)
    if server.url is None or not server.has_tables:
        queue.metadata.create_all(engine)
        server.has_tables = True
    if server.url is not None:
        with observer.connect() as connection:
            never_wait_long(connection)
            for table in reversed(queue.metadata.sorted_tables):
                connection.execute(table.delete())
    yield queue
    queue.consumer.close()
