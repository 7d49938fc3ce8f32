"""
Savepoints that belong to a transaction.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

__all__ = ["begin_at_server"]


def begin_at_server(connection: sa.Connection) -> None:
    """
    Let the transaction that SQLAlchemy has begun exist for the database, too, so that a savepoint is a part of it.

    SQLite's stock driver begins one before the first statement that writes. A savepoint that comes earlier is a transaction of
    its own: to release it is to commit.
    """
    if connection.dialect.name != "sqlite":
        return
    pooled = connection.connection
    driver: Any = getattr(pooled, "driver_connection", None) or pooled.dbapi_connection
    driver = getattr(driver, "_conn", driver)  # aiosqlite wraps the real one
    if not driver.in_transaction:
        connection.exec_driver_sql("BEGIN")
