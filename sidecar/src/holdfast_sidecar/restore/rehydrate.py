"""Brings the own ranks' shards of the restore point to this node before the ranks start.

Per shard: node tier, then every other member, then the object store; each copy is verified, a bad
one is quarantined where it lies, and the next source is tried. It is tried again until the operator
chooses differently: never starts from nothing. `cannot_restore` tells the operator what was tried: at
once where every place said no, after a while where one that may have it is silent or busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.clock import Clock
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
from holdfast_core.tiers.base import NodeTier, ObjectTier
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.backoff import Patience
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.restore.tried import Tried
from holdfast_sidecar.wire.bulk import BulkPeers
from holdfast_sidecar.wire.client import Peers

_MANIFEST_SECONDS = 5.0
"""A member that hangs must not hold up the next source for long."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What the ranks of this pod restore from; `manifest` is None without a restore point."""

    point: RestorePoint
    manifest: Manifest | None
    refs: dict[Rank, ShardRef]
    payload_bytes: dict[Rank, int]
    sources: dict[Rank, TierName]
    """Tier that each shard came from when this round began."""
    layout: bytes | None = None
    """The checkpoint's layout, where another number of ranks saved it. What a rank needs is known
    when it says what it wants: no shard is brought here whole."""


class Rehydrator:
    """One at a time: the restore point of the round that is held."""

    def __init__(
        self,
        settings: Settings,
        current: Callable[[], RoundState],
        node: NodeTier,
        store: ObjectTier | None,
        *,
        peers: Peers,
        bulk: BulkPeers,
        pools: Pools,
        metrics: Metrics,
        clock: Clock,
        patience: Callable[[], Patience],
        on_change: Callable[[], None],
    ) -> None:
        self._contract = settings.contract
        self._current = current
        self._node = node
        self._store = store
        self._peers = peers
        self._bulk = bulk
        self._pools = pools
        self._metrics = metrics
        self._clock = clock
        self._patience = patience
        self._on_change = on_change
        self._tasks = Tasks()
        self._kick = asyncio.Event()
        self.restored: Restored | None = None
        self.seconds: float | None = None
        self._tried = ""
        """Why the restore point is not here."""
        self._failed: dict[Rank, str] = {}
        """Why it cannot be had for a rank."""

    @property
    def cannot_restore(self) -> str:
        """What the operator hears; empty while all is well."""
        return "; ".join(words for words in (self._tried, *self._failed.values()) if words)

    async def reset(self) -> None:
        await self._tasks.cancel()
        self.restored = None
        self.seconds = None
        self._tried = ""
        self._failed = {}

    def begin(self, message: Round) -> None:
        """Call once a round; `kick` when members change."""
        self._tasks.spawn(self._until_done(message.restore_point), "rehydrate")

    def kick(self) -> None:
        self._kick.set()

    async def refetch(self, rank: Rank, restored: Restored) -> TierName:
        """The node's copy turned out bad and is quarantined: fetch it again, and again while a place
        that may have it is silent or busy.

        Raises NotFoundError with everything that was tried, RefusedError (BUSY) when the round ends.
        """
        patience = self._patience()
        while True:
            tried = Tried()
            tier = await self._shard(restored.refs[rank], restored.point, tried)
            if tier is not None:
                restored.sources[rank] = tier
                self.failed(rank, "")
                return tier
            if not tried.may_come:
                raise NotFoundError(f"cannot be restored: {tried}")
            if patience.over:
                self.failed(rank, str(tried))
            await patience.pause()
            if self.restored is not restored:
                raise RefusedError(
                    Refusal.BUSY,
                    f"the round of the restore ended while rank {rank} waited: {tried}",
                )

    async def layout(self, restored: Restored) -> bytes:
        """The restore point's layout, of all ranks that saved it. Raises NotFoundError with
        everything that was tried, where all said that they have none; UnavailableError, where it
        may come."""
        if restored.manifest is None:
            raise NotFoundError("there is no restore point in this round")
        if restored.layout is not None:
            return restored.layout
        return await self.layout_of(restored.point, restored.manifest)

    def namespace_of(self, point: RestorePoint) -> str:
        """Of the job that saved it, in the keys of the store."""
        return point.job_namespace or self._contract.namespace

    def failed(self, rank: Rank, words: str) -> None:
        """The rank cannot be restored from what can be had; without words: it can."""
        if words == self._failed.get(rank, ""):
            return
        self._failed[rank] = words
        self._on_change()

    async def _until_done(self, point: RestorePoint) -> None:
        started = self._clock.monotonic()
        patience = self._patience()
        said = ""
        while True:
            self._kick.clear()
            tried = Tried()
            restored = None
            try:
                restored = await self._attempt(point, tried)
            except (HoldfastError, OSError) as error:
                tried.failed("this node", error)
            if restored is not None:
                self.restored = restored
                self._tried = ""
                self.seconds = self._clock.monotonic() - started
                self._metrics.recovered("rehydrate", self.seconds)
                logs.info(
                    "restore point is here",
                    step=point.step,
                    sources={str(r): str(t) for r, t in restored.sources.items()},
                )
                self._on_change()
                return
            if (words := str(tried)) != said:
                said = words
                logs.warning("cannot restore yet", step=point.step, tried=words)
            if words != self._tried and (patience.over or not tried.may_come):
                self._tried = words
                self._on_change()
            try:
                await asyncio.wait_for(self._kick.wait(), patience.next_seconds())
            except TimeoutError:
                continue

    async def _attempt(self, point: RestorePoint, tried: Tried) -> Restored | None:
        if point.step is None or point.round is None:
            return Restored(point, None, {}, {}, {})
        manifest = await self.manifest(point, CheckpointId(point.step, point.round), tried)
        if manifest is None:
            return None
        state = self._current()
        if manifest.world_size != state.world_size:
            try:
                layout = await self.layout_of(point, manifest)
            except HoldfastError as error:
                tried.failed(f"layout of step {point.step}", error)
                return None
            return Restored(point, manifest, {}, {}, {}, layout)
        job_uid = self._job_uid(point)
        records = {s.rank: s for s in manifest.shards}
        own = [Rank(r) for r in state.own_ranks]
        refs = {r: ShardRef(job_uid, point.step, point.round, r, records[r].blake3) for r in own}
        found = await asyncio.gather(*(self._shard(refs[r], point, tried) for r in own))
        sources = {r: tier for r, tier in zip(own, found, strict=True) if tier is not None}
        if len(sources) < len(own):
            return None
        sizes = {r: records[r].payload_bytes for r in own}
        return Restored(point, manifest, refs, sizes, sources)

    def _job_uid(self, point: RestorePoint) -> JobUid:
        return point.job_uid or self._contract.job_uid

    def others(self) -> tuple[Member, ...]:
        """Every other member, the holders of own copies first."""
        state = self._current()
        if state.held is None:
            return ()
        targets = state.copy_targets()
        others = [m for m in state.held.members if m.worker != state.worker]
        return tuple(sorted(others, key=lambda m: (m.worker not in targets, m.worker)))

    # ------------------------------------------------------------------ manifest

    async def manifest(
        self, point: RestorePoint, checkpoint: CheckpointId, tried: Tried
    ) -> Manifest | None:
        """On the node tier from now on; None where no place has it (`tried` says why)."""
        job_uid = self._job_uid(point)
        try:
            document = await self._pools.read.run(self._node.get_manifest, job_uid, checkpoint)
            return self._accept(document, point, checkpoint)
        except CorruptionError as error:
            tried.failed("manifest in the node tier", error)
            self._metrics.corruption(TierName.NODE)
            await self._pools.meta.run(
                self._node.quarantine_manifest, job_uid, checkpoint, str(error)
            )
        except HoldfastError as error:
            tried.failed("manifest in the node tier", error)
        for member in self.others():
            try:
                answer = await self._ask(member, job_uid, checkpoint)
                document = answer.manifest.encode()
                manifest = self._accept(document, point, checkpoint)
                layout = answer.layout.encode() if answer.layout is not None else None
                await self._keep(job_uid, checkpoint, document, layout, manifest)
                return manifest
            except HoldfastError as error:
                if isinstance(error, CorruptionError):
                    self._metrics.corruption(TierName.PEER)
                tried.failed(f"manifest at worker {member.worker}", error)
        if self._store is None:
            return None
        namespace = self.namespace_of(point)
        try:
            document = await self._pools.fetch.run(
                self._store.get_manifest, namespace, job_uid, checkpoint
            )
            manifest = self._accept(document, point, checkpoint)
            layout = await self._pools.fetch.run(
                self._store.get_layout, namespace, job_uid, manifest.layout
            )
            await self._keep(job_uid, checkpoint, document, layout, manifest)
            return manifest
        except HoldfastError as error:
            if isinstance(error, CorruptionError):
                self._metrics.corruption(TierName.OBJECT)
            tried.failed("manifest in the object store", error)
            return None

    async def _ask(
        self, member: Member, job_uid: JobUid, checkpoint: CheckpointId
    ) -> ManifestDocument:
        """Manifest and layout as a member has them."""
        query = {
            "step": str(checkpoint.step),
            "round": str(checkpoint.round),
            "jobUid": str(job_uid),
        }
        return await self._peers.get(
            member.worker,
            "/v1/manifest",
            ManifestDocument,
            query=query,
            seconds=_MANIFEST_SECONDS,
        )

    async def layout_of(self, point: RestorePoint, manifest: Manifest) -> bytes:
        """The layout that the manifest names, in the node tier from now on. Raises as `layout`."""
        digest, job_uid = manifest.layout, self._job_uid(point)
        tried = Tried()
        try:
            return await self._pools.read.run(self._node.get_layout, digest)
        except HoldfastError as error:
            tried.failed("layout in the node tier", error)
        for member in self.others():
            try:
                answer = await self._ask(member, job_uid, manifest.checkpoint)
                if answer.layout is not None and digest_of(answer.layout.encode()) == digest:
                    return await self._keep_layout(answer.layout.encode())
                tried.add(f"layout at worker {member.worker}: it has another or none")
            except HoldfastError as error:
                tried.failed(f"layout at worker {member.worker}", error)
        if self._store is not None:
            try:
                document = await self._pools.fetch.run(
                    self._store.get_layout, self.namespace_of(point), job_uid, digest
                )
                if digest_of(document) != digest:
                    raise CorruptionError(f"digest {digest_of(document)}, expected {digest}")
                return await self._keep_layout(document)
            except HoldfastError as error:
                tried.failed("layout in the object store", error)
        raise (UnavailableError if tried.may_come else NotFoundError)(str(tried))

    async def _keep_layout(self, document: bytes) -> bytes:
        """It is good without this node: one that is full must not hold up a restore."""
        try:
            await self._pools.meta.run(self._node.put_layout, document)
        except HoldfastError as error:
            logs.warning("a layout was not kept", error=str(error))
        return document

    def _accept(self, document: bytes, point: RestorePoint, checkpoint: CheckpointId) -> Manifest:
        """Raises CorruptionError unless it is the very document that the restore point names."""
        found = digest_of(document)
        if point.manifest is not None and found != point.manifest:
            raise CorruptionError(f"digest {found}, the restore point names {point.manifest}")
        namespace = self.namespace_of(point)
        return parse_manifest_of(document, self._job_uid(point), checkpoint, namespace=namespace)

    async def _keep(
        self,
        job_uid: JobUid,
        checkpoint: CheckpointId,
        document: bytes,
        layout: bytes | None,
        manifest: Manifest,
    ) -> None:
        if layout is not None and digest_of(layout) == manifest.layout:
            await self._pools.meta.run(self._node.put_layout, layout)
        await self._pools.meta.run(self._node.put_manifest, job_uid, checkpoint, document)

    # ------------------------------------------------------------------ shards

    async def fetch(self, ref: ShardRef, tried: Tried) -> TierName | None:
        """Bring a shard of this job to the node tier. See `_shard`."""
        return await self._shard(ref, RestorePoint(), tried)

    async def _shard(self, ref: ShardRef, point: RestorePoint, tried: Tried) -> TierName | None:
        """Where it is or came from; None when every source failed (`tried` says how)."""
        if await self._pools.read.run(self._node.find, ref) is not None:
            return TierName.NODE
        tried.add(f"rank {ref.rank}: not in the node tier")
        for member in self.others():
            try:
                record = await self._pools.fetch.run(self._bulk.fetch, member, ref)
                self._metrics.fetched(TierName.PEER, record.file_bytes)
                return TierName.PEER
            except CorruptionError as error:
                self._metrics.corruption(TierName.PEER)
                tried.failed(f"rank {ref.rank}: bad copy at worker {member.worker}", error)
                self.accuse(member, ref)
            except (HoldfastError, OSError) as error:
                tried.failed(f"rank {ref.rank}: worker {member.worker}", error)
        if self._store is None:
            return None
        namespace = self.namespace_of(point)
        try:
            record = await self._pools.fetch.run(
                self._store.download_shard, namespace, ref, self._node.begin_copy
            )
            self._metrics.fetched(TierName.OBJECT, record.file_bytes)
            return TierName.OBJECT
        except CorruptionError as error:
            self._metrics.corruption(TierName.OBJECT)
            tried.failed(f"rank {ref.rank}: bad copy in the object store", error)
        except (HoldfastError, OSError) as error:
            tried.failed(f"rank {ref.rank}: object store", error)
        return None

    def accuse(self, member: Member, ref: ShardRef) -> None:
        """Tell the member that its copy is bad, without waiting: it reads it back itself."""
        self._tasks.spawn(self._suspect(member, ref), "suspect")

    async def _suspect(self, member: Member, ref: ShardRef) -> None:
        message = Suspect(ref.job_uid, ref.step, ref.round, ref.rank, ref.blake3)
        try:
            await self._peers.call(member.worker, message, Ok)
        except HoldfastError as error:
            logs.warning("a bad copy was not reported", worker=member.worker, error=str(error))
