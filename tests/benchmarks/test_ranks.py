"""Rows and verdicts of the benchmark of many ranks."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.ranks.figures import STEADY, Phase, curve, rows, slope, verdicts
from benchmarks.ranks.gang import address_of
from benchmarks.ranks.page import page


def phase(workers: int, cpu_seconds: float, name: str = STEADY, **counters: Any) -> Phase:
    counted = {
        "cpu_seconds": cpu_seconds,
        "sent_bytes": 1000,
        "received_bytes": 10,
        "peak_mib": 100.0,
        "callbacks": 1000,
        "above_5_ms": 0,
        "above_50_ms": 0,
        "longest_ms": {},
        "most_ms": {"f": 1.0},
        **counters,
    }
    return Phase(workers, name, 1.0, counted, counted)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_slope_is_the_power_with_which_a_cost_grows(power: float) -> None:
    assert slope([(n, 3 * n**power) for n in (64, 256, 1024)]) == pytest.approx(power)


def test_repetitions_of_a_phase_are_one_row_with_the_median() -> None:
    found = rows([phase(64, 1.0), phase(64, 5.0), phase(64, 2.0), phase(256, 4.0)])
    assert curve(found, STEADY) == [(64, 2.0), (256, 4.0)]
    assert found[0].repetitions == 3


def test_a_quadratic_coordinator_misses_l4() -> None:
    found = verdicts(rows([phase(64, 0.1), phase(256, 1.6)]))
    assert {f.id: f.ok for f in found}["L4"] is False


def test_targets_of_4096_workers_have_no_verdict_without_them() -> None:
    found = verdicts(rows([phase(64, 0.1), phase(256, 0.4)]))
    assert {f.id for f in found} == {"L4", "L8", "L8-longest"}


def test_4096_workers_are_judged_by_wall_cpu_and_memory() -> None:
    found = verdicts(rows([phase(4096, 2.5, peak_mib=600.0)]))
    assert {f.id: f.ok for f in found if f.id.startswith("L2")} == {
        "L2-wall": True,
        "L2-cpu": False,
        "L2-memory": False,
    }


def test_256_workers_with_a_models_layouts_are_judged() -> None:
    phases = [
        phase(256, 4.0, "llama-70b: first commit"),
        phase(256, 0.6, f"llama-70b: {STEADY}", peak_mib=300.0),
    ]
    found = {f.id: f.ok for f in verdicts(rows(phases)) if f.id.startswith("L1")}
    assert found == {"L1-first": True, "L1-steady": False, "L1-memory": False}


def test_long_callbacks_miss_l8() -> None:
    found = verdicts(rows([phase(64, 0.1, above_5_ms=2, longest_ms={"slow": 60.0})]))
    assert {f.id: f.ok for f in found} == {"L8": False, "L8-longest": False}


def test_every_worker_has_an_address_of_its_own() -> None:
    addresses = {address_of(worker) for worker in range(4096)}
    assert len(addresses) == 4096
    assert all(a.startswith("127.") and a != "127.0.0.1" for a in addresses)


def test_the_page_has_a_line_for_each_phase_and_size() -> None:
    text = page(rows([phase(64, 0.1), phase(256, 0.4), phase(64, 0.2, "reports")]))
    assert f"| {STEADY} | 64 | 0.1 |" in text
    assert f"| {STEADY} | 256 | 0.4 |" in text
    assert "| reports | 64 | 0.2 |" in text
