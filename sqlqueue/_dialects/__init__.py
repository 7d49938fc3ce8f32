"""
All that knows one database from another, apart from the column types in `_tables`.

The rest of the library asks a `Server` for a capability, uses `now()` and `after()` for the clock, and lets `trouble_of`
say what an error means.
"""

from __future__ import annotations

from .clock import after, before, now
from .engines import (
    close_before_fork,
    consumer_engine,
    consumer_options,
    consumer_url,
    database_label,
    driver_extra,
    producer_engine,
)
from .inserts import insert_if_absent, insert_or_lock, insert_rows, insert_with_key
from .producers import check_transactional, closed_when_undone, left_when_undone
from .rows import fetch_raw, moment_of, raw_moment, raw_parameter
from .savepoints import begin_at_server
from .server import Server, among, by_primary_key, by_ready_index, delete_by_primary_key, lock_by_primary_key, server_of
from .snapshots import snapshot_is_strict
from .texts import storable
from .trouble import Trouble, trouble_of
from .waiting import CannotWatch, Watch, WatchLost, names_text, open_watch, wake_row_of, wake_sleepers, wakes_by_push

OFFLINE_URLS = {
    "postgresql": "postgresql+psycopg://",
    "mysql": "mysql+pymysql://",
    "mariadb": "mariadb+pymysql://",
    "sqlite": "sqlite://",
}
"""For DDL without a connection: the names a user may give, and the dialect behind each."""

__all__ = [
    "OFFLINE_URLS",
    "CannotWatch",
    "Server",
    "Trouble",
    "Watch",
    "WatchLost",
    "after",
    "among",
    "before",
    "begin_at_server",
    "by_primary_key",
    "by_ready_index",
    "check_transactional",
    "close_before_fork",
    "closed_when_undone",
    "consumer_engine",
    "consumer_options",
    "consumer_url",
    "database_label",
    "delete_by_primary_key",
    "driver_extra",
    "fetch_raw",
    "insert_if_absent",
    "insert_or_lock",
    "insert_rows",
    "insert_with_key",
    "left_when_undone",
    "lock_by_primary_key",
    "moment_of",
    "names_text",
    "now",
    "open_watch",
    "producer_engine",
    "raw_moment",
    "raw_parameter",
    "server_of",
    "snapshot_is_strict",
    "storable",
    "trouble_of",
    "wake_row_of",
    "wake_sleepers",
    "wakes_by_push",
]
