"""Types for the identities that all parts of Holdfast use.

The bounds of each type hold for the messages and documents that msgspec decodes. This module imports nothing
else besides the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta

JobUid = NewType("JobUid", Annotated[str, Meta(max_length=64)])
"""metadata.uid of a TrainingJob."""

MAX_STEP = 10**12 - 1
MAX_ROUND = 10**6 - 1
MAX_RANK = 10**6 - 1
MAX_WORKERS = 4096
"""Largest number of workers of a gang."""
MAX_SPARES = 64
"""Largest number of spare pods of a job. Their certificates are in one Secret."""

Step = NewType("Step", Annotated[int, Meta(ge=0, le=MAX_STEP)])
"""Optimizer step, >= 0, counted once for the whole gang."""

Rank = NewType("Rank", Annotated[int, Meta(ge=0, le=MAX_RANK)])
"""Index of a training process in the gang, 0..world_size-1."""

Worker = NewType("Worker", Annotated[int, Meta(ge=0, le=MAX_WORKERS + MAX_SPARES - 1)])
"""Index of a pod in the gang, 0..workers-1. Spare pods have the indices from FIRST_SPARE."""

FIRST_SPARE = Worker(MAX_WORKERS)
"""Index of the first spare pod, above those of all workers. A spare keeps it until a ROUND message names its
pod as a worker (ADR 0015)."""

RestartRound = NewType("RestartRound", Annotated[int, Meta(ge=0, le=MAX_ROUND)])
"""Number of restarts of the gang, >= 0. It is the fencing token (docs/guarantees.md R17)."""

Digest = NewType("Digest", Annotated[str, Meta(max_length=128)])
"""BLAKE3 digest, written as `b3:` and 64 lower-case hex characters."""


class Level(StrEnum):
    """Durability level of a committed step. Each level includes the levels before it.

    docs/guarantees.md lists when each level is reached and what it survives.
    """

    LOCAL = "local"
    """Each rank's shard and the manifest are durable on the node's disk."""
    REPLICATED = "replicated"
    """Each shard is also durable on as many other nodes as the job has peer copies."""
    PERSISTED = "persisted"
    """The shards and the manifest are in the object store."""

    def includes(self, other: Level) -> bool:
        """Return whether this level is `other` or a higher one.

        Do not compare levels with `<` and `>`: those compare the names as strings.
        """
        order = tuple(Level)
        return order.index(self) >= order.index(other)


class TierName(StrEnum):
    """Tier that a shard can be read from, in the order in which a restore tries them."""

    MEMORY = "memory"
    NODE = "node"
    PEER = "peer"
    OBJECT = "object"


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Identity of a checkpoint within one job."""

    step: Step
    round: RestartRound

    def __str__(self) -> str:
        return f"s{self.step}-r{self.round}"


def age_of(checkpoint: CheckpointId) -> tuple[RestartRound, Step]:
    """Return the key that sorts a job's checkpoints from the oldest to the newest.

    The round comes first: after a return to an older checkpoint, a newer one has a lower step.
    """
    return checkpoint.round, checkpoint.step


@dataclass(frozen=True, slots=True)
class ShardRef:
    """Identity of one shard and of its payload's bytes. It suffices to find the shard in any tier."""

    job_uid: JobUid
    step: Step
    round: RestartRound
    rank: Rank
    blake3: Digest

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.step, self.round)


MAX_INT = (1 << 63) - 1
"""The largest integer of a document or a message, which is a signed one of 64 bits."""
Natural = Annotated[int, Meta(ge=0, le=MAX_INT)]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One rank's shard of a checkpoint, with the digests by which it is verified."""

    rank: Rank
    payload_bytes: Natural
    blake3: Digest
    """BLAKE3 of the payload."""
    chunk_table: Digest
    """BLAKE3 of the packed chunk table."""


class ByteRange(NamedTuple):
    """Half-open byte range: start <= position < stop."""

    start: Natural
    stop: Natural

    @property
    def length_bytes(self) -> int:
        return self.stop - self.start


def is_spare(worker: Worker) -> bool:
    """Return whether the index is that of a spare pod, which has no ranks."""
    return worker >= FIRST_SPARE


def ranks_of(worker: Worker, procs_per_worker: int) -> range:
    """Return the ranks that run in the pod of `worker`."""
    return range(worker * procs_per_worker, (worker + 1) * procs_per_worker)


def worker_of(rank: Rank, procs_per_worker: int) -> Worker:
    """Return the worker whose pod runs `rank`."""
    return Worker(rank // procs_per_worker)
