"""
Logging that cannot decide what becomes of a job.
"""

from __future__ import annotations

import contextlib
import logging

__all__ = ["job_log", "log"]


class QuietLogger:
    """
    A logger whose handlers and filters may raise whatever they like: nothing of it reaches who logs.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def speaks(self, level: int) -> bool:
        """
        Whether a line of this level would go anywhere.
        """
        return self._logger.isEnabledFor(level)

    def log(self, level: int, text: str, *values: object) -> None:
        with contextlib.suppress(BaseException):
            self._logger.log(level, text, *values, stacklevel=2)

    def info(self, text: str, *values: object) -> None:
        self.log(logging.INFO, text, *values)

    def warning(self, text: str, *values: object) -> None:
        self.log(logging.WARNING, text, *values)

    def debug(self, text: str, *values: object) -> None:
        self.log(logging.DEBUG, text, *values)

    def error(self, text: str, *values: object) -> None:
        self.log(logging.ERROR, text, *values)


log = QuietLogger("sqlqueue")
job_log = QuietLogger("sqlqueue.jobs")
