"""The results as one picture. `panels`, a pure function, decides what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Figure

_OURS_COLOUR = "#1b7f5c"
_PEER_COLOUR = "#8a97a6"
_LIMIT_COLOUR = "#c0392b"


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    low: float
    high: float
    ours: bool


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    bars: tuple[Bar, ...]
    limit: float | None = None
    """The limit of this machine, drawn as a line."""


def panels(figures: Sequence[Figure]) -> list[Panel]:
    """Return the panels that have bars. Holdfast's bar is the first, and the others follow, best first."""
    by_id = {figure.id: figure for figure in figures}
    writes = [
        figure.value
        for name in ("1 thread", "2 threads")
        if (figure := by_id.get(f"limit O_DIRECT write {name}")) and figure.value is not None
    ]
    read = by_id.get("limit O_DIRECT read")
    tls = by_id.get("limit loopback TLS")
    found = [
        Panel("A save blocks training", "seconds", _bars(figures, "save "), None),
        Panel(
            "Until durable, fsync included",
            "GiB/s",
            _durable(figures),
            max(writes, default=None),
        ),
        Panel("A save in a training loop", "extra seconds", _bars(figures, "loop ")),
        Panel(
            "Restore from disk",
            "GiB/s",
            _bars(figures, "load ", largest_first=True),
            None if read is None else read.value,
        ),
        Panel("Upload to MinIO", "GiB/s", _bars(figures, "upload ", largest_first=True)),
        Panel(
            "Upload, bytes dropped", "GiB/s", _bars(figures, "drained upload ", largest_first=True)
        ),
        Panel(
            "Copy to another process",
            "GiB/s",
            _bars(figures, "copy ", largest_first=True),
            None if tls is None else tls.value,
        ),
    ]
    return [panel for panel in found if panel.bars]


def _bars(
    figures: Sequence[Figure], prefix: str, *, largest_first: bool = False
) -> tuple[Bar, ...]:
    found = [
        Bar(
            figure.id.removeprefix(prefix),
            figure.value,
            float(figure.details["min"]),
            float(figure.details["max"]),
            figure.id.removeprefix(prefix).startswith("holdfast"),
        )
        for figure in figures
        if figure.id.startswith(prefix) and figure.value is not None
    ]
    return _ordered(found, largest_first)


def _durable(figures: Sequence[Figure]) -> tuple[Bar, ...]:
    found = []
    for figure in figures:
        if figure.id.startswith("save ") and figure.value is not None:
            label = figure.id.removeprefix("save ")
            value = float(figure.details["durable_gib_per_second"])
            found.append(Bar(label, value, value, value, label.startswith("holdfast")))
    return _ordered(found, True)


def _ordered(bars: list[Bar], largest_first: bool) -> tuple[Bar, ...]:
    sign = -1 if largest_first else 1
    return tuple(sorted(bars, key=lambda bar: (not bar.ours, sign * bar.value)))


def draw(path: Path, title: str, figures: Sequence[Figure]) -> bool:
    """Draw the picture. Return False and write no file where there is nothing to draw."""
    chosen = panels(figures)
    if not chosen:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = (len(chosen) + 1) // 2
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 2.6 * rows), squeeze=False)
    for axis in axes.flat[len(chosen) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, chosen, strict=False):
        labels = [bar.label for bar in panel.bars]
        axis.barh(
            labels,
            [bar.value for bar in panel.bars],
            xerr=[
                [max(0.0, bar.value - bar.low) for bar in panel.bars],
                [max(0.0, bar.high - bar.value) for bar in panel.bars],
            ],
            color=[_OURS_COLOUR if bar.ours else _PEER_COLOUR for bar in panel.bars],
            ecolor="#444444",
            error_kw={"elinewidth": 0.8, "capsize": 2},
        )
        axis.invert_yaxis()
        axis.set_title(panel.title, fontsize=10, loc="left")
        axis.set_xlabel(panel.unit, fontsize=8)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if panel.limit is not None:
            axis.axvline(panel.limit, color=_LIMIT_COLOUR, linewidth=1, linestyle="--")
    figure.suptitle(f"{title} (dashed: limit of the machine in the same run)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
