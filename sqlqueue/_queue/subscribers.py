"""
Who subscribes to which events.
"""

from __future__ import annotations

import threading
from typing import Any

from .._arguments import Shape, is_shaped
from .._job import Job
from .._options import JOB_NAME
from ..errors import OptionError, RegistrationError

__all__ = ["Subscribers"]


class Subscribers:
    """
    Jobs by the names of the events that they are pushed for.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._names: dict[type, str] = {}
        self._shapes: dict[type, Shape] = {}
        self._subscribed: dict[str, dict[str, Job[..., Any]]] = {}

    def name(self, kind: type, name: str) -> None:
        """
        Give an event class a name that stays when it is renamed or moved.

        Raises:
            RegistrationError: another class has the name, or this one has another, or is subscribed to by its default name already.
        """
        check_event_name(name)
        _check_class(kind)
        with self._guard:
            known = self._names.get(kind, name)
            if known != name or default_name(kind) in self._subscribed:
                raise RegistrationError(f"{default_name(kind)} is known as an event already, as {self.name_of(kind)}")
            other = next((one for one, its in self._names.items() if its == name and default_name(one) != default_name(kind)), None)
            if other is not None:
                raise RegistrationError(f"two events are named {name}: {default_name(other)} and {default_name(kind)}")
            self._names[kind] = name

    def name_of(self, kind: type) -> str:
        """
        What an event class is called.
        """
        return self._names.get(kind) or default_name(kind)

    def add(self, event: type | str, job: Job[..., Any]) -> None:
        """
        Push this job for every event of a class, or of a name.
        """
        name = event if isinstance(event, str) else self.name_of(event)
        with self._guard:
            self._subscribed.setdefault(name, {})[job.name] = job

    def of(self, kind: type) -> list[Job[..., Any]]:
        """
        The jobs to push for an event of exactly this class, in the order of their registration.
        """
        return list(self._subscribed.get(self.name_of(kind), {}).values())

    def shape(self, kind: type) -> Shape:
        """
        How its instances travel, worked out once.

        Raises:
            RegistrationError: they cannot.
        """
        shape = self._shapes.get(kind)
        if shape is None:
            shape = self._shapes[kind] = Shape(kind)
        return shape


def check_event(event: type | str) -> None:
    """
    Raises:
        RegistrationError: not an event class.
        OptionError: not the name of an event.
    """
    if isinstance(event, str):
        check_event_name(event)
    else:
        _check_class(event)


def check_takes(job: Job[..., Any], event: type | str) -> None:
    """
    Raises:
        RegistrationError: the function does not take what would be pushed.
    """
    parameter, annotation = job.signature.sole_parameter()
    wanted = event if isinstance(event, type) else annotation
    if annotation is not wanted or not is_shaped(annotation):
        expected = wanted.__name__ if is_shaped(wanted) else "a dataclass or pydantic model"
        raise RegistrationError(f"{job.name}: parameter {parameter!r} has to be annotated as {expected}, the event that it subscribes to")


def check_event_name(name: object) -> None:
    """
    Raises:
        OptionError: not the name of an event.
    """
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise OptionError("event: a name is 1 to 190 of the characters A-Z a-z 0-9 _ . : -")


def _check_class(kind: object) -> None:
    if not is_shaped(kind):
        given = kind.__name__ if isinstance(kind, type) else f"a {type(kind).__name__}"
        raise RegistrationError(f"an event is a dataclass or pydantic model, not {given}")


def default_name(kind: type) -> str:
    """
    Where the class is found.
    """
    return f"{kind.__module__}.{kind.__qualname__}"
