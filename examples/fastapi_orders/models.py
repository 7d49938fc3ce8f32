"""
The database, and what the shop keeps there.
"""

import os

from sqlalchemy import ForeignKey, String
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool

URL = os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///orders.db")

engine = create_async_engine(URL)
sessions = async_sessionmaker(engine)

# Async handlers run on an event loop of the worker, and a pooled connection belongs to the loop that has opened it. So they
# have an engine without a pool.
handler_sessions = async_sessionmaker(create_async_engine(URL, poolclass=NullPool))


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(200))
    status: Mapped[str] = mapped_column(String(20), default="placed")


class Shipment(Base):
    __tablename__ = "shipments"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
