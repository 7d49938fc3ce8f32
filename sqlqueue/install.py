"""
Putting the tables into a database: as DDL, as an Alembic revision of the user's own project, or directly.

The `Table` objects are the only description; everything here is rendered from them. An emitted revision belongs to the
project it is written into, so it holds plain SQLAlchemy and imports nothing of this library.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
import tomllib
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from alembic.autogenerate import render_python_code
from alembic.autogenerate.api import AutogenContext
from alembic.config import Config
from alembic.operations import ops
from alembic.script import Script, ScriptDirectory
from alembic.util import CommandError, rev_id

from ._dialects import OFFLINE_URLS
from ._tables import INNODB, Instant, Tables
from .errors import OptionError, SqlQueueError

__all__ = [
    "AlreadyInstalled",
    "InstallError",
    "Operations",
    "create_tables",
    "render_ddl",
    "render_operations",
    "tables_exist",
    "write_revision",
]

MESSAGE = "create sqlqueue tables"


class InstallError(SqlQueueError):
    """
    The revision cannot be written into this project. The message says what to do.
    """


class AlreadyInstalled(InstallError):
    """
    A revision of the project creates the jobs table already. Nothing was written.
    """

    def __init__(self, revision: str, path: Path, table: str) -> None:
        super().__init__(f"revision {revision} creates {table} already, nothing written: {path}")
        self.revision = revision
        self.path = path


# As DDL


def render_ddl(tables: Tables, dialect_name: str) -> str:
    """
    Return the DDL of one database as a script for its own client, without a connection and without its driver.

    Raises:
        OptionError: no such database.
    """
    if dialect_name not in OFFLINE_URLS:
        raise OptionError(f"--dialect: one of {', '.join(OFFLINE_URLS)}, not {dialect_name!r}")
    head = f"-- The tables of sqlqueue, as printed by: sqlqueue install --sql --dialect {dialect_name}"
    return "\n\n".join([head, *(f"{sql};" for _, sql in _compile_ddl(tables, dialect_name))]) + "\n"


def _compile_ddl(tables: Tables, dialect_name: str) -> list[tuple[object, str]]:
    """
    Everything that creating the tables would execute, listeners of `after_create` included, in the same order every time.
    """
    compiled: list[tuple[object, str]] = []

    def compile_element(element: Any, *_: object, **__: object) -> None:
        lines = str(element.compile(dialect=engine.dialect)).strip().splitlines()
        compiled.append((element, "\n".join(line.rstrip().expandtabs(4) for line in lines)))

    engine = sa.create_mock_engine(OFFLINE_URLS[dialect_name], compile_element)
    for table in tables.all:
        start = len(compiled)
        table.create(engine, checkfirst=False)
        compiled[start:] = sorted(compiled[start:], key=_creation_order)
    return compiled


def _creation_order(statement: tuple[object, str]) -> tuple[int, str]:
    """
    The table, its indexes by name (SQLAlchemy keeps them in a set), then what listeners add.
    """
    match statement:
        case sa.schema.CreateTable(), _:
            return 0, ""
        case sa.schema.CreateIndex(), sql:
            return 1, sql
    return 2, ""


# As an Alembic revision


@dataclass(frozen=True, slots=True)
class Operations:
    """
    The bodies of a revision's two functions, indented as the template wants them, and the imports they need.
    """

    upgrade: str
    downgrade: str
    imports: tuple[str, ...]


def render_operations(tables: Tables) -> Operations:
    """
    Return the Python code of a revision that creates the tables, for every database at once.
    """
    creation = ops.UpgradeOps(list(_creation_steps(tables)))
    imports: set[str] = set()
    upgrade = [*_render_python(creation, imports), *_render_listeners(tables)]
    downgrade = _render_python(creation.reverse(), imports)
    return Operations(_as_body(upgrade), _as_body(downgrade), tuple(sorted(imports)))


def _creation_steps(tables: Tables) -> Iterator[ops.MigrateOperation]:
    for table in tables.all:
        yield ops.CreateTableOp.from_table(table)
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            yield ops.CreateIndexOp.from_index(index)


def _render_python(steps: ops.UpgradeOps | ops.DowngradeOps, imports: set[str]) -> list[str]:
    """
    The lines of code for `steps`; what they import is added to `imports`.
    """
    contexts: list[AutogenContext] = []

    def render_item(kind: str, item: object, context: AutogenContext) -> str | Literal[False]:
        contexts.append(context)  # Alembic gathers the imports there and does not return them
        if kind == "type" and isinstance(item, Instant):
            context.imports.add("from sqlalchemy.dialects import mysql")
            return _render_instant()
        return False

    code = render_python_code(steps, render_item=render_item)
    imports.update(*(context.imports for context in contexts))
    lines = textwrap.dedent(f"    {code}").splitlines()
    return [line for line in lines if not line.startswith("# ###")]  # "please adjust!" is no advice here


def _render_instant() -> str:
    """
    `Instant` as columns of it are made: its conversions of values have no part in a migration.
    """
    return f"sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), {', '.join(map(repr, INNODB))})"


def _render_listeners(tables: Tables) -> Iterator[str]:
    """
    What the tables' `after_create` listeners execute on one database only.
    """
    for name in OFFLINE_URLS:
        statements = [sql for element, sql in _compile_ddl(tables, name) if isinstance(element, sa.DDL)]
        if statements:
            # The context knows the dialect in offline mode too, where there is no connection to ask.
            yield f"if op.get_context().dialect.name == {name!r}:"
            yield "    # Every claim rewrites its row: leave room for that on the page, and vacuum early."
            yield from (f"    op.execute({sql!r})" for sql in statements)


def _as_body(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ").strip()


def write_revision(tables: Tables, directory: Path, *, head: str | None = None) -> Path:
    """
    Write a revision that creates the tables into the Alembic project in `directory`, and return its path.

    The project's own template and file names are used; its `env.py` is not run. No existing file is changed.

    Raises:
        AlreadyInstalled: a revision creates them already.
        InstallError: there is no usable Alembic project, or it has several heads and `head` does not say which.
        OptionError: `head` is not a head.
    """
    directory = directory.resolve()
    with _alembic_errors(directory), _inside(directory):
        config = _find_config(directory)
        script = ScriptDirectory.from_config(config)
        revisions = list(script.walk_revisions())
        _refuse_second(tables, revisions)
        parent = _choose_parent(script, head)
        operations = render_operations(tables)
        with _nothing_overwritten(revisions):
            written = _generate(config, script, parent, operations)
        _check_written(tables, operations, written)
    return Path(written.path)


@contextlib.contextmanager
def _alembic_errors(directory: Path) -> Iterator[None]:
    """
    The one door through which errors of Alembic, of the project's files and of the code in its revisions come.
    """
    try:
        yield
    except SqlQueueError:
        raise
    except CommandError as error:
        raise InstallError(f"{directory}: {_one_line(error)}") from error
    except Exception as error:
        raise InstallError(f"{directory}: Alembic cannot use this project: {type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """
    Where relative paths in alembic.ini mean the project, and after which its `prepend_sys_path` is forgotten.
    """
    if not directory.is_dir():
        raise InstallError(f"no such directory: {directory}")
    paths = sys.path.copy()
    try:
        with contextlib.chdir(directory):
            yield
    finally:
        sys.path[:] = paths


def _find_config(directory: Path) -> Config:
    ini = directory / "alembic.ini"
    options: dict[str, Any] = {"cmd_opts": Namespace(quiet=True)}  # what is printed is up to the caller
    if ini.is_file():
        options["file_"] = str(ini)
    if _configures_alembic(directory / "pyproject.toml"):
        options["toml_file"] = str(directory / "pyproject.toml")
    if len(options) == 1:
        raise InstallError(
            f"no alembic.ini in {directory}: name the project's directory with --dir, start a project with `alembic init`,"
            " or do without Alembic: --sql prints the DDL, --apply creates the tables"
        )
    config = Config(**options)
    if (directory / "env.py").is_file() and config.get_main_option("script_location") is None:
        # Flask-Migrate keeps alembic.ini inside the script directory and sets the location in code.
        config.set_main_option("script_location", str(directory).replace("%", "%%"))
    return config


def _configures_alembic(pyproject: Path) -> bool:
    """
    Whether pyproject.toml has a section for Alembic that the installed Alembic reads.
    """
    if "toml_file" not in inspect.signature(Config).parameters or not pyproject.is_file():
        return False
    return "alembic" in tomllib.loads(pyproject.read_text(encoding="utf-8")).get("tool", {})


def _refuse_second(tables: Tables, revisions: Iterable[Script]) -> None:
    for revision in revisions:
        path = Path(revision.path)
        if _creates(tables.jobs, path):
            raise AlreadyInstalled(revision.revision, path, tables.jobs.fullname)


def _creates(table: sa.Table, path: Path) -> bool:
    """
    Whether the code of a revision holds a `create_table` of `table`, however it is laid out.
    """
    if path.suffix != ".py":  # a project may keep compiled revisions only
        return False
    return any(_is_creation(node, table) for node in ast.walk(ast.parse(path.read_bytes())))


def _is_creation(node: ast.AST, table: sa.Table) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="create_table"), args=[ast.Constant(value=table.name), *_], keywords=keywords):
            schemas = [keyword.value for keyword in keywords if keyword.arg == "schema"] or [ast.Constant(None)]
            # A schema that is computed may be ours; a needless refusal is put right more easily than a table made twice.
            return not isinstance(schemas[0], ast.Constant) or schemas[0].value == table.schema
    return False


def _choose_parent(script: ScriptDirectory, head: str | None) -> str | None:
    """
    The revision that the new one comes after, None in an empty project.
    """
    heads = script.get_heads()
    if head is not None:
        return _resolve_head(script, head, heads)
    if len(heads) > 1:
        raise InstallError(f"the project has {len(heads)} heads: {', '.join(heads)}; choose one with --head")
    return heads[0] if heads else None


def _resolve_head(script: ScriptDirectory, head: str, heads: list[str]) -> str:
    try:
        found = {revision.revision for revision in script.get_revisions(head) if revision is not None}
    except (CommandError, AssertionError):  # Alembic asserts that the text is not empty
        found = set()
    if len(found) == 1 and found <= set(heads):
        return found.pop()
    known = f"choose from: {', '.join(heads)}" if heads else "it has no revision yet, leave --head out"
    raise OptionError(f"--head: {head!r} is not a head of the project; {known}")


@contextlib.contextmanager
def _nothing_overwritten(revisions: Iterable[Script]) -> Iterator[None]:
    """
    A `file_template` without the revision's id can give a name that is taken, and Alembic writes over the file.
    """
    before = {path: path.read_bytes() for path in (Path(revision.path) for revision in revisions)}
    overwritten = []
    try:
        yield
    finally:
        for path, content in before.items():
            if path.read_bytes() != content:
                path.write_bytes(content)
                overwritten.append(path)
    if overwritten:
        raise InstallError(f"file_template gives the new revision the name of an existing one, put %%(rev)s into it: {overwritten[0]}")


def _generate(config: Config, script: ScriptDirectory, parent: str | None, operations: Operations) -> Script:
    written = script.generate_revision(
        rev_id(),
        MESSAGE,
        head=parent,
        config=config,  # the template for several databases asks for it
        upgrades=operations.upgrade,
        downgrades=operations.downgrade,
        imports="\n".join(operations.imports),
    )
    if written is None:
        raise InstallError("file_template gives the new revision a name under which Alembic does not find it")
    return written


def _check_written(tables: Tables, operations: Operations, written: Script) -> None:
    """
    Take the file back unless the project's template has put the operations and their imports into it.
    """
    path = Path(written.path)
    names = ["op", "sa", *(line.split()[-1] for line in operations.imports)]
    missing = [name for name in names if not hasattr(written.module, name)]
    if _creates(tables.jobs, path) and not missing:
        return
    path.unlink()
    if missing:
        raise InstallError(f"the project's script.py.mako imports no {', '.join(missing)}: it needs what `alembic init` puts there")
    raise InstallError(
        "the project's script.py.mako does not use ${upgrades}, as with several databases: write the revision by hand from --sql"
    )


# Directly


def tables_exist(bind: sa.Engine | sa.Connection, tables: Tables) -> bool:
    """
    Whether all of the tables are there.
    """
    return not _missing(bind, tables)


def create_tables(engine: sa.Engine, tables: Tables) -> list[str]:
    """
    Create the tables that are missing, and return their names.
    """
    with engine.begin() as connection:
        missing = _missing(connection, tables)
        for table in missing:
            table.create(connection, checkfirst=False)
    return [table.fullname for table in missing]


def _missing(bind: sa.Engine | sa.Connection, tables: Tables) -> list[sa.Table]:
    inspector = sa.inspect(bind)
    return [table for table in tables.all if not inspector.has_table(table.name, schema=table.schema)]
