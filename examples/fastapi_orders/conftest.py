"""
The tests of the shop, as its authors would write them: in the folder `examples`,  pytest fastapi_orders
"""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from fastapi.testclient import TestClient

# A database of their own, named before the shop is imported.
os.environ["DATABASE_URL"] = os.environ.get("ORDERS_TEST_URL", f"sqlite+aiosqlite:///{Path(mkdtemp(), 'test.db')}")

from sqlqueue import Queue

from .app import app
from .jobs import queue
from .models import Base


@pytest.fixture
def sqlqueue_queue() -> Queue:
    return queue  # the one that the fixtures of sqlqueue are about


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("WORKER", "no")  # the tests say when jobs run
    with TestClient(app) as client:
        yield client
    with queue.begin() as session:
        for table in reversed(Base.metadata.sorted_tables):  # the tables of the queue are among them
            session.execute(table.delete())
