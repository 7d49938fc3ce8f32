"""
The contestants as the benchmark sees them: who takes part on which database, and the pipe to each one's process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .environments import CannotInstall, python_of, version_of
from .stamps import Reader

ROOT = Path(__file__).parent.parent
POSTGRESQL = ("postgresql",)
EVERYWHERE = ("postgresql", "mysql", "mariadb", "sqlite")
OURS, RAW, RAW_LARGE, CORE = "sqlqueue", "driver, groups of 100", "driver, groups of 1,000", "Core, groups of 100"


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One contestant. `share` is how many jobs it drains for each that the fastest do: the slow ones are not measured for minutes.
    """

    label: str
    module: str
    databases: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    share: float = 1.0
    pushes: bool = True  # another entry with other settings has pushed already
    waits: bool = True  # takes part in the measuring of latency
    processes: tuple[int, ...] = (1, 2)  # how many workers it drains with
    writes: bool = False  # takes part where jobs write

    @property
    def short(self) -> str:
        """What it is called where it makes no groups."""
        return self.label.partition(", groups")[0]


ENTRIES = (
    Entry(OURS, "ours", EVERYWHERE, processes=(1, 2, 4), writes=True),
    Entry(RAW, "by_hand", EVERYWHERE, {"group": 100}, processes=(1,), writes=True),
    Entry(RAW_LARGE, "by_hand", EVERYWHERE, {"group": 1000}, pushes=False, waits=False, processes=(1, 2, 4)),
    Entry(CORE, "core", EVERYWHERE, {"group": 100}, waits=False, writes=True),
    Entry("pgqueuer, groups of 500", "peer_pgqueuer", POSTGRESQL, {"group": 500}, "pgqueuer", 0.6, processes=(1, 2, 4)),
    Entry(
        "pgqueuer, its default of 10",
        "peer_pgqueuer",
        POSTGRESQL,
        {"group": 10},
        "pgqueuer",
        0.2,
        pushes=False,
        waits=False,
        processes=(1,),
    ),
    Entry("oban", "peer_oban", POSTGRESQL, {}, "oban", 0.15),
    Entry("procrastinate", "peer_procrastinate", POSTGRESQL, {}, "procrastinate", 0.02),
    Entry("huey, fsync", "peer_huey", ("sqlite",), {"fsync": True}, "huey", 0.1, processes=(1,)),
    Entry("huey, no fsync", "peer_huey", ("sqlite",), {"fsync": False}, "huey", 0.2, pushes=False, waits=False, processes=(1,)),
)


class Contestant:
    """
    A contestant's process, and the workers that it has started.
    """

    def __init__(self, entry: Entry, url: str, **settings: Any) -> None:
        self.entry = entry
        self.folder = Path(tempfile.mkdtemp(prefix="sqlqueue-bench-"))
        self.log = (self.folder / "log").open("w+")
        python = sys.executable if entry.environment is None else str(python_of(entry.environment))
        if entry.environment is not None:
            url = url.replace("postgresql+psycopg://", "postgresql://")
        self.process = subprocess.Popen(
            [python, "-m", f"benchmarks.contestants.{entry.module}", url, json.dumps(entry.settings | settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )
        self.run = self.folder
        self.runs = 0

    def ask(self, method: str, *arguments: Any) -> Any:
        self.send(method, *arguments)
        return self.receive(method)

    def send(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": method, "with": arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self, method: str) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.entry.label} has died:\n{self._log_text()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.entry.label}, {method}:\n{answer['error']}")
        return answer["result"]

    def start(self, processes: int, work: str = "work") -> Reader:
        """Start workers; the stamps that they are going to write."""
        self.runs += 1
        self.run = self.folder / str(self.runs)
        self.run.mkdir()
        self.pids = self.ask("start", str(self.run), processes, work)
        return Reader(self.run)

    def stop(self) -> None:
        self.ask("stop")
        shutil.rmtree(self.run, ignore_errors=True)

    def wait_for(self, stamps: Reader, count: int, timeout: float = 120) -> None:
        until = time.monotonic() + timeout
        while stamps.count() < count:
            if time.monotonic() > until:
                logs = "\n".join(path.read_text()[-2000:] for path in self.run.glob("*.log"))
                raise RuntimeError(f"{self.entry.label}: {stamps.count()} of {count} jobs were started in {timeout} s\n{logs}")
            time.sleep(0.02)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _log_text(self) -> str:
        self.log.flush()
        return (self.folder / "log").read_text()


def entries_for(database: str, peers: bool) -> Iterator[Entry]:
    for entry in ENTRIES:
        if database in entry.databases and (peers or entry.environment is None):
            yield entry


def installable(entries: tuple[Entry, ...] = ENTRIES) -> tuple[dict[str, str], dict[str, str]]:
    """
    The versions of the peers that are there, and in a line each why others are not.
    """
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(entry.environment for entry in entries if entry.environment):
        try:
            python_of(name)
            versions[name] = version_of(name)
        except CannotInstall as error:
            missing[name] = str(error)
    return versions, missing
