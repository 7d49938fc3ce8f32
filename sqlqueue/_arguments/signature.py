"""
How one job's function takes its arguments.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from threading import RLock
from typing import Any

from sqlqueue._arguments.annotations import UnsupportedAnnotation, codec_for, evaluate, unwrap
from sqlqueue._arguments.codecs import Codec
from sqlqueue._arguments.contract import DEPTH, JSON, Misfit, type_name
from sqlqueue.errors import ArgumentError, RegistrationError

__all__ = ["Signature"]

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_SESSIONS = {"Session": "sqlalchemy.orm", "AsyncSession": "sqlalchemy.ext.asyncio"}

# A name that is not defined yet, or a module that is still being imported.
_NOT_YET = (NameError, AttributeError)


@dataclass(frozen=True, slots=True)
class _Plan:
    """
    What every push and every run needs, read once from the resolved annotations.
    """

    positional: tuple[str, ...]
    required: frozenset[str]
    sensitive: frozenset[str]
    codecs: Mapping[str, Codec]


class Signature:
    """
    How one job's function takes its arguments: checked once, then used at every push and every run.
    """

    __slots__ = ("_context_type", "_function", "_lock", "_name", "_plan", "is_async", "session_type", "takes_context")

    is_async: bool
    """Whether to call the function makes a coroutine."""
    takes_context: bool
    session_type: Any
    """The class of the session that comes before the arguments, if one does."""

    def __init__(self, function: Callable[..., Any], *, context_type: type) -> None:
        self._function = function
        self._context_type = context_type
        self._name: str = getattr(function, "__qualname__", type_name(function))
        self._lock = RLock()
        self._plan: _Plan | None = None
        self._read_function()
        self._plan = self._read_plan(is_final=False)

    def __repr__(self) -> str:
        return f"<Signature of {self._name}>"

    @property
    def sensitive(self) -> frozenset[str]:
        """
        The parameters with ``Sensitive`` anywhere in their annotation.
        """
        return (self._plan or self._resolved()).sensitive

    @property
    def is_resolved(self) -> bool:
        """
        Whether every annotation has been read.
        """
        return self._plan is not None

    def resolve(self) -> None:
        """
        Resolve what was not defined when the function was registered, or raise ``RegistrationError``.
        """
        self._resolved()

    def sole_parameter(self) -> tuple[str, Any]:
        """
        The name and the resolved annotation of the one parameter that has to be given, taken by position.

        Raises:
            RegistrationError: there is none, or there are others that have no default.
        """
        plan = self._plan or self._resolved()
        name = plan.positional[0] if plan.positional else None
        if name is None or not plan.required <= {name}:
            raise RegistrationError(f"{self._name}: it has to take one argument, the event; others need a default")
        parameter = next(one for one in self._read_parameters() if one.name == name)
        return name, unwrap(self._evaluate(parameter))

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, JSON]:
        """
        Bind the arguments, context and session left out, and turn them into a payload. What is left to its default is not stored.
        """
        plan = self._plan or self._resolved()
        payload = self._bind(plan, args, kwargs)
        codecs = plan.codecs
        for name, value in payload.items():
            try:
                payload[name] = codecs[name].encode(value, DEPTH)
            except Misfit as misfit:
                raise self._refusal(plan, name, misfit) from None
        return payload

    def decode(self, payload: Mapping[str, JSON]) -> dict[str, Any]:
        """
        The keyword arguments for the call, with restored types.
        """
        plan = self._plan or self._resolved()
        self._refuse_names(plan, payload)
        arguments = {}
        for name, value in payload.items():
            try:
                arguments[name] = plan.codecs[name].decode(value)
            except Misfit as misfit:
                raise self._refusal(plan, name, misfit) from None
        return arguments

    def complete(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """
        The arguments with the defaults of those that were left out, in the order of the parameters.
        """
        parameters = self._read_parameters()
        known = {one.name: one.default for one in parameters if one.name in arguments or one.default is not Parameter.empty}
        return {**known, **arguments}

    def _bind(self, plan: _Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(plan.positional):
            raise ArgumentError(f"{self._name}() takes {len(plan.positional)} positional arguments, {len(args)} were given")
        bound = dict(zip(plan.positional, args, strict=False))
        for name in kwargs:
            if name in bound:
                raise ArgumentError(f"{self._name}() was given the argument {_shown(name)} twice")
        bound.update(kwargs)
        self._refuse_names(plan, bound)
        return bound

    def _refuse_names(self, plan: _Plan, given: Mapping[str, Any]) -> None:
        if not given.keys() <= plan.codecs.keys():
            unknown = next(name for name in given if name not in plan.codecs)
            raise ArgumentError(f"{self._name}() has no parameter {_shown(unknown)}")
        if not plan.required <= given.keys():
            missing = next(name for name in plan.codecs if name in plan.required and name not in given)
            raise ArgumentError(f"{self._name}() misses the argument {_shown(missing)}")

    def _refusal(self, plan: _Plan, name: str, misfit: Misfit) -> ArgumentError:
        place = "" if name in plan.sensitive else misfit.place
        return ArgumentError(f"{self._name}(): {name}{place} {misfit.reason}")

    def _resolved(self) -> _Plan:
        with self._lock:
            if self._plan is None:
                self._plan = self._read_plan(is_final=True)
            # Only a reading that is not final comes back without a plan.
            assert self._plan is not None
            return self._plan

    def _read_function(self) -> None:
        # A callable object is what its __call__ is.
        self.is_async = False
        for function in (self._function, getattr(self._function, "__call__", None)):  # noqa: B004  # not a test for callability
            self.is_async |= inspect.iscoroutinefunction(function)
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise RegistrationError(f"{self._name}: a generator function cannot be a job")

    def _read_plan(self, *, is_final: bool) -> _Plan | None:
        parameters = self._read_parameters()
        self.takes_context = bool(parameters) and self._is_context(parameters[0])
        arguments = parameters[1:] if self.takes_context else parameters
        self.session_type, is_certain = self._read_session(arguments[0]) if arguments else (None, True)
        if self.session_type is not None:
            arguments = arguments[1:]
        codecs: dict[str, Codec] = {}
        for parameter in arguments:
            self._refuse_kind(parameter)
            codec = self._read_codec(parameter, is_final=is_final)
            if codec is not None:
                codecs[parameter.name] = codec
        if len(codecs) < len(arguments) or not (is_certain or is_final):
            return None
        if _is_session(self.session_type, ["AsyncSession"]):
            raise RegistrationError(f"{self._name}: handlers with an AsyncSession are not available in this version")
        if self.is_async and self.session_type is not None:
            raise RegistrationError(
                f"{self._name}: an async def handler cannot be transactional; take the session out, or make it a plain function"
            )
        return _Plan(
            positional=tuple(p.name for p in arguments if p.kind is not Parameter.KEYWORD_ONLY),
            required=frozenset(p.name for p in arguments if p.default is Parameter.empty),
            sensitive=frozenset(name for name, codec in codecs.items() if codec.sensitive),
            codecs=codecs,
        )

    def _read_parameters(self) -> list[Parameter]:
        try:
            return list(_read_signature(self._function).parameters.values())
        except (TypeError, ValueError) as error:
            raise RegistrationError(f"{self._name}: its signature cannot be read") from error

    def _is_context(self, parameter: Parameter) -> bool:
        if parameter.kind not in _BY_POSITION:
            return False
        try:
            return unwrap(self._evaluate(parameter)) is self._context_type
        except Exception:
            # `sqlqueue.JobContext`, imported for type checkers only, never becomes a name: the text has to do.
            return _name_in(parameter.annotation) == self._context_type.__name__

    def _read_session(self, parameter: Parameter) -> tuple[Any, bool]:
        """
        The class of a leading session, or None; and whether that is certain, or only a name tells, which may be another class's.
        """
        if parameter.kind not in _BY_POSITION:
            return None, True
        try:
            annotation, is_certain = unwrap(self._evaluate(parameter)), True
        except Exception:
            annotation, is_certain = _session_class(_name_in(parameter.annotation)), False  # as above
        return (annotation, is_certain) if _is_session(annotation) else (None, True)

    def _refuse_kind(self, parameter: Parameter) -> None:
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            raise RegistrationError(f"{self._name}: a job cannot take {parameter.name!r} as *args or **kwargs")
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            raise RegistrationError(f"{self._name}: parameter {parameter.name!r} is positional-only; arguments travel by name")

    def _read_codec(self, parameter: Parameter, *, is_final: bool) -> Codec | None:
        # One parameter at a time: an error belongs to one, and the return annotation is nobody's business.
        place = f"{self._name}: parameter {parameter.name!r}"
        try:
            annotation = self._evaluate(parameter)
            if unwrap(annotation) is self._context_type:
                raise UnsupportedAnnotation("the context must be the first parameter, taken by position")
            if _is_session(unwrap(annotation)):
                raise UnsupportedAnnotation("the session must be the first parameter, or follow the context, taken by position")
            return codec_for(annotation)
        except UnsupportedAnnotation as unsupported:
            raise RegistrationError(f"{place}: {unsupported}") from None
        except _NOT_YET as error:
            if is_final:
                raise RegistrationError(f"{place}: its annotation cannot be resolved ({error})") from error
            return None
        except Exception as error:
            raise RegistrationError(f"{place}: its annotation cannot be read ({type_name(error)})") from error

    def _evaluate(self, parameter: Parameter) -> Any:
        if parameter.annotation is Parameter.empty:
            return parameter.annotation
        function = _innermost(self._function)
        names = getattr(function, "__globals__", {})
        local = {variable.__name__: variable for variable in getattr(function, "__type_params__", ())}
        if self._context_type.__name__ not in names:
            local[self._context_type.__name__] = self._context_type
        return evaluate(parameter.annotation, names, local)


def _read_signature(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        import annotationlib  # new in Python 3.14

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _session_class(name: str) -> Any:
    # This floor knows no database. Whoever annotates with the class has imported it.
    return getattr(sys.modules.get(_SESSIONS.get(name, "")), name, None)


def _is_session(annotation: Any, names: Iterable[str] = _SESSIONS) -> bool:
    classes = tuple(found for name in names if (found := _session_class(name)) is not None)
    return isinstance(annotation, type) and issubclass(annotation, classes)


def _name_in(annotation: Any) -> str:
    """
    The last name in the text of an annotation that cannot be evaluated; empty for what is not text.
    """
    text = getattr(annotation, "__forward_arg__", annotation)
    return text.strip("'\" ").rpartition(".")[2] if isinstance(text, str) else ""


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _shown(name: object) -> str:
    # Names come from payloads and from **kwargs of strangers: short, and safe on a terminal.
    return ascii(name[:80]) if isinstance(name, str) else f"of type {type_name(name)}"
