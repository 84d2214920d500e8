"""The steps of a fill that a sidecar and a folder's persister share: put a payload into a rank's slot.

1. `names_shard`: a slot whose header names the shard may still hold it (slot_check.py verifies the bytes).
2. `first_fitting`: otherwise a slot is chosen that is large enough.
3. `begin_shard` or `begin_assembly` marks the slot. A `reading.reader.Reader` puts a saved shard, or a
   payload that is assembled from ranges of several shards, into it. The header that was returned is written
   at the end.

While a slot is written, it is FILLING and names no shard, so that a slot that was filled in part is never
taken for the shard. All calls block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from holdfast_core.errors import CapacityError
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import ShardRef
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.shm.slot_file import SlotHeader, SlotState


class SlotTarget(Protocol):
    """The slot that a fill writes: a `SlotFile`, or a guard around one."""

    def header(self) -> SlotHeader: ...

    def write_header(self, header: SlotHeader) -> None: ...

    def write_payload(self, offset: int, data: memoryview) -> None: ...


def names_shard(header: SlotHeader, ref: ShardRef, payload_bytes: int) -> bool:
    """Return whether the slot's header names this shard. The payload is not verified."""
    found = (header.round, header.step, header.payload_bytes)
    return header.state is not SlotState.FILLING and found == (ref.round, ref.step, payload_bytes)


def first_fitting(
    names: Iterable[str], payload_bytes: int, capacity_of: Callable[[str], int | None]
) -> str:
    """Return the first offered slot that is large enough.

    Args:
        names: Names of the offered slots.
        payload_bytes: Bytes that the slot must hold.
        capacity_of: Returns the capacity of a slot in bytes, or None if the slot is in use.

    Raises:
        CapacityError: No offered slot is free and large enough.
    """
    found: list[str] = []
    for name in names:
        capacity_bytes = capacity_of(name)
        if capacity_bytes is not None and capacity_bytes >= payload_bytes:
            return name
        found.append(f"{name}: {'in use' if capacity_bytes is None else f'{capacity_bytes} bytes'}")
    raise CapacityError(
        f"no slot for a shard of {payload_bytes} bytes: {', '.join(found) or 'none offered'}"
    )


def begin_shard(target: SlotTarget, ref: ShardRef, payload_bytes: int) -> SlotHeader:
    """Mark the slot as incomplete. Return the slot header to write at the end, which names the shard."""
    free = _begin(target)
    return replace(free, round=ref.round, step=ref.step, payload_bytes=payload_bytes)


def begin_assembly(target: SlotTarget, wanted: RankLayout) -> SlotHeader:
    """Mark the slot as incomplete and write the header of the wanted payload.

    Returns:
        The slot header to write at the end. It makes the slot FREE and names no shard, because an
        assembled payload is not a shard of any step.

    Raises:
        FormatError: `wanted` is not a valid layout of a payload.
    """
    plan = payload_plan(wanted)
    free = _begin(target)
    target.write_payload(0, memoryview(plan.header))
    return free


def _begin(target: SlotTarget) -> SlotHeader:
    """Set the slot FILLING without an identity. Return the header that makes it FREE again."""
    header = target.header()
    target.write_header(SlotHeader(SlotState.FILLING, header.rank, header.capacity_bytes))
    return SlotHeader(SlotState.FREE, header.rank, header.capacity_bytes)
