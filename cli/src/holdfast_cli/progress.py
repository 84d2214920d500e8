"""Shows how far a long read or write is, and what a verb waits for.

A read or write has a bar with rate and estimate on a terminal, else a line at times.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast_cli.output import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""
NO_OPERATOR = "the operator; `kubectl holdfast doctor` says whether one runs"
QUIET_SECONDS = 5.0
"""Time after which a verb says what it waits for, if it usually waits for less."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Waiting:
    """Says what a verb waits for, whenever that is another thing than before.

    Args:
        quiet_seconds: A wait that is not longer than this is not mentioned.
    """

    def __init__(
        self, quiet_seconds: float = QUIET_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet_seconds, self._now = quiet_seconds, now
        self._what, self._since, self._is_said = "", 0.0, False

    def on(self, what: str) -> None:
        """Note at each look what the verb waits for."""
        if what != self._what:
            self._what, self._since, self._is_said = what, self._now(), False
        if not self._is_said and self._now() - self._since >= self._quiet_seconds:
            self._is_said = True
            say(what)


class ByteProgress:
    """Progress of one read or write. Several threads may call `advance`."""

    def __init__(self, what: str, now: Callable[[], float] = time.monotonic) -> None:
        self._what, self._now = what, now
        self._lock = threading.Lock()
        self._done, self._started, self._said = 0, 0.0, 0.0
        self._total: int | None = None
        self._bars: tuple[Bars, TaskID] | None = None

    def __enter__(self) -> Self:
        self._started = self._said = self._now()
        if sys.stderr.isatty():
            self._bars = _bars(self._what)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars[0].stop()

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Count further bytes. `total_bytes` is the number of all, as far as it is known."""
        with self._lock:
            self._done += done_bytes
            self._total = self._total if total_bytes is None else total_bytes
            if self._bars is not None:
                bars, task = self._bars
                bars.update(task, completed=self._done, total=self._total)
                return
            now = self._now()
            if now - self._said < LINE_SECONDS:
                return
            self._said = now
            say(progress_line(self._what, self._done, self._total, now - self._started))


def progress_line(what: str, done: int, total: int | None, seconds: float) -> str:
    """Return one line: how much is done, the rate, and the time that is left."""
    rate = done / max(seconds, 1e-9)
    if total is None:
        return f"{what}: {bytes_text(done)}, {bytes_text(rate)}/s"
    left = "" if rate <= 0 else f", {(total - done) / rate:.0f} s left"
    return f"{what}: {done / max(total, 1):.0%} of {bytes_text(total)}, {bytes_text(rate)}/s{left}"


def bytes_text(number: float) -> str:
    """Return a number of bytes in the largest unit of which it is at least one."""
    for unit in _UNITS[:-1]:
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} {_UNITS[-1]}"


def _bars(what: str) -> tuple[Bars, TaskID]:
    # Only here, because most commands end before a bar would be of use.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bars.start()
    return bars, bars.add_task(what, total=None)
