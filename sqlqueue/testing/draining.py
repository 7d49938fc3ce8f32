"""
`queue.drain()`: a worker without threads, in the caller's own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

import sqlalchemy as sa

from .._driver.claim import Company
from .._driver.lanes import find_lanes
from .._driver.settle import Results, renew, settle
from .._driver.testing import failed_under, queue_names
from .._executor import Ended, Status, run_delivery
from .._job import Delivery
from .._queue import Queue, check_lease, check_queues
from .._queue.claims import Claim, Doomed, Taking, tell_failed
from .._queue.consumer import host_name
from .._queue.keys import KeyStore
from .._queue.looks import Look
from .._queue.sessions import check_async
from .._worker.shift import Held
from .._worker.summary import LOST
from .._worker.telling import tell_attempted, tell_ended, tell_processing
from ..errors import LockTimeout, OptionError
from .deaths import dies_now
from .records import Arguments, JobRun, arguments_of
from .steps import Steps, Target, steps_on

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from .._queue.sessions import AnyAsyncSession

__all__ = ["Drained", "call_async", "drain", "drain_async", "job_run", "run_here"]

T = TypeVar("T")

DIED = "died"
ENDLESS = 10_000


class Drained(Sequence[JobRun]):
    """
    What a drain has done: the runs in order, and jobs that a claim moved to the failed table without running them.
    """

    def __init__(self) -> None:
        self._runs: list[JobRun] = []

    @overload
    def __getitem__(self, place: int) -> JobRun: ...
    @overload
    def __getitem__(self, place: slice) -> list[JobRun]: ...
    def __getitem__(self, place: int | slice) -> JobRun | list[JobRun]:
        return self._runs[place]

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items()) or "nothing was due"
        return f"<Drained: {counts}>"

    @property
    def counts(self) -> Counter[str]:
        """
        How many there were of each status: `drained.counts["done"]`.
        """
        return Counter(str(run.status) for run in self._runs)

    def assert_all_done(self) -> None:
        """
        Every job was done, at least one. Otherwise the error of the first that raised is the cause of the AssertionError.
        """
        __tracebackhide__ = True
        others = [run for run in self._runs if run.status != Status.DONE]
        if others:
            error = next((run.error for run in others if run.error is not None), None)
            raise AssertionError("not all jobs were done:" + "".join(f"\n  {run}" for run in others)) from error
        if not self._runs:
            raise AssertionError("no job was done: nothing was due")

    def add(self, run: JobRun) -> None:
        self._runs.append(run)


def drain(
    queue: Queue,
    on: Target = None,
    /,
    *,
    queues: str | Sequence[str] | None = None,
    limit: int | None = None,
    lease: float | timedelta | None = None,
) -> Drained:
    """
    What `Queue.drain` does.
    """
    names = None if queues is None else check_queues(queues)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise OptionError("limit: a whole number of at least 1")
    length = check_lease(lease)
    with steps_on(queue, on, "drain") as steps:
        drainer = _Drainer(queue, steps, names, length)
        while drainer.work_one():
            if drainer.worked == limit:
                break
            if limit is None and drainer.worked > ENDLESS:
                raise RuntimeError(f"after {ENDLESS:,} deliveries there is still a job due: do they push or release themselves?")
    return drainer.drained


async def drain_async(queue: Queue, on: AsyncEngine | AnyAsyncSession, /, **options: Any) -> Drained:
    """
    What `Queue.drain_async` does.
    """
    return await call_async(on, "drain", lambda sync: drain(queue, sync, **options))


async def call_async(on: Any, method: str, function: Callable[[Any], T]) -> T:
    """
    Call `function` with what is synchronous inside an AsyncEngine, AsyncSession or AsyncConnection.
    """
    from sqlalchemy.ext.asyncio import AsyncEngine

    if isinstance(on, AsyncEngine):
        async with on.connect() as connection:  # only for its run_sync: the engine opens others beside it
            return await connection.run_sync(lambda sync: function(sync.engine))
    found: T = await check_async(on, method).run_sync(function)
    return found


class _Drainer:
    """
    Claims, runs and settles one job after another.
    """

    def __init__(self, queue: Queue, steps: Steps, queues: Sequence[str] | None, lease: float) -> None:
        self.drained = Drained()
        self.worked = 0
        self._queue = queue
        self._steps = steps
        self._queues = queues
        self._lease = lease
        self._store = KeyStore(queue.tables, steps.run, steps.run)

    def work_one(self) -> bool:
        """
        Work the first job that is due. False when there is none, or when the worker has died of it.
        """
        while True:
            deliveries, doomed, failed, finished = self._steps.run(self._claim)
            tell_failed(self._queue.listeners, doomed, host_name())
            for run in failed:
                self.drained.add(run)
            if deliveries:
                self.worked += 1
                return self._work(deliveries[0])
            if finished:
                return False

    def _claim(self, connection: sa.Connection) -> tuple[list[Delivery], Doomed, list[JobRun], bool]:
        """
        At most one job; those that the claim has failed, as it and as a test sees them; and whether there is nothing else to be claimed.
        """
        queue, tables = self._queue, self._queue.tables
        queues = self._queues or queue_names(connection, tables)
        if not queues:
            return [], [], [], True
        look = Look(time.monotonic(), 0.0, find_lanes(connection, tables, queues))
        claim = Claim(queues, 1, 0, self._lease, host_name(), Company.NONE, queue.registry.not_repeated())
        terms = claim.terms()
        taking = Taking(connection, tables, look, claim, terms)
        taking.take_from(look.ready())
        claim.take(taking)
        failed = [
            JobRun(row.id, row.name, row.queue, row.attempts, Arguments({}), Status.FAILED, row.error_message or "", None, row.reason)
            for row in failed_under(connection, tables, terms.token)
        ]
        return claim.deliveries(), taking.failed, failed, not taking.unfinished

    def _work(self, delivery: Delivery) -> bool:
        queue = self._queue
        held = Held(delivery, time.monotonic())
        if dies_now(queue, "before_run", delivery):
            self.drained.add(job_run(queue, delivery, DIED, "before it was run"))
            return False
        ended, error = run_here(queue, held, self._renew, self._store)
        if dies_now(queue, "before_settle", delivery):
            self.drained.add(job_run(queue, delivery, DIED, f"before its end was written down: {ended.status}", error))
            return False
        if ended.committed:
            results = Results(settled={delivery.id})
        else:
            results = self._steps.run(lambda connection: settle(connection, queue.tables, [held.settlement(ended)]))
        self.drained.add(self._settled(delivery, ended, error, results))
        tell_ended(queue.listeners, delivery, host_name(), ended, lost=bool(results.stale))
        return True

    def _settled(self, delivery: Delivery, ended: Ended, error: BaseException | None, results: Results) -> JobRun:
        if results.blocked:
            raise LockTimeout(f"job {delivery.id} cannot be settled: another transaction holds its row or its unique key")
        if results.stale:
            return job_run(self._queue, delivery, LOST, f"its lease had ended: {ended.status}", error)
        return job_run(self._queue, delivery, ended.status, ended.note, error)

    def _renew(self, lease: tuple[int, str]) -> bool:
        return bool(self._steps.run(lambda connection: renew(connection, self._queue.tables, [lease], self._lease)))


def run_here(
    queue: Queue, held: Held, renew: Callable[[tuple[int, str]], bool], store: KeyStore | None = None
) -> tuple[Ended, BaseException | None]:
    """
    Run a delivery as a worker's slot does; how it ended, and what the handler raised if that was a failure.

    Args:
        store: where middleware keeps what all workers have to know. Without one nothing is written, and it lets everything pass.
    """
    raised: list[BaseException] = []
    context = held.start(renew)
    context._store = store
    tell_processing(queue.listeners, held.delivery, host_name())
    ended = run_delivery(queue, held.delivery, context, host_name(), caught=raised.append, own_store=False)
    tell_attempted(queue.listeners, held.delivery, host_name(), ended, time.monotonic() - (held.started or 0.0))
    failed = ended.status in (Status.FAILED, Status.RETRYING)
    return ended, raised[-1] if raised and failed else None


def job_run(queue: Queue, delivery: Delivery, status: str, note: str = "", error: BaseException | None = None) -> JobRun:
    """
    What a test sees of a delivery.
    """
    arguments = arguments_of(queue.registry, delivery.name, delivery.payload)
    return JobRun(delivery.id, delivery.name, delivery.queue, delivery.attempt, arguments, str(status), note, error)
