"""
The consumer's operations: short transactions on the queue's own connections.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DBAPIError

from .._arguments import from_json
from .._dialects import Trouble, moment_of, trouble_of
from .._driver.claim import ClaimedRow, Company, Lease, claim_lane, company_of, put_back, taken_under
from .._driver.lanes import Lane, find_lanes
from .._driver.settle import (
    GROUP,
    Move,
    Results,
    Return,
    Settlement,
    failed_already,
    last_errors,
    lost_leases,
    move_to_failed,
    renew,
    settle,
)
from .._failure import Failure, Reason
from .._job import Delivery
from .._tables import Tables
from ..errors import ArgumentError
from .transactions import Transactions

__all__ = ["Consumer", "host_name"]

LANES_REMEMBERED = 1.0
SELECTIONS_REMEMBERED = 256
DOOMED_ROUNDS = 20
MOST_AT_ONCE = 1000
CLEARING_TIME = 1.0
BLOCKED_PAUSE = 1.0
UNANSWERED = 5.0  # how long a server may be busy with a COMMIT whose connection is gone


class Consumer(Transactions):
    """
    Claims, settles and renews.
    """

    def __init__(self, source: URL | Engine, tables: Tables) -> None:
        super().__init__(source)
        self._tables = tables
        self._lanes: dict[tuple[str, ...], tuple[float, list[Lane]]] = {}
        self._unanswered: deque[_Unanswered] = deque()

    def claim(
        self,
        queues: Sequence[str],
        limit: int,
        lease: float,
        worker: str,
        company: Company = Company.NONE,
        *,
        ahead: int = 0,
        not_repeated: frozenset[str] = frozenset(),
    ) -> list[Delivery]:
        """
        Take up to `limit` jobs for `lease` seconds, in order of precedence; an empty list when none may be taken now.

        Args:
            ahead: how many more to take, behind those, that are going to wait for a while. For these come only jobs that
                have another attempt should this process die meanwhile.
            not_repeated: names of the jobs that have failed when their worker dies.
        """
        self.give_back()
        asked = _Claim(limit, ahead, lease, worker, company, not_repeated, {name: place for place, name in enumerate(queues)})
        try:
            self._claim_from(self._remembered_lanes(queues), asked)
            if asked.wanted:
                # Fewer than asked for: there may be lanes that came up since they were last looked at.
                self._claim_from(self._look_for_lanes(queues), asked)
        except Exception:
            # What was taken before is ours, and nobody else would run it. The trouble will show at the next claim.
            if not asked.taken:
                raise
        return [one.delivery for one in sorted(asked.taken)]

    def give_back(self) -> None:
        """
        Release what was taken by a claim whose answer was lost. Nobody knows of these jobs: until their leases end they
        would not run, and then as if a worker had died of them.
        """
        for _ in range(len(self._unanswered)):
            try:
                claim = self._unanswered.popleft()
            except IndexError:  # another thread sees to it
                return
            try:
                done = self._give_back(claim)
            except Exception:
                self._unanswered.append(claim)
                raise
            if not done:
                self._unanswered.append(claim)

    def _give_back(self, claim: _Unanswered) -> bool:
        """
        False when it is worth another look.
        """
        ids = self.read(lambda connection: taken_under(connection, self._tables, claim.lanes, claim.terms))
        if not ids:
            return time.monotonic() > claim.until
        return not self.settle([Settlement(id, claim.terms.token, False, Return()) for id in ids]).blocked

    def due_in(self, queues: Sequence[str]) -> float | None:
        """
        Seconds until the next job of these queues may be claimed, not above 0 when one is pending; None when there is none.

        A plain read: a lock on a row does not hide it.
        """
        return min((lane.due_in for lane in self._look_for_lanes(queues)), default=None)

    def soonest(self, queues: Sequence[str]) -> float | None:
        """
        Seconds until the next job may be claimed as far as the last look knows, without asking the database.
        """
        looked, lanes = self._lanes.get(tuple(queues), (0.0, []))
        age = time.monotonic() - looked
        return min((lane.due_in - age for lane in lanes if lane.due_in > 0), default=None)

    def settle(self, group: Sequence[Settlement], *, lock_wait: float | None = None, repeated: bool = False) -> Results:
        """
        Settle deliveries, each on its own merits; at most one of a job.

        Args:
            repeated: an earlier call ended with a lost connection, and may have been applied.
        """
        results = Results()
        for start in range(0, len(group), GROUP):
            part = group[start : start + GROUP]
            found = self.run(
                lambda connection, repeated, part=part: settle(connection, self._tables, part, repeated=repeated),  # type: ignore[misc]
                lock_wait=lock_wait,
                repeat_lost=True,
                repeated=repeated,
            )
            results.settled |= found.settled
            results.stale |= found.stale
            results.blocked |= found.blocked
        return results

    def renew(self, leases: Sequence[tuple[int, str]], seconds: float) -> tuple[set[int], set[int]]:
        """
        Extend leases; the ids that were extended, and those that are lost for certain.
        """
        renewed: set[int] = set()
        lost: set[int] = set()
        for start in range(0, len(leases), GROUP):
            part = leases[start : start + GROUP]
            renewed |= self.write(
                lambda connection, part=part: renew(connection, self._tables, part, seconds),  # type: ignore[misc]
                lock_wait=seconds / 6,
            )
            rest = [lease for lease in part if lease[0] not in renewed]
            if rest:
                lost |= self.read(lambda connection, rest=rest: lost_leases(connection, self._tables, rest))  # type: ignore[misc]
        return renewed, lost

    def _remembered_lanes(self, queues: Sequence[str]) -> list[Lane]:
        looked, lanes = self._lanes.get(tuple(queues), (0.0, []))
        age = time.monotonic() - looked
        return [lane for lane in lanes if lane.due_in <= age] if age < LANES_REMEMBERED else []

    def _look_for_lanes(self, queues: Sequence[str]) -> list[Lane]:
        lanes = self.read(lambda connection: find_lanes(connection, self._tables, queues))
        if len(self._lanes) >= SELECTIONS_REMEMBERED:  # somebody asks for other queues each time
            self._lanes.clear()
        self._lanes[tuple(queues)] = (time.monotonic(), lanes)
        return lanes

    def _claim_from(self, lanes: Sequence[Lane], asked: _Claim) -> None:
        """
        Take what may be taken. Many jobs that must not run are moved away for a while, a transaction a part.
        """
        left = [lane for lane in lanes if lane.due_in <= LANES_REMEMBERED]
        until = time.monotonic() + CLEARING_TIME
        while left:
            terms = asked.terms()
            try:
                found, left = self.write(
                    lambda connection, left=left, terms=terms: self._claim_lanes(connection, left, asked, terms),  # type: ignore[misc]
                    lock_wait=asked.lease / 6,
                )
            except DBAPIError as error:
                if trouble_of(error) is Trouble.LOST:
                    self._unanswered.append(_Unanswered(terms, left, time.monotonic() + UNANSWERED))
                raise
            asked.taken.extend(found)
            if asked.taken or time.monotonic() > until:
                return

    def _claim_lanes(
        self, connection: sa.Connection, lanes: Sequence[Lane], asked: _Claim, terms: Lease
    ) -> tuple[list[_Taken], list[Lane]]:
        """
        What was taken, and the lanes whose jobs that must not run were more than one transaction should move.
        """
        company = asked.company_now
        taken: list[_Taken] = []
        unfinished: list[Lane] = []
        for lane in lanes:
            now = max(asked.limit - len(asked.taken) - len(taken), 0)
            precedence = (asked.ranks[lane.queue], -lane.priority)
            found, company, finished = self._claim_lane(connection, lane, now, terms, company)
            taken += (_Taken(precedence, row.due, row.id, delivery) for row, delivery in found)
            later = asked.wanted - len(taken)
            if finished and len(found) == now and later:
                found, company, finished = self._claim_lane(connection, lane, later, terms, company, ahead=True)
                taken += (_Taken(precedence, row.due, row.id, delivery) for row, delivery in found)
            if not finished:
                unfinished.append(lane)
        return taken, unfinished

    def _claim_lane(
        self, connection: sa.Connection, lane: Lane, limit: int, lease: Lease, company: Company, *, ahead: bool = False
    ) -> tuple[list[tuple[ClaimedRow, Delivery]], Company, bool]:
        taken: list[tuple[ClaimedRow, Delivery]] = []
        moved = rounds = 0
        while wanted := min(limit - len(taken), MOST_AT_ONCE):
            if rounds == DOOMED_ROUNDS or moved > GROUP:
                return taken, company, False
            rows = claim_lane(connection, self._tables, lane, wanted, lease, company=company, ahead=ahead)
            found, doomed = _sort(rows, lane.queue, lease)
            if doomed:
                self._move(connection, doomed, lease)
            taken += found
            company_before, company = company, company_of(((True, row.last_attempt) for row in rows if row.comes_back), company)
            # Rows that were passed over for the company's sake, or moved away, may hide others behind them.
            if not rows or (len(rows) < wanted and company is company_before and not doomed):
                break
            moved, rounds = moved + len(doomed), rounds + 1
        return taken, company, True

    def _move(self, connection: sa.Connection, doomed: Sequence[tuple[ClaimedRow, Failure]], lease: Lease) -> None:
        ids = [row.id for row, _ in doomed]
        errors = last_errors(connection, self._tables, ids)
        # An id that has come twice, after somebody has reset the counter: an error here would stop every worker in turn.
        there = failed_already(connection, self._tables, ids)
        moves = [_move_of(row, _with_last_error(failure, errors.get(row.id)), lease) for row, failure in doomed if row.id not in there]
        moved = move_to_failed(connection, self._tables, moves)
        # The others stay: a duplicate push holds their key. Under our lease they would look like jobs that we died of.
        put_back(connection, self._tables, (row for row, _ in doomed if row.id not in moved), BLOCKED_PAUSE)


class _Taken(NamedTuple):
    """
    A delivery behind what decides its place among others.
    """

    precedence: tuple[int, int]
    due: Any
    id: int
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """
    A claim whose connection was lost: its COMMIT may have been applied.
    """

    terms: Lease
    lanes: Sequence[Lane]
    until: float


@dataclass(frozen=True, slots=True)
class _Claim:
    """
    A claim under way: what was asked for, and what it has got.
    """

    limit: int
    ahead: int
    lease: float
    worker: str
    company: Company
    not_repeated: frozenset[str]
    ranks: dict[str, int]
    """The place of each queue among those that were named."""
    taken: list[_Taken] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        return self.limit + self.ahead - len(self.taken)

    @property
    def company_now(self) -> Company:
        back = (one.delivery for one in self.taken if one.delivery.reclaimed_from is not None)
        return company_of(((True, delivery.last_attempt) for delivery in back), self.company)

    def terms(self) -> Lease:
        return Lease(secrets.token_hex(16), self.worker, self.lease, self.not_repeated)


def _sort(
    rows: Sequence[ClaimedRow], queue: str, lease: Lease
) -> tuple[list[tuple[ClaimedRow, Delivery]], list[tuple[ClaimedRow, Failure]]]:
    """
    What is to be run, and what is to be moved to the failed table.
    """
    until = moment_of(rows[0].lease_until) if rows else None  # one statement, one moment
    found: list[tuple[ClaimedRow, Delivery]] = []
    doomed: list[tuple[ClaimedRow, Failure]] = []
    for row in rows:
        if row.doom is None:
            try:
                found.append((row, _delivery(row, queue, lease, until)))
            except ArgumentError as error:
                doomed.append((row, Failure(Reason.DAMAGED, None, f"the row is damaged: {error}")))
        else:
            doomed.append((row, _why(row)))
    return found, doomed


def _why(row: ClaimedRow) -> Failure:
    """
    The reason why a row is not to be run.
    """
    match row.doom:
        case "damaged":
            text = f"the row is damaged: attempts is {row.attempts} and max_attempts is {row.max_attempts}"
            return Failure(Reason.DAMAGED, None, text)
        case "deadline":
            return Failure(Reason.DEADLINE_EXCEEDED, None, f"the deadline passed before attempt {row.attempts + 1} could start")
        case "exhausted" if row.reclaimed:
            text = f"worker {row.reserved_by} died or lost its lease during attempt {row.attempts} of {row.max_attempts}"
            return Failure(Reason.WORKER_LOST, None, text)
        case "exhausted":
            return Failure(Reason.MAX_ATTEMPTS_EXCEEDED, None, f"all {row.max_attempts} attempts are used")
        case "lost":
            text = f"worker {row.reserved_by} died or lost its lease during attempt {row.attempts}, and this job is not to be repeated then"
            return Failure(Reason.WORKER_LOST, None, text)
    raise AssertionError(row.doom)


def _with_last_error(failure: Failure, error: str | None) -> Failure:
    """
    Add what the last attempt that could still speak said.
    """
    return replace(failure, message=f"{failure.message}; the last error was: {error}") if error else failure


def _move_of(row: ClaimedRow, failure: Failure, lease: Lease) -> Settlement:
    worker = row.reserved_by if failure.reason is Reason.WORKER_LOST else lease.worker
    return Settlement(row.id, lease.token, row.unique_key is not None, Move(failure, worker, attempts=row.attempts))


def _delivery(row: ClaimedRow, queue: str, lease: Lease, until: Any) -> Delivery:
    return Delivery(
        id=row.id,
        name=row.name,
        queue=queue,
        payload=from_json(row.payload),
        attempt=row.attempts + 1,
        max_attempts=row.max_attempts,
        token=lease.token,
        lease_until=until,
        headers=_headers(row.headers),
        deadline=moment_of(row.deadline),
        unique=row.unique_key is not None,
        reclaimed_from=None if row.reserved_until is None else row.reserved_by or "an unknown worker",
    )


def _headers(text: Any) -> dict[str, str]:
    if text is None:
        return {}
    try:
        headers = from_json(text)
    except ArgumentError:
        headers = {"": None}
    if not all(isinstance(value, str) for value in headers.values()):
        raise ArgumentError("headers are not a mapping of text to text")
    return {name: str(value) for name, value in headers.items()}


def host_name() -> str:
    """
    Host and process, for people who look at rows: who holds a job. Ownership rests on tokens, never on this name.
    """
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:120]
    return f"{host}:{os.getpid()}"
