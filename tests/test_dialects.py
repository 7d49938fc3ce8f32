"""
What the library believes about servers, errors, clocks and its own connections.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError, ProgrammingError
from sqlalchemy.pool import NullPool

from sqlqueue import Queue
from sqlqueue._dialects import Trouble, after, consumer_engine, consumer_options, consumer_url, database_label, now, server_of, trouble_of
from sqlqueue._dialects.server import lock_by_primary_key
from sqlqueue._driver.claim import Company, _candidates, _Terms
from sqlqueue.errors import OptionError
from tests.rows import jobs_in, moment_of, put, put_each
from tests.servers import Database

# --- capabilities -----------------------------------------------------------------------------------------------------


def innodb(banner: str) -> Any:
    dialect: Any = mysql.dialect()
    dialect.server_version_info = dialect._parse_server_version(banner)
    return dialect


@pytest.mark.parametrize(
    ("banner", "skips"),
    [
        ("5.7.44", False),
        ("8.0.0-dmr", False),
        ("8.0.1-dmr", True),
        ("8.0.36", True),
        ("8.4.0", True),
        ("9.7.4", True),
        ("10.5.23-MariaDB", False),
        ("10.6.0-MariaDB", True),
        ("10.11.6-MariaDB-0+deb12u1", True),
        ("5.5.5-10.5.8-MariaDB", False),
        ("5.5.5-10.11.6-MariaDB-log", True),
        ("11.4.2-MariaDB", True),
    ],
)
def test_skip_locked_is_sent_only_to_servers_that_know_it(banner: str, skips: bool) -> None:
    dialect = innodb(banner)
    server = server_of(dialect)
    assert server.skip_locked is skips
    assert server.row_locks
    assert not server.claim_in_one_statement
    tables = Queue().tables
    claim = str(_candidates(tables, server, _Terms(Company.NONE, ahead=False, choosy=False)).compile(dialect=dialect))
    settle = str(lock_by_primary_key(dialect, sa.select(tables.jobs.c.id), tables.jobs).compile(dialect=dialect))
    for statement in (claim, settle):
        assert "FOR UPDATE" in statement
        assert ("SKIP LOCKED" in statement) is skips
    assert ("JSON_TABLE" in settle) is (skips and not banner.startswith("8.0.1"))


def test_a_server_can_lock_rows_or_locks_everything(engine: Engine) -> None:
    with engine.connect():
        server = server_of(engine.dialect)
    assert server.skip_locked is server.row_locks
    assert (server.lease_grace > 0) is not server.row_locks


def test_people_are_told_the_product_and_its_version(engine: Engine, database: Database) -> None:
    names = {"postgresql": "PostgreSQL", "mysql": "MySQL", "mariadb": "MariaDB", "sqlite": "SQLite"}
    with engine.connect() as connection:
        assert database_label(connection).split()[0] == names[database.name]
        assert database_label(connection).split()[1][0].isdigit()


# --- errors -----------------------------------------------------------------------------------------------------------


def wrapped(error: BaseException, kind: type[DBAPIError] = OperationalError) -> DBAPIError:
    return kind("SELECT 1", {}, error)


def pymysql_error(number: int) -> DBAPIError:
    """As PyMySQL makes it from the server's packet."""
    with pytest.raises(pymysql.err.Error) as caught:
        pymysql.err.raise_mysql_exception(b"\xff" + number.to_bytes(2, "little") + b"#HY000made up")
    return wrapped(caught.value)


@pytest.mark.parametrize(
    ("trouble", "numbers"),
    [
        (Trouble.CONFLICT, [1020, 1205, 1206, 1213, 1317, 1412, 1969, 3024, 3101, 3572]),
        (Trouble.LOST, [1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1180, 1184, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031]),
        (Trouble.UNAVAILABLE, [1021, 1037, 1038, 1040, 1041, 1047, 1114, 1129, 1135, 1203, 1223, 1226, 1290, 1792, 1836, 3032, 3168]),
        (Trouble.MISSING_TABLES, [1054, 1146, 1176]),
        (Trouble.REFUSED, [1044, 1045, 1049, 1130, 1142, 1143, 1227, 1698]),
        (Trouble.DUPLICATE, [1062]),
        (Trouble.OTHER, [1064, 1366, 1406, 1364]),
    ],
)
def test_numbers_of_mysql_and_mariadb(trouble: Trouble, numbers: list[int]) -> None:
    assert {number: trouble_of(pymysql_error(number)) for number in numbers} == dict.fromkeys(numbers, trouble)


@pytest.mark.parametrize(
    ("trouble", "states"),
    [
        (Trouble.CONFLICT, ["40001", "40P01", "55P03", "57014"]),
        (Trouble.LOST, ["08000", "08003", "08006", "40003", "25P03", "25P04", "57P01", "57P02", "57P03", "57P05"]),
        (Trouble.UNAVAILABLE, ["25006", "53000", "53100", "53200", "53300", "53400", "58030"]),
        (Trouble.MISSING_TABLES, ["42P01", "42703", "3F000"]),
        (Trouble.REFUSED, ["28000", "28P01", "3D000", "42501"]),
        (Trouble.DUPLICATE, ["23505"]),
        (Trouble.OTHER, ["42601", "22P02", "23502"]),
    ],
)
def test_states_of_postgresql(trouble: Trouble, states: list[str]) -> None:
    def error(state: str) -> DBAPIError:
        try:
            kind = psycopg.errors.lookup(state)
        except KeyError:
            kind = type("Newer", (psycopg.OperationalError,), {"sqlstate": state})
        return wrapped(kind("made up"))

    assert {state: trouble_of(error(state)) for state in states} == dict.fromkeys(states, trouble)


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        (Trouble.CONFLICT, sqlite3.SQLITE_BUSY),
        (Trouble.CONFLICT, 517),  # SQLITE_BUSY_SNAPSHOT
        (Trouble.CONFLICT, sqlite3.SQLITE_LOCKED),
        (Trouble.CONFLICT, sqlite3.SQLITE_INTERRUPT),
        (Trouble.CONFLICT, sqlite3.SQLITE_PROTOCOL),
        (Trouble.UNAVAILABLE, sqlite3.SQLITE_READONLY),
        (Trouble.UNAVAILABLE, sqlite3.SQLITE_FULL),
        (Trouble.LOST, sqlite3.SQLITE_IOERR),
        (Trouble.LOST, sqlite3.SQLITE_CANTOPEN),
        (Trouble.REFUSED, sqlite3.SQLITE_NOTADB),
        (Trouble.DUPLICATE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY),
        (Trouble.DUPLICATE, sqlite3.SQLITE_CONSTRAINT_UNIQUE),
        (Trouble.OTHER, sqlite3.SQLITE_CONSTRAINT_NOTNULL),
        (Trouble.OTHER, sqlite3.SQLITE_CORRUPT),
    ],
)
def test_codes_of_sqlite(trouble: Trouble, code: int) -> None:
    error = sqlite3.OperationalError("made up")
    error.sqlite_errorcode = code
    assert trouble_of(wrapped(error)) is trouble


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (Trouble.LOST, wrapped(pymysql.err.InterfaceError(0, ""), InterfaceError)),
        (Trouble.LOST, wrapped(pymysql.err.InternalError("Packet sequence number wrong - got 1 expected 2"), InternalError)),
        (Trouble.LOST, wrapped(psycopg.OperationalError("consuming input failed: server closed the connection unexpectedly"))),
        (Trouble.LOST, wrapped(psycopg.OperationalError("the connection is closed"))),
        (Trouble.LOST, wrapped(psycopg.OperationalError("connection failed: FATAL:  the database system is starting up"))),
        (Trouble.LOST, wrapped(psycopg.OperationalError("connection failed: FATAL:  sorry, too many clients already"))),
        (Trouble.REFUSED, wrapped(psycopg.OperationalError('connection failed: FATAL:  password authentication failed for user "x"'))),
        (Trouble.REFUSED, wrapped(psycopg.OperationalError('connection failed: FATAL:  database "x" does not exist'))),
        (Trouble.REFUSED, wrapped(psycopg.OperationalError('connection failed: FATAL:  permission denied for database "x"'))),
        (Trouble.OTHER, wrapped(psycopg.ProgrammingError("the query has 1 placeholder but 0 parameters were passed"), ProgrammingError)),
    ],
)
def test_errors_without_a_code(trouble: Trouble, error: DBAPIError) -> None:
    assert trouble_of(error) is trouble


def test_missing_tables_are_missing_tables(queue: Queue, observer: Engine) -> None:
    nowhere = sa.Table("sqlqueue_nowhere", sa.MetaData(), sa.Column("id", sa.Integer))
    elsewhere = sa.Table("sqlqueue_jobs", sa.MetaData(), sa.Column("no_such_column", sa.Integer))
    for table in (nowhere, elsewhere):
        with observer.connect() as connection, pytest.raises(DBAPIError) as caught:
            connection.execute(sa.select(table))
        assert trouble_of(caught.value) is Trouble.MISSING_TABLES


# --- our own connections ------------------------------------------------------------------------------------------------

LEVELS = ["SERIALIZABLE", "REPEATABLE READ", "AUTOCOMMIT"]


def supports(engine: Engine, level: str) -> bool:
    return server_of(engine.dialect).row_locks or level != "REPEATABLE READ"


def transactional(connection: Connection) -> bool:
    driver: Any = connection.connection.dbapi_connection
    if isinstance(driver, sqlite3.Connection):
        return driver.in_transaction
    return not (driver.get_autocommit() if hasattr(driver, "get_autocommit") else driver.autocommit)


@pytest.mark.parametrize("level", LEVELS)
def test_the_queue_s_transactions_are_its_own_whatever_the_application_s_engine_does(
    queue: Queue, observer: Engine, database: Database, level: str
) -> None:
    if not supports(observer, level):
        pytest.skip("there is no such level here")
    theirs = create_engine(database.url, isolation_level=level)
    own = Queue(theirs)
    put(observer, own, 3)
    seen: list[tuple[str, bool]] = []

    def look(connection: Connection) -> None:
        seen.append((connection.get_isolation_level() if server_of(connection.dialect).row_locks else "", transactional(connection)))

    def executing(cursor: object, statement: str, parameters: object, context: Any) -> None:
        if not statement.startswith(("BEGIN", "PRAGMA")):
            look(context.root_connection)

    (delivery, *_) = own.claim(limit=2)
    event.listen(own.consumer.engine, "do_execute", executing)
    own.renew(delivery)
    own.complete(delivery)
    own.stats()
    expected = "READ COMMITTED" if server_of(own.consumer.engine.dialect).row_locks else ""
    assert {level for level, _ in seen} == {expected}
    assert all(in_transaction for _, in_transaction in seen)
    with theirs.connect() as connection:  # and theirs are as they were
        look(connection)
    assert seen[-1][1] is (level != "AUTOCOMMIT") or not server_of(theirs.dialect).row_locks
    own.consumer.close()
    theirs.dispose()


def open_transactions(observer: Engine) -> int:
    with observer.connect() as connection:
        if connection.dialect.name == "postgresql":
            query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%%'"
        elif connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN EXCLUSIVE")  # an error if anybody reads or writes
            connection.exec_driver_sql("ROLLBACK")
            return 0
        else:
            query = (
                "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_mysql_thread_id <> connection_id() AND trx_state = 'RUNNING'"
            )
        return int(connection.exec_driver_sql(query).scalar_one())


def test_no_transaction_stays_open_between_operations(queue: Queue, observer: Engine) -> None:
    put(observer, queue, 4, payload="{}")
    put(observer, queue, payload="[]")
    before = open_transactions(observer)
    done, failed, released, kept = queue.claim(limit=5)
    operations = [
        lambda: queue.claim(),
        lambda: queue.complete(done),
        lambda: queue.fail(failed, "no"),
        lambda: queue.release(released, delay=60),
        lambda: queue.renew(kept),
        lambda: queue.failed.retry(all=True),
        lambda: queue.failed.list(),
        lambda: queue.stats(),
        lambda: queue.clear("default"),
        lambda: queue.consumer.due_in(("default",)),
    ]
    for operation in operations:
        operation()
        assert open_transactions(observer) == before


def test_every_poll_sees_what_others_have_committed_meanwhile(queue: Queue, observer: Engine) -> None:
    for _ in range(3):
        assert queue.claim() == []
        put(observer, queue)
        (delivery,) = queue.claim()
        queue.complete(delivery)


def test_a_wait_for_a_lock_is_bounded(queue: Queue) -> None:
    engine = queue.consumer.engine
    with engine.connect() as connection:
        consumer_options(connection, lock_wait=2.5)
        with connection.begin():
            if engine.dialect.name == "postgresql":
                assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "2500ms"
            elif engine.dialect.name == "sqlite":
                assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 2500
            else:
                assert connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout").one() == (2, 2)
        consumer_options(connection, lock_wait=0.2)
        with connection.begin():
            if engine.dialect.name == "postgresql":
                assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "200ms"
            elif engine.dialect.name == "sqlite":
                assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 200
            else:
                assert connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar_one() == 1


def test_the_application_s_way_of_connecting_is_kept_and_its_connections_are_not_used(database: Database, queue: Queue) -> None:
    theirs = create_engine(database.url)
    connected: list[object] = []
    event.listen(theirs, "connect", lambda connection, record: connected.append(connection))
    own = Queue(theirs)
    own.pending()
    assert len(connected) == 1
    assert theirs.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert theirs.pool.checkedin() == 0  # type: ignore[attr-defined]
    own.consumer.close()
    theirs.dispose()


def test_what_the_application_s_listeners_set_on_a_new_connection_stays(database: Database, queue: Queue) -> None:
    """They may leave a transaction open behind them."""
    settings = {
        "postgresql": ("SET work_mem = '5MB'", "SHOW work_mem", "5MB"),
        "mysql": ("SET max_sort_length = 777", "SELECT @@max_sort_length", 777),
        "mariadb": ("SET max_sort_length = 777", "SELECT @@max_sort_length", 777),
        "sqlite": ("PRAGMA cache_size = 777", "PRAGMA cache_size", 777),
    }
    change, look, expected = settings[database.name]
    theirs = create_engine(database.url)
    event.listen(theirs, "connect", lambda connection, record: connection.cursor().execute(change))
    own = Queue(theirs)
    for _ in range(2):
        with own.consumer.engine.begin() as connection:
            assert connection.exec_driver_sql(look).scalar_one() == expected
            if server_of(theirs.dialect).row_locks:
                assert connection.get_isolation_level() == "READ COMMITTED"
    own.consumer.close()
    theirs.dispose()


def test_a_begin_recipe_that_listens_to_every_engine_does_no_harm(database: Database, queue: Queue, observer: Engine) -> None:
    """SQLAlchemy's recipe for SQLite, written for the class: our own engine hears it too."""
    if server_of(observer.dialect).row_locks:
        pytest.skip("there is no such recipe here")

    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    put(observer, queue)
    event.listen(Engine, "begin", begun)
    try:
        own = Queue(database.url)
        own.complete(own.claim()[0])
    finally:
        event.remove(Engine, "begin", begun)
    own.consumer.close()
    assert jobs_in(observer, queue) == {}


@pytest.mark.parametrize("url", ["oracle://x/y", "no url", "sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true", ""])
def test_a_database_that_no_worker_could_use_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="url"):
        consumer_url(url)


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgres://u:p@h/d", "postgresql+psycopg"),
        ("postgresql://u:p@h/d", "postgresql+psycopg"),
        ("postgresql+asyncpg://u:p@h/d", "postgresql+psycopg"),
        ("mysql://u:p@h/d", "mysql+pymysql"),
        ("mysql+aiomysql://u:p@h/d", "mysql+pymysql"),
        ("mariadb://u:p@h/d", "mariadb+pymysql"),
        ("sqlite+aiosqlite:///x.db", "sqlite+pysqlite"),
    ],
)
def test_urls_become_those_of_our_drivers(url: str, driver: str) -> None:
    made = consumer_url(url)
    assert made.drivername == driver
    assert made.password == ("p" if "@" in url else None)


# --- the clock --------------------------------------------------------------------------------------------------------

ZONES = {
    "postgresql": ["SET TIME ZONE 'Pacific/Kiritimati'", "SET TIME ZONE '-12'", "SET TIME ZONE 'America/New_York'"],
    "mysql": ["SET time_zone = '+14:00'", "SET time_zone = '-12:00'"],
    "mariadb": ["SET time_zone = '+12:59'", "SET time_zone = '-12:00'"],
}


def test_the_clock_is_utc_whatever_the_session_s_time_zone(engine: Engine, observer: Engine) -> None:
    with engine.connect() as connection:
        zones = ZONES.get("mariadb" if getattr(connection.dialect, "is_mariadb", False) else connection.dialect.name, ["SELECT 1"])
        for zone in zones:
            connection.exec_driver_sql(zone)
            moment, later = connection.execute(sa.select(now(), after(90_000_000))).one()
            assert abs(moment - datetime.now(UTC)) < timedelta(seconds=30)
            assert timedelta(seconds=90) <= later - moment < timedelta(seconds=90.01)


def test_jobs_pushed_and_claimed_in_different_time_zones_agree(queue: Queue, observer: Engine, database: Database) -> None:
    zones = ZONES.get(database.name, [])
    queue.job(name="job")(lambda: None)
    for zone in zones:
        theirs = create_engine(database.url, poolclass=NullPool)
        event.listen(theirs, "connect", lambda connection, record, zone=zone: connection.cursor().execute(zone))
        there = Queue(theirs)
        with theirs.begin() as connection:
            there.push_named(connection, "job", {}, delay=300)
            there.push_named(connection, "job", {}, available_at=datetime.now(UTC) + timedelta(seconds=300))
            there.push_named(connection, "job", {}, available_at=datetime.now(UTC) - timedelta(seconds=5))
        (delivery,) = there.claim(limit=9)
        assert abs(delivery.lease_until - datetime.now(UTC) - timedelta(seconds=60)) < timedelta(seconds=10)
        assert queue.claim(limit=9) == []
        there.complete(delivery)
        there.consumer.close()
    left = [row["available_at"] - moment_of(observer) for row in jobs_in(observer, queue).values()]
    assert all(timedelta(seconds=280) < wait <= timedelta(seconds=300) for wait in left)
    assert len(left) == 2 * len(zones)


@pytest.mark.parametrize("microseconds", [0, 1, 999, 1000, 1001, 1_500_000, 86_400_000_000])
def test_a_delay_is_a_floor(engine: Engine, microseconds: int) -> None:
    with engine.connect() as connection:
        moment, later = connection.execute(sa.select(now(), after(microseconds))).one()
    assert timedelta(0) <= later - moment - timedelta(microseconds=microseconds) < timedelta(milliseconds=1)


def test_the_clock_stands_still_in_a_statement_and_not_in_a_transaction(engine: Engine) -> None:
    with engine.connect() as connection:
        first = connection.execute(sa.select(now(), now())).one()
        assert first[0] == first[1]
        until = datetime.now(UTC) + timedelta(seconds=5)
        while connection.scalar(sa.select(now())) == first[0]:
            assert datetime.now(UTC) < until


def test_the_clock_writes_what_the_driver_writes(queue: Queue, observer: Engine, engine: Engine) -> None:
    """Where instants are text they have to have one format, or they do not sort."""
    put(observer, queue)
    jobs = queue.tables.jobs
    with observer.connect() as connection:
        bound = {"due_at": datetime(2030, 1, 2, 3, 4, 5, 120_000, tzinfo=UTC)}
        connection.execute(sa.update(jobs).values(available_at=now(), deadline=after(1), **bound))
        texts = connection.execute(
            sa.select(*(sa.cast(jobs.c[name], sa.String(40)) for name in ("available_at", "deadline", "due_at")))
        ).one()
    assert len({len(text.rstrip("0").partition("+")[0].partition(".")[0]) for text in texts}) == 1
    if not server_of(engine.dialect).row_locks:
        assert {len(text) for text in texts} == {26}


def test_instants_of_any_time_zone_sort_as_instants(queue: Queue, observer: Engine) -> None:
    from zoneinfo import ZoneInfo

    base = moment_of(observer) - timedelta(days=1)
    zones = [ZoneInfo("Asia/Kolkata"), ZoneInfo("America/St_Johns"), UTC, ZoneInfo("Pacific/Kiritimati")]
    moments = [(base + timedelta(seconds=n)).astimezone(zone) for n, zone in enumerate(zones)]
    expected = put_each(observer, queue, [{"available_at": moment} for moment in moments])
    assert [delivery.id for delivery in queue.claim(limit=9)] == expected


@pytest.mark.databases("mysql", "mariadb")
@pytest.mark.parametrize("sql_mode", ["STRICT_ALL_TABLES", ""])
def test_the_application_s_character_set_does_not_mangle_error_texts(
    queue: Queue, observer: Engine, database: Database, sql_mode: str
) -> None:
    text = "naïve \U0001f4a5 \u20ac 漢字"
    for charset in ("latin1", "utf8mb3", "utf8mb4"):
        theirs = create_engine(f"{database.url}?charset={charset}", connect_args={"init_command": f"SET sql_mode = '{sql_mode}'"})
        own = Queue(theirs)
        (id,) = put(observer, own)
        own.release(own.claim()[0], error=text)
        assert jobs_in(observer, own)[id]["last_error"] == text
        own.fail(own.claim()[0], text)
        failed = own.failed.get(id)
        assert failed is not None
        assert failed.error_message == text
        own.consumer.close()
        theirs.dispose()


def test_a_consumer_s_engine_hides_parameters(database: Database) -> None:
    engine = consumer_engine(consumer_url(database.url))
    with engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.execute(sa.text("SELECT nothing FROM nowhere WHERE x = :secret"), {"secret": "hunter2"})
    assert "hunter2" not in str(caught.value).split("nowhere")[-1]
    engine.dispose()
