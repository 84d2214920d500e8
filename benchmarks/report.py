"""The format of every benchmark's result: figures, their JSON and their table."""

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
    """One row: a measurement and its target.

    `value` None: not measured, `details["reason"]` says why. `target` None: a figure for orientation. `ok`
    is None in both cases, so that neither counts as passed.
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
        """The comparison, "<=" or ">=", that a value must satisfy to meet the target."""
        return ">=" if self.details.get("bound") == ">=" else "<="


def at_most(id_: str, values: Sequence[float], unit: str, target: float, **details: Any) -> Figure:
    """Return a figure that is met if the median of `values` is at most `target`.

    The details list all values.
    """
    value, details = _summary(values, details)
    return Figure(id_, value, unit, target, value <= target, len(values), details)


def at_least(id_: str, values: Sequence[float], unit: str, target: float, **details: Any) -> Figure:
    """Return a figure that is met if the median of `values` is at least `target`."""
    value, details = _summary(values, {"bound": ">=", **details})
    return Figure(id_, value, unit, target, value >= target, len(values), details)


def for_orientation(id_: str, values: Sequence[float], unit: str, **details: Any) -> Figure:
    """Return a median without a target, such as a limit of the machine or another library's result."""
    value, details = _summary(values, details)
    return Figure(id_, value, unit, None, None, len(values), details)


def not_measured(
    id_: str, reason: str, *, unit: str = "", target: float | None = None, **details: Any
) -> Figure:
    """Return a row without a value, which counts neither as passed nor as missed."""
    return Figure(id_, None, unit, target, None, 0, {"reason": reason, **details})


def _summary(values: Sequence[float], details: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the rounded median and the details.

    The verdict uses the rounded number, so that the table never shows a contradiction such as `0.35 <=
    0.35: NO`.
    """
    details["values"] = [round(v, 3) for v in values]
    details["min"] = round(min(values), 3)
    details["max"] = round(max(values), 3)
    return round(statistics.median(values), 3), details


def merged(old: Iterable[Figure], new: Iterable[Figure]) -> list[Figure]:
    """Replace the old figures that have the id of a new one, and keep the others.

    The result is sorted by id. Numbers in ids are compared as numbers.
    """
    by_id = {figure.id: figure for figure in (*old, *new)}
    return sorted(by_id.values(), key=lambda figure: _order(figure.id))


def _order(id_: str) -> tuple[str, int, str]:
    head = id_.split("-")[0].split(" ")[0]
    letters = head.rstrip("0123456789")
    digits = head[len(letters) :]
    return letters, int(digits or 0), id_


def write(name: str, figures: Sequence[Figure]) -> Path:
    """Write the JSON atomically: a process that is killed meanwhile leaves the earlier file."""
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
    """Read the figures that `write` wrote. Return an empty list if there is no file."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    return [Figure(**row) for row in json.loads(path.read_text())]


def verdict(figure: Figure) -> str:
    """Return "yes", "NO" or "not measured", or "" where there is no target."""
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
