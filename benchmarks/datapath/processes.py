"""CPU time of a process and its descendants, because a child process may write the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    pid: int
    parent: int
    name: str
    ticks: int
    """User and system time of the process itself, and of children that it has waited for."""


def parse_process(text: str) -> ProcessTimes:
    """Parse one /proc/<pid>/stat.

    The name may contain spaces and brackets, so it ends at the last bracket.
    """
    pid, _, rest = text.partition(" (")
    name, _, tail = rest.rpartition(") ")
    fields = tail.split()
    return ProcessTimes(int(pid), int(fields[1]), name, sum(int(f) for f in fields[11:15]))


def tree(processes: Iterable[ProcessTimes], root: int) -> list[ProcessTimes]:
    """Return `root` and all its descendants."""
    by_parent: dict[int, list[ProcessTimes]] = {}
    found: list[ProcessTimes] = []
    for process in processes:
        by_parent.setdefault(process.parent, []).append(process)
        if process.pid == root:
            found.append(process)
    position = 0
    while position < len(found):
        found += by_parent.get(found[position].pid, [])
        position += 1
    return found


def cpu_seconds(root: int | None = None) -> float:
    """Return the CPU seconds of this process, or of `root`, and all descendants, in steps of 10 ms."""
    wanted = os.getpid() if root is None else root
    return sum(p.ticks for p in tree(_all(), wanted)) / _TICKS_PER_SECOND


def child_named(name: str, root: int) -> int | None:
    """Return a descendant of `root` with this name."""
    return next((p.pid for p in tree(_all(), root) if p.name == name), None)


def _all() -> list[ProcessTimes]:
    found: list[ProcessTimes] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append(parse_process((entry / "stat").read_text()))
            except OSError:
                continue  # the process ended meanwhile
    return found
