"""
Jobs that come back from a dead worker: one of them may be what killed it, and no other may pay for that.
"""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import Engine

from sqlqueue import Queue
from sqlqueue._driver.claim import Company, company_of
from sqlqueue._driver.settle import Complete, Settlement
from sqlqueue._job import Delivery
from tests.rows import change, expire, failed_in, jobs_in, put, put_each, statements_of

MID, LAST = {"attempts": 1, "max_attempts": 5}, {"attempts": 4, "max_attempts": 5}


def claim(queue: Queue, limit: int = 10, company: Company = Company.NONE) -> list[Delivery]:
    return queue.consumer.claim(("default",), limit, 60.0, "worker", company)


def ids(deliveries: list[Delivery]) -> list[int]:
    return [delivery.id for delivery in deliveries]


def put_reclaimed(observer: Engine, queue: Queue, *kinds: dict[str, int]) -> list[int]:
    """Jobs of dead workers, the first one's lease having ended first."""
    return put_each(observer, queue, [kind | {"lease_in": n - 100} for n, kind in enumerate(kinds)])


def test_a_reclaimed_job_on_its_last_attempt_comes_without_any_other(queue: Queue, observer: Engine) -> None:
    first, *others = put_reclaimed(observer, queue, LAST, LAST, MID, LAST, MID)
    fresh = put(observer, queue, 3)
    before = jobs_in(observer, queue)
    assert ids(claim(queue)) == [first, *fresh]
    after = jobs_in(observer, queue)
    assert {id: after[id] for id in others} == {id: before[id] for id in others}


def test_reclaimed_jobs_with_attempts_left_come_together_without_one_on_its_last(queue: Queue, observer: Engine) -> None:
    one, last, two, also_last = put_reclaimed(observer, queue, MID, LAST, MID, LAST)
    fresh = put(observer, queue, 2)
    before = jobs_in(observer, queue)
    assert ids(claim(queue)) == [one, two, *fresh]
    after = jobs_in(observer, queue)
    assert {id: after[id] for id in (last, also_last)} == {id: before[id] for id in (last, also_last)}


def test_beside_a_reclaimed_job_no_other_starts_its_last_attempt(queue: Queue, observer: Engine) -> None:
    last, mid = put_reclaimed(observer, queue, LAST, MID)
    fresh = put(observer, queue, 2)
    before = jobs_in(observer, queue)
    assert ids(claim(queue, company=Company.RECLAIMED)) == [mid, *fresh]
    assert jobs_in(observer, queue)[last] == before[last]


def test_beside_a_last_attempt_no_reclaimed_job_starts(queue: Queue, observer: Engine) -> None:
    reclaimed = put_reclaimed(observer, queue, LAST, MID)
    fresh = put(observer, queue, 2)
    before = jobs_in(observer, queue)
    assert ids(claim(queue, company=Company.ON_LAST_ATTEMPT)) == fresh
    after = jobs_in(observer, queue)
    assert {id: after[id] for id in reclaimed} == {id: before[id] for id in reclaimed}


@pytest.mark.parametrize("company", [Company.RECLAIMED, Company.ON_LAST_ATTEMPT])
def test_no_company_keeps_a_job_that_must_not_run_from_being_moved(queue: Queue, observer: Engine, company: Company) -> None:
    doomed = put_reclaimed(
        observer, queue, {"attempts": 5}, {"attempts": 1, "max_attempts": 0}, {"attempts": -5, "max_attempts": -4}, {"attempts": -1}
    )
    (past,) = put(observer, queue, lease_in=-1, attempts=4)
    change(observer, queue, [past], deadline=jobs_in(observer, queue)[past]["available_at"])
    assert claim(queue, company=company) == []
    assert sorted(failed_in(observer, queue)) == [*doomed, past]


def test_the_rule_holds_from_lane_to_lane_and_from_queue_to_queue(queue: Queue, observer: Engine) -> None:
    low, mid, high = put_each(observer, queue, [LAST | {"lease_in": -1, "priority": n} for n in (-1, 0, 1)])
    (elsewhere,) = put(observer, queue, queue="other", lease_in=-1, attempts=4)
    fresh = put(observer, queue, queue="other")
    found = queue.consumer.claim(("default", "other"), 10, 60.0, "worker")
    assert ids(found) == [high, *fresh]
    left = jobs_in(observer, queue)
    assert {left[id]["reserved_token"] for id in (low, mid, elsewhere)} == {"of-the-dead"}


def test_the_rule_holds_between_the_lanes_remembered_and_those_looked_for(queue: Queue, observer: Engine) -> None:
    put(observer, queue, due_in=-200)
    claim(queue, limit=1)
    (first,) = put_reclaimed(observer, queue, LAST)
    (second,) = put(observer, queue, priority=1, lease_in=-1, attempts=4)
    assert ids(claim(queue)) == [first]
    assert jobs_in(observer, queue)[second]["reserved_token"] == "of-the-dead"


def test_a_reclaimed_job_takes_a_free_slot_although_another_runs(queue: Queue, observer: Engine) -> None:
    mids = put_reclaimed(observer, queue, MID, MID)
    assert ids(claim(queue, limit=1, company=Company.RECLAIMED)) == mids[:1]


def test_the_company_adds_up() -> None:
    assert company_of([]) is Company.NONE
    assert company_of([(False, True)]) is Company.NONE
    assert company_of([(True, False), (False, True)]) is Company.RECLAIMED
    assert company_of([(True, False), (True, True)]) is Company.ON_LAST_ATTEMPT
    assert company_of([(True, False)], Company.ON_LAST_ATTEMPT) is Company.ON_LAST_ATTEMPT


# --- a killer among many ------------------------------------------------------------------------------------------------


class Died(Exception):
    pass


class SimulatedWorker:
    """Runs jobs in slots without threads. The killer takes the process with it: all that was held is abandoned."""

    def __init__(self, queue: Queue, killer: int, slots: int) -> None:
        self.queue = queue
        self.killer = killer
        self.slots = slots
        self.held: list[Delivery] = []
        self.done: Counter[int] = Counter()
        self.ends: dict[str, int] = {}

    def run(self) -> None:
        """Until nothing is left to do; raises `Died`."""
        while True:
            company = company_of((delivery.reclaimed_from is not None, delivery.last_attempt) for delivery in self.held)
            self.held += claim(self.queue, self.slots - len(self.held), company) if len(self.held) < self.slots else []
            if not self.held:
                return
            if any(delivery.id == self.killer for delivery in self.held):
                raise Died
            # Half of what runs ends at a time, so that claims meet the company of what still runs.
            ended, self.held = self.held[: (len(self.held) + 1) // 2], self.held[(len(self.held) + 1) // 2 :]
            results = self.queue.consumer.settle([Settlement(one.id, one.token, False, Complete()) for one in ended])
            assert results.settled == {one.id for one in ended}
            self.done.update(results.settled)


@pytest.mark.parametrize(("jobs", "max_attempts", "slots"), [(1000, 2, 10), (1000, 5, 10), (100, 1, 1)])
def test_only_the_job_that_kills_its_worker_fails(queue: Queue, observer: Engine, jobs: int, max_attempts: int, slots: int) -> None:
    killer, *innocent = put(observer, queue, jobs + 1, max_attempts=max_attempts)
    done: Counter[int] = Counter()
    deaths = 0
    while True:
        worker = SimulatedWorker(queue, killer, slots)
        try:
            worker.run()
        except Died:
            deaths += 1
            expire(observer, queue)
        done += worker.done
        if not worker.held:
            break
    assert deaths == max_attempts
    assert done == Counter(innocent)
    failed = failed_in(observer, queue)
    assert list(failed) == [killer]
    assert (failed[killer]["reason"], failed[killer]["attempts"], failed[killer]["worker"]) == ("worker_lost", max_attempts, "worker")
    assert jobs_in(observer, queue) == {}


def test_a_job_with_one_attempt_that_ran_beside_the_killer_has_used_it(queue: Queue, observer: Engine) -> None:
    killer, *innocent = put(observer, queue, 100, max_attempts=1)
    worker = SimulatedWorker(queue, killer, 10)
    with pytest.raises(Died):
        worker.run()
    beside = {delivery.id for delivery in worker.held}
    expire(observer, queue)
    survivor = SimulatedWorker(queue, killer, 10)
    survivor.run()
    assert set(failed_in(observer, queue)) == beside
    assert survivor.done == Counter(set(innocent) - beside)


def test_what_a_claim_costs_does_not_grow_with_the_jobs_that_came_back(queue: Queue, observer: Engine) -> None:
    put_each(observer, queue, [LAST | {"lease_in": -60}] * 500)
    fresh = put(observer, queue, 30)
    claim(queue, limit=1)
    for _ in range(3):
        with statements_of(queue.consumer.engine) as seen:
            found = claim(queue, company=Company.ON_LAST_ATTEMPT)
        assert ids(found) == fresh[:10]
        fresh = fresh[10:]
        assert len(seen) <= 4
