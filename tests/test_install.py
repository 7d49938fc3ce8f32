from __future__ import annotations

import configparser
import inspect
import io
import py_compile
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from sqlqueue._dialects import OFFLINE_URLS
from sqlqueue._tables import POSTGRESQL_STORAGE, Tables, build_tables
from sqlqueue.errors import OptionError
from sqlqueue.install import AlreadyInstalled, InstallError, create_tables, render_ddl, render_operations, tables_exist, write_revision
from tests.servers import Database

ENV = """
import sqlalchemy as sa
from alembic import context

options = {"compare_type": True, "compare_server_default": True, **context.config.attributes["options"]}
url = context.config.attributes["url"]
if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
"""

PREFIXES = ["order", "work queue", "Select", "a-b_", ""]
USERS = sa.MetaData()
ORDERS = sa.Table("orders", USERS, sa.Column("id", sa.Integer, primary_key=True), sa.Column("total", sa.Integer, nullable=False))


def tables_of(prefix: str = "sqlqueue_", schema: str | None = None) -> Tables:
    return build_tables(sa.MetaData(), prefix=prefix, schema=schema)


class Project:
    """A user's Alembic project, whose own metadata stands first among its targets."""

    def __init__(self, directory: Path, *, template: str = "generic") -> None:
        self.directory = directory
        self.ini = directory / "alembic.ini"
        self.scripts = directory / "migrations"
        self.versions = self.scripts / "versions"
        directory.mkdir(exist_ok=True)
        command.init(self.config(), str(self.scripts), template=template)
        (self.scripts / "env.py").write_text(ENV)

    def config(self, url: str = "sqlite://", *metadata: sa.MetaData, **options: Any) -> Config:
        config = Config(str(self.ini), stdout=io.StringIO(), output_buffer=io.StringIO())
        config.attributes.update(url=url, options={"target_metadata": [USERS, *metadata], **options})
        return config

    def add_orders(self) -> str:
        """The project's first revision of its own."""
        revision = self.add("orders")
        path = next(self.versions.glob(f"{revision}_*.py"))
        upgrade = "op.create_table('orders', sa.Column('id', sa.Integer, primary_key=True), sa.Column('total', sa.Integer, nullable=False))"
        path.write_text(path.read_text().replace("pass", upgrade, 1).replace("pass", "op.drop_table('orders')", 1))
        return revision

    def add(self, message: str, **options: Any) -> str:
        script = command.revision(self.config(), message, **options)
        assert script is not None
        assert not isinstance(script, list)
        return script.revision

    def set_option(self, name: str, value: str | None) -> None:
        parser = configparser.RawConfigParser()
        parser.read(self.ini)
        if value is None:
            parser.remove_option("alembic", name)
        else:
            parser.set("alembic", name, value)
        with self.ini.open("w") as file:
            parser.write(file)

    def edit_template(self, old: str, new: str) -> None:
        template = self.scripts / "script.py.mako"
        assert old in template.read_text()
        template.write_text(template.read_text().replace(old, new))

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.versions.glob("*.py")}

    def parents(self) -> dict[str, object]:
        return {script.revision: script.down_revision for script in ScriptDirectory.from_config(self.config()).walk_revisions()}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "shop")


@pytest.fixture
def tables() -> Tables:
    return tables_of()


def connect(url: str) -> sa.Engine:
    return sa.create_engine(url, poolclass=sa.NullPool)


def table_names(url: str, schema: str | None = None) -> set[str]:
    return set(sa.inspect(connect(url)).get_table_names(schema=schema))


def describe(url: str) -> list[str]:
    """What the database itself says about its tables, Alembic's own aside."""
    with connect(url).connect() as connection:
        match connection.dialect.name:
            case "sqlite":
                query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND tbl_name <> 'alembic_version'"
                rows = [str(sql) for sql in connection.scalars(sa.text(query))]
            case "postgresql":
                rows = [
                    str(tuple(row))
                    for query in (
                        "SELECT table_name, ordinal_position, column_name, data_type, character_maximum_length, is_nullable, column_default"
                        " FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version'",
                        "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename <> 'alembic_version'",
                        "SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL AND relkind = 'r'",
                    )
                    for row in connection.execute(sa.text(query))
                ]
            case _:
                names = sa.inspect(connection).get_table_names()
                rows = [
                    f"{name}: {line.removesuffix(',')}"  # indexes come in the order in which they were made
                    for name in names
                    if name != "alembic_version"
                    for line in connection.execute(sa.text(f"SHOW CREATE TABLE `{name}`")).one()[1].splitlines()
                ]
    return sorted(" ".join(row.split()).replace(" )", ")") for row in rows)


def run_script(url: str, script: str) -> None:
    with connect(url).begin() as connection:
        for statement in script.split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)


def difference(url: str, tables: Tables) -> list[Any]:
    with connect(url).connect() as connection:
        options: dict[str, Any] = {"compare_type": True, "compare_server_default": True, "include_schemas": tables.jobs.schema is not None}
        # Within its own schema only: SQLAlchemy would also compare the database's other schemas.
        options["include_name"] = lambda name, kind, _: kind != "schema" or name == tables.jobs.schema
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, tables.metadata))


# The DDL


@pytest.mark.parametrize("prefix", ["sqlqueue_", *PREFIXES])
def test_the_printed_ddl_makes_what_the_tables_are(fresh_database: Database, prefix: str) -> None:
    tables = tables_of(prefix)
    run_script(fresh_database.url, render_ddl(tables, fresh_database.name))
    assert tables_exist(connect(fresh_database.url), tables)
    assert difference(fresh_database.url, tables) == []


def test_the_printed_ddl_makes_what_create_all_makes(fresh_database: Database, tables: Tables) -> None:
    run_script(fresh_database.url, render_ddl(tables, fresh_database.name))
    printed = describe(fresh_database.url)
    tables.metadata.drop_all(connect(fresh_database.url))
    tables.metadata.create_all(connect(fresh_database.url))
    assert describe(fresh_database.url) == printed != []


def test_ddl_of_an_unknown_database_is_refused_with_the_four_names(tables: Tables) -> None:
    with pytest.raises(OptionError, match="one of postgresql, mysql, mariadb, sqlite, not 'oracle'"):
        render_ddl(tables, "oracle")


def test_only_postgresql_gets_the_storage_settings(tables: Tables) -> None:
    having = [name for name in OFFLINE_URLS if POSTGRESQL_STORAGE in render_ddl(tables, name)]
    assert having == ["postgresql"]


def test_ddl_needs_no_driver() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(["psycopg", "pymysql"]))
import sqlalchemy as sa
from sqlqueue._tables import build_tables
from sqlqueue.install import OFFLINE_URLS, render_ddl
print(sum("CREATE TABLE" in render_ddl(build_tables(sa.MetaData()), name) for name in OFFLINE_URLS))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("4\n", "")


# The revision


def test_an_empty_project_gets_its_first_revision(project: Project, tables: Tables) -> None:
    path = write_revision(tables, project.directory)
    assert path.parent == project.versions
    assert list(project.parents().values()) == [None]


def test_the_revision_comes_after_the_one_head(project: Project, tables: Tables) -> None:
    orders = project.add_orders()
    before = project.files()
    path = write_revision(tables, project.directory)
    added = set(project.parents()) - {orders}
    assert project.parents() == {orders: None, added.pop(): orders}
    assert project.files() == before | {path.name: path.read_bytes()}


def test_several_heads_ask_for_a_choice_and_write_nothing(project: Project, tables: Tables) -> None:
    heads = [project.add("one"), project.add("two", head="base", splice=True)]
    before = project.files()
    with pytest.raises(InstallError, match=r"2 heads: .*; choose one with --head") as caught:
        write_revision(tables, project.directory)
    assert all(head in str(caught.value) for head in heads)
    assert project.files() == before


def test_the_chosen_head_is_taken(project: Project, tables: Tables) -> None:
    first, second = project.add("one"), project.add("two", head="base", splice=True)
    write_revision(tables, project.directory, head=second[:6])
    assert sorted(map(str, project.parents().values())) == sorted(["None", "None", second])
    assert first in ScriptDirectory.from_config(project.config()).get_heads()


def test_a_branch_is_chosen_by_its_label(project: Project, tables: Tables) -> None:
    project.add("one")
    labelled = project.add("two", head="base", splice=True, branch_label="shop")
    write_revision(tables, project.directory, head="shop@head")
    assert labelled in project.parents().values()


@pytest.mark.parametrize("head", ["nowhere", "heads", "base", "", "old"])
def test_what_is_not_one_head_is_refused(project: Project, tables: Tables, head: str) -> None:
    old = project.add("one")
    heads = [project.add("two"), project.add("three", head="base", splice=True)]
    before = project.files()
    with pytest.raises(OptionError, match="is not a head of the project; choose from: ") as caught:
        write_revision(tables, project.directory, head=old if head == "old" else head)
    assert all(head in str(caught.value) for head in heads)
    assert project.files() == before


def test_a_head_for_an_empty_project_is_refused(project: Project, tables: Tables) -> None:
    with pytest.raises(OptionError, match="it has no revision yet, leave --head out"):
        write_revision(tables, project.directory, head="abc")
    assert project.files() == {}


def test_a_second_run_says_so_and_writes_nothing(project: Project, tables: Tables) -> None:
    project.add("one")
    path = write_revision(tables, project.directory)
    project.add("after")
    project.add("aside", head="base", splice=True)
    before = project.files()
    with pytest.raises(AlreadyInstalled, match="creates sqlqueue_jobs already, nothing written: ") as caught:
        write_revision(tables, project.directory)
    assert caught.value.path == path
    assert project.files() == before


def test_a_reformatted_revision_is_still_found(project: Project, tables: Tables) -> None:
    path = write_revision(tables, project.directory)
    path.write_text(path.read_text().replace("op.create_table('sqlqueue_jobs'", 'op.create_table(\n    "sqlqueue_jobs"'))
    with pytest.raises(AlreadyInstalled):
        write_revision(tables, project.directory)


def test_another_prefix_or_schema_is_another_queue(project: Project, tables: Tables) -> None:
    for other in (tables, tables_of("second_"), tables_of(schema="jobs"), tables_of(schema="more")):
        write_revision(other, project.directory)
    assert len(project.files()) == 4
    for other in (tables, tables_of("second_"), tables_of(schema="jobs"), tables_of(schema="more")):
        with pytest.raises(AlreadyInstalled):
            write_revision(other, project.directory)


@pytest.mark.parametrize("schema", [None, "Select"])
@pytest.mark.parametrize("prefix", ["sqlqueue_", *PREFIXES])
def test_the_file_compiles_and_stands_alone(project: Project, prefix: str, schema: str | None) -> None:
    path = write_revision(tables_of(prefix, schema), project.directory)
    py_compile.compile(str(path), doraise=True)
    imports = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert "from sqlalchemy.dialects import mysql" in imports
    assert not any("sqlqueue" in line for line in imports)


def test_a_users_naming_convention_is_in_the_revision() -> None:
    tables = build_tables(sa.MetaData(naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_name)s"}))
    operations = render_operations(tables)
    assert "sa.PrimaryKeyConstraint('id', name=op.f('pk_sqlqueue_jobs'))" in operations.upgrade
    assert "op.create_index('sqlqueue_jobs_ready', " in operations.upgrade


def test_the_projects_own_template_and_file_names_are_used(project: Project, tables: Tables) -> None:
    project.set_option("file_template", "%%(year)d-%%(slug)s_%%(rev)s")
    project.edit_template("def upgrade()", "# by the book\ndef upgrade()")
    path = write_revision(tables, project.directory)
    assert path.name[4:].startswith("-create_sqlqueue_tables_")
    assert "# by the book" in path.read_text()


def test_a_file_is_never_overwritten(project: Project, tables: Tables) -> None:
    project.set_option("file_template", "%%(slug)s")
    write_revision(tables, project.directory)
    before = project.files()
    with pytest.raises(InstallError, match=r"the name of an existing one, put %%\(rev\)s into it: .*create_sqlqueue_tables\.py"):
        write_revision(tables_of("second_"), project.directory)
    assert project.files() == before


def test_a_template_without_the_operations_is_refused(tmp_path: Path, tables: Tables) -> None:
    project = Project(tmp_path / "shop", template="multidb")
    with pytest.raises(InstallError, match=r"does not use \$\{upgrades\}"):
        write_revision(tables, project.directory)
    assert project.files() == {}


def test_a_template_without_the_imports_is_refused(project: Project, tables: Tables) -> None:
    project.edit_template('${imports if imports else ""}', "")
    with pytest.raises(InstallError, match=r"script\.py\.mako imports no mysql: "):
        write_revision(tables, project.directory)
    assert project.files() == {}


def test_a_directory_without_alembic_says_what_else_can_be_done(tmp_path: Path, tables: Tables) -> None:
    with pytest.raises(InstallError, match=r"no alembic\.ini in .*--dir.*`alembic init`.*--sql.*--apply"):
        write_revision(tables, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, tables: Tables) -> None:
    with pytest.raises(InstallError, match=r"no such directory: .*nowhere"):
        write_revision(tables, tmp_path / "nowhere")


def test_broken_projects_get_one_line(project: Project, tables: Tables) -> None:
    broken = project.versions / "broken.py"
    for code, reason in (("import nowhere_to_be_found", "ModuleNotFoundError"), ("revision = (", "SyntaxError")):
        broken.write_text(code)
        with pytest.raises(InstallError, match=f"Alembic cannot use this project: {reason}") as caught:
            write_revision(tables, project.directory)
        assert "\n" not in str(caught.value)
    broken.unlink()
    project.set_option("script_location", "elsewhere")
    with pytest.raises(InstallError, match="Path doesn't exist"):
        write_revision(tables, project.directory)


def test_relative_paths_mean_the_project_whatever_the_current_directory(project: Project, tables: Tables) -> None:
    project.set_option("script_location", "migrations")
    project.set_option("prepend_sys_path", ".")
    before = Path.cwd(), sys.path.copy()
    path = write_revision(tables, project.directory)
    assert path.parent == project.versions
    assert (Path.cwd(), sys.path) == before


def test_the_directory_may_be_relative(project: Project, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.directory.parent)
    assert write_revision(tables, Path("shop")).parent == project.versions


def test_an_ini_inside_the_script_directory_is_understood(project: Project, tables: Tables) -> None:
    project.set_option("script_location", None)
    project.ini.rename(project.scripts / "alembic.ini")
    assert write_revision(tables, project.scripts).parent == project.versions


@pytest.mark.skipif("toml_file" not in inspect.signature(Config).parameters, reason="this Alembic does not read pyproject.toml")
def test_a_project_configured_in_pyproject_is_found(project: Project, tables: Tables) -> None:
    project.ini.unlink()
    (project.directory / "pyproject.toml").write_text('[tool.alembic]\nscript_location = "%(here)s/migrations"\n')
    assert write_revision(tables, project.directory).parent == project.versions


def test_a_pyproject_without_alembic_is_no_project(tmp_path: Path, tables: Tables) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    with pytest.raises(InstallError, match=r"no alembic\.ini"):
        write_revision(tables, tmp_path)


def test_nothing_is_printed(project: Project, tables: Tables, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    write_revision(tables, project.directory)
    assert capfd.readouterr() == ("", "")


# The revision at work


def check_life_of_a_revision(project: Project, url: str, tables: Tables, **options: Any) -> list[str]:
    """Install, upgrade, check, downgrade; returns what the database said in between."""
    schema = tables.jobs.schema
    names = {table.name for table in tables.all}
    project.add_orders()
    write_revision(tables, project.directory)
    config = project.config(url, tables.metadata, **options)
    command.upgrade(config, "head")
    assert table_names(url, schema) >= names
    command.check(config)
    made = describe(url)
    command.downgrade(config, "base")
    assert table_names(url) | table_names(url, schema) == {"alembic_version"}
    return made


def test_upgrade_makes_what_create_all_makes_and_downgrade_removes_it(fresh_database: Database, project: Project, tables: Tables) -> None:
    url = fresh_database.url
    made = check_life_of_a_revision(project, url, tables)
    USERS.create_all(connect(url))
    tables.metadata.create_all(connect(url))
    assert describe(url) == made


@pytest.mark.databases("mariadb")
def test_the_same_under_the_dialect_called_mariadb(fresh_database: Database, project: Project, tables: Tables) -> None:
    made = check_life_of_a_revision(project, fresh_database.mariadb_url, tables)
    USERS.create_all(connect(fresh_database.url))
    tables.metadata.create_all(connect(fresh_database.url))
    assert describe(fresh_database.url) == made


@pytest.mark.parametrize("prefix", PREFIXES)
def test_odd_prefixes_live_as_well(fresh_database: Database, project: Project, prefix: str) -> None:
    check_life_of_a_revision(project, fresh_database.url, tables_of(prefix))


@pytest.mark.databases("postgresql")
@pytest.mark.parametrize("prefix", ["sqlqueue_", "Select"])
def test_a_schema_of_any_name_works(fresh_database: Database, project: Project, prefix: str) -> None:
    tables = tables_of(prefix, "Select")
    with connect(fresh_database.url).begin() as connection:
        connection.execute(sa.schema.CreateSchema("Select"))
    check_life_of_a_revision(project, fresh_database.url, tables, include_schemas=True)
    run_script(fresh_database.url, render_ddl(tables, fresh_database.name))
    assert difference(fresh_database.url, tables) == []


def test_check_finds_no_difference_with_one_metadata_for_both(fresh_database: Database, project: Project) -> None:
    shared = sa.MetaData()
    tables = build_tables(shared)
    write_revision(tables, project.directory)
    config = project.config(fresh_database.url)
    config.attributes["options"] = {"target_metadata": shared}
    command.upgrade(config, "head")
    command.check(config)


def statements_in(script: str) -> list[tuple[str, list[str]]]:
    """The statements of a script in order of their text, each with its table options sorted."""
    bare = re.sub(r"\s+", " ", re.sub(r"(?m)^--.*$", "", script)).replace(" )", ")").replace("COLLATE utf8mb4", "COLLATE=utf8mb4")
    parts = (part.strip().rpartition(")") for part in bare.split(";"))
    return sorted((definition, sorted(options.split())) for definition, _, options in parts if definition)


@pytest.mark.parametrize("name", OFFLINE_URLS)
def test_the_offline_upgrade_is_the_printed_ddl(project: Project, tables: Tables, name: str) -> None:
    write_revision(tables, project.directory)
    config = project.config(OFFLINE_URLS[name])
    command.upgrade(config, "head", sql=True)
    assert isinstance(config.output_buffer, io.StringIO)
    printed = statements_in(render_ddl(tables, name))
    assert [statement for statement in statements_in(config.output_buffer.getvalue()) if "sqlqueue_" in statement[0]] == printed


# Directly


def test_apply_creates_the_tables_once(fresh_database: Database, tables: Tables) -> None:
    engine = connect(fresh_database.url)
    assert not tables_exist(engine, tables)
    assert create_tables(engine, tables) == [table.name for table in tables.all]
    assert tables_exist(engine, tables)
    assert create_tables(engine, tables) == []
    assert difference(fresh_database.url, tables) == []


def test_apply_creates_only_what_is_missing(fresh_database: Database, tables: Tables) -> None:
    engine = connect(fresh_database.url)
    create_tables(engine, tables)
    tables.keys.drop(engine)
    assert not tables_exist(engine, tables)
    assert create_tables(engine, tables) == ["sqlqueue_keys"]
    with engine.connect() as connection:
        assert tables_exist(connection, tables)
