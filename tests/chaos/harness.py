"""
A storm over a queue: processes are killed, stopped and frozen, servers restarted, and a checker judges what is left.

    python -m tests.chaos.harness --database postgresql,mysql --minutes 3 --seed 42

Prints the seed, the counts and the verdict; exits with 1 when a promise was broken. Storms over several databases go on at the
same time. With --url the storm uses that database, in tables of its own (`chaos_…`, dropped and created), and leaves its server
alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from tests.chaos import actors, checker
from tests.chaos.actors import DIED_BEFORE_COMMIT, LEASE, POISONED, Role, build_queue
from tests.chaos.checker import Evidence, Incidents, Violation
from tests.chaos.cluster import Arena, galera, restarts_of
from tests.servers import NAMES, SCHEMES, Servers

PLACES = (*NAMES, "galera")
WORKERS = 4
PRODUCERS = 3
TICK = 0.05
BLOWS_AFTER = (0.5, 2.0)
FREEZE = (LEASE * 1.1, LEASE * 2.2)
SAMPLES_AFTER = 0.3
STOP_PATIENCE = 60.0
"""Seconds that a worker may take to stop: its jobs take less than 3, but the database may be away."""
DRAIN_PATIENCE = 120.0
UNPREPARED = -signal.SIGTERM
"""How a process ends that was asked to before it could install its handler."""


@dataclass(eq=False)
class Actor:
    """
    A process of the storm, and how it may end.
    """

    role: Role
    process: multiprocessing.process.BaseProcess
    may_end_with: set[int]
    asked_to_stop: float | None = None
    thaws: float | None = None
    froze: float = 0.0

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def works(self) -> bool:
        """
        It takes part, as far as we know.
        """
        return self.asked_to_stop is None and self.thaws is None and self.process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass(eq=False)
class Report:
    """
    What a storm came to.
    """

    arena: str
    seed: int
    blows: Counter[str]
    evidence: Evidence
    violations: list[Violation]

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {number}" for counter in (self.evidence.counts, self.blows) for name, number in counter.items())
        lines = [f"chaos: {self.arena}, seed {self.seed}: {counts}"]
        for violation in self.violations:
            lines.append(f"VIOLATION [{violation.check}] {violation.push or ''} {violation.text}")
            lines += [f"    {line}" for line in (self.evidence.history(violation.push) if violation.push else ())]
        lines.append(f"chaos: {self.arena}, seed {self.seed}: {len(self.violations)} violations")
        return "\n".join(lines)


@dataclass(eq=False)
class Storm:
    """
    One run of the harness.
    """

    arena: Arena
    seed: int
    folder: Path
    actors: list[Actor] = field(default_factory=list)
    blows: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    incidents: Incidents = field(default_factory=Incidents)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.queue, _ = build_queue(self.arena.urls[0])
        self.engine = sa.create_engine(self.arena.urls[0], poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.chaos.actors"])
        self.calm = threading.Event()
        self.incidents.one_clock = self.arena.one_clock
        self.incidents.steady_commits = self.arena.steady_commits
        self._started: Counter[str] = Counter()

    def run(self, seconds: float) -> Report:
        """
        Rage for so many seconds, let the workers finish, and judge.
        """
        checker.create_tables(self.engine, self.queue.tables)
        beside = [threading.Thread(target=self._watch), threading.Thread(target=self._strike)]
        try:
            for thread in beside:
                thread.start()
            self._rage(seconds)
            self.calm.set()
            for thread in beside:
                thread.join()
            self._drain()
            self._dismiss("worker")
            evidence = self._collect()
        finally:
            self.calm.set()
            self._kill_all()
            self.queue.consumer.close()
        violations = self.violations + checker.judge(evidence)
        return Report(self.arena.name, self.seed, self.blows, evidence, violations)

    # --- the storm

    def _rage(self, seconds: float) -> None:
        for _ in range(PRODUCERS):
            self._start("producer")
        if self.arena.name == "sqlite":
            self._start("locker")
        until = time.monotonic() + seconds
        next_blow = time.monotonic() + 1.0
        while time.monotonic() < until:
            self._keep_up()
            if time.monotonic() >= next_blow:
                self._hit_somebody()
                next_blow = time.monotonic() + self.dice.uniform(*BLOWS_AFTER)
            time.sleep(TICK)

    def _start(self, kind: str) -> None:
        self._started[kind] += 1
        number = self._started[kind]
        url = self.arena.urls[number % len(self.arena.urls)]
        role = Role(f"{kind}-{number}", kind, url, str(self.seed), str(self.folder))
        process = self.context.Process(target=actors.perform, args=(role,), daemon=True)
        process.start()
        self.actors.append(Actor(role, process, {POISONED} if kind == "worker" else {DIED_BEFORE_COMMIT}))

    def _keep_up(self, *, producing: bool = True) -> None:
        """
        Wake up whoever has been frozen long enough, see who is gone, and replace them.
        """
        for actor in self.actors:
            if actor.thaws is not None and time.monotonic() >= actor.thaws:
                self._thaw(actor)
        self._bury_the_dead()
        while self._count("worker") < WORKERS:
            self._start("worker")
        while producing and self._count("producer") < PRODUCERS:
            self._start("producer")

    def _bury_the_dead(self) -> None:
        for actor in list(self.actors):
            if not actor.process.is_alive():
                self._bury(actor)
            elif actor.asked_to_stop is not None and time.monotonic() > actor.asked_to_stop + STOP_PATIENCE:
                self.violations.append(Violation("shutdown", f"{actor.role.name} did not stop: {self._last_words(actor)}"))
                self._kill(actor)

    def _count(self, kind: str) -> int:
        return sum(actor.role.kind == kind and actor.asked_to_stop is None for actor in self.actors)

    def _bury(self, actor: Actor) -> None:
        code = actor.process.exitcode
        actor.process.join()
        actor.process.close()
        self.actors.remove(actor)
        if code == POISONED:
            self.blows["poisoned workers"] += 1
        elif code == DIED_BEFORE_COMMIT:
            self.blows["producers died before commit"] += 1
        if code not in actor.may_end_with:
            self.violations.append(Violation("exit", f"{actor.role.name} ended with {code}: {self._last_words(actor)}"))

    def _last_words(self, actor: Actor) -> str:
        log = self.folder / f"{actor.role.name}.log"
        return " | ".join(log.read_text(errors="replace").splitlines()[-3:]) if log.exists() else "it never spoke"

    # --- blows

    def _hit_somebody(self) -> None:
        blows: dict[Callable[[Actor], None], tuple[str, float]] = {
            self._kill: ("worker", 4),
            self._stop: ("worker", 2),
            self._cut_short: ("worker", 1),
            self._freeze: ("worker", 5),
            self._kill_producer: ("producer", 1),
        }
        (blow,) = self.dice.choices(list(blows), [weight for _, weight in blows.values()])
        victims = [actor for actor in self.actors if actor.works and actor.role.kind == blows[blow][0]]
        if victims:
            blow(self.dice.choice(victims))

    def _kill(self, actor: Actor) -> None:
        self.blows[f"{actor.role.kind}s killed"] += 1
        actor.may_end_with.add(-signal.SIGKILL)
        actor.asked_to_stop = time.monotonic()
        actor.signal(signal.SIGKILL)

    def _kill_producer(self, actor: Actor) -> None:
        self._kill(actor)

    def _stop(self, actor: Actor) -> None:
        self.blows["stops"] += 1
        self._ask_to_stop(actor)

    def _ask_to_stop(self, actor: Actor) -> None:
        actor.may_end_with |= {0, UNPREPARED}
        actor.asked_to_stop = time.monotonic()
        actor.signal(signal.SIGTERM)

    def _cut_short(self, actor: Actor) -> None:
        self.blows["stops by two signals"] += 1
        self.incidents.cut_short.add(actor.role.name)
        actor.may_end_with.add(1)
        self._ask_to_stop(actor)
        time.sleep(0.2)
        actor.signal(signal.SIGTERM)

    def _freeze(self, actor: Actor) -> None:
        if any(other.thaws is not None for other in self.actors):
            return
        self.blows["freezes"] += 1
        actor.froze = time.time()
        actor.thaws = time.monotonic() + self.dice.uniform(*FREEZE)
        actor.signal(signal.SIGSTOP)

    def _thaw(self, actor: Actor) -> None:
        actor.thaws = None
        self.incidents.frozen.append((actor.role.name, actor.froze, time.time()))
        actor.signal(signal.SIGCONT)

    # --- beside it

    def _strike(self) -> None:
        """
        Hit the servers, in a thread of its own: the processes must not have peace meanwhile.
        """
        dice = random.Random(f"{self.seed}/strikes")
        strike, took = self.arena.strike, 0.0
        try:
            while strike is not None and not self.calm.wait(max(dice.uniform(*self.arena.strikes_after), took)):
                began = time.monotonic()
                self.blows[strike(dice)] += 1
                took = time.monotonic() - began  # a server that starts slowly is there at least half of the time
        except Exception as error:
            self.violations.append(Violation("harness", f"a server did not come back: {error}"))

    def _watch(self) -> None:
        """
        Look at the tables from outside, again and again.
        """
        while not self.calm.wait(SAMPLES_AFTER):
            with suppress(DBAPIError), self.engine.connect() as connection:
                found = checker.sample(connection, self.queue.tables)
                self.violations += [violation for violation in found if violation not in self.violations]
                self.blows["samples"] += 1

    # --- the end

    def _drain(self) -> None:
        """
        No more pushes, no more blows: the workers have to come to an end, poisoned ones replaced.
        """
        for actor in self.actors:
            if actor.thaws is not None:
                self._thaw(actor)
        self._dismiss("producer")
        self._dismiss("locker")
        until = time.monotonic() + DRAIN_PATIENCE
        while self._waiting() and time.monotonic() < until:
            self._keep_up(producing=False)
            time.sleep(TICK)

    def _waiting(self) -> bool:
        try:
            with self.engine.connect() as connection:
                return connection.execute(sa.select(self.queue.tables.jobs.c.id).limit(1)).first() is not None
        except DBAPIError:  # SQLite, locked
            return True

    def _dismiss(self, kind: str) -> None:
        """
        Ask all of a kind to stop, and wait until they have.
        """
        for actor in self.actors:
            if actor.role.kind == kind and actor.asked_to_stop is None:
                self._ask_to_stop(actor)
        while any(actor.role.kind == kind for actor in self.actors):
            self._bury_the_dead()
            time.sleep(TICK)

    def _collect(self) -> Evidence:
        for journal in self.folder.glob("*.journal"):
            for line in journal.read_text().splitlines():
                what, *words = line.split()
                if what == "error":
                    self.blows["failed transactions"] += 1
                else:
                    self.incidents.journal |= dict.fromkeys(words, what)
        with self.engine.connect() as connection:
            for statement in self.arena.before_reading:
                connection.exec_driver_sql(statement)
            return checker.collect(connection, self.queue.tables, self.incidents)

    def _kill_all(self) -> None:
        for actor in self.actors:
            actor.signal(signal.SIGKILL)
            actor.process.join()
            actor.process.close()
        self.actors.clear()


# --- from the command line --------------------------------------------------------------------------------------------


@contextmanager
def arena_of(database: str, url: str | None, folder: Path) -> Iterator[Arena]:
    """
    A place for a storm: the database at the URL, or a private server.
    """
    if database == "galera":
        with galera() as arena:
            yield arena
    elif database == "sqlite":
        yield Arena("sqlite", [url or f"sqlite:///{folder}/queue.db"])
    elif url is not None:
        yield Arena(database, [sa.make_url(url).set(drivername=SCHEMES[database]).render_as_string(hide_password=False)], one_clock=False)
    else:
        servers = Servers({})
        try:
            if reason := servers.missing(database):
                sys.exit(f"{database}: {reason}")
            server = servers.get(database)
            assert server.instance is not None
            yield Arena(database, [server.shared.url], restarts_of(server.instance))
        finally:
            servers.close()


def main() -> int:
    """
    Run a storm; 1 when a promise was broken.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.harness", description="A storm over a queue.")
    parser.add_argument("--database", default="sqlite", metavar="NAME,…", help=f"some of {', '.join(PLACES)}")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="a random one if not given")
    parser.add_argument("--url", help="a database to use instead of a private server")
    options = parser.parse_args()
    databases = options.database.split(",")
    if unknown := set(databases) - set(PLACES):
        parser.error(f"--database: there is no {', '.join(sorted(unknown))}; known are {', '.join(PLACES)}")
    if options.url and ("galera" in databases or len(databases) > 1):
        parser.error("--url: for one database, and the cluster is always our own")
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    if len(databases) > 1:
        return rage_together(databases, options.minutes, seed)
    return rage(options.database, options.minutes, seed, options.url)


def rage_together(databases: Sequence[str], minutes: float, seed: int) -> int:
    """
    A storm over each of the databases, each in a process of its own.
    """
    command = [sys.executable, "-m", "tests.chaos.harness", "--minutes", str(minutes), "--seed", str(seed)]
    storms = [subprocess.Popen([*command, "--database", database]) for database in databases]
    return max(storm.wait() for storm in storms)


def rage(database: str, minutes: float, seed: int, url: str | None) -> int:
    """
    A storm over one database.
    """
    folder = Path(tempfile.mkdtemp(prefix="sqlqueue-chaos-"))
    print(f"chaos: {database}, seed {seed}: {minutes:g} minutes begin, logs are in {folder}", flush=True)
    with arena_of(database, url, folder) as arena:
        report = Storm(arena, seed, folder).run(minutes * 60)
    print(report, flush=True)
    if not report.violations:
        shutil.rmtree(folder)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
