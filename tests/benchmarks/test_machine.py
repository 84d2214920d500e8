"""Readings of /proc, the shapes of the state, and the file operations of participants."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import pytest
from benchmarks.datapath import files
from benchmarks.datapath.noise import CpuTimes, parse_stat, shares
from benchmarks.datapath.processes import ProcessTimes, cpu_seconds, parse_process, tree
from benchmarks.datapath.state import MIB, shapes
from benchmarks.datapath.visits import VisitError, parse_result


def test_stat_counts_guest_time_once() -> None:
    text = "cpu  10 1 5 70 8 2 3 4 6 1\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    assert parse_stat(text) == CpuTimes(total=103, idle=78, stolen=4)


def test_shares_of_what_went_by() -> None:
    assert shares(CpuTimes(100, 50, 0), CpuTimes(300, 100, 20)) == {"stolen": 0.1, "busy": 0.75}


def test_a_process_name_may_hold_brackets_and_spaces() -> None:
    text = "7 (a (b) c) S 3 7 7 0 -1 4194304 1 2 3 4 11 22 33 44 20 0 1 0 5 6 7"
    assert parse_process(text) == ProcessTimes(7, 3, "a (b) c", 110)


def test_a_tree_is_what_hangs_below_its_root() -> None:
    processes = [
        ProcessTimes(pid, parent, "p", 1) for pid, parent in ((4, 3), (2, 1), (3, 2), (9, 1))
    ]
    assert sorted(p.pid for p in tree(processes, 2)) == [2, 3, 4]
    assert tree(processes, 77) == []


def test_cpu_time_is_that_of_this_process_at_least() -> None:
    used = os.times()
    assert cpu_seconds() >= used.user + used.system - 0.05


@pytest.mark.parametrize("mib", [1, 16, 64, 100, 1024])
def test_shapes_fill_what_was_asked_for(mib: int) -> None:
    found = sum(4 * prod(shape) for shape in shapes(mib).values())
    assert mib * MIB - 4096 < found <= mib * MIB


def test_a_tree_is_made_durable_while_its_owner_prunes(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 5000)
    (tmp_path / "a" / "gone").symlink_to(tmp_path / "nowhere")  # listed, but already removed
    files.fsync_tree(tmp_path / "a")
    files.fsync_tree(tmp_path / "a" / "b" / "file")


def test_bytes_and_removal_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 5000)
    (tmp_path / "a" / "other").write_bytes(b"x")
    assert files.total_bytes(tmp_path / "a") == 5001
    assert files.total_bytes(tmp_path / "a" / "other") == 1
    files.remove(tmp_path / "a" / "other")
    files.remove(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_result_is_found_below_what_a_library_prints() -> None:
    assert parse_result('noise\nRESULT {"x": 1}\nmore noise\n', "") == {"x": 1}


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        pytest.param(
            "Traceback\n  line\nImportError: no grpc\n\n", "ImportError: no grpc", id="why"
        ),
        pytest.param("", "without output", id="silent"),
    ],
)
def test_a_visit_without_a_result_names_the_reason(errors: str, message: str) -> None:
    with pytest.raises(VisitError, match=message):
        parse_result("noise\n", errors)
