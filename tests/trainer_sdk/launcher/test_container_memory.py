"""The launcher learns from the memory cgroup that the kernel ended a process, and how much was used."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.launcher.pod import ContainerMemory

EVENTS = "low 0\nhigh 0\nmax 12\noom {kills}\noom_kill {kills}\noom_group_kill 0\n"


def cgroup(root: Path, kills: int, **files: str) -> None:
    (root / "memory.events").write_text(EVENTS.format(kills=kills))
    for name, text in files.items():
        (root / f"memory.{name}").write_text(text)


@pytest.mark.fault("The kernel ends a process because memory runs out")
def test_a_kill_of_this_round_is_reported_with_limit_and_peak(tmp_path: Path) -> None:
    cgroup(tmp_path, 3, max="4294967296\n", peak="3145728000\n")
    memory = ContainerMemory(tmp_path)
    memory.begin()
    assert memory.exceeded() == "", "the kills of earlier rounds do not count"
    cgroup(tmp_path, 4)
    assert memory.exceeded() == "limit 4,096 MiB, peak 3,000 MiB"
    memory.begin()
    assert memory.exceeded() == "", "the next round"


def test_an_old_kernel_and_a_container_without_a_limit(tmp_path: Path) -> None:
    cgroup(tmp_path, 0, max="max\n")
    memory = ContainerMemory(tmp_path)
    memory.begin()
    cgroup(tmp_path, 1)
    assert memory.exceeded() == "no limit, so the node ran out of memory, peak not known"


def test_without_a_cgroup_of_version_2_nothing_is_reported(tmp_path: Path) -> None:
    memory = ContainerMemory(tmp_path / "missing")
    memory.begin()
    assert memory.exceeded() == ""
