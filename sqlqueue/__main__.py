"""
`sqlqueue`, and `python -m sqlqueue`.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """
    Load the program and run it.
    """
    # The first process of a container does not even hear a signal that it has no handler for, and loading takes a while.
    default = signal.signal(signal.SIGTERM, _leave)
    from .cli import main as program

    signal.signal(signal.SIGTERM, default)
    program()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0 if "work" in sys.argv[1:] else 128 + number)  # a worker that is asked to stop before it began has stopped


if __name__ == "__main__":
    main()
