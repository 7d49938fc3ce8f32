"""
C11 as a whole: hosts that disagree about the time, sessions and processes in odd zones, and changes of the clocks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, create_engine

from sqlqueue import Queue
from sqlqueue._dialects import server_of
from tests.rows import failed_in, jobs_in, moment_of, put
from tests.servers import Database, Server, find_faketime, needed
from tests.workers import PATIENCE, eventually

ROOT = Path(__file__).parent.parent
BERLIN = ZoneInfo("Europe/Berlin")
SOON = timedelta(minutes=30)
MILLISECONDS = timedelta(milliseconds=2)

# --- hosts that are an hour off -----------------------------------------------------------------------------------------

LEASE = 1.5
HOST = """
    import logging, sys, threading, time
    from datetime import datetime, timedelta
    from pathlib import Path

    # The library that fakes the clock does not sleep by one that it leaves alone.
    time.sleep = lambda seconds: threading.Event().wait(seconds)

    from sqlqueue import Fixed, JobContext, Queue, Release, Worker

    name, url, lease, failed = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    here = Path(__file__).parent
    queue = Queue(url)

    def tell(what):
        with open(here / f"told-{name}", "a") as file:
            file.write(what + chr(10))

    @queue.job(name="note")
    def note(context: JobContext, what: str) -> None:
        tell(f"{what} {context.attempt}")

    @queue.job(name="wait")
    def wait() -> None:
        offset = None
        while not (here / "go").exists():
            if offset != (offset := datetime.now().astimezone().utcoffset()):
                tell(f"offset {offset}")
            time.sleep(0.02)

    @queue.job(name="raise", backoff=Fixed(1800))
    def fail() -> None:
        raise ValueError

    @queue.job(name="postpone")
    def postpone() -> None:
        raise Release(delay=1800)

    tell(f"clock {time.time()}")
    with queue.begin() as session:
        waiting = note.options(queue=f"{name}-pushed")
        waiting.push(session, "now")
        waiting.options(delay=1800, deadline=timedelta(minutes=30)).push(session, "later")
        queue.push_many(session, [waiting.options(delay=1800, deadline=1800).bind("many")])
    queue.failed.retry(id=failed)
    logging.basicConfig(level=logging.INFO)
    sys.exit(Worker(queue, name, lease=lease, concurrency=8).run())
"""


class Host:
    """A process whose wall clock we set, also while it runs; the monotonic clock is left alone, as where people set clocks."""

    def __init__(self, name: str, off: timedelta, folder: Path, *arguments: object) -> None:
        self.name = name
        self.told_in = folder / f"told-{name}"
        self.log = folder / f"log-{name}"
        self.clock = folder / f"clock-{name}"
        self.set_clock(off)
        library = find_faketime()
        assert library is not None
        faked = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
            "TZ": "Europe/Berlin",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, folder / "host.py", name, *(str(argument) for argument in arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | faked | {"PYTHONPATH": str(ROOT)},
            )

    def set_clock(self, off: timedelta) -> None:
        new = self.clock.with_suffix(".new")
        new.write_text(f"{off.total_seconds():+.3f}\n")
        new.replace(self.clock)  # at once: it may be read at any moment

    @property
    def told(self) -> list[str]:
        return self.told_in.read_text().splitlines() if self.told_in.exists() else []

    @property
    def offsets(self) -> list[str]:
        """From UTC, as its long job saw them."""
        return [line.removeprefix("offset ") for line in self.told if line.startswith("offset ")]

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE)


@dataclass
class Story:
    """What two hosts did, one ahead of the database and one behind, and when by the database's clock."""

    began: datetime
    ended: datetime
    ids: dict[str, dict[str, int]]
    jobs: dict[int, dict[str, Any]] = field(default_factory=dict)
    failed: dict[int, dict[str, Any]] = field(default_factory=dict)
    told: dict[str, list[str]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    trouble: Exception | None = None
    leases: dict[str, list[tuple[datetime, datetime]]] = field(default_factory=dict)
    """When we looked, and until when the long job was held then."""
    started: float = field(default_factory=time.time)
    stolen: list[Any] = field(default_factory=list)

    def during(self, moment: datetime, wait: timedelta = timedelta(0)) -> bool:
        return self.began <= moment - wait <= self.ended + MILLISECONDS


OFF = {"ahead": timedelta(hours=1), "behind": timedelta(hours=-1)}
"""So far that whatever one of them compared with its own clock would be due, over or alive when it is not."""


def rows_for(observer: Engine, queue: Queue, name: str) -> dict[str, int]:
    """What a host finds on its queue."""
    half = SOON.total_seconds()
    moment = moment_of(observer)
    note: dict[str, Any] = {"name": "note", "queue": name}
    found: dict[str, dict[str, Any]] = {
        "due": note,
        "not due": note | {"due_in": half},
        "held": note | {"lease_in": half},
        "left": note | {"lease_in": -1.0},
        "in time": note | {"deadline": moment + SOON},
        "too late": note | {"deadline": moment - timedelta(seconds=1)},
        "wait": {"name": "wait", "payload": "{}", "queue": name},
        "raise": {"name": "raise", "payload": "{}", "queue": name},
        "fails": {"name": "raise", "payload": "{}", "queue": name, "max_attempts": 1},
        "postpone": {"name": "postpone", "payload": "{}", "queue": name},
    }
    return {what: put(observer, queue, **{"payload": f'{{"what": "{what}"}}'} | values)[0] for what, values in found.items()}


def live_through(story: Story, hosts: list[Host], queue: Queue, observer: Engine) -> None:
    def look(host: Host) -> tuple[datetime, datetime]:
        story.stolen += queue.claim(host.name, limit=9)
        moment = moment_of(observer)
        until = jobs_in(observer, queue)[story.ids[host.name]["wait"]]["reserved_until"]
        story.leases.setdefault(host.name, []).append((moment, until))
        assert host.process.poll() is None, host.said
        return moment, until

    def is_done(host: Host) -> bool:
        assert host.process.poll() is None, host.said
        ids, jobs, moment = story.ids[host.name], jobs_in(observer, queue), moment_of(observer)
        gone = all(ids[what] not in jobs for what in ("due", "left", "in time", "too late", "fails"))
        put_off = all(jobs[ids[what]]["available_at"] > moment + SOON / 2 for what in ("raise", "postpone"))
        return gone and put_off and host.offsets != []

    def is_renewed(host: Host, since: datetime, leases: float) -> bool:
        return look(host)[1] > since + timedelta(seconds=leases * LEASE)

    def await_renewals(leases: float) -> None:
        for host in hosts:
            eventually(partial(is_renewed, host, first[host.name], leases), f"{host.name} renews")

    for host in hosts:
        eventually(partial(is_done, host), f"{host.name} has run what is due")
    first = {host.name: look(host)[1] for host in hosts}
    await_renewals(0.2)
    # Somebody sets the clocks: one goes from behind to ahead, for the other summer time ends in a second.
    ahead, behind = hosts
    behind.set_clock(OFF["ahead"])
    ahead.set_clock(datetime(2026, 10, 25, 0, 59, 59, tzinfo=UTC) - datetime.now(UTC))
    eventually(lambda: ahead.offsets[-2:] == ["2:00:00", "1:00:00"], "the long job sees summer time end")
    await_renewals(1.05)


@pytest.fixture(scope="module")
def story(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    if server.url is None:
        pytest.skip("this database has no clock but the host's, and no other hosts")
    needed(find_faketime(), "libfaketime", server.name)
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "host.py").write_text(textwrap.dedent(HOST))
    database = server.create_database()
    engine = create_engine(database.url)
    observer = create_engine(database.url, isolation_level="AUTOCOMMIT")
    queue = Queue(engine)
    queue.metadata.create_all(engine)
    story = Story(moment_of(observer), moment_of(observer), {name: rows_for(observer, queue, name) for name in OFF})
    hosts = []
    for name, off in OFF.items():
        put(observer, queue, name="note", queue="failed", payload='{"what": "again"}', deadline=story.began + SOON)
        (delivery,) = queue.claim("failed")
        queue.fail(delivery, "no")
        story.ids[name]["retried"] = delivery.id
        hosts.append(Host(name, off, folder, database.url, LEASE, delivery.id))

    def is_gone(id: int) -> bool:
        return id not in jobs_in(observer, queue)

    try:
        try:
            live_through(story, hosts, queue, observer)
            (folder / "go").touch()
            for host in hosts:
                eventually(partial(is_gone, story.ids[host.name]["wait"]))
                assert host.stop() == 0
        except (AssertionError, KeyError) as error:
            story.trouble = error
        for host in hosts:
            story.told[host.name], story.said[host.name] = host.told, host.said
        story.ended = moment_of(observer)
        story.jobs, story.failed = jobs_in(observer, queue), failed_in(observer, queue)
    finally:
        for host in hosts:
            host.process.kill()
            host.process.wait()
    yield story
    queue.consumer.close()
    for own in (engine, observer):
        own.dispose()
    server.drop_database(database)


def job_of(story: Story, name: str, what: str) -> dict[str, Any]:
    return story.jobs[story.ids[name][what]]


def test_the_hosts_really_are_an_hour_off(story: Story) -> None:
    for name, off in OFF.items():
        ours, theirs = (datetime.fromtimestamp(float(number), UTC) for number in (story.started, story.told[name][0].split()[1]))
        assert timedelta(0) <= theirs - off - ours < timedelta(seconds=PATIENCE)


def test_hosts_that_are_an_hour_off_do_what_is_due_and_stop_when_told(story: Story) -> None:
    if story.trouble is not None:
        raise story.trouble


def test_times_of_a_push_are_the_database_s(story: Story) -> None:
    for name in OFF:
        now, later, many = (row for row in story.jobs.values() if row["queue"] == f"{name}-pushed")
        assert all(story.during(row["created_at"]) for row in (now, later, many))
        assert now["available_at"] == now["due_at"] == now["created_at"]
        for row in (later, many):
            assert SOON <= row["available_at"] - row["created_at"] <= SOON + MILLISECONDS
            assert SOON <= row["deadline"] - row["created_at"] <= SOON + MILLISECONDS


def test_a_job_that_is_due_runs_and_one_that_is_not_waits(story: Story) -> None:
    for name in OFF:
        ran = [line for line in story.told[name] if line.split()[0] not in ("clock", "offset")]
        assert sorted(ran) == ["due 1", "in time 1", "left 2"]
        assert job_of(story, name, "not due")["attempts"] == 0


def test_a_live_lease_is_left_alone_and_an_ended_one_is_not(story: Story) -> None:
    for name in OFF:
        held = job_of(story, name, "held")
        assert (held["reserved_by"], held["reserved_token"], held["attempts"]) == ("dead:1", "of-the-dead", 1)
        assert "left 2" in story.told[name]
    assert story.stolen == [], "what the hosts held was alive for others all the time"


def test_a_lease_is_renewed_also_when_somebody_sets_the_clock(story: Story) -> None:
    for name in OFF:
        for looked, until in story.leases[name]:
            assert looked < until <= looked + timedelta(seconds=LEASE + PATIENCE / 10)
        assert story.leases[name][-1][1] - story.leases[name][0][1] > timedelta(seconds=LEASE)
        assert " lost" not in story.said[name]


def test_a_retry_and_a_release_are_due_by_the_database_s_clock(story: Story) -> None:
    for name in OFF:
        raised, postponed = job_of(story, name, "raise"), job_of(story, name, "postpone")
        assert story.during(raised["available_at"], SOON)
        assert story.during(postponed["available_at"], SOON)
        assert (raised["attempts"], postponed["attempts"]) == (1, 0)


def test_a_failure_is_dated_and_a_deadline_judged_by_the_database_s_clock(story: Story) -> None:
    for name in OFF:
        reasons = {what: story.failed[story.ids[name][what]] for what in ("fails", "too late")}
        assert {what: row["reason"] for what, row in reasons.items()} == {"fails": "exception", "too late": "deadline_exceeded"}
        assert all(story.during(row["failed_at"]) for row in reasons.values())


def test_a_failed_job_that_is_retried_is_due_now(story: Story) -> None:
    for name in OFF:
        row = job_of(story, name, "retried")
        assert story.during(row["available_at"])
        assert SOON - timedelta(seconds=PATIENCE) < row["deadline"] - row["available_at"] <= SOON + timedelta(seconds=2)


# --- zones ------------------------------------------------------------------------------------------------------------------


@contextmanager
def process_in(zone: str) -> Iterator[None]:
    """Let this process live in a time zone."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = zone
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ")
        os.environ.update({} if before is None else {"TZ": before})
        time.tzset()


def session_in(database: Database, zone: str) -> Engine:
    """An engine whose sessions are in a time zone; where sessions have none, one as any other."""
    if database.name == "sqlite":
        return create_engine(database.url)
    if database.name == "postgresql":
        return create_engine(sa.make_url(database.url).update_query_dict({"options": f"-c TimeZone={zone}"}))
    return create_engine(database.url, connect_args={"init_command": f"SET time_zone = '{zone}'"})


def take_all_times(theirs: Engine, own: Queue, observer: Engine) -> None:
    """Push on one engine and do to the jobs, through a queue, whatever has to do with time; a day stands for all durations."""
    day = timedelta(days=1)
    began = moment_of(observer)

    def is_now(moment: datetime | None, wait: timedelta = timedelta(0)) -> bool:
        assert moment is not None
        assert moment.utcoffset() == timedelta(0)
        return began <= moment - wait <= moment_of(observer) + MILLISECONDS

    with theirs.begin() as connection:
        early, later, dead, long = (
            own.push_named(connection, "job", {}, **options).id
            for options in ({}, {"delay": day}, {"deadline": 0}, {"delay": 0, "deadline": day})
        )
        own.push_many(connection, [own._bind_named("job", {}, {"delay": day, "queue": "many"})])
    rows = jobs_in(observer, own)
    assert all(is_now(row["created_at"]) for row in rows.values())
    assert is_now(rows[early]["available_at"])
    assert is_now(rows[later]["available_at"], day)
    assert is_now(max(rows.values(), key=lambda row: row["id"])["available_at"], day)
    default, many = own.stats()
    assert (default.pending, default.delayed, default.oldest_due) == (3, 1, rows[early]["due_at"])
    assert (many.pending, many.delayed, many.oldest_due) == (0, 1, None)

    one, other = sorted(own.claim(limit=9, lease=day), key=lambda delivery: delivery.id)
    assert [one.id, other.id] == [early, long]
    assert is_now(one.lease_until, day)
    assert other.deadline == rows[long]["deadline"]
    assert is_now(own.renew(one).lease_until, day)
    assert own.stats()[0].reserved == 2
    own.release(one, delay=day)
    assert is_now(jobs_in(observer, own)[early]["available_at"], day)
    own.fail(other, "no")
    assert {job.id for job in own.failed.list() if is_now(job.failed_at)} == {dead, long}
    assert own.failed.forget(before=began) == 0
    assert own.failed.retry(id=long) == 1
    again = jobs_in(observer, own)[long]
    assert is_now(again["available_at"])
    assert is_now(again["deadline"], day)
    due_in = own.consumer.due_in(("default",))
    assert due_in is not None
    assert -PATIENCE < due_in <= 0
    assert own.failed.forget(before=moment_of(observer) + timedelta(seconds=1)) == 1


def queue_on(engine: Engine) -> Queue:
    queue = Queue(engine)
    queue.job(name="job")(lambda: None)
    return queue


ODD = {
    "postgresql": [("Pacific/Chatham", "Pacific/Marquesas"), ("Pacific/Marquesas", "Asia/Kathmandu")],
    "mysql": [("+12:45", "-09:30"), ("-09:30", "+05:45")],
    "mariadb": [("+12:45", "-09:30"), ("-09:30", "+05:45")],
    "sqlite": [("", "")],
}


def test_producer_and_consumer_may_be_in_different_odd_zones(database: Database, queue: Queue, observer: Engine) -> None:
    with process_in("America/St_Johns"):
        for zones in ODD[database.name]:
            theirs, ours = (session_in(database, zone) for zone in zones)
            own = queue_on(ours)
            take_all_times(theirs, own, observer)
            own.consumer.close()
            with observer.connect() as connection:
                connection.execute(queue.tables.jobs.delete())


@contextmanager
def default_zone(server: Server, observer: Engine) -> Iterator[None]:
    """Let new sessions be in Kathmandu, because the role or the whole server is."""
    with observer.connect() as connection:
        if server_of(observer.dialect).snapshot_reads:
            before = connection.exec_driver_sql("SELECT @@GLOBAL.time_zone").scalar_one()
            change, back = "SET GLOBAL time_zone = '+05:45'", f"SET GLOBAL time_zone = '{before}'"
        else:
            role = f'ALTER ROLE CURRENT_USER IN DATABASE "{observer.url.database}"'
            change, back = f"{role} SET TimeZone = 'Asia/Kathmandu'", f"{role} RESET TimeZone"
        connection.exec_driver_sql(change)
        try:
            yield
        finally:
            connection.exec_driver_sql(back)


def test_a_role_or_a_server_may_be_in_an_odd_zone(server: Server, database: Database, queue: Queue, observer: Engine) -> None:
    if server.instance is None:
        pytest.skip("no sessions, or not our server")
    with default_zone(server, observer):
        theirs = create_engine(database.url)
        own = queue_on(theirs)
        take_all_times(theirs, own, observer)
        own.consumer.close()


# --- summer time ----------------------------------------------------------------------------------------------------------------


def teach(connection: Connection, name: str, changes: Mapping[datetime, timedelta]) -> None:
    """Tell a MySQL or MariaDB of a named zone; a fresh server knows none."""
    seconds = sorted({int(offset.total_seconds()) for offset in changes.values()})
    schema = "mysql"
    number = connection.exec_driver_sql(f"INSERT INTO {schema}.time_zone (Use_leap_seconds) VALUES ('N')").lastrowid
    connection.exec_driver_sql(f"INSERT INTO {schema}.time_zone_name (Name, Time_zone_id) VALUES (%s, %s)", (name, number))
    for place, second in enumerate(seconds):
        connection.exec_driver_sql(
            f"INSERT INTO {schema}.time_zone_transition_type (Time_zone_id, Transition_type_id, `Offset`, Is_DST, Abbreviation)"
            " VALUES (%s, %s, %s, %s, 'X')",
            (number, place, second, place),
        )
    for moment, offset in changes.items():
        connection.exec_driver_sql(
            f"INSERT INTO {schema}.time_zone_transition (Time_zone_id, Transition_time, Transition_type_id) VALUES (%s, %s, %s)",
            (number, int(moment.timestamp()), seconds.index(int(offset.total_seconds()))),
        )


def session_with_changes(server: Server, database: Database, observer: Engine, zone: str, changes: Mapping[datetime, timedelta]) -> Engine:
    """As `session_in`, for a zone that changes its clocks."""
    if not server_of(observer.dialect).snapshot_reads:
        return session_in(database, zone)
    if server.instance is None:
        return session_in(database, "+01:00")  # who knows what zones it knows
    name = f"Test/{time.monotonic_ns()}"
    with observer.connect() as connection:
        teach(connection, name, changes)
    return session_in(database, name)


def day_in(engine: Engine) -> float | None:
    """How many seconds a day from now has in the session's zone; None where the session cannot say."""
    queries = {
        "postgresql": "SELECT EXTRACT(epoch FROM CURRENT_TIMESTAMP + INTERVAL '1 day') - EXTRACT(epoch FROM CURRENT_TIMESTAMP)",
        "mysql": "SELECT UNIX_TIMESTAMP(NOW() + INTERVAL 1 DAY) - UNIX_TIMESTAMP(NOW())",
    }
    with engine.connect() as connection:
        query = queries.get(connection.dialect.name)
        return None if query is None else float(connection.exec_driver_sql(query).scalar_one())


@pytest.mark.parametrize("hours", [23, 25], ids=["forward", "back"])
def test_durations_are_exact_when_the_clocks_change_meanwhile(
    server: Server, database: Database, queue: Queue, observer: Engine, hours: int
) -> None:
    """A zone whose clocks change ten minutes from now: its next day has 23 or 25 hours, a delay of a day has 24."""
    change = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=10)
    shift = timedelta(hours=24 - hours)
    days = [change.timetuple().tm_yday - 1, (change.timetuple().tm_yday + 99) % 365]
    zone = f"AAA0BBB{-(24 - hours)},{days[0]}/{change:%H:%M:%S},{days[1]}"
    changes = {change - timedelta(days=1000): timedelta(0), change: shift, change + timedelta(days=100): timedelta(0)}
    with process_in(zone):
        assert time.localtime(change.timestamp()).tm_gmtoff - time.localtime(change.timestamp() - 1).tm_gmtoff == shift.total_seconds()
        theirs = session_with_changes(server, database, observer, zone, changes)
        assert day_in(theirs) in (hours * 3600, None) or server.instance is None
        own = queue_on(theirs)
        take_all_times(theirs, own, observer)
        own.consumer.close()


BERLIN_2025 = {
    datetime(2000, 1, 1, tzinfo=UTC): timedelta(hours=1),
    datetime(2025, 3, 30, 1, tzinfo=UTC): timedelta(hours=2),
    datetime(2025, 10, 26, 1, tzinfo=UTC): timedelta(hours=1),
}


@pytest.mark.parametrize(
    ("first", "second", "utc"),
    [
        (datetime(2025, 10, 26, 2, 30), datetime(2025, 10, 26, 2, 30, fold=1), datetime(2025, 10, 26, 0, 30)),
        (datetime(2025, 3, 30, 1, 30), datetime(2025, 3, 30, 2, 30), datetime(2025, 3, 30, 0, 30)),
    ],
    ids=["twice", "never"],
)
def test_an_hour_that_comes_twice_or_never_is_the_instant_that_python_means(
    server: Server, database: Database, queue: Queue, observer: Engine, first: datetime, second: datetime, utc: datetime
) -> None:
    with process_in("Europe/Berlin"):
        theirs = session_with_changes(server, database, observer, "Europe/Berlin", BERLIN_2025)
        own = queue_on(theirs)
        with theirs.begin() as connection:
            for moment, name in ((second, "second"), (first, "first")):
                local = moment.replace(tzinfo=BERLIN)
                own.push_named(connection, "job", {}, available_at=local, queue=name)
                own.push_named(connection, "job", {}, available_at=local.astimezone(), queue="both")  # in the zone of the process
                own.push_many(connection, [own._bind_named("job", {}, {"available_at": local, "queue": name})])
        expected = utc.replace(tzinfo=UTC)
        due = {stats.queue: stats.oldest_due for stats in own.stats()}
        assert due == {"first": expected, "second": expected + timedelta(hours=1), "both": expected}
        stored = jobs_in(observer, queue)
        assert {row["available_at"] for row in stored.values()} == {expected, expected + timedelta(hours=1)}
        assert [stored[delivery.id]["due_at"] for delivery in own.claim("both", limit=2)] == [expected, expected + timedelta(hours=1)]
        own.consumer.close()


def test_the_manual_tells_the_two_hours_apart() -> None:
    (code,) = re.findall(r"^```python\n(from datetime .*?)^```$", (ROOT / "docs/deployment.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert [f"{names[name].astimezone(UTC):%H:%M} UTC" for name in ("first", "second")] == re.findall(r"# (.*)$", code, re.MULTILINE)
