"""
W5 and W7: what a claim costs when there are very many jobs, and when the database may not forget those that have gone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from sqlqueue import Worker

from .arena import OURS
from .contestants.by_hand import Driver, driver_for
from .contestants.ours import Ours, engine_for
from .figures import Figures

BY_HAND = "driver"
FEW = 2000
GROUP = 10
CLAIMS = 41


class Growth:
    """
    Our queue and a loop by hand that take turns at claiming from the same table.
    """

    def __init__(self, database: str, url: str, figures: Figures) -> None:
        self.database = database
        self.url = url
        self.figures = figures
        self.ours = Ours(url)
        self.ours.queue.configure(url)
        self.engine = engine_for(url)

    def backlog(self, rows: int) -> None:
        few, many = (f"W5 claim of {GROUP} among {count:,}" for count in (FEW, rows))
        for workload, count in ((few, FEW), (many, rows)):
            self.ours.clear()
            self.fill(count)
            self.measure(workload)
        self.figures.compare(self.database, f"W5 {rows:,} to {FEW:,}", many, few)
        self.ours.clear()

    def held_open(self, passing: int) -> None:
        before, after = f"W7 claim of {GROUP}", f"W7 the same, {passing:,} dead before it"
        self.ours.clear()
        self.fill(FEW)
        self.measure(before)
        with snapshot(self.engine):
            self.push(passing)
            Worker(self.ours.queue, stop_when_empty=True).run()
            self.push(FEW)
            self.measure(after)
        self.figures.compare(self.database, "W7 with the dead to without", after, before)
        self.ours.clear()

    def push(self, count: int) -> None:
        with self.engine.begin() as connection:
            self.ours.queue.push_many(connection, [self.ours.noop.bind(number) for number in range(count)])

    def fill(self, rows: int) -> None:
        self.push(min(rows, FEW))
        names = ", ".join(column.name for column in self.ours.queue.tables.jobs.c if column.name != "id")
        there = min(rows, FEW)
        while there < rows:
            more = min(there, rows - there)
            with self.engine.begin() as connection:
                connection.exec_driver_sql(f"INSERT INTO sqlqueue_jobs ({names}) SELECT {names} FROM sqlqueue_jobs LIMIT {more}")
            there += more
        analyze = "ANALYZE TABLE" if self.database in ("mysql", "mariadb") else "ANALYZE"
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(f"{analyze} sqlqueue_jobs")

    def measure(self, workload: str) -> None:
        driver = driver_for(self.url)
        bodies: dict[str, Callable[[], object]] = {OURS: self.claim, BY_HAND: lambda: claim_by_hand(driver)}
        times: dict[str, list[float]] = {name: [] for name in bodies}
        for _ in range(CLAIMS):
            for name, body in bodies.items():
                began = time.perf_counter()
                body()
                times[name].append((time.perf_counter() - began) * 1000)
        driver.connection.close()
        for name, values in times.items():
            self.figures.add(self.database, workload, name, "ms", statistics.median(values))

    def claim(self) -> None:
        assert len(self.ours.queue.claim(limit=GROUP)) == GROUP

    def close(self) -> None:
        self.ours.queue.consumer.close()
        self.engine.dispose()


def claim_by_hand(driver: Driver) -> None:
    assert len(driver.claim(GROUP)) == GROUP


@contextmanager
def snapshot(engine: sa.Engine) -> Iterator[None]:
    """A transaction of somebody else who looks at the data as it was, for as long as that takes."""
    level = {} if engine.dialect.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
    with engine.connect().execution_options(**level) as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql("SELECT count(*) FROM bench_orders").scalar_one()
        connection.exec_driver_sql("SELECT id FROM sqlqueue_jobs LIMIT 1").all()
        yield
        connection.rollback()
