"""
A network that swallows what it is given: no connection is closed, and no answer comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, event, make_url

from sqlqueue import JobContext, Queue, UnusableDatabase, Worker
from sqlqueue._worker import trouble
from tests.rows import driver_of
from tests.servers import Database
from tests.workers import PATIENCE, Gate, eventually, failures, jobs, push, working

pytestmark = [
    pytest.mark.databases("postgresql", "mysql", "mariadb"),
    pytest.mark.skipif(sys.platform != "linux", reason="packets are dropped by a filter of Linux"),
]

SO_ATTACH_FILTER = 26
DROP_EVERYTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # one instruction: keep 0 bytes
SHORT = {
    "postgresql": {"keepalives_idle": "1", "keepalives_interval": "1", "keepalives_count": "1", "tcp_user_timeout": "1000"},
    "mysql": {"read_timeout": "1", "write_timeout": "1"},  # the latter while it shakes hands, too
}


class Network:
    """A proxy before the server, in one thread. What it swallows is not even acknowledged."""

    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.others: dict[socket.socket, socket.socket] = {}
        self.dark: list[socket.socket] = []
        self.answers_only = False
        self._guard = threading.Lock()
        self._waker, self._woken = socket.socketpair()
        self._selector = DefaultSelector()
        for one in (self.listener, self._woken):
            self._selector.register(one, EVENT_READ)
        self._thread = threading.Thread(target=self._work, name="network")
        self._thread.start()

    def swallow(self) -> None:
        """Nothing more goes through the connections that there are. The server has noticed; we have not."""
        with self._guard:
            self._swallow()

    def swallow_answers(self) -> None:
        """What is sent next still arrives, and its answer does not come back."""
        self.answers_only = True

    def close(self) -> None:
        """End everything; who still waits hears of it."""
        self._waker.close()
        self._thread.join(PATIENCE)

    def _work(self) -> None:
        while True:
            for key, _ in self._selector.select():
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._woken:
                    self._end()
                    return
                with self._guard:
                    self._accept() if one is self.listener else self._pass_on(one)

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(self.server)
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.others[one] = other
            self._selector.register(one, EVENT_READ)

    def _pass_on(self, one: socket.socket) -> None:
        other = self.others.get(one)
        if other is None:  # closed, or swallowed, since select saw it
            return
        data = b""
        with contextlib.suppress(OSError):
            data = one.recv(65536)
        if not data:
            self._forget(one, other)
            return
        with contextlib.suppress(OSError):
            other.sendall(data)
        if self.answers_only and one.getsockname()[1] == self.port:
            self.answers_only = False
            self._swallow()

    def _forget(self, *both: socket.socket) -> None:
        for one in both:
            del self.others[one]
            self._selector.unregister(one)
            one.close()

    def _swallow(self) -> None:
        for one, other in list(self.others.items()):
            if one.getsockname()[1] == self.port:
                one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(DROP_EVERYTHING)))
                self.dark.append(one)
                for each in (one, other):
                    del self.others[each]
                    self._selector.unregister(each)
                other.shutdown(socket.SHUT_WR)  # after what it has been sent
                self.dark.append(other)

    def _end(self) -> None:
        for one in (*self.others, *self.dark):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset; all else would wait for its turn
            one.close()
        self.listener.close()
        self._woken.close()
        self._selector.close()


@pytest.fixture
def network(database: Database) -> Iterator[Network]:
    url = make_url(database.url)
    assert url.host is not None
    network = Network(url.host, url.port or {"postgresql": 5432}.get(database.name, 3306))
    yield network
    network.close()


@pytest.fixture
def far(network: Network, database: Database, queue: Queue) -> Iterator[Queue]:
    """A queue on the same tables, through the network, that loses patience soon."""
    url = make_url(database.url)
    far = Queue(url.set(host="127.0.0.1", port=network.port).update_query_dict(SHORT[url.get_backend_name()]))
    yield far
    far.consumer.close()


def test_an_idle_worker_whose_connections_went_dark(far: Queue, queue: Queue, network: Network) -> None:
    ran = threading.Event()
    for one in (far, queue):
        one.job(name="note")(ran.set)
    with working(far):
        eventually(lambda: far.consumer._looks)
        network.swallow()
        push(queue, "note")
        assert ran.wait(PATIENCE)


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "not-applied"])
def test_a_settlement_whose_connection_went_dark_is_written_once(
    far: Queue, queue: Queue, network: Network, observer: Engine, applied: bool
) -> None:
    runs: Counter[int] = Counter()
    swallowed = threading.Event()
    queue.job(name="note")(lambda: None)

    @far.job(name="note", max_attempts=1)
    def note(context: JobContext) -> None:
        runs[context.id] += 1

    def go_dark(connection: sa.Connection) -> None:
        if threading.current_thread().name == "sqlqueue-settle" and not swallowed.is_set():
            swallowed.set()
            network.swallow_answers() if applied else network.swallow()

    ids = push(queue, "note", max_attempts=1)
    event.listen(far.consumer.engine, "commit", go_dark)
    with working(far, concurrency=1) as worker:
        assert swallowed.wait(PATIENCE)
        assert queue.wait_empty(PATIENCE)
        eventually(lambda: worker._shift is not None and worker._shift.counts)
        ids += push(queue, "note", max_attempts=1)
        assert queue.wait_empty(PATIENCE)
        worker.stop(PATIENCE)
        assert worker.summary is not None
        assert worker.summary.counts == {"done": 2}
    assert runs == Counter(ids)
    assert (jobs(observer, queue), failures(observer, queue)) == ([], [])


def test_a_renewal_whose_connection_went_dark_costs_the_lease_at_its_end_and_not_later(far: Queue, queue: Queue, network: Network) -> None:
    """The thread that renews waits for an answer. The handler is told all the same."""
    gate = Gate()
    contexts: list[JobContext] = []
    queue.job(name="wait")(lambda: None)

    @far.job(name="wait")
    def wait(context: JobContext) -> None:
        contexts.append(context)
        gate.pass_through()

    push(queue, "wait")
    with working(far, concurrency=1, lease=1):
        gate.await_arrivals()
        network.swallow()
        eventually(lambda: contexts[0].lost)
        gate.open()
        assert queue.wait_empty(PATIENCE)


# --- without anybody's settings


@pytest.fixture
def patient(network: Network, database: Database, queue: Queue) -> Iterator[Queue]:
    patient = Queue(make_url(database.url).set(host="127.0.0.1", port=network.port))
    yield patient
    eventually(lambda: not any(thread.name.startswith("sqlqueue-") for thread in threading.enumerate()))
    patient.consumer.close()


@pytest.mark.parametrize("source", ["url", "engine"])
def test_a_connection_that_is_silent_for_half_a_minute_is_given_up(database: Database, source: str) -> None:
    """By the kernel: an answer may take its time, but the other end's kernel acknowledges, and answers probes."""
    queue = Queue(database.url if source == "url" else sa.create_engine(database.url))
    with queue.consumer.engine.connect() as connection:
        driver: Any = driver_of(connection)
        descriptor = driver.fileno() if hasattr(driver, "fileno") else driver._sock.fileno()
        with socket.socket(fileno=os.dup(descriptor)) as one:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
            assert 0 < one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
    queue.consumer.close()


@pytest.mark.chaos
def test_a_worker_survives_a_network_that_went_dark_without_any_settings(patient: Queue, queue: Queue, network: Network) -> None:
    ran = threading.Event()
    for one in (patient, queue):
        one.job(name="note")(ran.set)
    with working(patient):
        eventually(lambda: patient.consumer._looks)
        network.swallow()
        push(queue, "note")
        survived = ran.wait(60)
        if not survived:
            network.close()  # so that the worker can end
    assert survived


def test_a_worker_that_gets_no_answer_at_all_ends_loudly(patient: Queue, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "PATIENCE", 0.5)
    worker = Worker(patient)
    worker.start()
    eventually(lambda: patient.consumer._looks)
    network.swallow()
    shift = worker._shift
    assert shift is not None
    until = time.monotonic() + 3
    while shift.fatal is None and time.monotonic() < until:
        time.sleep(0.01)
    error = shift.fatal
    network.close()
    with contextlib.suppress(UnusableDatabase):
        worker.stop(PATIENCE)
    assert isinstance(error, UnusableDatabase)
    assert "no statement has succeeded for 0.5 s: the database does not answer" in str(error)
