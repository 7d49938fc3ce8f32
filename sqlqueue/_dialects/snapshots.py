"""
Whether a transaction may write a row that others have changed since it began.
"""

from __future__ import annotations

import sqlalchemy as sa

from .._tables import INNODB

__all__ = ["snapshot_is_strict"]

_ANSWERS = "sqlqueue_strict_snapshots"


def snapshot_is_strict(connection: sa.Connection) -> bool:
    """
    Whether writing a row fails that another transaction has changed, even after that has committed: on PostgreSQL above READ
    COMMITTED, on MariaDB with innodb_snapshot_isolation.

    Asked once a connection of the pool and level that the driver knows of. Who changes the level by SQL later is not noticed.
    """
    if connection.dialect.name not in INNODB and connection.dialect.name != "postgresql":
        return False
    level = getattr(connection.connection.dbapi_connection, "isolation_level", None)
    answers = connection.info.setdefault(_ANSWERS, {})
    if level not in answers:
        answers[level] = _ask(connection)
    return bool(answers[level])


def _ask(connection: sa.Connection) -> bool:
    if connection.dialect.name not in INNODB:
        return connection.exec_driver_sql("SHOW transaction_isolation").scalar_one() not in ("read committed", "read uncommitted")
    if not getattr(connection.dialect, "is_mariadb", False):
        return False
    setting = connection.exec_driver_sql("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'").first()
    return setting is not None and setting[1] == "ON"
