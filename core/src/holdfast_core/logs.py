"""JSON logs of sidecar and operator on standard error: one object a line. Callers must not pass secrets.

Four rules keep a log short. `Changed` writes a message about a subject only when it differs from the one
before, so that a condition that lasts is logged once. `RateLimited` writes a line a minute. `BoundedLogs`
limits the lines of libraries, and the traceback of an error that repeats. Libraries log warnings and errors
only.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from typing import Any

from holdfast_core.clock import Clock, SystemClock, stamp

LOGGER = logging.getLogger("holdfast")
_OWN = (LOGGER.name, "holdfast_core")
"""Loggers whose level is configured."""
_LINES = 5
"""Log lines per minute of one message of a library."""
_SUBJECTS = 100
"""Different messages per minute, over all libraries and of the program itself. Further ones are dropped."""
_RATE_LIMIT_SECONDS = 60.0
_ERROR_CHARACTERS = 1000
_REMEMBERED = 10_000
"""Subjects of which a `Changed` knows the last message. A full record is cleared."""


def configure(
    level: str = "INFO",
    clock: Clock | None = None,
    *,
    own_warnings: int | None = None,
    **fixed: Any,
) -> None:
    """Route all logs of this process through one handler on standard error.

    Args:
        level: Level of the program's own lines.
        clock: Source of the time stamps and of the minutes.
        own_warnings: Lines per minute of one warning or error of the program. None: any number.
        fixed: Fields of every line.
    """
    clock = clock or SystemClock()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(clock, fixed))
    handler.addFilter(BoundedLogs(clock, own_warnings))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _OWN:
        logging.getLogger(name).setLevel(level.upper())


def flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()


def info(message: str, **fields: Any) -> None:
    LOGGER.info(message, extra={"fields": fields})


def warning(message: str, **fields: Any) -> None:
    LOGGER.warning(message, extra={"fields": fields})


def failure(message: str, error: BaseException, **fields: Any) -> None:
    """Log an error with its traceback, where nothing else reports it."""
    fields["error"] = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    LOGGER.error(message, exc_info=error, extra={"fields": fields})


class Changed:
    """Logger that writes a message about a subject only if it differs from the last one."""

    def __init__(self) -> None:
        self._last_messages: dict[str, str] = {}

    def info(self, subject: str, message: str, **fields: Any) -> None:
        if self.is_new(subject, message):
            info(message, subject=subject, **fields)

    def warning(self, subject: str, message: str, **fields: Any) -> None:
        if self.is_new(subject, message):
            warning(message, subject=subject, **fields)

    def warning_once(self, subject: str, message: str, **fields: Any) -> None:
        """Log a warning, unless a message about the subject was logged since the last `forget`."""
        if subject not in self._last_messages:
            self.warning(subject, message, **fields)

    def healthy(self, subject: str) -> None:
        """Log that the subject is healthy again, if a message about it was logged."""
        if self.forget(subject):
            info("healthy again", subject=subject)

    def forget(self, subject: str) -> bool:
        """Drop the record of a subject. Return whether a message about it had been logged."""
        return self._last_messages.pop(subject, None) is not None

    def is_new(self, subject: str, message: str) -> bool:
        """Record the message and return whether it differs from the last one about this subject."""
        if self._last_messages.get(subject) == message:
            return False
        if len(self._last_messages) >= _REMEMBERED:
            self._last_messages.clear()
        self._last_messages[subject] = message
        return True


class RateLimited:
    """Log with a limit for events that unauthenticated callers can cause: one line a minute for each subject.

    The field `occurred` counts the events since the line before.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._occurred: dict[str, int] = {}
        self._next: dict[str, float] = {}

    def warning(self, subject: str, message: str, **fields: Any) -> None:
        self._occurred[subject] = self._occurred.get(subject, 0) + 1
        now = self._clock.monotonic()
        if now >= self._next.get(subject, now):
            self._next[subject] = now + _RATE_LIMIT_SECONDS
            warning(message, occurred=self._occurred.pop(subject), **fields)


class JsonFormatter(logging.Formatter):
    """Formatter that writes each record as one JSON object."""

    def __init__(self, clock: Clock, fixed: dict[str, Any]) -> None:
        super().__init__()
        self._clock = clock
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": stamp(self._clock.utc_now()),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
            **self._fixed,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class BoundedLogs(logging.Filter):
    """Log filter that passes a few lines a minute of each message, and one traceback of each kind of error.

    Without it others could fill the log: aiohttp writes a traceback for each request that is not HTTP, and a
    trainer may repeat a request that fails at any rate. A container whose log fills its node's disk is
    evicted. The next line that passes has the number of lines before it that were dropped as `left_out`.
    """

    def __init__(self, clock: Clock, own_warnings: int | None) -> None:
        """Limit the lines of libraries, and the program's own warnings if a limit is given.

        Args:
            clock: Measures the minutes.
            own_warnings: See `configure`.
        """
        super().__init__()
        self._own_warnings = own_warnings
        self._clock = clock
        self._minute = 0
        self._lines: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
        """Lines of this minute of each message, of the program itself and of libraries."""
        self._errors: set[tuple[str, str, object]] = set()
        """Messages and types of errors whose tracebacks were logged in this minute."""
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._is_within_limits(record):
            self._left_out += 1
            return False
        if self._left_out:
            record.fields = {**getattr(record, "fields", {}), "left_out": self._left_out}
            self._left_out = 0
        return True

    def _is_within_limits(self, record: logging.LogRecord) -> bool:
        own = record.name == LOGGER.name
        limit = _LINES
        if own:
            if self._own_warnings is None or record.levelno < logging.WARNING:
                return True
            limit = self._own_warnings
        minute = int(self._clock.monotonic() // 60.0)
        if minute != self._minute:
            self._minute = minute
            for lines in self._lines.values():
                lines.clear()
            self._errors.clear()
        subject, lines = (record.name, str(record.msg)[:200]), self._lines[own]
        if subject not in lines and len(lines) >= _SUBJECTS:
            return False
        lines[subject] += 1
        if record.exc_info:
            error = (*subject, record.exc_info[0])
            if error in self._errors:
                record.exc_info = record.exc_text = None
            self._errors.add(error)
        return lines[subject] <= limit
