"""Upload the shards of a checkpoint to the object store, and commit it.

The commit, when shards, packs and layouts are in the store:

1. If packs refer to earlier checkpoints, put the references. From here on every deleter keeps the
   checkpoints that they name.
2. Read the manifests of the bases, the checkpoints that this one was compared with. If all exist, any
   process that deletes one of them later finds the references. If one is gone, a deleter may have listed
   the references before step 1, so nothing is committed.
3. Put the manifest.

This module never deletes references: a delayed DELETE request could remove those of a later commit that
succeeded. The references of a failed commit keep objects longer than needed, until the next sweep.
Why no interleaving loses a byte: ADR 0023.

A shard's upload has only the chunks that the object store lacks, compressed if requested. `shards.pack`
decides which chunks are sent. Its inputs are gathered here: how the store holds this rank's shard of the
newest persisted checkpoint, and the chunk tables of the ranks that hold the same tensors. An input that is
missing or damaged, or that another node does not send in time, is left out: the upload sends bytes twice
rather than waits for another node. All calls block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, ShardRef
from holdfast_core.messages.schema import PersistRequest, StoredAs
from holdfast_core.shards.coding import chunk_widths
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import (
    MAX_EARLIER,
    Earlier,
    PackIndex,
    SharedChunks,
    plan_pack,
    replica_group,
    shared_with,
    unshared_index,
)
from holdfast_core.store.rules import most_needed
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tiers.base import NodeTier, ShardReader


def commit(
    tier: ObjectTier,
    namespace: str,
    manifest: Manifest,
    needs: Mapping[CheckpointId, int],
    bases: Collection[CheckpointId],
) -> bool:
    """Commit a checkpoint.

    The call is idempotent: it also succeeds for a checkpoint that is committed already and whose bases
    were deleted since.

    Args:
        tier: The store.
        namespace: Namespace of the job.
        manifest: Manifest of the checkpoint.
        needs: The payload bytes that each earlier checkpoint stores for the packs; maybe none.
        bases: Checkpoints that the packs were compared with; their manifests must still exist.

    Returns:
        False if a base is gone. The ranks whose packs refer to other objects must then upload their shards
        whole.

    Raises:
        AlreadyExistsError: The store holds another manifest of this checkpoint; this needs an alarm.
        HoldfastError: Whatever else the tier raises.
    """
    job_uid, checkpoint = manifest.job.uid, manifest.checkpoint
    if needs:
        tier.put_references(namespace, job_uid, checkpoint, needs)
        kept = all(_exists(tier, namespace, job_uid, base) for base in bases)
        if not kept and not _exists(tier, namespace, job_uid, checkpoint):
            return False
    tier.put_manifest(namespace, job_uid, checkpoint, manifest.to_bytes())
    return True


def references_beside(
    tier: ObjectTier, namespace: str, job_uid: JobUid, base: CheckpointId
) -> tuple[CheckpointId, ...]:
    """Return the checkpoints that store most of the bytes that `base` refers to.

    An upload that is compared with `base` may refer to them, too.
    """
    return most_needed(tier.get_references(namespace, job_uid, base), MAX_EARLIER - 1)


def _exists(tier: ObjectTier, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bool:
    try:
        tier.get_manifest(namespace, job_uid, checkpoint)
    except NotFoundError:
        return False
    return True


logger = logging.getLogger(__name__)

TableSource = Callable[[Sequence[ShardRef]], Iterable[Trailer]]
"""Fetches the chunk tables of shards that the node tier lacks, and leaves out those that it cannot get."""


class ShardUploader:
    """Uploader of the shards of own ranks. Uploads that were ended may still run beside the present one."""

    def __init__(
        self,
        namespace: str,
        node: NodeTier,
        store: ObjectTier,
        *,
        own_ranks: int,
        other_tables: TableSource = lambda refs: (),
    ) -> None:
        """Create the uploader.

        Args:
            namespace: Namespace of the job in the keys of the store.
            node: Has the shards, and the manifests of their checkpoints.
            store: Receives the shards.
            own_ranks: Number of ranks whose shards this process uploads.
            other_tables: Source of chunk tables that the node tier lacks.
        """
        self._namespace = namespace
        self._node = node
        self._store = store
        self._own_ranks = own_ranks
        self._other_tables = other_tables
        self._widths: dict[Digest, bytes] = {}
        """Byte-shuffle width of each chunk, by the digest of an own rank's layout. Cleared when it has an
        entry for every own rank and a new layout is added."""

    def upload(self, ref: ShardRef, request: PersistRequest | None) -> StoredAs:
        """Upload the shard and its layout unless the store holds them, and return how it holds the shard.

        A shard whose layout the node tier has lost is uploaded without it: ranks with the same placements
        restore it all the same.

        Args:
            ref: The own shard on the node tier.
            request: The coordinator's request. Without one the shard is stored whole.

        Raises:
            NotFoundError: The shard is not on the node tier.
            CorruptionError: The shard on the node tier is damaged.
            AlreadyExistsError: The store holds other bytes under the name of the whole shard or its layout.
            HoldfastError: Any other error of the object tier.
        """
        with self._node.open_shard(ref) as reader:
            self._upload_layout(reader)
            found = None if request is None else self._upload_pack(reader, request)
            if found is None:
                self._store.upload_shard(self._namespace, reader)
            return found or StoredAs()

    def _upload_layout(self, reader: ShardReader) -> None:
        ref = reader.record.ref
        try:
            document = self._node.get_layout(reader.record.header.layout)
        except (NotFoundError, CorruptionError) as error:
            logger.warning("%s is uploaded without its layout: %s", ref, error)
            return
        self._store.put_layout(self._namespace, ref, document)

    def _upload_pack(self, reader: ShardReader, request: PersistRequest) -> StoredAs | None:
        """Store the shard as a pack, or return None if it is to be stored whole.

        It is stored whole if an object has the whole shard's name already, because readers look there
        first and would never see a pack.
        """
        store, ref, namespace = self._store, reader.record.ref, self._namespace
        if request.whole or store.has_whole(namespace, ref):
            return None
        if (found := self._found(ref)) is not None:
            return found
        index = self._plan(reader, request)
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
            # Another attempt, which had other tables, has stored its pack. It holds the same shard, and
            # objects are never overwritten.
            return self._found(ref)
        return _stored_as(index)

    def _found(self, ref: ShardRef) -> StoredAs | None:
        """Return how an earlier attempt stored the shard as a pack. None without a pack or if it is bad."""
        try:
            index = self._store.stored(self._namespace, ref, sure=False).index
        except (NotFoundError, FormatError):
            return None
        return None if index is None else _stored_as(index)

    # ------------------------------------------------------------------ inputs of the plan

    def _plan(self, reader: ShardReader, request: PersistRequest) -> PackIndex | None:
        """Plan a pack. Return None if no chunk can be shared."""
        ref = reader.record.ref
        trailer = Trailer(reader.record, reader.table)
        try:
            manifest = self._manifest(ref)
            group = replica_group(manifest.shards, ref.rank)
        except (NotFoundError, CorruptionError, FormatError) as error:
            logger.warning("the shard %s is uploaded whole: %s", ref, error)
            return None
        base = None if request.base is None else request.base.own_checkpoint
        earlier = None if base is None else self._earlier(ref, base, request)
        if len(group) == 1 and earlier is None:
            return None
        allowed = set(request.older)
        if base is not None:
            allowed.add(base)
        shared = self._shared(trailer, manifest, group)
        return plan_pack(trailer, shared, earlier, allowed, base)

    def _manifest(self, ref: ShardRef) -> Manifest:
        document = self._node.get_manifest(ref.job_uid, ref.checkpoint)
        return parse_manifest_of(document, ref.job_uid, ref.checkpoint)

    def _chunk_widths(self, reader: ShardReader) -> bytes | None:
        """Return the byte-shuffle width of each chunk, for compression.

        None if the layout cannot be read: the shard is then stored uncompressed.
        """
        ref, header = reader.record.ref, reader.record.header
        widths = self._widths.get(header.layout)
        if widths is None:
            try:
                layout = parse_rank_layout(self._node.get_layout(header.layout))
            except (NotFoundError, CorruptionError, FormatError) as error:
                logger.warning("the shard %s is not compressed: %s", ref, error)
                return None
            if len(self._widths) >= self._own_ranks:
                self._widths.clear()
            widths = self._widths[header.layout] = chunk_widths(layout, header)
        return widths

    def _earlier(
        self, ref: ShardRef, base: CheckpointId, request: PersistRequest
    ) -> Earlier | None:
        """Return how the store holds this rank's shard of the base checkpoint.

        None if that shard or its manifest is missing or damaged, or if the base had fewer ranks.
        """
        try:
            document = self._store.get_manifest(self._namespace, ref.job_uid, base)
            expected = None if request.base is None else request.base.manifest
            if expected is not None and digest_of(document) != expected:
                raise CorruptionError(
                    f"manifest {base}: expected digest {expected}, found {digest_of(document)}"
                )
            manifest = parse_manifest_of(document, ref.job_uid, base)
            if ref.rank >= manifest.world_size:
                return None
            stored = self._store.stored(self._namespace, manifest.ref(ref.rank))
        except (NotFoundError, CorruptionError, FormatError) as error:
            logger.warning("chunks of the checkpoint %s are not reused: %s", base, error)
            return None
        return Earlier(stored.trailer, stored.index)

    def _shared(
        self, trailer: Trailer, manifest: Manifest, group: tuple[Rank, ...]
    ) -> list[SharedChunks]:
        """Compare the shard with those of the other ranks in its group, by their chunk tables.

        A table is read from this node, else fetched. One table at a time is in memory.
        """
        own = trailer.record.header.rank
        refs = [manifest.ref(rank) for rank in group if rank != own]
        found, missing = list[SharedChunks](), list[ShardRef]()
        for ref in refs:
            try:
                with self._node.open_shard(ref) as reader:
                    other = Trailer(reader.record, reader.table)
            except NotFoundError:
                missing.append(ref)
            except (HoldfastError, OSError) as error:
                logger.warning("reading the chunk table of %s failed: %s", ref, error)
                missing.append(ref)
            else:
                found.append(shared_with(trailer, group, other))
        found += (shared_with(trailer, group, other) for other in self._other_tables(missing))
        return found


def _stored_as(index: PackIndex) -> StoredAs:
    earlier = index.earlier()
    return StoredAs(index.base if earlier else None, tuple(sorted(earlier.items())))
