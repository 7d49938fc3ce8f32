"""
The loop by hand once more, with SQLAlchemy Core instead of the bare driver.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlqueue._dialects import after, now

from .base import seconds_of, serve
from .by_hand import PAUSE
from .ours import BUSINESS, ORDER, Ours, engine_for


def job_row(number: int, moment: Any) -> dict[str, Any]:
    fixed = {"queue": "default", "name": "noop", "priority": 0, "fair_by": "", "attempts": 0, "max_attempts": 5}
    return fixed | {"payload": f'{{"number":{number}}}', "due_at": moment, "available_at": moment, "created_at": moment}


class Core(Ours):
    def push_each(self, count: int) -> float:
        engine, table = engine_for(self.url), self.queue.tables.jobs

        def push_all(numbers: range) -> None:
            for number in numbers:
                with engine.begin() as connection:
                    connection.execute(BUSINESS.insert().values(note="an order"))
                    connection.execute(table.insert().values(job_row(number, now())))

        push_all(range(20))
        return seconds_of(lambda: push_all(range(count)))

    def push_bulk(self, count: int) -> float:
        engine, table = engine_for(self.url), self.queue.tables.jobs

        def push_all() -> None:
            with engine.begin() as connection:
                moment = connection.execute(sa.select(now())).scalar_one()
                connection.execute(table.insert(), [job_row(number, moment) for number in range(count)])

        engine.connect().close()
        return seconds_of(push_all)

    def work(self, stamp: Callable[[int], None]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        engine = self.engine()
        jobs = self.queue.tables.jobs
        delete = sa.delete(jobs).where(jobs.c.id.in_(sa.bindparam("ids", expanding=True)))
        claim = self.claim_in_one if engine.dialect.update_returning else self.claim_in_two
        with engine.connect() as connection:
            while True:
                rows = claim(connection)
                connection.commit()
                if not rows:
                    time.sleep(PAUSE)
                    continue
                for row in rows:
                    stamp(json.loads(row.payload)["number"])
                connection.execute(delete, {"ids": [row.id for row in rows]})
                connection.commit()

    def engine(self) -> sa.Engine:
        engine = sa.create_engine(self.url, **({} if self.url.startswith("sqlite") else {"isolation_level": "READ COMMITTED"}))
        if engine.dialect.name == "sqlite":
            sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
            sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine

    def work_writing(self, stamp: Callable[[int], None]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        claiming, writing = self.engine(), sa.create_engine(self.url)
        threads = [threading.Thread(target=self.write_and_delete, args=(claiming, writing, stamp), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def write_and_delete(self, claiming: sa.Engine, writing: sa.Engine, stamp: Callable[[int], None]) -> None:
        """With a Session a job, as our handlers get one."""
        jobs = self.queue.tables.jobs
        delete = sa.delete(jobs).where(jobs.c.id == sa.bindparam("job"))
        claim = self.claim_in_one if claiming.dialect.update_returning else self.claim_in_two
        while True:
            with claiming.begin() as connection:
                rows = claim(connection)
            for row in rows:
                stamp(json.loads(row.payload)["number"])
                with Session(writing) as session:
                    session.execute(ORDER, {"note": "an order"})
                    session.execute(delete, {"job": row.id})
                    session.commit()
            if not rows:
                time.sleep(PAUSE)

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        table = self.queue.tables.jobs
        jobs = table.c
        ready = (jobs.queue == "default", jobs.priority == 0, jobs.fair_by == "", jobs.available_at <= now())
        order = (jobs.available_at, jobs.id)
        lease = {
            "attempts": jobs.attempts + 1,
            "reserved_token": "by hand",
            "reserved_until": after(60_000_000),
            "available_at": after(60_000_000),
        }
        group = settings["group"]
        self.candidates = sa.select(jobs.id, jobs.payload).where(*ready).order_by(*order).limit(group).with_for_update(skip_locked=True)
        for name in ("mysql", "mariadb"):
            self.candidates = self.candidates.with_hint(table, f"FORCE INDEX ({self.queue.tables.ready_index})", name)
        update = sa.update(table).values(**lease)
        self.take = update.where(jobs.id.in_(sa.bindparam("ids", expanding=True)))
        within = sa.select(jobs.id).where(*ready).order_by(*order).limit(group).with_for_update(skip_locked=True)
        self.take_ready = update.where(jobs.id.in_(within.scalar_subquery())).returning(jobs.id, jobs.payload)

    def claim_in_one(self, connection: sa.Connection) -> Any:
        return connection.execute(self.take_ready).all()

    def claim_in_two(self, connection: sa.Connection) -> Any:
        rows = connection.execute(self.candidates).all()
        if rows:
            connection.execute(self.take, {"ids": [row.id for row in rows]})
        return rows


if __name__ == "__main__":
    serve(Core)
