"""The picture of `make bench-scale`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import Figure, at_most, for_orientation
from benchmarks.scale.chart import Bar, bars, draw

FOUND = [
    at_most("C2", [321.3], "s", 60),
    at_most("C2-rounds", [1], "rounds", 0),
    at_most("C3", [18.311], "s", 30),
    for_orientation("creation", [441.0], "s"),
    Figure("C1", None, "s", 60, None, 0),
]


def test_only_measured_figures_with_a_target_have_a_bar() -> None:
    assert bars(FOUND) == [
        Bar(18.311 / 30, "C3", "18.3 of 30 s"),
        Bar(321.3 / 60, "C2", "321 of 60 s"),
    ]


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw(tmp_path / "scale.png", FOUND)
    draw(tmp_path / "none.png", [])
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
