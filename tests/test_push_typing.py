"""
What a type checker says about pushes: a job is pushed with its own parameters, the leading context and session left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = re.compile(r"# E: (.+)")
FINDING = re.compile(r"^[^:]+:(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


def check(path: Path) -> str:
    """mypy's words about a file, with the settings of this project."""
    options = ["--strict", "--no-error-summary", "--no-pretty", "--hide-error-context", "--config-file", str(ROOT / "pyproject.toml")]
    output, trouble, _ = api.run([*options, "--cache-dir", str(ROOT / ".mypy_cache"), str(path)])
    assert not trouble
    return output


@pytest.mark.slow
def test_mypy_accepts_what_is_right() -> None:
    assert check(HERE / "typing" / "correct_uses.py") == ""


@pytest.mark.slow
def test_mypy_rejects_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    source = (HERE / "typing" / "wrong_uses.txt").read_text()
    wrong = tmp_path / "wrong_uses.py"
    wrong.write_text(source)
    found: dict[int, set[str]] = {}
    for line, code in FINDING.findall(check(wrong)):
        found.setdefault(int(line), set()).add(code)
    marks = {number: MARK.search(line) for number, line in enumerate(source.splitlines(), 1)}
    assert found == {number: set(mark.group(1).split(", ")) for number, mark in marks.items() if mark}
