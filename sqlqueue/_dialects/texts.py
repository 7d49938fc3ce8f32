"""
Texts that a database can hold.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

__all__ = ["storable"]


def storable(connection: sa.Connection, text: str) -> str:
    """
    The text, with escapes instead of what is not ASCII where the database is not in UTF-8. No round trip with the workers' driver.
    """
    if connection.dialect.name != "postgresql":
        return text  # InnoDB's columns name their character set, SQLite has only Unicode
    driver: Any = connection.connection.dbapi_connection
    known: Any = getattr(driver, "info", None)
    encoding = known.parameter_status("server_encoding") if known else connection.exec_driver_sql("SHOW server_encoding").scalar()
    in_utf8 = encoding in (None, "UTF8")
    return text if in_utf8 else text.encode("ascii", "backslashreplace").decode()
