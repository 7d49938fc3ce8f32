"""
The processes of a storm: producers, workers and, on SQLite, somebody who holds the write lock.

What they do leaves traces in business tables (`chaos_…`), from which the checker judges the queue afterwards. All their random
decisions come from the seed; only the order in which the processes get to run does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from sqlqueue import Discard, Fail, Fixed, Job, JobContext, LockTimeout, Queue, Release, Worker

for driver in ("psycopg", "pymysql"):
    with contextlib.suppress(ImportError):
        __import__(driver)  # once here, in the process that all actors are forked from

PREFIX = "chaos_"
QUEUES = ("urgent", "default", "mail")
LEASE = 2.0
CONCURRENCY = 4
KEYS = 5
MOST_WAITING = 120
STUBBORNNESS = 90.0
"""Seconds for which a trace is tried to be written while the database is away."""

POISONED = 66
DIED_BEFORE_COMMIT = 77
GAVE_UP = 78

metadata = sa.MetaData()
orders = sa.Table("chaos_orders", metadata, sa.Column("id", sa.String(32), primary_key=True), sa.Column("producer", sa.String(40)))
pushes = sa.Table(
    "chaos_pushes",  # in the transaction of the push: a row here is a push that committed
    metadata,
    sa.Column("push", sa.String(32), primary_key=True),
    sa.Column("order_id", sa.String(32), nullable=False),
    sa.Column("job_id", sa.BigInteger()),  # of the holder of the key when created is false; unknown after push_many
    sa.Column("created", sa.Boolean(), nullable=False),
    sa.Column("unique_key", sa.String(190)),
    sa.Column("kind", sa.String(20), nullable=False),
    sa.Column("max_attempts", sa.Integer(), nullable=False),
    sa.Column("due", sa.Double(), nullable=False),
)
runs = sa.Table(
    "chaos_runs",  # the outcome is written before the queue learns of it
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("push", sa.String(32), nullable=False, index=True),
    sa.Column("job_id", sa.BigInteger(), nullable=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("worker", sa.String(40), nullable=False),
    sa.Column("entered", sa.Double(), nullable=False),
    sa.Column("outcome", sa.String(20)),
    sa.Column("ended", sa.Double()),
)
rolled_back = sa.Table(
    "chaos_rolled_back",  # by another connection, after the rollback
    metadata,
    sa.Column("push", sa.String(32), primary_key=True),
    sa.Column("job_id", sa.BigInteger()),
)


@dataclass(frozen=True, slots=True)
class Role:
    """
    Who an actor is.
    """

    name: str
    kind: str
    url: str
    seed: str
    folder: str


@dataclass(frozen=True, slots=True)
class Kind:
    """
    A temper of jobs: how frequent it is, how long its runs take, and how they end, by weight.
    """

    share: float
    pause: tuple[float, float]
    ends: dict[str, int]


KINDS = {
    "steady": Kind(40, (0.0, 0.2), {"return": 12, "raise": 1}),
    "flaky": Kind(15, (0.0, 0.2), {"return": 1, "raise": 1}),
    "stubborn": Kind(4, (0.0, 0.1), {"raise": 1}),
    "releasing": Kind(10, (0.0, 0.4), {"release": 3, "return": 2}),
    "failing": Kind(5, (0.0, 0.2), {"fail": 1, "return": 1}),
    "slow": Kind(16, (0.8, 2.8), {"return": 4, "raise": 3, "release": 2, "fail": 1}),
    "discarded": Kind(4, (0.0, 0.1), {"discard": 1}),
    "poison": Kind(1, (0.0, 0.3), {"die": 2, "return": 1}),
}


def perform(role: Role) -> None:
    """
    Be this actor until told to stop; never returns.
    """
    log = os.open(f"{role.folder}/{role.name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    code = GAVE_UP
    try:
        code = PARTS[role.kind](role)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # handlers that a second signal cut short may still be running in their threads


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(GAVE_UP)


def build_queue(url: str) -> tuple[Queue, Job[[str, str], None]]:
    """
    The queue that the storm is about, and its one job.
    """
    queue = Queue(url, prefix=PREFIX)

    @queue.job(name="chaos.run", backoff=Fixed(0.1))
    def run(context: JobContext, push: str, kind: str) -> None:
        assert Handler.current is not None
        Handler.current.run(context, push, kind)

    return queue, run


def build_engine(url: str) -> sa.Engine:
    """
    The application's engine, as an application would make it.
    """
    options = {"connect_args": {"timeout": 15}} if url.startswith("sqlite") else {}
    return sa.create_engine(url, **options)


# --- workers ----------------------------------------------------------------------------------------------------------


def work(role: Role) -> int:
    """
    Run a worker; its exit code.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    queue, _ = build_queue(role.url)
    Handler.current = Handler(role)
    return Worker(queue, QUEUES, concurrency=CONCURRENCY, lease=LEASE).run()


class Handler:
    """
    What the jobs do in this process.
    """

    current: ClassVar[Handler | None] = None

    def __init__(self, role: Role) -> None:
        self._role = role
        self._engine = build_engine(role.url)

    def run(self, context: JobContext, push: str, kind: str) -> None:
        """
        Leave a trace, take some time, and end in one of the ways in which handlers end.
        """
        run = uuid.uuid4().hex
        entered = time.time()
        earlier = self._begin(run, context, push, entered)
        dice = random.Random(f"{self._role.seed}/{push}/{context.attempt}/{earlier}")
        ends = KINDS[kind].ends
        (end,) = dice.choices(list(ends), list(ends.values()))
        time.sleep(dice.uniform(*KINDS[kind].pause))
        if end == "die":
            os._exit(POISONED)
        self._end(run, end)
        match end:
            case "raise":
                raise RuntimeError(f"the temper of {kind}")
            case "release":
                raise Release(dice.uniform(0, 0.3))
            case "fail":
                raise Fail("for good")
            case "discard":
                raise Discard

    def _begin(self, run: str, context: JobContext, push: str, entered: float) -> int:
        values = {
            "id": run,
            "push": push,
            "job_id": context.id,
            "attempt": context.attempt,
            "worker": self._role.name,
            "entered": entered,
        }

        def write(connection: sa.Connection) -> int:
            connection.execute(sa.insert(runs).values(values))
            return connection.execute(sa.select(sa.func.count()).where(runs.c.push == push)).scalar_one()

        return int(insist(self._engine, write) or 0)

    def _end(self, run: str, outcome: str) -> None:
        ending = sa.update(runs).where(runs.c.id == run).values(outcome=outcome, ended=time.time())
        insist(self._engine, lambda connection: connection.execute(ending))


def insist(engine: sa.Engine, write: Callable[[sa.Connection], Any]) -> Any:
    """
    Write a trace in a transaction of its own, however often the database goes away meanwhile.
    """
    until = time.monotonic() + STUBBORNNESS
    while True:
        try:
            with engine.begin() as connection:
                return write(connection)
        except IntegrityError:
            return None  # the try whose answer was lost had been applied
        except DBAPIError:
            if time.monotonic() > until:
                traceback.print_exc()
                os._exit(GAVE_UP)
            time.sleep(0.1)


# --- producers --------------------------------------------------------------------------------------------------------


def produce(role: Role) -> int:
    """
    Push until told to stop.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    producer = Producer(role)
    while not stop.is_set():
        producer.do_business()
    return 0


@dataclass(slots=True)
class Wish:
    """
    One job that an order asks for.
    """

    kind: str
    max_attempts: int
    delay: float
    options: dict[str, Any]
    push: str


class Producer:
    """
    Pushes together with business rows, in transactions that end in different ways.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._transactions = 0
        self._dice = random.Random()
        self._engine = build_engine(role.url)
        self._queue, self._job = build_queue(role.url)
        self._journal = os.open(f"{role.folder}/{role.name}.journal", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def do_business(self) -> None:
        """
        One transaction, after a while.
        """
        self._transactions += 1
        self._dice = dice = random.Random(f"{self._role.seed}/{self._role.name}/{self._transactions}")
        time.sleep(dice.uniform(0, 0.15))
        (fate,) = dice.choices(("commit", "roll back", "die"), (80, 16, 2))
        wishes = self._wishes()
        try:
            if self._is_behind():
                return
            ids = self._transact(wishes, fate)
        except (DBAPIError, LockTimeout) as error:  # committed or not: the rows that came with it will tell
            self._note("error", [type(getattr(error, "orig", error)).__name__])
            time.sleep(0.2)
            return
        if fate == "roll back":
            self._note("rolled-back", [wish.push for wish in wishes])
            insist(self._engine, lambda connection: connection.execute(sa.insert(rolled_back), ids))

    def _wishes(self) -> list[Wish]:
        return [self._wish() for _ in range(self._dice.choice((1, 1, 1, 2, 3)))]

    def _wish(self) -> Wish:
        dice = self._dice
        (kind,) = dice.choices(list(KINDS), [kind.share for kind in KINDS.values()])
        delay = dice.choice((0.0, 0.0, 0.0, dice.uniform(0, 2)))
        options: dict[str, Any] = {"queue": dice.choice(QUEUES), "priority": dice.choice((-5, 0, 0, 5)), "delay": delay}
        options["max_attempts"] = attempts = dice.choice((1, 2, 3, 5))
        if dice.random() < 0.3:
            options["unique"] = f"key-{dice.randrange(KEYS)}"
        return Wish(kind, attempts, delay, options, push=_new_id(dice))

    def _is_behind(self) -> bool:
        """
        Enough is waiting already: a backlog that grows is another test.
        """
        with self._engine.connect() as connection:
            waiting = connection.execute(sa.select(sa.func.count()).select_from(self._queue.tables.jobs)).scalar_one()
        return bool(waiting > MOST_WAITING)

    def _transact(self, wishes: list[Wish], fate: str) -> list[dict[str, Any]]:
        with Session(self._engine) as session:
            order = _new_id(self._dice)
            session.execute(sa.insert(orders).values(id=order, producer=self._role.name))
            rows = self._push(session, wishes)
            session.execute(sa.insert(pushes), [row | {"order_id": order} for row in rows])
            time.sleep(self._dice.choice((0, 0, 0, self._dice.uniform(0, 0.3))))
            if fate == "die":
                self._note("died", [wish.push for wish in wishes])
                os._exit(DIED_BEFORE_COMMIT)
            if fate == "roll back":
                session.rollback()
            else:
                session.commit()
        return [{"push": row["push"], "job_id": row["job_id"]} for row in rows]

    def _push(self, session: Session, wishes: list[Wish]) -> list[dict[str, Any]]:
        now = time.time()
        if len(wishes) > 1 and not any("unique" in wish.options for wish in wishes):
            bound = [self._job.options(**wish.options).bind(wish.push, wish.kind) for wish in wishes]
            written = self._queue.push_many(session, bound)
            assert written == len(wishes), f"push_many wrote {written} of {len(wishes)}"
            return [self._row(wish, now, None, True) for wish in wishes]
        rows = []
        for wish in wishes:
            pushed = self._job.options(**wish.options).push(session, wish.push, wish.kind)
            rows.append(self._row(wish, now, pushed.id, pushed.created))
        return rows

    def _row(self, wish: Wish, now: float, job_id: int | None, created: bool) -> dict[str, Any]:
        return {
            "push": wish.push,
            "job_id": job_id,
            "created": created,
            "unique_key": wish.options.get("unique"),
            "kind": wish.kind,
            "max_attempts": wish.max_attempts,
            "due": now + wish.delay,
        }

    def _note(self, what: str, words: Iterable[str]) -> None:
        """
        Into a file: it outlives this process and any server.
        """
        os.write(self._journal, f"{what} {' '.join(words)}\n".encode())


def _new_id(dice: random.Random) -> str:
    return f"{dice.getrandbits(128):032x}"


# --- a writer who is in the way ---------------------------------------------------------------------------------------


def hold_the_lock(role: Role) -> int:
    """
    Keep SQLite's write lock for some seconds, now and then.
    """
    dice = random.Random(f"{role.seed}/{role.name}")
    engine = build_engine(role.url)
    Path(f"{role.folder}/{role.name}.journal").touch()
    while True:
        time.sleep(dice.uniform(3, 7))
        with contextlib.suppress(DBAPIError), engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            time.sleep(dice.uniform(1, 3))
            connection.rollback()


PARTS: dict[str, Callable[[Role], int]] = {"worker": work, "producer": produce, "locker": hold_the_lock}
