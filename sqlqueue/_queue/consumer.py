"""
The consumer's operations: short transactions on the queue's own connections.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DBAPIError

from .._dialects import Trouble, server_of, trouble_of
from .._driver.claim import Company, Lease, taken_under
from .._driver.keys import LONGEST_AGO, delete_expired, expired_keys
from .._driver.lanes import Lane, announced_lane, find_lanes
from .._driver.settle import GROUP, Results, Return, Settlement, lost_leases, renew, settle
from .._job import Delivery
from .._tables import Tables
from .claims import UNKNOWN_SIZE, Claim, Doomed, Taking, number_that_fit, tell_failed
from .listeners import Listeners
from .looks import Look, Looks
from .transactions import Transactions

__all__ = ["Consumer", "host_name"]

CLEARING_TIME = 1.0
SWEEPING_LOCK_WAIT = 1.0
UNANSWERED = 5.0  # how long a server may be busy with a COMMIT whose connection is gone


class Consumer(Transactions):
    """
    Claims, settles and renews.
    """

    def __init__(self, source: URL | Engine, tables: Tables, listeners: Listeners | None = None) -> None:
        super().__init__(source)
        self._tables = tables
        self._listeners = listeners or Listeners()
        self._looks = Looks()
        self._unanswered: deque[_Unanswered] = deque()
        self._size: float | None = None  # of a payload lately, in bytes

    @property
    def most_in_memory(self) -> int:
        """
        How many payloads like the last ones there is memory for.
        """
        return number_that_fit(self._size or UNKNOWN_SIZE)

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
        claim = Claim(queues, limit, ahead, lease, worker, company, not_repeated, self._size or UNKNOWN_SIZE)
        try:
            if look := self._looks.fresh(queues):
                self._claim_from(look, claim)
            if claim.wanted:
                # Fewer than asked for: there may be lanes that came up since, and rows before where the others begin.
                self._claim_from(None, claim)
        except Exception:
            # What was taken before is ours, and nobody else would run it. The trouble will show at the next claim.
            if not claim.taken:
                raise
        self._note_size(claim)
        return claim.deliveries()

    def claim_announced(
        self, connection: sa.Connection, lane: tuple[str, int, str], limit: int, lease: float, worker: str
    ) -> list[Delivery]:
        """
        Take up to `limit` jobs of a lane in which a push has announced itself, in one statement on a connection that is in
        autocommit. What is not easily taken is left to `claim`.
        """
        at = announced_lane(*lane)
        claim = Claim((at.queue,), limit, 0, lease, worker, Company.NONE, frozenset())
        terms = claim.terms()
        taking = Taking(connection, self._tables, Look(time.monotonic(), 0.0, [at]), claim, terms)
        try:
            doomed = taking.take_plain_from(at)
        except Exception as error:
            trouble = trouble_of(error) if isinstance(error, DBAPIError) else Trouble.LOST
            if trouble is Trouble.LOST:
                self._unanswered.append(_Unanswered(terms, [at], time.monotonic() + UNANSWERED))
            if trouble is not Trouble.CONFLICT:
                raise
            return []
        claim.take(taking)
        if doomed:
            # What was taken beside them is ours and has to run; they are found again when their lease ends.
            with suppress(DBAPIError):
                self._move(doomed, taking.look, claim, terms)
        return claim.deliveries()

    def _note_size(self, claim: Claim) -> None:
        if claim.taken:
            size = claim.size / len(claim.taken)
            # Large ones that were seen lately may come again.
            self._size = size if self._size is None else max(size, self._size / 2)

    def _move(self, doomed: Doomed, look: Look, claim: Claim, terms: Lease) -> None:
        """
        Move what must not run to the failed table, in a transaction of its own.
        """

        def move(connection: sa.Connection) -> Taking:
            taking = Taking(connection, self._tables, look, claim, terms)
            taking.move(doomed)
            return taking

        tell_failed(self._listeners, self.write(move).failed, claim.worker)

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
        lanes = self.read(lambda connection: self._look(queues, connection)).lanes
        return min((lane.due_in for lane in lanes), default=None)

    def soonest(self, queues: Sequence[str]) -> float | None:
        """
        Seconds until the next job may be claimed as far as the last look knows, without asking the database.
        """
        look = self._looks.last(queues)
        if look is None:
            return None
        waits = [lane.due_in - look.age for lane in look.lanes if lane.due_in > 0]
        if (back_in := look.back_at - time.monotonic()) > 0:
            waits.append(back_in)
        return min(waits, default=None)

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

    def sweep_keys(self, since: datetime = LONGEST_AGO) -> datetime:
        """
        Delete some keys whose time was over after `since` and that no job holds; since when to look next time.

        Nothing is written, and nobody's writing waits for us, where there are none.
        """
        keys, following = self.read(lambda connection: expired_keys(connection, self._tables, since))
        if keys:
            self.write(lambda connection: delete_expired(connection, self._tables, keys), lock_wait=SWEEPING_LOCK_WAIT)
        return following

    def _look(self, queues: Sequence[str], connection: sa.Connection) -> Look:
        began = time.monotonic()
        lanes = find_lanes(connection, self._tables, queues)
        look = Look(began, time.monotonic() - began, lanes)
        self._looks.note(queues, look)
        return look

    def _claim_from(self, look: Look | None, claim: Claim) -> None:
        """
        Take what may be taken. Many jobs that must not run are moved away for a while, a transaction a part.
        """
        if look is None and not server_of(self.engine.dialect).row_locks:
            # Where a claim locks out everybody else, only when there is something to be claimed.
            look = self.read(lambda connection: self._look(claim.queues, connection))
        until = time.monotonic() + CLEARING_TIME
        lanes = None if look is None else look.ready()
        while lanes is None or lanes:
            terms = claim.terms()
            try:
                taking = self.write(partial(self._take, look, lanes, claim, terms), lock_wait=claim.lease / 6)
            except DBAPIError as error:
                if trouble_of(error) is Trouble.LOST:
                    known = self._looks.last(claim.queues)
                    self._unanswered.append(_Unanswered(terms, known.lanes if known else (), time.monotonic() + UNANSWERED))
                raise
            claim.take(taking)
            tell_failed(self._listeners, taking.failed, claim.worker)
            look, lanes = taking.look, taking.unfinished
            if claim.taken or time.monotonic() > until:
                return

    def _take(self, look: Look | None, lanes: Sequence[Lane] | None, claim: Claim, terms: Lease, connection: sa.Connection) -> Taking:
        """
        The transaction of a claim, after a look if there has been none.
        """
        look = look or self._look(claim.queues, connection)
        taking = Taking(connection, self._tables, look, claim, terms)
        taking.take_from(look.ready() if lanes is None else lanes)
        return taking


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """
    A claim whose connection was lost: its COMMIT may have been applied.
    """

    terms: Lease
    lanes: Sequence[Lane]
    until: float


def host_name() -> str:
    """
    Host and process, for people who look at rows: who holds a job. Ownership rests on tokens, never on this name.
    """
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:120]
    return f"{host}:{os.getpid()}"
