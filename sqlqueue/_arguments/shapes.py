"""
One class whose instances travel by themselves: an event.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from sqlqueue._arguments.annotations import UnsupportedAnnotation, codec_for
from sqlqueue._arguments.contract import DEPTH, JSON, Misfit, type_name
from sqlqueue.errors import ArgumentError, RegistrationError

__all__ = ["Shape", "is_shaped"]


def is_shaped(kind: object) -> bool:
    """
    Whether this is a dataclass, or the class of a pydantic model.
    """
    if not isinstance(kind, type):
        return False
    base = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    return dataclasses.is_dataclass(kind) or (base is not None and issubclass(kind, base))


class Shape:
    """
    How the instances of a dataclass or pydantic model become JSON.
    """

    def __init__(self, kind: type) -> None:
        self._name = kind.__qualname__
        try:
            self._codec = codec_for(kind)
        except UnsupportedAnnotation as unsupported:
            raise RegistrationError(f"{self._name} cannot travel: {unsupported}") from None
        except Exception as error:
            raise RegistrationError(f"{self._name} cannot travel: its annotations cannot be read ({type_name(error)})") from error

    def encode(self, value: Any) -> JSON:
        """
        The value as JSON, or ``ArgumentError`` that names the place.
        """
        try:
            return self._codec.encode(value, DEPTH)
        except Misfit as misfit:
            raise ArgumentError(f"{self._name}{'' if self._codec.sensitive else misfit.place} {misfit.reason}") from None
