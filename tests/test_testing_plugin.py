"""
The plugin for pytest, as an application's tests use it: in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SHOP = """
from sqlalchemy import create_engine
from sqlqueue import Queue

engine = create_engine("sqlite:///shop.db")
queue = Queue(engine)
seen = []


@queue.job(name="send")
def send(number: int) -> None:
    seen.append(number)
    if number < 0:
        raise ValueError("below zero")
"""

CONFTEST = """
import pytest
from shop import engine, queue


@pytest.fixture
def sqlqueue_queue():
    queue.metadata.create_all(engine)
    return queue
"""

TESTS = """
from shop import engine, queue, seen, send
from sqlalchemy.orm import Session


def push(number):
    with Session(engine) as session, session.begin():
        send.options(delay=60).push(session, number)


def test_pushed(pushed):
    push(1)
    pushed.assert_pushed_once(send, lambda a: a.number == 1 and a.delay == 60)
    assert queue.size("default") == 0


def test_pushed_fails(pushed):
    push(1)
    pushed.assert_not_pushed(send)


def test_inline(ran_inline):
    push(2)
    assert seen == [2]
    assert [run.status for run in ran_inline] == ["done"]


def test_inline_fails(ran_inline):
    push(-1)


def test_clock(sqlqueue_clock):
    push(3)
    assert list(queue.drain()) == []
    sqlqueue_clock.advance(minutes=1)
    queue.drain().assert_all_done()
"""


def run_pytest(directory: Path, *arguments: str) -> str:
    """Run the tests in a directory with the plugin found as an installed distribution's; what was printed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    installed = directory / "installed" / "sqlqueue_here-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlqueue-here\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[pytest11]\n" + "\n".join(f"{name} = {module}" for name, module in points.items()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SQLQUEUE_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(installed.parent), str(directory), str(ROOT)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "-W",
        "error",
    ]
    ran = subprocess.run([*command, *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


def test_the_fixtures_work_in_an_application_s_tests(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_shop.py").write_text(TESTS)
    printed = run_pytest(tmp_path, "-rA")
    words = re.findall(r"^(PASSED|FAILED|ERROR) test_shop\.py::(\w+)", printed, re.MULTILINE)
    assert sorted(words) == [
        ("ERROR", "test_inline_fails"),
        ("FAILED", "test_pushed_fails"),
        ("PASSED", "test_clock"),
        ("PASSED", "test_inline"),
        ("PASSED", "test_inline_fails"),
        ("PASSED", "test_pushed"),
    ], printed
    assert "AssertionError: send was pushed once, not 0 times; pushed were:" in printed
    assert "send(number=1) on queue default, delay=60" in printed
    assert "ValueError: below zero" in printed
    assert "pushes.py" not in printed  # the failure is shown in the test, not in the library


def test_a_queue_that_nobody_has_named_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text("def test_pushed(pushed): pass\n")
    assert "override the fixture sqlqueue_queue in your conftest.py" in run_pytest(tmp_path)


@pytest.mark.parametrize("module", ["sqlqueue.testing.plugin", "sqlqueue.testing"])
def test_a_start_of_pytest_loads_nothing_for_it(module: str) -> None:
    code = f"import sys, {module}; print('sqlalchemy' in sys.modules, 'sqlqueue._queue' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_the_library_does_not_need_pytest() -> None:
    code = "import sys; from sqlqueue.testing import *; from sqlqueue import Queue; Queue().fake(); print('pytest' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]


def test_the_names_of_the_kit_are_there() -> None:
    from sqlqueue import testing

    assert testing.__all__ == sorted(testing.__all__)
    assert set(testing.__all__) <= set(dir(testing))
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'cluck'"):
        testing.cluck  # noqa: B018
