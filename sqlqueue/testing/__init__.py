"""
For tests of an application: what it pushed, running it here and now, time that moves on, workers that die.

`Queue.fake`, `Queue.inline` and `Queue.drain` lead here; `Clock` and `worker_dies` are imported from here. The plugin for
pytest, `sqlqueue.testing.plugin`, is found by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clock import Clock
    from .deaths import Death, worker_dies
    from .draining import Drained, drain, drain_async
    from .inlining import InlineRuns, inline
    from .pushes import Pushes, fake
    from .records import Arguments, JobRun, PushedJob

__all__ = [
    "Arguments",
    "Clock",
    "Death",
    "Drained",
    "InlineRuns",
    "JobRun",
    "PushedJob",
    "Pushes",
    "drain",
    "drain_async",
    "fake",
    "inline",
    "worker_dies",
]

# Looked up when it is first used: every start of pytest loads the plugin, and with it this package.
_HOMES = {
    "clock": ("Clock",),
    "deaths": ("Death", "worker_dies"),
    "draining": ("Drained", "drain", "drain_async"),
    "inlining": ("InlineRuns", "inline"),
    "pushes": ("Pushes", "fake"),
    "records": ("Arguments", "JobRun", "PushedJob"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
