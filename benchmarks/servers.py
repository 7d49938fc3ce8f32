"""
The servers of the tests, with the disk waited for: every commit of a figure that is quoted has reached it.
"""

from __future__ import annotations

from pathlib import Path

from tests.servers import INSTANCES, MariaDB, MySQL, PostgreSQL, Server, Servers, find_program

__all__ = ["BenchServers", "Server"]

# What is kept small for tests would be read from disk all the time with a million rows.
BUFFER = 512


class DurablePostgreSQL(PostgreSQL):
    def command(self) -> list[str]:
        durable = [word.replace("fsync=off", "fsync=on") for word in super().command()]
        return [*durable, "-c", f"shared_buffers={BUFFER}MB", "-c", "max_wal_size=4GB"]


class DurableMySQL(MySQL):
    def beginning(self, program: str) -> list[str]:
        lazy = ("--loose-innodb-flush-method", "--innodb-flush-log-at-trx-commit")
        return [*(word for word in super().beginning(program) if not word.startswith(lazy)), "--innodb-flush-log-at-trx-commit=1"]

    def command(self) -> list[str]:
        return [*super().command(), f"--innodb-buffer-pool-size={BUFFER}M"]


class DurableMariaDB(DurableMySQL, MariaDB):
    name = "mariadb"


DURABLE = {"postgresql": DurablePostgreSQL, "mysql": DurableMySQL, "mariadb": DurableMariaDB}


class BenchServers(Servers):
    """
    Private instances, and whatever a SQLQUEUE_TEST_*_URL leads to as it is.
    """

    durable = True

    def _open(self, name: str) -> Server:
        program = None if name == "sqlite" or self._url(name) else find_program(name)
        if program is None:
            return super()._open(name)
        kind = (DURABLE if self.durable else INSTANCES)[name]
        instance = kind(program, self.folder / name, self.guardian.watch)
        instance.start()
        return Server(name, instance.url, instance)

    def discard(self, name: str) -> None:
        self.futures.pop(name).result().close()

    def file(self, name: str) -> Path:
        folder = self.folder / "files"
        folder.mkdir(exist_ok=True)
        return folder / name
