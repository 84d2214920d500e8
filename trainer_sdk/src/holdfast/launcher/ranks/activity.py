"""Measure by /proc whether a process is at work, whatever its main thread shows (ADR 0014).

A loop of one line, a long call into C, a program that the rank has started and a download do not move the
innermost Python frame. They use a processor, read or write, or are woken again and again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUSY_SECONDS = 0.03
"""Processor time between two samples from which on a process is at work. Threads that only renew a connection
use less in two seconds."""
BUSY_BYTES = 16 * 1024
"""Bytes read or written between two samples from which on a process is at work."""
BUSY_WAKES = 20
"""Wakes of the main thread between two samples from which on it is at work. Each request for a stack costs
a few."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MOST_PROCESSES = 256
"""Number of children, with theirs, that are measured at most."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process and its children have used since they began. Of children that have ended, too."""

    cpu_seconds: float
    read_and_written_bytes: int
    wakes: int
    """How often the main thread of the process has left a processor."""
    runs: bool
    """Whether the main thread, or that of a child, runs or is ready to run now."""


def measure(pid: int) -> Activity:
    """Return the sums of the process and its children. What cannot be read counts as nothing."""
    cpu, bytes_, runs = 0.0, 0, False
    for number in _with_children(pid):
        folder = Path(f"/proc/{number}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The second field is a name in parentheses, which may contain spaces.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            runs = runs or fields[0] == "R"
            cpu += sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
        with contextlib.suppress(OSError, ValueError):
            known = dict(_lines(folder / "io"))
            bytes_ += int(known.get("rchar", 0)) + int(known.get("wchar", 0))
    wakes = 0
    with contextlib.suppress(OSError, ValueError):
        known = dict(_lines(Path(f"/proc/{pid}/status")))
        for kind in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"):
            wakes += int(known.get(kind, 0))
    return Activity(cpu, bytes_, wakes, runs)


def is_at_work(before: Activity, after: Activity, own_bytes: int) -> bool:
    """Return whether a process was at work between two measurements some seconds apart.

    Args:
        own_bytes: Bytes that the process has written because the launcher asked for its stack.
    """
    moved = after.read_and_written_bytes - before.read_and_written_bytes - own_bytes
    return (
        after.cpu_seconds - before.cpu_seconds >= BUSY_SECONDS
        or moved >= BUSY_BYTES
        or after.wakes - before.wakes >= BUSY_WAKES
        or (before.runs and after.runs)
    )


def _with_children(pid: int) -> Iterator[int]:
    waiting, seen = [pid], 0
    while waiting and seen < _MOST_PROCESSES:
        number = waiting.pop()
        seen += 1
        yield number
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{number}/task").iterdir():
                waiting.extend(map(int, (task / "children").read_text().split()))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, found, value = line.partition(":")
        if found:
            yield name, value.strip()
