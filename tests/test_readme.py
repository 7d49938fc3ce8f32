"""
Every code block of the README runs here, or is read by the program that it is meant for.
"""

from __future__ import annotations

import configparser
import inspect
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from alembic import command
from alembic.config import CommandLine, Config
from click.testing import CliRunner, Result

from sqlqueue import Worker, demo, events
from sqlqueue.cli import main
from tests.test_testing_plugin import run_pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
LANGUAGES = {"python", "sh", "ini", "dockerfile", "crontab", "toml"}


@dataclass(frozen=True)
class Block:
    language: str
    code: str

    @property
    def lines(self) -> list[str]:
        """Without comments at the end."""
        return [line for line in (re.sub(r"\s+# .*$", "", line) for line in self.code.splitlines()) if line]


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)]


def blocks(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def is_for_tests(block: Block) -> bool:
    """It goes into a file that pytest reads."""
    return block.code.startswith(("# conftest.py\n", "# test_shop.py\n"))


def commands() -> list[list[str]]:
    """Every command of the shell blocks, split into words."""
    lines = [line for block in blocks("sh") for line in block.lines]
    return [shlex.split(part) for line in lines for part in line.split("&&")]


def calls_of_sqlqueue() -> list[list[str]]:
    """Every call of the program in any block but Python's, without the program itself."""
    [unit], [image], [cron] = blocks("ini"), blocks("dockerfile"), blocks("crontab")
    calls = commands()
    calls += [shlex.split(line.removeprefix("ExecStart=")) for line in unit.lines if line.startswith("ExecStart=")]
    calls += [json.loads(line.removeprefix("CMD ")) for line in image.lines if line.startswith("CMD ")]
    calls += [shlex.split(line.split("&&")[1]) for line in cron.lines]
    return [call[1:] for call in calls if Path(call[0]).name == "sqlqueue"]


def parse(arguments: list[str]) -> None:
    """Read a command line as the program does, without running anything."""
    group: click.Command = main
    name, context = "sqlqueue", None
    while isinstance(group, click.Group) and not arguments[0].startswith("-"):
        context = click.Context(group, info_name=name, parent=context)
        found, subcommand, arguments = group.resolve_command(context, arguments)
        assert found is not None
        assert subcommand is not None
        name, group = found, subcommand
    if not isinstance(group, click.Group):
        group.make_context(name, list(arguments), parent=context)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    if (shop := sys.modules.pop("shop", None)) is not None:
        shop.queue.consumer.close()
        shop.engine.dispose()


def write_shop(directory: Path) -> None:
    shop = blocks("python")[0].code
    assert shop.startswith("# shop.py\n")
    (directory / "shop.py").write_text(shop)


def test_every_block_has_a_language_that_a_test_reads() -> None:
    assert {block.language for block in BLOCKS} == LANGUAGES


def test_every_call_of_the_program_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_sqlqueue()
    assert len(calls) > 20
    for call in calls:
        parse(call)


def test_an_option_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse(["work", "--nothing"])
    with pytest.raises(click.UsageError):
        parse(["failed", "nothing"])


def test_other_commands_exist() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sessions = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    for call in commands():
        match [Path(call[0]).name, *call[1:]]:
            case ["sqlqueue", *_] | ["python3", "-m", "venv", ".venv"] | ["pip", "install", "." | "nox"]:
                pass
            case ["pip", "install", text]:
                assert text.removeprefix(".[").removesuffix("]") in groups["optional-dependencies"]
            case ["nox", "-s", session]:
                assert session in sessions
            case ["alembic", *arguments]:
                CommandLine().parser.parse_args(arguments)
            case other:
                pytest.fail(f"nothing checks {other}")


def test_the_shop_is_the_demo_to_the_letter() -> None:
    shop = blocks("python")[0].code
    for piece in (demo.Base, demo.Order, demo.send_receipt.function, demo.place_order):
        assert inspect.getsource(piece) in shop


def test_the_python_blocks_run_in_order_and_the_worker_after_them(directory: Path) -> None:
    pytest.importorskip("aiosqlite")
    write_shop(directory)
    running = [block for block in blocks("python") if "target_metadata" not in block.code and not is_for_tests(block)]
    _, push, options, context, transactional, handler, throttled, asynchronous, publish, hooks = running
    exec(compile(push.code, "README.md", "exec"), {"__name__": "readme"})
    shop = sys.modules["shop"]
    assert shop.queue.pending() == 1
    first, second, third = [call for call in calls_of_sqlqueue() if "shop:queue" in call and call[0] != "install"][:3]
    assert "1 done" in run(*first).output
    assert run(*second).output == "no jobs\n0 failed\n"
    assert run(*third).output == "no failed jobs\n"
    with shop.Session(shop.engine) as session:
        assert [(order.email, order.receipts) for order in session.query(shop.Order)] == [("ann@example.com", 1)]
    voids: dict[str, Any] = {"__name__": "readme"}
    exec(compile(transactional.code, "README.md", "exec"), voids)
    with shop.queue.begin() as session:
        voids["void_order"].push(session, 1)
    assert Worker(shop.queue, "voids").run_once()
    with shop.Session(shop.engine) as session:
        assert session.get(shop.Order, 1).receipts == 0
    exec(compile(handler.code, "README.md", "exec"), {"__name__": "readme"})
    with shop.queue.begin() as session:
        shop.queue.push_named(session, "remind", {"order_id": 1}, queue="slow")
    shop.queue.drain(queues="slow").assert_all_done()
    charges: dict[str, Any] = {"__name__": "readme"}
    exec(compile(throttled.code, "README.md", "exec"), charges)
    with shop.queue.begin() as session:
        charges["charge"].push(session, 1, "north")
    assert "1 done" in run("work", "--app", "shop:queue", "--queue", "charges", "--stop-when-empty", "--verbose").output
    for block in (options, context, asynchronous):
        exec(compile(block.code, "README.md", "exec"), {"__name__": "readme"})
    assert {row.queue: row.total for row in shop.queue.stats()} == {"default": 4, "slow": 3, "high": 1}
    exec(compile(publish.code, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    assert {row.queue: row.total for row in shop.queue.stats()} == {"default": 5, "slow": 3, "high": 1, "receipts": 1}
    exec(compile(hooks.code, "README.md", "exec"), {"__name__": "readme"})
    assert Worker(shop.queue, "receipts").run_once()
    with shop.Session(shop.engine) as session:
        assert session.get(shop.Order, 1).receipts == 1


def test_the_page_about_events_runs(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(directory)
    page = (ROOT / "docs" / "events.md").read_text()
    names: dict[str, Any] = {"__name__": "events_page"}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(code, "docs/events.md", "exec", dont_inherit=True), names)
    shop = sys.modules["shop"]
    shop.Base.metadata.create_all(shop.engine)
    shop.queue.metadata.create_all(shop.engine)
    names["tenant"].set("north")
    with shop.Session(shop.engine) as session, session.begin():
        shop.place_order(session, "nowhere")
        assert shop.queue.publish(session, names["OrderPaid"](1, "ann@example.com")) == 2
    names["tenant"].set("")
    shop.queue.drain()
    printed = capsys.readouterr().out
    assert "send_receipt: 1 retrying" in printed
    assert "ledger.book 1 in north" in printed
    assert "committed: crm.thank" in printed


def test_the_page_about_events_names_them_all() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    for name in events.__all__:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("page", ["README.md", "docs/testing.md"])
def test_the_tests_of_the_shop_pass(directory: Path, page: str) -> None:
    write_shop(directory)
    found = [Block("python", code) for code in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)]
    conftest, tests = (block.code for block in found if is_for_tests(block))
    (directory / "conftest.py").write_text(conftest)
    (directory / "test_shop.py").write_text(tests)
    printed = run_pytest(directory)
    assert f"{tests.count('def test_')} passed" in printed, printed


def test_an_alembic_project_adopts_the_tables(directory: Path) -> None:
    write_shop(directory)
    with open(os.devnull, "w") as nowhere:
        config = Config("alembic.ini", stdout=nowhere)
        command.init(config, "migrations")
        ini = Path("alembic.ini")
        ini.write_text(re.sub(r"^sqlalchemy\.url = .*$", "sqlalchemy.url = sqlite:///shop.db", ini.read_text(), flags=re.MULTILINE))
        [targets] = [block.code for block in blocks("python") if "target_metadata" in block.code]
        env = Path("migrations/env.py")
        assert "\ntarget_metadata = None\n" in env.read_text()
        env.write_text(env.read_text().replace("\ntarget_metadata = None\n", f"\n{targets}\n").replace("fileConfig(", "id("))
        [install] = [call for call in calls_of_sqlqueue() if call == ["install", "--app", "shop:queue"]]
        assert "review it, then: alembic upgrade head" in run(*install).output
        command.upgrade(Config("alembic.ini", stdout=nowhere), "head")
        command.revision(Config("alembic.ini", stdout=nowhere), "orders", autogenerate=True)
        assert "sqlqueue" not in next(Path("migrations/versions").glob("*orders*")).read_text()
    assert run("status", "--app", "shop:queue").output == "no jobs\n0 failed\n"


def test_the_settings_are_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shop(directory)
    [settings] = blocks("toml")
    (directory / "pyproject.toml").write_text(settings.code)
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{directory}/elsewhere.db")
    run("install", "--apply")
    assert (directory / "elsewhere.db").exists()
    assert run("status").output == "no jobs\n0 failed\n"


def test_the_unit_of_systemd_is_well_formed() -> None:
    [unit] = blocks("ini")
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.read_string(unit.code)
    assert parser.sections() == ["Unit", "Service", "Install"]
    assert parser["Service"]["KillMode"] == "mixed"


def test_the_container_gives_the_signals_to_the_worker() -> None:
    [image] = blocks("dockerfile")
    assert {line.split()[0] for line in image.lines} <= {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}
    [started] = [line.removeprefix("CMD ") for line in image.lines if line.startswith("CMD ")]
    assert json.loads(started)[:2] == ["sqlqueue", "work"]


def test_cron_starts_a_worker_that_is_gone_before_the_next() -> None:
    [cron] = blocks("crontab")
    for line in cron.lines:
        assert len(line.split(None, 5)) == 6
        assert int(re.findall(r"--max-time=(\d+)", line)[0]) < 60
