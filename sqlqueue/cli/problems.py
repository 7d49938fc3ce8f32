"""
The one door through which errors become a line on stderr and an exit code.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from .._dialects import trouble_of
from .._worker import unusable
from ..errors import ArgumentError, NotConfigured, OptionError, RegistrationError, SqlQueueError, UnknownJob
from .text import printable

__all__ = ["Misuse", "Problem", "Unable", "translated"]

_WRONG_USE = (ArgumentError, NotConfigured, OptionError, RegistrationError, UnknownJob)
_PASSWORD = re.compile(r"(://[^/\s:@]*):[^\s]*@")


class Problem(click.ClickException):
    """
    One line for people on stderr. The subclass says what the program ends with.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(_PASSWORD.sub(r"\1:***@", " ".join(message.split()))))


class Unable(Problem):
    """
    The database failed, or the command could not do what it was asked.
    """

    exit_code = 1


class Misuse(Problem):
    """
    The command line, the settings or the application that they name are wrong.
    """

    exit_code = 2


@contextmanager
def translated() -> Iterator[None]:
    """
    Turn the library's and the database's errors into a `Problem`.
    """
    try:
        yield
    except _WRONG_USE as error:
        raise Misuse(str(error)) from error
    except SqlQueueError as error:
        raise Unable(str(error)) from error
    except DBAPIError as error:
        raise Unable(str(unusable(error, trouble_of(error)))) from error
    except SQLAlchemyError as error:
        raise Unable(f"the database cannot be used: {error}") from error
    except (TypeError, ValueError) as error:
        if not _while_connecting(error):
            raise
        # The driver's own: options of a URL that it does not know, or that have another type.
        raise Misuse(f"url: the driver does not take these options: {error}") from error


def _while_connecting(error: BaseException) -> bool:
    places = ("sqlalchemy/engine/create.py", "sqlalchemy/engine/default.py")
    return any(
        frame.f_code.co_name == "connect" and frame.f_code.co_filename.replace("\\", "/").endswith(places)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
