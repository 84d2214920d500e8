"""Fetch shards, manifests and layouts to this node, from the first place that has a good copy.

The places are the node tier, then every other member, then the object store. Each copy is verified. A bad
copy at a member is reported to it, and the next place is tried.

`PodPlaces` lists the places for the reader (holdfast_core.reading), in the same order. Among the
members, the worker whose rank saved the shard comes first. A shard is opened only when it is used.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from holdfast_core import logs
from holdfast_core.errors import (
    CorruptionError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import CheckpointId, Digest, Rank, ShardRef, TierName, worker_of
from holdfast_core.messages.schema import (
    Member,
    Ok,
    RestorePoint,
)
from holdfast_core.reading import ShardPlace
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Pool, Tasks
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.sources import ReaderSource, SourceErrors
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.wire.bulk import BulkPeers, Members

T = TypeVar("T")

_MANIFEST_SECONDS = 5.0
"""Time-out of one request for a manifest, so that a member that hangs delays the next source only briefly."""


class Fetcher:
    """Reader of the places that may have a part of a checkpoint."""

    def __init__(self, pod: Pod, tiers: Tiers, members: Members, metrics: Metrics) -> None:
        self._pod = pod
        self._tiers = tiers
        self._node = tiers.node
        self._store = tiers.store
        self._pools = tiers.pools
        self._members = members
        self._metrics = metrics
        self._tasks = Tasks()

    async def reset(self) -> None:
        """Cancel the reports of bad copies, because the round has ended."""
        await self._tasks.cancel()

    def namespace_of(self, point: RestorePoint) -> str:
        """Return the namespace, in the keys of the store, of the job that saved the checkpoint."""
        return self._pod.namespace_of(point)

    async def is_outlived(self) -> bool:
        """Return whether the present round has committed a step. Its ranks have been restored then."""
        found = await self._tiers.checkpoints(self._pod.job_uid)
        return any(checkpoint.round == self._pod.state.round for checkpoint in found)

    def others(self) -> tuple[Member, ...]:
        """Return all other members, beginning with the targets of this worker's copies."""
        state = self._pod.state
        if state.accepted is None:
            return ()
        targets = state.copy_targets()
        others = [m for m in state.accepted.members if m.worker != state.worker]
        return tuple(sorted(others, key=lambda m: (m.worker not in targets, m.worker)))

    # ------------------------------------------------------------------ manifest

    async def manifest(
        self, point: RestorePoint, checkpoint: CheckpointId, source_errors: SourceErrors
    ) -> Manifest | None:
        """Return the checkpoint's manifest and store it on the node tier.

        The sources are the node tier, the other members and the object store, in this order. A damaged
        manifest on this node is quarantined. None if no place has a good one; `source_errors` lists the
        errors then.
        """
        job_uid = self._pod.job_uid_of(point)
        try:
            document = await self._pools.read.run(self._node.get_manifest, job_uid, checkpoint)
            return await self._pools.read.run(self._accept, document, point, checkpoint)
        except UnreadableError as error:
            source_errors.failed("manifest in the node tier", error)
        except CorruptionError as error:
            source_errors.failed("manifest in the node tier", error)
            self._metrics.corruption(TierName.NODE)
            await self._pools.meta.run(self._node.quarantine_manifest, job_uid, checkpoint, error)
        except HoldfastError as error:
            source_errors.failed("manifest in the node tier", error)

        async def from_member(member: Member) -> Manifest:
            document = await self._members.control.manifest(
                member.worker, checkpoint, job_uid, seconds=_MANIFEST_SECONDS
            )
            return await self._store_manifest(document, point, checkpoint)

        async def from_store(store: ObjectTier) -> Manifest:
            document = await self._pools.fetch.run(
                store.get_manifest, self._pod.namespace_of(point), job_uid, checkpoint
            )
            return await self._store_manifest(document, point, checkpoint)

        return await self._from_elsewhere(
            "manifest", source_errors, self.others(), from_member, from_store
        )

    async def layout(self, ref: ShardRef, digest: Digest, namespace: str) -> bytes:
        """Return the layout of a shard, and try to store it on the node tier.

        The sources are the node tier, the members, beginning with the one whose rank saved the shard, and
        the object store.

        Args:
            ref: The shard.
            digest: Digest of its layout.
            namespace: Namespace of the job that saved the shard, as in the keys of the store.

        Raises:
            NotFoundError: No place has it. The message lists what was tried.
            UnavailableError: A place that may have it is unreachable or busy.
        """
        source_errors = SourceErrors()
        what = f"layout of rank {ref.rank}"
        try:
            return await self._pools.read.run(self._node.get_layout, digest)
        except HoldfastError as error:
            source_errors.failed(f"{what} in the node tier", error)

        async def from_member(member: Member) -> bytes:
            return await self._members.control.layout(member.worker, digest)

        async def from_store(store: ObjectTier) -> bytes:
            return await self._pools.fetch.run(store.get_layout, namespace, ref, digest)

        home = worker_of(ref.rank, self._pod.contract.procs_per_worker)
        members = sorted(self.others(), key=lambda member: member.worker != home)
        found = await self._from_elsewhere(what, source_errors, members, from_member, from_store)
        if found is not None:
            return await self._keep_layout(found)
        raise (UnavailableError if source_errors.retryable else NotFoundError)(str(source_errors))

    async def _keep_layout(self, document: bytes) -> bytes:
        """Store a layout on the node tier. A failure is only logged: a full node must not delay a restore."""
        try:
            await self._pools.meta.run(self._node.put_layout, document)
        except HoldfastError as error:
            logs.warning("writing a layout to the node tier failed", error=str(error))
        return document

    def _accept(self, document: bytes, point: RestorePoint, checkpoint: CheckpointId) -> Manifest:
        """Parse a manifest. Raises CorruptionError unless it is the document that the restore point names."""
        found = digest_of(document)
        if point.manifest is not None and found != point.manifest:
            raise CorruptionError(f"digest {found}, expected {point.manifest}")
        namespace = self._pod.namespace_of(point)
        return parse_manifest_of(
            document, self._pod.job_uid_of(point), checkpoint, namespace=namespace
        )

    async def _store_manifest(
        self, document: bytes, point: RestorePoint, checkpoint: CheckpointId
    ) -> Manifest:
        """Check a manifest and write it to the node tier."""
        manifest = await self._pools.read.run(self._accept, document, point, checkpoint)
        await self._pools.meta.run(
            self._node.put_manifest, manifest.job.uid, manifest.checkpoint, document
        )
        return manifest

    # ------------------------------------------------------------------ shards

    async def shard(
        self, ref: ShardRef, point: RestorePoint, source_errors: SourceErrors
    ) -> TierName | None:
        """Bring a shard to the node tier, and return the tier that served it.

        NODE if it is here already. None if every source failed (`source_errors` lists the errors).
        """
        if await self._pools.read.run(self._node.find, ref) is not None:
            return TierName.NODE
        source_errors.add(f"rank {ref.rank}: not in the node tier")

        async def from_member(member: Member) -> TierName:
            try:
                copied = await self._pools.fetch.run(self._members.bulk.copy, member, ref)
            except CorruptionError:
                self.report_bad_copy(member, ref)
                raise
            self._metrics.fetched(TierName.PEER, copied.received_bytes)
            return TierName.PEER

        async def from_store(store: ObjectTier) -> TierName:
            record = await self._pools.fetch.run(
                store.download_shard, self._pod.namespace_of(point), ref, self._node.begin_copy
            )
            self._metrics.fetched(TierName.OBJECT, record.file_bytes)
            return TierName.OBJECT

        what = f"rank {ref.rank}"
        return await self._from_elsewhere(
            what, source_errors, self.others(), from_member, from_store
        )

    # ------------------------------------------------------------------ sources

    async def _from_elsewhere(
        self,
        what: str,
        source_errors: SourceErrors,
        members: Sequence[Member],
        from_member: Callable[[Member], Awaitable[T]],
        from_store: Callable[[ObjectTier], Awaitable[T]],
    ) -> T | None:
        """Try members and then the object store, and return what the first of them provides.

        None if none does; `source_errors` lists the errors then. Damaged copies are counted.
        """
        for member in members:
            try:
                return await from_member(member)
            except (HoldfastError, OSError) as error:
                source_errors.failed(f"{what} at worker {member.worker}", error)
                if isinstance(error, CorruptionError):
                    self._metrics.corruption(TierName.PEER)
        if self._store is None:
            return None
        try:
            return await from_store(self._store)
        except (HoldfastError, OSError) as error:
            source_errors.failed(f"{what} in the object store", error)
            if isinstance(error, CorruptionError):
                self._metrics.corruption(TierName.OBJECT)
            return None

    def report_bad_copy(self, member: Member, ref: ShardRef) -> None:
        """Report a bad copy to the member, without waiting. The member verifies its own copy itself."""
        self._tasks.spawn(self._suspect(member, ref), "suspect")

    async def _suspect(self, member: Member, ref: ShardRef) -> None:
        try:
            await self._members.control.call(member.worker, ref, Ok)
        except HoldfastError as error:
            logs.warning("reporting a bad copy failed", worker=member.worker, error=str(error))


@dataclass(frozen=True, slots=True)
class PodShardPlace(ShardPlace):
    """One place that may hold a shard."""

    pool: Pool
    """Threads to open and read the shard in."""
    member: Member | None = None
    """The member, where the tier is PEER."""


@dataclass(frozen=True, slots=True)
class PodPlaces:
    """The places of a checkpoint's shards, as `reading.CheckpointPlaces`."""

    manifest: Manifest
    namespace: str
    """Namespace of the job that saved it, as in the keys of the store."""
    tiers: Tiers
    bulk: BulkPeers
    fetcher: Fetcher
    metrics: Metrics
    procs_per_worker: int

    async def layout(self, rank: Rank) -> RankLayout:
        digest = self.manifest.shards[rank].layout
        document = await self.fetcher.layout(self.manifest.ref(rank), digest, self.namespace)
        return await self.run(partial(parse_rank_layout, document))

    def places(self, rank: Rank) -> tuple[PodShardPlace, ...]:
        ref, pools, store = self.manifest.ref(rank), self.tiers.pools, self.tiers.store
        home = worker_of(rank, self.procs_per_worker)
        members = sorted(self.fetcher.others(), key=lambda member: member.worker != home)
        found = [PodShardPlace(TierName.NODE, "node tier", partial(self._own, ref), pools.fill)]
        found += [
            PodShardPlace(
                TierName.PEER,
                f"worker {member.worker}",
                partial(self.bulk.open, member, ref),
                pools.fetch,
                member,
            )
            for member in members
        ]
        if store is not None:
            opened = partial(store.open_shard, self.namespace, ref)
            found.append(PodShardPlace(TierName.OBJECT, "object store", opened, pools.fetch))
        return tuple(found)

    async def run(self, call: Callable[[], T], place: PodShardPlace | None = None) -> T:
        return await (self.tiers.pools.fill if place is None else place.pool).run(call)

    async def failed(self, place: PodShardPlace, rank: Rank, error: HoldfastError) -> None:
        """Quarantine a damaged copy on this node, or ask the member to verify its own."""
        logs.warning(
            "a shard is read from another source", rank=rank, source=place.name, error=str(error)
        )
        if not isinstance(error, CorruptionError):
            return
        self.metrics.corruption(place.tier)
        ref = self.manifest.ref(rank)
        if place.member is not None:
            self.fetcher.report_bad_copy(place.member, ref)
        elif place.tier is TierName.NODE:
            await self.tiers.pools.meta.run(self.tiers.node.quarantine, ref, error)

    def _own(self, ref: ShardRef) -> ShardSource:
        return ReaderSource(self.tiers.node.open_shard(ref))
