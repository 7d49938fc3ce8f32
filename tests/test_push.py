"""
P1, P2 and P4: a push is one INSERT in the caller's own transaction, and nothing is sent unless all is well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from threading import Barrier
from typing import Any

import flask
import flask_sqlalchemy
import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlqueue import ArgumentError, Job, OptionError, Queue, SqlQueueError
from sqlqueue._dialects import server_of
from sqlqueue._driver.push import NewJob, Terms, insert_job, insert_jobs
from tests.producers import (
    ORDERS,
    Order,
    is_conflict,
    job_ids,
    key_names,
    make_orders,
    only_job,
    order_ids,
    statements,
)
from tests.servers import Database

SECRET = "hunter2"


@pytest.fixture
def send_invoice(engine: Engine, queue: Queue) -> Job[[int], None]:
    make_orders(engine)

    @queue.job(name="invoices.send")
    def send_invoice(number: int) -> None: ...

    return send_invoice


# --- P1: every kind of session ----------------------------------------------------------------------------------------

Opened = AbstractContextManager[Any]


def plain_session(engine: Engine) -> Opened:
    return Session(engine)


def connection(engine: Engine) -> Opened:
    return engine.connect()


def sqlmodel_session(engine: Engine) -> Opened:
    return sqlmodel.Session(engine)


@contextmanager
def thread_local_session(engine: Engine) -> Any:
    session = scoped_session(sessionmaker(engine))
    yield session
    session.remove()


@contextmanager
def flask_session(engine: Engine) -> Any:
    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = engine.url
    db = flask_sqlalchemy.SQLAlchemy(app)
    with app.app_context():
        yield db.session
        db.session.remove()
        db.engine.dispose()


@contextmanager
def session_on_a_connection(engine: Engine) -> Any:
    with engine.connect() as outer, Session(outer) as session:
        yield session


every_session = pytest.mark.parametrize(
    "opened", [plain_session, connection, thread_local_session, flask_session, sqlmodel_session, session_on_a_connection]
)


@every_session
def test_a_job_exists_for_others_from_the_commit_on(
    opened: Callable[[Engine], Opened], engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    with opened(engine) as session:
        session.execute(ORDERS.insert().values(id=1))
        pushed = send_invoice.push(session, 1)
        assert job_ids(observer, queue) == []
        session.commit()
        assert job_ids(observer, queue) == [pushed.id]
        assert order_ids(observer) == [1]


@every_session
def test_a_push_that_is_rolled_back_never_was(
    opened: Callable[[Engine], Opened], engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    """Whether the push was the first statement of its transaction, or came after a read, or after a write."""
    with opened(engine) as session:
        for before in (None, sa.select(ORDERS), ORDERS.insert().values(id=1)):
            if before is not None:
                session.execute(before)
            send_invoice.push(session, 1)
            send_invoice.options(unique="one").push(session, 1)
            queue.push_many(session, [send_invoice.bind(number) for number in range(3)])
            queue.push_named(session, "invoices.send", {"number": 1})
            assert job_ids(observer, queue) == []
            session.rollback()
            assert job_ids(observer, queue) == []
        session.execute(ORDERS.insert().values(id=2))
        session.commit()
    assert (job_ids(observer, queue), key_names(observer, queue), order_ids(observer)) == ([], [], [2])


def test_a_transaction_that_is_a_block_commits_the_job_at_its_end(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    with engine.begin() as connection:
        first = send_invoice.push(connection, 1)
    with Session(engine) as session, session.begin():
        second = send_invoice.push(session, 1)
    with queue.begin() as session:
        third = send_invoice.push(session, 1)
    assert job_ids(observer, queue) == [first.id, second.id, third.id]


def test_a_block_that_raises_leaves_no_job(engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[[int], None]) -> None:
    def fail(session: Any) -> None:
        send_invoice.push(session, 1)
        raise RuntimeError

    for block in (engine.begin, queue.begin, sessionmaker(engine).begin):
        with pytest.raises(RuntimeError), block() as session:
            fail(session)
    assert job_ids(observer, queue) == []


def test_a_flask_sqlalchemy_model_and_its_job_commit_together(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    with flask_session(engine) as session:
        session.add(Order(id=5))
        session.flush()
        pushed = send_invoice.push(session, 5)
        assert (job_ids(observer, queue), order_ids(observer)) == ([], [])
        session.commit()
    assert (job_ids(observer, queue), order_ids(observer)) == ([pushed.id], [5])


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_a_two_phase_session_takes_the_job_along(engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[[int], None]) -> None:
    with Session(engine, twophase=True) as session:
        session.add(Order(id=1))
        session.flush()
        send_invoice.push(session, 1)
        session.prepare()
        assert job_ids(observer, queue) == []
        session.commit()
    assert len(job_ids(observer, queue)) == 1


def test_jobs_of_two_queues_with_prefixes_of_their_own_do_not_mix(engine: Engine, observer: Engine, queue: Queue) -> None:
    other = Queue(prefix="order select ")
    other.metadata.create_all(engine)
    try:
        with engine.begin() as connection:
            pushed = other.push_named(connection, "invoices.send", {}, unique="one")
        assert (job_ids(observer, queue), job_ids(observer, other)) == ([], [pushed.id])
    finally:
        other.metadata.drop_all(engine)


def test_what_is_pushed_is_what_a_claim_hands_out(engine: Engine, queue: Queue) -> None:
    payload = {"text": "x\x00y \N{GRINNING FACE} ä \\u0000", "k\x00": 1, "n": ["\x00", None, True, 2.5, -7], "deep": {"": {}}}
    with engine.begin() as connection:
        pushed = queue.push_named(connection, "stranger", {"argument": payload}, headers={"trace": "\N{GRINNING FACE}", "": "b"})
    (delivery,) = queue.claim()
    assert (delivery.id, delivery.payload) == (pushed.id, {"argument": payload})
    assert delivery.headers == {"trace": "\N{GRINNING FACE}", "": "b"}


@pytest.mark.databases("mysql", "mariadb")
def test_text_travels_through_a_connection_with_a_small_character_set(database: Database, queue: Queue) -> None:
    narrow = sa.create_engine(sa.make_url(database.url).update_query_dict({"charset": "latin1"}))
    with narrow.begin() as connection:
        queue.push_named(connection, "stranger", {"text": "\N{GRINNING FACE}"}, headers={"a": "ж"}, unique="\N{GRINNING FACE}")
    narrow.dispose()
    (delivery,) = queue.claim()
    assert (delivery.payload, delivery.headers) == ({"text": "\N{GRINNING FACE}"}, {"a": "ж"})


@pytest.mark.databases("mariadb")
def test_sqlalchemys_own_mariadb_dialect_pushes_the_same_rows(
    database: Database, observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    engine = sa.create_engine(database.mariadb_url)
    with engine.begin() as connection:
        assert send_invoice.options(unique="one").push(connection, 1).created
        assert not send_invoice.options(unique="one").push(connection, 1).created
        assert send_invoice.push(connection, 1).created
        assert queue.push_many(connection, [send_invoice.bind(1)] * 3) == 3
    engine.dispose()
    assert len(job_ids(observer, queue)) == 5


def test_jobs_of_one_transaction_are_claimed_in_the_order_of_their_pushes(
    engine: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    with engine.begin() as connection:
        for number in range(30):
            send_invoice.push(connection, number)
        queue.push_many(connection, [send_invoice.bind(number) for number in range(30, 60)])
    assert [delivery.payload["number"] for delivery in queue.claim(limit=60)] == list(range(60))


def test_a_higher_priority_comes_first_whatever_is_overdue(engine: Engine, queue: Queue, send_invoice: Job[[int], None]) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    with engine.begin() as connection:
        for priority in (-100, 0, 100, 5, -5):
            send_invoice.options(priority=priority, available_at=yesterday - timedelta(minutes=priority)).push(connection, priority)
    assert [delivery.payload["number"] for delivery in queue.claim(limit=9)] == [100, 5, 0, -5, -100]


# --- P2: no savepoint, no flush, no retry -----------------------------------------------------------------------------


def test_a_push_is_one_statement(engine: Engine, send_invoice: Job[[int], None]) -> None:
    with Session(engine) as session, session.begin():
        session.connection()
        with statements(engine) as sent:
            send_invoice.push(session, 1)
    assert [statement.split()[0] for statement in sent] == ["INSERT"]


def test_a_push_with_a_key_is_at_most_four_statements_and_no_savepoint(engine: Engine, send_invoice: Job[[int], None]) -> None:
    for _ in ("new", "held"):
        with Session(engine) as session, session.begin():
            session.connection()
            with statements(engine) as sent:
                send_invoice.options(unique="one").push(session, 1)
        assert len(sent) <= 4
        assert not any("SAVEPOINT" in statement.upper() for statement in sent)


def test_a_new_key_is_one_statement_where_one_can_write_to_two_tables(engine: Engine, send_invoice: Job[[int], None]) -> None:
    with engine.begin() as connection, statements(engine) as sent:
        send_invoice.options(unique="one").push(connection, 1)
    assert len(sent) == (1 if server_of(engine.dialect).writes_in_with else 3)


def test_pending_objects_stay_pending(engine: Engine, queue: Queue, send_invoice: Job[[int], None]) -> None:
    with Session(engine) as session, session.begin():
        order = Order(id=1)
        session.add(order)
        with statements(engine) as sent:
            send_invoice.push(session, 1)
            send_invoice.options(unique="one").push(session, 1)
            send_invoice.options(unique="one").push(session, 1)
            queue.push_many(session, [send_invoice.bind(1)])
        assert order in session.new
        assert not any("test_orders" in statement for statement in sent)


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_a_deadlock_reaches_the_caller_as_the_databases_own(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[[int], None]
) -> None:
    """Two sessions hold a key each, and ask for the other's."""
    both_hold_one = Barrier(2)

    def crosswise(order: int, first: str, second: str) -> int | OperationalError:
        with Session(engine) as session:
            session.add(Order(id=order))
            session.flush()
            send_invoice.options(unique=first).push(session, 1)
            both_hold_one.wait(5)
            try:
                send_invoice.options(unique=second).push(session, 1)
            except OperationalError as error:
                return error
            session.commit()
            return order

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(crosswise, (1, 2), ("a", "b"), ("b", "a")))
    (error,) = (outcome for outcome in outcomes if isinstance(outcome, OperationalError))
    (winner,) = (outcome for outcome in outcomes if isinstance(outcome, int))
    assert is_conflict(error)
    assert error.__cause__ is error.orig
    assert order_ids(observer) == [winner]
    assert len(job_ids(observer, queue)) == 2


@pytest.mark.databases("mysql", "mariadb")
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "in a savepoint"])
def test_a_transaction_that_a_deadlock_has_undone_cannot_be_gone_on_with(
    engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[[int], None], nested: bool
) -> None:
    """
    InnoDB rolls all of it back, savepoints too, and the connection is in a new transaction: who catches the error and
    goes on would commit half of the work. PostgreSQL refuses whatever comes after an error.
    """
    both_hold_one = Barrier(2)

    def crosswise(order: int, first: str, second: str) -> int | DBAPIError:
        with Session(engine) as session:
            session.add(Order(id=order))
            session.flush()
            send_invoice.options(unique=first).push(session, 1)
            both_hold_one.wait(5)
            try:
                with session.begin_nested() if nested else nullcontext():
                    send_invoice.options(unique=second).push(session, 1)
            except DBAPIError as error:
                with suppress(SQLAlchemyError):
                    session.execute(ORDERS.insert().values(id=order + 10))
                    session.commit()
                session.rollback()
                session.execute(ORDERS.insert().values(id=order + 100))  # from here on it is as good as new
                session.commit()
                return error
            session.commit()
            return order

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(crosswise, (1, 2), ("a", "b"), ("b", "a")))
    (error,) = (outcome for outcome in outcomes if isinstance(outcome, DBAPIError))
    (winner,) = (outcome for outcome in outcomes if isinstance(outcome, int))
    assert order_ids(observer) == [winner, 103 - winner]
    assert is_conflict(error), "a savepoint that is gone hides the deadlock"


def test_an_error_of_the_database_reaches_the_caller_without_the_arguments(engine: Engine, queue: Queue) -> None:
    lost = Queue(prefix="no_such_")
    held = [lost.job(name="a")(_takes_anything), lost.job(name="b", unique="x")(_takes_anything)]
    for job in held:
        with Session(engine) as session:
            with pytest.raises(DBAPIError) as caught:
                job.push(session, SECRET)
            session.rollback()
            assert SECRET not in str(caught.value)
            with pytest.raises(DBAPIError) as caught:
                lost.push_many(session, [job.bind(SECRET)])
            assert SECRET not in str(caught.value)


def test_a_value_that_sqlalchemy_refuses_is_not_shown(engine: Engine, queue: Queue) -> None:
    beyond = datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))
    row = NewJob(Terms("default", "stranger", 0, 1, beyond, None, None), SECRET, None)
    with engine.connect() as connection:
        with pytest.raises(sa.exc.StatementError) as caught:
            insert_job(connection, queue.tables, row)
        assert SECRET not in str(caught.value)
        with pytest.raises(sa.exc.StatementError) as caught:
            insert_jobs(connection, queue.tables, [row])
        assert SECRET not in str(caught.value)


def _takes_anything(value: str = "") -> None: ...


# --- P4: nothing is sent unless all is well ---------------------------------------------------------------------------


class Plain:
    def __repr__(self) -> str:
        return SECRET


class Colour(Enum):
    RED = SECRET


BAD_ARGUMENTS: list[Any] = [
    Plain(),
    math.nan,
    [1, [math.inf]],
    SECRET.encode(),
    {SECRET},
    (SECRET,),
    {1: SECRET, "1": SECRET},
    SECRET + "\ud800",
    {SECRET + "\ud800": 1},
    Colour.RED,  # restored from an annotation only, and there is none
    datetime.now(UTC),
]


def test_an_argument_that_cannot_travel_is_named_and_not_shown_and_nothing_is_sent(engine: Engine, queue: Queue) -> None:
    @queue.job(name="stranger")
    def job(okay, argument): ...

    def pushes(session: Session, value: Any) -> list[Callable[[], object]]:
        return [
            lambda: job.push(session, 1, value),
            lambda: queue.push_many(session, [job.bind(1, 1), job.bind(1, argument=value)]),
            lambda: queue.push_named(session, "stranger", {"okay": 1, "argument": value}),
        ]

    with Session(engine) as session, statements(engine) as sent:
        for value in BAD_ARGUMENTS:
            for push in pushes(session, value):
                with pytest.raises(ArgumentError, match="argument") as caught:
                    push()
                assert isinstance(caught.value, TypeError)
                assert SECRET not in str(caught.value)
        assert sent == []
        assert not session.in_transaction()


def test_arguments_that_do_not_fit_the_function_are_refused_before_any_sql(engine: Engine, send_invoice: Job[..., None]) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((1, 2), {}),
        ((1,), {"number": 1}),
        ((), {"numbr": 1}),
        ((1,), {"other": SECRET}),
    ]
    with Session(engine) as session, statements(engine) as sent:
        for args, kwargs in calls:
            with pytest.raises(ArgumentError) as caught:
                send_invoice.push(session, *args, **kwargs)
            assert SECRET not in str(caught.value)
        assert sent == []


def test_one_bad_job_among_many_writes_nothing(engine: Engine, observer: Engine, queue: Queue, send_invoice: Job[..., None]) -> None:
    with Session(engine) as session, statements(engine) as sent:
        with pytest.raises(ArgumentError):
            queue.push_many(session, (send_invoice.bind(number) for number in (1, 2, math.nan)))
        with pytest.raises(TypeError, match="bind"):
            queue.push_many(session, [send_invoice.bind(1), send_invoice])  # type: ignore[list-item]
        assert sent == []
        session.commit()
    assert job_ids(observer, queue) == []


def test_a_payload_may_have_a_mebibyte_and_not_one_byte_more(engine: Engine, observer: Engine, queue: Queue) -> None:
    overhead = len('{"text":""}')
    with Session(engine) as session, session.begin(), statements(engine) as sent:
        with pytest.raises(ArgumentError, match=r"payload.*max_payload=1048576") as caught:
            queue.push_named(session, "stranger", {"text": "x" * (1024 * 1024 - overhead + 1)})
        assert len(str(caught.value)) < 200
        assert sent == []
        queue.push_named(session, "stranger", {"text": "x" * (1024 * 1024 - overhead)})
    assert len(only_job(observer, queue)["payload"]) == 1024 * 1024
    (delivery,) = queue.claim()
    assert len(delivery.payload["text"]) == 1024 * 1024 - overhead


def test_the_limit_of_the_payload_is_the_queues_own_and_counts_what_is_stored(engine: Engine) -> None:
    small = Queue(max_payload=20)
    with Session(engine) as session, pytest.raises(ArgumentError, match="max_payload=20"):
        small.push_named(session, "stranger", {"a": "\N{GRINNING FACE}\N{GRINNING FACE}"})
    for wrong in (0, -1, 1.5, True, "1"):
        with pytest.raises(OptionError, match="max_payload"):
            Queue(max_payload=wrong)  # type: ignore[arg-type]


def test_a_named_push_checks_its_name_its_payload_and_its_options(engine: Engine, queue: Queue) -> None:
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        ("", {}, {}, "name"),
        ("a b", {}, {}, "name"),
        ("a\n", {}, {}, "name"),
        ("ä", {}, {}, "name"),
        ("x" * 191, {}, {}, "name"),
        (None, {}, {}, "name"),
        ("a", [], {}, "payload"),
        ("a", {1: 2}, {}, "payload"),
        ("a", None, {}, "payload"),
        ("a", {}, {"queue": ""}, "queue"),
        ("a", {}, {"queue": "a.b"}, "queue"),
        ("a", {}, {"queue": "x" * 81}, "queue"),
        ("a", {}, {"queue": "a\n"}, "queue"),
    ]
    with Session(engine) as session, statements(engine) as sent:
        for name, payload, options, word in wrong:
            with pytest.raises(SqlQueueError, match=f"^{word}"):
                queue.push_named(session, name, payload, **options)
        assert sent == []


def test_the_longest_names_fit(engine: Engine, observer: Engine, queue: Queue) -> None:
    with engine.begin() as connection:
        queue.push_named(connection, "x" * 190, {}, queue="q" * 80, unique="u" * 190)
    row = only_job(observer, queue)
    assert (row["name"], row["queue"]) == ("x" * 190, "q" * 80)


def test_names_are_told_apart_byte_for_byte(engine: Engine, queue: Queue) -> None:
    with engine.begin() as connection:
        queue.push_named(connection, "Job", {}, queue="Mail")
        queue.push_named(connection, "job", {}, queue="mail")
    assert [delivery.name for delivery in queue.claim("mail", limit=5)] == ["job"]
    assert [delivery.name for delivery in queue.claim("Mail", limit=5)] == ["Job"]


def test_the_wrong_kind_of_session_is_told_the_right_method(engine: Engine, queue: Queue, send_invoice: Job[[int], None]) -> None:
    strangers: list[Any] = [engine, None, "session", Session, sessionmaker(engine), 42]
    for stranger in strangers:
        with pytest.raises(TypeError, match="push takes a Session, scoped_session or Connection"):
            send_invoice.push(stranger, 1)
        with pytest.raises(TypeError, match="push_many takes a Session"):
            queue.push_many(stranger, [send_invoice.bind(1)])


# --- SQLite: nothing that writes may begin with WITH ------------------------------------------------------------------


@pytest.mark.databases("sqlite")
def test_no_statement_that_writes_begins_with_with(engine: Engine, queue: Queue, send_invoice: Job[[int], None], observer: Engine) -> None:
    """The stock driver of SQLite would commit it at once: it begins a transaction before INSERT, UPDATE, DELETE and REPLACE only."""
    with statements(engine) as pushed, statements(queue.consumer.engine) as consumed:
        with Session(engine) as session, session.begin():
            for number in range(8):
                send_invoice.options(unique=str(number)).push(session, number)
                send_invoice.options(unique=str(number)).push(session, number)
            send_invoice.push(session, 9)
            queue.push_many(session, [send_invoice.bind(number) for number in range(10, 20)])
        with observer.connect() as connection:
            connection.execute(queue.tables.jobs.delete().where(queue.tables.jobs.c.payload == '{"number":0}'))
        with engine.begin() as connection:
            assert send_invoice.options(unique="0").push(connection, 0).created
        first, second, third, fourth = queue.claim(limit=4)
        queue.complete(first)
        queue.release(second, delay=5, error=None)
        queue.fail(third, ValueError("no"))
        fourth = queue.renew(fourth)
        queue.release(fourth, error=ValueError("later"))
        queue.failed.retry(all=True)
        (again,) = queue.claim(limit=1)
        queue.fail(again, ValueError("no"))
        queue.failed.forget(all=True)
        queue.stats(), queue.pending(), queue.size("default")
        queue.clear("default")
    assert {"INSERT", "UPDATE", "SELECT"} <= {statement.split()[0].upper() for statement in pushed}
    assert {"INSERT", "UPDATE", "DELETE"} <= {statement.split()[0].upper() for statement in consumed}
    for statement in (*pushed, *consumed):
        words = set(statement.upper().split())
        assert statement.split()[0].upper() != "WITH" or not words & {"INSERT", "UPDATE", "DELETE", "REPLACE"}, statement
