"""
What a contributor types, and the same in CI:

    nox -s tests                        SQLite and every server that is found; arguments after -- go to pytest
    nox -s tests-postgresql             one database, required (tests-sqlite, tests-mysql, tests-mariadb)
    nox -s lint types schemas lowest    the rest of the gate
    nox -s schemas -- --write           regenerate schemas/*.sql
    nox -s bench | chaos                measure; kill things
"""

from __future__ import annotations

import re
from difflib import unified_diff
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

DATABASES = ("sqlite", "postgresql", "mysql", "mariadb")
PYPROJECT = nox.project.load_toml("pyproject.toml")
SCHEMAS = Path("schemas")


def install(session: nox.Session, *groups: str) -> None:
    session.install("-e", ".[all]", *nox.project.dependency_groups(PYPROJECT, *groups))


@nox.session
def tests(session: nox.Session) -> None:
    """The suite, on every database that is found."""
    install(session, "test")
    session.run("pytest", *session.posargs)


def tests_on(database: str) -> None:
    @nox.session(name=f"tests-{database}")
    def tests_on_one(session: nox.Session) -> None:
        install(session, "test")
        session.run("pytest", *session.posargs, env={"SQLQUEUE_TEST_DATABASES": database, "SQLQUEUE_TEST_REQUIRE": database})


for name in DATABASES:
    tests_on(name)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format and the layers of the package."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", "--no-cache")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    install(session, "types")
    session.run("mypy", *session.posargs)


@nox.session
def schemas(session: nox.Session) -> None:
    """The DDL snapshots are what `sqlqueue install --sql` prints; with --write, write them."""
    session.install("-e", ".[all]")
    stale = []
    for name in DATABASES:
        printed = str(session.run("sqlqueue", "install", "--sql", "--dialect", name, silent=True, log=False))
        snapshot = SCHEMAS / f"{name}.sql"
        if "--write" in session.posargs:
            SCHEMAS.mkdir(exist_ok=True)
            snapshot.write_text(printed)
        elif not snapshot.exists() or snapshot.read_text() != printed:
            kept = snapshot.read_text() if snapshot.exists() else ""
            session.log("\n".join(unified_diff(kept.splitlines(), printed.splitlines(), str(snapshot), "installed", lineterm="")))
            stale.append(str(snapshot))
    if stale:
        session.error(f"not what `sqlqueue install --sql` prints: {', '.join(stale)} (nox -s schemas -- --write)")


def lowest_versions() -> list[str]:
    """Every direct dependency of pyproject.toml, pinned to the floor that stands there."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = PYPROJECT["project"]["dependencies"] + extras["postgresql"] + extras["mysql"]
    return [re.sub(r"^([\w.-]+(?:\[[\w,-]+\])?)>=([\w.]+)$", r"\1==\2", requirement) for requirement in wanted]


@nox.session
def lowest(session: nox.Session) -> None:
    """The suite on SQLite, with the lowest versions that pyproject.toml admits."""
    pins = lowest_versions()
    if loose := [pin for pin in pins if "==" not in pin]:
        session.error(f"a dependency needs one floor, NAME>=VERSION: {', '.join(loose)}")
    # The Flask that goes with the lowest click does not go with a newer Werkzeug, which it does not say.
    session.install("-e", ".[all]", *pins, "werkzeug<3", *nox.project.dependency_groups(PYPROJECT, "test"))
    # Old releases may use what a newer Python deprecates; that is not ours to fix.
    session.run("pytest", "-W", "ignore::DeprecationWarning", *session.posargs, env={"SQLQUEUE_TEST_DATABASES": "sqlite"})


@nox.session
def bench(session: nox.Session) -> None:
    """How fast, beside loops by hand and peers in environments of their own: -- --only sqlite --runs 1 --no-peers. Ten minutes."""
    session.install("-e", ".[all]")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """A storm over a queue: -- --database mysql,galera --minutes 10 --seed 42. Without arguments also the tests marked chaos."""
    install(session, "test")
    if not session.posargs:
        session.run("pytest", "-m", "chaos")
    session.run("python", "-m", "tests.chaos.harness", *session.posargs)
