"""The object tier: shards, packs, layouts, references and manifests of jobs in one object store.

A restore tries this tier last; it is the only tier that survives the loss of all nodes. Objects are
immutable and written only if absent. The manifest of a checkpoint is deleted before its shards, and the
shards stay while other checkpoints need them. Retention decides elsewhere which checkpoints to keep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from holdfast_core.errors import AlreadyExistsError, CorruptionError, FormatError, NotFoundError
from holdfast_core.format import keys
from holdfast_core.format.digest import digest_of
from holdfast_core.format.manifest import misnamed
from holdfast_core.format.references import References, parse_references_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, ShardRef
from holdfast_core.shards.chunks import payload_runs
from holdfast_core.shards.file import head_bytes, pack_head, trailer_offset
from holdfast_core.shards.pack import PackIndex
from holdfast_core.shards.record import ShardRecord
from holdfast_core.store.download.shard import RUN_BYTES, StoredShardReader, open_stored_shard
from holdfast_core.store.download.stored import StoredShard, StoredShards
from holdfast_core.store.prune import dead, needed
from holdfast_core.store.upload.compressed import CompressedPack
from holdfast_core.store.upload.pack import PlainPack
from holdfast_core.store.upload.whole import WholeShard
from holdfast_core.tiers.base import OpenWriter, ShardReader, ShardSource
from holdfast_core.tiers.objects import Document, Listed, ObjectStore

_LOG = logging.getLogger(__name__)
MAX_LISTED_KEYS = 1_000_000
"""A longer list raises FormatError: no job has so many objects, so the server is broken."""
READERS = 4


class ObjectTier:
    """Tier in an object store. `namespace` and `job_uid` identify the job that owns a checkpoint.

    Safe for use by many threads. Calls block on the network or a disk. Besides what a method documents,
    it raises what the store raises: AccessDeniedError, CapacityError, UnavailableError, TierError.

    `readers` threads fetch the ranges of all downloads. A download holds at most
    download.shard.MAX_AHEAD_BYTES and the chunk tables.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str = "",
        *,
        readers: int = READERS,
        compressed: Callable[[int, int], object] = lambda before, after: None,
    ) -> None:
        """Create the tier. It owns `store`, and `close` closes it.

        Args:
            store: The objects.
            prefix: Beginning of all keys, without a slash at its end.
            readers: Number of ranges that are fetched at the same time.
            compressed: Receives the payload bytes of each compressed pack before and after compression.
        """
        self._store = store
        self._prefix = prefix.strip("/")
        self._compressed = compressed
        self._conflicts: set[str] = set()
        """Keys of shards under which the store holds other bytes that it does not replace."""
        self._workers = ThreadPoolExecutor(max(1, readers), thread_name_prefix="object-tier")

    def close(self) -> None:
        """End all waits, wait for requests in progress, and close the store.

        No method may be called afterwards.
        """
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._store.close()
        self._workers.shutdown(wait=True)

    # ------------------------------------------------------------------ shards

    def upload_shard(self, namespace: str, reader: ShardReader) -> None:
        """Store a whole shard. Send nothing if the store holds exactly these bytes already.

        If the stored object does not verify as this shard, it is replaced where the store can do that.

        Raises:
            AlreadyExistsError: The store holds other bytes under the shard's key.
            CorruptionError: The local shard is damaged.
        """
        ref = reader.record.ref
        key, source = self._shard_key(namespace, ref), WholeShard(reader)
        try:
            self._store.write(key, source)
        except AlreadyExistsError:
            # A caller that tries again must not read the whole object each time.
            if key in self._conflicts:
                raise
            try:
                if not self._is_damaged(namespace, ref):
                    raise
                self._store.write(key, source, replace=True)
            except AlreadyExistsError:
                self._conflicts.add(key)
                raise

    def _is_damaged(self, namespace: str, ref: ShardRef) -> bool:
        """Read the object of a whole shard, and return whether any byte of it is damaged."""
        key = self._shard_key(namespace, ref)
        whole = StoredShards(self._store, lambda ref, packed: key)
        try:
            shard = open_stored_shard(self._store, whole, self._workers, ref)
            header = shard.trailer.record.header
            for _ in shard.read(payload_runs(header, RUN_BYTES)):
                pass
            stop = head_bytes(header) + header.payload_bytes
            head, padding = bytearray(head_bytes(header)), bytearray(trailer_offset(header) - stop)
            self._store.read_into(key, 0, memoryview(head))
            self._store.read_into(key, stop, memoryview(padding))
        except CorruptionError:
            return True
        return head != pack_head(header) or any(padding)

    def upload_pack(self, namespace: str, reader: ShardReader, index: PackIndex) -> None:
        """Store a pack: the chunks that `index` places in it, and the index.

        The caller makes sure that the shards to which the index refers stay in the store. Raises what
        `upload_shard` raises.
        """
        self._store.write(self._pack_key(namespace, reader.record.ref), PlainPack(reader, index))

    def upload_encoded(
        self, namespace: str, reader: ShardReader, index: PackIndex, widths: bytes
    ) -> PackIndex:
        """Store a pack with compressed chunks (shards.coding).

        Args:
            namespace: Namespace of the job.
            reader: The shard on the node.
            index: Which chunks the pack stores; its coding is replaced.
            widths: Element width in bytes for each chunk of the payload.

        Returns:
            The index with the coding of the stored chunks.

        Raises:
            AlreadyExistsError: Any object has the pack's key; `stored` returns which.
            CorruptionError: The local shard is damaged.
        """
        source = CompressedPack(reader, index, widths)
        self._store.write(self._pack_key(namespace, reader.record.ref), source)
        self._compressed(source.index.payload_bytes_here, source.index.stored_bytes)
        return source.index

    def stored(self, namespace: str, ref: ShardRef, *, sure: bool = True) -> StoredShard:
        """Return how the store holds a shard: whole, or as a pack.

        Args:
            namespace: Namespace of the job.
            ref: The shard.
            sure: Whether the store is asked repeatedly before NotFoundError is raised.

        Raises:
            NotFoundError: The store has neither the shard nor its pack.
            CorruptionError: The end of the object does not verify.
        """
        return self._shards(namespace).find(ref, sure=sure)

    def has_whole(self, namespace: str, ref: ShardRef) -> bool:
        """Return whether an object has the key of the whole shard. The object is not verified."""
        return self._store.size(self._shard_key(namespace, ref)) is not None

    def download_shard(self, namespace: str, ref: ShardRef, open_writer: OpenWriter) -> ShardRecord:
        """Download a shard that is stored whole or as a pack, and commit the writer.

        Raises:
            NotFoundError: The store has neither the shard nor its pack.
            CorruptionError: Stored bytes do not verify, or a shard to which the pack refers is gone.
            HoldfastError: Whatever else the writer raises.
        """
        return self._open(namespace, ref).copy_to(open_writer)

    def open_shard(self, namespace: str, ref: ShardRef) -> ShardSource:
        """Open a shard that is stored whole or as a pack; its ranges are fetched when they are read.

        The shards to which a pack refers are looked up when their chunks are read. Raises what `stored`
        raises.
        """
        return self._open(namespace, ref)

    def _open(self, namespace: str, ref: ShardRef) -> StoredShardReader:
        return open_stored_shard(self._store, self._shards(namespace), self._workers, ref)

    def _shards(self, namespace: str) -> StoredShards:
        def key_of(ref: ShardRef, packed: bool) -> str:
            return self._pack_key(namespace, ref) if packed else self._shard_key(namespace, ref)

        return StoredShards(self._store, key_of)

    # ------------------------------------------------------------------ documents

    def put_manifest(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId, document: bytes
    ) -> Digest:
        """Put a manifest if absent and return its digest.

        A stored document that is not a manifest of this checkpoint is replaced where the store can do
        that. Raises AlreadyExistsError if the store holds another manifest of this checkpoint.
        """
        self._put(
            self._key(namespace, job_uid, keys.manifest_key(checkpoint)),
            document,
            lambda found: misnamed(found, job_uid, checkpoint) is not None,
        )
        return digest_of(document)

    def get_manifest(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Return the manifest as stored. The caller compares its digest. Raises NotFoundError."""
        return self._store.get(self._key(namespace, job_uid, keys.manifest_key(checkpoint)))

    def list_manifests(self, namespace: str, job_uid: JobUid) -> tuple[CheckpointId, ...]:
        """Return the checkpoints that have a manifest, by step and round. The manifests are not read."""
        return tuple(sorted(_by_checkpoint(self._list(namespace, job_uid, f"{keys.MANIFESTS}/"))))

    def put_layout(self, namespace: str, job_uid: JobUid, document: bytes) -> Digest:
        """Put a layout if absent and return its digest. A damaged one is replaced where possible."""
        digest = digest_of(document)
        self._put(
            self._key(namespace, job_uid, keys.layout_key(digest)),
            document,
            lambda found: digest_of(found) != digest,
        )
        return digest

    def get_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> bytes:
        """Return a layout. Raises NotFoundError; CorruptionError if two reads do not match the digest."""
        key = self._key(namespace, job_uid, keys.layout_key(digest))
        document = self._store.get(key)
        if digest_of(document) != digest:
            document = self._store.get(key)  # the first read may have been damaged in transit
        found = digest_of(document)
        if found != digest:
            raise CorruptionError(f"layout {key}: expected digest {digest}, found {found}")
        return document

    def list_layouts(
        self, namespace: str, job_uid: JobUid, older_than: timedelta
    ) -> frozenset[Digest]:
        """Return the layouts that were written at least `older_than` ago, by the store's clock."""
        found = set[Digest]()
        for item in self._list(namespace, job_uid, f"{keys.LAYOUTS}/"):
            digest = _layout_of(item.key)
            if digest is not None and item.age >= older_than:
                found.add(digest)
        return frozenset(found)

    def delete_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> None:
        """Delete a layout. An absent layout is not an error."""
        self._delete(namespace, job_uid, [keys.layout_key(digest)])

    def put_references(self, namespace: str, job_uid: JobUid, references: References) -> None:
        """Put a checkpoint's references if absent. This must come before its manifest (ADR 0025).

        Raises AlreadyExistsError if the store holds other references of this checkpoint.
        """
        key = self._key(namespace, job_uid, keys.references_key(references.checkpoint))
        self._store.write(key, Document(references.to_bytes()))

    def get_references(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Return a checkpoint's references. NotFoundError means that it needs no other checkpoint."""
        key = self._key(namespace, job_uid, keys.references_key(checkpoint))
        return self._store.get(key)

    def _put(self, key: str, document: bytes, is_damaged: Callable[[bytes], bool]) -> None:
        """Put a document if absent; replace one that is there if it cannot belong to this key."""
        try:
            self._store.write(key, Document(document))
        except AlreadyExistsError:
            if not is_damaged(self._store.get(key)):
                raise
            self._store.write(key, Document(document), replace=True)

    # ------------------------------------------------------------------ deletion

    def delete_checkpoint(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Delete a checkpoint: its manifest, then its references, then its shards and packs.

        The checkpoint does not exist any more once its manifest is deleted. If another checkpoint needs
        its shards, they stay until `sweep`. Absent objects are ignored, so a repeated call completes an
        interrupted deletion.
        """
        self._delete(namespace, job_uid, [keys.manifest_key(checkpoint)])
        try:
            references = self._references(namespace, job_uid)
        except FormatError as error:
            # The manifest is deleted, so the checkpoint is gone. Unreadable references of another
            # checkpoint must not stop retention.
            _LOG.warning(
                "the shards of %s are kept, because other checkpoints may need them: %s",
                checkpoint,
                error,
            )
            return
        if checkpoint in references:
            self._delete(namespace, job_uid, [keys.references_key(checkpoint)])
        if checkpoint in needed(references, ignored={checkpoint}):
            return
        below = self._list(namespace, job_uid, keys.shards_prefix(checkpoint))
        self._delete(namespace, job_uid, [item.key for item in below])

    def sweep(
        self,
        namespace: str,
        job_uid: JobUid,
        round_: RestartRound,
        quiet: timedelta,
        uploading: Callable[[], Collection[CheckpointId]],
    ) -> frozenset[CheckpointId]:
        """Delete the objects of checkpoints that have no manifest and that no other checkpoint needs.

        Only checkpoints that `prune.dead` returns are swept, and only if none of their objects was
        written within `quiet`.

        Args:
            namespace: Namespace of the job.
            job_uid: UID of the job.
            round_: Restart round of the coordinator that calls.
            quiet: Minimum age of the newest object, by the store's clock.
            uploading: Returns the checkpoints that are being uploaded. It is called after the objects
                were listed, so an upload that starts later has no object in the list.

        Returns:
            The checkpoints whose shards and packs were deleted.

        Raises:
            FormatError: A references document cannot be parsed; nothing was deleted.
        """
        shards = self._list(namespace, job_uid, f"{keys.SHARDS}/")
        documents = self._list(namespace, job_uid, f"{keys.REFERENCES}/")
        stored, referring = _by_checkpoint(shards), _by_checkpoint(documents).keys()
        busy = frozenset(uploading()) | _written_lately([*shards, *documents], quiet)
        manifests = frozenset(self.list_manifests(namespace, job_uid))
        references = self._references(namespace, job_uid)
        gone = dead({*stored, *referring}, manifests, busy, round_)
        kept = needed(references, ignored=gone & referring)
        swept = frozenset(c for c in stored if c in gone and c not in kept)
        below = [keys.references_key(checkpoint) for checkpoint in sorted(gone & referring)]
        below += [key for checkpoint in sorted(swept) for key in stored[checkpoint]]
        self._delete(namespace, job_uid, below)
        return swept

    def _references(self, namespace: str, job_uid: JobUid) -> dict[CheckpointId, References]:
        """Return all references of the job, by checkpoint.

        The listing is repeated until it shows nothing new, at least twice, so that references that were
        put while others were deleted are not missed. Raises FormatError for a document that cannot be
        parsed; the caller must then delete nothing that other checkpoints may need.
        """
        found: dict[CheckpointId, References] = {}
        seen: set[CheckpointId] = set()
        listings = 0
        while True:
            listed = self._list(namespace, job_uid, f"{keys.REFERENCES}/")
            new = _by_checkpoint(listed).keys() - seen
            listings += 1
            if not new and listings > 1:
                return found
            seen |= new
            for checkpoint in sorted(new):
                try:
                    document = self.get_references(namespace, job_uid, checkpoint)
                except NotFoundError:
                    continue  # Its checkpoint was deleted since the listing.
                found[checkpoint] = parse_references_of(document, checkpoint)

    def abort_stale(self, namespace: str, job_uid: JobUid, older_than: timedelta) -> int:
        """Remove what interrupted uploads of the job left at least `older_than` ago; return how many."""
        return self._store.abort_stale([self._prefix_of(namespace, job_uid)], older_than)

    # ------------------------------------------------------------------ keys

    def _delete(self, namespace: str, job_uid: JobUid, relative: Iterable[str]) -> None:
        self._store.delete([self._key(namespace, job_uid, key) for key in relative])

    def _list(self, namespace: str, job_uid: JobUid, below: str) -> list[Listed]:
        """Return all objects below a path. Their keys are relative to the job's prefix."""
        base = self._prefix_of(namespace, job_uid)
        found: list[Listed] = []
        token = ""
        while True:
            page = self._store.list(base + below, token)
            found += [Listed(item.key.removeprefix(base), item.age) for item in page.objects]
            if len(found) > MAX_LISTED_KEYS:
                raise FormatError(f"list of {base}{below}: more than {MAX_LISTED_KEYS} keys")
            if not page.next:
                return found
            token = page.next

    def _shard_key(self, namespace: str, ref: ShardRef) -> str:
        return self._key(namespace, ref.job_uid, keys.shard_key(ref))

    def _pack_key(self, namespace: str, ref: ShardRef) -> str:
        return self._key(namespace, ref.job_uid, keys.pack_key(ref))

    def _key(self, namespace: str, job_uid: JobUid, relative: str) -> str:
        return self._prefix_of(namespace, job_uid) + relative

    def _prefix_of(self, namespace: str, job_uid: JobUid) -> str:
        return (f"{self._prefix}/" if self._prefix else "") + keys.job_prefix(namespace, job_uid)


def _by_checkpoint(listed: Iterable[Listed]) -> dict[CheckpointId, list[str]]:
    """Return the listed keys by the checkpoint that they belong to. Keys that belong to none are left out."""
    found: dict[CheckpointId, list[str]] = {}
    for item in listed:
        checkpoint = _checkpoint_of(item.key)
        if checkpoint is not None:
            found.setdefault(checkpoint, []).append(item.key)
    return found


def _written_lately(listed: Iterable[Listed], within: timedelta) -> frozenset[CheckpointId]:
    found = (_checkpoint_of(item.key) for item in listed if item.age < within)
    return frozenset(checkpoint for checkpoint in found if checkpoint is not None)


def _layout_of(key: str) -> Digest | None:
    """Return the digest that a layout's key names; None for any other key."""
    try:
        parsed = keys.parse_key(key)
    except FormatError:
        return None
    return parsed.digest if isinstance(parsed, keys.LayoutKey) else None


def _checkpoint_of(key: str) -> CheckpointId | None:
    """Return the checkpoint that a key belongs to.

    Returns None for layouts and for keys that Holdfast does not write; `sweep` never deletes those.
    """
    try:
        parsed = keys.parse_key(key)
    except FormatError:
        return None
    return None if isinstance(parsed, keys.LayoutKey) else parsed.checkpoint
