"""The identities that every part speaks of, as types of their own.

May import the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

JobUid = NewType("JobUid", str)
"""metadata.uid of a TrainingJob."""

Step = NewType("Step", int)
"""Optimizer step, >= 0, counted once for the whole gang."""

Rank = NewType("Rank", int)
"""0..world_size-1, the index of a training process in the gang."""

Worker = NewType("Worker", int)
"""0..workers-1, the index of a pod in the gang."""

RestartRound = NewType("RestartRound", int)
""">= 0, +1 each time the gang restarts: the fencing token."""

Digest = NewType("Digest", str)
"""`b3:` and 64 hex characters: BLAKE3 of some bytes."""


class Level(StrEnum):
    """How much a committed step survives; each level includes the ones before it."""

    MEMORY = "memory"
    """Each rank's shard is digested, in its pod's shared memory or on its node: survives processes,
    not pods."""
    LOCAL = "local"
    REPLICATED = "replicated"
    PERSISTED = "persisted"

    def includes(self, other: Level) -> bool:
        """This is `other`, or above it. `<` and `>` compare names, as with every string."""
        order = tuple(Level)
        return order.index(self) >= order.index(other)


class TierName(StrEnum):
    """Where a shard can be read, in the order in which a restore tries them."""

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


@dataclass(frozen=True, slots=True)
class ShardRef:
    """Names exactly one shard's bytes; enough to find it in every tier."""

    job_uid: JobUid
    step: Step
    round: RestartRound
    rank: Rank
    blake3: Digest

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.step, self.round)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open range of bytes: start <= position < stop."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"byte range [{self.start}, {self.stop}) is not ordered")

    @property
    def length_bytes(self) -> int:
        return self.stop - self.start


def ranks_of(worker: Worker, procs_per_worker: int) -> range:
    """Ranks that run in the pod of `worker`."""
    return range(worker * procs_per_worker, (worker + 1) * procs_per_worker)


def worker_of(rank: Rank, procs_per_worker: int) -> Worker:
    """The worker whose pod runs `rank`."""
    return Worker(rank // procs_per_worker)
