"""
python -m benchmarks, or nox -s bench: how fast jobs are pushed and run, beside loops by hand and other queues.

Servers are private instances that wait for the disk, or what SQLQUEUE_TEST_*_URL leads to. Read the ratios: digits do not carry
over from one machine to another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DBAPIError

from sqlqueue import __version__
from tests.servers import NAMES

from .arena import OURS, Contestant, Entry, entries_for, installable
from .chart import draw
from .figures import Figures
from .growth import Growth
from .idle import Sleeper, measure_idle
from .rounds import Sizes, run_rounds
from .servers import BenchServers

RESULTS = Path(__file__).parent / "results"
WORKLOADS = ("W1", "W3", "W3t", "W4", "W5", "W6", "W7")
PROC = Path("/proc/self/stat")  # where Linux counts the CPU time of a process
ORDER = ("postgresql", "mysql", "mariadb", "sqlite")
DISK = "each commit waits for the disk"


class Bench:
    def __init__(self, asked: argparse.Namespace, exit: ExitStack) -> None:
        self.asked = asked
        self.load = os.getloadavg()[0]
        self.exit = exit
        self.servers = BenchServers(os.environ)
        self.servers.durable = not asked.no_fsync
        exit.callback(self.servers.close)
        self.figures = Figures()
        self.workloads = frozenset(asked.workload or WORKLOADS)
        self.sizes = Sizes(asked.runs, asked.jobs, asked.pushes, asked.writing, self.workloads)
        self.peers, missing = ({}, {}) if asked.no_peers else installable()
        self.sleepers: list[Sleeper] = []
        self.products: dict[str, str] = {}
        for name, reason in missing.items():
            print(f"{name}: left out, it cannot be installed ({reason})")

    def run(self) -> None:
        for name in self.asked.only or ORDER:
            missing = self.servers.missing(name)
            if missing:
                print(f"{name}: left out ({missing})")
                continue
            self.on(name)
        if self.sleepers:
            print("idle", flush=True)
            measure_idle(self.sleepers, self.asked.silence, self.figures)
        for name, version in self.products.items():
            print(f"\n{name} {version}\n{self.figures.table(name)}")

    def on(self, name: str) -> None:
        began = time.monotonic()
        self.products[name] = self.servers.get(name).version
        print(f"{name} {self.products[name]} ", end="", flush=True)
        entries = [entry for entry in entries_for(name, not self.asked.no_peers) if entry.environment in (None, *self.peers)]
        with ExitStack() as finished:
            contestants = [self.contestant(name, entry, finished) for entry in entries]
            run_rounds(name, contestants, self.sizes, self.figures)
        url = self.url(name, entries[0])
        self.grow(name, url)
        if "W6" in self.workloads and PROC.exists():
            for entry in entries:
                if entry.label == OURS or (entry.environment and entry.pushes):
                    self.sleepers.append(self.sleeper(name, entry))
        print(f" {time.monotonic() - began:.0f} s", flush=True)

    def grow(self, name: str, url: str) -> None:
        growth = Growth(name, url, self.figures)
        try:
            if "W5" in self.workloads:
                growth.backlog(self.asked.rows)
            if "W7" in self.workloads:
                growth.held_open(self.asked.passing)
        except DBAPIError as error:  # as a full disk; what was measured before is not to be lost for it
            print(f"\nthe rest of W5 and W7 is left out: {error.orig}")
        finally:
            growth.close()

    def sleeper(self, name: str, entry: Entry) -> Sleeper:
        if entry.label != OURS:
            return Sleeper(name, self.contestant(name, entry, self.exit), None)
        counts = self.servers.file(f"{name}.counts")
        return Sleeper(name, self.contestant(name, entry, self.exit, count_into=str(counts)), counts)

    def contestant(self, name: str, entry: Entry, exit: ExitStack, **settings: Any) -> Contestant:
        contestant = Contestant(entry, self.url(name, entry), **settings)
        exit.callback(contestant.close)
        contestant.ask("install")
        return contestant

    def url(self, name: str, entry: Entry) -> str:
        """Ours and the loops by hand share a database; each peer has its own."""
        server = self.servers.get(name)
        if server.url is None:
            name = entry.label.replace(" ", "-") if entry.environment else "queue"
            return f"sqlite:///{self.servers.file(name)}-{time.time_ns() if entry.environment else ''}.db"
        if not entry.environment:
            return server.shared.url
        database = server.create_database()
        if server.instance is None:  # somebody's own server
            self.exit.callback(server.drop_database, database)
        return database.url


def report_of(bench: Bench, asked: argparse.Namespace, took: float) -> dict[str, Any]:
    return {
        "sqlqueue": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "disk": "not waited for" if asked.no_fsync else DISK,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(took),
        "load_before": round(bench.load, 2),
        "databases": bench.products,
        "peers": bench.peers,
        "options": {name: value for name, value in vars(asked).items() if name != "publish"},
        "figures": bench.figures.as_json(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NAMES, action="append", help="this database; repeatable")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="this workload (W2 is the filling of W3); repeatable")
    parser.add_argument("--runs", type=int, default=5, help="rounds, of which the median is taken (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=30_000, help="jobs that the fast contestants drain (default: %(default)s)")
    parser.add_argument("--writing", type=int, default=2_000, help="jobs that write a row each in W3t (default: %(default)s)")
    parser.add_argument("--pushes", type=int, default=400, help="jobs that are pushed one by one (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="the large backlog of W5 (default: %(default)s)")
    parser.add_argument("--passing", type=int, default=200_000, help="jobs that pass in W7 (default: %(default)s)")
    parser.add_argument("--silence", type=float, default=60, help="seconds of W6 (default: %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="neither install nor measure other queues")
    parser.add_argument("--no-fsync", action="store_true", help="private servers do not wait for the disk; nothing to quote")
    parser.add_argument("--publish", action="store_true", help="also write figures.json and chart.svg, which the README shows")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    began = time.monotonic()
    with ExitStack() as exit:
        bench = Bench(asked, exit)
        bench.run()
        report = report_of(bench, asked, time.monotonic() - began)
    RESULTS.mkdir(exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S")
    for data, chart in [(f"{name}.json", f"{name}.svg"), *([("figures.json", "chart.svg")] if asked.publish else [])]:
        (RESULTS / data).write_text(json.dumps(report, indent=2) + "\n")
        (RESULTS / chart).write_text(draw(report))
    print(f"\n{report['seconds']} s; {RESULTS / name}.json and .svg")


if __name__ == "__main__":
    main()
