"""
What is recorded about a failure, whatever the exception does.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa

from sqlqueue._failure import LAST_ERROR_LENGTH, MESSAGE_LENGTH, TRACEBACK_LENGTH, Failure, clean_text, one_line


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as found:
        return found


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Wordless(Exception):
    def __str__(self) -> Any:
        return 42  # noqa: PLE0307  # that is the point


class Leaving(Exception):
    def __str__(self) -> NoReturn:  # noqa: PLE0307  # it never returns
        sys.exit(3)


class Text(str):
    """A text whose methods are traps."""

    def replace(self, *args: Any) -> NoReturn:
        raise RuntimeError("replace")

    def encode(self, *args: Any) -> NoReturn:
        raise RuntimeError("encode")

    def __len__(self) -> NoReturn:
        raise RuntimeError("len")


class Tricky(Exception):
    def __str__(self) -> str:
        return Text("as it was")


class Nosy(Exception):
    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"who asks for {name}?")


@pytest.mark.parametrize("kind", [Unspeakable, Wordless, Leaving])
def test_an_exception_without_a_text_is_recorded_by_its_class(kind: type[Exception]) -> None:
    failure = Failure.from_exception(caught(kind()))
    assert failure.error_class is not None
    assert failure.error_class.endswith(kind.__name__)
    assert kind.__name__ in failure.message
    assert failure.traceback


def test_a_text_with_methods_of_its_own_is_recorded() -> None:
    assert Failure.from_exception(caught(Tricky()), secrets=["zzz"]).message == "as it was"


def test_an_exception_that_refuses_questions_is_recorded() -> None:
    assert Failure.from_exception(caught(Nosy("as it was"))).message == "as it was"


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3), GeneratorExit(), BaseException("any")])
def test_every_base_exception_is_recorded(error: BaseException) -> None:
    assert Failure.from_exception(caught(error)).error_class == type(error).__name__


def test_a_long_message_keeps_both_ends() -> None:
    failure = Failure.from_exception(caught(ValueError("begin " + "x" * 10_000_000 + " end")))
    assert len(failure.message) <= MESSAGE_LENGTH
    assert failure.message.startswith("begin ")
    assert failure.message.endswith(" end")
    assert failure.traceback is not None
    assert len(failure.traceback) <= TRACEBACK_LENGTH
    assert len(failure.last_error) <= LAST_ERROR_LENGTH
    assert failure.last_error.startswith("ValueError: begin ")


def test_what_databases_refuse_is_replaced() -> None:
    assert clean_text("a\x00b\ud800c😀", 100) == "a␀b?c😀"


def test_a_thousand_causes_are_recorded() -> None:
    error: Exception = ValueError("0")
    for number in range(1, 1000):
        outer = ValueError(str(number))
        outer.__cause__ = error
        error = outer
    assert Failure.from_exception(caught(error)).message == "999"


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert Failure.from_exception(caught(first)).message == "first"


def test_a_group_of_ten_thousand_is_recorded() -> None:
    failure = Failure.from_exception(caught(ExceptionGroup("many", [ValueError(str(n)) for n in range(10_000)])))
    assert failure.message == "many (10000 sub-exceptions)"


def test_a_recursion_error_is_recorded() -> None:
    def deeper() -> None:
        deeper()

    with pytest.raises(RecursionError) as found:
        deeper()
    assert Failure.from_exception(found.value).error_class == "RecursionError"


def refused(value: str) -> sa.exc.DBAPIError:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(sa.exc.DBAPIError) as found:
        connection.execute(sa.text("SELECT :value FROM nowhere"), {"value": value})
    engine.dispose()
    return found.value


def test_bound_values_of_sql_errors_are_not_recorded() -> None:
    for error in (
        refused("4111-1111"),
        ExceptionGroup("group", [refused("4111-1111"), ExceptionGroup("inner", [refused("4111-1111")])]),
    ):
        failure = Failure.from_exception(caught(error))
        assert "4111" not in f"{failure}"
    outer = ValueError("outer")
    outer.__cause__ = refused("4111-1111")
    failure = Failure.from_exception(caught(outer))
    assert "nowhere" in (failure.traceback or "")
    assert "4111" not in f"{failure}"


def test_secrets_are_replaced_the_longest_first() -> None:
    failure = Failure.from_exception(caught(ValueError("it is abcd, ab and d")), secrets=["ab", "abcd", "d", ""])
    assert failure.message == "it is [redacted], [redacted] an[redacted] [redacted]"
    assert "abcd" not in (failure.traceback or "")


def test_a_line_for_people_is_short_and_harmless() -> None:
    assert one_line("\n  first\x1b[31m\nsecond") == "first\\x1b[31m"
    assert len(one_line("x" * 1000)) == 200
    assert one_line("") == ""
