"""
Text for terminals: escapes, tables, ages.
"""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

__all__ = ["cut", "first_line_of", "format_age", "format_instant", "plural", "printable", "table", "terminal_width"]

_HARMFUL = ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")  # controls, invisible and bidirectional formats, lone surrogates
_BREAKS = "\n\t"


def printable(text: str, *, keep_newlines: bool = False) -> str:
    """
    `text` with everything escaped that could move a cursor, recolour a terminal or reorder what is read.
    """
    kept = _BREAKS if keep_newlines else ""
    return "".join(
        character if character in kept or unicodedata.category(character) not in _HARMFUL else _escape(character) for character in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def first_line_of(text: str) -> str:
    """
    The first line that is not blank, safe for a terminal.
    """
    return printable(next((line.strip() for line in text.split("\n") if line.strip()), ""))


def cut(text: str, width: int | None) -> str:
    """
    `text` in at most `width` columns of a terminal; None leaves it as it is.
    """
    if width is None or sum(map(_columns, text)) <= width:
        return text
    kept, used = [], 1
    for character in text:
        used += _columns(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…"


def terminal_width() -> int | None:
    """
    The columns of the terminal that is written to; None for a file or a pipe, which takes whole lines.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = ()) -> Iterator[str]:
    """
    Lines of aligned columns; those whose index is in `numbers` are aligned to the right.
    """
    lines = [tuple(head), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    right = set(numbers)
    for line in lines:
        cells = [cell.rjust(width) if n in right else cell.ljust(width) for n, (cell, width) in enumerate(zip(line, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def plural(count: int, noun: str) -> str:
    """
    The count with its noun: 1 job, 2 jobs.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_age(seconds: float) -> str:
    """
    A duration in its two largest units: 3 m 12 s.
    """
    left = max(int(seconds), 0)
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def format_instant(moment: datetime | None) -> str:
    """
    An instant in UTC, to the second.
    """
    return "-" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
