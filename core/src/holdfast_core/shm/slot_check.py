"""Check whether a slot of shared memory still holds a shard, so that a restore need not read a disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from holdfast_core.errors import CorruptionError, NotFoundError
from holdfast_core.ids import ShardRef
from holdfast_core.shards.stream import ChunkCrcs
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.tiers.base import NodeTier, ShardReader

_CACHED_BYTES = 512 << 10
"""Bytes of one read. They fit into the processor's cache, where the checksum reads them again."""
_TWO_THREADS_FROM_CHUNKS = 4
"""Number of chunks from which two threads verify a slot."""


def slot_holds(slot: SlotFile, node: NodeTier, ref: ShardRef, payload_bytes: int) -> bool:
    """Return whether the slot's payload is that of the shard `ref`.

    Every byte is verified: against the shard's chunk table where the node tier has the shard (four times
    as fast), otherwise with BLAKE3. Raises what `SlotFile.read_into` raises.
    """
    try:
        with node.open_shard(ref) as reader:
            return _agrees(slot, reader)
    except (NotFoundError, CorruptionError):
        return slot.payload_digest(payload_bytes) == ref.blake3


def _agrees(slot: SlotFile, reader: ShardReader) -> bool:
    header, crcs = reader.record.header, reader.table.crcs

    def agree(chunks: range) -> bool:
        found = ChunkCrcs(header.chunk_bytes)
        stop = min(chunks.stop * header.chunk_bytes, header.payload_bytes)
        for piece in slot.pieces(chunks.start * header.chunk_bytes, stop, _CACHED_BYTES):
            found.update(piece)
        return found.finish() == crcs[chunks.start : chunks.stop]

    half = len(crcs) // 2
    if len(crcs) < _TWO_THREADS_FROM_CHUNKS:
        return agree(range(len(crcs)))
    with ThreadPoolExecutor(1, "holdfast-slot-check") as helper:
        other = helper.submit(agree, range(half, len(crcs)))
        return agree(range(half)) and other.result()
