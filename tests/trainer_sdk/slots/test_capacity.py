"""The free space of the volume, and the free memory below the container's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.slots.capacity import memory_room, require_room, reserved_bytes
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
