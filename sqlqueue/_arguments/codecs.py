"""
One codec for each kind of argument: plain JSON as it is, restored types to JSON and back.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, Flag
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

from sqlqueue._arguments.contract import JSON, Misfit, checked, type_name

__all__ = ["PLAIN", "STANDARD", "Codec", "dataclass_codec", "enum_codec", "model_codec", "optional_codec"]

T = TypeVar("T")

_MICROSECOND = timedelta(microseconds=1)
_SECONDS = re.compile(r"(-?)(\d{1,15})(?:\.(\d{1,6}))?", re.ASCII)
_RESTORABLE = (Enum, date, timedelta, Decimal, UUID)


@dataclass(frozen=True, slots=True)
class Codec:
    """
    How the values of one annotation travel. Both directions raise ``Misfit``.
    """

    encode: Callable[[Any, int], JSON]
    decode: Callable[[JSON], Any]
    restores: bool = True
    sensitive: bool = False


def _guarded(step: Callable[[Any], T], value: object, failure: str) -> T:
    try:
        return step(value)
    except Misfit:
        raise
    except Exception as error:
        fault = type_name(error)
    # Foreign errors like to quote the value: only their type goes on, and nothing is chained.
    raise Misfit(f"{failure} ({fault})")


def _require_type(value: object, cls: type) -> None:
    if type(value) is not cls:
        raise Misfit(f"is of type {type_name(value)}, not {cls.__name__}")


def _encode_plain(value: Any, depth: int) -> JSON:
    try:
        return checked(value, depth)
    except Misfit as misfit:
        if misfit.place or not _is_restorable(value):
            raise
    name = type_name(value)
    raise Misfit(f"is of type {name}, which plain JSON cannot restore: annotate the parameter as {name}")


def _is_restorable(value: object) -> bool:
    return isinstance(value, _RESTORABLE) or dataclasses.is_dataclass(value) or hasattr(type(value), "model_dump")


def _decode_plain(value: JSON) -> JSON:
    return value


PLAIN = Codec(_encode_plain, _decode_plain, restores=False)


def optional_codec(codec: Codec) -> Codec:
    """
    ``X | None`` for the codec of X.
    """

    def encode(value: Any, depth: int) -> JSON:
        return None if value is None else codec.encode(value, depth)

    def decode(value: JSON) -> Any:
        return None if value is None else codec.decode(value)

    return dataclasses.replace(codec, encode=encode, decode=decode)


def _text_codec(cls: type[T], write: Callable[[T], str], read: Callable[[str], T]) -> Codec:
    def encode(value: Any, depth: int) -> JSON:
        _require_type(value, cls)
        return _guarded(write, value, f"cannot be written as {cls.__name__}")

    def decode(value: JSON) -> T:
        _require_text(value, cls)
        return _guarded(read, value, f"cannot be restored as {cls.__name__}")

    return Codec(encode, decode)


def _require_text(value: JSON, cls: type) -> None:
    if type(value) is not str:
        raise Misfit(f"cannot be restored as {cls.__name__} from a payload of type {type_name(value)}")


def _write_datetime(value: datetime) -> str:
    if value.utcoffset() is None:
        raise Misfit("is a datetime without a time zone")
    return value.isoformat()


def _read_datetime(text: str) -> datetime:
    value = datetime.fromisoformat(text)
    if value.utcoffset() is None:
        raise Misfit("cannot be restored: it is a datetime without a time zone")
    return value


def _write_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise Misfit("is not a finite number")
    return str(value)


def _read_decimal(text: str) -> Decimal:
    value = Decimal(text)
    if not value.is_finite():
        raise Misfit("cannot be restored: it is not a finite number")
    return value


def _encode_uuid(value: Any, depth: int) -> JSON:
    # asyncpg hands out a subclass that equals the UUID it stands for: subclasses are welcome here.
    if not isinstance(value, UUID):
        raise Misfit(f"is of type {type_name(value)}, not UUID")
    return _guarded(str, value, "cannot be written as UUID")


def _decode_uuid(value: JSON) -> UUID:
    _require_text(value, UUID)
    return _guarded(UUID, value, "cannot be restored as UUID")


def _write_timedelta(value: timedelta) -> str:
    # total_seconds() is a float and loses microseconds above 270 years.
    microseconds = value // _MICROSECOND
    whole, rest = divmod(abs(microseconds), 1_000_000)
    sign = "-" if microseconds < 0 else ""
    return f"{sign}{whole}.{rest:06}".rstrip("0").rstrip(".")


def _read_timedelta(value: JSON) -> timedelta:
    if type(value) is int or type(value) is float:
        return timedelta(seconds=value)
    match = _SECONDS.fullmatch(value) if type(value) is str else None
    if match is None:
        raise Misfit("cannot be restored as timedelta: it is no number of seconds")
    sign, whole, rest = match.groups(default="")
    microseconds = int(whole) * 1_000_000 + int(rest.ljust(6, "0"))
    return timedelta(microseconds=-microseconds if sign else microseconds)


def _decode_timedelta(value: JSON) -> timedelta:
    return _guarded(_read_timedelta, value, "cannot be restored as timedelta")


STANDARD: Mapping[type, Codec] = {
    datetime: _text_codec(datetime, _write_datetime, _read_datetime),
    date: _text_codec(date, date.isoformat, date.fromisoformat),
    timedelta: Codec(_text_codec(timedelta, _write_timedelta, _read_timedelta).encode, _decode_timedelta),
    Decimal: _text_codec(Decimal, _write_decimal, _read_decimal),
    UUID: Codec(_encode_uuid, _decode_uuid),
}


def enum_codec(cls: type[Enum]) -> Codec:
    """
    Members, and combinations of flags, by their value.
    """

    def encode(value: Any, depth: int) -> JSON:
        _require_type(value, cls)
        return checked(value._value_, depth)

    def restore(value: JSON) -> Enum:
        member = cls(value)
        if isinstance(member, Flag) and member.value != value:  # some releases of Python 3.11 drop bits that no flag has
            raise ValueError
        return member

    def decode(value: JSON) -> Enum:
        return _guarded(restore, value, f"cannot be restored as {cls.__name__}")

    return Codec(encode, decode)


@dataclass(frozen=True, slots=True)
class _DataclassCodec:
    cls: type
    codecs: Mapping[str, Codec]
    required: frozenset[str]

    def encode(self, value: Any, depth: int) -> JSON:
        _require_type(value, self.cls)
        return {name: self._encode_field(name, codec, value, depth - 1) for name, codec in self.codecs.items()}

    def _encode_field(self, name: str, codec: Codec, value: Any, depth: int) -> JSON:
        try:
            return codec.encode(_guarded(attrgetter(name), value, "cannot be read"), depth)
        except Misfit as misfit:
            misfit.move_inside(f".{name}")
            raise

    def decode(self, value: JSON) -> Any:
        if type(value) is not dict:
            raise Misfit(f"cannot be restored as {self.cls.__name__} from a payload of type {type_name(value)}")
        self._refuse_other_fields(value)
        fields = {name: self._decode_field(name, item) for name, item in value.items()}
        return _guarded(lambda fields: self.cls(**fields), fields, f"cannot be restored as {self.cls.__name__}")

    def _refuse_other_fields(self, value: dict[str, JSON]) -> None:
        for name in sorted(self.required - value.keys()):
            misfit = Misfit("is missing")
            misfit.move_inside(f".{name}")
            raise misfit
        if not value.keys() <= self.codecs.keys():
            raise Misfit(f"has an entry that is no field of {self.cls.__name__}")

    def _decode_field(self, name: str, value: JSON) -> Any:
        try:
            return self.codecs[name].decode(value)
        except Misfit as misfit:
            misfit.move_inside(f".{name}")
            raise


def dataclass_codec(cls: type, codecs: Mapping[str, Codec]) -> Codec:
    """
    A dataclass as an object of its fields; restored through its constructor.
    """
    required = frozenset(
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    fields = _DataclassCodec(cls, codecs, required)
    return Codec(fields.encode, fields.decode, sensitive=any(codec.sensitive for codec in codecs.values()))


@dataclass(frozen=True, slots=True)
class _ModelCodec:
    """
    Pydantic models. By the names of the fields where pydantic can read them back (2.11), else by alias.
    """

    cls: Any
    reads_names: bool

    def encode(self, value: Any, depth: int) -> JSON:
        _require_type(value, self.cls)
        dumped = checked(_guarded(self._dump, value, f"cannot be written as {self.cls.__name__}"), depth)
        # SecretStr dumps as asterisks, excluded fields not at all, NaN as null: what changes is refused, not stored.
        if not _guarded(lambda restored: self._is_same(value, restored), self.decode(dumped), "cannot be compared"):
            raise Misfit(f"is a {self.cls.__name__} that would come back changed from JSON")
        return dumped

    def decode(self, value: JSON) -> Any:
        return _guarded(self._load, value, f"cannot be restored as {self.cls.__name__}")

    def _dump(self, value: Any) -> Any:
        # pydantic's serialization warnings quote the value.
        return value.model_dump(mode="json", round_trip=True, by_alias=not self.reads_names, warnings=False)

    def _load(self, value: JSON) -> Any:
        # JSON mode: a strict model takes a UUID from text only there.
        options = {"by_alias": True, "by_name": True} if self.reads_names else {}
        return self.cls.model_validate_json(json.dumps(value), **options)

    def _is_same(self, value: Any, restored: Any) -> bool:
        same_fields = all(getattr(value, name) == getattr(restored, name) for name in self.cls.model_fields)
        return same_fields and bool(value.model_extra == restored.model_extra)


def model_codec(cls: Any) -> Codec:
    """
    A pydantic model, dumped in JSON mode and validated when it is restored.
    """
    model = _ModelCodec(cls, "by_name" in inspect.signature(cls.model_validate_json).parameters)
    return Codec(model.encode, model.decode)
