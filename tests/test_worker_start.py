"""
A worker that starts before its database does.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import make_url

from sqlqueue import Queue, UnusableDatabase, Worker
from tests.servers import Database, free_port
from tests.workers import PATIENCE, eventually, push

SERVERS = pytest.mark.databases("postgresql", "mysql", "mariadb")


@contextmanager
def forwarding(port: int, database: Database) -> Iterator[None]:
    """Let the database be there under another port, too, from now on."""
    url = make_url(database.url)

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((str(url.host), int(url.port or 0))) as server:
                back = threading.Thread(target=copy, args=(server, self.request), daemon=True)
                back.start()
                copy(self.request, server)
                back.join(PATIENCE)

    class Listener(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with Listener(("127.0.0.1", port), Forward) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        yield
        listener.shutdown()


def copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        target.close()


@SERVERS
def test_a_database_that_comes_up_later_is_waited_for(queue: Queue, database: Database, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sqlqueue")
    port = free_port()
    ran = threading.Event()
    early = Queue(make_url(database.url).set(port=port))
    early.job(name="noop")(ran.set)
    queue.job(name="noop")(lambda: None)
    push(queue, "noop")
    worker = Worker(early, wait_for_database=PATIENCE)
    worker.start()
    eventually(lambda: "the database cannot be reached yet" in caplog.text)
    with forwarding(port, database):
        assert ran.wait(PATIENCE)
        worker.stop(PATIENCE)
        early.consumer.close()
    assert worker.summary is not None
    assert worker.summary.counts == {"done": 1}


@SERVERS
def test_a_host_that_no_name_server_knows_is_waited_for(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the name may come later than we do."""

    def unknown(*arguments: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    queue = Queue(make_url(database.url).set(host="database.invalid"))
    began = time.monotonic()
    with pytest.raises(UnusableDatabase, match="cannot be reached"):
        Worker(queue, wait_for_database=0.5).run()
    assert time.monotonic() - began >= 0.5
    assert "the database cannot be reached yet" in caplog.text
    queue.consumer.close()
