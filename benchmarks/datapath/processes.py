"""CPU time of a process with all that it started: a checkpoint that is written by a child costs too."""

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
    """Own user and system time, and that of children which were waited for."""


def parse_process(text: str) -> ProcessTimes:
    """One /proc/<pid>/stat. The name may hold spaces and brackets: it ends at the last one."""
    pid, _, rest = text.partition(" (")
    name, _, tail = rest.rpartition(") ")
    fields = tail.split()
    return ProcessTimes(int(pid), int(fields[1]), name, sum(int(f) for f in fields[11:15]))


def tree(processes: Iterable[ProcessTimes], root: int) -> list[ProcessTimes]:
    """`root` and everything below it."""
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
    """Of this process, or of `root`, and all below it; to the tick (10 ms)."""
    wanted = os.getpid() if root is None else root
    return sum(p.ticks for p in tree(_all(), wanted)) / _TICKS_PER_SECOND


def child_named(name: str, root: int) -> int | None:
    """A process below `root`."""
    return next((p.pid for p in tree(_all(), root) if p.name == name), None)


def _all() -> list[ProcessTimes]:
    found: list[ProcessTimes] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append(parse_process((entry / "stat").read_text()))
            except OSError:
                continue  # it ended in between
    return found
