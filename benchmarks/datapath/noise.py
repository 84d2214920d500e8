"""How much other load this machine had during a measurement: steal and busy time of /proc/stat."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks since boot, over all cores."""

    total: int
    idle: int
    stolen: int


def parse_stat(text: str) -> CpuTimes:
    """Parse the first line of /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice.

    User time already includes guest time.
    """
    fields = [int(word) for word in text.splitlines()[0].split()[1:]]
    return CpuTimes(sum(fields[:8]), fields[3] + fields[4], fields[7] if len(fields) > 7 else 0)


def shares(before: CpuTimes, after: CpuTimes) -> dict[str, float]:
    """Return shares of all cores' time between two readings, 0 to 1.

    `busy` includes the measured work itself.
    """
    total = max(1, after.total - before.total)
    return {
        "stolen": round((after.stolen - before.stolen) / total, 4),
        "busy": round(1 - (after.idle - before.idle) / total, 4),
    }


def read_times() -> CpuTimes:
    return parse_stat(Path("/proc/stat").read_text())


class Noise:
    """Measures from its construction until `summary`."""

    def __init__(self) -> None:
        self._before = read_times()
        self._load = os.getloadavg()[0]

    def summary(self) -> dict[str, Any]:
        return {
            **shares(self._before, read_times()),
            "load_at_start": round(self._load, 2),
            "load_at_end": round(os.getloadavg()[0], 2),
            "cores": len(os.sched_getaffinity(0)),
        }
