"""A plot of the run: loss over time, with the failures and recoveries marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from demo.recorder import Recorder

FAILURE = "#c0392b"
RECOVERY = "#f5b7b1"
LOSS = "#1f5fa8"
PHASES = ("#c0392b", "#7f8c8d", "#e67e22", "#f1c40f", "#27ae60", "#2980b9", "#8e44ad")
LEVELS = {"committed": "#27ae60", "persisted": "#8e44ad"}


def draw(recorder: Recorder, path: Path, *, title: str, verdict: str) -> None:
    """Write the plot as PNG.

    The upper panel shows the loss against seconds; the middle one the steps that were trained, committed
    and persisted; the lower one the phases of each recovery.
    """
    figure, (top, bottom, phases) = plt.subplots(
        3, 1, figsize=(11, 8.2), height_ratios=(3, 2, 1.6), layout="constrained"
    )
    bottom.sharex(top)
    points = recorder.losses()
    for segment in _segments(points):
        top.plot([p[0] for p in segment], [p[2] for p in segment], color=LOSS, linewidth=1.4)
    top.set_ylabel("loss")
    top.grid(alpha=0.25)

    steps = [(s.at_seconds, s.step) for s in recorder.samples if s.step is not None]
    bottom.plot([p[0] for p in steps], [p[1] for p in steps], color=LOSS, label="step", linewidth=1)
    for name, color in LEVELS.items():
        known = [(s.at_seconds, getattr(s, name)) for s in recorder.samples]
        shown = [(at, value) for at, value in known if value is not None]
        bottom.step(
            [p[0] for p in shown], [p[1] for p in shown], where="post", color=color, label=name
        )
    bottom.set_ylabel("step")
    bottom.set_xlabel("seconds")
    bottom.grid(alpha=0.25)

    for number, act in enumerate(recorder.acts):
        end = act.ended_seconds
        source = act.source if act.recovery is None else act.recovery.served_by or act.source
        for axis in (top, bottom):
            axis.axvspan(act.began_seconds, end, color=RECOVERY, alpha=0.6, linewidth=0)
            axis.axvline(act.began_seconds, color=FAILURE, linewidth=1)
        top.annotate(
            f"{act.title}\n{end - act.began_seconds:.1f} s, from {source}",
            xy=(act.began_seconds, 0.98 - 0.12 * (number % 3)),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=FAILURE,
            bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1},
        )
    bottom.legend(loc="lower right", fontsize=8)
    _draw_phases(phases, recorder)
    figure.suptitle(f"{title}\n{verdict}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_phases(axis: Any, recorder: Recorder) -> None:
    """Draw one bar for each failure, divided into the phases of its recovery."""
    names = list(dict.fromkeys(name for act in recorder.acts for name in act.phases()))
    for row, act in enumerate(recorder.acts):
        passed = 0.0
        for name, seconds in act.phases().items():
            color = PHASES[names.index(name) % len(PHASES)]
            axis.barh(row, seconds, left=passed, color=color, height=0.7)
            passed += seconds
        axis.text(passed, row, f" {passed:.1f} s", va="center", fontsize=8)
    for index, name in enumerate(names):
        axis.barh(0, 0, color=PHASES[index % len(PHASES)], label=name)
    axis.set_yticks(range(len(recorder.acts)), [act.title for act in recorder.acts], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a recovery")
    axis.margins(x=0.12)
    if names:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)


def _segments(points: list[tuple[float, int, float]]) -> list[list[tuple[float, int, float]]]:
    """Split the points where training returned to a restored step."""
    segments: list[list[tuple[float, int, float]]] = []
    for point in points:
        if not segments or point[1] < segments[-1][-1][1]:
            segments.append([])
        segments[-1].append(point)
    return segments
