import pytest
from flask.testing import FlaskClient

from sqlqueue.testing import Clock, InlineRuns, Pushes, worker_dies

from . import jobs
from .jobs import give_bonus, queue, send_welcome, update_search
from .models import Account


@pytest.fixture
def mails(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sent: list[str] = []
    monkeypatch.setattr(jobs, "send_mail", lambda email, text: sent.append(f"{email}: {text}"))
    return sent


def sign_up(client: FlaskClient, email: str, **form: str) -> int:
    response = client.post("/accounts", data={"email": email, **form}, headers={"X-Tenant": "north"})
    assert response.status_code == 201
    return int(response.json["id"]) if response.json else 0


def account(account_id: int) -> Account:
    with queue.begin() as session:
        session.expire_on_commit = False
        return session.get_one(Account, account_id)


def test_who_signs_up_is_welcomed(client: FlaskClient, pushed: Pushes) -> None:  # records, and writes no job
    account_id = sign_up(client, "ann@example.com")
    welcome = pushed.assert_pushed_once(send_welcome, lambda a: a.account_id == account_id)
    assert welcome.headers == {"tenant": "north"}
    pushed.assert_not_pushed(give_bonus)


def test_an_address_that_is_taken_leaves_no_job(client: FlaskClient) -> None:
    sign_up(client, "ann@example.com")
    before = queue.size("mail")
    assert client.post("/accounts", data={"email": "ann@example.com"}).status_code == 409
    assert queue.size("mail") == before


def test_who_signs_up_can_be_found(client: FlaskClient, ran_inline: InlineRuns, mails: list[str]) -> None:  # jobs run at the commit
    ann = sign_up(client, "ann@example.com")
    assert account(ann).found_as == "ann@example.com 0"
    assert mails == ["ann@example.com: Welcome!"]
    assert [run.status for run in ran_inline] == ["done", "done"]


def test_an_invitation_brings_a_bonus(client: FlaskClient, sqlqueue_clock: Clock) -> None:
    ann = sign_up(client, "ann@example.com")
    sign_up(client, "bob@example.com", invited_by="ann@example.com")
    assert [run.name for run in queue.drain(queues="default")] == [give_bonus.name]  # works what is due
    sqlqueue_clock.advance(seconds=5)
    queue.drain(queues="default").assert_all_done()
    assert account(ann).found_as == "ann@example.com 5"


def test_the_search_is_updated_when_the_account_has_been_left_alone(client: FlaskClient, sqlqueue_clock: Clock) -> None:
    ann = sign_up(client, "ann@example.com")
    for name in ("A", "An", "Ann"):
        sqlqueue_clock.advance(seconds=4)
        client.put(f"/accounts/{ann}", data={"name": name})
        assert not queue.drain(queues="default")
    sqlqueue_clock.advance(seconds=5)
    assert [run.name for run in queue.drain(queues="default")] == [update_search.name]
    assert account(ann).found_as == "Ann ann@example.com 0"


def test_a_password_link_once_a_minute(client: FlaskClient, sqlqueue_clock: Clock, mails: list[str]) -> None:
    def ask() -> int:
        return client.post("/passwords", data={"email": "ann@example.com"}).status_code

    assert ask() == 202
    queue.drain(queues="mail").assert_all_done()
    assert ask() == 429
    sqlqueue_clock.advance(minutes=1)
    assert ask() == 202
    sqlqueue_clock.advance(minutes=15)
    [late] = queue.drain(queues="mail")
    assert late.reason == "deadline_exceeded"
    assert len(mails) == 1


def test_a_mail_that_cannot_be_sent_ends_on_the_page_of_failed_jobs(client: FlaskClient, sqlqueue_clock: Clock) -> None:
    sign_up(client, "nowhere")
    for seconds in (10, 60, 600):
        assert queue.drain(queues="mail").counts == {"retrying": 1}
        sqlqueue_clock.advance(seconds=seconds)
    assert queue.drain(queues="mail").counts == {"failed": 1}
    assert "the address has no @" in client.get("/failed").text
    [failed] = queue.failed.list()
    client.post(f"/failed/{failed.id}/retry")
    assert queue.size("mail") == 1


def test_nobody_is_welcomed_twice(client: FlaskClient, sqlqueue_clock: Clock, mails: list[str]) -> None:
    sign_up(client, "ann@example.com")
    with worker_dies(queue, at="before_settle"):  # the mail is out, and nobody has written that down
        queue.drain(queues="mail")
    sqlqueue_clock.advance(minutes=2)  # beyond the lease
    queue.drain(queues="mail").assert_all_done()
    assert mails == ["ann@example.com: Welcome!"]
