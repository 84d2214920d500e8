"""The one shape of every benchmark's result, its JSON and its table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: what was measured, against what it was to reach."""

    id: str
    value: float
    unit: str
    target: float
    ok: bool
    repetitions: int
    details: dict[str, Any] = field(default_factory=dict)


def at_most(id_: str, values: Sequence[float], unit: str, target: float, **details: Any) -> Figure:
    """The median of `values` must not exceed `target`; all values go into the details."""
    value = statistics.median(values)
    details["values"] = [round(v, 3) for v in values]
    details["max"] = round(max(values), 3)
    return Figure(id_, round(value, 3), unit, target, value <= target, len(values), details)


def write(name: str, figures: Sequence[Figure]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps([asdict(f) for f in figures], indent=1) + "\n")
    return path


def table(figures: Sequence[Figure]) -> str:
    rows = [
        "| id | value | unit | target | ok | repetitions | max |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {f.id} | {f.value} | {f.unit} | <= {f.target} | {'yes' if f.ok else 'NO'} "
        f"| {f.repetitions} | {f.details.get('max', '')} |"
        for f in figures
    ]
    return "\n".join(rows)
