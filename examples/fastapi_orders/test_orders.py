import asyncio
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient

from sqlqueue.testing import Clock

from . import jobs
from .jobs import charge, queue, remind_to_pay


@pytest.fixture
def mails(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sent: list[str] = []
    monkeypatch.setattr(jobs, "send_mail", lambda email, text: sent.append(f"{email}: {text}"))
    return sent


def place(client: TestClient, token: str = "tok_1") -> int:
    response = client.post("/orders", json={"email": "ann@example.com", "token": token}, headers={"X-Request-ID": "r-1"})
    assert response.status_code == 201
    return int(response.json()["id"])


def status(client: TestClient, order_id: int) -> str:
    return str(client.get(f"/orders/{order_id}").json()["status"])


def test_an_order_asks_for_its_payment_and_for_a_reminder(client: TestClient) -> None:
    with queue.fake() as pushed:  # records, and writes no job
        order_id = place(client)
    pushed.assert_pushed_once(charge, lambda a: a.order_id == order_id)
    reminder = pushed.assert_pushed_once(remind_to_pay)
    assert reminder.delay == timedelta(hours=1).total_seconds()
    assert reminder.headers == {"request_id": "r-1"}


def test_an_order_that_cannot_be_placed_leaves_no_job(client: TestClient) -> None:
    assert client.post("/orders", json={"email": "ann@example.com"}).status_code == 422
    assert queue.size("default") == 0


def test_a_paid_order_is_thanked_for_and_shipped(client: TestClient, mails: list[str]) -> None:
    order_id = place(client)
    drained = queue.drain()  # works what is due, here; what a job pushes is worked, too
    drained.assert_all_done()
    assert [run.name for run in drained] == ["charge", "send_receipt", "prepare_shipment"]
    assert status(client, order_id) == "paid"
    assert mails == [f"ann@example.com: Thanks! Order {order_id} is paid."]


def test_an_order_that_is_not_paid_is_reminded_of(client: TestClient, sqlqueue_clock: Clock, mails: list[str]) -> None:
    order_id = place(client, token="tok_declined")
    assert queue.drain().counts == {"failed": 1}
    sqlqueue_clock.advance(hours=1)
    assert queue.drain().counts == {"done": 1}
    assert mails == [f"ann@example.com: Your order {order_id} waits for its payment."]


def test_a_busy_provider_costs_no_attempt(client: TestClient, monkeypatch: pytest.MonkeyPatch, sqlqueue_clock: Clock) -> None:
    order_id = place(client, token="tok_busy")
    for _ in range(6):  # more than it has
        assert queue.drain().counts == {"released": 1}
        sqlqueue_clock.advance(seconds=30)
    monkeypatch.setattr(jobs, "call_provider", answer_at_once)
    queue.drain().assert_all_done()
    assert status(client, order_id) == "paid"


async def answer_at_once(token: str, *, reference: str) -> None:
    await asyncio.sleep(0)


def test_a_declined_payment_can_be_tried_again(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    order_id = place(client, token="tok_declined")
    queue.drain()
    [failed] = client.get("/failed").json()
    assert (failed["name"], failed["error"]) == ("charge", "the card was declined")
    monkeypatch.setattr(jobs, "call_provider", answer_at_once)
    assert client.post(f"/failed/{failed['id']}/retry").status_code == 202
    queue.drain().assert_all_done()
    assert status(client, order_id) == "paid"
