"""
What `import sqlqueue` gives, and what it does not print.
"""

from __future__ import annotations

import subprocess
import sys

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
    heavy = "{'psycopg', 'pymysql', 'greenlet', 'pydantic', 'alembic', 'click', 'sqlalchemy.ext.asyncio'}"
    code = f"import sys, sqlqueue; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # SQLAlchemy itself looks for greenlet where it is installed.
    assert set(shown.strip().strip("[]").replace("'", "").split(", ")) - {""} <= {"greenlet"}


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
