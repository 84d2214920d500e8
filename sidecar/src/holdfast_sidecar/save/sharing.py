"""Uploads one own shard: as little of it as the store still needs, compressed where that is asked for.
Blocking; runs in the store's pool.

Gathers what the plan (format.pack_plan) decides on: how the store holds this rank's shard of the
newest persisted checkpoint, and the chunk tables of the ranks that hold the same tensors. Whatever of
it cannot be had now is taken for nothing shared: bytes are sent twice rather than waited for.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast_core.clock import Clock
from holdfast_core.contract import SidecarContract
from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
)
from holdfast_core.format.digest import digest_of
from holdfast_core.format.layout import parse_layout
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, Rank, ShardRef, Worker, worker_of
from holdfast_core.messages.schema import PersistRequest, Reference
from holdfast_core.shards.coding import chunk_widths
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import PackIndex, unshared_index
from holdfast_core.shards.pack_plan import Earlier, Shared, plan_pack, replica_groups, shared_with
from holdfast_core.store.tier import S3ObjectTier
from holdfast_core.tiers.base import NodeTier, ObjectTier, ShardReader
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.save.plan import StoredAs
from holdfast_sidecar.wire.bulk import BulkPeers

_TABLES_SECONDS = 60.0
"""For the tables of all other ranks together; then the upload begins with those that came."""


class ShardUploader:
    """One upload at a time (plan.startable)."""

    def __init__(
        self,
        contract: SidecarContract,
        current: Callable[[], RoundState],
        node: NodeTier,
        store: ObjectTier,
        *,
        bulk: BulkPeers,
        clock: Clock,
    ) -> None:
        self._contract = contract
        self._current = current
        self._node = node
        self._store = store
        self._packing = store if isinstance(store, S3ObjectTier) else None
        self._bulk = bulk
        self._clock = clock
        self._groups: tuple[Digest, tuple[tuple[Rank, ...], ...]] | None = None
        self._widths: dict[Digest, bytes] = {}
        """By the layout of an own rank; of the newest checkpoint alone."""

    def upload(self, ref: ShardRef, request: PersistRequest | None) -> StoredAs:
        """The store holds the shard when this returns: how. Raises NotFoundError, CorruptionError (the
        own shard), AlreadyExistsError (the store holds other bytes), and what the tier raises."""
        with self._node.open_shard(ref) as reader:
            found = None if request is None else self._upload_pack(reader, request)
            if found is None:
                self._store.upload_shard(self._contract.namespace, reader)
            return found or StoredAs()

    def _upload_pack(self, reader: ShardReader, request: PersistRequest) -> StoredAs | None:
        """None: the shard is to be stored whole. Where there is something under the whole shard's
        name it must be that: readers look there first."""
        store, ref, namespace = self._packing, reader.record.ref, self._contract.namespace
        if store is None or request.whole or store.has_whole(namespace, ref):
            return None
        if (found := self._found(store, ref)) is not None:
            return found
        index = self._plan(store, reader, request)
        widths = self._chunk_widths(reader) if request.compress else None
        if index is None and widths is not None:
            index = unshared_index(Trailer(reader.record, reader.table))
        if index is None:
            return None
        try:
            if widths is None:
                store.upload_pack(namespace, reader, index)
            else:
                store.upload_encoded(namespace, reader, index, widths)
        except AlreadyExistsError:
            # Of another attempt that had other tables: as good as ours, and never overwritten.
            return self._found(store, ref)
        return _stored_as(index)

    def _found(self, store: S3ObjectTier, ref: ShardRef) -> StoredAs | None:
        """The pack that an earlier attempt left, unless it is bad."""
        try:
            index = store.stored(self._contract.namespace, ref, looks=1).index
        except (NotFoundError, CorruptionError):
            return None
        return None if index is None else _stored_as(index)

    # ------------------------------------------------------------------ what is known

    def _plan(
        self, store: S3ObjectTier, reader: ShardReader, request: PersistRequest
    ) -> PackIndex | None:
        ref = reader.record.ref
        trailer = Trailer(reader.record, reader.table)
        try:
            manifest = self._manifest(ref)
            group = self._group(manifest, ref.rank)
        except (NotFoundError, CorruptionError, FormatError) as error:
            logs.warning("nothing is shared", rank=ref.rank, step=ref.step, error=str(error))
            return None
        base = None if request.base is None else request.base.own_checkpoint
        earlier = None if base is None else self._earlier(store, ref, base, request)
        if len(group) == 1 and earlier is None:
            return None
        allowed = {CheckpointId(r.step, r.round) for r in request.older}
        if base is not None:
            allowed.add(base)
        shared = self._shared(trailer, manifest, group)
        return plan_pack(trailer, shared, earlier, allowed, base)

    def _manifest(self, ref: ShardRef) -> Manifest:
        document = self._node.get_manifest(ref.job_uid, ref.checkpoint)
        return parse_manifest_of(document, ref.job_uid, ref.checkpoint)

    def _chunk_widths(self, reader: ShardReader) -> bytes | None:
        """The shuffle of each chunk; None where the layout cannot be had: stored as it is then."""
        ref, header = reader.record.ref, reader.record.header
        if header.layout not in self._widths:
            try:
                manifest = self._manifest(ref)
                layout = parse_layout(self._node.get_layout(manifest.layout))
            except (NotFoundError, CorruptionError, FormatError) as error:
                logs.warning("not compressed", rank=ref.rank, step=ref.step, error=str(error))
                return None
            if len(self._widths) >= self._contract.procs_per_worker:
                self._widths.clear()
            self._widths[header.layout] = chunk_widths(layout, ref.rank, header)
        return self._widths[header.layout]

    def _group(self, manifest: Manifest, rank: Rank) -> tuple[Rank, ...]:
        if self._groups is None or self._groups[0] != manifest.layout:
            layout = parse_layout(self._node.get_layout(manifest.layout))
            self._groups = manifest.layout, replica_groups(layout)
        return next(group for group in self._groups[1] if rank in group)

    def _earlier(
        self, store: S3ObjectTier, ref: ShardRef, base: CheckpointId, request: PersistRequest
    ) -> Earlier | None:
        try:
            document = store.get_manifest(self._contract.namespace, ref.job_uid, base)
            expected = None if request.base is None else request.base.manifest
            if expected is not None and digest_of(document) != expected:
                raise CorruptionError(
                    f"manifest {base}: expected digest {expected}, found {digest_of(document)}"
                )
            manifest = parse_manifest_of(document, ref.job_uid, base)
            if ref.rank >= manifest.world_size:
                return None
            stored = store.stored(self._contract.namespace, manifest.ref(ref.rank))
        except (NotFoundError, CorruptionError, FormatError) as error:
            logs.warning("nothing is taken from the checkpoint before", base=base, error=str(error))
            return None
        return Earlier(stored.trailer, stored.index)

    def _shared(
        self, trailer: Trailer, manifest: Manifest, group: tuple[Rank, ...]
    ) -> list[Shared]:
        """By the chunk tables of the others: from this node where it has them, else from who saved
        them. A worker that does not answer is asked once. One table at a time is in memory."""
        found: list[Shared] = []
        silent: set[Worker] = set()
        deadline = self._clock.monotonic() + _TABLES_SECONDS
        for rank in group:
            if rank == trailer.record.header.rank:
                continue
            ref = manifest.ref(rank)
            worker = worker_of(rank, self._contract.procs_per_worker)
            try:
                if self._node.find(ref) is not None:
                    with self._node.open_shard(ref) as reader:
                        other = Trailer(reader.record, reader.table)
                else:
                    member = self._current().member(worker)
                    if member is None or worker in silent or self._clock.monotonic() > deadline:
                        continue
                    other = self._bulk.fetch_table(member, ref)
            except (HoldfastError, OSError) as error:
                silent.add(worker)
                logs.warning("no chunk table", rank=rank, worker=worker, error=str(error))
                continue
            found.append(shared_with(trailer, group, other))
        return found


def _stored_as(index: PackIndex) -> StoredAs:
    earlier = index.earlier()
    base = index.base if earlier else None
    return StoredAs(
        None if base is None else Reference(base.step, base.round),
        tuple(Reference(c.step, c.round, count) for c, count in sorted(earlier.items())),
    )
