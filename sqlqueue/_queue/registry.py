"""
The jobs of a queue: what is registered, how options resolve.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._backoff import Backoff
from .._job import Job
from .._options import DEFAULT_BACKOFF, NO_CODE_OPTIONS, CodeOptions, RowOptions, check_job_name
from ..errors import RegistrationError, UnknownJob

__all__ = ["Registry"]


class Registry:
    """
    Jobs by name, and the routes that override what their decorators say.
    """

    def __init__(self, imports: Iterable[str], *, wraps_all: bool = False) -> None:
        self._imports = tuple(imports)
        self._wraps_all = wraps_all
        """The queue's middleware is around every handler."""
        self._guard = threading.Lock()
        self._imported = False
        self._checks: list[Callable[[], None]] = []
        self._jobs: dict[str, Job[..., Any]] = {}
        self._routes: dict[str, tuple[RowOptions, CodeOptions]] = {}
        self._renamed: dict[str, str] = {}
        """The names that jobs have had, and the ones they have now."""
        self._code: dict[str, CodeOptions] = {}
        """What has been resolved since the last job or route."""
        self.routing: object = object()
        """Another one after every route: resolved options may be remembered as long as it is the same."""

    def add(self, job: Job[..., Any]) -> None:
        """
        Raises:
            RegistrationError: another function has the name, an alias is another job's, or middleware cannot be around it.
        """
        with self._guard:
            known = self._jobs.get(job.name)
            if known is not None and _place(known.function) != _place(job.function):
                raise RegistrationError(f"two jobs are named {job.name}: {_place(known.function)} and {_place(job.function)}")
            self._change({**self._jobs, job.name: job}, self._routes)

    def find(self, name: str) -> Job[..., Any]:
        """
        The job of this name, or the one that has had it.

        Raises:
            UnknownJob: nobody registered the name in this process.
        """
        try:
            return self._jobs[name]
        except KeyError:
            pass
        try:
            return self._jobs[self._renamed[name]]
        except KeyError:
            raise UnknownJob(f"no job named {name} is registered in this process") from None

    def is_async(self, name: str) -> bool:
        """
        Whether the handler is a coroutine function. False where there is none.
        """
        job = self._jobs.get(name) or self._jobs.get(self._renamed.get(name, ""))
        return job is not None and job.signature.is_async

    def route(self, name: str, row: RowOptions, code: CodeOptions) -> None:
        """
        Set these options over the decorator's; options of an earlier route that are not named stay.

        Raises:
            RegistrationError: an alias is another job's, or middleware cannot be around it.
        """
        check_job_name(name)
        with self._guard:
            old_row, old_code = self._routes.get(name, (RowOptions(), NO_CODE_OPTIONS))
            self._change(self._jobs, {**self._routes, name: (row.over(old_row), code.over(old_code))})
        self.routing = object()

    def _change(self, jobs: dict[str, Job[..., Any]], routes: dict[str, tuple[RowOptions, CodeOptions]]) -> None:
        """
        Take over jobs and routes, unless two jobs would answer to one name, or an async one had middleware.
        """
        renamed: dict[str, str] = {}
        for name, job in jobs.items():
            code = _over(routes.get(name), job.code)
            if job.signature.is_async and (self._wraps_all or code.middleware or code.limit is not None):
                raise RegistrationError(f"{name}: middleware and limit are for plain functions; around async def there is none yet")
            for alias in code.aliases or ():
                owner = alias if alias in jobs else renamed.setdefault(alias, name)
                if owner != name or alias == name:
                    raise RegistrationError(f"{name}: the alias {alias} is the name of {'itself' if owner == name else f'the job {owner}'}")
        self._jobs, self._routes, self._renamed, self._code = jobs, routes, renamed, {}

    def row_options(self, name: str, given: RowOptions, decorated: RowOptions) -> RowOptions:
        """
        The call site beats the route, the route beats the decorator.
        """
        route = self._routes.get(name)
        return given.over(decorated if route is None else route[0].over(decorated))

    def code(self, name: str) -> CodeOptions:
        """
        Today's options of the code of a job, known or not: the route beats the decorator.
        """
        remembered = self._code
        found = remembered.get(name)
        if found is not None:
            return found
        current = self._renamed.get(name, name)
        job = self._jobs.get(current)
        code = _over(self._routes.get(current), NO_CODE_OPTIONS if job is None else job.code)
        if name != current:
            code = _over(self._routes.get(name), code)
        if job is not None:  # of names that nobody knows there may be any number
            remembered[name] = code
        return code

    def backoff(self, name: str) -> Backoff:
        """
        Today's policy for a job, known or not.
        """
        return self.code(name).backoff or DEFAULT_BACKOFF

    def not_repeated(self) -> frozenset[str]:
        """
        The names of the jobs that have failed when their worker dies, those that they have had too.
        """
        names = {*self._jobs, *self._routes, *self._renamed}
        return frozenset(name for name in names if self.code(name).on_worker_lost == "fail")

    def load(self, modules: Iterable[str] = ()) -> None:
        """
        Import the modules that register jobs, and resolve every job's annotations.

        Raises:
            RegistrationError: an annotation cannot be resolved.
            ImportError: and whatever else an import raises.
        """
        self.import_all()
        for module in modules:
            importlib.import_module(module)
        for job in list(self._jobs.values()):
            job.signature.resolve()
        while self._checks:
            self._checks[-1]()
            self._checks.pop()

    def check(self, job: Job[..., Any], check: Callable[[], None]) -> None:
        """
        Check a job's annotations, now or as soon as they are resolved.
        """
        if job.signature.is_resolved:
            check()
        else:
            self._checks.append(check)

    def import_all(self) -> None:
        """
        Import the queue's own modules, unless that has been done.

        Raises:
            ImportError: and whatever else an import raises.
        """
        if not self._imported:
            for module in self._imports:
                importlib.import_module(module)
            self._imported = True

    def queues(self, default: str) -> Mapping[str, list[str]]:
        """
        The queues that registered jobs go to, and the names of those jobs.
        """
        found: dict[str, list[str]] = {}
        for name, job in list(self._jobs.items()):
            found.setdefault(self.row_options(name, RowOptions(), job.decorated).queue or default, []).append(name)
        return found


def _over(route: tuple[RowOptions, CodeOptions] | None, code: CodeOptions) -> CodeOptions:
    return code if route is None else route[1].over(code)


def _place(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
