"""Serve and accept manifests of checkpoints that are on this node."""

from __future__ import annotations

from holdfast_core.errors import (
    AlreadyExistsError,
    CapacityError,
    NotFoundError,
    RefusedError,
)
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, JobUid, Rank, TierName
from holdfast_core.messages.schema import ManifestDocument, ManifestPut, Ok, Refusal
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.documents import check_put
from holdfast_sidecar.save.journey import SaveJourney


class Manifests:
    """Handler of requests for manifests, and of the coordinator's ManifestPut."""

    def __init__(self, pod: Pod, tiers: Tiers, saves: SaveJourney, failures: Failures) -> None:
        self._pod = pod
        self._node = tiers.node
        self._pools = tiers.pools
        self._saves = saves
        self._failures = failures

    async def get(
        self, job_uid: JobUid | None, checkpoint: CheckpointId, *, with_layout: bool
    ) -> ManifestDocument:
        """Return the manifest, and its layout if that is wanted and on this node.

        Args:
            job_uid: The job that owns the checkpoint. None means this pod's job.
            checkpoint: The checkpoint.
            with_layout: Whether the layout is wanted.

        Raises:
            NotFoundError: The manifest is not on this node.
            HoldfastError: It cannot be read, or is not valid.
        """
        uid = job_uid or self._pod.job_uid
        document = await self._pools.read.run(self._node.get_manifest, uid, checkpoint)
        manifest = parse_manifest_of(document, uid, checkpoint)
        if not with_layout:
            return ManifestDocument(document.decode())
        try:
            layout = await self._pools.read.run(self._node.get_layout, manifest.layout)
        except NotFoundError:
            return ManifestDocument(document.decode())
        return ManifestDocument(document.decode(), layout.decode())

    async def put(self, message: ManifestPut) -> Ok:
        """Write a manifest, durably, to the node tier.

        There is no `await` between the check of the round and the queueing of the write. A SEAL that comes
        later therefore waits for the write.

        Raises:
            FormatError: The manifest is not the one that the message names.
            NotFoundError: This sidecar has no shard of an own rank that the manifest names.
            RefusedError: CONFLICT if another manifest of this checkpoint exists; BUSY while a shard in
                memory is being digested.
            CapacityError: The node tier has no room.
        """
        manifest = check_put(message, self._pod.contract)
        for number in self._pod.state.own_ranks:
            self._expect_shard(Rank(number), message, manifest)
        try:
            await self._pools.meta.run(self._write, message, manifest)
        except AlreadyExistsError as error:
            self._failures.note_text(
                f"manifest of step {message.step}",
                TierName.NODE,
                "Conflict",
                str(error),
                step=message.step,
            )
            raise RefusedError(Refusal.CONFLICT, str(error)) from error
        except CapacityError as error:
            self._failures.note("manifests", TierName.NODE, error, step=message.step)
            raise
        self._failures.healthy("manifests")
        self._saves.stager.committed(message.step, message.round)
        if not message.buffered:
            self._saves.flow.committed(message.step, message.round)
        return Ok(message.round)

    def _expect_shard(self, rank: Rank, message: ManifestPut, manifest: Manifest) -> None:
        """Check that the rank's shard is on this node, or in memory if the message allows that."""
        stager, ref = self._saves.stager, manifest.ref(rank)
        buffered = stager.find(rank, manifest.checkpoint) if message.buffered else None
        if self._node.find(ref) is not None or (buffered is not None and buffered.ref == ref):
            return
        if message.buffered and stager.may_find(rank, manifest.checkpoint):
            raise RefusedError(
                Refusal.BUSY, f"step {message.step} of rank {rank} is being digested again"
            )
        raise NotFoundError(
            f"step {message.step}: the shard of rank {rank} that the manifest names is not "
            f"on the node tier of worker {self._pod.state.worker}, nor in its memory"
        )

    def _write(self, message: ManifestPut, manifest: Manifest) -> None:
        if message.layout is not None:
            self._node.put_layout(message.layout.encode())
        self._node.put_manifest(manifest.job.uid, manifest.checkpoint, message.manifest.encode())
