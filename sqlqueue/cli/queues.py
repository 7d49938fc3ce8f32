"""
`status` and `clear`: how full the queues are, and emptying them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click
import sqlalchemy as sa

from .._dialects import now
from .._driver.reports import QueueStats
from .._queue import Queue, check_queues
from .application import Target, open_queue, takes_target
from .problems import Misuse
from .text import format_age, plural, table

__all__ = ["clear", "status", "status_lines"]

COUNTED_TO = 10_000
_HEAD = ("queue", "pending", "delayed", "reserved", "total", "oldest due")


@click.command()
@takes_target
@click.option("--exact", is_flag=True, help=f"Count everything; otherwise counting stops at {COUNTED_TO:,}.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(target: Target, *, exact: bool, as_json: bool) -> None:
    """
    Show how many jobs each queue holds, and how many have failed.
    """
    queue = open_queue(target)
    limit = None if exact else COUNTED_TO
    if as_json:
        click.echo(json.dumps(_report(queue, limit), indent=2))
        return
    for line in status_lines(queue, limit):
        click.echo(line)


def status_lines(queue: Queue, limit: int | None = None) -> Iterator[str]:
    """
    What `status` prints.
    """
    stats, moment, failed = _look(queue, limit)
    if stats:
        rows = [(row.queue, *(_number(count, limit) for count in _counts(row)), _oldest(row, moment)) for row in stats]
        yield from table(_HEAD, rows, numbers=range(1, len(_HEAD)))
    else:
        yield "no jobs"
    yield f"{_number(failed, limit)} failed: sqlqueue failed list" if failed else "0 failed"


def _counts(row: QueueStats) -> tuple[int, ...]:
    return row.pending, row.delayed, row.reserved, row.total


def _number(count: int, limit: int | None) -> str:
    return str(count) if limit is None or count < limit else f"{limit:,}+"


def _look(queue: Queue, limit: int | None) -> tuple[list[QueueStats], datetime, int]:
    """
    The counts, and the moment by the database's clock: this host's may be off.
    """
    stats, failed = queue.stats(limit), queue.failed.count(limit=limit)
    moment = queue.consumer.read(lambda connection: connection.execute(sa.select(now())).scalar_one())
    assert moment is not None
    return stats, moment, failed


def _oldest(row: QueueStats, moment: datetime) -> str:
    return "-" if row.oldest_due is None else format_age((moment - row.oldest_due).total_seconds())


def _report(queue: Queue, limit: int | None) -> dict[str, Any]:
    stats, moment, failed = _look(queue, limit)
    return {"queues": [_as_json(row, moment) for row in stats], "failed": failed, "counted_to": limit}


def _as_json(row: QueueStats, moment: datetime) -> dict[str, Any]:
    oldest = row.oldest_due
    age = None if oldest is None else max((moment - oldest).total_seconds(), 0.0)
    return asdict(row) | {"oldest_due": oldest and oldest.isoformat(), "oldest_due_seconds": age}


@click.command()
@takes_target
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE…")
@click.option("--force", is_flag=True, help="Needed: what is deleted is gone.")
def clear(target: Target, *, queues: Sequence[str], force: bool) -> None:
    """
    Delete the waiting jobs of queues. Jobs that a worker holds stay.
    """
    names = check_queues(queues)
    if not force:
        raise Misuse(f"clear deletes the waiting jobs of {', '.join(names)} for good: add --force if that is what you want")
    queue = open_queue(target)
    for name in names:
        click.echo(f"{name}: {plural(queue.clear(name), 'job')} deleted")
