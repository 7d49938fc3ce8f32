"""
The HTTP side. Run it in the folder `examples`:  uvicorn fastapi_orders.app:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated
from uuid import uuid4

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel

from sqlqueue import Worker

from .jobs import charge, queue, remind_to_pay, request_id
from .models import Base, Order, engine, sessions


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)  # a real shop would migrate, see `sqlqueue install`
    if os.environ.get("WORKER") == "no":
        yield  # the jobs are for processes of their own: sqlqueue work --app fastapi_orders.jobs:queue
    else:
        async with Worker(queue, concurrency=4):  # in threads of this process; at the end it lets running jobs finish
            yield
    await engine.dispose()


async def remember_request(x_request_id: Annotated[str, Header()] = "") -> None:
    request_id.set(x_request_id or uuid4().hex)


app = FastAPI(lifespan=lifespan, dependencies=[Depends(remember_request)])


class NewOrder(BaseModel):
    email: str
    token: str


@app.post("/orders", status_code=201)
async def place_order(new: NewOrder) -> dict[str, int]:
    async with sessions.begin() as session:
        order = Order(email=new.email)
        session.add(order)
        await session.flush()  # the order gets its id
        await charge.push_async(session, order.id, new.token)  # the order and its jobs: all of them, or nothing
        await remind_to_pay.options(delay=timedelta(hours=1), deadline=timedelta(days=1)).push_async(session, order.id)
        return {"id": order.id}


@app.get("/orders/{order_id}")
async def show_order(order_id: int) -> dict[str, str]:
    async with sessions() as session:
        if (order := await session.get(Order, order_id)) is None:
            raise HTTPException(404)
        return {"email": order.email, "status": order.status}


# For people who run the shop. `def`, not `async def`: these calls wait for the database, so FastAPI gives them a thread.


@app.get("/failed")
def list_failed() -> list[dict[str, str | int | None]]:
    return [{"id": job.id, "name": job.name, "attempts": job.attempts, "error": job.error_message} for job in queue.failed.list(limit=20)]


@app.post("/failed/{job_id}/retry", status_code=202)
def retry_failed(job_id: int) -> dict[str, int]:
    if not queue.failed.retry(id=job_id):
        raise HTTPException(404)
    return {"id": job_id}
