"""
The JSON contract: which values travel as they are, and the text they travel in.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, NoReturn, TypeAlias

from sqlqueue.errors import ArgumentError

__all__ = ["DEPTH", "JSON", "Misfit", "check_json", "checked", "from_json", "to_json", "type_name"]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

DEPTH = 32

# Python refuses to read longer integers from text (sys.set_int_max_str_digits), whatever this process has set.
_INT_DIGITS = 4300
_INT_BOUND = 10**_INT_DIGITS

# Circular values end at the depth limit, long before they get here.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":"))


class Misfit(Exception):
    """
    A value outside the contract: the reason, and the place inside the argument. Never the value.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = ""

    def move_inside(self, step: str) -> None:
        """
        Prefix the place with one step of the container around it.
        """
        self.place = step + self.place


def type_name(value: object) -> str:
    """
    Name the type of a value, whatever its metaclass does.
    """
    return str(type.__dict__["__name__"].__get__(type(value)))


def check_json(value: object, place: str, *, depth: int = DEPTH) -> None:
    """
    Raise ``ArgumentError`` that names the place unless the value is plain JSON, by exact type.
    """
    try:
        checked(value, depth)
    except Misfit as misfit:
        raise ArgumentError(f"{place}{misfit.place} {misfit.reason}") from None


def checked(value: Any, depth: int) -> JSON:
    """
    Return the value itself if it is plain JSON of at most ``depth`` levels, else raise ``Misfit``.
    """
    kind = type(value)
    if kind is str:
        if not value.isascii() and not _is_unicode(value):
            raise Misfit("has a lone surrogate, which is not valid Unicode")
    elif kind is int:
        if not -_INT_BOUND < value < _INT_BOUND:
            raise Misfit(f"is an integer of more than {_INT_DIGITS} digits")
    elif kind is float:
        if not isfinite(value):
            raise Misfit("is not a finite number")
    elif kind is list:
        _check_list(value, depth)
    elif kind is dict:
        _check_dict(value, depth)
    elif value is not None and kind is not bool:
        raise Misfit(f"is of type {type_name(value)}; JSON carries None, bool, int, float, str, list and dict")
    return value  # type: ignore[no-any-return]  # just shown to be JSON


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_list(items: list[Any], depth: int) -> None:
    _refuse_depth(depth)
    index = 0
    try:
        for index, item in enumerate(items):  # noqa: B007  # read by the handler below
            checked(item, depth - 1)
    except Misfit as misfit:
        misfit.move_inside(f"[{index}]")
        raise


def _check_dict(items: dict[Any, Any], depth: int) -> None:
    _refuse_depth(depth)
    ordinal = 0
    try:
        for ordinal, (key, item) in enumerate(items.items()):  # noqa: B007  # read by the handler below
            _check_key(key)
            checked(item, depth - 1)
    except Misfit as misfit:
        # A key can be as secret as a value: the entry is named by its position.
        misfit.move_inside(f".{{{ordinal}}}")
        raise


def _check_key(key: object) -> None:
    if type(key) is not str:
        raise Misfit(f"has a key of type {type_name(key)}; JSON would turn it into a str")
    if not key.isascii() and not _is_unicode(key):
        raise Misfit("has a key with a lone surrogate, which is not valid Unicode")


def _refuse_depth(depth: int) -> None:
    if depth < 1:
        raise Misfit(f"is nested more than {DEPTH} levels deep, or contains itself")


def to_json(payload: dict[str, JSON]) -> str:
    """
    Write a payload that ``Signature.encode`` or ``check_json`` has accepted: compact, ASCII-escaped.
    """
    try:
        return _ENCODER.encode(payload)
    except (TypeError, ValueError, RecursionError) as error:
        fault = type_name(error)
    # Raised out here, so that no foreign error with the value in it is chained.
    raise ArgumentError(f"payload cannot be written as JSON ({fault})")


def from_json(text: object) -> dict[str, JSON]:
    """
    Read a payload. ``ArgumentError`` for everything that is not the text of a JSON object, and no other error.
    """
    payload = None
    if isinstance(text, str):
        try:
            payload = _DECODER.decode(text)
        except (ValueError, RecursionError):
            payload = None
    if type(payload) is not dict:
        # Raised out here: a JSONDecodeError carries the whole document and must not be chained.
        raise ArgumentError("payload is not a JSON object")
    return payload


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
