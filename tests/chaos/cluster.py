"""
What can be done to the servers of a storm: nothing, a restart, or the loss of one node of a cluster.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.servers import Instance

GALERA = Path(__file__).parents[2] / ".ci/galera"


class Strike(Protocol):
    """
    Something that is done to the servers; returns when they are all back, and says what it was.
    """

    def __call__(self, dice: random.Random) -> str: ...


@dataclass(frozen=True, slots=True)
class Arena:
    """
    Where a storm takes place.
    """

    name: str
    urls: Sequence[str]
    strike: Strike | None = None
    strikes_after: tuple[float, float] = (5.0, 12.0)
    """Seconds from one strike to the next, at least and at most."""
    one_clock: bool = True
    steady_commits: bool = True
    before_reading: Sequence[str] = field(default_factory=tuple)
    """Statements after which a connection sees everything that was committed anywhere."""


def restarts_of(instance: Instance) -> Strike:
    """
    Restart a private server: half of the time as a crash, half of the time in an orderly way.
    """

    def strike(dice: random.Random) -> str:
        crash, pause = dice.random() < 0.5, dice.uniform(0, 1.5)
        instance.kill() if crash else instance.stop()
        time.sleep(pause)
        instance.start()
        return "server crash" if crash else "server restart"

    return strike


@contextmanager
def galera() -> Iterator[Arena]:
    """
    A cluster of three nodes, of which the third is lost and comes back, again and again.
    """
    urls = _galera("up").split()
    try:
        yield Arena(
            name="galera",
            urls=urls,
            strike=_lose_node,
            strikes_after=(15.0, 25.0),
            steady_commits=False,
            before_reading=("SET SESSION wsrep_sync_wait = 15",),
        )
    finally:
        _galera("down")


def _lose_node(dice: random.Random) -> str:
    _galera("kill", "3")
    time.sleep(dice.uniform(2, 8))  # the others go on without it after about five seconds
    _galera("start", "3")
    return "node crash"


def _galera(*words: str) -> str:
    # Into a file: the servers inherit it, and a pipe would not end before they do.
    done = subprocess.run([GALERA, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f".ci/galera {' '.join(words)} failed")
    return done.stdout
