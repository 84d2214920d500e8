"""Rows and verdicts from what was counted. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Figure, at_least, at_most, for_orientation

STEADY = "steady commit"
_LARGEST = 4096
_REPLACED = 256


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of one gang. Phases of the same name are repetitions."""

    workers: int
    name: str
    wall_seconds: float
    coordinator: Mapping[str, Any]
    """Counters of its process (benchmarks/ranks/watched.py)."""
    member: Mapping[str, Any]
    """Those of the other real sidecar."""
    details: Mapping[str, Any] = field(default_factory=dict)


def rows(phases: Iterable[Phase]) -> list[Figure]:
    """Return a row for each phase and number of workers. The value is the coordinator's CPU."""
    groups: dict[tuple[int, str], list[Phase]] = {}
    for phase in phases:
        groups.setdefault((phase.workers, phase.name), []).append(phase)
    return [_row(workers, name, found) for (workers, name), found in groups.items()]


def _row(workers: int, name: str, phases: Sequence[Phase]) -> Figure:
    counters = [p.coordinator for p in phases]
    longest: dict[str, float] = {}
    most: dict[str, float] = {}
    for taken in counters:
        for source, target in (("longest_ms", longest), ("most_ms", most)):
            for callback, value in taken[source].items():
                target[callback] = max(value, target.get(callback, 0.0))
    return for_orientation(
        f"{name}, {workers} workers",
        [c["cpu_seconds"] for c in counters],
        "coordinator CPU s",
        phase=name,
        workers=workers,
        wall_seconds=_median(p.wall_seconds for p in phases),
        sent_bytes=_median(c["sent_bytes"] for c in counters),
        received_bytes=_median(c["received_bytes"] for c in counters),
        peak_mib=round(max(c["peak_mib"] for c in counters), 1),
        callbacks=sum(c["callbacks"] for c in counters),
        above_5_ms=sum(c["above_5_ms"] for c in counters),
        above_50_ms=sum(c["above_50_ms"] for c in counters),
        longest_ms=longest,
        most_ms=most,
        member_cpu_seconds=_median(p.member["cpu_seconds"] for p in phases),
        member_peak_mib=round(max(p.member["peak_mib"] for p in phases), 1),
        **{key: _median(p.details[key] for p in phases) for key in phases[0].details},
    )


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line of least squares through the logarithms of the points."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    centre_x = statistics.fmean(x for x, _ in logs)
    centre_y = statistics.fmean(y for _, y in logs)
    above = sum((x - centre_x) * (y - centre_y) for x, y in logs)
    return above / sum((x - centre_x) ** 2 for x, _ in logs)


def curve(found: Iterable[Figure], phase: str, key: str | None = None) -> list[tuple[float, float]]:
    """Return (workers, value) of a phase, by growing workers.

    Args:
        found: Rows of `rows`.
        phase: Name of the phase.
        key: A detail of the rows. None means the row's value, CPU seconds.
    """
    return sorted(
        (float(f.details["workers"]), float(f.value if key is None else f.details[key]))
        for f in found
        if f.details.get("phase") == phase and f.value is not None
    )


def verdicts(found: Sequence[Figure]) -> list[Figure]:
    """Return the rows of the targets L2, L4, L6 and L8 (those that these rows suffice for)."""
    result: list[Figure] = []
    points = curve(found, STEADY)
    if len(points) > 1:
        what = "slope of the coordinator's CPU for a steady commit, log-log"
        result.append(at_most("L4", [slope(points)], "", 1.1, what=what, points=points))
    by_size = {f.details["workers"]: f for f in found if f.details.get("phase") == STEADY}
    largest = by_size.get(_LARGEST)
    if largest is not None and largest.value is not None:
        details = largest.details
        result += [
            at_most("L2-wall", [details["wall_seconds"]], "s", 5),
            at_most("L2-cpu", [largest.value], "s", 2),
            at_most("L2-memory", [details["peak_mib"]], "MiB", 512),
        ]
    model = {f.details["phase"]: f for f in found if f.details["workers"] == _REPLACED}
    for id_, phase, target in (
        ("L1-first", "llama-70b: first commit", 5),
        ("L1-steady", f"llama-70b: {STEADY}", 0.5),
    ):
        row = model.get(phase)
        if row is not None and row.value is not None:
            result.append(at_most(id_, [row.value], "s", target))
            if phase.endswith(STEADY):
                result.append(at_most("L1-memory", [row.details["peak_mib"]], "MiB", 256))
    fetched = [
        f
        for f in found
        if f.details.get("phase") == "manifest and layout" and f.details["workers"] == _REPLACED
    ]
    result += [at_most("L6", [f.details["wall_seconds"]], "s", 1) for f in fetched]
    callbacks = sum(f.details.get("callbacks", 0) for f in found)
    if callbacks:
        short = 1 - sum(f.details.get("above_5_ms", 0) for f in found) / callbacks
        longest = max(
            (ms for f in found for ms in f.details.get("longest_ms", {}).values()), default=0.0
        )
        result += [
            at_least("L8", [100 * short], "% of callbacks within 5 ms", 99.9),
            at_most("L8-longest", [longest], "ms", 50),
        ]
    return result
