"""The Markdown page and the content of the picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks.datapath.chart import Bar, Panel, draw, panels
from benchmarks.datapath.page import page, verdicts
from benchmarks.report import Figure, at_least, at_most, for_orientation, not_measured

RUN = {
    "part": "save",
    "at": "2026-01-02 03:04 UTC",
    "mib": 64,
    "rounds": 5,
    "torch": "2.15.0",
    "stolen": 0.012,
    "busy": 0.5,
    "load_at_start": 1.0,
    "load_at_end": 2.0,
    "cores": 2,
}


def row(name: str, blocked: float, durable: float) -> Figure:
    return for_orientation(
        f"save {name}",
        [blocked],
        "s blocked",
        first_blocked=0.4,
        durable_gib_per_second=durable,
        cpu_seconds_per_gib=0.3,
    )


FIGURES = [
    at_most("A1", [1.5, 1.7], "times memcpy", 1.6, run=RUN),
    at_least("A2", [0.5], "of disk", 0.85, run=RUN),
    not_measured("A7", "no dedupe yet"),
    row("torch.save", 0.9, 0.7),
    row("holdfast", 1.0, 2.0),
    row("dcp-thread", 0.2, 0.6),
    not_measured("save dlrover", "no module grpc", unit="s blocked"),
    for_orientation("limit O_DIRECT write 1 thread", [2.0], "GiB/s"),
    for_orientation("limit O_DIRECT write 2 threads", [2.5], "GiB/s"),
]


def test_page() -> None:
    lines = page("Data path", FIGURES).splitlines()
    assert (
        "- save: 2026-01-02 03:04 UTC, 64 MiB, 5 rounds, 2 cores, 1.2 % of their time stolen, "
        "50.0 % busy, load 1.0 to 2.0, torch 2.15.0"
    ) in lines
    assert "| A1 | 1.6 | times memcpy | <= 1.6 | yes | 2 | 1.5 | 1.7 |" in lines
    assert "| A2 | 0.5 | of disk | >= 0.85 | NO | 1 | 0.5 | 0.5 |" in lines
    assert "| holdfast | 1.0 | 0.4 | 2.0 | 0.3 |" in lines
    assert "| limit O_DIRECT write 1 thread | 2.0 | GiB/s | 2.0 | 2.0 |" in lines
    assert "- **A7**: no dedupe yet" in lines
    assert "- **save dlrover**: no module grpc" in lines


def test_a_verdict_for_each_target_and_only_for_those() -> None:
    assert verdicts(FIGURES).splitlines() == [
        "A1: reached: 1.6 times memcpy (target <= 1.6)",
        "A2: MISSED: 0.5 of disk (target >= 0.85)",
        "A7: not measured: no dedupe yet",
    ]


def test_ours_comes_first_then_the_best_peer_and_what_failed_has_no_bar() -> None:
    blocked, durable = panels(FIGURES)
    assert blocked == Panel(
        "A save blocks training",
        "seconds",
        (
            Bar("holdfast", 1.0, 1.0, 1.0, True),
            Bar("dcp-thread", 0.2, 0.2, 0.2, False),
            Bar("torch.save", 0.9, 0.9, 0.9, False),
        ),
    )
    assert [(bar.label, bar.value) for bar in durable.bars] == [
        ("holdfast", 2.0),
        ("torch.save", 0.7),
        ("dcp-thread", 0.6),
    ]
    assert durable.limit == 2.5


def test_a_picture_is_drawn_only_where_there_is_something_to_show(tmp_path: Path) -> None:
    assert not draw(tmp_path / "none.png", "Data path", [not_measured("A7", "no dedupe yet")])
    assert draw(tmp_path / "some.png", "Data path", FIGURES)
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["some.png"]
