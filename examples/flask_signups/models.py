"""
The database, and what is kept there.
"""

import os

from sqlalchemy import String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

engine = create_engine(os.environ.get("DATABASE_URL", "sqlite:///signups.db"))


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(200), unique=True)
    name: Mapped[str] = mapped_column(String(200), default="")
    credit: Mapped[int] = mapped_column(default=0)
    found_as: Mapped[str] = mapped_column(String(200), default="")
    """What the search index says."""
