"""The results as a picture: the median of each kind of fault as one bar, divided into phases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.recovery.figures import WHAT
from benchmarks.report import Figure
from holdfast_core.names import RECOVERY_PHASES

_COLOURS = ("#c0392b", "#8a97a6", "#b8860b", "#2c6fbb", "#6b4c9a", "#1b7f5c", "#444444")


def draw(path: Path, found: Sequence[Figure]) -> None:
    """Draw a bar for each kind of fault that was measured, and its longest repetition as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    bars = [f for f in found if f.id in WHAT and f.value is not None]
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.5 * max(1, len(bars))))
    for row, f in enumerate(reversed(bars)):
        value, left = f.value or 0.0, 0.0
        phases = f.details.get("phases") or {}
        # Medians of phases do not add up to the median of the whole.
        scale = value / sum(phases.values()) if sum(phases.values()) else 0.0
        for phase, colour in zip(RECOVERY_PHASES, _COLOURS, strict=True):
            width = phases.get(phase, 0.0) * scale
            axis.barh(row, width, left=left, color=colour, label=phase if row == 0 else None)
            left += width
        if not phases:
            axis.barh(row, value, color="#dddddd")
        axis.plot([f.details["max"]], [row], marker="|", color="black", markersize=12)
    axis.set_yticks(range(len(bars)), [WHAT[f.id] for f in reversed(bars)], fontsize=8)
    axis.set_xlabel("seconds, median; the mark is the longest", fontsize=8)
    handles = [Patch(color=c) for c in _COLOURS]
    axis.legend(handles, RECOVERY_PHASES, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
