"""
What pushing does not need.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlqueue import Queue

queue = Queue()
engine = sa.create_engine(sys.argv[1])
queue.metadata.create_all(engine)
queue.job(name="a")(job := lambda: None)
for session in (Session(engine), engine.connect(), scoped_session(sessionmaker(engine))):
    queue.push_named(session, "a", {{}}, unique="one")
    queue.push_named(session, "a", {{}})
    session.commit()
    session.close()
try:
    queue.push_named(None, "a", {{}})
except TypeError:
    print(engine.connect().exec_driver_sql("select count(*) from sqlqueue_jobs").scalar())
"""


@pytest.mark.parametrize("package", ["greenlet", "alembic", "click", "pydantic"])
def test_pushing_works_where_a_package_is_missing(package: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT.format(package=package), f"sqlite:///{tmp_path}/queue.db"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("4\n", "", 0)
