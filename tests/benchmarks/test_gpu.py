"""`make bench-gpu`: its figures, what it prints without a GPU, and the whole program on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.figures import Costs, Pair, figures_of
from benchmarks.report import RESULTS
from tests.support.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)


def test_costs_are_multiples_of_a_blocking_copy() -> None:
    ours, dcp = Costs(), Costs()
    ours.add(Pair(without=1.0, with_save=1.25, blocked=0.1), copy=0.5)
    ours.add_behind(Pair(without=1.0, with_save=1.125, blocked=0.1), copy=0.5)
    dcp.add(Pair(without=1.0, with_save=1.5, blocked=0.4), copy=0.5)
    dcp.add_behind(Pair(without=1.0, with_save=1.5, blocked=0.4), copy=0.5)
    values = {figure.id: (figure.value, figure.ok) for figure in figures_of(ours, dcp)}
    assert values == {
        "G1 extra": (0.5, False),
        "G2 overlap": (0.5, None),
        "G3 blocked": (0.2, None),
        "G4 blocked": (0.25, True),
        "G5 dcp extra": (1.0, None),
        "G6 dcp blocked": (0.8, None),
        "G7 extra behind": (0.25, None),
        "G8 dcp behind": (1.0, None),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("options", [(), ("--look",)])
def test_without_a_gpu_nothing_is_measured_and_the_exit_code_says_so(
    options: tuple[str, ...],
) -> None:
    result = RESULTS / "gpu.json"
    before = result.read_bytes() if result.exists() else None
    ended = run(*options)
    assert ended.returncode == 2
    assert "torch.cuda.is_available() is false, so nothing was measured" in ended.stderr
    assert (result.read_bytes() if result.exists() else None) == before


def test_on_the_cpu_it_runs_to_its_end_and_writes_no_result(tmp_path: Path) -> None:
    ended = run(
        *("--device", "cpu", "--mib", "12", "--width", "256", "--rounds", "1", "--steps", "1"),
        *("--directory", str(tmp_path)),
    )
    assert ended.returncode == 0, ended.stderr
    for id_ in ("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8"):
        assert f"| {id_} " in ended.stdout
    assert "written" not in ended.stdout
    assert list(tmp_path.iterdir()) == []
