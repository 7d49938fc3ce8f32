"""
The examples: their applications on every database, their own tests, and their workers as processes.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from sqlalchemy import make_url

from sqlqueue.testing import Clock
from tests.servers import Database
from tests.test_cli_work import environment, program
from tests.test_readme import parse
from tests.test_testing_plugin import run_pytest
from tests.workers import eventually

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+aiomysql", "mariadb": "mysql+aiomysql"}
PACKAGES = {"fastapi_orders": ASYNC_DRIVERS, "flask_signups": {}}


def url_for(package: str, database: Database) -> str:
    """The URL that its README would tell a user to give it."""
    url = make_url(database.url)
    return url.set(drivername=PACKAGES[package].get(database.name, url.drivername)).render_as_string(hide_password=False)


@pytest.fixture
def load(fresh_database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import an example's application on an empty database, as a program that starts in its folder does."""
    loaded: list[str] = []

    def load(package: str) -> Any:
        monkeypatch.setenv("DATABASE_URL", url_for(package, fresh_database))
        monkeypatch.syspath_prepend(EXAMPLES)
        loaded.append(package)
        return importlib.import_module(f"{package}.app")

    yield load
    for package in loaded:
        sys.modules[f"{package}.jobs"].queue.consumer.close()
        for module in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[module]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The folder of the examples, outside of the repository and its settings."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns(".*", "__pycache__", "*.db")))


def work(package: str, database: Database, *arguments: str) -> str:
    """Let a worker process do what is there; what it says."""
    ran = subprocess.run(
        [*program(), "work", "--app", f"{package}.jobs:queue", "--stop-when-empty", "--verbose", *arguments],
        cwd=EXAMPLES,
        env=environment() | {"DATABASE_URL": url_for(package, database)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def order(client: TestClient, token: str = "tok_1") -> int:
    response = client.post("/orders", json={"email": "ann@example.com", "token": token}, headers={"X-Request-ID": "r-1"})
    assert response.status_code == 201
    return int(response.json()["id"])


def test_orders_are_worked_in_the_process_that_takes_them(load: Callable[[str], Any]) -> None:
    app = load("fastapi_orders")
    with TestClient(app.app) as client:
        paid, declined = order(client), order(client, "tok_declined")
        eventually(lambda: client.get(f"/orders/{paid}").json()["status"] == "paid")
        [failed] = eventually(lambda: client.get("/failed").json())
        assert failed["error"] == "the card was declined"
        assert client.post(f"/failed/{failed['id']}/retry").status_code == 202
        eventually(lambda: [job for job in client.get("/failed").json() if job["id"] == failed["id"]])
        assert client.get(f"/orders/{declined}").json()["status"] == "placed"
        assert client.get("/orders/77").status_code == 404
        assert client.post("/failed/77/retry").status_code == 404
        eventually(lambda: shipments(app) == [paid])


def shipments(app: Any) -> list[int]:
    models = sys.modules["fastapi_orders.models"]
    with app.queue.begin() as session:
        return list(session.scalars(sa.select(models.Shipment.order_id)))


def test_orders_are_worked_by_a_process_of_its_own(
    load: Callable[[str], Any], fresh_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER", "no")
    app = load("fastapi_orders")
    with TestClient(app.app) as client:
        paid = order(client)
        said = work("fastapi_orders", fresh_database)
        assert client.get(f"/orders/{paid}").json()["status"] == "paid"
        assert shipments(app) == [paid]
        assert f"Order {paid} is paid. (request r-1)" in said  # of the request, through the event, to its subscriber
        assert "tok_1" not in said


def test_people_sign_up_and_a_process_does_the_rest(load: Callable[[str], Any], fresh_database: Database) -> None:
    app = load("flask_signups")
    client = app.app.test_client()
    assert app.app.test_cli_runner().invoke(args=["create-tables"]).exit_code == 0
    assert client.post("/accounts", data={"email": "ann@example.com"}, headers={"X-Tenant": "north"}).status_code == 201
    assert client.post("/accounts", data={"email": "ann@example.com"}).status_code == 409
    assert client.post("/accounts", data={"email": "bob@example.com", "invited_by": "ann@example.com"}).status_code == 201
    assert client.put("/accounts/1", data={"name": "Ann"}).status_code == 204
    assert client.put("/accounts/77", data={"name": "Ann"}).status_code == 404
    assert [client.post("/passwords", data={"email": "ann@example.com"}).status_code for _ in range(2)] == [202, 429]
    with app.queue.begin() as session:
        app.give_bonus.options(max_attempts=1).push(session, "nobody@example.com")
    said = work("flask_signups", fresh_database, "--queue", "mail")
    assert "3 done" in said
    assert "mail to ann@example.com in the name of north" in said
    work("flask_signups", fresh_database)
    Clock(app.queue).advance(seconds=5)  # the accounts have been left alone
    assert "2 done" in work("flask_signups", fresh_database)
    with app.Session(app.engine) as session:
        ann = session.get_one(app.Account, 1)
        assert (ann.credit, ann.found_as) == (5, "Ann ann@example.com 5")
    assert "give_bonus" in client.get("/failed").text
    [failed] = app.queue.failed.list()
    assert client.post(f"/failed/{failed.id}/retry").status_code == 302
    assert "None." in client.get("/failed").text
    assert {row.queue: row.total for row in app.queue.stats()} == {"default": 1}


@pytest.mark.parametrize(("package", "variable"), [("fastapi_orders", "ORDERS_TEST_URL"), ("flask_signups", "SIGNUPS_TEST_URL")])
def test_the_tests_of_the_examples_pass(
    package: str, variable: str, fresh_database: Database, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, url_for(package, fresh_database))
    tests = "".join(path.read_text() for path in (EXAMPLES / package).glob("test_*.py"))
    printed = run_pytest(copied, package)
    assert f"{tests.count('def test_')} passed" in printed, printed


def test_the_tests_of_the_examples_pass_together_and_need_no_settings(copied: Path) -> None:
    printed = run_pytest(copied)
    assert re.search(r"\d\d passed", printed), printed
    assert "failed" not in printed


def test_the_repository_does_not_collect_them() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", ".", "--ignore", "tests"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, ran.stdout


def test_every_command_of_the_page_is_understood() -> None:
    text = (EXAMPLES / "README.md").read_text()
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for line in block.splitlines()]
    calls = [[word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)] for line in lines]
    found = [call[1:] for call in calls if call and call[0] == "sqlqueue"]
    assert len(found) >= 4
    for call in found:
        parse(call)
    for package in PACKAGES:
        assert any(package in " ".join(call) for call in found)
