"""The journal of the benchmark of recoveries, and the figures that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.recovery.figures import figures, quantile
from benchmarks.recovery.journal import Entry, Journal
from benchmarks.recovery.page import page


def entry(case: str, repetition: int, seconds: float | None = 2.0, **details: Any) -> Entry:
    known = {
        "rounds": 1,
        "lost_steps": 4,
        "restored_step": 40,
        "persisted_before": 40,
        "phases": {"detect": 0.5, "first_step": 1.0},
    }
    return Entry(case, repetition, seconds, 1.5, {**known, **details})


def test_an_interrupted_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "64 MiB")
    journal.append(entry("B1", 0))
    journal.append(entry("B1", 2))
    assert Journal(tmp_path / "journal", "64 MiB").missing("B1", 4) == [1, 3]
    assert journal.missing("B2", 2) == [0, 1]
    assert journal.entries() == [entry("B1", 0), entry("B1", 2)]


def test_a_line_that_a_kill_cut_off_is_measured_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "64 MiB")
    journal.append(entry("B1", 0))
    journal.append(entry("B1", 1))
    whole = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(whole[:-20])
    assert journal.missing("B1", 2) == [1]
    journal.append(entry("B1", 1))
    assert journal.missing("B1", 2) == []


def test_entries_of_another_setting_do_not_count(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", "64 MiB").append(entry("B1", 0))
    assert Journal(tmp_path / "journal", "256 MiB").missing("B1", 1) == [0]


def test_a_case_without_entries_is_not_measured() -> None:
    assert {f.value for f in figures([])} == {None}
    assert {f.ok for f in figures([])} == {None}


@pytest.mark.parametrize(
    ("seconds", "verdicts"),
    [
        ([2.0, 2.5, 7.0], (True, True)),
        ([2.0, 2.5, 9.0], (True, False)),
        ([3.5, 3.5, 3.5], (False, True)),
    ],
)
def test_b1_has_a_target_for_the_median_and_one_for_the_longest(
    seconds: list[float], verdicts: tuple[bool, bool]
) -> None:
    found = {f.id: f for f in figures([entry("B1", n, s) for n, s in enumerate(seconds)])}
    assert (found["B1"].ok, found["B1-max"].ok) == verdicts
    assert found["B1"].details["phases"] == {"detect": 0.5, "first_step": 1.0}


@pytest.mark.parametrize(
    ("bad", "id_"),
    [
        pytest.param(entry("B4", 0, None, identical=False), "B4", id="other bits"),
        pytest.param(entry("B6", 0, kept=False), "B6-lost", id="a subset lost too much"),
        pytest.param(entry("B3", 0, lost_steps=11), "B7-steps", id="more than an interval"),
        pytest.param(entry("B2", 0, restored_step=30), "B7-committed", id="below the store"),
        pytest.param(entry("B2", 0, restored_step=None), "B7-committed", id="no checkpoint"),
        pytest.param(entry("B2-apart", 0, rounds=2), "B2-rounds", id="two rounds"),
    ],
)
def test_what_went_wrong_once_misses_its_target(bad: Entry, id_: str) -> None:
    good = entry(bad.case, 1, identical=True, kept=True)
    found = {f.id: f for f in figures([bad, good])}
    assert (found[id_].value, found[id_].ok) == (1, False)
    assert {f.id: f for f in figures([good])}[id_].ok is True


def test_the_page_has_a_row_for_each_figure() -> None:
    found = figures([entry("B1", 0), entry("plain B1", 0, 40.0, phases={})])
    text = page(found, "64 MiB")
    assert all(f"| {f.id} |" in text for f in found)


def test_p99_of_a_hundred_values_leaves_one_out() -> None:
    assert quantile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert quantile([1.0, 5.0], 0.99) == 5.0
