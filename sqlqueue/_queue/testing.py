"""
The doors to the testing kit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .producer import Producer

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from ..testing import Drained, InlineRuns, Pushes
    from .sessions import AnyAsyncSession, AnySession

__all__ = ["Testing"]


class Testing(Producer):
    """
    What the tests of an application do with its queue. Nothing of the kit is loaded before one of these is called.
    """

    def fake(self) -> AbstractContextManager[Pushes]:
        """
        Record the pushes of all threads inside the block, and write nothing.

        Everything is checked as by a real push: arguments, options, sizes. What the code under test pushes on is not looked
        at; a mock or None will do. So a push whose transaction is rolled back is recorded, too. A unique key is held until
        the block ends. Of blocks inside each other the innermost records.

        Example:
            ```python
            with queue.fake() as pushed:
                place_order(session, "ann@example.com")
            pushed.assert_pushed_once(send_receipt, lambda a: a.order_id == 1 and a.queue == "mail")
            ```
        """
        found: AbstractContextManager[Pushes] = _kit().fake(self)
        return found

    def inline(self, *, raise_errors: bool = True) -> AbstractContextManager[InlineRuns]:
        """
        Run what is pushed inside the block here and at once, after the commit of the transaction that it was pushed in.

        Arguments travel as JSON as they would to a worker. Nothing is written to the queue's tables: a job runs once,
        whatever its delay, and is not tried again. What was rolled back, to a savepoint too, does not run. The commit is the
        one that the code under test asks for: a Session on a connection that the test never commits counts.

        Args:
            raise_errors: raise at the end of the block what handlers raised. The code under test is not disturbed, as it
                would not be by a worker.

        Example:
            ```python
            with queue.inline() as ran:
                client.post("/orders", …)
            assert [run.status for run in ran] == ["done"]
            ```
        """
        found: AbstractContextManager[InlineRuns] = _kit().inline(self, raise_errors=raise_errors)
        return found

    def drain(
        self,
        on: Engine | AnySession | None = None,
        /,
        *,
        queues: str | Sequence[str] | None = None,
        limit: int | None = None,
        lease: float | timedelta | None = None,
    ) -> Drained:
        """
        Work all that is due, in this thread, one job after another, as a worker would: until nothing is due any more.

        Args:
            on: an Engine; or a Session or Connection of the test's own, in whose transaction everything happens, each step in
                a savepoint, so that it may be rolled back afterwards. The queue's own database if not given.
            queues: a name, or several in order of precedence; all there are, in the order of their names, if not given.
            limit: how many deliveries at most.
            lease: for how long each job is claimed, in seconds or a timedelta; 60 s if not given.

        Raises:
            RuntimeError: no limit was given, and after 10,000 deliveries there is still more.
            LockTimeout: another open transaction holds what has to be written.

        Example:
            ```python
            drained = queue.drain(session)
            assert drained.counts == {"done": 2, "retrying": 1}
            ```
        """
        found: Drained = _kit().drain(self, on, queues=queues, limit=limit, lease=lease)
        return found

    async def drain_async(
        self,
        on: AsyncEngine | AnyAsyncSession,
        /,
        *,
        queues: str | Sequence[str] | None = None,
        limit: int | None = None,
        lease: float | timedelta | None = None,
    ) -> Drained:
        """
        `drain` for an AsyncEngine, AsyncSession or AsyncConnection. The handlers run in the thread of the event loop.
        """
        found: Drained = await _kit().drain_async(self, on, queues=queues, limit=limit, lease=lease)
        return found


def _kit() -> Any:
    # By name, like an application's own modules: the kit stands above the queue, and stays out of programs that do not test.
    return import_module("sqlqueue.testing")
