"""
The jobs of a queue: what is registered, how options resolve.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._backoff import Backoff
from .._job import Job
from .._options import DEFAULT_BACKOFF, CodeOptions, RowOptions, check_job_name
from ..errors import RegistrationError, UnknownJob

__all__ = ["Registry"]


class Registry:
    """
    Jobs by name, and the routes that override what their decorators say.
    """

    def __init__(self, imports: Iterable[str]) -> None:
        self._imports = tuple(imports)
        self._jobs: dict[str, Job[..., Any]] = {}
        self._routes: dict[str, tuple[RowOptions, CodeOptions]] = {}
        self.routing: object = object()
        """Another one after every route: resolved options may be remembered as long as it is the same."""

    def add(self, job: Job[..., Any]) -> None:
        """
        Raises:
            RegistrationError: another function has the name.
        """
        known = self._jobs.get(job.name)
        if known is not None and _place(known.function) != _place(job.function):
            raise RegistrationError(f"two jobs are named {job.name}: {_place(known.function)} and {_place(job.function)}")
        self._jobs[job.name] = job

    def find(self, name: str) -> Job[..., Any]:
        """
        Raises:
            UnknownJob: nobody registered the name in this process.
        """
        try:
            return self._jobs[name]
        except KeyError:
            raise UnknownJob(f"no job named {name} is registered in this process") from None

    def route(self, name: str, row: RowOptions, code: CodeOptions) -> None:
        """
        Set these options over the decorator's; options of an earlier route that are not named stay.
        """
        old_row, old_code = self._routes.get(check_job_name(name), (RowOptions(), CodeOptions()))
        self._routes[name] = (row.over(old_row), code.over(old_code))
        self.routing = object()

    def row_options(self, name: str, given: RowOptions, decorated: RowOptions) -> RowOptions:
        """
        The call site beats the route, the route beats the decorator.
        """
        route = self._routes.get(name)
        return given.over(decorated if route is None else route[0].over(decorated))

    def backoff(self, name: str) -> Backoff:
        """
        Today's policy for a job, known or not.
        """
        job = self._jobs.get(name)
        _, routed = self._routes.get(name, (None, CodeOptions()))
        code = routed.over(job.code) if job is not None else routed
        return code.backoff or DEFAULT_BACKOFF

    def not_repeated(self) -> frozenset[str]:
        """
        The names of the jobs that have failed when their worker dies.
        """
        chosen = {name: job.code.on_worker_lost for name, job in list(self._jobs.items())}
        chosen |= {name: code.on_worker_lost for name, (_, code) in list(self._routes.items()) if code.on_worker_lost is not None}
        return frozenset(name for name, choice in chosen.items() if choice == "fail")

    def load(self, modules: Iterable[str] = ()) -> None:
        """
        Import the modules that register jobs, and resolve every job's annotations.

        Raises:
            RegistrationError: an annotation cannot be resolved.
            ImportError: and whatever else an import raises.
        """
        for module in (*self._imports, *modules):
            importlib.import_module(module)
        for job in list(self._jobs.values()):
            job.signature.resolve()

    def queues(self, default: str) -> Mapping[str, list[str]]:
        """
        The queues that registered jobs go to, and the names of those jobs.
        """
        found: dict[str, list[str]] = {}
        for name, job in list(self._jobs.items()):
            found.setdefault(self.row_options(name, RowOptions(), job.decorated).queue or default, []).append(name)
        return found


def _place(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
