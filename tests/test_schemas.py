"""
What is kept in the repository beside the tables is what they render to: the snapshots, and the repository's own migration.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from sqlqueue._dialects import OFFLINE_URLS
from sqlqueue._tables import Tables, build_tables
from sqlqueue.install import AlreadyInstalled, render_ddl, write_revision

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tables() -> Tables:
    return build_tables(sa.MetaData())


def without_identity(path: Path) -> str:
    """A revision's code apart from what differs between any two revisions."""
    return re.sub(r"(?m)^(Revision ID: |Create Date: |revision = ).*$", r"\1", path.read_text())


@pytest.mark.parametrize("name", OFFLINE_URLS)
def test_the_snapshot_is_what_is_printed(tables: Tables, name: str) -> None:
    assert ordered((ROOT / "schemas" / f"{name}.sql").read_text()) == ordered(render_ddl(tables, name))


def ordered(ddl: str) -> str:
    """Older releases of SQLAlchemy print a table's options in any order."""
    return re.sub(r"^\)(\w.*);$", lambda end: f"){' '.join(sorted(end[1].split()))};", ddl, flags=re.MULTILINE)


def test_there_is_one_snapshot_a_database() -> None:
    assert {path.stem for path in (ROOT / "schemas").iterdir()} == set(OFFLINE_URLS)


def test_the_revision_of_this_repository_is_the_emitted_one(tables: Tables, tmp_path: Path) -> None:
    shutil.copy(ROOT / "alembic.ini", tmp_path)
    shutil.copytree(ROOT / "alembic", tmp_path / "alembic", ignore=shutil.ignore_patterns("*_tables.py", "__pycache__"))
    emitted = write_revision(tables, tmp_path)
    (kept,) = (ROOT / "alembic/versions").glob("*.py")
    assert without_identity(kept) == without_identity(emitted)


def test_this_repository_counts_as_installed(tables: Tables) -> None:
    with pytest.raises(AlreadyInstalled):
        write_revision(tables, ROOT)


def test_the_environment_of_this_repository_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/here.db"
    monkeypatch.setenv("SQLQUEUE_URL", url)
    config = Config(str(ROOT / "alembic.ini"), stdout=io.StringIO())
    command.upgrade(config, "head")
    command.check(config)
    command.downgrade(config, "base")
    assert sa.inspect(sa.create_engine(url, poolclass=sa.NullPool)).get_table_names() == ["alembic_version"]


def alembic(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As typed at the root of the repository, where the folder alembic/ lies beside the library of that name."""
    command_line = [sys.executable, "-m", "alembic", *arguments]
    return subprocess.run(command_line, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True, check=False)


def test_the_url_may_be_given_on_the_command_line() -> None:
    done = alembic("-x", "url=postgresql+psycopg://", "upgrade", "head", "--sql")
    assert "CREATE TABLE sqlqueue_jobs" in done.stdout
    assert "SET (fillfactor" in done.stdout
    done = alembic("upgrade", "head")
    assert done.returncode != 0
    assert "no database: set SQLQUEUE_URL, or pass -x url=URL" in done.stdout + done.stderr


def test_the_folder_alembic_does_not_hide_the_library() -> None:
    code = "from alembic import op, __version__; print(op.create_table.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "create_table\n", done.stderr
    assert not (ROOT / "alembic/__init__.py").exists()
