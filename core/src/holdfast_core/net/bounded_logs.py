"""Limit on the log lines that libraries write because of input from unauthenticated callers."""

from __future__ import annotations

import logging
from collections import Counter

from holdfast_core.clock import Clock, SystemClock

_LINES = 5
"""Log lines per minute of one message of a library."""
_SUBJECTS = 100
"""Different messages per minute, over all libraries. Further messages are dropped."""


class BoundedLogs(logging.Filter):
    """Log filter that passes all lines of one logger and a few lines a minute of each message of others.

    Without it an unauthenticated caller could fill the log: aiohttp writes a traceback for each request that
    is not HTTP. A container whose log fills its node's disk is evicted.
    """

    def __init__(self, own: str, clock: Clock | None = None) -> None:
        """Pass all lines of the logger `own`, and a few a minute of each message of the others.

        Args:
            own: Name of this program's logger, which limits its own lines.
        """
        super().__init__()
        self._own = own
        self._clock = clock or SystemClock()
        self._minute = 0
        self._seen: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == self._own:
            return True
        minute = int(self._clock.monotonic() // 60.0)
        if minute != self._minute:
            self._minute = minute
            self._seen.clear()
        subject = (record.name, str(record.msg)[:200])
        if subject not in self._seen and len(self._seen) >= _SUBJECTS:
            return False
        self._seen[subject] += 1
        return self._seen[subject] <= _LINES
