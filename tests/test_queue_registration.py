"""
Registering functions as jobs: names, signatures, and what the registered job still is.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sqlqueue import ArgumentError, Job, JobContext, OptionError, Queue, RegistrationError, UnknownJob
from tests.producers import only_job


@pytest.fixture
def plain() -> Queue:
    """A queue that no database is known of."""
    return Queue()


def send_invoice(number: int, *, copy: bool = False) -> str:
    """Send it."""
    return f"{number} {copy}"


def with_context(context: JobContext, number: int) -> tuple[JobContext, int]:
    return context, number


def str_of(number: int) -> str:
    return str(number)


class Mail:
    @staticmethod
    def send(number: int) -> None: ...


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_default_name_is_the_place_of_the_function(plain: Queue) -> None:
    assert plain.job(send_invoice).name == f"{__name__}.send_invoice"
    assert plain.job(Mail.send).name == f"{__name__}.Mail.send"


def test_a_name_can_be_given(plain: Queue) -> None:
    assert plain.job(name="invoices.send")(send_invoice).name == "invoices.send"
    for name in ("a", "A-b_c.d:e", "9", "x" * 190):
        assert Queue().job(name=name)(send_invoice).name == name


def test_a_name_outside_the_grammar_is_refused(plain: Queue) -> None:
    for name in ("", "a b", "a/b", "ä", "a\n", "\na", "a\x00", "x" * 191, 1, b"a"):
        with pytest.raises(OptionError, match=r"^name"):
            plain.job(name=name)(send_invoice)  # type: ignore[arg-type]


def test_a_function_that_no_worker_would_find_needs_a_name(plain: Queue) -> None:
    def local() -> None: ...

    def in_main() -> None: ...

    in_main.__module__, in_main.__qualname__ = "__main__", "in_main"
    for function, place in ((local, "inside a function"), (in_main, "in __main__"), (lambda: None, "inside a function")):
        with pytest.raises(RegistrationError, match=f"{place}.*name="):
            plain.job(function)
        assert Queue().job(name="a")(function).name == "a"


def test_a_place_whose_name_is_no_job_name_needs_a_name(plain: Queue) -> None:
    def nice() -> None: ...

    nice.__qualname__ = "schön"
    with pytest.raises(OptionError, match=r"^name"):
        plain.job(nice)


def test_a_callable_without_a_place_needs_a_name(plain: Queue) -> None:
    class Sender:
        def __call__(self, number: int) -> None: ...

    for function in (functools.partial(send_invoice, copy=True), Sender()):
        with pytest.raises(RegistrationError, match="name="):
            plain.job(function)
    assert plain.job(name="partial")(functools.partial(send_invoice, copy=True))(3) == "3 True"


def test_two_functions_cannot_have_one_name(plain: Queue) -> None:
    plain.job(name="a")(send_invoice)
    with pytest.raises(RegistrationError, match=r"two jobs are named a: .*send_invoice and .*Mail.send"):
        plain.job(name="a")(Mail.send)
    assert plain.registry.find("a").function is send_invoice
    assert Queue().job(name="a")(Mail.send).name == "a", "another queue has other jobs"


def test_a_module_that_is_imported_twice_registers_its_job_again(plain: Queue) -> None:
    plain.job(name="a", priority=1)(send_invoice)
    plain.job(name="a", priority=2)(send_invoice)
    assert plain.registry.find("a").bind(1).options.priority == 2


def test_a_job_is_not_registered_as_a_job_again(plain: Queue) -> None:
    job = plain.job(name="a")(send_invoice)
    with pytest.raises(OptionError, match="a is a job already"):
        plain.job(name="b")(job)


def test_one_function_may_be_two_jobs(plain: Queue) -> None:
    plain.job(name="a")(send_invoice)
    plain.job(name="b", queue="slow")(send_invoice)
    assert plain.registry.find("b").bind(1).options.queue == "slow"


def test_a_refused_function_is_not_registered(plain: Queue) -> None:
    with pytest.raises(RegistrationError):
        plain.job(name="a")(lambda *args: None)
    with pytest.raises(UnknownJob, match="no job named a"):
        plain.registry.find("a")


# --- signatures -------------------------------------------------------------------------------------------------------


def test_a_signature_that_cannot_travel_is_refused_at_registration(plain: Queue) -> None:
    async def coroutine(*numbers: int) -> None: ...

    def generator() -> Any:
        yield

    def positional(number: int, /) -> None: ...

    def late_context(number: int, context: JobContext) -> None: ...

    wrong: list[tuple[Any, str]] = [
        (lambda *numbers: None, "numbers"),
        (lambda **numbers: None, "numbers"),
        (positional, "number"),
        (late_context, "context"),
        (coroutine, "numbers"),
        (generator, "generator"),
    ]
    for function, word in wrong:
        with pytest.raises(RegistrationError, match=word) as caught:
            plain.job(name="a")(function)
        assert isinstance(caught.value, TypeError)


def test_an_annotation_that_is_defined_later_is_resolved_later(plain: Queue) -> None:
    def later(value: NotThereYet) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    job: Any = plain.job(name="a")(later)
    with pytest.raises(RegistrationError, match=r"value.*NotThereYet"):
        plain.registry.load()
    with pytest.raises(RegistrationError, match="value"):
        job.bind(1)


# --- the job is still its function ------------------------------------------------------------------------------------


def test_calling_a_job_runs_the_function_here_and_now(plain: Queue) -> None:
    job = plain.job(name="a")(send_invoice)
    assert job(1) == "1 False"
    assert job(1, copy=True) == "1 True"
    assert job.options(delay=60)(2) == "2 False"
    with pytest.raises(ZeroDivisionError):
        plain.job(name="b")(lambda: 1 / 0)()


def test_a_direct_call_brings_its_own_context_or_is_given_one(plain: Queue) -> None:
    job = plain.job(name="a")(with_context)
    context, number = job(5)
    assert (context.name, context.attempt, number) == ("a", 1, 5)
    with pytest.raises(RuntimeError, match="called directly"):
        context.renew()
    mine = JobContext(id=7, name="mine", queue="q", attempt=2, max_attempts=3)
    anything: Any = job
    assert anything(mine, 6) == (mine, 6)
    assert anything(number=8)[1] == 8


def test_the_context_is_no_argument(plain: Queue) -> None:
    job = plain.job(name="a")(with_context)
    assert job.bind(5).payload == '{"number":5}'
    anything: Any = job
    for wrong in ((), (1, 2)):
        with pytest.raises(ArgumentError):
            anything.bind(*wrong)
    with pytest.raises(ArgumentError, match="context"):
        anything.bind(number=1, context=None)


def test_a_job_looks_like_its_function(plain: Queue) -> None:
    job: Any = plain.job(name="a")(send_invoice)
    assert (job.__name__, job.__doc__, job.__wrapped__) == ("send_invoice", "Send it.", send_invoice)
    assert inspect.signature(job) == inspect.signature(send_invoice)
    assert repr(job) == "<Job a>"


def test_the_repr_of_a_bound_job_does_not_show_its_arguments(plain: Queue) -> None:
    bound = plain.job(name="a")(lambda password: None).options(unique="hunter2", headers={"a": "hunter2"}).bind("hunter2")
    assert "hunter2" not in repr(bound)


def test_positional_and_named_arguments_make_the_same_job(plain: Queue) -> None:
    job = plain.job(name="a")(send_invoice)
    assert job.bind(1).payload == job.bind(number=1).payload == '{"number":1}'


def test_a_bound_job_can_be_pushed_more_than_once(engine: Engine, queue: Queue) -> None:
    bound = queue.job(name="a")(send_invoice).bind(1)
    with Session(engine) as session:
        ids = {bound.push(session).id for _ in range(3)}
        assert queue.push_many(session, [bound] * 3) == 3
        session.rollback()
    assert len(ids) == 3


def test_a_bound_job_of_another_queue_is_pushed_to_its_own(engine: Engine, observer: Engine, queue: Queue) -> None:
    bound = queue.job(name="a", queue="mine")(send_invoice).bind(1)
    with Session(engine) as session, session.begin():
        bound.push(session)
    assert only_job(observer, queue)["queue"] == "mine"


def test_pushing_needs_no_configured_queue(engine: Engine, observer: Engine, queue: Queue) -> None:
    stranger = Queue()
    job: Job[[int], str] = stranger.job(name="a")(str_of)
    with Session(engine) as session, session.begin():
        pushed = job.push(session, 1)
    assert only_job(observer, queue)["id"] == pushed.id
