"""
What an error of the database means for somebody who could try again.
"""

from __future__ import annotations

from enum import Enum

from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError

__all__ = ["Trouble", "trouble_of"]


class Trouble(Enum):
    """
    Kinds of database errors, by what to do about them.
    """

    CONFLICT = "another transaction was in the way: try the whole transaction again"
    LOST = "the connection is gone or cannot be made: what was under way may have been applied"
    UNAVAILABLE = "the server refuses for a while: read-only, starting, full"
    MISSING_TABLES = "the tables are not there"
    REFUSED = "wrong password, unknown database or missing privilege"
    DUPLICATE = "a key is taken"
    OTHER = "a mistake in the statement or the data"


_BY_SQLSTATE = {
    "40001": Trouble.CONFLICT,
    "40003": Trouble.LOST,  # nobody knows whether the statement was completed
    "40P01": Trouble.CONFLICT,
    "26000": Trouble.CONFLICT,  # the session does not know a statement that was prepared; forgotten after a rollback
    "42P05": Trouble.CONFLICT,  # it knows somebody else's under that name
    "55P03": Trouble.CONFLICT,  # lock_timeout
    "57014": Trouble.CONFLICT,  # statement_timeout or a cancel by an administrator
    "25P03": Trouble.LOST,  # idle_in_transaction_session_timeout
    "25P04": Trouble.LOST,  # transaction_timeout
    "57P01": Trouble.LOST,
    "57P02": Trouble.LOST,
    "57P03": Trouble.LOST,
    "57P05": Trouble.LOST,
    "25006": Trouble.UNAVAILABLE,  # read-only: a failover under way
    "53000": Trouble.UNAVAILABLE,
    "53100": Trouble.UNAVAILABLE,
    "53200": Trouble.UNAVAILABLE,
    "53300": Trouble.UNAVAILABLE,
    "53400": Trouble.UNAVAILABLE,
    "58030": Trouble.UNAVAILABLE,  # an input/output error of the server
    "42P01": Trouble.MISSING_TABLES,
    "3F000": Trouble.MISSING_TABLES,
    "42703": Trouble.MISSING_TABLES,  # a column is missing: the tables are of another version
    "28000": Trouble.REFUSED,
    "28P01": Trouble.REFUSED,
    "3D000": Trouble.REFUSED,
    "42501": Trouble.REFUSED,
    "23505": Trouble.DUPLICATE,
}
_BY_ERRNO = {
    1020: Trouble.CONFLICT,  # MariaDB: the record has changed since the snapshot
    1205: Trouble.CONFLICT,
    1206: Trouble.CONFLICT,  # more locks than the server has room for
    1213: Trouble.CONFLICT,
    1317: Trouble.CONFLICT,  # the query was interrupted
    1412: Trouble.CONFLICT,  # the table's definition has changed since the transaction began
    1969: Trouble.CONFLICT,
    3024: Trouble.CONFLICT,  # max_execution_time
    3101: Trouble.CONFLICT,  # group replication rolled the transaction back
    3572: Trouble.CONFLICT,
    1047: Trouble.UNAVAILABLE,  # a Galera node that is not ready
    1040: Trouble.UNAVAILABLE,
    1021: Trouble.UNAVAILABLE,
    1037: Trouble.UNAVAILABLE,
    1038: Trouble.UNAVAILABLE,
    1041: Trouble.UNAVAILABLE,
    1114: Trouble.UNAVAILABLE,
    1129: Trouble.UNAVAILABLE,  # too many failed connections from this host
    1135: Trouble.UNAVAILABLE,
    1203: Trouble.UNAVAILABLE,
    1223: Trouble.UNAVAILABLE,  # somebody holds a global read lock
    1226: Trouble.UNAVAILABLE,  # this user's quota is used up
    1290: Trouble.UNAVAILABLE,
    1792: Trouble.UNAVAILABLE,
    1836: Trouble.UNAVAILABLE,
    3032: Trouble.UNAVAILABLE,  # the server is in offline mode
    3168: Trouble.UNAVAILABLE,
    1053: Trouble.LOST,
    1077: Trouble.LOST,
    1079: Trouble.LOST,
    1080: Trouble.LOST,
    1152: Trouble.LOST,
    1158: Trouble.LOST,
    1159: Trouble.LOST,
    1160: Trouble.LOST,
    1161: Trouble.LOST,
    1180: Trouble.LOST,  # an error during COMMIT
    1184: Trouble.LOST,
    1927: Trouble.LOST,
    2002: Trouble.LOST,
    2003: Trouble.LOST,
    2005: Trouble.LOST,
    2006: Trouble.LOST,
    2013: Trouble.LOST,
    2014: Trouble.LOST,
    2055: Trouble.LOST,
    4031: Trouble.LOST,
    0: Trouble.LOST,  # PyMySQL's InterfaceError(0, '') on a closed socket
    1054: Trouble.MISSING_TABLES,
    1146: Trouble.MISSING_TABLES,
    1176: Trouble.MISSING_TABLES,  # an index that a statement names
    1044: Trouble.REFUSED,
    1045: Trouble.REFUSED,
    1049: Trouble.REFUSED,
    1130: Trouble.REFUSED,
    1142: Trouble.REFUSED,
    1143: Trouble.REFUSED,
    1227: Trouble.REFUSED,
    1698: Trouble.REFUSED,
    1062: Trouble.DUPLICATE,
}
_BY_SQLITE_CODE = {  # primary result codes; the extended ones keep them in their low byte
    5: Trouble.CONFLICT,  # SQLITE_BUSY
    6: Trouble.CONFLICT,  # SQLITE_LOCKED
    7: Trouble.UNAVAILABLE,  # SQLITE_NOMEM
    8: Trouble.UNAVAILABLE,  # SQLITE_READONLY
    9: Trouble.CONFLICT,  # SQLITE_INTERRUPT
    10: Trouble.LOST,  # SQLITE_IOERR
    13: Trouble.UNAVAILABLE,  # SQLITE_FULL
    14: Trouble.LOST,  # SQLITE_CANTOPEN
    15: Trouble.CONFLICT,  # SQLITE_PROTOCOL: too many at once opened a WAL
    17: Trouble.CONFLICT,  # SQLITE_SCHEMA
    23: Trouble.REFUSED,
    26: Trouble.REFUSED,  # SQLITE_NOTADB
}
_SQLITE_DUPLICATES = (1555, 2067)  # SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE


def trouble_of(error: DBAPIError) -> Trouble:
    """
    Classify an error that SQLAlchemy raised.
    """
    found = _by_code(error)
    if found is not None:
        return found
    if error.connection_invalidated:
        return Trouble.LOST
    text = str(error.orig)
    if "no such table" in text or "no such column" in text:
        return Trouble.MISSING_TABLES
    if _refused_at_login(text):
        return Trouble.REFUSED
    # Without a code the driver itself spoke: it could not reach the server, lost it, or lost its place in the protocol.
    return Trouble.LOST if isinstance(error, OperationalError | InterfaceError | InternalError) and not _has_code(error) else Trouble.OTHER


def _by_code(error: DBAPIError) -> Trouble | None:
    origin = error.orig
    code = getattr(origin, "sqlite_errorcode", None)
    if isinstance(code, int):
        return Trouble.DUPLICATE if code in _SQLITE_DUPLICATES else _BY_SQLITE_CODE.get(code & 0xFF)
    number = origin.args[0] if origin is not None and origin.args else None
    if isinstance(number, int):  # asked first: PyMySQL gives a coarse SQLSTATE beside it
        return _BY_ERRNO.get(number)
    state = getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)
    if isinstance(state, str):
        if state == "0A000" and _was_replanned(origin):
            return Trouble.CONFLICT
        return _BY_SQLSTATE.get(state) or (Trouble.LOST if state.startswith("08") else None)
    return None


def _was_replanned(origin: BaseException | None) -> bool:
    """
    Somebody has changed a column that a prepared statement returns. The text depends on the server's language.
    """
    return getattr(getattr(origin, "diag", None), "source_function", None) == "RevalidateCachedQuery"


def _has_code(error: DBAPIError) -> bool:
    origin = error.orig
    if getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None) or hasattr(origin, "sqlite_errorcode"):
        return True
    return bool(origin is not None and origin.args and isinstance(origin.args[0], int))


def _refused_at_login(text: str) -> bool:
    """
    libpq gives no code for an error at login, only the server's words.
    """
    words = ("authentication failed", "does not exist", "pg_hba.conf", "is not permitted to log in", "permission denied")
    return "FATAL" in text and any(word in text for word in words)
