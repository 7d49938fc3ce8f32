"""
Judges a queue after a storm, and during it: from the business tables and the queue's own.

Every check is a function from the evidence to violations. Jobs are told apart by their `push`, a random id in the payload: the
ids of rows that were rolled back may be used again.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from sqlqueue._tables import Tables
from tests.chaos.actors import LEASE, metadata, pushes, rolled_back, runs

DONE = ("return", "discard")
RELEASED = "release"
CLOCK_SLACK = 0.01
START_SLACK = LEASE / 2
"""How long a claimed job may take until its handler is entered, in a process that nobody stopped."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Violation:
    """
    A promise that was broken, and the job it was broken on.
    """

    check: str
    text: str
    push: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """
    One time that a handler was entered.
    """

    push: str
    job_id: int
    attempt: int
    worker: str
    entered: float
    outcome: str | None
    ended: float | None


@dataclass(slots=True)
class Incidents:
    """
    What was done to the actors, as far as the checks have to know.
    """

    cut_short: set[str] = field(default_factory=set)
    """Workers that got a second signal: they hand back what runs, and its attempt."""
    frozen: list[tuple[str, float, float]] = field(default_factory=list)
    journal: dict[str, str] = field(default_factory=dict)
    """What became of pushes that did not commit, as far as their producers could write it down."""
    one_clock: bool = True
    """The database and the actors share a host."""
    steady_commits: bool = True
    """A commit takes no longer than a part of the lease. A cluster that has lost a node stands still for longer."""


@dataclass(eq=False)
class Evidence:
    """
    All there is to judge by.
    """

    pushes: dict[str, Row]
    runs: list[Run]
    jobs: list[Row]
    failed: list[Row]
    keys: list[Row]
    rolled_back: set[str]
    incidents: Incidents

    @cached_property
    def runs_of(self) -> dict[str, list[Run]]:
        """
        The runs of each push, in the order of the claims that they came from.
        """
        found: defaultdict[str, list[Run]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: (run.attempt, run.entered)):
            found[run.push].append(run)
        return dict(found)

    @cached_property
    def failed_of(self) -> dict[str, Row]:
        return {push_of(row): row for row in self.failed}

    @cached_property
    def jobs_of(self) -> dict[str, Row]:
        return {push_of(row): row for row in self.jobs}

    @cached_property
    def created(self) -> dict[str, Row]:
        """
        Committed pushes that wrote a job.
        """
        return {push: row for push, row in self.pushes.items() if row["created"]}

    @cached_property
    def counts(self) -> Counter[str]:
        outcomes = Counter(run.outcome or "cut off" for run in self.runs)
        return Counter(
            {
                "pushes": len(self.created),
                "duplicates": len(self.pushes) - len(self.created),
                "rollbacks": len(self.rolled_back | set(self.incidents.journal)),
                "runs": len(self.runs),
                "retries": len(self.runs) - len(self.runs_of),
                **{f"runs: {outcome}": number for outcome, number in sorted(outcomes.items())},
                "failed": len(self.failed),
                **{f"failed: {reason}": number for reason, number in sorted(Counter(row["reason"] for row in self.failed).items())},
                "left": len(self.jobs),
            }
        )

    def history(self, push: str) -> Iterator[str]:
        """
        Everything that is known about one push, a line each.
        """
        if push in self.pushes:
            yield f"push {dict(self.pushes[push])}"
        else:
            yield f"push {push} never committed: {self._fate(push)}"
        for run in self.runs_of.get(push, []):
            ended = "never ended" if run.ended is None else f"{run.outcome} at {run.ended:.3f}"
            yield f"run  job {run.job_id} attempt {run.attempt} {run.worker} entered at {run.entered:.3f}, {ended}"
        for name, rows in (("job", self.jobs_of), ("failed", self.failed_of)):
            if push in rows:
                yield f"{name} {dict(rows[push])}"

    def _fate(self, push: str) -> str:
        return "rolled back" if push in self.rolled_back else self.incidents.journal.get(push, "the commit was not confirmed")


def push_of(row: Row) -> str:
    return str(json.loads(row["payload"])["push"])


def collect(connection: sa.Connection, tables: Tables, incidents: Incidents) -> Evidence:
    """
    Read the evidence.
    """

    def rows(table: sa.Table) -> list[Row]:
        return [dict(row) for row in connection.execute(sa.select(table)).mappings()]

    fields = [runs.c[name] for name in Run.__dataclass_fields__]
    return Evidence(
        pushes={row["push"]: row for row in rows(pushes)},
        runs=[Run(*row) for row in connection.execute(sa.select(*fields))],
        jobs=rows(tables.jobs),
        failed=rows(tables.failed),
        keys=rows(tables.keys),
        rolled_back={row["push"] for row in rows(rolled_back)},
        incidents=incidents,
    )


def judge(evidence: Evidence) -> list[Violation]:
    """
    Everything that is wrong.
    """
    return [violation for check in CHECKS for violation in check(evidence)]


def create_tables(engine: sa.Engine, tables: Tables) -> None:
    """
    The business tables and the queue's, empty.
    """
    for known in (metadata, tables.metadata):
        known.drop_all(engine)
        known.create_all(engine)


# --- while it goes on -------------------------------------------------------------------------------------------------


def sample(connection: sa.Connection, tables: Tables) -> list[Violation]:
    """
    What must hold in every snapshot. Each question is one statement, so that it sees one.
    """
    jobs, keys, failed = tables.jobs.c, tables.keys.c, tables.failed.c
    twice = sa.select(jobs.unique_key).where(jobs.unique_key.is_not(None)).group_by(jobs.unique_key).having(sa.func.count() > 1)
    orphans = sa.select(keys.key).select_from(tables.keys.outerjoin(tables.jobs, jobs.id == keys.job_id)).where(jobs.id.is_(None))
    robbed = (
        sa.select(jobs.id)
        .select_from(tables.jobs.outerjoin(tables.keys, keys.key == jobs.unique_key))
        .where(jobs.unique_key.is_not(None), sa.or_(keys.job_id.is_(None), keys.job_id != jobs.id))
    )
    both = sa.select(jobs.id).where(jobs.id.in_(sa.select(failed.id)))
    questions = {
        "two jobs hold the key": twice,
        "a key without its job": orphans,
        "a job without its key": robbed,
        "in both tables": both,
    }
    return [
        Violation("snapshot", f"{what}: {answer}") for what, query in questions.items() for answer in connection.execute(query).scalars()
    ]


# --- afterwards -------------------------------------------------------------------------------------------------------


def check_nothing_is_lost(evidence: Evidence) -> Iterator[Violation]:
    known = evidence.runs_of.keys() | evidence.failed_of.keys() | evidence.jobs_of.keys()
    for push in evidence.created.keys() - known:
        yield Violation("lost", "it was committed, never ran, and is in neither table", push)


def check_nothing_runs_that_never_was(evidence: Evidence) -> Iterator[Violation]:
    for place, found in (("ran", evidence.runs_of), ("is on the queue", evidence.jobs_of), ("is failed", evidence.failed_of)):
        for push in found.keys() - evidence.created.keys():
            what = "wrote no job, its key was held" if push in evidence.pushes else "did not commit"
            yield Violation("ghost", f"the push {what}, and yet it {place}", push)


def check_duplicates_name_the_holder(evidence: Evidence) -> Iterator[Violation]:
    keys = {row["job_id"]: row["unique_key"] for row in evidence.created.values() if row["unique_key"]}
    for push, row in evidence.pushes.items():
        if not row["created"] and keys.get(row["job_id"]) != row["unique_key"]:
            yield Violation("duplicate", f"job {row['job_id']} is said to hold the key, and never did", push)


def check_ids(evidence: Evidence) -> Iterator[Violation]:
    owners: dict[int, str] = {}
    for push in evidence.created:
        ids = {run.job_id for run in evidence.runs_of.get(push, [])}
        ids |= {rows[push]["id"] for rows in (evidence.jobs_of, evidence.failed_of) if push in rows}
        ids |= {evidence.pushes[push]["job_id"]} - {None}
        if len(ids) > 1:
            yield Violation("ids", f"it had several ids: {sorted(ids)}", push)
        for id in ids:
            if owners.setdefault(id, push) != push:
                yield Violation("ids", f"job id {id} was used twice, first by {owners[id]}", push)


def check_one_place(evidence: Evidence) -> Iterator[Violation]:
    places = Counter(push_of(row) for row in (*evidence.jobs, *evidence.failed))
    for push, number in places.items():
        if number > 1:
            yield Violation("places", f"it is in {number} rows", push)


def check_attempts(evidence: Evidence) -> Iterator[Violation]:
    """
    An attempt starts once, unless it was given back: by Release, or by a worker that a second signal cut short.
    """
    for push, found in evidence.runs_of.items():
        most = evidence.pushes[push]["max_attempts"] if push in evidence.pushes else 0
        for run in found:
            if not 1 <= run.attempt <= most:
                yield Violation("attempts", f"attempt {run.attempt} of {most}", push)
        for before, after in pairwise(found):
            if before.attempt == after.attempt and not _gave_back(before, after, evidence.incidents):
                yield Violation("attempts", f"attempt {before.attempt} started twice, by {before.worker} and {after.worker}", push)


def _gave_back(before: Run, after: Run, incidents: Incidents) -> bool:
    if before.worker in incidents.cut_short:
        return True
    return before.outcome == RELEASED and before.ended is not None and before.ended <= after.entered + CLOCK_SLACK


def check_leases(evidence: Evidence) -> Iterator[Violation]:
    """
    Nobody gets a job while another one's lease on it runs.
    """
    incidents = evidence.incidents
    if not incidents.steady_commits:
        return
    for push, found in evidence.runs_of.items():
        for before, after in pairwise(found):
            let_go = (before.ended is not None and before.ended <= after.entered + CLOCK_SLACK) or before.worker in incidents.cut_short
            if not let_go and after.entered - before.entered < LEASE - START_SLACK and not _was_frozen(before, incidents):
                text = f"attempt {after.attempt} ({after.worker}) began {after.entered - before.entered:.3f} s after attempt"
                yield Violation("leases", f"{text} {before.attempt} ({before.worker}), which had not ended", push)


def _was_frozen(run: Run, incidents: Incidents) -> bool:
    return any(name == run.worker and since <= run.entered <= until + START_SLACK for name, since, until in incidents.frozen)


def check_completed(evidence: Evidence) -> Iterator[Violation]:
    """
    A job that is gone was completed by its last claim: had an older one done it, that was stale.
    """
    for push, found in evidence.runs_of.items():
        if push in evidence.jobs_of or push in evidence.failed_of or push not in evidence.created:
            continue
        if found[-1].outcome not in DONE:
            yield Violation("completed", f"it is gone, but its last run did not return: {found[-1].outcome or 'cut off'}", push)


def check_failed(evidence: Evidence) -> Iterator[Violation]:
    """
    A failed job was failed by its last claim, for the reason that is told.
    """
    for push, row in evidence.failed_of.items():
        found = evidence.runs_of.get(push, [])
        last = found[-1] if found else None
        outcome = last.outcome if last is not None else None
        attempts, most, reason = row["attempts"], row["max_attempts"], row["reason"]
        if not 0 < attempts <= most:
            yield Violation("failed", f"{attempts} attempts of {most}", push)
        if last is not None and last.attempt > attempts:
            yield Violation("failed", f"attempt {last.attempt} ran, but {attempts} are recorded", push)
        fits = {
            "exception": outcome == "raise" and last is not None and last.attempt == attempts == most,
            "failed_by_job": outcome == "fail" and last is not None and last.attempt == attempts,
            "worker_lost": attempts == most,
        }
        if not fits.get(reason, False):
            yield Violation("failed", f"the reason is {reason}, but the last run ended with {outcome}", push)


def check_nothing_is_left(evidence: Evidence) -> Iterator[Violation]:
    for push, row in evidence.jobs_of.items():
        held = f"held by {row['reserved_by']} until {row['reserved_until']}" if row["reserved_until"] else "not held"
        yield Violation("left", f"it was never worked off: {held}, available at {row['available_at']}", push)


def check_keys(evidence: Evidence) -> Iterator[Violation]:
    ids = {row["id"]: row["unique_key"] for row in evidence.jobs}
    for row in evidence.keys:
        if ids.get(row["job_id"]) != row["key"]:
            yield Violation("keys", f"{row['key']} is held by job {row['job_id']}, which is gone")


def check_delays(evidence: Evidence) -> Iterator[Violation]:
    """
    A delay counts from the push, and is a floor.
    """
    if not evidence.incidents.one_clock:
        return
    for push, found in evidence.runs_of.items():
        due = evidence.created[push]["due"] if push in evidence.created else 0.0
        early = due - min(run.entered for run in found)
        if early > CLOCK_SLACK:
            yield Violation("delays", f"it ran {early:.3f} s before it was due", push)


CHECKS: Sequence[Callable[[Evidence], Iterator[Violation]]] = (
    check_nothing_is_lost,
    check_nothing_runs_that_never_was,
    check_duplicates_name_the_holder,
    check_ids,
    check_one_place,
    check_attempts,
    check_leases,
    check_completed,
    check_failed,
    check_nothing_is_left,
    check_keys,
    check_delays,
)
