"""Identity of a shard, and the record of a shard whose payload has been digested."""

from __future__ import annotations

from dataclasses import dataclass

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
