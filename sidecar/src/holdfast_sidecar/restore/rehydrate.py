"""Bring the own ranks' shards of the restore point to this node before the ranks start.

The sources of a shard are the node tier, then every other member, then the object store. Each copy is
verified. A bad copy at a member is reported to it, and the next source is tried. Failed attempts are
repeated until a new round begins; the ranks never start without their restore point. If it was saved by
another number of ranks, only its manifest and layout are brought here.

`cannot_restore` reports to the operator what was tried: immediately if every place replied that it has
nothing, and after `Settings.restore_patience_seconds` if a place that may have the data is unreachable
or busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast_core.errors import (
    CorruptionError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.format.digest import digest_of
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, JobUid, Rank, ShardRef, TierName
from holdfast_core.messages.schema import (
    ManifestDocument,
    Member,
    Ok,
    Refusal,
    RestorePoint,
    Round,
    Suspect,
)
from holdfast_core.tiers.base import ObjectTier
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.restore.source_errors import SourceErrors
from holdfast_sidecar.wire.members import Members

T = TypeVar("T")

_MANIFEST_SECONDS = 5.0
"""Time-out of one request for a manifest, so that a member that hangs delays the next source only briefly."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What the ranks of this pod restore from."""

    point: RestorePoint
    manifest: Manifest | None
    """None if the round has no restore point."""
    refs: dict[Rank, ShardRef]
    """The own ranks' shards. Empty if another number of ranks saved the checkpoint."""
    payload_bytes: dict[Rank, int]
    sources: dict[Rank, TierName]
    """Tier that served each rank's shard. Refetches and fills update it."""
    layout: bytes | None = None
    """The checkpoint's layout if another number of ranks saved it, else None. In that case no whole shard
    is brought here, because the byte ranges that a rank needs are known only from its Fill."""


class Rehydrator:
    """Fetcher of the current round's restore point, and of shards that a fill or the scrub needs again."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        members: Members,
        metrics: Metrics,
        on_change: Callable[[], None],
    ) -> None:
        self._pod = pod
        self._node = tiers.node
        self._store = tiers.store
        self._pools = tiers.pools
        self._members = members
        self._metrics = metrics
        self._on_change = on_change
        self._tasks = Tasks()
        self._kick = asyncio.Event()
        self.restored: Restored | None = None
        """What the restore point consists of, once it is on this node."""
        self.seconds: float | None = None
        """How long it took to bring the restore point here."""
        self._tried = ""
        """Why the restore point is not on this node."""
        self._failed: dict[Rank, str] = {}
        """Why a rank cannot be restored, by rank. An empty text: it can."""

    @property
    def cannot_restore(self) -> str:
        """The reasons that are reported to the operator; empty if there are none."""
        return "; ".join(text for text in (self._tried, *self._failed.values()) if text)

    async def reset(self) -> None:
        """Cancel everything of the round that ended."""
        await self._tasks.cancel()
        self.restored = None
        self.seconds = None
        self._tried = ""
        self._failed = {}

    def begin(self, message: Round) -> None:
        """Start to bring the restore point here. Call it once a round, and `kick` when members change."""
        self._tasks.spawn(self._until_done(message.restore_point), "rehydrate")

    def kick(self) -> None:
        """Begin the next attempt without waiting for the back-off."""
        self._kick.set()

    async def refetch(self, rank: Rank, restored: Restored) -> TierName:
        """Fetch a rank's shard again, after the copy on this node was quarantined or is missing.

        This is retried as long as a place that may have the shard is unreachable or busy.

        Returns:
            The tier that served the shard.

        Raises:
            NotFoundError: Every place replied that it has no good copy. The message lists them.
            RefusedError: BUSY: the round has ended.
        """
        patience = self._pod.patience()
        while True:
            source_errors = SourceErrors()
            tier = await self._shard(restored.refs[rank], restored.point, source_errors)
            if tier is not None:
                restored.sources[rank] = tier
                self.failed(rank, "")
                return tier
            if not source_errors.retryable:
                raise NotFoundError(f"cannot be restored: {source_errors}")
            if patience.over:
                self.failed(rank, str(source_errors))
            await patience.pause()
            if self.restored is not restored:
                raise RefusedError(
                    Refusal.BUSY,
                    f"the round of the restore ended while rank {rank} waited: {source_errors}",
                )

    async def layout(self, restored: Restored) -> bytes:
        """Return the restore point's layout, which describes all ranks that saved it.

        Raises:
            NotFoundError: There is no restore point, or no place has the layout. The message lists what
                was tried.
            UnavailableError: A place that may have the layout is unreachable or busy.
        """
        if restored.manifest is None:
            raise NotFoundError("there is no restore point in this round")
        if restored.layout is not None:
            return restored.layout
        return await self.layout_of(restored.point, restored.manifest)

    def namespace_of(self, point: RestorePoint) -> str:
        """Return the namespace, in the keys of the store, of the job that saved the restore point."""
        return point.job_namespace or self._pod.contract.namespace

    def failed(self, rank: Rank, text: str) -> None:
        """Set the reason why the rank cannot be restored. An empty `text` removes it."""
        if text == self._failed.get(rank, ""):
            return
        self._failed[rank] = text
        self._on_change()

    async def _until_done(self, point: RestorePoint) -> None:
        started = self._pod.clock.monotonic()
        patience = self._pod.patience()
        logged = ""
        while True:
            self._kick.clear()
            source_errors = SourceErrors()
            restored = None
            try:
                restored = await self._attempt(point, source_errors)
            except (HoldfastError, OSError) as error:
                source_errors.failed("this node", error)
            if restored is not None:
                self.restored = restored
                self._tried = ""
                self.seconds = self._pod.clock.monotonic() - started
                self._metrics.recovered("rehydrate", self.seconds)
                logs.info(
                    "all shards of the restore point are on the node",
                    step=point.step,
                    sources={str(r): str(t) for r, t in restored.sources.items()},
                )
                self._on_change()
                return
            if (text := str(source_errors)) != logged:
                logged = text
                logs.warning(
                    "the restore point cannot be read yet", step=point.step, source_errors=text
                )
            if text != self._tried and (patience.over or not source_errors.retryable):
                self._tried = text
                self._on_change()
            try:
                await asyncio.wait_for(self._kick.wait(), patience.next_seconds())
            except TimeoutError:
                continue

    async def _attempt(self, point: RestorePoint, source_errors: SourceErrors) -> Restored | None:
        """Try once to bring the restore point here.

        None if a part is missing; `source_errors` lists the errors then.
        """
        if point.step is None or point.round is None:
            return Restored(point, None, {}, {}, {})
        manifest = await self.manifest(point, CheckpointId(point.step, point.round), source_errors)
        if manifest is None:
            return None
        state = self._pod.state
        if manifest.world_size != state.world_size:
            try:
                layout = await self.layout_of(point, manifest)
            except HoldfastError as error:
                source_errors.failed(f"layout of step {point.step}", error)
                return None
            return Restored(point, manifest, {}, {}, {}, layout)
        job_uid = self._job_uid(point)
        records = {s.rank: s for s in manifest.shards}
        own = [Rank(r) for r in state.own_ranks]
        refs = {r: ShardRef(job_uid, point.step, point.round, r, records[r].blake3) for r in own}
        found = await asyncio.gather(*(self._shard(refs[r], point, source_errors) for r in own))
        sources = {r: tier for r, tier in zip(own, found, strict=True) if tier is not None}
        if len(sources) < len(own):
            return None
        sizes = {r: records[r].payload_bytes for r in own}
        return Restored(point, manifest, refs, sizes, sources)

    def _job_uid(self, point: RestorePoint) -> JobUid:
        return point.job_uid or self._pod.contract.job_uid

    def others(self) -> tuple[Member, ...]:
        """Return all other members, beginning with the targets of this worker's copies."""
        state = self._pod.state
        if state.held is None:
            return ()
        targets = state.copy_targets()
        others = [m for m in state.held.members if m.worker != state.worker]
        return tuple(sorted(others, key=lambda m: (m.worker not in targets, m.worker)))

    # ------------------------------------------------------------------ manifest

    async def manifest(
        self, point: RestorePoint, checkpoint: CheckpointId, source_errors: SourceErrors
    ) -> Manifest | None:
        """Return the checkpoint's manifest and store it on the node tier, with its layout if available.

        The sources are the node tier, the other members and the object store, in this order. A damaged
        manifest on this node is quarantined. None if no place has a good one; `source_errors` lists the
        errors then.
        """
        job_uid = self._job_uid(point)
        try:
            document = await self._pools.read.run(self._node.get_manifest, job_uid, checkpoint)
            return self._accept(document, point, checkpoint)
        except CorruptionError as error:
            source_errors.failed("manifest in the node tier", error)
            self._metrics.corruption(TierName.NODE)
            await self._pools.meta.run(
                self._node.quarantine_manifest, job_uid, checkpoint, str(error)
            )
        except HoldfastError as error:
            source_errors.failed("manifest in the node tier", error)

        async def from_member(member: Member) -> Manifest:
            answer = await self._request_documents(member, job_uid, checkpoint)
            layout = None if answer.layout is None else answer.layout.encode()
            return await self._accept_and_store(answer.manifest.encode(), layout, point, checkpoint)

        async def from_store(store: ObjectTier) -> Manifest:
            fetch, namespace = self._pools.fetch.run, self.namespace_of(point)
            document = await fetch(store.get_manifest, namespace, job_uid, checkpoint)
            digest = self._accept(document, point, checkpoint).layout
            layout = await fetch(store.get_layout, namespace, job_uid, digest)
            return await self._accept_and_store(document, layout, point, checkpoint)

        return await self._from_elsewhere("manifest", source_errors, from_member, from_store)

    async def _request_documents(
        self, member: Member, job_uid: JobUid, checkpoint: CheckpointId
    ) -> ManifestDocument:
        """Request a checkpoint's manifest and layout from a member."""
        query = {
            "step": str(checkpoint.step),
            "round": str(checkpoint.round),
            "jobUid": str(job_uid),
        }
        return await self._members.control.get(
            member.worker,
            "/v1/manifest",
            ManifestDocument,
            query=query,
            seconds=_MANIFEST_SECONDS,
        )

    async def layout_of(self, point: RestorePoint, manifest: Manifest) -> bytes:
        """Return the layout that the manifest names, and try to store it on the node tier.

        Raises NotFoundError if no place has it, and UnavailableError if a place that may have it is
        unreachable or busy.
        """
        digest, job_uid = manifest.layout, self._job_uid(point)
        source_errors = SourceErrors()
        try:
            return await self._pools.read.run(self._node.get_layout, digest)
        except HoldfastError as error:
            source_errors.failed("layout in the node tier", error)

        async def from_member(member: Member) -> bytes:
            answer = await self._request_documents(member, job_uid, manifest.checkpoint)
            if answer.layout is None or digest_of(answer.layout.encode()) != digest:
                raise NotFoundError("the worker has another layout or none")
            return answer.layout.encode()

        async def from_store(store: ObjectTier) -> bytes:
            document = await self._pools.fetch.run(
                store.get_layout, self.namespace_of(point), job_uid, digest
            )
            if digest_of(document) != digest:
                raise CorruptionError(f"digest {digest_of(document)}, expected {digest}")
            return document

        found = await self._from_elsewhere("layout", source_errors, from_member, from_store)
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
        namespace = self.namespace_of(point)
        return parse_manifest_of(document, self._job_uid(point), checkpoint, namespace=namespace)

    async def _accept_and_store(
        self, document: bytes, layout: bytes | None, point: RestorePoint, checkpoint: CheckpointId
    ) -> Manifest:
        """Check a manifest, write it and its layout to the node tier, and return it.

        Raises CorruptionError as `_accept` does, and HoldfastError if this node cannot store it.
        """
        manifest = self._accept(document, point, checkpoint)
        if layout is not None and digest_of(layout) == manifest.layout:
            await self._pools.meta.run(self._node.put_layout, layout)
        job_uid = self._job_uid(point)
        await self._pools.meta.run(self._node.put_manifest, job_uid, checkpoint, document)
        return manifest

    # ------------------------------------------------------------------ shards

    async def fetch(self, ref: ShardRef, source_errors: SourceErrors) -> TierName | None:
        """Bring a shard of this job to the node tier. The result is that of `_shard`."""
        return await self._shard(ref, RestorePoint(), source_errors)

    async def _shard(
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
                record = await self._pools.fetch.run(self._members.bulk.fetch, member, ref)
            except CorruptionError:
                self.accuse(member, ref)
                raise
            self._metrics.fetched(TierName.PEER, record.file_bytes)
            return TierName.PEER

        async def from_store(store: ObjectTier) -> TierName:
            record = await self._pools.fetch.run(
                store.download_shard, self.namespace_of(point), ref, self._node.begin_copy
            )
            self._metrics.fetched(TierName.OBJECT, record.file_bytes)
            return TierName.OBJECT

        what = f"rank {ref.rank}"
        return await self._from_elsewhere(what, source_errors, from_member, from_store)

    # ------------------------------------------------------------------ sources

    async def _from_elsewhere(
        self,
        what: str,
        source_errors: SourceErrors,
        from_member: Callable[[Member], Awaitable[T]],
        from_store: Callable[[ObjectTier], Awaitable[T]],
    ) -> T | None:
        """Try the other members and then the object store, and return what the first of them provides.

        None if none does; `source_errors` lists the errors then. Damaged copies are counted.
        """
        for member in self.others():
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

    def accuse(self, member: Member, ref: ShardRef) -> None:
        """Report a bad copy to the member, without waiting. The member verifies its own copy itself."""
        self._tasks.spawn(self._suspect(member, ref), "suspect")

    async def _suspect(self, member: Member, ref: ShardRef) -> None:
        message = Suspect(ref.job_uid, ref.step, ref.round, ref.rank, ref.blake3)
        try:
            await self._members.control.call(member.worker, message, Ok)
        except HoldfastError as error:
            logs.warning("reporting a bad copy failed", worker=member.worker, error=str(error))
