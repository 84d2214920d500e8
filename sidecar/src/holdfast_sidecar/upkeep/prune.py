"""Delete steps from this node, the manifest of each first, and what no checkpoint needs from the store.

The coordinator alone chooses which steps are pruned (holdfast_core.retention). Each sidecar also refuses to
prune steps that its own ROUND protects.

Lost pods and deletions leave unfinished uploads and objects behind. The coordinator looks for them
periodically in the background; no save or restore waits for it. After an error nothing more is deleted until
the next period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast_core import logs
from holdfast_core.clock import Clock
from holdfast_core.contract import SidecarContract
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.messages.schema import Round
from holdfast_core.store.rules import QUIET, STALE_UPLOADS
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.tiers import Pools


def protected_steps(message: Round, committed: Iterable[CheckpointId] = ()) -> frozenset[Step]:
    """Return the steps that a sidecar does not delete in this round, even if the coordinator requests it.

    These are the pinned and the quarantined steps, and the step of the restore point until a newer step of
    this round is among the `committed` ones.
    """
    steps = set(message.pinned) | {c.step for c in quarantined(message)}
    base = message.restore_point.step
    if base is not None and not any(c.round == message.round and c.step > base for c in committed):
        steps.add(base)
    return frozenset(steps)


def quarantined(message: Round) -> frozenset[CheckpointId]:
    """Return the checkpoints that the operator has quarantined."""
    return frozenset(c for p in message.quarantined if (c := p.own_checkpoint) is not None)


def delete_steps(node: NodeTier, job_uid: JobUid, steps: frozenset[Step]) -> int:
    """Delete all checkpoints of this job with these steps, of any round. Blocks.

    Returns:
        The number of checkpoints that were deleted.
    """
    return _delete(node, job_uid, (c for c in _stored(node, job_uid) if c.step in steps))


def delete_off_lineage(node: NodeTier, job_uid: JobUid, message: Round) -> int:
    """Delete the checkpoints of older rounds that are off the lineage. Blocks.

    They are above the restore point, or of a round before the gang started over.

    Their steps are trained again in this round, and the old ones must never be restored. Without a restore
    point of this job nothing is deleted, because a user may still need the checkpoints of a job that starts
    from the beginning. Quarantined checkpoints stay for the user to look at or to release.

    Returns:
        The number of checkpoints that were deleted.
    """
    base = message.restore_point.step
    if base is None or message.restore_point.job_uid not in (None, job_uid):
        return 0
    stored = _stored(node, job_uid) - quarantined(message)
    return _delete(node, job_uid, (c for c in stored if _off_lineage(c, base, message)))


def delete_orphans(
    node: NodeTier,
    job_uid: JobUid,
    *,
    before: RestartRound,
    below: Step,
    protected: frozenset[Step],
) -> int:
    """Delete shards of older rounds that have no manifest on this node, and so cannot be restored. Blocks.

    Such shards remain where a rank's save failed or a round ended before the commit. Shards of the current
    round are left to the coordinator, because their manifest may still arrive.

    Args:
        node: The node tier.
        job_uid: Only shards of this job are deleted.
        before: The current round.
        below: A step that is safe. Only shards of older steps are deleted.
        protected: Steps that are not deleted.

    Returns:
        The number of checkpoints whose shards were deleted.
    """
    orphans = _stored(node, job_uid) - node.checkpoints(job_uid)
    old = (c for c in orphans if c.round < before and c.step < below and c.step not in protected)
    return _delete(node, job_uid, old)


def _stored(node: NodeTier, job_uid: JobUid) -> frozenset[CheckpointId]:
    """Return the checkpoints of a job of which this node has the manifest or a shard."""
    shards = node.list_shards()
    return node.checkpoints(job_uid) | {
        record.checkpoint for record in shards if record.header.job_uid == job_uid
    }


def _delete(node: NodeTier, job_uid: JobUid, checkpoints: Iterable[CheckpointId]) -> int:
    """Delete checkpoints, and return their number.

    One that the disk does not delete keeps no other one. Its error is raised at the end.
    """
    found = sorted(checkpoints)
    failed: HoldfastError | OSError | None = None
    for checkpoint in found:
        try:
            node.delete_checkpoint(job_uid, checkpoint)
        except (HoldfastError, OSError) as error:
            failed = error
    if failed is not None:
        raise failed
    return len(found)


def _off_lineage(checkpoint: CheckpointId, base: Step, message: Round) -> bool:
    above = checkpoint.round < message.round and checkpoint.step > base
    return above or checkpoint.round < message.lineage_from


_SWEEP_SECONDS = 900.0
_SWEEPS_A_REAP = 24
"""Number of sweeps between two searches for unfinished uploads."""


class Leftovers:
    """Periodic clean-up of the job's objects in the store, by the coordinator of a round."""

    def __init__(
        self,
        contract: SidecarContract,
        round_: RestartRound,
        store: ObjectTier | None,
        *,
        pools: Pools,
        clock: Clock,
        uploading: Callable[[], frozenset[CheckpointId]],
    ) -> None:
        """Create the clean-up.

        Args:
            contract: The contract of this pod, which names the job.
            round_: The round of this coordinator.
            store: The object store. None: there is nothing to clean up.
            pools: The calls run in its `store` pool.
            clock: Measures the periods.
            uploading: Returns the checkpoints that are being uploaded. It is called from other threads.
        """
        self._contract = contract
        self._round = round_
        self._store = store
        self._pools = pools
        self._clock = clock
        self._uploading = uploading

    async def run(self) -> None:
        """Clean up periodically until cancelled. Returns only if there is no object store."""
        store = self._store
        if store is None:
            return
        while True:
            await self._reap(store)
            for _ in range(_SWEEPS_A_REAP):
                await self._clock.sleep(_SWEEP_SECONDS)
                await self._sweep(store)

    async def _reap(self, store: ObjectTier) -> None:
        contract = self._contract
        try:
            await self._pools.store.run(
                store.abort_stale, contract.namespace, contract.job_uid, STALE_UPLOADS
            )
        except HoldfastError as error:
            logs.warning("listing unfinished uploads failed", error=str(error))

    async def _sweep(self, store: ObjectTier) -> None:
        contract = self._contract
        try:
            swept = await self._pools.store.run(
                store.sweep,
                contract.namespace,
                contract.job_uid,
                self._round,
                QUIET,
                self._uploading,
            )
        except HoldfastError as error:
            logs.warning("sweeping the store failed", error=str(error))
        else:
            if swept:
                logs.info("swept", checkpoints=sorted(map(str, swept)))
