"""
What the worker logs to.
"""

from __future__ import annotations

from .._logs import job_log, log

__all__ = ["job_log", "log"]
