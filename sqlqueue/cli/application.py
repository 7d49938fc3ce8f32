"""
Finding the application's queue and its database.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from .._dialects import consumer_url
from .._queue import Queue
from ..errors import NotConfigured, OptionError
from .problems import Misuse, Unable
from .usercode import user_code

__all__ = ["Target", "find_queue", "open_queue", "takes_app", "takes_target"]

F = TypeVar("F", bound=Callable[..., Any])

_APP = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(\.[^\W\d]\w*)*)(?P<call>\(\))?")
_HOW_TO_NAME_IT = "as in --app shop.jobs:queue, or with SQLQUEUE_APP, or as app in [tool.sqlqueue] of pyproject.toml"


@dataclass(frozen=True, slots=True)
class Target:
    """
    What the command line says about the application and its database.
    """

    app: str | None = None
    url: str | None = None
    prefix: str | None = None
    schema: str | None = None

    @property
    def names_tables(self) -> bool:
        return self.prefix is not None or self.schema is not None


def takes_target(function: F) -> F:
    """
    Give a command --app, --url, --prefix and --schema, as one `Target`.
    """
    return _with_options(function, *_DATABASE, *_TABLES)


def takes_app(function: F) -> F:
    """
    Give a command --app and --url, as one `Target`.
    """
    return _with_options(function, *_DATABASE)


_DATABASE = (
    click.option("--app", metavar="MODULE:NAME", help="The Queue, something with a .queue, or a factory as in shop:create()."),
    click.option("--url", metavar="URL", help="The database; env:NAME takes it from that environment variable."),
)
_TABLES = (
    click.option("--prefix", metavar="TEXT", help="What the tables' names begin with, when no app says it."),
    click.option("--schema", metavar="NAME", help="The schema that the tables are in, when no app says it."),
)


def _with_options(function: F, *options: Callable[[Any], Any]) -> F:
    names = [field.name for field in fields(Target)]

    @wraps(function)
    def command(**given: Any) -> Any:
        target = Target(**{name: given.pop(name, None) for name in names})
        return function(target, **given)

    wrapped: Any = command
    for option in reversed(options):
        wrapped = option(wrapped)
    return cast("F", wrapped)


def open_queue(target: Target, *, needs_app: bool = False) -> Queue:
    """
    The queue with its database, whose driver is installed.
    """
    queue = find_queue(target, needs_app=needs_app)
    if not queue.configured:
        raise Misuse("no database: give --url, or set SQLQUEUE_URL, or url in [tool.sqlqueue] of pyproject.toml, or give Queue(…) one")
    try:
        _ = queue.consumer.engine
    except NotConfigured as error:  # its driver is not installed
        raise Unable(str(error)) from error
    return queue


def find_queue(target: Target, *, needs_app: bool = False) -> Queue:
    """
    The application's queue, or one with default names when there is no application; perhaps without a database.
    """
    if target.names_tables and target.app is not None:
        raise Misuse("--prefix and --schema are for databases without an --app: the app's Queue knows its tables")
    app = None if target.names_tables else _setting("app", target.app)
    if needs_app and app is None:
        raise Misuse(f"no app: name the module and the Queue in it, {_HOW_TO_NAME_IT}")
    queue = _tables_only(target) if app is None else _load(*app)
    if (url := _setting("url", target.url)) is not None:
        queue.reconfigure(_checked_url(*url))
    if queue.configured:
        click.get_current_context().call_on_close(queue.consumer.close)
    return queue


def _tables_only(target: Target) -> Queue:
    return Queue(schema=target.schema) if target.prefix is None else Queue(prefix=target.prefix, schema=target.schema)


# --- settings


def _setting(name: str, given: str | None) -> tuple[str, str] | None:
    """
    A setting and where it stands: on the command line, in the environment, or in pyproject.toml.
    """
    variable = f"SQLQUEUE_{name.upper()}"
    if given is not None:
        return given, f"--{name}"
    if os.environ.get(variable):
        return os.environ[variable], variable
    value = _pyproject(Path.cwd()).get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise Misuse(f"pyproject.toml: {name} in [tool.sqlqueue] is not a text")
    return value, f"{name} in pyproject.toml"


def _pyproject(directory: Path) -> dict[str, Any]:
    path = directory / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("sqlqueue", {})
    except (ValueError, AttributeError, OSError) as error:
        raise Misuse(f"pyproject.toml cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise Misuse("pyproject.toml: [tool.sqlqueue] is not a table")
    if unknown := sorted(set(settings) - {"app", "url"}):
        raise Misuse(f"pyproject.toml: [tool.sqlqueue] knows app and url, not {', '.join(unknown)}")
    return settings


def _checked_url(url: str, source: str) -> Any:
    """
    The parsed URL. Whatever is wrong with it, it is not repeated: it holds a password.
    """
    if url.startswith("env:"):
        variable = url.removeprefix("env:")
        url = os.environ.get(variable, "")
        if not url:
            raise Misuse(f"{source}: the environment variable {variable} is not set")
        source = f"{source} ({variable})"
    try:
        return consumer_url(url)
    except OptionError as error:
        raise Misuse(f"{source}: {str(error).removeprefix('url: ')}") from error
    except ValueError:
        raise Misuse(f"{source}: the port is not a number; is there a character in the password that a URL has to escape?") from None


# --- the application


def _load(spec: str, source: str) -> Queue:
    found = _APP.fullmatch(spec)
    if found is None:
        raise Misuse(f"{source}: {spec!r} does not name a module and something in it, {_HOW_TO_NAME_IT}")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # at the end: no file here may take the place of a module of the standard library
    where = f"{source} {spec}"
    with user_code(where, module=found["module"]):
        value: Any = importlib.import_module(found["module"])
    with user_code(where, module=found["module"], inside=value):
        for name in found["path"].split("."):
            value = getattr(value, name)
    with user_code(where):
        value = value() if found["call"] else value
        queue = value if isinstance(value, Queue) else getattr(value, "queue", None)
    if isinstance(queue, Queue):
        return queue
    raise Misuse(_no_queue(where, value, callable(value) and not found["call"]))


def _no_queue(where: str, value: object, could_be_called: bool) -> str:
    hint = "; if it is a factory, write it with ()" if could_be_called else ""
    return f"{where}: this is a {type(value).__name__}, neither a Queue nor something with a .queue{hint}"
