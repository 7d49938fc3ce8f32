"""
`install`: the tables, as an Alembic revision, as DDL, or directly.

Alembic is imported where it is used: no worker has to carry it.
"""

from __future__ import annotations

from pathlib import Path

import click
from sqlalchemy.exc import DBAPIError

from .._dialects import OFFLINE_URLS
from .._queue import Queue
from .._worker import first_line
from .application import Target, find_queue, open_queue, takes_target
from .problems import Misuse
from .text import printable

__all__ = ["install"]


@click.command()
@takes_target
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="The directory of alembic.ini; the current one if not given.")
@click.option("--head", metavar="REVISION", help="The head to come after, where the project has several.")
@click.option("--sql", is_flag=True, help="Print the DDL, without a connection.")
@click.option("--dialect", type=click.Choice(list(OFFLINE_URLS)), help="The database that --sql prints for.")
@click.option("--apply", is_flag=True, help="Create the tables directly, without Alembic.")
def install(target: Target, *, directory: Path | None, head: str | None, sql: bool, dialect: str | None, apply: bool) -> None:
    """
    Write an Alembic revision that creates the tables into your project.
    """
    _refuse_mixtures(sql=sql, apply=apply, dialect=dialect, alembic=directory is not None or head is not None)
    if sql:
        _print_ddl(find_queue(target), dialect)
    elif apply:
        _create(open_queue(target))
    else:
        _write(find_queue(target), directory, head)


def _refuse_mixtures(*, sql: bool, apply: bool, dialect: str | None, alembic: bool) -> None:
    if sql and apply:
        raise Misuse("--sql prints and --apply creates: give one of them")
    if alembic and (sql or apply):
        raise Misuse("--dir and --head are for an Alembic revision, they do not go with --sql and --apply")
    if dialect is not None and not sql:
        raise Misuse("--dialect goes with --sql; a revision serves every database")


def _print_ddl(queue: Queue, dialect: str | None) -> None:
    if dialect is None:
        raise Misuse(f"--sql needs --dialect: {', '.join(OFFLINE_URLS)}")
    from ..install import render_ddl

    click.echo(render_ddl(queue.tables, dialect), nl=False)


def _create(queue: Queue) -> None:
    from ..install import create_tables

    created = create_tables(queue.consumer.engine, queue.tables)
    click.echo(f"created: {', '.join(created)}" if created else "the tables are there already, nothing done")


def _write(queue: Queue, directory: Path | None, head: str | None) -> None:
    from ..install import AlreadyInstalled, write_revision

    if _already_there(queue):
        click.echo("the tables are in the database already, nothing written")
        return
    try:
        path = write_revision(queue.tables, directory or Path(), head=head)
    except AlreadyInstalled as known:
        click.echo(printable(str(known)))
        return
    click.echo(printable(str(path)))
    # With several heads "head" would be ambiguous.
    place = "" if directory is None else f" in {printable(str(directory))}"
    click.echo(f"review it, then{place}: alembic upgrade {'head' if head is None else 'heads'}")


def _already_there(queue: Queue) -> bool:
    """
    Whether the database, if one is known, has the tables. Writing a revision does not need it: what cannot be asked is not.
    """
    from ..install import tables_exist

    if not queue.configured:
        return False
    try:
        return tables_exist(queue.consumer.engine, queue.tables)
    except DBAPIError as error:
        click.echo(f"not checked whether the tables are there already: {printable(first_line(error))}", err=True)
        return False
