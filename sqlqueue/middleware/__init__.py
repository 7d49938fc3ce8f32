"""
What stands around handlers: `@queue.job(middleware=[…])` for one job, `Queue(middleware=[…])` for all, the queue's outside.

A middleware is a callable `(context, call_next)`. `call_next()` runs the rest, once, and returns what the handler returned, or raises
what it raised; an outcome that the handler returned (`Release`, `Fail`, `Discard`) is raised, too. What the middleware itself raises, or
such an outcome that it returns, counts as if the handler had. Around a transactional handler it stands outside of the transaction: when
`call_next()` has returned, the job's completion is committed, and nothing changes it any more.

```python
def timed(context, call_next):
    began = time.monotonic()
    try:
        return call_next()
    finally:
        print(context.name, time.monotonic() - began)
```

Those that are built in keep what all workers have to know in the table of keys, in transactions of their own and by the database's
clock. A key is a text, or a function of the context that returns one (`lambda context: f"account:{context.arguments['account']}"`),
and means the same to all jobs that name it; without one every job has its own. To be held up costs a job no attempt.
"""

from __future__ import annotations

from .._job import CallNext, Middleware
from .breakers import FailOn, SkipIf, ThrottlesExceptions
from .overlaps import WithoutOverlapping
from .rates import RateLimited

__all__ = ["CallNext", "FailOn", "Middleware", "RateLimited", "SkipIf", "ThrottlesExceptions", "WithoutOverlapping"]
