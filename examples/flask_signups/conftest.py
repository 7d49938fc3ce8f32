"""
The tests of the application, as its authors would write them: in the folder `examples`,  pytest flask_signups
"""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from flask.testing import FlaskClient

# A database of their own, named before the application is imported.
os.environ["DATABASE_URL"] = os.environ.get("SIGNUPS_TEST_URL", f"sqlite:///{Path(mkdtemp(), 'test.db')}")

from sqlqueue import Queue

from .app import app
from .jobs import queue
from .models import Base, engine


@pytest.fixture
def sqlqueue_queue() -> Queue:
    return queue  # the one that the fixtures of sqlqueue are about


@pytest.fixture
def client() -> Iterator[FlaskClient]:
    Base.metadata.create_all(engine)  # the tables of the queue are among them
    yield app.test_client()
    Base.metadata.drop_all(engine)
