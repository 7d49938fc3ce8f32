from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from alembic import command
from alembic.config import Config
from click.testing import CliRunner, Result
from sqlalchemy import Engine, create_engine, make_url

import sqlqueue
from sqlqueue import Queue
from sqlqueue._dialects import OFFLINE_URLS, engines
from sqlqueue.cli import main, queues
from sqlqueue.cli.problems import Misuse
from sqlqueue.cli.text import cut, first_line_of, format_age, printable, table
from sqlqueue.install import render_ddl
from tests.servers import Database

SHOP = """
    from sqlqueue import Queue

    queue = Queue("sqlite:///shop.db")
    prefixed = Queue("sqlite:///shop.db", prefix="work queue")
    homeless = Queue()

    class App:
        def __init__(self, queue):
            self.queue = queue

    app = App(queue)
    wrong = App("no queue")

    def create():
        return app

    def fail():
        raise LookupError("no shop today")

    @queue.job(name="hello")
    def hello(name: str) -> None: ...
"""


def run(*arguments: str, input: str | None = None, env: dict[str, str] | None = None) -> Result:
    old_click = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    runner = CliRunner(**old_click)  # type: ignore[arg-type,unused-ignore]
    return runner.invoke(main, list(arguments), input=input, env=env, catch_exceptions=False)


def refused(code: int, *arguments: str, **options: Any) -> str:
    """The one line that a command ends with when it does not do what it was asked."""
    result = run(*arguments, **options)
    assert result.exit_code == code, result.output + result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("Error: ")


def done(*arguments: str, **options: Any) -> str:
    result = run(*arguments, **options)
    assert result.exit_code == 0, result.output + result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, empty; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in ("SQLQUEUE_APP", "SQLQUEUE_URL"):
        monkeypatch.delenv(name, raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def shop(directory: Path) -> Path:
    write(directory, "shop.py", SHOP)
    return directory


@pytest.fixture
def engine_of_shop(shop: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{shop}/shop.db")
    Queue().metadata.create_all(engine)
    yield engine
    engine.dispose()


def write(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip())


def fail_jobs(queue: Queue, engine: Engine, *errors: str, name: str = "send", queue_name: str = "default", **payload: Any) -> list[int]:
    """Jobs in the failed table, in order."""
    ids = []
    for error in errors:
        with engine.begin() as connection:
            ids.append(queue.push_named(connection, name, payload, queue=queue_name).id)
        (delivery,) = queue.claim(queue_name)
        queue.fail(delivery, error)
    return ids


# Which application


def test_the_version_is_printed() -> None:
    assert done("--version") == f"sqlqueue {sqlqueue.__version__}\n"


@pytest.mark.parametrize("spec", ["shop:queue", "shop:app", "shop:app.queue", "shop:create()"])
def test_an_app_is_a_queue_or_has_one_or_makes_one(shop: Path, spec: str) -> None:
    done("install", "--apply", "--app", spec)
    assert done("status", "--app", spec) == "no jobs\n0 failed\n"


def test_the_app_comes_from_the_environment_or_from_pyproject(shop: Path) -> None:
    done("install", "--apply", env={"SQLQUEUE_APP": "shop:queue"})
    write(shop, "pyproject.toml", '[tool.sqlqueue]\napp = "shop:nothing"\n')
    assert "shop has no attribute nothing" in refused(2, "status")
    done("status", env={"SQLQUEUE_APP": "shop:queue"})
    done("status", "--app", "shop:queue", env={"SQLQUEUE_APP": "shop:nothing"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shop", "'shop' does not name a module and something in it, as in --app shop.jobs:queue"),
        ("shop:queue(1)", "does not name a module"),
        ("nowhere.jobs:queue", "there is no module nowhere"),
        ("shop.jobs:queue", "there is no module shop.jobs"),
        ("shop:nothing", "the module shop has no attribute nothing; its queues are: queue, prefixed, homeless"),
        ("shop:app.nothing", "--app shop:app.nothing: 'App' object has no attribute 'nothing'"),
        ("shop:create", "this is a function, neither a Queue nor something with a .queue; if it is a factory, write it with ()"),
        ("shop:wrong", "this is a App, neither a Queue nor something with a .queue"),
        ("shop:fail()", "an error inside your code: shop.py, line 18: LookupError: no shop today"),
    ],
)
def test_a_wrong_app_is_told_in_one_line(shop: Path, spec: str, message: str) -> None:
    assert message in refused(2, "status", "--app", spec)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\n1 / 0", "broken.py, line 2: ZeroDivisionError: division by zero"),
        ("import nowhere", "broken.py, line 1: ModuleNotFoundError: No module named 'nowhere'"),
        ("import json\njson.loads('{')", "broken.py, line 2: JSONDecodeError: Expecting"),
        ("x = 1\ndef f(:", "broken.py, line 2: SyntaxError: invalid syntax"),
        ("raise SystemExit('bye')", "broken.py, line 1: SystemExit: bye"),
        ("from shop import queue\nqueue.job(lambda *names: None)", "broken.py, line 2: RegistrationError: "),
        ("from sqlalchemy import create_engine\ncreate_engine('postgresql+nothing://')", "broken.py, line 2: NoSuchModuleError: "),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "broken.py, line 3: E"),
    ],
)
def test_an_error_inside_the_users_module_names_its_line(shop: Path, code: str, message: str) -> None:
    write(shop, "broken.py", code)
    assert refused(2, "status", "--app", "broken:queue").startswith(f"--app broken:queue: an error inside your code: {message}")


def test_a_missing_import_inside_a_package_is_not_a_missing_app(directory: Path) -> None:
    write(directory, "store/__init__.py", "import store.nothing\n")
    assert "store/__init__.py, line 1: ModuleNotFoundError: No module named 'store.nothing'" in refused(
        2, "status", "--app", "store.jobs:queue"
    )


def test_a_module_that_the_standard_library_hides_gets_one_clear_line(directory: Path) -> None:
    write(directory, "queue.py", "queue = 1\n")
    write(directory, "user.py", "from queue import send\n")
    write(directory, "sqlqueue.py", "queue = 1\n")
    hint = "queue.py in this directory is hidden by the module queue of the standard library: rename it"
    assert refused(2, "status", "--app", "queue:queue").endswith(hint)
    assert refused(2, "status", "--app", "user:queue").endswith(hint)
    assert refused(2, "status", "--app", "sqlqueue:queue").endswith(
        "sqlqueue.py in this directory is hidden by the library itself: rename it"
    )


def test_the_current_directory_is_importable_at_the_end_of_the_path(shop: Path) -> None:
    done("install", "--apply", "--app", "shop:queue")
    assert sys.path[-1] == str(shop)
    assert sys.path.count(str(shop)) == 1


def test_work_needs_an_app(directory: Path) -> None:
    assert refused(2, "work", "--url", "sqlite:///shop.db").startswith("no app: name the module and the Queue in it")


# Which database


def test_a_url_beats_the_environment_beats_pyproject_beats_the_queue(shop: Path) -> None:
    def used(*arguments: str, **options: Any) -> str:
        done("install", "--apply", "--app", "shop:queue", *arguments, **options)
        (path,) = shop.glob("*.db")
        path.unlink()
        return path.name

    assert used() == "shop.db"
    write(shop, "pyproject.toml", '[tool.sqlqueue]\nurl = "sqlite:///file.db"\n')
    assert used() == "file.db"
    assert used(env={"SQLQUEUE_URL": "sqlite:///environment.db"}) == "environment.db"
    assert used("--url", "env:HERE", env={"HERE": "sqlite:///given.db", "SQLQUEUE_URL": "sqlite:///environment.db"}) == "given.db"


def test_tables_of_another_name_are_found_without_an_app(shop: Path) -> None:
    done("install", "--apply", "--app", "shop:prefixed")
    assert done("status", "--url", "sqlite:///shop.db", "--prefix", "work queue").startswith("no jobs")
    assert "tables are missing" in refused(1, "status", "--url", "sqlite:///shop.db")
    assert "--prefix and --schema" in refused(2, "status", "--app", "shop:queue", "--prefix", "x")
    assert "prefix" in refused(2, "status", "--url", "sqlite:///shop.db", "--prefix", "a\nb")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://user:secret@host/db", "--url: foo is not supported; use postgresql, mysql, mariadb or sqlite"),
        ("postgresql//user:secret@host/db", "--url: this is not a database URL"),
        ("postgresql://user:secret@host:port/db", "--url: the port is not a number"),
        ("sqlite://", "--url: an in-memory SQLite database cannot be shared with a worker"),
        ("env:NOT_SET", "--url: the environment variable NOT_SET is not set"),
    ],
)
def test_a_wrong_url_is_told_without_its_password(directory: Path, url: str, message: str) -> None:
    line = refused(2, "status", "--url", url)
    assert line.startswith(message)
    assert "sec" not in line


def test_no_database_at_all_is_wrong_usage(shop: Path) -> None:
    assert refused(2, "status").startswith("no database: give --url")
    assert refused(2, "status", "--app", "shop:homeless").startswith("no database: give --url")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[tool", "pyproject.toml cannot be read: "),
        ("[tool.sqlqueue]\nurl = 1", "pyproject.toml: url in [tool.sqlqueue] is not a text"),
        ("[tool]\nsqlqueue = 1", "pyproject.toml: [tool.sqlqueue] is not a table"),
        ('[tool.sqlqueue]\nap = "shop:queue"', "pyproject.toml: [tool.sqlqueue] knows app and url, not ap"),
        ('[tool.sqlqueue]\nurl = "env:NOT_SET"', "url in pyproject.toml: the environment variable NOT_SET is not set"),
    ],
)
def test_wrong_settings_are_told_in_one_line(directory: Path, content: str, message: str) -> None:
    write(directory, "pyproject.toml", content)
    assert refused(2, "status").startswith(message)


@pytest.mark.parametrize("name", ["postgresql", "mysql", "mariadb"])
def test_a_missing_driver_names_its_extra(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda package: None)
    extra = "postgresql" if name == "postgresql" else "mysql"
    assert refused(1, "status", "--url", f"{name}://user:secret@host/db").endswith(f"pip install 'sqlqueue-outbox[{extra}]'")


# Databases that fail


def test_missing_tables_name_the_command_that_creates_them(directory: Path, fresh_database: Database) -> None:
    line = refused(1, "status", "--url", fresh_database.url)
    assert "the tables are missing" in line
    assert "«sqlqueue install --apply»" in line


def test_an_unreachable_database_is_told_in_one_line(directory: Path, database: Database) -> None:
    url = make_url(database.url)
    elsewhere = url.set(database="/nowhere/at/all.db") if url.host is None else url.set(port=1)
    line = refused(1, "status", "--url", elsewhere.render_as_string(hide_password=False))
    assert line.startswith("the database cannot be reached: ")
    assert not url.password or url.password not in line


@pytest.mark.databases("postgresql", "mysql", "mariadb")
def test_a_wrong_password_is_told_in_one_line(directory: Path, database: Database) -> None:
    url = make_url(database.url).set(password="wr0ng-secret").render_as_string(hide_password=False)
    line = refused(1, "status", "--url", url)
    assert line.startswith("the database refuses us: ")
    assert "wr0ng" not in line


@pytest.mark.databases("mysql", "mariadb")
def test_an_option_that_the_driver_does_not_know_is_wrong_usage(directory: Path, database: Database) -> None:
    url = make_url(database.url).update_query_dict({"sslmode": "require"}).render_as_string(hide_password=False)
    assert "the driver does not take these options" in refused(2, "status", "--url", url)


# status and clear


def test_status_counts_what_each_queue_holds(directory: Path, database: Database, engine: Engine, queue: Queue) -> None:
    assert done("status", "--url", database.url) == "no jobs\n0 failed\n"
    fail_jobs(queue, engine, "it broke")
    long_ago = datetime.now(UTC) - timedelta(days=3)
    with engine.begin() as connection:
        for _ in range(3):
            queue.push_named(connection, "send", {}, queue="high")
        queue.push_named(connection, "send", {}, queue="default", delay=600)
        queue.push_named(connection, "send", {}, queue="default", available_at=long_ago)
    queue.claim("high", limit=2)
    lines = done("status", "--url", database.url).splitlines()
    assert lines[0].split() == ["queue", "pending", "delayed", "reserved", "total", "oldest", "due"]
    assert re.fullmatch(r"default +1 +1 +0 +2 +3 d 0 h", lines[1])
    assert re.fullmatch(r"high +1 +0 +2 +3 +\d s", lines[2])
    assert lines[3:] == ["1 failed: sqlqueue failed list"]
    report = json.loads(done("status", "--url", database.url, "--json"))
    assert report["failed"] == 1
    assert [row["queue"] for row in report["queues"]] == ["default", "high"]
    assert report["queues"][0]["oldest_due_seconds"] == pytest.approx(3 * 86_400, abs=60)
    assert datetime.fromisoformat(report["queues"][0]["oldest_due"]) == pytest.approx(long_ago, abs=timedelta(seconds=60))


def test_status_stops_counting_unless_it_is_to_be_exact(
    directory: Path, database: Database, engine: Engine, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_jobs(queue, engine, "one", "two")
    with engine.begin() as connection:
        for _ in range(3):
            queue.push_named(connection, "send", {}, queue="default")
    monkeypatch.setattr(queues, "COUNTED_TO", 2)
    lines = done("status", "--url", database.url).splitlines()
    assert re.fullmatch(r"default +2\+ +0 +0 +2\+ +\d s", lines[1])
    assert lines[2] == "2+ failed: sqlqueue failed list"
    assert json.loads(done("status", "--url", database.url, "--json"))["counted_to"] == 2
    exact = done("status", "--url", database.url, "--exact").splitlines()
    assert re.fullmatch(r"default +3 +0 +0 +3 +\d s", exact[1])
    assert exact[2] == "2 failed: sqlqueue failed list"
    assert json.loads(done("status", "--url", database.url, "--exact", "--json"))["counted_to"] is None


def test_clear_deletes_waiting_jobs_and_no_held_ones(directory: Path, database: Database, engine: Engine, queue: Queue) -> None:
    with engine.begin() as connection:
        for name in ("a", "a", "b", "c"):
            queue.push_named(connection, "send", {}, queue=name)
    queue.claim("a")
    assert "add --force" in refused(2, "clear", "a", "--url", database.url)
    assert "b is named twice" in refused(2, "clear", "a", "b", "b", "--force", "--url", database.url)
    assert "not 'b!'" in refused(2, "clear", "a", "b!", "--force", "--url", database.url)
    assert queue.size("a") == queue.size("b") == 1
    assert done("clear", "a", "b", "--force", "--url", database.url) == "a: 1 job deleted\nb: 1 job deleted\n"
    assert {row.queue: row.total for row in queue.stats()} == {"a": 1, "c": 1}


# failed


def test_failed_jobs_are_listed_the_newest_first(directory: Path, database: Database, engine: Engine, queue: Queue) -> None:
    assert done("failed", "list", "--url", database.url) == "no failed jobs\n"
    first, second = fail_jobs(queue, engine, "one\nmore", "two\x1b[31m red", secret="s3cret-value")
    (third,) = fail_jobs(queue, engine, "three", name="other", queue_name="slow", secret="s3cret-value")
    output = done("failed", "list", "--url", database.url)
    lines = output.splitlines()
    assert [int(line.split()[0]) for line in lines[1:]] == [third, second, first]
    assert re.fullmatch(rf" *{third}  20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ  slow +other +1 of 5 +failed_by_job +three", lines[1])
    assert lines[2].endswith(r"two\x1b[31m red")
    assert lines[3].endswith("one")
    assert "s3cret" not in output
    assert len(done("failed", "list", "--url", database.url, "--limit", "2").splitlines()) == 3
    assert "other" in done("failed", "list", "--url", database.url, "--queue", "slow")
    assert "other" not in done("failed", "list", "--url", database.url, "--name", "send")
    assert refused(2, "failed", "list", "--url", database.url, "--queue", "a b").startswith("queue: ")


def test_failed_jobs_as_json_hold_no_argument_values(directory: Path, database: Database, engine: Engine, queue: Queue) -> None:
    (id,) = fail_jobs(queue, engine, "broke\x1b", secret="s3cret-value")
    output = done("failed", "list", "--url", database.url, "--json")
    (job,) = json.loads(output)
    assert job["id"] == id
    assert job["error_message"] == "broke\x1b"
    assert datetime.fromisoformat(job["failed_at"]).utcoffset() == timedelta(0)
    assert "s3cret" not in output
    assert "\x1b" not in output


def test_show_tells_everything_but_argument_values(directory: Path, database: Database, engine: Engine, queue: Queue) -> None:
    with engine.begin() as connection:
        payload = {"order_id": 1, "secret": "s3cret-value"}
        id = queue.push_named(connection, "send", payload, headers={"trace": "t-1"}, unique="k").id
    (delivery,) = queue.claim()
    try:
        raise ValueError("it broke" + chr(7) + " here")
    except ValueError as error:
        queue.fail(delivery, error)
    output = done("failed", "show", str(id), "--url", database.url)
    assert re.search(r"^arguments +order_id, secret \(\d\d bytes of JSON\)$", output, re.MULTILINE)
    assert re.search(r'^headers +\{"trace":"t-1"\}$', output.replace(": ", ":"), re.MULTILINE)
    assert "\n\nTraceback (most recent call last):\n  File " in output
    assert r"ValueError: it broke\x07 here" in output
    assert "s3cret" not in output
    assert refused(1, "failed", "show", "999999", "--url", database.url) == "there is no failed job 999999"


def test_retry_puts_back_what_is_there_and_names_what_is_not(directory: Path, database: Database, engine: Engine, queue: Queue) -> None:
    first, second, third, fourth = fail_jobs(queue, engine, "a", "b", "c", "d")
    assert done("failed", "retry", "--id", str(first), "--url", database.url) == "1 job put back\n"
    result = run("failed", "retry", "--id", str(first), "--id", str(second), "--id", str(second), "--id", "999999", "--url", database.url)
    assert (result.exit_code, result.stdout) == (1, "1 job put back\n")
    assert result.stderr == f"Error: there is no failed job {first}, 999999\n"
    assert [job.id for job in queue.failed.list()] == [fourth, third]
    assert done("failed", "retry", "--all", "--url", database.url) == "2 jobs put back\n"
    assert done("failed", "retry", "--all", "--url", database.url) == "no failed jobs, nothing to do\n"
    assert queue.pending() == 4


def test_forget_deletes_and_asks_before_it_deletes_all(directory: Path, database: Database, engine: Engine, queue: Queue) -> None:
    first, *_ = fail_jobs(queue, engine, "a", "b", "c")
    assert done("failed", "forget", "--id", str(first), "--url", database.url) == "1 job forgotten\n"
    assert refused(1, "failed", "forget", "--id", str(first), "--url", database.url) == f"there is no failed job {first}"
    assert done("failed", "forget", "--before", "2020-01-01", "--url", database.url) == "no failed jobs, nothing to do\n"
    for answer in ("", "n\n"):
        result = run("failed", "forget", "--all", "--url", database.url, input=answer)
        assert result.exit_code == 1
        assert "nothing was forgotten" in result.stderr
    assert queue.failed.count() == 2
    result = run("failed", "forget", "--all", "--url", database.url, input="y\n")
    assert result.exit_code == 0
    assert result.stdout.endswith("2 jobs forgotten\n")
    assert "Forget 2 failed jobs for good?" in result.stderr
    fail_jobs(queue, engine, "d")
    assert done("failed", "forget", "--before", "2999-01-01T00:00:00+02:00", "--url", database.url) == "1 job forgotten\n"
    fail_jobs(queue, engine, "e")
    assert done("failed", "forget", "--all", "--yes", "--url", database.url) == "1 job forgotten\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("failed", "retry"),
        ("failed", "retry", "--id", "1", "--all"),
        ("failed", "forget", "--yes"),
        ("failed", "forget", "--all", "--before", "2020-01-01"),
        ("failed", "forget", "--before", "yesterday"),
    ],
)
def test_selectors_are_checked_before_anything_else(directory: Path, arguments: tuple[str, ...]) -> None:
    line = refused(2, *arguments)
    assert line.startswith(("give exactly one of", "--before: 'yesterday' is neither a day"))


# install


def alembic_project(directory: Path) -> Path:
    config = Config(str(directory / "alembic.ini"), stdout=open(os.devnull, "w"))  # noqa: SIM115  # closed below
    command.init(config, str(directory / "migrations"))
    config.stdout.close()
    return directory / "migrations" / "versions"


def test_install_creates_the_tables_directly(directory: Path, fresh_database: Database) -> None:
    assert done("install", "--apply", "--url", fresh_database.url).startswith("created: sqlqueue_jobs, ")
    assert done("install", "--apply", "--url", fresh_database.url) == "the tables are there already, nothing done\n"
    assert done("install", "--url", fresh_database.url) == "the tables are in the database already, nothing written\n"
    assert done("status", "--url", fresh_database.url) == "no jobs\n0 failed\n"


def test_install_writes_a_revision_once(shop: Path) -> None:
    versions = alembic_project(shop)
    path, advice = done("install", "--app", "shop:queue").splitlines()
    assert Path(path).parent == versions
    assert advice == "review it, then: alembic upgrade head"
    again = done("install", "--app", "shop:queue")
    assert "creates sqlqueue_jobs already, nothing written" in again
    assert len(list(versions.glob("*.py"))) == 1


def test_install_needs_no_database_and_no_app(directory: Path) -> None:
    versions = alembic_project(directory)
    done("install")
    result = run("install", "--prefix", "other_", "--url", "sqlite:////nowhere/at/all.db")
    assert result.exit_code == 0
    assert result.stderr.startswith("not checked whether the tables are there already: ")
    assert len(list(versions.glob("*.py"))) == 2


def test_install_asks_for_a_head_and_says_where(directory: Path) -> None:
    (directory / "project").mkdir()
    alembic_project(directory / "project")
    config = Config(str(directory / "project" / "alembic.ini"), stdout=open(os.devnull, "w"))  # noqa: SIM115
    one, two = (command.revision(config, name, head="base") for name in ("one", "two"))
    config.stdout.close()
    assert "choose one with --head" in refused(1, "install", "--dir", "project")
    assert refused(2, "install", "--dir", "project", "--head", "nothing").startswith("--head: ")
    lines = done("install", "--dir", "project", "--head", one.revision).splitlines()  # type: ignore[union-attr]
    assert lines[1] == "review it, then in project: alembic upgrade heads"
    assert two is not None


def test_install_without_an_alembic_project_says_what_else_there_is(directory: Path) -> None:
    line = refused(1, "install")
    assert line.startswith(f"no alembic.ini in {directory}")
    assert "--apply" in line


@pytest.mark.parametrize("dialect", OFFLINE_URLS)
def test_install_prints_ddl_without_a_connection(directory: Path, dialect: str) -> None:
    assert done("install", "--sql", "--dialect", dialect) == render_ddl(Queue().tables, dialect)


@pytest.mark.parametrize(
    "arguments",
    [("--sql",), ("--sql", "--apply"), ("--dialect", "sqlite"), ("--apply", "--dir", "x"), ("--sql", "--dialect", "sqlite", "--head", "x")],
)
def test_contradicting_options_of_install_are_wrong_usage(directory: Path, arguments: tuple[str, ...]) -> None:
    refused(2, "install", *arguments)


# work, before it begins; the rest is in test_cli_work.py


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--queue", "a,b", "--queue", "a"), "queues: a is named twice"),
        (("--queue", "a,,b"), "queue: a queue name is"),
        (("--lease", "0.5"), "lease must be between 1 and 86400 seconds"),
        (("--concurrency", "0"), "concurrency: a whole number"),
        (("--max-jobs", "0"), "max_jobs: a whole number"),
        (("--max-time", "-1"), "max_time must be between"),
        (("--poll-max", "0"), "poll_max must be between"),
        (("--once", "--max-jobs", "3"), "--once and --max-jobs"),
        (("--import", "nowhere.jobs"), "imports: there is no module nowhere"),
        (("--import", "broken"), "imports: an error inside your code: broken.py, line 1: ZeroDivisionError"),
    ],
)
def test_wrong_options_of_work_are_told_in_one_line(shop: Path, arguments: tuple[str, ...], message: str) -> None:
    write(shop, "broken.py", "1 / 0\n")
    assert refused(2, "work", "--app", "shop:queue", *arguments).startswith(message)


def test_work_waits_for_a_database_only_so_long(shop: Path) -> None:
    began = time.monotonic()
    result = run("work", "--app", "shop:queue", "--url", "sqlite:////nowhere/at/all.db", "--wait-for-database", "0.3")
    assert time.monotonic() - began < 5
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "Error: the database cannot be reached: unable to open database file"


def test_work_without_tables_says_so_at_once(directory: Path, fresh_database: Database) -> None:
    write(directory, "shop.py", SHOP)
    result = run("work", "--app", "shop:queue", "--url", fresh_database.url)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "«sqlqueue install --apply»" in line


def test_limits_stop_a_worker(shop: Path, engine_of_shop: Engine) -> None:
    queue = Queue(engine_of_shop)
    with engine_of_shop.begin() as connection:
        for _ in range(6):
            queue.push_named(connection, "hello", {"name": "you"})

    def last_line(*arguments: str) -> str:
        result = run("work", "--app", "shop:queue", *arguments)
        assert (result.exit_code, result.stdout) == (0, "")
        return result.stderr.splitlines()[-1]

    assert last_line("--once").endswith("1 done")
    assert last_line("--max-jobs", "2").endswith("2 done")
    assert queue.pending() == 3
    assert "stopped (max memory)" in last_line("--max-memory", "1")
    assert "stopped (max time)" in last_line("--max-time", "0.3")
    assert last_line("--once").endswith("0 done")
    queue.consumer.close()


def test_queues_come_in_the_order_in_which_they_are_named_whatever_their_priorities(
    shop: Path, database: Database, engine: Engine, queue: Queue
) -> None:
    expected = {}
    with engine.begin() as connection:
        for name, priority in (("low", 10), ("other", 0), ("urgent", -5), ("low", 50), ("urgent", 0)):
            pushed = queue.push_named(connection, "hello", {"name": "you"}, queue=name, priority=priority)
            expected[name, priority] = pushed.id
    arguments = ("--queue", "urgent,low", "--queue", "other", "--concurrency", "1", "--stop-when-empty", "--verbose")
    result = run("work", "--app", "shop:queue", "--url", database.url, *arguments)
    assert result.exit_code == 0
    order = [("urgent", 0), ("urgent", -5), ("low", 50), ("low", 10), ("other", 0)]
    assert [int(id) for id in re.findall(r" done (\d+) hello", result.stderr)] == [expected[one] for one in order]


def test_work_does_without_what_only_unix_has(shop: Path, engine_of_shop: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of_shop.begin() as connection:
        Queue().push_named(connection, "hello", {"name": "you"})
    for name in ("SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGTSTP"):
        monkeypatch.delattr(signal, name)
    for name in ("alarm", "setitimer", "pthread_kill", "pthread_sigmask", "sigwait", "set_wakeup_fd"):
        monkeypatch.delattr(signal, name)
    for name in ("fork", "getuid", "geteuid", "getppid", "sysconf", "register_at_fork", "uname"):
        monkeypatch.delattr(os, name)
    for name in ("fcntl", "pwd", "resource"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("sqlqueue._worker.summary.open", _no_such_file, raising=False)  # there is no /proc
    result = run("work", "--app", "shop:queue", "--once", "--max-memory", "100000")
    assert (result.exit_code, result.stderr.splitlines()[-1][-6:]) == (0, "1 done")


def _no_such_file(path: str, *arguments: Any) -> NoReturn:
    raise FileNotFoundError(path)


def test_work_runs_outside_the_main_thread(shop: Path) -> None:
    done("install", "--apply", "--app", "shop:queue")
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(run("work", "--app", "shop:queue", "--once")))
    thread.start()
    thread.join(20)
    assert results[0].exit_code == 0


# Text for terminals


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("a\x1b[2Jb\x9b\x7f\u202e\ud800\n\tü 日本") == "a\\x1b[2Jb\\x9b\\x7f\\u202e\\ud800\\n\\tü 日本"
    assert printable("a\n\tb\r", keep_newlines=True) == "a\n\tb\\r"
    assert first_line_of("\n  one\ntwo") == "one"


def test_lines_are_cut_to_the_columns_that_a_terminal_has() -> None:
    assert cut("abcdef", 6) == cut("abcdef", None) == "abcdef"
    assert cut("abcdef", 5) == "abcd…"
    assert cut("日本語", 5) == "日本…"
    assert cut("日本語", 4) == "日…"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (0.9, "0 s"), (12, "12 s"), (192.5, "3 m 12 s"), (3600, "1 h 0 m"), (93_784, "1 d 2 h")]
)
def test_an_age_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_columns_of_a_table_are_aligned() -> None:
    assert list(table(("id", "name"), [(1, "a"), (100, "bb")], numbers=[0])) == [" id  name", "  1  a", "100  bb"]


def test_a_problem_is_one_line_without_a_password() -> None:
    problem = Misuse("cannot use\npostgresql://user:p@ss/w@host/db \x1b[0m")
    assert problem.message == "cannot use postgresql://user:***@host/db \\x1b[0m"
    assert isinstance(problem, click.ClickException)


def test_a_list_is_cut_to_the_terminal(
    directory: Path, database: Database, engine: Engine, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_jobs(queue, engine, "x" * 500)
    assert "x" * 500 in done("failed", "list", "--url", database.url)
    monkeypatch.setattr("sqlqueue.cli.failed_jobs.terminal_width", lambda: 80)
    assert max(map(len, done("failed", "list", "--url", database.url).splitlines())) == 80
