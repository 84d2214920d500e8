"""What a staged slot is checked against, and the shard that it becomes. All calls block."""

from __future__ import annotations

from holdfast_core.errors import FormatError, RefusedError
from holdfast_core.ids import JobUid
from holdfast_core.messages.schema import Refusal, Stage
from holdfast_core.shards.record import ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester
from holdfast_core.shm.slot_file import SlotHeader, SlotState, payload_pieces
from holdfast_core.tiers.base import PayloadSource


def check_slot(header: SlotHeader, message: Stage, *expected: SlotState) -> None:
    """Raise FormatError if the slot's header contradicts the message, as in a torn or reused slot.

    Args:
        header: Header of the slot that the message names.
        message: What the rank sent.
        expected: States that the slot may have.
    """
    found = (header.state, header.round, header.step, header.payload_bytes)
    wanted = (message.round, message.step, message.payload_bytes)
    if header.state not in expected or found[1:] != wanted:
        states = " or ".join(state.name for state in expected)
        raise FormatError(
            f"slot {message.slot}: state, round, step, bytes are {found}, expected {states} and, as in "
            f"the message, {wanted}"
        )


def shard_header(message: Stage, job_uid: JobUid, world_size: int) -> ShardHeader:
    """Return the header of the shard that a staged slot becomes."""
    return ShardHeader(
        job_uid,
        message.round,
        message.step,
        message.rank,
        world_size,
        message.layout,
        message.payload_bytes,
    )


def digest_slot(header: ShardHeader, slot: PayloadSource) -> ShardRecord:
    """Digest the payload in one pass over the shared memory, and return the record of its shard.

    Raises what `slot.read_into` raises.
    """
    digester = PayloadDigester(header)
    for piece in payload_pieces(slot, 0, header.payload_bytes):
        digester.update(piece)
    record, _ = digester.finish()
    return record


def saved_before(message: Stage, detail: object) -> RefusedError:
    """Return the refusal of a repeated save whose bytes are not those of the earlier one."""
    return RefusedError(
        Refusal.CONFLICT,
        f"rank {message.rank} has saved step {message.step} with other bytes before, and those are kept: "
        f"{detail}; save a step again only with the same state",
    )
