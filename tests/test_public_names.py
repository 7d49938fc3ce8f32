"""
What `import sqlqueue` gives, and what it does not print.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import sqlqueue
from sqlqueue import Delivery, Queue, errors


def test_all_is_sorted_and_complete() -> None:
    assert sqlqueue.__all__ == sorted(sqlqueue.__all__)
    for name in sqlqueue.__all__:
        assert hasattr(sqlqueue, name), name


def test_every_error_is_exported_and_drawn_in_the_tree() -> None:
    for name in errors.__all__:
        assert name in sqlqueue.__all__, name
        assert issubclass(getattr(errors, name), errors.SqlQueueError)
        assert name in (errors.__doc__ or ""), f"{name} is missing in the drawing"


def test_an_import_of_the_package_loads_neither_drivers_nor_asyncio_extensions() -> None:
    heavy = "{'psycopg', 'pymysql', 'pydantic', 'alembic', 'click', 'sqlalchemy.ext.asyncio'}"
    code = f"import sys; from sqlqueue import *; print(*{heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_names_are_loaded_when_they_are_used_so_that_the_program_can_set_its_signal_handlers_first() -> None:
    code = "import sys, sqlqueue; print('sqlalchemy' in sys.modules, sqlqueue.Queue.__module__, 'sqlalchemy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown == ["False", "sqlqueue._queue", "True"]
    assert set(sqlqueue.__all__) <= set(dir(sqlqueue))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'chaim'"):
        sqlqueue.chaim  # noqa: B018


def test_reprs_show_neither_arguments_nor_passwords() -> None:
    queue = Queue("postgresql://shop:s3cret-word@localhost/shop")
    assert "s3cret-word" not in repr(queue)

    @queue.job(name="hide.me")
    def hide(word: str) -> None: ...

    assert "s3cret-word" not in repr(hide.bind("s3cret-word"))
    assert "s3cret-word" not in repr(hide)
    assert "s3cret-word" not in repr(_delivery({"word": "s3cret-word"}))


def _delivery(payload: dict[str, object]) -> Delivery:
    from datetime import UTC, datetime

    return Delivery(
        id=1,
        name="hide.me",
        queue="default",
        payload=payload,
        attempt=1,
        max_attempts=5,
        token="s3cret-word",
        lease_until=datetime.now(UTC),
        headers={"tenant": "s3cret-word"},
    )
