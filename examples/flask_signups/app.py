"""
The HTTP side. Run it in the folder `examples`:

    flask --app flask_signups.app create-tables
    flask --app flask_signups.app run
    sqlqueue work --app flask_signups.jobs:queue --queue mail,default
"""

import secrets
from datetime import timedelta

from flask import Flask, abort, redirect, render_template_string, request, url_for
from flask.typing import ResponseReturnValue
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from .jobs import give_bonus, queue, send_password_link, send_welcome, tenant, update_search
from .models import Account, Base, engine

app = Flask(__name__)


@app.cli.command("create-tables")
def create_tables() -> None:
    Base.metadata.create_all(engine)  # or migrate, see `sqlqueue install`


@app.before_request
def remember_tenant() -> None:
    tenant.set(request.headers.get("X-Tenant", "main"))


@app.post("/accounts")
def sign_up() -> ResponseReturnValue:
    invited_by = request.form.get("invited_by")
    try:
        with Session(engine) as session, session.begin():
            account = Account(email=request.form["email"])
            session.add(account)
            session.flush()  # the account gets its id; if the address is taken, this raises and there will be no jobs
            send_welcome.push(session, account.id)
            update_search.push(session, account.id)
            if invited_by:
                give_bonus.push(session, invited_by)
            return {"id": account.id}, 201
    except IntegrityError:
        abort(409)


@app.put("/accounts/<int:account_id>")
def change_profile(account_id: int) -> ResponseReturnValue:
    with Session(engine) as session, session.begin():
        account = session.get(Account, account_id)
        if account is None:
            abort(404)
        account.name = request.form["name"]
        update_search.push(session, account.id)  # however often in a row: it runs once
    return "", 204


@app.post("/passwords")
def ask_for_password() -> ResponseReturnValue:
    email = request.form["email"]
    link = send_password_link.options(
        unique=email,
        unique_for=timedelta(minutes=1),  # no second mail within a minute, whatever becomes of the first
        deadline=timedelta(minutes=15),  # later the link would be of no use
    )
    with Session(engine) as session, session.begin():
        pushed = link.push(session, email, secrets.token_urlsafe())
    return "", 202 if pushed.created else 429


# For people who run it. A real one would ask them to log in.

PAGE = """
<!doctype html><title>Failed jobs</title>
<h1>Failed jobs</h1>
{% for job in jobs %}
<form method="post" action="{{ url_for('retry_failed', job_id=job.id) }}">
  {{ job.name }} {{ job.id }}, {{ job.attempts }} attempts, {{ job.failed_at }}: {{ job.error_message }} <button>Retry</button>
</form>
{% else %}<p>None.</p>
{% endfor %}
"""


@app.get("/failed")
def list_failed() -> ResponseReturnValue:
    return render_template_string(PAGE, jobs=queue.failed.list(limit=20))


@app.post("/failed/<int:job_id>/retry")
def retry_failed(job_id: int) -> ResponseReturnValue:
    queue.failed.retry(id=job_id)
    return redirect(url_for("list_failed"))
