"""The results as a log-log picture with the slope of each line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.ranks.figures import curve, slope
from benchmarks.report import Figure

_COLOURS = ("#1b7f5c", "#c0392b", "#2c6fbb", "#8a97a6", "#b8860b", "#6b4c9a", "#444444", "#d98cb3")


def draw(path: Path, found: Sequence[Figure]) -> None:
    """Draw CPU and bytes of every phase over the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({str(f.details["phase"]) for f in found if "phase" in f.details})
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.6))
    for axis, key, title in (
        (axes[0], None, "CPU seconds of the coordinator"),
        (axes[1], "sent_bytes", "bytes that the coordinator sends"),
    ):
        for name, colour in zip(names, _COLOURS * 2, strict=False):
            points = [(x, y) for x, y in curve(found, name, key) if y > 0]
            if len(points) < 2:
                continue
            label = f"{name}: slope {slope(points):.2f}"
            axis.loglog(*zip(*points, strict=True), marker="o", color=colour, label=label)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("workers", fontsize=8)
        axis.legend(fontsize=7)
        axis.grid(which="major", color="#dddddd", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
