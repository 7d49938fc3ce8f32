"""
The checker finds what is wrong, and a short storm on every database finds nothing.

The gate lets a storm of a minute rage over each database. Longer ones: `nox -s chaos -- --database mysql --minutes 10`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import Evidence, Incidents, Run, judge
from tests.chaos.cluster import Arena, restarts_of
from tests.chaos.harness import Storm
from tests.servers import Database, Server

SEED = 20240229
SECONDS = 13.0

PUSH = {"push": "p", "order_id": "o", "job_id": 1, "created": True, "unique_key": None, "kind": "slow", "max_attempts": 2, "due": 100.0}
ROW = {"id": 1, "payload": json.dumps({"push": "p"}), "attempts": 2, "max_attempts": 2, "reason": "exception"}
HELD = ROW | {"reserved_by": "w1", "reserved_until": "soon", "available_at": "soon", "unique_key": "k"}


def run(attempt: int, entered: float, outcome: str | None, *, worker: str = "w1", ended: float | None = None) -> Run:
    return Run("p", 1, attempt, worker, entered, outcome, entered + 0.5 if ended is None and outcome else ended)


def found(*runs: Run, incidents: Incidents | None = None, **given: Any) -> set[str]:
    """The checks that fail on the story of one push, which committed unless told otherwise."""
    facts: dict[str, Any] = {"pushes": {"p": PUSH}, "jobs": [], "failed": [], "keys": [], "rolled_back": set()} | given
    return {violation.check for violation in judge(Evidence(runs=list(runs), incidents=incidents or Incidents(), **facts))}


def test_the_checker_accepts_what_may_happen() -> None:
    assert not found(run(1, 100, "return"))
    assert not found(run(1, 100, "raise"), run(2, 101, "discard"))
    assert not found(run(1, 100, None), run(2, 102, "raise"), failed=[ROW])
    assert not found(failed=[ROW | {"reason": "worker_lost"}])
    assert not found(run(1, 100, "release"), run(1, 101, "release"), run(1, 102, "return"))
    assert not found(pushes={})


def test_the_checker_accepts_what_was_done_to_the_workers() -> None:
    cut_short = Incidents(cut_short={"w1"})
    assert not found(run(1, 100, None), run(1, 105, "return", worker="w2"), incidents=cut_short)
    thawed = Incidents(frozen=[("w1", 100, 104)])
    assert not found(run(1, 104, "return"), run(2, 102.1, "return", worker="w2"), incidents=thawed)


@pytest.mark.parametrize(
    ("broken", "story"),
    [
        ("lost", {}),
        ("ghost", {"runs": [run(1, 100, "return")], "pushes": {}, "rolled_back": {"p"}}),
        ("ghost", {"runs": [run(1, 100, "return")], "pushes": {"p": PUSH | {"created": False}}}),
        ("duplicate", {"pushes": {"p": PUSH | {"created": False, "unique_key": "k", "job_id": 9}}}),
        ("ids", {"runs": [run(1, 100, "return")], "pushes": {"p": PUSH | {"job_id": 7}}}),
        ("places", {"runs": [run(1, 100, None)], "jobs": [HELD], "failed": [ROW]}),
        ("attempts", {"runs": [run(3, 100, "return")]}),
        ("attempts", {"runs": [run(1, 100, None), run(1, 103, "return")]}),
        ("attempts", {"runs": [run(1, 100, "release", ended=105), run(1, 103, "return")]}),
        ("leases", {"runs": [run(1, 100, None), run(2, 100.5, "return", worker="w2")]}),
        ("completed", {"runs": [run(1, 100, "return"), run(2, 102, None, worker="w2")]}),
        ("completed", {"runs": [run(1, 100, "raise")]}),
        ("failed", {"runs": [run(1, 100, "raise"), run(2, 102, "return")], "failed": [ROW]}),
        ("failed", {"runs": [run(1, 100, "raise")], "failed": [ROW | {"attempts": 1}]}),
        ("failed", {"failed": [ROW | {"reason": "worker_lost", "attempts": 3}]}),
        ("failed", {"failed": [ROW | {"reason": "max_attempts_exceeded"}]}),
        ("left", {"jobs": [HELD]}),
        ("keys", {"runs": [run(1, 100, "return")], "keys": [{"key": "k", "job_id": 1}]}),
        ("delays", {"runs": [run(1, 99, "return")]}),
    ],
)
def test_the_checker_names_what_is_broken(broken: str, story: dict[str, Any]) -> None:
    story = dict(story)
    assert broken in found(*story.pop("runs", []), **story)


@pytest.mark.chaos
def test_a_storm_breaks_no_promise(server: Server, fresh_database: Database, tmp_path: Path) -> None:
    strike = restarts_of(server.instance) if server.instance is not None else None
    local = server.url is None or server.instance is not None
    arena = Arena(server.name, [fresh_database.url], strike, strikes_after=(4.0, 7.0), one_clock=local)
    report = Storm(arena, SEED, tmp_path).run(SECONDS)
    print(report)
    assert not report.violations, str(report)
    assert report.evidence.counts["runs"] > 20, "that was no storm"
