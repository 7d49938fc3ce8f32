"""
Options of jobs: their names, their checks, and which one wins.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ._backoff import Backoff, Exponential, seconds
from .errors import OptionError

if TYPE_CHECKING:
    from ._job import JobContext, Middleware

__all__ = [
    "DEFAULT_BACKOFF",
    "NO_CODE_OPTIONS",
    "CodeOptions",
    "JobOptionValues",
    "Key",
    "RowOptionValues",
    "RowOptions",
    "check_job_name",
    "check_key",
    "check_middleware",
    "check_queue_name",
    "shared_key",
    "split_options",
    "stored_key",
    "stored_once_key",
]

JOB_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,190}")
QUEUE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
PRIORITIES = range(-100, 101)
MOST_ATTEMPTS = 1_000_000
MOST_AT_ONCE = 1000  # a row each
HEADERS_LENGTH = 16 * 1024
SHORTEST_TIMEOUT = 0.001
KEY_LENGTH = 190
PLAIN_KEY = re.compile(r"[!-~]{1,190}")


@dataclass(frozen=True, slots=True)
class Key:
    """
    A key that all jobs share: `unique=Key("stock:42")`, `limit_key=Key("printer")`. A plain text is a key of one job's.
    """

    text: str


class RowOptionValues(TypedDict, total=False):
    """
    Options stored with the row when it is pushed.
    """

    queue: str
    priority: int
    delay: float | timedelta
    available_at: datetime
    unique: str | Key | bool
    unique_until: Literal["finished", "started"]
    unique_for: float | timedelta
    on_conflict: Literal["keep", "replace"]
    max_attempts: int
    deadline: datetime | float | timedelta
    headers: Mapping[str, str]


class CodeOptionValues(TypedDict, total=False):
    """
    Options of the code that runs the job: today's code decides, not the row.
    """

    backoff: Backoff
    on_worker_lost: Literal["retry", "fail"]
    timeout: float | timedelta
    fail_on_timeout: bool
    aliases: Sequence[str]
    middleware: Sequence[Middleware]
    limit: int
    limit_key: str | Key | Callable[[JobContext], str | int]


class JobOptionValues(RowOptionValues, CodeOptionValues, total=False):
    """
    What the decorator and `Queue.route` take.
    """


# Promised names whose behaviour does not exist yet: refused, because ignoring one would be a lie about what happens.
LATER_OPTIONS = frozenset((*("ordered_by", "fair_by"),))


@dataclass(frozen=True, slots=True)
class RowOptions:
    """
    Checked row options; None means "not given here".
    """

    queue: str | None = None
    priority: int | None = None
    delay: float | None = None
    available_at: datetime | None = None
    unique: str | Key | bool | None = None
    unique_until: Literal["finished", "started"] | None = None
    unique_for: float | None = None
    on_conflict: Literal["keep", "replace"] | None = None
    max_attempts: int | None = None
    deadline: datetime | float | None = None
    headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RowOptions:
        """
        Check every option.

        Raises:
            OptionError: an option is unknown, not valid, or contradicts another.
        """
        for name in options:
            if name in _ROW_CHECKS:
                continue
            if name in LATER_OPTIONS:
                raise OptionError(f"{name}: this option is not available in this version")
            if name in CodeOptions.__dataclass_fields__:
                raise OptionError(f"{name}: belongs to the job's code; set it in @queue.job(…) or queue.route(…)")
            raise OptionError(f"{name}: there is no such option; row options are {', '.join(_ROW_CHECKS)}")
        if options.get("delay") is not None and options.get("available_at") is not None:
            raise OptionError("delay, available_at: give one of the two")
        return cls(**{name: _ROW_CHECKS[name](value) for name, value in options.items() if value is not None})

    def over(self, below: RowOptions) -> RowOptions:
        """
        These options, and `below` where these say nothing.
        """
        if below is NO_ROW_OPTIONS:
            return self
        if self.delay is not None or self.available_at is not None:  # the two speak of the same thing
            below = replace(below, delay=None, available_at=None)
        given = {name: value for name in _ROW_CHECKS if (value := getattr(self, name)) is not None}
        return replace(below, **given) if given else below

    def check_together(self) -> None:
        """
        For the options that a push has in the end, wherever they were given.

        Raises:
            OptionError: one of them says nothing, or no good, beside the others.
        """
        if self.unique is None:
            for name in ("unique_until", "unique_for", "on_conflict"):
                if getattr(self, name) is not None:
                    raise OptionError(f"{name}: says how a unique key is held; give unique=… as well")
        elif self.unique and self.unique_for and self.on_conflict == "replace":
            raise OptionError(
                "unique_for, on_conflict: a key that is still taken when its job is done leaves nothing to replace, "
                "and what was pushed would be lost; give one of the two"
            )


@dataclass(frozen=True, slots=True)
class CodeOptions:
    """
    Checked code options; None means "not given here".
    """

    backoff: Backoff | None = None
    on_worker_lost: Literal["retry", "fail"] | None = None
    timeout: float | None = None
    fail_on_timeout: bool | None = None
    aliases: tuple[str, ...] | None = None
    middleware: tuple[Middleware, ...] | None = None
    limit: int | None = None
    limit_key: str | Key | Callable[[JobContext], str | int] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> CodeOptions:
        """
        Raises:
            OptionError: an option is not valid.
        """
        return cls(**{name: _CODE_CHECKS[name](value) for name, value in options.items() if value is not None})

    def over(self, below: CodeOptions) -> CodeOptions:
        """
        These options, and `below` where these say nothing.
        """
        given = {name: value for name in CodeOptions.__dataclass_fields__ if (value := getattr(self, name)) is not None}
        return replace(below, **given) if given else below


NO_CODE_OPTIONS = CodeOptions()
DEFAULT_BACKOFF: Backoff = Exponential()


def split_options(options: Mapping[str, Any]) -> tuple[RowOptions, CodeOptions]:
    """
    Row and code options of a decorator or a route.
    """
    code = {name: value for name, value in options.items() if name in CodeOptions.__dataclass_fields__}
    row = {name: value for name, value in options.items() if name not in code}
    return RowOptions.of(row), CodeOptions.of(code)


def check_job_name(name: object, option: str = "name") -> str:
    """
    Raises:
        OptionError: not a job name.
    """
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise OptionError(f"{option}: a job name is 1 to 190 of the characters A-Z a-z 0-9 _ . : -, not {_shown(name)}")
    return name


def check_queue_name(name: object) -> str:
    """
    Raises:
        OptionError: not a queue name.
    """
    if not isinstance(name, str) or not QUEUE_NAME.fullmatch(name):
        raise OptionError(f"queue: a queue name is 1 to 80 of the characters A-Z a-z 0-9 _ -, not {_shown(name)}")
    return name


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) and len(value) <= 200 else f"a {type(value).__name__}"


def _check_int(name: str, least: int, most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise OptionError(f"{name}: a whole number from {least} to {most}, not {value if type(value) is int else type(value).__name__}")
        return value

    return check


# What every database stores and every session, in whatever time zone, can read back as a datetime.
EARLIEST, LATEST = datetime(1000, 1, 2, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


def _check_instant(name: str) -> Callable[[object], datetime]:
    def check(value: object) -> datetime:
        if not isinstance(value, datetime):
            raise OptionError(f"{name}: an aware datetime, not a {type(value).__name__}")
        if value.utcoffset() is None:
            raise OptionError(f"{name}: a naive datetime could mean any instant; give it a time zone, for instance datetime.now(UTC)")
        if not EARLIEST <= value <= LATEST:
            raise OptionError(f"{name}: an instant between the years {EARLIEST.year} and {LATEST.year}")
        return value

    return check


def _check_deadline(value: object) -> datetime | float:
    return _check_instant("deadline")(value) if isinstance(value, datetime) else seconds(value, "deadline")


def _check_unique(value: object) -> str | Key | bool:
    if isinstance(value, bool):
        return value
    text = value.text if isinstance(value, Key) else value
    if not isinstance(text, str) or not text:
        raise OptionError(f"unique: a key that is not empty, Key(…) or True, not {'an empty text' if text == '' else type(text).__name__}")
    _check_storable(text, "unique")
    return value  # type: ignore[return-value]


def _check_storable(key: str, name: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{name}: the key holds a lone surrogate, which is no text") from None


def _check_choice(name: str, *choices: str) -> Callable[[object], str]:
    wanted = " or ".join(f'"{choice}"' for choice in choices)

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise OptionError(f"{name}: {wanted}, not {_shown(value)}")
        return value

    return check


def _check_headers(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(type(k) is str and type(v) is str for k, v in value.items()):
        raise OptionError("headers: a mapping of text to text")
    try:
        size = sum(len(k.encode()) + len(v.encode()) for k, v in value.items())
    except UnicodeEncodeError:
        raise OptionError("headers: a lone surrogate is no text") from None
    if size > HEADERS_LENGTH:
        raise OptionError(f"headers: {size} bytes; at most {HEADERS_LENGTH}")
    return dict(value)


def check_middleware(value: object) -> tuple[Middleware, ...]:
    """
    Raises:
        OptionError: not a list of callables `(context, call_next)`.
    """
    if not isinstance(value, list | tuple):
        raise OptionError(f"middleware: a list of callables (context, call_next), not a {type(value).__name__}")
    for place, one in enumerate(value):
        if isinstance(one, type):
            raise OptionError(f"middleware[{place}]: {one.__name__} is a class; give one that is made, as {one.__name__}(…)")
        if not callable(one):
            raise OptionError(f"middleware[{place}]: a callable (context, call_next), not a {type(one).__name__}")
        if any(inspect.iscoroutinefunction(function) for function in (one, getattr(one, "__call__", None))):  # noqa: B004  # not a test for callability
            raise OptionError(f"middleware[{place}]: async def cannot be around a handler that is a plain function")
        if not _takes_two(one):
            raise OptionError(f"middleware[{place}]: it has to take two arguments by position, (context, call_next)")
    return tuple(value)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # written in C, and says nothing about itself
        return True
    return True


def check_key(name: str, value: object) -> str | Key | Callable[[JobContext], str | int]:
    """
    Raises:
        OptionError: neither a text, nor `Key(…)`, nor a callable.
    """
    text = value.text if isinstance(value, Key) else value
    if callable(text) and not isinstance(value, type | Key):
        return value  # type: ignore[return-value]
    if not isinstance(text, str) or not text:
        raise OptionError(f"{name}: a text that is not empty, Key(…) or a function of the context that returns a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{name}: the key holds a lone surrogate, which is no text") from None
    return value  # type: ignore[return-value]


_ROW_CHECKS: dict[str, Callable[[Any], Any]] = {
    "queue": check_queue_name,
    "priority": _check_int("priority", PRIORITIES.start, PRIORITIES.stop - 1),
    "delay": lambda value: seconds(value, "delay"),
    "available_at": _check_instant("available_at"),
    "unique": _check_unique,
    "unique_until": _check_choice("unique_until", "finished", "started"),
    "unique_for": lambda value: seconds(value, "unique_for"),
    "on_conflict": _check_choice("on_conflict", "keep", "replace"),
    "max_attempts": _check_int("max_attempts", 1, MOST_ATTEMPTS),
    "deadline": _check_deadline,
    "headers": _check_headers,
}
NO_ROW_OPTIONS = RowOptions()


def _check_backoff(value: object) -> object:
    if not callable(value):
        raise OptionError("backoff: give Fixed(…), Exponential(…), Steps(…) or a function of the attempt that returns seconds")
    return value


def _check_on_worker_lost(value: object) -> object:
    if value not in ("retry", "fail"):
        raise OptionError(f'on_worker_lost: "retry" or "fail", not {_shown(value)}')
    return value


def _check_fail_on_timeout(value: object) -> bool:
    if type(value) is not bool:
        raise OptionError("fail_on_timeout: True or False")
    return value


def _check_aliases(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError("aliases: a list of the names that the job has had")
    for name in value:
        check_job_name(name, "aliases")
    return tuple(dict.fromkeys(value))


_CODE_CHECKS: dict[str, Callable[[Any], Any]] = {
    "backoff": _check_backoff,
    "on_worker_lost": _check_on_worker_lost,
    "timeout": lambda value: seconds(value, "timeout", minimum=SHORTEST_TIMEOUT),
    "fail_on_timeout": _check_fail_on_timeout,
    "aliases": _check_aliases,
    "middleware": check_middleware,
    "limit": _check_int("limit", 1, MOST_AT_ONCE),
    "limit_key": lambda value: check_key("limit_key", value),
}


def stored_key(unique: str | Key | bool | None, name: str, payload: str) -> str | None:
    """
    The text under which a unique key is stored: readable when it is short and printable, a digest otherwise.
    """
    if unique is None or unique is False:
        return None
    if unique is True:
        # The same arguments in another order are the same arguments.
        unique = "arguments:" + hashlib.sha256(json.dumps(json.loads(payload), sort_keys=True).encode()).hexdigest()
    owner, key = ("", unique.text) if isinstance(unique, Key) else (name, unique)
    return shared_key("unique", owner, key)


def shared_key(kind: str, owner: str, key: str, *, spare: int = 0) -> str:
    """
    The name of a row in the table of keys: of one kind, and of one job's unless the owner is empty.

    Args:
        spare: how many characters more are going to be appended.
    """
    whole = f"{kind}:{owner}/{key}"
    if PLAIN_KEY.fullmatch(whole) and len(whole) + spare <= KEY_LENGTH and not key.startswith("sha256:"):
        return whole
    return f"{kind}:/sha256:" + hashlib.sha256(whole.encode()).hexdigest()


def stored_once_key(key: object) -> str:
    """
    The text under which the key of `Queue.once` is stored.

    Raises:
        OptionError: not a text, or an empty one.
    """
    if not isinstance(key, str) or not key:
        raise OptionError(f"key: a text that is not empty, not {'an empty one' if key == '' else f'a {type(key).__name__}'}")
    _check_storable(key, "key")
    whole = f"once:{key}"
    if PLAIN_KEY.fullmatch(whole) and not key.startswith("sha256:"):
        return whole
    return "once:sha256:" + hashlib.sha256(whole.encode()).hexdigest()
