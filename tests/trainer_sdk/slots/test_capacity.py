"""The free space of the volume, and the free memory below the container's limit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.slots.capacity import VolumeFullError, memory_room, require_room, reserved_bytes
from holdfast_core.errors import CapacityError


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "available"),
    [
        pytest.param(
            {"memory_dot_max": "1000\n", "memory_dot_current": "400\n"}, 600, id="version-2"
        ),
        pytest.param(
            {
                "memory_dot_max": "1000",
                "memory_dot_current": "400",
                "memory_dot_stat": "anon 1\ninactive_file 150\n",
            },
            750,
            id="page-cache-gives-way",
        ),
        pytest.param({"memory_dot_max": "max", "memory_dot_current": "4"}, None, id="no-limit"),
        pytest.param({}, None, id="not-visible"),
        pytest.param(
            {
                "memory__memory_dot_limit_in_bytes": "1000",
                "memory__memory_dot_usage_in_bytes": "1100",
            },
            0,
            id="version-1-overdrawn",
        ),
        pytest.param(
            {
                "memory__memory_dot_limit_in_bytes": str((1 << 63) - 4096),
                "memory__memory_dot_usage_in_bytes": "5",
            },
            None,
            id="version-1-no-limit",
        ),
    ],
)
def test_the_room_is_what_the_memory_limits_leave(
    tmp_path: Path, files: dict[str, str], available: int | None
) -> None:
    room = memory_room(write(tmp_path, **files))
    assert (room.available_bytes if room else None) == available


def test_slots_that_other_ranks_create_count_as_used(tmp_path: Path) -> None:
    with open(tmp_path / "rank000000.0.slot", "wb") as file:
        file.truncate(1 << 20)
    assert reserved_bytes(tmp_path) == 1 << 20
    with pytest.raises(CapacityError, match="being allocated by other ranks"):
        require_room(tmp_path, 1 << 60, 2)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 8 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.fault("Slots would fill the shared memory volume to its last page")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_slots_leave_room_for_layouts_and_notes(volume: Path) -> None:
    """Without it every save fails, although the slots have room."""
    free = os.statvfs(volume)
    free_bytes = free.f_bavail * free.f_frsize
    with pytest.raises(VolumeFullError):
        require_room(volume, free_bytes, 3)
    require_room(volume, free_bytes - (1 << 20), 3)
