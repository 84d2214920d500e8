"""The one shape of every benchmark's result, its JSON and its table."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).resolve().parent / "results"

Bound = Literal["<=", ">="]


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: what was measured, against what it was to reach.

    `value` None: not measured, `details["reason"]` says why. `target` None: a figure for
    orientation; `ok` is None for both, so that neither is taken for a pass.
    """

    id: str
    value: float | None
    unit: str
    target: float | None
    ok: bool | None
    repetitions: int
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def bound(self) -> Bound:
        """Which side of the target is good."""
        return ">=" if self.details.get("bound") == ">=" else "<="


def at_most(id_: str, values: Sequence[float], unit: str, target: float, **details: Any) -> Figure:
    """The median of `values` must not exceed `target`; all values go into the details."""
    value, details = _summary(values, details)
    return Figure(id_, value, unit, target, value <= target, len(values), details)


def at_least(id_: str, values: Sequence[float], unit: str, target: float, **details: Any) -> Figure:
    """The median of `values` must reach `target`."""
    value, details = _summary(values, {"bound": ">=", **details})
    return Figure(id_, value, unit, target, value >= target, len(values), details)


def for_orientation(id_: str, values: Sequence[float], unit: str, **details: Any) -> Figure:
    """A median without a target: a limit of the machine, a peer."""
    value, details = _summary(values, details)
    return Figure(id_, value, unit, None, None, len(values), details)


def not_measured(
    id_: str, reason: str, *, unit: str = "", target: float | None = None, **details: Any
) -> Figure:
    """A row without a value: neither passed nor missed."""
    return Figure(id_, None, unit, target, None, 0, {"reason": reason, **details})


def _summary(values: Sequence[float], details: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """The median as it is shown; the verdict is about the shown number, so that nobody reads
    `0.35 <= 0.35: NO`."""
    details["values"] = [round(v, 3) for v in values]
    details["min"] = round(min(values), 3)
    details["max"] = round(max(values), 3)
    return round(statistics.median(values), 3), details


def merged(old: Iterable[Figure], new: Iterable[Figure]) -> list[Figure]:
    """New figures replace those of the same id; the rest of an earlier run stays. In order of id,
    numbers by size."""
    by_id = {figure.id: figure for figure in (*old, *new)}
    return sorted(by_id.values(), key=lambda figure: _order(figure.id))


def _order(id_: str) -> tuple[str, int, str]:
    head = id_.split("-")[0].split(" ")[0]
    letters = head.rstrip("0123456789")
    digits = head[len(letters) :]
    return letters, int(digits or 0), id_


def write(name: str, figures: Sequence[Figure]) -> Path:
    """Seen whole or not at all: a run that is ended here keeps the earlier file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(json.dumps([asdict(f) for f in figures], indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def read(name: str) -> list[Figure]:
    """What `write` wrote; empty where there is nothing yet."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    return [Figure(**row) for row in json.loads(path.read_text())]


def verdict(figure: Figure) -> str:
    """yes, NO, "not measured", or nothing where there is no target."""
    if figure.value is None:
        return "not measured"
    if figure.ok is None:
        return ""
    return "yes" if figure.ok else "NO"


def table(figures: Sequence[Figure]) -> str:
    rows = [
        "| id | value | unit | target | ok | repetitions | min | max |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {f.id} | {'' if f.value is None else f.value} | {f.unit} "
        f"| {'' if f.target is None else f'{f.bound} {f.target}'} | {verdict(f)} "
        f"| {f.repetitions} | {f.details.get('min', '')} | {f.details.get('max', '')} |"
        for f in figures
    ]
    return "\n".join(rows)
