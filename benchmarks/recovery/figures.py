"""Figures and verdicts from the entries of the journal. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.recovery.journal import Entry
from benchmarks.report import Figure, at_most, for_orientation, not_measured
from holdfast_core.names import RECOVERY_PHASES

ALLOWED_LOSS = 10
"""Steps between two checkpoints of the measured jobs."""
WHAT = {
    "B1": "rank killed -> next step",
    "B1-oom": "trainer out of memory -> next step",
    "B2": "pod deleted -> next step",
    "B2-apart": "three pods deleted 0.5 s apart -> next step",
    "B3": "node powered off -> next step",
    "B6": "pods of a subset of five workers deleted -> next step",
    "adopted B1": "adopted Job, rank killed -> next step",
    "adopted B2": "adopted Job, pod deleted -> next step",
    "plain B1": "plain Job with torch.save, rank killed -> next step",
    "plain B2": "plain Job with torch.save, pod deleted -> next step",
    "jobset B1": "JobSet with DCP async_save, rank killed -> next step",
    "jobset B2": "JobSet with DCP async_save, pod deleted -> next step",
}
TARGETS: dict[str, tuple[float | None, float]] = {
    "B1": (3.0, 8.0),
    "B2": (10.0, 20.0),
    "B3": (None, 40.0),
}
"""Largest median and largest maximum, in seconds."""


def figures(entries: Sequence[Entry]) -> list[Figure]:
    """Return a figure for each target and each kind of fault. What has no entry is not measured."""
    found: list[Figure] = []
    for case, what in WHAT.items():
        seconds = [e.seconds for e in entries if e.case == case and e.seconds is not None]
        median, maximum = TARGETS.get(case, (None, None))
        if not seconds:
            found.append(not_measured(case, "no repetition yet", unit="seconds", what=what))
            continue
        details = _details(case, what, entries)
        if median is None:
            found.append(for_orientation(case, seconds, "seconds", **details))
        else:
            found.append(at_most(case, seconds, "seconds", median, **details))
        if maximum is not None:
            longest = [max(seconds)]
            found.append(
                at_most(f"{case}-max", longest, "seconds", maximum, what=f"{what}, longest")
            )
    memory = [m for e in entries if (m := e.details.get("operator_mib")) is not None]
    if memory:
        what = "resident memory of the operator after a repetition"
        found.append(at_most("operator-memory", memory, "MiB", 150, what=what))
    return [*found, *_counted(entries)]


def _details(case: str, what: str, entries: Sequence[Entry]) -> dict[str, Any]:
    of_case = [e for e in entries if e.case == case]
    seconds = [e.seconds for e in of_case if e.seconds is not None]
    return {
        "what": what,
        "p99": round(quantile(seconds, 0.99), 3),
        "phases": phases(of_case),
        "rounds": [e.details["rounds"] for e in of_case if "rounds" in e.details],
        "lost_steps": [e.details["lost_steps"] for e in of_case if "lost_steps" in e.details],
        "load": [e.load for e in of_case],
    }


def _counted(entries: Sequence[Entry]) -> list[Figure]:
    """Return the figures that count what went wrong: each target is 0."""
    exact = [e for e in entries if e.case == "B4"]
    subsets = [e for e in entries if e.case == "B6"]
    ours = [e for e in entries if "restored_step" in e.details]
    single = [e for e in ours if e.case in ("B1", "B1-oom", "B2", "B3")]
    apart = [e for e in entries if e.case == "B2-apart"]
    cases = (
        (
            "B4",
            exact,
            [not e.details["identical"] for e in exact],
            "trainings with other final bits",
        ),
        (
            "B6-lost",
            subsets,
            [not e.details["kept"] for e in subsets],
            "subsets that lost more than promised",
        ),
        (
            "B7-steps",
            single,
            [e.details["lost_steps"] > ALLOWED_LOSS for e in single],
            "recoveries that lost more steps than one interval",
        ),
        (
            "B7-committed",
            ours,
            [_below_promise(e) for e in ours],
            "recoveries from below a persisted step",
        ),
        (
            "B2-rounds",
            apart,
            [e.details["rounds"] > 1 for e in apart],
            "losses 0.5 s apart that cost more than one round",
        ),
    )
    found = []
    for id_, of_case, wrong, what in cases:
        if not of_case:
            found.append(
                not_measured(id_, "no repetition yet", unit="of them", target=0, what=what)
            )
            continue
        count = sum(wrong)
        found.append(
            Figure(id_, count, f"of {len(wrong)}", 0, count == 0, len(wrong), {"what": what})
        )
    return found


def _below_promise(entry: Entry) -> bool:
    restored = entry.details["restored_step"]
    return bool((-1 if restored is None else restored) < entry.details["persisted_before"])


def phases(entries: Sequence[Entry]) -> dict[str, float]:
    """Return the median seconds of each phase, by the jobs' status."""
    found = {}
    for phase in RECOVERY_PHASES:
        values = [e.details.get("phases", {}).get(phase) for e in entries]
        known = [v for v in values if v is not None]
        if known:
            found[phase] = round(statistics.median(known), 3)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
