"""
Runs this repository's one revision: on SQLQUEUE_URL, or on `alembic -x url=… upgrade head`.
"""

from __future__ import annotations

import os

import sqlalchemy as sa
from alembic import context
from alembic.util import CommandError

from sqlqueue._tables import build_tables

metadata = sa.MetaData()
build_tables(metadata)
options = {"target_metadata": metadata, "compare_type": True, "compare_server_default": True}


def database_url() -> str:
    url = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("SQLQUEUE_URL")
    if not url:
        raise CommandError("no database: set SQLQUEUE_URL, or pass -x url=URL")
    return url


def run_online() -> None:
    engine = sa.create_engine(database_url(), poolclass=sa.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()


def run_offline() -> None:
    context.configure(url=database_url(), literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
