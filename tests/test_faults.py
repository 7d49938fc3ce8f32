"""
The page about faults of other queues names tests that exist.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [line for line in (TESTS.parent / "docs/faults.md").read_text().splitlines() if line.startswith("| B")]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_all_faults_are_there_in_order() -> None:
    numbers = [row.split()[1] for row in ROWS]
    assert len(numbers) == 97
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split()[1])
def test_each_fault_has_its_tests_or_a_reason(row: str) -> None:
    _, number, what, here, _ = re.split(r"(?<!\\)\|", row)
    assert re.search(r"\]\(https://github\.com/[^)]+\)", what), number
    named = NAMED.findall(here)
    assert named or "Ruled out: " in here
    for file, function in named:
        assert function in _functions(TESTS / file), f"{file} has no {function}"


@functools.cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
