"""
From an annotation to the codec of its values.

Each reader knows one kind of annotation and answers None for all others. Names that are not defined yet
leave here as the ``NameError`` they are.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ForwardRef, Literal, NewType, TypeAlias, TypeVar, Union

from sqlqueue._arguments.codecs import PLAIN, STANDARD, Codec, dataclass_codec, enum_codec, model_codec, optional_codec
from sqlqueue._arguments.contract import Misfit, checked

__all__ = ["Sensitive", "UnsupportedAnnotation", "codec_for", "evaluate", "unwrap"]

# The aliases, TypedDicts and dataclasses that are being read: whoever meets one of them again has found a recursion.
_Enclosing: TypeAlias = tuple[Any, ...]

_LEAVES = (Any, object, None, types.NoneType, bool, int, float, str, typing.LiteralString)
_CONTAINERS = (
    list,
    dict,
    collections.abc.Mapping,
    collections.abc.MutableMapping,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_QUALIFIERS = ("Required", "NotRequired", "ReadOnly", "Final")


class Sensitive:
    """
    Marks a parameter, or a field of a dataclass or pydantic model, whose value must not appear in error texts that are recorded,
    logged or told: ``token: Annotated[str, Sensitive]``. The whole argument is redacted there, but not the keys of a dict.
    """

    __slots__ = ()


class UnsupportedAnnotation(Exception):
    """
    An annotation whose values cannot travel. The message says why, without the parameter's name.
    """


def codec_for(annotation: Any, enclosing: _Enclosing = ()) -> Codec:
    """
    Find the codec for a resolved annotation.
    """
    if any(annotation is outer for outer in enclosing):
        return _read_recursion(annotation)
    for read in _READERS:
        if (codec := read(annotation, enclosing)) is not None:
            return codec
    raise UnsupportedAnnotation(_explain(annotation))


def evaluate(annotation: Any, names: dict[str, Any], local: Mapping[str, Any] | None = None) -> Any:
    """
    Resolve the names in one annotation.
    """
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, names, local or {}, include_extras=True)["it"]


def unwrap(annotation: Any) -> Any:
    """
    The annotation inside ``Annotated[…]``.
    """
    return annotation.__origin__ if typing.get_origin(annotation) is Annotated else annotation


def _explain(annotation: Any) -> str:
    shape = typing.get_origin(annotation) or annotation
    name = getattr(shape, "__qualname__", None) or type(shape).__qualname__
    if shape in (tuple, set, frozenset, collections.abc.Set):
        return f"values of type {name} come back changed from JSON; use list"
    return f"values of type {name} cannot be restored from JSON"


def _read_recursion(annotation: Any) -> Codec:
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        raise UnsupportedAnnotation(f"the dataclass {annotation.__name__} refers to itself")
    return PLAIN


def _plain_codec(annotations: typing.Iterable[Any], enclosing: _Enclosing, container: str) -> Codec:
    codecs = [codec_for(annotation, enclosing) for annotation in annotations]
    if any(codec.restores for codec in codecs):
        raise UnsupportedAnnotation(f"{container} can hold plain JSON only, nothing that has to be restored")
    return dataclasses.replace(PLAIN, sensitive=any(codec.sensitive for codec in codecs))


def _read_wrapper(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        codec = codec_for(annotation.__origin__, enclosing)
        return dataclasses.replace(codec, sensitive=True) if _has_mark(annotation.__metadata__) else codec
    if isinstance(annotation, NewType):
        return codec_for(annotation.__supertype__, enclosing)
    if getattr(origin, "_name", None) in _QUALIFIERS:
        return codec_for(annotation.__args__[0], enclosing)
    return None


def _has_mark(metadata: typing.Iterable[Any]) -> bool:
    return any(mark is Sensitive or type(mark) is Sensitive for mark in metadata)


def _read_alias(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    # By name: `type X = …` needs Python 3.12, typing_extensions brings its own class before.
    if type(annotation).__name__ == "TypeAliasType":
        value = evaluate(annotation.__value__, vars(sys.modules[annotation.__module__]))
        return codec_for(value, (*enclosing, annotation))
    origin = typing.get_origin(annotation)
    if type(origin).__name__ == "TypeAliasType":
        return _plain_codec([origin, *annotation.__args__], enclosing, "a generic alias")
    return None


def _read_leaf(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    # A ForwardRef that outlived its evaluation is how an alias refers to itself: `Tree = "int | list[Tree]"`.
    if annotation is inspect.Parameter.empty or isinstance(annotation, TypeVar | ForwardRef):
        return PLAIN
    return PLAIN if any(annotation is leaf for leaf in _LEAVES) else None


def _read_literal(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    # Asked by name for the sake of typing_extensions.
    if getattr(typing.get_origin(annotation), "_name", None) != "Literal" and typing.get_origin(annotation) is not Literal:
        return None
    if all(_is_plain(value) for value in annotation.__args__):
        return PLAIN
    raise UnsupportedAnnotation("a Literal can hold plain JSON only, nothing that has to be restored")


def _is_plain(value: object) -> bool:
    try:
        checked(value, 0)
    except Misfit:
        return False
    return True


def _read_union(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return None
    members = [member for member in annotation.__args__ if member is not types.NoneType]
    if len(members) == 1:
        codec = codec_for(members[0], enclosing)
        return optional_codec(codec) if codec.restores else codec
    return _plain_codec(members, enclosing, "a union")


def _read_container(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    origin = typing.get_origin(annotation) or annotation
    if not any(origin is container for container in _CONTAINERS):
        return None
    arguments = typing.get_args(annotation)
    if origin in _MAPPINGS and arguments and unwrap(arguments[0]) in (int, float, bool, types.NoneType):
        raise UnsupportedAnnotation("the keys of a dict must be str")
    return _plain_codec(arguments, enclosing, f"a {origin.__name__}")


def _read_typed_dict(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    # Not is_typeddict(): it does not know the TypedDict of typing_extensions.
    if not (isinstance(annotation, type) and issubclass(annotation, dict) and hasattr(annotation, "__required_keys__")):
        return None
    hints = typing.get_type_hints(annotation, include_extras=True)
    return _plain_codec(hints.values(), (*enclosing, annotation), "a TypedDict")


def _read_standard(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    return STANDARD.get(annotation) if isinstance(annotation, type) else None


def _read_enum(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    if not (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return None
    members = list(annotation.__members__.values())
    if not members:
        raise UnsupportedAnnotation(f"the enum {annotation.__name__} has no members")
    if not all(_is_scalar(member._value_) for member in members):
        raise UnsupportedAnnotation(f"the enum {annotation.__name__} has members whose value is no plain str, int, float or bool")
    return enum_codec(annotation)


def _is_scalar(value: object) -> bool:
    return value is not None and _is_plain(value)


def _read_dataclass(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        return None
    _refuse_constructor(annotation)
    hints = typing.get_type_hints(annotation, include_extras=True)
    codecs = {}
    for field in dataclasses.fields(annotation):
        try:
            codecs[field.name] = codec_for(hints[field.name], (*enclosing, annotation))
        except UnsupportedAnnotation as unsupported:
            raise UnsupportedAnnotation(f"field {field.name!r} of {annotation.__name__}: {unsupported}") from None
    return dataclass_codec(annotation, codecs)


def _refuse_constructor(cls: type) -> None:
    fields = dataclasses.fields(cls)
    for field in fields:
        if not field.init:
            raise UnsupportedAnnotation(f"field {field.name!r} of {cls.__name__} has init=False")
    if inspect.signature(cls).parameters.keys() != {field.name for field in fields}:
        raise UnsupportedAnnotation(f"the constructor of {cls.__name__} takes other arguments than its fields")


def _read_model(annotation: Any, enclosing: _Enclosing) -> Codec | None:
    # Whoever has a model has imported pydantic: we never do.
    base = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    if base is None or not (isinstance(annotation, type) and issubclass(annotation, base)):
        return None
    if not hasattr(annotation, "model_validate_json"):
        raise UnsupportedAnnotation("models of pydantic 1 are not supported")
    return dataclasses.replace(model_codec(annotation), sensitive=_is_marked(annotation, ()))


def _is_marked(annotation: Any, enclosing: _Enclosing) -> bool:
    """
    Whether ``Sensitive`` stands anywhere in what a model is made of. Pydantic's own way of reading annotations is not ours.
    """
    if any(annotation is outer for outer in enclosing):
        return False
    enclosing = (*enclosing, annotation)
    if typing.get_origin(annotation) is Annotated:
        return _has_mark(annotation.__metadata__) or _is_marked(annotation.__origin__, enclosing)
    fields: Any = getattr(annotation, "model_fields", None) if isinstance(annotation, type) else None
    if isinstance(fields, dict):
        return any(_has_mark(field.metadata) or _is_marked(field.annotation, enclosing) for field in fields.values())
    inner = typing.get_args(annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        inner = tuple(typing.get_type_hints(annotation, include_extras=True).values())
    elif type(annotation).__name__ == "TypeAliasType":
        inner = (annotation.__value__,)
    return any(_is_marked(one, enclosing) for one in inner)


_READERS = (
    _read_wrapper,
    _read_alias,
    _read_leaf,
    _read_literal,
    _read_union,
    _read_container,
    _read_typed_dict,
    _read_standard,
    _read_enum,
    _read_dataclass,
    _read_model,
)
