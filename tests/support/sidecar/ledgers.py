"""Ledgers of a coordinator, and the steps of a gang's members in them."""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import Digest, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import ReportedShard, ShardInfo
from holdfast_sidecar.coordinator.ledger import Ledger

SHARD_DIGEST = Digest("b3:" + "a" * 64)
OTHER_DIGEST = Digest("b3:" + "b" * 64)
MANIFEST_DIGEST = Digest("b3:" + "c" * 64)


LAYOUT = LayoutDigests(SHARD_DIGEST, SHARD_DIGEST, SHARD_DIGEST)


def shard_info(rank: int, digest: Digest = SHARD_DIGEST) -> ShardInfo:
    """Return a shard of 100 bytes."""
    return ShardInfo(Rank(rank), 100, digest, digest)


def reported(
    rank: int, step: Step, *, committed: bool = False, replicated: bool = False, round_: int = 1
) -> ReportedShard:
    """Return what a worker reports of the shard of a rank."""
    shard = ReportedShard(step, RestartRound(round_), shard_info(rank), LAYOUT)
    return replace(shard, committed=committed, replicated=replicated)


def new_ledger(*, workers: int = 2, expects_copies: bool = True) -> Ledger:
    """Return the empty ledger of round 1, with one rank in each worker."""
    names = tuple(Worker(w) for w in range(workers))
    first = frozenset({Rank(0)})
    return Ledger(RestartRound(1), workers, names, first=first, expects_copies=expects_copies)


def store_manifests(ledger: Ledger, *steps: int) -> list[bool]:
    """Build the manifest of each step and let every worker report that it has it.

    Returns whether each step became local by that.
    """
    risen = []
    for step in map(Step, steps):
        shards = tuple(shard_info(worker) for worker in ledger.workers)
        ledger.committed(step, b"{}", MANIFEST_DIGEST, shards)
        for worker in ledger.workers:
            ledger.take(reported(worker, step, committed=True))
        risen.append(ledger.settle_local(step))
    return risen


def replicate(ledger: Ledger, step: int, *ranks: int) -> bool:
    """Report that all copies of these ranks' shards exist. Return whether the step is replicated by this."""
    for rank in ranks:
        ledger.take(reported(rank, Step(step), replicated=True))
    return ledger.settle_replicated(Step(step))


def commit(ledger: Ledger, step: int) -> None:
    """Let every rank prepare the step, and every worker store its manifest."""
    for worker in ledger.workers:
        ledger.prepared(Step(step), shard_info(worker), LAYOUT)
    store_manifests(ledger, step)
