"""Serve and accept manifests and layouts of checkpoints that are on this node."""

from __future__ import annotations

from holdfast_core.errors import (
    AlreadyExistsError,
    CapacityError,
    NotFoundError,
    RefusedError,
)
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, TierName
from holdfast_core.messages.schema import KeepLayout, ManifestDocument, ManifestPut, Ok, Refusal
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import fence
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.documents import check_put
from holdfast_sidecar.save.components import SaveComponents
from holdfast_sidecar.wire.client import Peers, raise_refused


class ManifestRequests:
    """Handler of requests for manifests and layouts, of ManifestPut and of KeepLayout."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        saves: SaveComponents,
        peers: Peers,
        failures: Failures,
    ) -> None:
        self._pod = pod
        self._node = tiers.node
        self._pools = tiers.pools
        self._saves = saves
        self._peers = peers
        self._failures = failures

    async def get(self, job_uid: JobUid | None, checkpoint: CheckpointId) -> ManifestDocument:
        """Return the manifest.

        Args:
            job_uid: The job that owns the checkpoint. None means this pod's job.
            checkpoint: The checkpoint.

        Raises:
            NotFoundError: The manifest is not on this node.
            HoldfastError: It cannot be read, or is not valid.
        """
        return await self._pools.read.run(self._read, job_uid or self._pod.job_uid, checkpoint)

    def _read(self, job_uid: JobUid, checkpoint: CheckpointId) -> ManifestDocument:
        document = self._node.get_manifest(job_uid, checkpoint)
        parse_manifest_of(document, job_uid, checkpoint)
        return ManifestDocument(document.decode())

    async def layout(self, digest: Digest) -> bytes:
        """Return a layout from the node tier. Raises NotFoundError, CorruptionError."""
        return await self._pools.read.run(self._node.get_layout, digest)

    async def keep_layout(self, message: KeepLayout) -> Ok:
        """Store a layout that the sender has, unless it is on this node.

        Raises:
            NotFoundError: The sender does not have it.
            CorruptionError: The sender has sent another one.
            RefusedError: NO_SPACE: this node has no room for it, nor for the copies.
        """
        if not await self._pools.meta.run(self._node.keep_layout, message.layout):
            document = await self._peers.layout(message.worker, message.layout)
            try:
                await self._pools.meta.run(self._node.put_layout, document)
            except CapacityError as error:
                raise RefusedError(Refusal.NO_SPACE, str(error)) from error
        return Ok(message.round)

    async def put(self, message: ManifestPut) -> Ok:
        """Write a manifest, durably, to the node tier.

        There is no `await` between the last check of the round and the queueing of the write. A SEAL that
        comes later therefore waits for the write.

        Raises:
            FormatError: The manifest is not the one that the message names.
            NotFoundError: This sidecar has no shard of an own rank that the manifest names.
            RefusedError: CONFLICT if another manifest of this checkpoint exists.
            CapacityError: The node tier has no room.
        """
        manifest = await self._pools.read.run(check_put, message, self._pod.contract)
        refused = fence(self._pod.state, message.round)
        if refused is not None:
            raise_refused(refused)
        for number in self._pod.state.own_ranks:
            ref = manifest.ref(Rank(number))
            if self._node.find(ref) is None:
                raise NotFoundError(
                    f"step {message.step}: the shard of rank {number} that the manifest names is not "
                    f"on the node tier of worker {self._pod.state.worker}"
                )
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
        self._saves.flow.committed(message.step, message.round)
        return Ok(message.round)

    def _write(self, message: ManifestPut, manifest: Manifest) -> None:
        self._node.put_manifest(manifest.job.uid, manifest.checkpoint, message.manifest.encode())
