"""
Why a job failed, as text that every database can store.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Failure", "Reason", "clean_text", "one_line"]

LAST_ERROR_LENGTH = 8 * 1024
MESSAGE_LENGTH = 32 * 1024
TRACEBACK_LENGTH = 64 * 1024
CLASS_LENGTH = 255
LINE_LENGTH = 200
HIDDEN = "\ue000"  # for private use: no text means anything by it


class Reason(StrEnum):
    """
    Why a job is in the failed table.
    """

    EXCEPTION = "exception"  # the handler raised, and the failure was final
    MAX_ATTEMPTS_EXCEEDED = "max_attempts_exceeded"
    TIMED_OUT = "timed_out"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    FAILED_BY_JOB = "failed_by_job"  # the handler raised Fail
    WORKER_LOST = "worker_lost"  # the last attempt's worker died or lost its lease
    DAMAGED = "damaged"  # the row cannot be a job


@dataclass(frozen=True, slots=True)
class Failure:
    """
    One failure: what the failed table and `last_error` say about it.
    """

    reason: Reason
    error_class: str | None
    message: str
    traceback: str | None = None

    @classmethod
    def from_exception(cls, error: BaseException, reason: Reason = Reason.EXCEPTION, secrets: Iterable[str] = ()) -> Failure:
        """
        Describe an exception without ever raising, whatever its `__str__` does.
        """
        hide = _redaction(secrets)
        _hide_parameters(error)
        return cls(
            reason=reason,
            error_class=clean_text(hide(_class_name(error)), CLASS_LENGTH),
            message=clean_text(hide(_message(error)), MESSAGE_LENGTH),
            traceback=clean_text(hide(_traceback(error)), TRACEBACK_LENGTH),
        )

    @classmethod
    def from_text(cls, text: str, reason: Reason = Reason.FAILED_BY_JOB, secrets: Iterable[str] = ()) -> Failure:
        """
        Describe a failure that somebody put into words.
        """
        return cls(reason=reason, error_class=None, message=clean_text(_redaction(secrets)(text), MESSAGE_LENGTH))

    @property
    def last_error(self) -> str:
        """
        The short form that stays with a job that will be tried again.
        """
        text = f"{self.error_class}: {self.message}" if self.error_class else self.message
        return clean_text(text, LAST_ERROR_LENGTH)


def clean_text(text: str, limit: int) -> str:
    """
    `text` with what databases refuse replaced, cut to `limit` characters with both ends kept.
    """
    text = text if len(text) <= limit else _cut(text, limit)
    if "\x00" in text:
        text = text.replace("\x00", "\N{SYMBOL FOR NULL}")
    return text.encode("utf-8", "replace").decode("utf-8")


def _cut(text: str, limit: int) -> str:
    note = f"\n… {len(text) - limit} characters cut …\n"
    head = max(limit - len(note), 0) // 2
    tail = max(limit - len(note) - head, 0)
    return text[:head] + note + text[len(text) - tail :]


def one_line(text: str) -> str:
    """
    The first line that says something, short and safe on a terminal.
    """
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = line if len(line) <= LINE_LENGTH else f"{line[: LINE_LENGTH - 1]}…"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def _class_name(error: BaseException) -> str:
    kind = type(error)
    try:
        module, name = (_plain(type.__getattribute__(kind, part)) for part in ("__module__", "__qualname__"))
    except BaseException:  # a class may have put anything there
        return "<an exception whose class has no name>"
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


def _message(error: BaseException) -> str:
    try:
        return _plain(str(error))
    except BaseException as problem:  # a handler's exception may do anything, sys.exit included
        return f"<the text of this {_class_name(error)} could not be made: its __str__ raised {_class_name(problem)}>"


def _traceback(error: BaseException) -> str:
    try:
        return _plain("".join(traceback.format_exception(error)))
    except BaseException as problem:
        return f"<the traceback could not be formatted: {_class_name(problem)}>"


def _plain(text: str) -> str:
    """
    The same characters without the methods of a subclass.
    """
    return text if type(text) is str else str.__str__(text)


def _redaction(secrets: Iterable[str]) -> Callable[[str], str]:
    # The longest first, each by one character: a short secret may be a part of a longer one, or of the word that is shown.
    hidden = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def hide(text: str) -> str:
        for secret in hidden:
            text = text.replace(secret, HIDDEN)
        return text.replace(HIDDEN, "[redacted]") if hidden else text

    return hide


def _hide_parameters(error: BaseException) -> None:
    """
    Take bound values out of SQLAlchemy's error texts, along the whole chain and in groups: they are somebody's data.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        with contextlib.suppress(BaseException):  # a stranger's attributes may do anything
            if getattr(link, "hide_parameters", None) is False:
                link.hide_parameters = True  # type: ignore[attr-defined]
        for find in (_members, _cause, _context):
            with contextlib.suppress(BaseException):
                waiting += find(link)


def _members(error: BaseException) -> Iterable[BaseException]:
    return tuple(error.exceptions) if issubclass(type(error), BaseExceptionGroup) else ()  # type: ignore[attr-defined]


def _cause(error: BaseException) -> Iterable[BaseException | None]:
    return (error.__cause__,)


def _context(error: BaseException) -> Iterable[BaseException | None]:
    return (error.__context__,)
