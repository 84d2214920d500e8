"""The record of a shard: its identity and the digests of its payload; and the manifest of all ranks' records.

The chunk table has a CRC32C and a BLAKE3 for each chunk of the payload. Reads from the node's disk are
verified by the CRCs, and the checksums of uploads are combined from them. Equal BLAKE3 digests mean equal
bytes, so a chunk may be taken from any shard that has one with its digest. The payload's digest is the
BLAKE3 of the chunks' digests, so that chunks can be verified in any order.

A checkpoint exists when its manifest is durable. There is no pointer to the latest checkpoint. This module
does no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from holdfast_core.errors import FormatError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.manifest import JobIdentity, manifest_document
from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, ShardRef, Step

CHUNK_BYTES = 256 << 10
"""Chunk size in bytes, the smallest unit that can be read and verified. Measured against chunks of
4 MiB, a write costs the same CPU time and a verified read 5 % more."""


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """Identity of a shard. Head and trailer of the shard file both store it."""

    job_uid: JobUid
    round: RestartRound
    step: Step
    rank: Rank
    world_size: int
    layout: Digest
    """BLAKE3 of the rank's layout document."""
    payload_bytes: int
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard's header and the digests of its payload."""

    header: ShardHeader
    blake3: Digest
    chunk_table: Digest
    """BLAKE3 of the packed chunk table."""
    file_bytes: int
    """Length of the shard file."""

    @property
    def ref(self) -> ShardRef:
        h = self.header
        return ShardRef(h.job_uid, h.step, h.round, h.rank, self.blake3)

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.header.step, self.header.round)


DIGEST_BYTES = 32
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Checksums of the chunks of one payload, in order."""

    crcs: tuple[int, ...]
    digests: bytes
    """BLAKE3 of each chunk, DIGEST_BYTES each, concatenated."""

    def __len__(self) -> int:
        return len(self.crcs)

    def payload_digest(self) -> Digest:
        """Return the digest of the payload, which is the BLAKE3 of the digests of all chunks."""
        return digest_of(self.digests)

    def digest(self, chunk: int) -> bytes:
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def pack(self) -> bytes:
        """Return the table as bytes: the CRCs as little-endian u32, then the digests."""
        return struct.pack(f"<{len(self.crcs)}I", *self.crcs) + self.digests

    @classmethod
    def unpack(cls, data: bytes, count: int) -> Self:
        """Parse a packed table of `count` chunks. Raises FormatError if the length is wrong."""
        if len(data) != table_bytes(count):
            raise FormatError(
                f"chunk table: {len(data)} bytes, expected {table_bytes(count)} for {count} chunks"
            )
        split = _CRC_BYTES * count
        return cls(struct.unpack(f"<{count}I", data[:split]), data[split:])


def table_bytes(count: int) -> int:
    """Return the length in bytes of the packed table of `count` chunks."""
    return count * (_CRC_BYTES + DIGEST_BYTES)


def build_manifest(
    job: JobIdentity,
    shards: Iterable[tuple[ShardRecord, LayoutDigests]],
    *,
    parent: Digest | None,
) -> bytes:
    """Return the manifest document of the shards of one (step, round).

    Args:
        job: Identity of the job.
        shards: The shards of all ranks with the digests of their layouts, in any order.
        parent: Digest of the manifest that the round restored from, or None.

    Raises:
        FormatError: A rank is missing or occurs twice, the shards differ in job, step, round or world
            size, or a shard has another layout.
    """
    ordered = sorted(shards, key=lambda shard: shard[0].header.rank)
    if not ordered:
        raise FormatError("manifest: no shards")
    first = ordered[0][0].header
    for rank, (record, layout) in enumerate(ordered):
        header = record.header
        found = (header.job_uid, header.step, header.round, header.world_size, header.rank)
        expected = (job.uid, first.step, first.round, len(ordered), rank)
        if found != expected:
            raise FormatError(
                f"manifest: shard of rank {header.rank} is of (job, step, round, world size, rank) "
                f"{found}, expected {expected}"
            )
        if layout.layout != header.layout:
            raise FormatError(
                f"manifest: shard of rank {header.rank} has layout {header.layout}, expected "
                f"{layout.layout}"
            )
    entries = [
        (record.header.payload_bytes, record.blake3, record.chunk_table, layout)
        for record, layout in ordered
    ]
    return manifest_document(job, ordered[0][0].checkpoint, parent, entries)
