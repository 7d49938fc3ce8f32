"""
Renamed jobs.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from sqlqueue import Fixed, OptionError, Queue, RegistrationError, UnknownJob
from tests.workers import eventually, expire, failures, jobs, push, work_off, working


@pytest.fixture
def plain() -> Queue:
    return Queue()


def nothing() -> None: ...


def something() -> None: ...


def push_old(queue: Queue, name: str = "old", **payload: Any) -> None:
    with queue.begin() as session:
        queue.push_named(session, name, payload)


def test_rows_under_an_old_name_run_the_renamed_job(queue: Queue) -> None:
    seen: list[int] = []
    queue.job(name="new", aliases=["old", "older"])(lambda number: seen.append(number))
    for number, name in enumerate(("old", "older", "new")):
        push_old(queue, name, number=number)
    assert work_off(queue).counts == {"done": 3}
    assert sorted(seen) == [0, 1, 2]
    push_old(queue, number=3)
    queue.drain().assert_all_done()
    assert seen[-1] == 3


def test_they_are_retried_as_the_renamed_job_says(queue: Queue, observer: Engine) -> None:
    queue.job(name="new", aliases=["old"], backoff=Fixed(3600))(lambda: 1 / 0)
    push_old(queue)
    assert work_off(queue).counts == {"retrying": 1}
    assert queue.registry.backoff("old") == Fixed(3600)
    assert jobs(observer, queue)[0]["name"] == "old"


def test_they_are_not_repeated_if_the_renamed_job_is_not(queue: Queue, observer: Engine) -> None:
    queue.job(name="new", aliases=["old"], on_worker_lost="fail")(nothing)
    push_old(queue)
    queue.claim()
    expire(observer, queue)
    with working(queue):
        eventually(lambda: failures(observer, queue))
    (row,) = failures(observer, queue)
    assert (row["name"], row["reason"]) == ("old", "worker_lost")


def test_an_async_job_answers_to_its_old_name(queue: Queue) -> None:
    seen: list[int] = []

    @queue.job(name="new", aliases=["old"])
    async def renamed(number: int) -> None:
        seen.append(number)

    push_old(queue, number=1)
    assert work_off(queue).counts == {"done": 1}
    assert seen == [1]


def test_pushes_go_by_the_new_name(queue: Queue, observer: Engine) -> None:
    queue.job(name="new", aliases=["old"])(nothing)
    push(queue, "old")  # found by its old name
    assert jobs(observer, queue)[0]["name"] == "new"


def test_a_route_of_the_job_holds_for_its_old_name_and_one_of_the_old_name_for_those_rows(plain: Queue) -> None:
    plain.job(name="new", aliases=["old"], backoff=Fixed(1), timeout=5)(nothing)
    plain.route("new", backoff=Fixed(2))
    assert plain.registry.code("old").backoff == Fixed(2)
    plain.route("old", timeout=6)
    assert (plain.registry.code("old").backoff, plain.registry.code("old").timeout) == (Fixed(2), 6)
    assert plain.registry.code("new").timeout == 5


def test_a_route_may_name_them(plain: Queue) -> None:
    job = plain.job(name="new")(nothing)
    plain.route("new", aliases=["old"])
    assert plain.registry.find("old") is job
    plain.route("new", aliases=["older"])
    assert plain.registry.find("older") is job
    with pytest.raises(UnknownJob):
        plain.registry.find("old")


def test_a_route_for_a_job_that_comes_later_names_them_too(plain: Queue) -> None:
    plain.route("new", aliases=["old"])
    job = plain.job(name="new")(nothing)
    assert plain.registry.find("old") is job


def test_two_jobs_do_not_answer_to_one_name(plain: Queue) -> None:
    plain.job(name="new", aliases=["old"])(nothing)
    with pytest.raises(RegistrationError, match=r"^new: the alias old is the name of the job old"):
        plain.job(name="old")(something)
    with pytest.raises(RegistrationError, match=r"^other: the alias new is the name of the job new"):
        plain.job(name="other", aliases=["new"])(something)
    with pytest.raises(RegistrationError, match=r"^other: the alias old is the name of the job new"):
        plain.job(name="other", aliases=["old"])(something)
    with pytest.raises(RegistrationError, match=r"^other: the alias other is the name of itself"):
        plain.job(name="other", aliases=["other"])(something)
    with pytest.raises(UnknownJob):
        plain.registry.find("other")
    plain.job(name="other")(something)
    with pytest.raises(RegistrationError, match="the alias other"):
        plain.route("new", aliases=["other"])
    assert plain.registry.find("old").name == "new"


def test_a_module_that_is_loaded_again_registers_again(plain: Queue) -> None:
    for _ in range(2):
        job = plain.job(name="new", aliases=["old"])(nothing)
    assert plain.registry.find("old") is job


@pytest.mark.parametrize("wrong", ["old", 1, ["a b"], [1], [""], {"old"}])
def test_what_is_no_list_of_names_is_refused(plain: Queue, wrong: object) -> None:
    with pytest.raises(OptionError, match=r"^aliases"):
        plain.job(name="new", aliases=wrong)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match=r"^aliases"):
        plain.route("new", aliases=wrong)  # type: ignore[arg-type]
