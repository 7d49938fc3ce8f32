"""
Rules about the source that no linter knows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "sqlqueue").rglob("*.py"))
LONGEST_FUNCTION = 45
LONGEST_MODULE = 450


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LONGEST_MODULE
    for node in _functions(ast.parse(text)):
        documented = ast.get_docstring(node, clean=False)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - (documented.count("\n") + 1 if documented else 0)
        assert lines <= LONGEST_FUNCTION, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_databases_are_named_only_where_their_differences_live(path: Path) -> None:
    parts = path.relative_to(ROOT / "sqlqueue").parts
    if parts[0] in ("_dialects", "_tables.py"):
        return
    named = [line for line in path.read_text().splitlines() if re.search(r"""["'](postgresql|mysql|mariadb|sqlite)["']""", line)]
    assert not named


def test_the_migrations_folder_does_not_shadow_the_library() -> None:
    assert not (ROOT / "alembic" / "__init__.py").exists()


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
