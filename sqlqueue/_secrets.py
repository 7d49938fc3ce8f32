"""
The texts as which sensitive arguments may show up in errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from ._arguments import Signature

__all__ = ["secrets_of"]

LINE = 4
"""Characters from which on a line of a longer secret is one by itself."""


def secrets_of(signature: Signature, values: Mapping[str, Any]) -> tuple[str, ...]:
    """
    Those of a payload, or of the arguments restored from it: whole, in their parts, and as Python, JSON and URLs quote them.
    """
    names = signature.sensitive
    if not names:
        return ()
    parts = (part for name in names if name in values for part in _parts(values[name]))
    return tuple({text for part in parts for text in _texts(part)})


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None:  # their texts are everywhere, and no secret
        return
    yield value
    for inner in _inside(value):
        yield from _parts(inner)


def _inside(value: Any) -> tuple[Any, ...]:
    """
    What a value is made of, of a user's own class as well. The contract lets none be inside itself.
    """
    if isinstance(value, dict):
        return tuple(value.values())
    if isinstance(value, list):
        return tuple(value)
    with contextlib.suppress(Exception):  # a user's own attributes
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return tuple(getattr(value, field.name) for field in dataclasses.fields(value))
        if hasattr(type(value), "model_fields"):
            return tuple(vars(value).values())
    return ()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        yield from (quoted[1:-1] for quoted in (repr(value), ascii(value), json.dumps(value)))
        with contextlib.suppress(UnicodeEncodeError):
            yield repr(value.encode())[2:-1]
            yield from (quote(value), quote(value, safe=""), quote_plus(value))
        # The traceback of a group of exceptions begins each line with a margin.
        yield from (line for line in map(str.strip, value.splitlines()) if len(line) >= LINE)
        return
    for text in (str, repr):
        with contextlib.suppress(Exception):  # a user's own class
            yield text(value)
