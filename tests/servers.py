"""
The databases that the tests run on.

A server is taken from its URL (SQLQUEUE_TEST_POSTGRESQL_URL, …_MYSQL_URL, …_MARIADB_URL; the user must be allowed to create
databases) or started as a private instance of the program found on this machine, in a temporary folder that goes away with the
session. A private instance keeps its product's defaults, two things aside: it never waits for the disk, and its time zone is not UTC.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar

from sqlalchemy import URL, Connection, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

NAMES = ("sqlite", "postgresql", "mysql", "mariadb")
DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql"}
SCHEMES = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mysql+pymysql", "pgbouncer": "postgresql+psycopg"}
USER, PASSWORD = "sqlqueue", "test-password"
MYSQL_HOME = Path(os.environ.get("SQLQUEUE_MYSQL_HOME", "/var/cache/sqlqueue-mysql"))


@dataclass(frozen=True, slots=True)
class Database:
    """A schema (on SQLite: a file) that the test may write to; `url` has the password in it."""

    name: str
    url: str

    @property
    def mariadb_url(self) -> str:
        """The same database through SQLAlchemy's own MariaDB dialect."""
        assert self.name == "mariadb", f"{self.name} has no mariadb:// URL"
        return make_url(self.url).set(drivername="mariadb+pymysql").render_as_string(hide_password=False)


def version_of(connection: Connection, name: str) -> str:
    answer = str(connection.scalar(text("SELECT version()")))
    if ("MariaDB" in answer) != (name == "mariadb"):  # one product under the other's name would prove nothing
        raise RuntimeError(f"SQLQUEUE_TEST_{name.upper()}_URL leads to another server: {answer}")
    found = re.search(r"\d+(\.\d+)+", answer)
    return found.group() if found else answer


def never_wait_long(connection: Connection) -> None:
    """Let this connection give up on a lock that another test left behind after some seconds, not after 50."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET lock_timeout = '5s'"))
    elif connection.dialect.name in ("mysql", "mariadb"):
        connection.execute(text("SET innodb_lock_wait_timeout = 5, lock_wait_timeout = 5"))


def find_program(name: str) -> Path | None:
    """The server program of a database, or None. Only Oracle's mysqld is MySQL: Debian's is MariaDB under another name."""
    if name == "postgresql":
        versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
        found = shutil.which("postgres")
        return Path(found).resolve() if found else versions[-1] if versions else None
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"
    if name == "mariadb":
        found = shutil.which("mariadbd", path=path)
        return Path(found) if found else None
    for candidate in (shutil.which("mysqld", path=path), MYSQL_HOME / "bin/mysqld"):
        if candidate and os.access(candidate, os.X_OK) and "MariaDB" not in output_of(str(candidate), "--version"):
            return Path(candidate)
    return None


def find_pgbouncer() -> Path | None:
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")
    return Path(found) if found else None


def find_faketime() -> Path | None:
    """The library that, loaded before all others, tells a process another time; the one for processes with threads."""
    return next((path for pattern in ("*/faketime", "faketime") for path in Path("/usr/lib").glob(f"{pattern}/libfaketimeMT.so.1")), None)


def needed(found: Path | None, name: str, database: str) -> Path:
    """What a test needs beside its database: without it the test is skipped by name, and fails where the database is required."""
    import pytest  # not at the top: the benchmarks start servers without it

    if found is None:
        required = [name.strip() for name in os.environ.get("SQLQUEUE_TEST_REQUIRE", "").split(",")]
        (pytest.fail if database in required else pytest.skip)(f"{database}: no {name} found")
    return found


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def free_port() -> int:
    """A port below the range from which the kernel serves clients: nobody gets it by accident while the server is down."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


class Guardian:
    """A shell that outlives us: when our end of its pipe closes, however we went, it kills the servers and removes the folder."""

    SCRIPT = 'while read -r pid; do pids="$pids $pid"; done; kill -QUIT $pids; sleep 1; kill -KILL $pids; rm -rf "$1"'

    def __init__(self, folder: Path) -> None:
        # In a session of its own: an interrupt at the terminal is for pytest, which then stops the servers in order.
        self.shell = subprocess.Popen(
            ["/bin/sh", "-c", self.SCRIPT, "guardian", folder], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        assert self.shell.stdin is not None
        self.shell.stdin.write(f"{pid}\n".encode())
        self.shell.stdin.flush()

    def dismiss(self) -> None:
        self.shell.kill()
        self.shell.communicate()


class Instance:
    """A private server in a folder of its own: prepared once, then started, stopped or killed any number of times."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    discard_signal: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(self, program: Path, home: Path, watch: Callable[[int], None]) -> None:
        self.program = program
        self.home = home
        self.data = home / "data"
        self.log = home / "server.log"
        self.watch = watch
        self.port = free_port()
        self.url = URL.create(SCHEMES[self.name], USER, PASSWORD, "127.0.0.1", self.port, self.maintenance_database())
        self.process: subprocess.Popen[bytes] | None = None
        home.mkdir(parents=True)
        self.prepare()

    def maintenance_database(self) -> str | None:
        return None

    def prepare(self) -> None:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, timeout: float = 60) -> None:
        """Start the server, and return when it answers."""
        deadline = time.monotonic() + timeout
        self.launch()
        while not self.answers():
            if not self.running and time.monotonic() < deadline - timeout + 5:
                time.sleep(0.3)  # after a kill its orphans may hold the data folder for a moment
                self.launch()
            elif not self.running or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not start:\n{self.last_words()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Shut the server down as an administrator would, and wait for it."""
        self.end(self.stop_signal)

    def kill(self) -> None:
        """End the server as a crash would. What was committed is still there after the next start."""
        self.end(signal.SIGKILL)

    def discard(self) -> None:
        """End the server whose data nobody wants any more."""
        self.end(self.discard_signal)

    def launch(self) -> None:
        with self.log.open("ab") as log:
            self.process = self.popen(self.command(), log.fileno())
        self.watch(self.process.pid)

    def end(self, with_signal: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(with_signal)
            self.process.wait(timeout=60)
            self.process = None

    def answers(self) -> bool:
        try:
            with create_engine(self.url, poolclass=NullPool).connect():
                return True
        except DBAPIError:
            return False

    def run(self, command: list[str]) -> None:
        with self.log.open("ab") as log:
            if self.popen(command, log.fileno()).wait(timeout=120) != 0:
                raise RuntimeError(f"{self.name} cannot be prepared:\n{self.last_words()}")

    def popen(self, command: list[str], log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home, start_new_session=True)

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


class PostgreSQL(Instance):
    name = "postgresql"
    stop_signal = signal.SIGINT  # fast shutdown; SIGTERM would wait for clients
    discard_signal = signal.SIGQUIT  # at once; SIGKILL would leave shared memory behind

    def maintenance_database(self) -> str:
        return "postgres"

    def prepare(self) -> None:
        password = self.home / "password"
        password.write_text(PASSWORD)
        if os.geteuid() == 0:
            for path in (self.home, password):
                shutil.chown(path, self.account())
        self.run(
            [
                f"{self.program.parent}/initdb",
                "--no-sync",
                "--encoding=UTF8",
                "--locale=C",
                f"--username={USER}",
                f"--pwfile={password}",
                "--auth=scram-sha-256",
                f"--pgdata={self.data}",
            ]
        )

    def command(self) -> list[str]:
        # max_prepared_transactions: for two-phase sessions.
        settings = {"fsync": "off", "max_connections": 300, "max_prepared_transactions": 20, "timezone": "Asia/Kolkata"}
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        return [str(self.program), "-D", str(self.data), "-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.home), *options]

    def popen(self, command: list[str], log: int) -> subprocess.Popen[bytes]:
        if os.geteuid() != 0:
            return super().popen(command, log)
        account = pwd.getpwnam(self.account())  # PostgreSQL refuses to run as root
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.home,
            start_new_session=True,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
        )

    @staticmethod
    def account() -> str:
        return "postgres" if any(entry.pw_name == "postgres" for entry in pwd.getpwall()) else "nobody"


class MySQL(Instance):
    name = "mysql"

    def prepare(self) -> None:
        # The address, not a name: MariaDB's anonymous user at localhost would come first.
        (self.home / "users.sql").write_text(
            f"CREATE USER IF NOT EXISTS '{USER}'@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            f"GRANT ALL ON *.* TO '{USER}'@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        self.run(self.preparation())

    def preparation(self) -> list[str]:
        return [*self.beginning(str(self.program)), "--initialize-insecure"]

    def command(self) -> list[str]:
        return [
            *self.beginning(str(self.program)),
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            f"--socket={self.home}/socket",
            f"--pid-file={self.home}/pid",
            f"--init-file={self.home}/users.sql",
            "--max-connections=300",
            "--default-time-zone=+05:30",
        ]

    def beginning(self, program: str) -> list[str]:
        # No fsync, but every commit is handed to the kernel: it survives a killed server. --no-defaults must come first;
        # the wrapper that .ci/mysql makes gives it itself.
        return [
            program,
            *([] if self.program == MYSQL_HOME / "bin/mysqld" else ["--no-defaults"]),
            f"--datadir={self.data}",
            # Of its own: a server that starts removes the temporary tables of others from a folder that it shares with them.
            f"--tmpdir={self.home}",
            *(["--user=root"] if os.geteuid() == 0 else []),
            "--loose-innodb-flush-method=nosync",
            "--innodb-flush-log-at-trx-commit=2",
            "--skip-log-bin",
        ]


class MariaDB(MySQL):
    name = "mariadb"

    def preparation(self) -> list[str]:
        # It lies in a bin folder where its server may lie in sbin.
        installer = shutil.which("mariadb-install-db", path=f"{self.program.parent}:{self.program.parent.parent}/bin")
        return [*self.beginning(installer or "mariadb-install-db"), "--auth-root-authentication-method=normal", "--skip-test-db"]


class PgBouncer(PostgreSQL):
    """A pooler before a PostgreSQL server, with pools of several sizes before each database that it is told of."""

    name = "pgbouncer"
    stop_signal = signal.SIGTERM  # at once; SIGINT would wait for transactions
    discard_signal = signal.SIGTERM
    sizes = (1, 2)

    def __init__(self, program: Path, home: Path, watch: Callable[[int], None], database: Database, settings: Mapping[str, str]) -> None:
        self.server = make_url(database.url)
        self.settings = settings
        super().__init__(program, home, watch)
        self.url = self.url.set(username=self.server.username, password=self.server.password)

    def maintenance_database(self) -> str:
        return "pgbouncer"  # its own console

    def prepare(self) -> None:
        server, own = self.server, self.home / "pgbouncer.ini"
        users = self.home / "users"
        users.write_text(f'"{server.username}" "{server.password}"\n')
        place = f"host={server.host} port={server.port or 5432} dbname={server.database}"
        pools = "".join(f"{self.database_of(size)} = {place} pool_size={size}\n" for size in self.sizes)
        settings = {
            **self.settings,
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_file": users,
            "admin_users": server.username,
        }
        own.write_text(f"[databases]\n{pools}\n[pgbouncer]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        if os.geteuid() == 0:
            for path in (self.home, own, users):
                shutil.chown(path, self.account())  # it refuses to run as root, too

    def command(self) -> list[str]:
        return [str(self.program), str(self.home / "pgbouncer.ini")]

    def answers(self) -> bool:
        try:
            with create_engine(self.pool_of(1).url, poolclass=NullPool).connect():
                return True
        except DBAPIError:
            return False

    def order(self, command: str) -> None:
        """Give a command at the console. It speaks only the simple protocol, and knows nothing of what SQLAlchemy asks at first."""
        import psycopg  # not at the top: the tests of the other databases do without it

        url = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True, connect_timeout=5, cursor_factory=psycopg.ClientCursor) as connection:
            connection.execute(command)

    def database_of(self, size: int) -> str:
        return f"{self.server.database}_{size}"

    def pool_of(self, size: int) -> Database:
        """The database through a pool of that many connections to the server."""
        return Database("postgresql", self.url.set(database=self.database_of(size)).render_as_string(hide_password=False))


@contextmanager
def pooler_before(database: Database, settings: Mapping[str, str]) -> Iterator[PgBouncer]:
    """A private PgBouncer; the test must have been told by `needed` that there is one."""
    program = find_pgbouncer()
    assert program is not None
    folder = Path(tempfile.mkdtemp(prefix="sqlqueue-tests-"))
    folder.chmod(0o711)
    guardian = Guardian(folder)
    pooler = PgBouncer(program, folder / "pgbouncer", guardian.watch, database, settings)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.discard()
        guardian.dismiss()
        shutil.rmtree(folder, ignore_errors=True)


INSTANCES: Mapping[str, type[Instance]] = {kind.name: kind for kind in (PostgreSQL, MySQL, MariaDB)}


class Server:
    """One database product during the session. `instance` is there when we started it ourselves, and may be stopped and killed."""

    def __init__(self, name: str, url: URL | None = None, instance: Instance | None = None) -> None:
        self.name = name
        self.url = url
        self.instance = instance
        self.version = sqlite3.sqlite_version
        self.has_tables = False
        self._numbers = count(1)
        if url is not None:
            with create_engine(url, poolclass=NullPool).connect() as connection:
                self.version = version_of(connection, name)
            self.shared = self.create_database()

    def database(self, folder: Path) -> Database:
        """The database of one test: a new file in the folder, or the schema that all tests of this server share."""
        if self.url is None:
            return Database(self.name, f"sqlite:///{folder}/queue.db")
        if self.instance is not None and not self.instance.running:
            self.instance.start()  # the test before ended it, and failed before it could start it again
        return self.shared

    def create_database(self) -> Database:
        assert self.url is not None
        name = f"sqlqueue_test_{os.getpid()}_{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name}")
        return Database(self.name, self.url.set(database=name).render_as_string(hide_password=False))

    def drop_database(self, database: Database) -> None:
        name = make_url(database.url).database
        self._execute(f"DROP DATABASE {name}{' WITH (FORCE)' if self.name == 'postgresql' else ''}")

    def close(self) -> None:
        if self.instance is not None:
            self.instance.discard()
        elif self.url is not None:
            self.drop_database(self.shared)

    def _execute(self, statement: str) -> None:
        assert self.url is not None
        with create_engine(self.url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as connection:
            never_wait_long(connection)
            connection.execute(text(statement))


class Servers:
    """All of them, each started when it is first wanted."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.folder = Path(tempfile.mkdtemp(prefix="sqlqueue-tests-"))
        self.folder.chmod(0o711)  # PostgreSQL may run as somebody else
        self.guardian = Guardian(self.folder)
        self.pool = ThreadPoolExecutor(len(NAMES))
        self.futures: dict[str, Future[Server]] = {}

    def missing(self, name: str) -> str | None:
        """Why this database cannot run here, in a few words; None if it can."""
        if name == "sqlite":
            return None
        if importlib.util.find_spec(DRIVERS[name]) is None:
            return f"{DRIVERS[name]} is not installed"
        if self._url(name) is None and find_program(name) is None:
            program = {"postgresql": "postgres", "mysql": "mysqld", "mariadb": "mariadbd"}[name]
            return f"no {program} found, no SQLQUEUE_TEST_{name.upper()}_URL set"
        return None

    def begin(self, name: str) -> Future[Server]:
        """Start it without waiting for it."""
        if name not in self.futures:
            self.futures[name] = self.pool.submit(self._open, name)
        return self.futures[name]

    def get(self, name: str) -> Server:
        return self.begin(name).result()

    def running(self) -> list[Server]:
        return [future.result() for name in NAMES if (future := self.futures.get(name)) and not future.exception()]

    def close(self) -> None:
        list(self.pool.map(Server.close, self.running()))
        self.pool.shutdown()
        self.guardian.dismiss()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, name: str) -> Server:
        if name == "sqlite":
            return Server(name)
        if url := self._url(name):
            return Server(name, url)
        program = find_program(name)
        assert program is not None, self.missing(name)
        instance = INSTANCES[name](program, self.folder / name, self.guardian.watch)
        instance.start()
        return Server(name, instance.url, instance)

    def _url(self, name: str) -> URL | None:
        value = self.environ.get(f"SQLQUEUE_TEST_{name.upper()}_URL")
        return make_url(value).set(drivername=SCHEMES[name]) if value else None
