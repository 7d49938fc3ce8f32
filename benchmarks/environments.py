"""
A virtual environment for each peer: what it needs must not meet what we need.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parent / ".environments"


@dataclass(frozen=True, slots=True)
class Environment:
    name: str
    requirements: tuple[str, ...]
    least_python: tuple[int, int] = (3, 11)


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("procrastinate", ("procrastinate", "psycopg[binary]")),
        Environment("pgqueuer", ("pgqueuer[asyncpg]", "asyncpg", "uvloop")),
        Environment("oban", ("oban", "psycopg[binary,pool]", "uvloop"), (3, 12)),
        Environment("huey", ("huey",)),
    )
}


class CannotInstall(Exception):
    """
    In one line, why not.
    """


def python_of(name: str) -> Path:
    """
    The interpreter of a peer's environment, which is made if it is not there yet.
    """
    folder = HOME / name
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    environment = ENVIRONMENTS[name]
    run([str(interpreter(environment.least_python)), "-m", "venv", str(folder)])
    run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *environment.requirements])
    (folder / "complete").touch()
    return python


def version_of(name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return run([str(HOME / name / "bin" / "python"), "-c", code]).strip()


def interpreter(least: tuple[int, int]) -> Path:
    """This Python if it is new enough, or another one of this machine."""
    if sys.version_info[:2] >= least:
        return Path(sys.executable)
    minors = range(least[1], 20)
    found = [Path(path) for minor in minors if (path := shutil.which(f"python3.{minor}"))]
    found += [path for minor in minors for path in sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
    for candidate in found:
        code = f"import sys; sys.exit(sys.version_info < {least})"
        if subprocess.run([str(candidate), "-c", code], capture_output=True, check=False).returncode == 0:
            return candidate
    raise CannotInstall(f"needs Python {least[0]}.{least[1]}")


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotInstall((done.stderr.strip() or "no reason given").splitlines()[-1])
    return done.stdout
