"""
`failed`: reading the failed table, putting jobs back, forgetting them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from .._driver.failed import FailedJob
from .._queue import Queue
from .application import Target, open_queue, takes_target
from .problems import Misuse, Unable
from .text import cut, first_line_of, format_instant, plural, printable, table, terminal_width

__all__ = ["failed", "failed_lines"]

_HEAD = ("id", "failed at", "queue", "name", "attempts", "reason", "error")
_ID = click.IntRange(1, 2**63 - 1)


@click.group()
def failed() -> None:
    """
    Read, retry and forget failed jobs.
    """


# --- reading


@failed.command("list")
@takes_target
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show at most so many.")
@click.option("--queue", "queue_name", metavar="QUEUE", help="Only jobs of this queue.")
@click.option("--name", metavar="NAME", help="Only jobs of this name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_failed(target: Target, *, limit: int, queue_name: str | None, name: str | None, as_json: bool) -> None:
    """
    List failed jobs, the newest first.
    """
    jobs = open_queue(target).failed.list(queue=queue_name, name=name, limit=limit)
    if as_json:
        click.echo(json.dumps([_as_json(job) for job in jobs], indent=2))
        return
    for line in failed_lines(jobs, terminal_width()):
        click.echo(line)


def failed_lines(jobs: Sequence[FailedJob], width: int | None = None) -> Iterator[str]:
    """
    What `failed list` prints, each line cut to `width` columns.
    """
    if not jobs:
        yield "no failed jobs"
        return
    rows = [
        (job.id, format_instant(job.failed_at), job.queue, job.name, f"{job.attempts} of {job.max_attempts}", job.reason, _error(job))
        for job in jobs
    ]
    for line in table(_HEAD, rows, numbers=[0]):
        yield cut(line, width)


def _error(job: FailedJob) -> str:
    message = first_line_of(job.error_message or "")
    kind = printable(job.error_class or "")
    return f"{kind}: {message}" if kind and message else kind or message


def _as_json(job: FailedJob) -> dict[str, Any]:
    """
    All but the payload, which holds argument values, and the traceback, which `show` prints.
    """
    fields = ("id", "queue", "name", "priority", "attempts", "max_attempts", "reason", "error_class", "error_message", "worker")
    instants = ("failed_at", "created_at", "due_at", "deadline")
    values = {field: getattr(job, field) for field in fields}
    return values | {field: moment and moment.isoformat() for field in instants for moment in [getattr(job, field)]}


@failed.command()
@takes_target
@click.argument("id", type=_ID)
def show(target: Target, *, id: int) -> None:
    """
    Show one failed job with its whole traceback.
    """
    job = open_queue(target).failed.get(id)
    if job is None:
        raise Unable(_missing([id]))
    for line in _details(job):
        click.echo(line)


def _details(job: FailedJob) -> Iterator[str]:
    rows = {
        "id": job.id,
        "name": job.name,
        "queue": job.queue,
        "reason": job.reason,
        "failed at": format_instant(job.failed_at),
        "worker": job.worker or "-",
        "attempts": f"{job.attempts} of {job.max_attempts}",
        "priority": job.priority,
        "pushed at": format_instant(job.created_at),
        "due at": format_instant(job.due_at),
        "deadline": format_instant(job.deadline),
        "unique key": job.unique_key or "-",
        "headers": job.headers or "-",
        "arguments": _arguments(job.payload),
        "error": job.error_class or "-",
    }
    for label, value in rows.items():
        yield f"{label:<12}{printable(str(value))}"
    for text in (job.error_message, job.traceback):
        if text:
            yield ""
            yield printable(text.rstrip(), keep_newlines=True)


def _arguments(payload: str) -> str:
    """
    The names of the arguments and the size of their values, which are not shown.
    """
    size = plural(len(payload.encode("utf-8", "surrogatepass")), "byte")
    try:
        names = list(json.loads(payload))
    except (ValueError, TypeError, RecursionError):
        return f"{size} that are not JSON"
    if not payload.lstrip().startswith("{"):
        return f"{size} that are not a JSON object"
    return f"{', '.join(names) or 'none'} ({size} of JSON)"


# --- putting back and forgetting


@failed.command()
@takes_target
@click.option("--id", "ids", type=_ID, multiple=True, help="This job; repeatable.")
@click.option("--all", "everything", is_flag=True, help="All failed jobs.")
def retry(target: Target, *, ids: Sequence[int], everything: bool) -> None:
    """
    Put failed jobs back on their queues, to start over under their own ids.
    """
    _exactly_one({"--id": bool(ids), "--all": everything})
    queue = open_queue(target)
    if everything:
        count = queue.failed.retry(all=True)
        click.echo(f"{plural(count, 'job')} put back" if count else "no failed jobs, nothing to do")
        return
    missing = [id for id in dict.fromkeys(ids) if not queue.failed.retry(id=id)]
    _say_and_refuse(len(set(ids)) - len(missing), "put back", missing)


@failed.command()
@takes_target
@click.option("--id", "ids", type=_ID, multiple=True, help="This job; repeatable.")
@click.option("--before", metavar="DATE", help="Those that failed before this day (2026-01-31) or instant, in UTC if it names no zone.")
@click.option("--all", "everything", is_flag=True, help="All failed jobs; asks first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def forget(target: Target, *, ids: Sequence[int], before: str | None, everything: bool, yes: bool) -> None:
    """
    Delete failed jobs.
    """
    _exactly_one({"--id": bool(ids), "--before": before is not None, "--all": everything})
    moment = None if before is None else _instant(before)
    queue = open_queue(target)
    if ids:
        missing = [id for id in dict.fromkeys(ids) if not queue.failed.forget(id=id)]
        _say_and_refuse(len(set(ids)) - len(missing), "forgotten", missing)
        return
    if everything and not yes and not _confirmed(queue):
        return
    count = queue.failed.forget(all=True) if everything else queue.failed.forget(before=moment)
    click.echo(f"{plural(count, 'job')} forgotten" if count else "no failed jobs, nothing to do")


def _exactly_one(given: dict[str, bool]) -> None:
    if sum(given.values()) != 1:
        *others, last = given
        raise Misuse(f"give exactly one of {', '.join(others)} and {last}")


def _instant(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Misuse(f"--before: {text!r} is neither a day as in 2026-01-31 nor an instant as in 2026-01-31T12:00:00+01:00") from None
    return moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)


def _confirmed(queue: Queue) -> bool:
    count = queue.failed.count()
    if not count:
        click.echo("no failed jobs, nothing to do")
        return False
    try:
        sure = click.confirm(f"Forget {plural(count, 'failed job')} for good?", err=True)
    except click.Abort:
        raise Unable("nobody answered, nothing was forgotten: add --yes") from None
    if not sure:
        raise Unable("nothing was forgotten")
    return True


def _say_and_refuse(count: int, done: str, missing: Sequence[int]) -> None:
    if count or not missing:
        click.echo(f"{plural(count, 'job')} {done}")
    if missing:
        raise Unable(_missing(missing))


def _missing(ids: Iterable[int]) -> str:
    numbers = [str(id) for id in ids]
    return f"there is no failed job {', '.join(numbers)}"
