"""The results as a picture: each figure as a share of its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Figure

_MET, _MISSED = "#1b7f5c", "#c0392b"


@dataclass(frozen=True, slots=True)
class Bar:
    share: float
    """Measured value divided by its target. Up to 1 the target is met."""
    name: str
    text: str


def bars(found: Sequence[Figure]) -> list[Bar]:
    """Return a bar for each figure that was measured and has a target above 0, the largest share last. Pure.

    Figures whose target is 0 are counts of errors, and the table shows them.
    """
    shown = [
        Bar(f.value / f.target, f.id, f"{f.value:.3g} of {f.target:g} {f.unit}")
        for f in found
        if f.value is not None and f.target
    ]
    return sorted(shown, key=lambda bar: bar.share)


def draw(path: Path, found: Sequence[Figure]) -> None:
    """Draw the bars on a logarithmic axis. The line at 1 is the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = bars(found)
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.3 * len(shown)))
    for row, bar in enumerate(shown):
        axis.barh(row, bar.share, color=_MET if bar.share <= 1 else _MISSED)
        axis.annotate(
            bar.text,
            (max(bar.share, 1.0), row),  # to the right of the line
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axis.set_xscale("log")
    axis.set_xlim(0.05, 4 * max([1.0, *(bar.share for bar in shown)]))
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(shown)), [bar.name for bar in shown], fontsize=8)
    axis.set_xlabel(
        "share of the target; 1,000 jobs of 10 workers unless another size is named", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
