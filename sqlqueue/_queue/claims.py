"""
One claim: what is asked for, the transaction that takes it, and what is made of the rows.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from .._arguments import from_json
from .._dialects import moment_of
from .._driver.claim import ClaimedRow, Company, Lease, claim_lane, claim_plain, company_of, put_back
from .._driver.keys import let_go
from .._driver.lanes import Lane
from .._driver.settle import GROUP, Move, Settlement, failed_already, last_errors, move_to_failed
from .._events import JobFailed
from .._failure import Failure, Reason
from .._job import Delivery
from .._tables import Tables
from ..errors import ArgumentError
from .listeners import Listeners
from .looks import Look
from .telling import said_by

__all__ = ["MOST_AT_ONCE", "UNKNOWN_SIZE", "Claim", "Doomed", "Taking", "number_that_fit", "tell_failed"]

Doomed = list[tuple[str, ClaimedRow, Failure]]
"""What must not run, after the name of its queue, and why."""

MOST_AT_ONCE = 1000
MOST_BYTES = 16 * 2**20  # of payloads that wait in memory
UNKNOWN_SIZE = 2.0**20  # bytes of a payload, before any has been seen
DOOMED_ROUNDS, MOST_DOOMED = 20, 500
BLOCKED_PAUSE, LOCKED_KEY_PAUSE = 1.0, 0.1


def number_that_fit(size: float) -> int:
    """
    How many payloads of so many bytes there is memory for.
    """
    return int(MOST_BYTES / max(size, 1.0))


class _Taken(NamedTuple):
    """
    A delivery behind what decides its place among others.
    """

    precedence: tuple[int, int]
    due: Any
    id: int
    delivery: Delivery


@dataclass(slots=True)
class Claim:
    """
    What was asked for, and what it has got so far.
    """

    queues: Sequence[str]
    limit: int
    ahead: int
    lease: float
    worker: str
    company: Company
    not_repeated: frozenset[str]
    expected_size: float = UNKNOWN_SIZE
    """Bytes that a payload may have as far as is known before any is taken."""
    taken: list[_Taken] = field(default_factory=list)
    size: int = 0
    """Bytes of the payloads that were taken."""

    @property
    def wanted(self) -> int:
        """
        How many more may be taken.
        """
        return max(self.room(), 0)

    def room(self, number: int = 0, size: int = 0) -> int:
        """
        How many more may be taken beside so many of this size. As many ahead as there is memory for, should they be alike.
        """
        number, size = number + len(self.taken), size + self.size
        fit = number_that_fit(size / number if number else self.expected_size)
        return max(self.limit, min(self.limit + self.ahead, fit)) - number

    @property
    def wanted_now(self) -> int:
        """
        How many of them start at once.
        """
        return max(self.limit - len(self.taken), 0)

    def terms(self) -> Lease:
        """
        A lease with a token of its own.
        """
        return Lease(secrets.token_hex(16), self.worker, self.lease, self.not_repeated)

    def deliveries(self) -> list[Delivery]:
        """
        In order of precedence.
        """
        return [one.delivery for one in sorted(self.taken)]

    def take(self, taking: Taking) -> None:
        """
        Note what a transaction has taken, now that it is committed.
        """
        self.taken += taking.taken
        self.size += taking.size
        self.company = taking.company
        for lane, ahead, due in taking.passed:
            taking.look.advance(lane, ahead, due)


class Taking:
    """
    One transaction of a claim.
    """

    def __init__(self, connection: sa.Connection, tables: Tables, look: Look, claim: Claim, terms: Lease) -> None:
        self.look = look
        self.company = claim.company
        self.taken: list[_Taken] = []
        self.size = 0
        self.passed: list[tuple[Lane, bool, Any]] = []
        """Lanes of which everything that was due before this moment has been taken."""
        self.unfinished: list[Lane] = []
        """Lanes whose jobs that must not run are more than one transaction should move."""
        self.failed: Doomed = []
        """What has been moved to the failed table."""
        self._connection = connection
        self._tables = tables
        self._claim = claim
        self._terms = terms

    def take_from(self, lanes: Sequence[Lane]) -> None:
        """
        Take what may be taken, in order of precedence.
        """
        for lane in lanes:
            finished = self._take_from(lane, ahead=False)
            if finished and not self._wanted(ahead=False):
                finished = self._take_from(lane, ahead=True)
            if not finished:
                self.unfinished.append(lane)

    def _wanted(self, *, ahead: bool) -> int:
        claim = self._claim
        wanted = claim.room(len(self.taken), self.size) if ahead else claim.wanted_now - len(self.taken)
        return max(0, min(wanted, MOST_AT_ONCE))

    def _take_from(self, lane: Lane, *, ahead: bool) -> bool:
        """
        Whether that is all that may be taken now.
        """
        moved = rounds = 0
        begin = self.look.beginning(lane, ahead)
        while wanted := self._wanted(ahead=ahead):
            if rounds == DOOMED_ROUNDS or moved > MOST_DOOMED:
                return False
            found = claim_lane(self._connection, self._tables, lane, wanted, self._terms, begin=begin, company=self.company, ahead=ahead)
            rows = self._let_go_of_keys(found)
            doomed = self._sort(lane, rows)
            if doomed:
                self.move(doomed)
            before = self.company
            if not ahead:  # where none that comes back from a dead worker is
                self.company = company_of(((True, row.last_attempt) for row in rows if row.comes_back), before)
            if found and self.company is Company.NONE:  # otherwise some may have been passed over for the company's sake
                begin = max(row.due for row in found)
                self.passed.append((lane, ahead, begin))
            # Rows that were passed over, put back, or moved away, may hide others behind them.
            if not found or (len(rows) < wanted and self.company is before and not doomed and len(rows) == len(found)):
                break
            moved, rounds = moved + len(doomed), rounds + 1
        return True

    def take_plain_from(self, lane: Lane) -> Doomed:
        """
        Take what is easily taken, in one statement; what has to be moved to the failed table is returned.
        """
        return self._sort(lane, claim_plain(self._connection, self._tables, lane, self._wanted(ahead=False), self._terms))

    def move(self, doomed: Doomed) -> None:
        """
        Move what must not run to the failed table.
        """
        for start in range(0, len(doomed), GROUP):
            self._move_part(doomed[start : start + GROUP])

    def _move_part(self, doomed: Doomed) -> None:
        connection, tables = self._connection, self._tables
        ids = [row.id for _, row, _ in doomed]
        errors = last_errors(connection, tables, ids)
        # An id that has come twice, after somebody has reset the counter: an error here would stop every worker in turn.
        there = failed_already(connection, tables, ids)
        moving = [(queue, row, _with_last_error(failure, errors.get(row.id))) for queue, row, failure in doomed if row.id not in there]
        moved = move_to_failed(connection, tables, [_move_of(row, failure, self._terms) for _, row, failure in moving])
        self.failed += [one for one in moving if one[1].id in moved]
        # The others stay: a duplicate push holds their key. Under our lease they would look like jobs that we died of.
        put_back(connection, tables, (row for _, row, _ in doomed if row.id not in moved), BLOCKED_PAUSE)

    def _let_go_of_keys(self, rows: Sequence[ClaimedRow]) -> Sequence[ClaimedRow]:
        """
        Free the keys that are held until a job starts, and leave those jobs that must not start yet.
        """
        keyed = [(row.id, row.unique_key) for row in rows if row.unique_key is not None and row.doom is None]
        if not keyed:
            return rows
        free, blocked = let_go(self._connection, self._tables, keyed)
        if blocked:
            put_back(self._connection, self._tables, (row for row in rows if row.id in blocked), LOCKED_KEY_PAUSE)
            self.look.back_at = time.monotonic() + LOCKED_KEY_PAUSE
        return [row._replace(unique_key=None) if row.id in free else row for row in rows if row.id not in blocked]

    def _sort(self, lane: Lane, rows: Sequence[ClaimedRow]) -> Doomed:
        """
        Keep what is to be run; what is to be moved to the failed table is returned.
        """
        doomed: Doomed = []
        precedence = (self._claim.queues.index(lane.queue), -lane.priority)
        until = moment_of(rows[0].lease_until) if rows else None  # one statement, one moment
        for row in rows:
            if row.doom is None:
                try:
                    delivery = _delivery(row, lane.queue, self._terms.token, until)
                except ArgumentError as error:
                    doomed.append((lane.queue, row, Failure(Reason.DAMAGED, None, f"the row is damaged: {error}")))
                else:
                    self.taken.append(_Taken(precedence, row.due, row.id, delivery))
                    self.size += len(row.payload)
            else:
                doomed.append((lane.queue, row, _why(row)))
        return doomed


def tell_failed(listeners: Listeners, failed: Doomed, worker: str) -> None:
    """
    Tell what a claim has moved to the failed table, once that is committed.
    """
    if not listeners.hear(JobFailed):
        return
    for queue, row, failure in failed:
        try:
            headers = _headers(row.headers)
        except ArgumentError:
            headers = {}
        about: dict[str, Any] = {"id": row.id, "name": row.name, "queue": queue, "headers": headers, "worker": worker}
        about |= {"attempt": row.attempts, "max_attempts": row.max_attempts, "reason": failure.reason}
        listeners.tell(JobFailed(**about, **said_by(failure)))


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


def _delivery(row: ClaimedRow, queue: str, token: str, until: Any) -> Delivery:
    return Delivery(
        id=row.id,
        name=row.name,
        queue=queue,
        payload=from_json(row.payload),
        attempt=row.attempts + 1,
        max_attempts=row.max_attempts,
        token=token,
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
