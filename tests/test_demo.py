from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import Session

from sqlqueue import demo
from sqlqueue.cli import main


def test_the_demo_keeps_the_promise_and_tells_the_story() -> None:
    lines: list[str] = []
    demo.run(lines.append)
    story = "\n".join(lines)
    assert re.search(r"order 4 for dave@example\.com: rolled back", story)
    assert re.search(r"default +3 +0 +0 +3 +\d s", story)
    assert re.search(r"retrying 3 send_receipt, attempt 1 of 2 .*: ValueError: the address has no @", story)
    assert re.search(r" 3 +20\S+ \S+Z +default +send_receipt +2 of 2 +exception +ValueError: the address has no @", story)
    assert "1 failed: sqlqueue failed list" in story
    assert "$ sqlqueue failed retry --id 3" in story
    assert "Nothing is left." in lines[-1]
    assert all(len(line) <= 120 for line in lines)


def test_the_demo_leaves_no_file_behind_and_can_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    demo.run(lambda line: None)
    demo.run(lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_the_command_exits_0() -> None:
    result = CliRunner().invoke(main, ["demo"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.splitlines()[-1].endswith("Nothing is left.")


def test_a_broken_promise_is_told_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that loses a push: the demo must not end as if all were well."""

    def place_order(session: Session, email: str) -> demo.Order:
        order = demo.Order(email=email)
        session.add(order)
        session.flush()
        return order

    monkeypatch.setattr(demo, "place_order", place_order)
    result = CliRunner().invoke(main, ["demo"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "Error: the demo failed: jobs: promised was 3, found was 0" in result.output
