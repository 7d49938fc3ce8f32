"""
An application with worker processes, on each database.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from sqlqueue import Queue
from tests.acceptance.processes import Site, site_on
from tests.servers import Database


@pytest.fixture
def site(queue: Queue, database: Database, observer: Engine, tmp_path: Path) -> Iterator[Site]:
    with site_on(queue, database, observer, tmp_path) as site:
        yield site
