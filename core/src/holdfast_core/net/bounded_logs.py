"""JSON logs, and a limit on the lines that input from others causes.

The others are unauthenticated callers and the trainer.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from holdfast_core.clock import Clock, SystemClock, stamp

_LINES = 5
"""Log lines per minute of one message of a library."""
_SUBJECTS = 100
"""Different messages per minute, over all libraries and of the program itself. Further ones are dropped."""


class JsonFormatter(logging.Formatter):
    """Formatter that writes each record as one JSON object."""

    def __init__(
        self, clock: Clock, further: Callable[[logging.LogRecord], dict[str, Any]]
    ) -> None:
        """Create the formatter. `further` returns the fields of the process for a record."""
        super().__init__()
        self._clock = clock
        self._further = further

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": stamp(self._clock.utc_now()),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **self._further(record),
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

    def __init__(
        self, own: str, clock: Clock | None = None, *, own_warnings: int | None = None
    ) -> None:
        """Limit the lines of all loggers but `own`, and the warnings and errors of `own` if a limit is given.

        Args:
            own: Name of this program's logger.
            own_warnings: Lines per minute of one warning or error of `own`. None: any number.
        """
        super().__init__()
        self._own = own
        self._own_warnings = own_warnings
        self._clock = clock or SystemClock()
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
        own = record.name == self._own
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
