"""
The queue against a model of it in memory: any order of operations leaves the tables that the promise describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import Engine

from sqlqueue import Delivery, Pushed, Queue, StaleDelivery
from sqlqueue._dialects import after, now
from sqlqueue._queue.looks import Looks

HOUR = 3600
QUEUES = ("high", "low")
KEYS = ("a", "b")
HOLDS: tuple[dict[str, Any], ...] = (
    {},
    {"unique_until": "started"},
    {"on_conflict": "replace"},
    {"unique_until": "started", "on_conflict": "replace"},
)
SOME = 3 + len(KEYS)
SETTINGS = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),  # what fails is short as it is
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass(slots=True)
class Job:
    """A row of the jobs table, as the promise describes it."""

    id: int
    queue: str
    priority: int
    max_attempts: int
    key: str | None
    due: bool
    attempts: int = 0
    token: str | None = None
    """Of the last claim; it stays after a release."""
    held: bool = False
    ended: bool = False
    """The lease is over."""

    @property
    def claimable(self) -> bool:
        return self.ended if self.held else self.due

    @property
    def exhausted(self) -> bool:
        return self.attempts >= self.max_attempts

    @property
    def last_attempt(self) -> bool:
        return self.attempts + 1 >= self.max_attempts


@dataclass(slots=True)
class FailedJob:
    """A row of the failed table."""

    job: Job
    reason: str


@dataclass(slots=True)
class Model:
    """All tables. A job's own `key` says that it holds it, or has held it until another was pushed behind it."""

    jobs: dict[int, Job] = field(default_factory=dict)
    failed: dict[int, FailedJob] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    until_started: set[str] = field(default_factory=set)
    """Keys that are free when their jobs start."""

    def holder(self, key: str | None) -> Job | None:
        return self.jobs[self.keys[key]] if key is not None and key in self.keys else None

    def hold(self, job: Job, until_started: bool = False) -> None:
        self.jobs[job.id] = job
        if job.key is not None:
            self.keys[job.key] = job.id
            (self.until_started.add if until_started else self.until_started.discard)(job.key)

    def leave(self, id: int) -> Job:
        job = self.jobs.pop(id)
        if job.key is not None and self.keys.get(job.key) == id:
            del self.keys[job.key]
        return job

    def start(self, job: Job, token: str) -> None:
        job.attempts, job.token, job.held, job.ended = job.attempts + 1, token, True, False
        if job.key is not None and job.key in self.until_started and self.keys.get(job.key) == job.id:
            del self.keys[job.key]
            job.key = None

    def held_by(self, delivery: Delivery) -> Job | None:
        job = self.jobs.get(delivery.id)
        return job if job is not None and job.held and job.token == delivery.token else None

    def fail(self, id: int, reason: str) -> None:
        self.failed[id] = FailedJob(self.leave(id), reason)

    def retry(self, id: int) -> None:
        old = self.failed.pop(id).job
        key = old.key if self.holder(old.key) is None else None
        self.hold(Job(id, old.queue, old.priority, old.max_attempts, key, due=True))


class QueueMachine(RuleBasedStateMachine):
    """Does the same to the queue and to the model. Time passes only where a rule says so: everything else lasts for an hour."""

    def __init__(self, queue: Queue, engine: Engine) -> None:
        super().__init__()
        self.queue = queue
        self.model = Model()
        self.deliveries: list[Delivery] = []
        self.connection = engine.connect()
        self.job = queue.job(name="model.job")(work)
        for table in queue.tables.all:
            self.connection.execute(table.delete())

    def teardown(self) -> None:
        self.connection.close()

    # --- producers

    @initialize()
    def begin_with_some(self) -> None:
        for number, key in enumerate((None, None, None, *KEYS)):
            self.push(queue=QUEUES[number % 2], priority=0, max_attempts=1 + number % 3, key=key, hold={}, delay=0, commit=True)

    @rule(
        queue=st.sampled_from(QUEUES),
        priority=st.sampled_from((-1, 0, 7)),
        max_attempts=st.integers(1, 3),
        key=st.sampled_from((None, *KEYS)),
        hold=st.sampled_from(HOLDS),
        delay=st.sampled_from((0, 0, HOUR)),
        commit=st.booleans() | st.just(True),
    )
    def push(
        self, *, queue: str, priority: int, max_attempts: int, key: str | None, hold: dict[str, Any], delay: int, commit: bool
    ) -> None:
        options = {"queue": queue, "priority": priority, "max_attempts": max_attempts, "delay": delay}
        job = self.job.options(**options, **({} if key is None else {"unique": key, **hold}))  # type: ignore[arg-type]
        pushed = self._push(job.push, commit)
        holder, replaces = self.model.holder(key), hold.get("on_conflict") == "replace"
        assert pushed.created == (holder is None or (replaces and holder.held))
        if not pushed.created:
            assert holder is not None
            assert pushed.id == holder.id
        if commit and (pushed.created or replaces):
            new = Job(pushed.id, queue, priority, max_attempts, key, due=not delay, token=None if pushed.created else holder.token)  # type: ignore[union-attr]
            self.model.hold(new, hold.get("unique_until") == "started")

    def _push(self, push: Callable[..., Pushed], commit: bool) -> Pushed:
        with self.queue.begin() as session:
            pushed = push(session)
            if not commit:
                session.rollback()
        return pushed

    # --- claims

    @rule(queues=st.permutations(QUEUES) | st.sampled_from([[name] for name in QUEUES]), limit=st.integers(1, 4))
    def claim(self, queues: list[str], limit: int) -> None:
        self.queue.consumer._looks = Looks()  # lanes may be remembered for a second, in which a new one is not seen
        order = self._order(queues)
        claimed = self.queue.claim(queues, limit=limit, lease=HOUR)
        self._check_claim(claimed, order, limit)
        self._expect_exhausted_to_fail(order, everything=len(claimed) < limit)
        for delivery in claimed:
            job = self.model.jobs[delivery.id]
            assert (delivery.attempt, delivery.max_attempts, delivery.queue) == (job.attempts + 1, job.max_attempts, job.queue)
            assert (delivery.reclaimed_from is not None) == job.held
            self.model.start(job, delivery.token)
            assert delivery.unique == (job.key is not None)
        self.deliveries += claimed

    def _order(self, queues: list[str]) -> list[Job]:
        """What may be claimed, in the order of precedence."""
        jobs = self.queue.tables.jobs.c
        moments = {row.id: row.available_at for row in self.connection.execute(sa.select(jobs.id, jobs.available_at))}
        found = [job for job in self.model.jobs.values() if job.queue in queues and job.claimable]
        return sorted(found, key=lambda job: (queues.index(job.queue), -job.priority, moments[job.id], job.id))

    def _check_claim(self, claimed: list[Delivery], order: list[Job], limit: int) -> None:
        startable = [job for job in order if not job.exhausted]
        fresh, reclaimable = [job.id for job in startable if not job.held], [job for job in startable if job.held]
        ids = [delivery.id for delivery in claimed]
        assert ids == [job.id for job in order if job.id in ids], "not in order, or not claimable"
        started = [job for job in reclaimable if job.id in ids]
        assert len(started) <= 1 or not any(job.last_attempt for job in started), "on its last attempt, a job died beside another one"
        assert [id for id in ids if id in fresh] == fresh[: len(ids) - len(started)], "a later one came first"
        if len(claimed) < limit:
            assert len(claimed) - len(started) == len(fresh), "something was left that could have been claimed"
            assert bool(started) == bool(reclaimable)

    def _expect_exhausted_to_fail(self, order: list[Job], *, everything: bool) -> None:
        """Those that a claim finds on its way are moved; all of them if it found fewer jobs than it wanted."""
        exhausted = [job for job in order if job.exhausted]
        moved = set(self.connection.execute(sa.select(self.queue.tables.failed.c.id)).scalars())
        for job in exhausted:
            if everything or job.id in moved:
                self.model.fail(job.id, "worker_lost" if job.held else "max_attempts_exceeded")

    # --- settlements, of deliveries that may have become stale long ago

    @precondition(lambda self: self.deliveries)
    @rule(
        data=st.data(), operation=st.sampled_from(("complete", "release", "hand back", "fail", "renew")), delay=st.sampled_from((0, HOUR))
    )
    def settle(self, data: st.DataObject, operation: str, delay: int) -> None:
        """Any delivery that was ever made; rather one of a job that still exists, where there is something to spoil."""
        alive = [delivery for delivery in self.deliveries if delivery.id in self.model.jobs]
        delivery = data.draw(st.sampled_from(alive or self.deliveries))
        job = self.model.held_by(delivery)
        with self._refused(job is None or (operation == "renew" and job.ended)):
            self._settle(operation, delivery, delay)
        if job is not None:
            self._expect_settled(operation, job, delay)

    @contextmanager
    def _refused(self, stale: bool) -> Iterator[None]:
        if stale:
            with pytest.raises(StaleDelivery):
                yield
        else:
            yield

    def _settle(self, operation: str, delivery: Delivery, delay: int) -> None:
        match operation:
            case "complete":
                self.queue.complete(delivery)
            case "release":
                self.queue.release(delivery, delay=delay, error="it broke")
            case "hand back":
                self.queue.release(delivery, delay=delay)
            case "fail":
                self.queue.fail(delivery, "given up")
            case "renew":
                assert self.queue.renew(delivery, lease=2 * HOUR).lease_until > delivery.lease_until

    def _expect_settled(self, operation: str, job: Job, delay: int) -> None:
        match operation:
            case "complete":
                self.model.leave(job.id)
            case "release" | "hand back":
                job.held, job.ended, job.due = False, False, not delay
                job.attempts -= operation == "hand back"
            case "fail":
                self.model.fail(job.id, "failed_by_job")

    # --- time

    @precondition(lambda self: self._held())
    @rule(data=st.data(), everybody=st.booleans())
    def expire(self, data: st.DataObject, everybody: bool) -> None:
        """Workers died: their leases ended in the past."""
        dead = self._held() if everybody else [data.draw(st.sampled_from(self._held()))]
        self._change([job.id for job in dead], reserved_until=after(-1_000_000), available_at=after(-1_000_000))
        for job in dead:
            job.ended = True

    def _held(self) -> list[Job]:
        return [job for job in self._jobs() if job.held and not job.ended]

    @precondition(lambda self: self._delayed())
    @rule()
    def come_due(self) -> None:
        delayed = self._delayed()
        self._change([job.id for job in delayed], available_at=now())
        for job in delayed:
            job.due = True

    def _delayed(self) -> list[Job]:
        return [job for job in self._jobs() if not job.held and not job.due]

    def _change(self, ids: list[int], **values: Any) -> None:
        jobs = self.queue.tables.jobs
        self.connection.execute(sa.update(jobs).where(jobs.c.id.in_(ids)).values(values))

    # --- operators

    @precondition(lambda self: self.model.failed)
    @rule(data=st.data(), everything=st.booleans())
    def retry(self, data: st.DataObject, everything: bool) -> None:
        ids = sorted(self.model.failed)
        if not everything:
            ids = [data.draw(st.sampled_from(ids))]
        assert self.queue.failed.retry(**_selector(ids, everything)) == len(ids)
        for id in ids:
            self.model.retry(id)

    @precondition(lambda self: self.model.failed)
    @rule(data=st.data(), everything=st.booleans())
    def forget(self, data: st.DataObject, everything: bool) -> None:
        ids = sorted(self.model.failed)
        if not everything:
            ids = [data.draw(st.sampled_from(ids))]
        assert self.queue.failed.forget(**_selector(ids, everything)) == len(ids)
        for id in ids:
            del self.model.failed[id]

    @precondition(lambda self: len(self.model.jobs) > SOME)
    @rule(queue=st.sampled_from(QUEUES))
    def clear(self, queue: str) -> None:
        waiting = [job.id for job in self.model.jobs.values() if job.queue == queue and not job.held]
        assert self.queue.clear(queue) == len(waiting)
        for id in waiting:
            self.model.leave(id)

    # --- what there is to see

    @invariant()
    def the_tables_are_as_the_model_says(self) -> None:
        tables = self.queue.tables
        jobs, failed, keys = tables.jobs.c, tables.failed.c, tables.keys.c
        seen = self._rows(
            jobs.id, jobs.queue, jobs.priority, jobs.attempts, jobs.max_attempts, jobs.unique_key, jobs.reserved_until.is_not(None)
        )
        assert seen == {(j.id, j.queue, j.priority, j.attempts, j.max_attempts, _stored(j.key), j.held) for j in self._jobs()}
        seen = self._rows(failed.id, failed.attempts, failed.unique_key, failed.reason)
        assert seen == {(id, f.job.attempts, _stored(f.job.key), f.reason) for id, f in self.model.failed.items()}
        assert self._rows(keys.key, keys.job_id) == {(_stored(key), id) for key, id in self.model.keys.items()}

    @invariant()
    def the_counts_are_as_the_model_says(self) -> None:
        seen = {(row.queue, row.pending, row.delayed, row.reserved, row.total) for row in self.queue.stats()}
        assert seen == {_counts(name, [job for job in self._jobs() if job.queue == name]) for name in {job.queue for job in self._jobs()}}

    def _jobs(self) -> list[Job]:
        return list(self.model.jobs.values())

    def _rows(self, *columns: sa.ColumnElement[Any]) -> set[tuple[Any, ...]]:
        return {tuple(row) for row in self.connection.execute(sa.select(*columns))}


def work() -> None:
    """Never runs: the machine claims and settles by hand."""


def _selector(ids: list[int], everything: bool) -> dict[str, Any]:
    return {"all": True} if everything else {"id": ids}


def _stored(key: str | None) -> str | None:
    return None if key is None else f"unique:model.job/{key}"


def _counts(queue: str, jobs: Iterable[Job]) -> tuple[str, int, int, int, int]:
    jobs = list(jobs)
    pending = sum(job.claimable for job in jobs)
    reserved = sum(job.held and not job.ended for job in jobs)
    return queue, pending, len(jobs) - pending - reserved, reserved, len(jobs)


@pytest.mark.slow
def test_any_order_of_operations_leaves_what_the_model_says(queue: Queue, engine: Engine) -> None:
    looking = engine.execution_options(isolation_level="AUTOCOMMIT")
    try:
        run_state_machine_as_test(lambda: QueueMachine(queue, looking), settings=SETTINGS)  # type: ignore[arg-type]  # any function that makes one
    finally:
        queue.consumer.close()
