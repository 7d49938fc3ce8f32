"""
Arguments: the signature, the JSON contract and the restored types. Pure, no database.
"""

from __future__ import annotations

import collections
import enum
import functools
import math
import subprocess
import sys
import threading
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict, TypeVar, Union
from zoneinfo import ZoneInfo

import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlqueue._arguments import JSON, Sensitive, Signature, check_json, from_json, to_json
from sqlqueue.errors import ArgumentError, RegistrationError

SECRET = "hunter2"
JOB = "taking.<locals>.job"
UNIQUE = uuid.UUID("8c6b0a1e-6f5e-4b0f-9c0a-0123456789ab")


class JobContext: ...


class Color(enum.Enum):
    RED = "red"
    BLUE = 2
    HALF = 0.5


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.StrEnum):
    FAST = "fast"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class TupleEnum(enum.Enum):
    POINT = (1, 2)


class NoneEnum(enum.Enum):
    NOTHING = None


class EmptyEnum(enum.Enum): ...


@dataclass(frozen=True, slots=True)
class Money:
    amount: Decimal
    currency: str = "EUR"


@dataclass
class Order:
    id: uuid.UUID
    total: Money
    tags: list[str] = field(default_factory=list)
    due: date | None = None


@dataclass
class SpecialOrder(Order): ...


@dataclass
class Node:
    next: Node | None = None


@dataclass
class Derived:
    x: int
    twice: int = field(init=False, default=0)


@dataclass
class WithInitVar:
    x: int
    y: InitVar[int]


@dataclass
class Holder:
    ids: list[uuid.UUID]


@dataclass
class Picky:
    name: str

    def __post_init__(self) -> None:
        if self.name == SECRET:
            raise ValueError(f"not {self.name}")


@dataclass
class Credentials:
    user: str
    password: Annotated[str, Sensitive]


@dataclass(slots=True)
class Slotted:
    x: int


class Customer(pydantic.BaseModel):
    id: uuid.UUID
    born: date
    limits: dict[str, Decimal] = {}
    friend: Customer | None = None


class Renamed(pydantic.BaseModel):
    user_id: int = pydantic.Field(validation_alias="userId", serialization_alias="uid")


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: datetime
    pair: tuple[int, uuid.UUID]


class Hiding(pydantic.BaseModel):
    password: pydantic.SecretStr


class Forgetful(pydantic.BaseModel):
    note: str = pydantic.Field(default="", exclude=True)


class Weighed(pydantic.BaseModel):
    weight: float


class Login(pydantic.BaseModel):
    token: Annotated[str, Sensitive]


class Movie(TypedDict):
    title: str
    year: typing.NotRequired[int | None]


class Tree(typing_extensions.TypedDict):
    children: list[Tree]


class BadMovie(TypedDict):
    id: uuid.UUID


class Point(typing.NamedTuple):
    x: int


class BrokenZone(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta:
        raise RuntimeError(SECRET)

    def dst(self, when: datetime | None) -> None:
        return None

    def tzname(self, when: datetime | None) -> None:
        return None


class MyStr(str):
    __slots__ = ()


class MyUUID(uuid.UUID): ...


class MyDatetime(datetime): ...


UserId = NewType("UserId", int)
OrderId = NewType("OrderId", uuid.UUID)
T = TypeVar("T")
Alias = typing_extensions.TypeAliasType("Alias", "int | str")
Deep = typing_extensions.TypeAliasType("Deep", "int | list[Deep]")
ItemId = typing_extensions.TypeAliasType("ItemId", uuid.UUID)
Recursive = "int | list[Recursive]"
Many = typing_extensions.TypeAliasType("Many", list[T], type_params=(T,))


def signature_of(function: Callable[..., Any]) -> Signature:
    return Signature(function, context_type=JobContext)


def taking(annotation: Any) -> Signature:
    def job(x: Any) -> None: ...

    job.__annotations__ = {"x": annotation}
    return signature_of(job)


def round_trip(annotation: Any, value: Any) -> Any:
    signature = taking(annotation)
    return signature.decode(from_json(to_json(signature.encode((value,), {}))))["x"]


def stored(annotation: Any, value: Any) -> JSON:
    return taking(annotation).encode((value,), {})["x"]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ArgumentError) as caught:
        call()
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error} {error!r} {vars(error)}"
        error = error.__cause__ or error.__context__
    return str(caught.value)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


# Binding


def send(invoice: int, note: str = "", *, urgent: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "payload"),
    [
        ((1,), {}, {"invoice": 1}),
        ((1, "hi"), {}, {"invoice": 1, "note": "hi"}),
        ((), {"invoice": 1, "urgent": True}, {"invoice": 1, "urgent": True}),
        ((1,), {"note": ""}, {"invoice": 1, "note": ""}),
    ],
)
def test_arguments_are_stored_by_name_and_defaults_are_not(args: Any, kwargs: Any, payload: Any) -> None:
    signature = signature_of(send)
    assert signature.encode(args, kwargs) == payload
    assert signature.decode(payload) == payload


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "send() misses the argument 'invoice'"),
        ((), {"note": SECRET}, "send() misses the argument 'invoice'"),
        ((1,), {"invoice": SECRET}, "send() was given the argument 'invoice' twice"),
        ((1,), {"color": SECRET}, "send() has no parameter 'color'"),
        ((1,), {"x\x1b[31m\n": SECRET}, r"send() has no parameter 'x\x1b[31m\n'"),
        ((1,), {3: SECRET}, "send() has no parameter of type int"),
        ((1, "hi", SECRET), {}, "send() takes 2 positional arguments, 3 were given"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args: Any, kwargs: Any, message: str) -> None:
    assert refusal(lambda: signature_of(send).encode(args, kwargs)) == message


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "send() misses the argument 'invoice'"),
        ({"invoice": 1, "color": SECRET}, "send() has no parameter 'color'"),
        ({"invoice": 1, "c" * 5000: SECRET}, f"send() has no parameter '{'c' * 80}'"),
    ],
)
def test_a_payload_that_does_not_fit_is_named(payload: Any, message: str) -> None:
    assert refusal(lambda: signature_of(send).decode(payload)) == message


def test_the_callers_mapping_is_left_alone() -> None:
    kwargs = {"x": UNIQUE}
    payload = {"x": str(UNIQUE)}
    signature = taking(uuid.UUID)
    signature.encode((), kwargs)
    signature.decode(payload)
    assert kwargs == {"x": UNIQUE}
    assert payload == {"x": str(UNIQUE)}


# The context


def test_a_first_parameter_annotated_as_the_context_is_no_argument() -> None:
    def job(context: JobContext, x: int) -> None: ...

    signature = signature_of(job)
    assert signature.takes_context
    assert signature.encode((1,), {}) == {"x": 1}
    assert "no parameter 'context'" in refusal(lambda: signature.encode((1,), {"context": SECRET}))


@pytest.mark.parametrize("annotation", ["JobContext", "sqlqueue.JobContext", "'JobContext'", Annotated[JobContext, 1]])
def test_a_context_is_recognised_however_it_is_written(annotation: Any) -> None:
    source: dict[str, Any] = {}
    exec("def job(ctx, x: int): ...", source)
    source["job"].__annotations__["ctx"] = annotation
    signature = signature_of(source["job"])
    assert signature.takes_context
    assert signature.encode((1,), {}) == {"x": 1}


def test_another_class_with_the_contexts_name_is_no_context() -> None:
    source: dict[str, Any] = {}
    exec("class JobContext: ...\ndef job(ctx: 'JobContext'): ...", source)
    with pytest.raises(RegistrationError, match="'ctx'"):
        signature_of(source["job"])


def test_a_job_without_a_context_says_so() -> None:
    def job(context: Any, x: int) -> None: ...

    assert not signature_of(job).takes_context
    assert not signature_of(lambda: None).takes_context


def test_a_context_in_another_place_is_refused() -> None:
    def second(x: int, context: JobContext) -> None: ...
    def named(*, context: JobContext) -> None: ...

    for function in (second, named):
        with pytest.raises(RegistrationError, match="'context': the context must be the first parameter"):
            signature_of(function)


# Registration


async def coroutine(x: int) -> None: ...


async def async_generator(x: int) -> Any:
    yield x


def generator(x: int) -> Any:
    yield x


class AsyncCallable:
    async def __call__(self, x: int) -> None: ...


def with_args(*args: int) -> None: ...


def with_kwargs(**kwargs: int) -> None: ...


def positional_only(x: int, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (generator, "generator: a generator function cannot be a job"),
        (async_generator, "a generator function cannot be a job"),
        (with_args, "'args'"),
        (with_kwargs, "'kwargs'"),
        (positional_only, "parameter 'x' is positional-only"),
        (type, "signature cannot be read"),
    ],
)
def test_a_function_that_cannot_be_a_job_is_refused_at_once(function: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        signature_of(function)


@pytest.mark.parametrize(
    ("function", "is_async"),
    [(coroutine, True), (functools.partial(coroutine), True), (AsyncCallable(), True), (lambda x: coroutine(x), False), (len, False)],
)
def test_a_coroutine_function_is_known_in_any_disguise(function: Any, is_async: bool) -> None:
    signature = Signature(function, context_type=JobContext) if function is not len else signature_of(lambda: None)
    assert signature.is_async is is_async


PLAIN = [
    None,
    Any,
    object,
    bool,
    int,
    float,
    str,
    list,
    dict,
    typing.List,  # noqa: UP006  # users write it
    typing.Dict[str, Any],  # noqa: UP006  # users write it
    list[dict[str, int | None]],
    dict[Literal["a", "b"], list[float]],
    Mapping[str, Sequence[int]],
    collections.abc.MutableMapping,
    collections.abc.Iterable[str],
    Literal["a", 1, None, True],
    typing_extensions.Literal["a"],
    Movie,
    list[Movie],
    Tree,
    UserId,
    dict[UserId, Any],
    Annotated[int, "positive"],
    Alias,
    Deep,
    Recursive,
    "Recursive",
    "JSON",
    Many[int],
    int | str | None,
    Optional[list[int]],  # noqa: UP045  # users write it
    Union[int, list[str], None],  # noqa: UP007  # users write it
    T,
    list[T],  # type: ignore[valid-type]
    "int | None",
    list["int"],
    typing.LiteralString,
]


@pytest.mark.parametrize("annotation", PLAIN, ids=str)
def test_plain_annotations_are_checked_against_json_only(annotation: Any) -> None:
    for value in (None, 1, "text", {"a": [1.5, True]}):
        assert round_trip(annotation, value) == value


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (list[uuid.UUID], "a list can hold plain JSON only"),
        (dict[str, Decimal], "a dict can hold plain JSON only"),
        (Sequence[Color], "a Sequence can hold plain JSON only"),
        (list[dict[str, Order]], "a dict can hold plain JSON only"),
        (dict[str, date] | None, "a dict can hold plain JSON only"),
        (BadMovie, "a TypedDict can hold plain JSON only"),
        (list[OrderId], "a list can hold plain JSON only"),
        (Many[uuid.UUID], "a generic alias can hold plain JSON only"),
        (dict[int, str], "the keys of a dict must be str"),
        (uuid.UUID | str, "a union can hold plain JSON only"),
        (uuid.UUID | date | None, "a union can hold plain JSON only"),
        (Literal[Level.LOW], "a Literal can hold plain JSON only"),
        (tuple, "tuple come back changed from JSON; use list"),
        (tuple[int, ...], "tuple come back changed from JSON; use list"),
        (set[int], "set come back changed from JSON; use list"),
        (frozenset, "frozenset come back changed from JSON; use list"),
        (bytes, "values of type bytes cannot be restored"),
        (complex, "values of type complex cannot be restored"),
        (time, "values of type time cannot be restored"),
        (Point, "values of type Point cannot be restored"),
        (MyDatetime, "values of type MyDatetime cannot be restored"),
        (MyStr, "values of type MyStr cannot be restored"),
        (JobContext | None, "values of type JobContext cannot be restored"),
        (Callable[[], None], "values of type Callable cannot be restored"),
        (type[int], "values of type type cannot be restored"),
        (TupleEnum, "TupleEnum has members whose value"),
        (NoneEnum, "NoneEnum has members whose value"),
        (EmptyEnum, "EmptyEnum has no members"),
        (Derived, "field 'twice' of Derived has init=False"),
        (WithInitVar, "the constructor of WithInitVar takes other arguments"),
        (Holder, "field 'ids' of Holder: a list can hold plain JSON only"),
        (Node, "the dataclass Node refers to itself"),
        (5, "values of type int cannot be restored"),
        ("5 +", "annotation cannot be read"),
    ],
    ids=str,
)
def test_annotations_that_cannot_travel_are_refused_at_once(annotation: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match="parameter 'x'") as caught:
        taking(annotation)
    assert message in str(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`type` and `def job[T]` came with Python 3.12")
def test_type_statements_and_type_parameters_are_understood() -> None:
    source: dict[str, Any] = {}
    exec("import uuid\ntype Id = uuid.UUID | None\ndef job[T](x: Id, y: 'list[T]'): ...", source)
    assert signature_of(source["job"]).decode({"x": str(UNIQUE), "y": [1]}) == {"x": UNIQUE, "y": [1]}


# Names that are not defined yet


def late_module(source: str) -> types.ModuleType:
    module = types.ModuleType("late")
    exec("from __future__ import annotations\n" + source, vars(module))
    return module


def test_names_defined_later_are_resolved_later() -> None:
    module = late_module("def job(ctx: sq.JobContext, x: Later, y: int = 0) -> Nowhere: ...")
    signature = signature_of(module.job)
    assert signature.takes_context
    with pytest.raises(RegistrationError, match=r"job: parameter 'x': its annotation cannot be resolved .*'Later'"):
        signature.resolve()
    with pytest.raises(RegistrationError, match="'x'"):
        signature.encode((1,), {})
    vars(module)["Later"] = uuid.UUID
    signature.resolve()
    signature.resolve()
    assert signature.takes_context
    assert signature.encode((UNIQUE,), {}) == {"x": str(UNIQUE)}


def test_the_first_use_resolves() -> None:
    module = late_module("def job(x: Later): ...")
    signature = signature_of(module.job)
    vars(module)["Later"] = Annotated[date, Sensitive]
    assert signature.sensitive == {"x"}
    assert signature.decode({"x": "2024-02-29"}) == {"x": date(2024, 2, 29)}


def test_a_late_name_that_cannot_travel_is_refused_when_it_is_known() -> None:
    module = late_module("def job(x: models.Later): ...")
    vars(module)["models"] = types.SimpleNamespace()
    signature = signature_of(module.job)
    vars(module)["models"].Later = bytes
    with pytest.raises(RegistrationError, match="'x': values of type bytes"):
        signature.resolve()


def test_fields_of_a_dataclass_may_be_defined_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module = late_module("import dataclasses")
    monkeypatch.setitem(sys.modules, "late", module)
    exec("from __future__ import annotations\n@dataclasses.dataclass\nclass Box:\n    it: Later\ndef job(x: Box): ...", vars(module))
    signature = signature_of(module.job)
    with pytest.raises(RegistrationError, match=r"parameter 'x'.*'Later'"):
        signature.resolve()
    vars(module)["Later"] = Decimal
    assert signature.decode({"x": {"it": "1.5"}}) == {"x": module.Box(Decimal("1.5"))}


def test_what_can_be_seen_is_refused_though_another_name_is_missing() -> None:
    with pytest.raises(RegistrationError, match="'y'"):
        signature_of(late_module("def job(x: Later, y: bytes): ...").job)


def test_many_threads_may_resolve_at_once() -> None:
    module = late_module("def job(x: Later): ...")
    signature = signature_of(module.job)
    vars(module)["Later"] = uuid.UUID
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(signature.encode((UNIQUE,), {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{"x": str(UNIQUE)}] * 8


def test_a_decorated_function_has_the_signature_of_the_function_inside() -> None:
    def inside(x: uuid.UUID, y: int = 0) -> None: ...

    @functools.wraps(inside)
    def outside(*args: Any, **kwargs: Any) -> None: ...

    assert signature_of(outside).encode((UNIQUE,), {}) == {"x": str(UNIQUE)}
    assert signature_of(functools.partial(inside, y=3)).encode((UNIQUE,), {}) == {"x": str(UNIQUE)}


# The JSON contract

# An alphabet of our own: building the table of all characters takes hypothesis seconds.
texts = st.text(alphabet='a0 \x00\x1f"\\/\u00e9\u2028\uffff\U0001f600')
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=30, deadline=None, database=None)
@given(json_values)
def test_json_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    check_json(value, "x")
    text = to_json({"x": value})
    assert text.isascii()
    assert repr(from_json(text)["x"]) == repr(value)


@pytest.mark.parametrize(
    "value",
    ["x\x00y", "\\u0000", {"k\x00": ["\x00"]}, "😀", "\u2028", 10**4299, -(10**4300 - 1), 1e308, -0.0, 5e-324, nested(32)],
    ids=lambda value: type(value).__name__,
)
def test_the_edges_of_json_come_back_as_they_were(value: Any) -> None:
    assert repr(round_trip(Any, value)) == repr(value)


def test_json_is_written_compactly() -> None:
    assert to_json({"a": [1, "é"], "b": None}) == '{"a":[1,"\\u00e9"],"b":null}'


def circular() -> list[Any]:
    value: list[Any] = []
    value.append({"a": value})
    return value


TYPES = "JSON carries None, bool, int, float, str, list and dict"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((SECRET,), f"x is of type tuple; {TYPES}"),
        ({SECRET}, f"x is of type set; {TYPES}"),
        (SECRET.encode(), f"x is of type bytes; {TYPES}"),
        (MyStr(SECRET), f"x is of type MyStr; {TYPES}"),
        (collections.OrderedDict({SECRET: 1}), f"x is of type OrderedDict; {TYPES}"),
        ([0, 1, 2, {SECRET: (SECRET,)}], f"x[3].{{0}} is of type tuple; {TYPES}"),
        ({"a": 1, SECRET: [UNIQUE]}, f"x.{{1}}[0] is of type UUID; {TYPES}"),
        ([Level.LOW], f"x[0] is of type Level; {TYPES}"),
        ({"a": {1: SECRET}}, "x.{0}.{0} has a key of type int; JSON would turn it into a str"),
        ({1: "a", "1": "b"}, "x.{0} has a key of type int; JSON would turn it into a str"),
        ({f"{SECRET}\ud800": 1}, "x.{0} has a key with a lone surrogate, which is not valid Unicode"),
        ([f"{SECRET}\udfff"], "x[0] has a lone surrogate, which is not valid Unicode"),
        ("\ud83d\ude00", "x has a lone surrogate, which is not valid Unicode"),
        ([math.nan], "x[0] is not a finite number"),
        (-math.inf, "x is not a finite number"),
        (10**4300, "x is an integer of more than 4300 digits"),
        (-(10**4300), "x is an integer of more than 4300 digits"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_carry_is_refused_with_its_place(value: Any, message: str) -> None:
    assert refusal(lambda: check_json(value, "x")) == message
    assert refusal(lambda: stored(Any, value)).startswith(f"{JOB}(): x")


@pytest.mark.parametrize("value", [nested(33), circular()], ids=["deep", "circular"])
def test_nesting_ends_at_32_levels(value: Any) -> None:
    assert "is nested more than 32 levels deep, or contains itself" in refusal(lambda: check_json(value, "x"))
    assert "is nested more than 32 levels deep, or contains itself" in refusal(lambda: stored(list, value))


def test_the_depth_can_be_chosen() -> None:
    check_json([], "headers", depth=1)
    assert refusal(lambda: check_json([[]], "headers", depth=1)).startswith("headers[0] is nested")


@pytest.mark.parametrize(
    "value",
    [Color.RED, Level.LOW, Mode.FAST, Right.READ, UNIQUE, Decimal(1), date(2024, 1, 1), datetime.now(UTC), timedelta(1), Money(Decimal(1))],
)
@pytest.mark.parametrize("annotation", [Any, str, int | None])
def test_a_restorable_value_for_a_plain_parameter_asks_for_the_annotation(annotation: Any, value: Any) -> None:
    name = type(value).__name__
    message = refusal(lambda: stored(annotation, value))
    assert message.endswith(f"x is of type {name}, which plain JSON cannot restore: annotate the parameter as {name}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        '"text"',
        f"{{{SECRET}",
        '{"x": NaN}',
        '{"x": -Infinity}',
        '{"x": 1} x',
        '\ufeff{"x": 1}',
        '{"x":' * 100_000,
        "[" * 100_000,
        '{"x": ' + "9" * 5000 + "}",
        '{"x": "\x01"}',
        None,
        b"{}",
        {},
        7,
    ],
    ids=lambda text: repr(text)[:20],
)
def test_a_text_that_is_no_json_object_is_refused(text: Any) -> None:
    assert refusal(lambda: from_json(text)) == "payload is not a JSON object"


def test_a_payload_that_was_never_checked_cannot_be_written() -> None:
    loop: dict[str, Any] = {}
    loop["x"] = loop
    for payload in ({"x": math.nan}, {"x": UNIQUE}, {"x": 10**5000}, loop):
        assert "payload cannot be written as JSON" in refusal(lambda payload=payload: to_json(payload))  # type: ignore[misc]


# Restored types


@pytest.mark.parametrize(
    ("annotation", "value", "payload"),
    [
        (Color, Color.RED, "red"),
        (Color, Color.BLUE, 2),
        (Color, Color.HALF, 0.5),
        (Level, Level.HIGH, 2),
        (Mode, Mode.FAST, "fast"),
        (Right, Right.READ | Right.WRITE, 3),
        (Right, Right(0), 0),
        (date, date(2024, 2, 29), "2024-02-29"),
        (timedelta, timedelta(seconds=90.5), "90.5"),
        (timedelta, timedelta(0), "0"),
        (timedelta, timedelta(seconds=100), "100"),
        (timedelta, -timedelta(microseconds=1), "-0.000001"),
        (timedelta, timedelta.max, "86399999999999.999999"),
        (timedelta, timedelta.min, "-86399999913600"),
        (Decimal, Decimal("1.10"), "1.10"),
        (Decimal, Decimal("-1E+500"), "-1E+500"),
        (uuid.UUID, UNIQUE, str(UNIQUE)),
        (OrderId, UNIQUE, str(UNIQUE)),
        (ItemId, UNIQUE, str(UNIQUE)),
        (Annotated[uuid.UUID, "of the order"], UNIQUE, str(UNIQUE)),
        (Money, Money(Decimal("9.90")), {"amount": "9.90", "currency": "EUR"}),
        (
            Order,
            Order(UNIQUE, Money(Decimal(1)), ["a"], date(2024, 1, 1)),
            {"id": str(UNIQUE), "total": {"amount": "1", "currency": "EUR"}, "tags": ["a"], "due": "2024-01-01"},
        ),
        (Slotted, Slotted(3), {"x": 3}),
        (Weighed, Weighed(weight=1.5), {"weight": 1.5}),
    ],
    ids=repr,
)
def test_restored_types_come_back_as_they_were(annotation: Any, value: Any, payload: Any) -> None:
    assert stored(annotation, value) == payload
    for each in (annotation, annotation | None, Annotated[Optional[annotation], 1], annotation | None | None):  # noqa: UP045
        result = round_trip(each, value)
        assert result == value
        assert type(result) is type(value)
        assert str(result) == str(value)
        assert round_trip(each, None) is None if each is not annotation else True


@pytest.mark.parametrize(
    "value",
    [
        datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC),
        datetime(2024, 1, 1, tzinfo=timezone(-timedelta(hours=3, minutes=30))),
        datetime(1880, 1, 1, tzinfo=timezone(timedelta(seconds=1172, microseconds=7))),
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=0),
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime.min.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    ],
    ids=str,
)
def test_a_datetime_comes_back_as_the_same_instant(value: datetime) -> None:
    result = round_trip(datetime, value)
    # Not ==: inside a fold Python calls no two zones equal.
    assert result.astimezone(UTC) == value.astimezone(UTC)
    assert result.utcoffset() == value.utcoffset()


@settings(max_examples=30, deadline=None, database=None)
@given(st.timedeltas(), st.decimals(allow_nan=False, allow_infinity=False), st.uuids(), st.dates())
def test_any_value_of_a_restored_type_comes_back(span: timedelta, number: Decimal, unique: uuid.UUID, day: date) -> None:
    for value in (span, number, unique, day):
        result = round_trip(type(value), value)
        assert result == value
        assert str(result) == str(value)


@pytest.mark.parametrize(
    "model",
    [
        Customer(id=UNIQUE, born=date(2000, 1, 1), limits={"day": Decimal("1.10")}, friend=Customer(id=UNIQUE, born=date(2001, 1, 1))),
        Renamed(userId=7),  # type: ignore[call-arg]
        Strict(at=datetime(2024, 1, 1, tzinfo=UTC), pair=(1, UNIQUE)),
        Forgetful(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_pydantic_models_come_back_as_they_were(model: pydantic.BaseModel) -> None:
    assert round_trip(type(model), model) == model
    assert round_trip(type(model) | None, None) is None


@pytest.mark.parametrize(
    "model",
    [Hiding(password=pydantic.SecretStr(SECRET)), Forgetful(note=SECRET), Weighed(weight=math.nan), Weighed.model_construct(weight=SECRET)],
    ids=lambda model: type(model).__name__,
)
@pytest.mark.filterwarnings("error")
def test_a_pydantic_model_that_json_would_change_is_refused(model: pydantic.BaseModel) -> None:
    message = refusal(lambda: stored(type(model), model))
    assert any(part in message for part in ("would come back changed", "cannot be restored", "is not a finite number"))


def test_an_alias_of_another_program_is_understood() -> None:
    assert taking(Renamed).decode({"x": {"userId": 7}})["x"].user_id == 7


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (uuid.UUID, SECRET, "x is of type str, not UUID"),
        (uuid.UUID, None, "x is of type NoneType, not UUID"),
        (uuid.UUID | None, 5, "x is of type int, not UUID"),
        (Color, "red", "x is of type str, not Color"),
        (Color, Level.LOW, "x is of type Level, not Color"),
        (datetime, datetime(2024, 1, 1), "x is a datetime without a time zone"),
        (datetime, MyDatetime(2024, 1, 1, tzinfo=UTC), "x is of type MyDatetime, not datetime"),
        (datetime, date(2024, 1, 1), "x is of type date, not datetime"),
        (datetime, datetime(2024, 1, 1, tzinfo=BrokenZone()), "x cannot be written as datetime (RuntimeError)"),
        (date, datetime(2024, 1, 1, tzinfo=UTC), "x is of type datetime, not date"),
        (timedelta, 90, "x is of type int, not timedelta"),
        (Decimal, 1.5, "x is of type float, not Decimal"),
        (Decimal, Decimal("NaN"), "x is not a finite number"),
        (Decimal, Decimal("-Infinity"), "x is not a finite number"),
        (Money, {"amount": SECRET}, "x is of type dict, not Money"),
        (Order, SpecialOrder(UNIQUE, Money(Decimal(1))), "x is of type SpecialOrder, not Order"),
        (Order, Order(UNIQUE, Money(SECRET)), "x.total.amount is of type str, not Decimal"),  # type: ignore[arg-type]
        (Order, Order(UNIQUE, Money(Decimal(1)), ["a", (SECRET,)]), f"x.tags[1] is of type tuple; {TYPES}"),  # type: ignore[list-item]
        (Slotted, Slotted.__new__(Slotted), "x.x cannot be read (AttributeError)"),
        (Customer, {"id": SECRET}, "x is of type dict, not Customer"),
    ],
)
def test_a_value_of_another_type_than_the_annotation_is_refused(annotation: Any, value: Any, message: str) -> None:
    assert refusal(lambda: stored(annotation, value)) == f"{JOB}(): {message}"


def test_a_uuid_of_a_driver_becomes_a_plain_one() -> None:
    assert type(round_trip(uuid.UUID, MyUUID(str(UNIQUE)))) is uuid.UUID


def test_a_dataclass_counts_as_one_level() -> None:
    assert round_trip(Order, Order(UNIQUE, Money(Decimal(1)), nested(31))).tags == nested(31)
    assert "x.tags" in refusal(lambda: stored(Order, Order(UNIQUE, Money(Decimal(1)), nested(32))))


@pytest.mark.parametrize(
    ("annotation", "payload", "value"),
    [
        (timedelta, 90, timedelta(seconds=90)),
        (timedelta, 0.5, timedelta(seconds=0.5)),
        (datetime, "2024-01-01T00:00:00Z", datetime(2024, 1, 1, tzinfo=UTC)),
        (Money, {"amount": "1"}, Money(Decimal(1))),
    ],
)
def test_payloads_of_other_programs_are_understood(annotation: Any, payload: Any, value: Any) -> None:
    assert taking(annotation).decode({"x": payload}) == {"x": value}


@pytest.mark.parametrize(
    ("annotation", "payload", "message"),
    [
        (Color, SECRET, "x cannot be restored as Color (ValueError)"),
        (Color, [SECRET], "x cannot be restored as Color (ValueError)"),
        (Right, 64, "x cannot be restored as Right (ValueError)"),
        (Color, None, "x cannot be restored as Color (ValueError)"),
        (datetime, SECRET, "x cannot be restored as datetime (ValueError)"),
        (datetime, "2024-01-01T00:00:00", "x cannot be restored: it is a datetime without a time zone"),
        (datetime, 5, "x cannot be restored as datetime from a payload of type int"),
        (date, "2024-01-01T00:00:00+00:00", "x cannot be restored as date (ValueError)"),
        (timedelta, SECRET, "x cannot be restored as timedelta: it is no number of seconds"),
        (timedelta, True, "x cannot be restored as timedelta: it is no number of seconds"),
        (timedelta, "1e3", "x cannot be restored as timedelta: it is no number of seconds"),
        (timedelta, "999999999999999", "x cannot be restored as timedelta (OverflowError)"),
        (timedelta, 1e300, "x cannot be restored as timedelta (OverflowError)"),
        (Decimal, SECRET, "x cannot be restored as Decimal (InvalidOperation)"),
        (Decimal, "NaN", "x cannot be restored: it is not a finite number"),
        (Decimal, 1.5, "x cannot be restored as Decimal from a payload of type float"),
        (uuid.UUID, SECRET, "x cannot be restored as UUID (ValueError)"),
        (uuid.UUID, None, "x cannot be restored as UUID from a payload of type NoneType"),
        (uuid.UUID | None, 5, "x cannot be restored as UUID from a payload of type int"),
        (Money, SECRET, "x cannot be restored as Money from a payload of type str"),
        (Money, {"currency": SECRET}, "x.amount is missing"),
        (Money, {"amount": "1", SECRET: 1}, "x has an entry that is no field of Money"),
        (Order, {"id": str(UNIQUE), "total": {"amount": SECRET}}, "x.total.amount cannot be restored as Decimal (InvalidOperation)"),
        (Picky, {"name": SECRET}, "x cannot be restored as Picky (ValueError)"),
        (Customer, {"id": SECRET}, "x cannot be restored as Customer (ValidationError)"),
        (Customer, SECRET, "x cannot be restored as Customer (ValidationError)"),
    ],
)
def test_a_payload_that_cannot_be_restored_is_refused(annotation: Any, payload: Any, message: str) -> None:
    assert refusal(lambda: taking(annotation).decode({"x": payload})) == f"{JOB}(): {message}"


# Sensitive parameters


@pytest.mark.parametrize(
    "annotation",
    [
        Annotated[Any, Sensitive],
        Annotated[list[Any], Sensitive()],
        Annotated[Any, Sensitive] | None,
        list[Annotated[Any, Sensitive]],
        Credentials,
        Login,
    ],
    ids=str,
)
def test_a_mark_anywhere_makes_the_parameter_sensitive(annotation: Any) -> None:
    assert taking(annotation).sensitive == {"x"}


def test_other_parameters_are_not_sensitive() -> None:
    assert taking(Annotated[str, "secret"]).sensitive == frozenset()
    assert taking(Order).sensitive == frozenset()


def test_a_sensitive_parameter_is_named_without_the_place() -> None:
    message = refusal(lambda: stored(Annotated[list[Any], Sensitive], [1, {"a": (SECRET,)}]))
    assert message == f"{JOB}(): x is of type tuple; {TYPES}"
    message = refusal(lambda: stored(Credentials, Credentials("me", (SECRET,))))  # type: ignore[arg-type]
    assert message == f"{JOB}(): x is of type tuple; {TYPES}"


# Errors and imports


def test_no_repr_shows_a_value() -> None:
    signature = taking(Any)
    signature.encode((SECRET,), {})
    assert repr(signature) == f"<Signature of {JOB}>"


def test_a_type_that_hides_its_name_is_named_all_the_same() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise RuntimeError

    assert "is of type Odd" in refusal(lambda: check_json(Meta("Odd", (), {})(), "x"))


def test_neither_pydantic_nor_sqlalchemy_is_imported() -> None:
    # The package itself is replaced by an empty one: the public names may import what they like.
    program = """
import sys, types
sys.modules["sqlqueue"] = package = types.ModuleType("sqlqueue")
package.__path__ = sys.argv[1:]
import sqlqueue._arguments
print([name for name in ("pydantic", "sqlalchemy") if name in sys.modules])
"""
    command = [sys.executable, "-c", program, *sys.modules["sqlqueue"].__path__]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
