"""JSON logs on standard error: one object a line, with namespace, job and round where they are known.

A reason that lasts is logged once: `Changed` remembers what was said about a subject. Nothing here
may be given a secret.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from holdfast_core.clock import SystemClock, stamp
from holdfast_core.net.bounded_logs import BoundedLogs

LOGGER = logging.getLogger("holdfast_operator")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = SystemClock()

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": stamp(self._clock.utc_now()),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(level: str) -> None:
    """Route all logs of this process through one handler; libraries only from warnings up, and a few
    lines a minute of each of their messages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(BoundedLogs(LOGGER.name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    LOGGER.setLevel(level.upper())


def info(message: str, **fields: Any) -> None:
    LOGGER.info(message, extra={"fields": fields})


def warning(message: str, **fields: Any) -> None:
    LOGGER.warning(message, extra={"fields": fields})


def failure(message: str, error: BaseException, **fields: Any) -> None:
    """An error that nothing else will report, with its traceback."""
    LOGGER.error(message, exc_info=error, extra={"fields": fields})


class Changed:
    """Says something about a subject only when it differs from what was said last."""

    def __init__(self, limit: int = 10_000) -> None:
        self._said: dict[str, str] = {}
        self._limit = limit

    def info(self, subject: str, message: str, **fields: Any) -> None:
        if self.is_new(subject, message):
            info(message, **fields)

    def warning(self, subject: str, message: str, **fields: Any) -> None:
        if self.is_new(subject, message):
            warning(message, **fields)

    def warning_once(self, subject: str, message: str, **fields: Any) -> None:
        """Whatever the words: nothing more about a subject until it is well again."""
        if subject not in self._said:
            self.warning(subject, message, **fields)

    def forget(self, subject: str) -> bool:
        """The subject is well again, or gone. True if something had been said."""
        return self._said.pop(subject, None) is not None

    def is_new(self, subject: str, message: str) -> bool:
        """Remember the message; True if it differs from the one before about this subject."""
        if self._said.get(subject) == message:
            return False
        if len(self._said) >= self._limit:
            self._said.clear()
        self._said[subject] = message
        return True
