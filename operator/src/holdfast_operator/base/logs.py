"""JSON logs on standard error: one object per line, with namespace, job and round where available.

`Changed` logs a lasting condition once. Callers must not pass secrets.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from holdfast_core.api import Gang
from holdfast_core.clock import Clock, SystemClock
from holdfast_core.net.bounded_logs import BoundedLogs, JsonFormatter

LOGGER = logging.getLogger("holdfast_operator")


def configure(level: str, clock: Clock | None = None) -> None:
    """Route all logs of this process through one handler on standard error.

    `level` applies to the operator's own logger. Libraries log warnings and errors only, and at most a few
    lines a minute of each message (BoundedLogs).
    """
    clock = clock or SystemClock()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(clock, lambda record: {"logger": record.name}))
    handler.addFilter(BoundedLogs(LOGGER.name, clock))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    LOGGER.setLevel(level.upper())


def job_fields(job: Gang) -> dict[str, Any]:
    """Return the fields of a log line about a job."""
    return {"namespace": job.namespace, "job": job.name, "round": job.status.restart_round}


def info(message: str, **fields: Any) -> None:
    LOGGER.info(message, extra={"fields": fields})


def warning(message: str, **fields: Any) -> None:
    LOGGER.warning(message, extra={"fields": fields})


def failure(message: str, error: BaseException, **fields: Any) -> None:
    """Log an error with its traceback. Use it where the error is not reported anywhere else."""
    LOGGER.error(message, exc_info=error, extra={"fields": fields})


class Changed:
    """Logger that writes a message about a subject only if it differs from the last one."""

    def __init__(self, limit: int = 10_000) -> None:
        """Create an empty record of at most `limit` subjects. A full record is cleared."""
        self._last_messages: dict[str, str] = {}
        self._limit = limit

    def info(self, subject: str, message: str, **fields: Any) -> None:
        if self.is_new(subject, message):
            info(message, **fields)

    def warning(self, subject: str, message: str, **fields: Any) -> None:
        if self.is_new(subject, message):
            warning(message, **fields)

    def warning_once(self, subject: str, message: str, **fields: Any) -> None:
        """Log a warning, unless a message about the subject was logged since the last `forget`."""
        if subject not in self._last_messages:
            self.warning(subject, message, **fields)

    def forget(self, subject: str) -> bool:
        """Drop the record of a subject. Return whether a message about it had been logged."""
        return self._last_messages.pop(subject, None) is not None

    def is_new(self, subject: str, message: str) -> bool:
        """Record the message and return whether it differs from the last one about this subject."""
        if self._last_messages.get(subject) == message:
            return False
        if len(self._last_messages) >= self._limit:
            self._last_messages.clear()
        self._last_messages[subject] = message
        return True
