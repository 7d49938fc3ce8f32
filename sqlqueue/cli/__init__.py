"""
The program `sqlqueue`: every command parses its options, calls the library, and prints.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from .._version import __version__
from .failed_jobs import failed
from .installation import install
from .problems import translated
from .queues import clear, status
from .worker import work

__all__ = ["main"]


class Program(click.Group):
    """
    The group whose commands all leave through the same door for errors.
    """

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot show a character gets its escape, not a traceback.
            if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
                reconfigure(errors="backslashreplace")
        with translated():
            return super().invoke(ctx)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="sqlqueue %(version)s")
def main() -> None:
    """
    A job queue in your SQL database.

    The application is given with --app, SQLQUEUE_APP, or app in [tool.sqlqueue] of pyproject.toml; the database with --url,
    SQLQUEUE_URL, url in [tool.sqlqueue], or by the application itself.

    Exit codes: 0 done, 1 the database failed or it could not be done, 2 wrong usage.
    """


@click.command()
def demo() -> None:
    """
    Watch a small shop push, work, fail and retry in a temporary database.
    """
    from ..demo import run

    run(click.echo)


for command in (install, work, status, failed, clear, demo):
    main.add_command(command)
