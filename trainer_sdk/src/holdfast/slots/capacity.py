"""Checks for enough shared memory before slots are allocated, and for room on the node volume.

Too little memory does not give an error code at allocation: a full tmpfs causes SIGBUS at the first write
to a page, and a full memory cgroup starts the OOM killer. Both limits are checked here. The ranks of a
pod share a lock under which each of them checks the room and creates its slots.

A node volume that is too small does not show before the first save, or before the first that is kept beside
others. Then saves fail, or wait until an older checkpoint has been pruned.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import CapacityError
from holdfast_core.messages.schema import Policy
from holdfast_core.node.files import locked

_CGROUP = Path("/sys/fs/cgroup")
_LOCK = ".allocate"


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that may still be allocated, the limit that they come from, and how to raise it."""

    available_bytes: int
    limit: str
    advice: str


@dataclass(frozen=True, slots=True)
class SlotAdvice:
    """Texts for errors about missing room, in the terms of a pod or of a folder."""

    place: str
    """Kind of volume that holds the directory of the slots."""
    volume: str
    """Advice if the volume is full."""
    memory: str
    """Advice if the memory limit is reached."""


_LESS_IN_A_POD = "or lower spec.checkpoint.memory.slots (1 keeps one copy of the state)"
IN_A_POD = SlotAdvice(
    place="shared memory volume",
    volume="raise spec.checkpoint.memory.sizeLimit, or, where it is not set, the trainer's "
    f"resources.limits.memory; {_LESS_IN_A_POD}",
    memory="raise resources.limits.memory of the trainer, to which slots are charged, and "
    f"spec.checkpoint.memory.sizeLimit if it is set; {_LESS_IN_A_POD}",
)
_LESS_IN_A_FOLDER = "or use fewer slots (slots=1 keeps one copy of the state)"
IN_A_FOLDER = SlotAdvice(
    place="file system",
    volume="make it larger (docker run --shm-size=..., mount -o remount,size=... /dev/shm); set "
    f"another directory with Folder(slots_dir=...); {_LESS_IN_A_FOLDER}",
    memory="raise the memory limit of the container or batch job: slots count against it; "
    f"{_LESS_IN_A_FOLDER}",
)


class VolumeFullError(CapacityError):
    """The volume of the slots has no room. Another volume may have."""


_NOTES_BYTES = 1 << 20
"""Room that slots leave on their volume for layouts and notes, without which every save would fail."""


def volume_room(directory: Path, advice: SlotAdvice = IN_A_POD) -> Headroom:
    """Return the room for slots on the volume that holds `directory`."""
    stats = os.statvfs(directory)
    return Headroom(
        max(0, stats.f_bavail * stats.f_frsize - _NOTES_BYTES),
        f"the {advice.place} of {directory}",
        advice.volume,
    )


def memory_room(root: Path = _CGROUP, advice: SlotAdvice = IN_A_POD) -> Headroom | None:
    """Return the free room of this process's memory cgroup, or None where no limit is visible."""
    unified = _read_int(root / "memory.max"), _read_int(root / "memory.current")
    stat, cache = root / "memory.stat", "inactive_file"
    if unified[0] is None or unified[1] is None:
        old = root / "memory"
        unified = (
            _read_int(old / "memory.limit_in_bytes"),
            _read_int(old / "memory.usage_in_bytes"),
        )
        stat, cache = old / "memory.stat", "total_inactive_file"
    limit, used = unified
    if limit is None or used is None or limit >= 1 << 62:
        return None
    reclaimable = _stat_value(stat, cache)
    return Headroom(
        max(0, limit - used + reclaimable), "the memory limit of the container", advice.memory
    )


def reserved_bytes(directory: Path) -> int:
    """Return the bytes of existing slot files whose pages are not allocated yet."""
    total = 0
    for path in directory.glob("*.slot"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            total += max(0, stat.st_size - 512 * stat.st_blocks)
    return total


def require_room(
    directory: Path, needed_bytes: int, slots: int, advice: SlotAdvice = IN_A_POD
) -> str:
    """Raise CapacityError if `needed_bytes` more do not fit, or VolumeFullError if the volume is too small.

    The error names the needed and the available bytes, and what to change.

    Returns:
        What the limits leave after that, as a text for the log.
    """
    pending = reserved_bytes(directory)

    def text(room: Headroom) -> str:
        return (
            f"{room.limit} needs {needed_bytes + pending} more bytes for {slots} slots ({pending} "
            f"of them are being allocated by other ranks), has {room.available_bytes}: "
            f"{room.advice}"
        )

    volume = volume_room(directory, advice)
    if needed_bytes + pending > volume.available_bytes:
        raise VolumeFullError(text(volume))
    memory = memory_room(advice=advice)
    if memory is not None and needed_bytes + pending > memory.available_bytes:
        raise CapacityError(text(memory))
    rooms = (volume,) if memory is None else (volume, memory)
    return ", ".join(
        f"{room.limit} has {room.available_bytes - needed_bytes - pending} more" for room in rooms
    )


def allocation_lock(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Return the lock under which one rank at a time checks the room and creates its slots."""
    return locked(directory / _LOCK)


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat_value(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


_ADVICE = "raise the size of spec.checkpoint.node.volume"


def node_room_warning(payload_bytes: int, policy: Policy, room_bytes: int) -> str:
    """Return what a rank's share of the node volume is too small for. An empty text: it suffices.

    Args:
        payload_bytes: Bytes of one save of the rank.
        policy: Number of checkpoints that are kept, and of copies on other nodes.
        room_bytes: The rank's share, which also holds the copies that its pod keeps for others.

    Raises:
        CapacityError: The share is smaller than one save, so no save can succeed.
    """
    if payload_bytes > room_bytes:
        raise CapacityError(
            f"the node volume has {room_bytes} bytes for each rank of the pod (85 % of the volume), and one "
            f"save of this rank needs {payload_bytes}: {_ADVICE}"
        )
    checkpoints, shards = policy.keep_last + 1, 1 + policy.peer_copies
    needed = payload_bytes * checkpoints * shards
    if needed <= room_bytes:
        return ""
    return (
        f"the node volume has {room_bytes} bytes for each rank of the pod (85 % of the volume), and "
        f"{needed} are needed: {payload_bytes} bytes in {shards} shards (its own and {policy.peer_copies} "
        f"copies for peers) of {checkpoints} checkpoints (keepLast {policy.keep_last}, and one that is being "
        "saved). Until then, fewer checkpoints are kept, and a save may wait for room: "
        f"{_ADVICE}, or lower spec.checkpoint.retention.keepLast"
    )
