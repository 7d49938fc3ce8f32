"""
A SQLite database is the application's file: its place, its name and its journal are the application's affair.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine

from sqlqueue import Queue, UnusableDatabase, Worker
from tests.workers import push, work_off


def queue_in(file: Path, mode: str) -> Queue:
    engine = create_engine(URL.create("sqlite", database=str(file)))
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {mode}")
    queue = Queue(engine)
    queue.metadata.create_all(engine)
    queue.job(name="noop")(lambda: None)
    return queue


def mode_of(file: Path) -> str:
    engine = create_engine(URL.create("sqlite", database=str(file)))
    with engine.connect() as connection:
        mode: str = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
    engine.dispose()
    return mode


@pytest.mark.parametrize("mode", ["delete", "truncate", "wal"])
@pytest.mark.parametrize("name", ["queue.db", "with space.db", "ü 漢 \N{GRINNING FACE}.db", "100% #1?x=1.db"])
def test_the_journal_stays_as_it_is_whatever_the_file_is_called(tmp_path: Path, mode: str, name: str) -> None:
    file = tmp_path / name
    queue = queue_in(file, mode)
    push(queue, "noop", 3)
    assert work_off(queue).counts == {"done": 3}
    assert file.exists()
    assert mode_of(file) == ("wal" if mode == "wal" else "delete")  # only a write-ahead log is a property of the file
    queue.consumer.close()


def test_a_file_that_cannot_be_written_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without the right to write cannot be had everywhere (root may do anything), a connection without it can."""
    monkeypatch.setattr("sqlqueue._worker.trouble.PATIENCE", 0.2)
    file = tmp_path / "queue.db"
    push(queue_in(file, "delete"), "noop")
    queue = Queue(f"sqlite:///file:{file}?mode=ro&uri=true")
    with pytest.raises(UnusableDatabase, match=r"no statement has succeeded .*readonly database"):
        Worker(queue).run()
    queue.consumer.close()
