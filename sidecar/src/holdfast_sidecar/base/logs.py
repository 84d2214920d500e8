"""JSON logs on standard error: one object a line, with the fixed fields of the process and those of the call.

`Changed` logs a message about a subject only when it differs from the one before, so that a condition
that lasts is logged once.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.net.bounded_logs import BoundedLogs, JsonFormatter

LOGGER = logging.getLogger("holdfast_sidecar")
_RATE_LIMIT_SECONDS = 60.0
_WARNINGS = 20
"""Lines per minute of one warning or error. A trainer may cause any number, with requests that fail."""
_ERROR_CHARACTERS = 1000


def configure(clock: Clock | None = None, **fixed: Any) -> None:
    """Route all logs of this process through one handler, and add the `fixed` fields to every line."""
    clock = clock or SystemClock()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(clock, lambda record: fixed))
    handler.addFilter(BoundedLogs(LOGGER.name, clock, own_warnings=_WARNINGS))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()


def info(message: str, **fields: Any) -> None:
    LOGGER.info(message, extra={"fields": fields})


def warning(message: str, **fields: Any) -> None:
    LOGGER.warning(message, extra={"fields": fields})


def failure(message: str, error: BaseException, **fields: Any) -> None:
    """Log an error with its traceback, where nothing else reports it. A repeated one has no traceback."""
    fields["error"] = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    LOGGER.error(message, exc_info=error, extra={"fields": fields})


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


class Changed:
    """Log that omits a message if it is the same as the last one about its subject."""

    def __init__(self) -> None:
        self._last_messages: dict[str, str] = {}

    def log(self, subject: str, message: str, *, as_info: bool = False, **fields: Any) -> None:
        """Log the message, unless it is the last one about `subject`.

        Args:
            as_info: Log at level info instead of warning.
        """
        if self._last_messages.get(subject) == message:
            return
        if len(self._last_messages) > 1000:
            self._last_messages.clear()
        self._last_messages[subject] = message
        (info if as_info else warning)(message, subject=subject, **fields)

    def healthy(self, subject: str) -> None:
        """Log that the subject is healthy again, if a message about it was logged."""
        if self._last_messages.pop(subject, None) is not None:
            info("healthy again", subject=subject)
