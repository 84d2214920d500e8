"""The object tier: shards, packs, layouts, references and manifests of jobs in one object store.

A restore tries this tier last; it is the only tier that survives the loss of all nodes. Objects are
immutable and written only if absent. The manifest of a checkpoint is deleted before its shards, and the
shards stay while other checkpoints need them. Retention decides elsewhere which checkpoints to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    TierError,
)
from holdfast_core.format import keys
from holdfast_core.format.digest import digest_of
from holdfast_core.format.manifest import misnamed
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, ShardRef
from holdfast_core.shards.chunks import payload_runs
from holdfast_core.shards.file import head_bytes, pack_head, trailer_offset
from holdfast_core.shards.pack import PackIndex
from holdfast_core.shards.record import ShardRecord
from holdfast_core.store.download.shard import RUN_BYTES, StoredShardReader, open_stored_shard
from holdfast_core.store.download.stored import StoredShard, StoredShards
from holdfast_core.store.prune import dead
from holdfast_core.store.upload.compressed import CompressedPack
from holdfast_core.store.upload.pack import PlainPack
from holdfast_core.store.upload.whole import WholeShard
from holdfast_core.tiers.base import OpenWriter, ShardReader, ShardSource
from holdfast_core.tiers.objects import Document, Listed, ObjectStore, Page

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
        self._base = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
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

    def missing_manifest(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId
    ) -> str | None:
        """Return key and store of a manifest that the store does not have, or None if it has it.

        The manifest is not read. The store has looked repeatedly.
        """
        key = self._key(namespace, job_uid, keys.manifest_key(checkpoint))
        found = self._store.size(key, sure=True) is not None
        return None if found else f"{key} in {self._store.name}"

    def list_manifests(self, namespace: str, job_uid: JobUid) -> tuple[CheckpointId, ...]:
        """Return the checkpoints that have a manifest, by step and round. The manifests are not read."""
        listed = self._list(namespace, job_uid, f"{keys.MANIFESTS}/")
        parsed = (_parsed(item.key) for item in listed)
        return tuple(sorted(key.checkpoint for key in parsed if isinstance(key, keys.ManifestKey)))

    def put_layout(self, namespace: str, ref: ShardRef, document: bytes) -> None:
        """Put the layout of a shard if absent. A damaged one is replaced where possible.

        It is an object of the checkpoint, as its shards are, and is deleted with them.
        """
        digest = digest_of(document)
        self._put(
            self._key(namespace, ref.job_uid, keys.stored_layout_key(ref)),
            document,
            lambda found: digest_of(found) != digest,
        )

    def get_layout(self, namespace: str, ref: ShardRef, digest: Digest) -> bytes:
        """Return a shard's layout.

        Raises:
            NotFoundError: The store does not have it.
            CorruptionError: Two reads do not match the digest.
        """
        key = self._key(namespace, ref.job_uid, keys.stored_layout_key(ref))
        document = self._store.get(key)
        if digest_of(document) != digest:
            document = self._store.get(key)  # the first read may have been damaged in transit
        found = digest_of(document)
        if found != digest:
            raise CorruptionError(f"layout {key}: expected digest {digest}, found {found}")
        return document

    def put_references(
        self,
        namespace: str,
        job_uid: JobUid,
        checkpoint: CheckpointId,
        needs: Mapping[CheckpointId, int],
    ) -> None:
        """Put the markers of the earlier checkpoints whose objects a checkpoint needs (ADR 0023).

        This must come before its manifest. A repeated call with other values adds to the markers.

        Args:
            namespace: Namespace of the job.
            job_uid: UID of the job.
            checkpoint: The checkpoint that is going to be committed.
            needs: The payload bytes that each earlier checkpoint stores for it.
        """
        for earlier, count in sorted(needs.items()):
            # The process that deletes `checkpoint` finds its `by` markers through its `needs` markers.
            for key in (
                keys.needs_key(checkpoint, earlier, count),
                keys.needed_by_key(earlier, checkpoint),
            ):
                self._store.write(self._key(namespace, job_uid, key), Document(b""))

    def get_references(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId
    ) -> dict[CheckpointId, int]:
        """Return the payload bytes that each earlier checkpoint stores for this one."""
        found: dict[CheckpointId, int] = {}
        for key in self._needs(namespace, job_uid, checkpoint):
            found[key.earlier] = max(key.payload_bytes, found.get(key.earlier, 0))
        return found

    def _put(self, key: str, document: bytes, is_damaged: Callable[[bytes], bool]) -> None:
        """Put a document if absent; replace one that is there if it cannot belong to this key."""
        try:
            self._store.write(key, Document(document))
        except AlreadyExistsError:
            if not is_damaged(self._store.get(key)):
                raise
            self._store.write(key, Document(document), replace=True)

    def shards_stored(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId
    ) -> frozenset[tuple[Rank, str]]:
        """Return the ranks whose shard or pack is stored, with the 16 hex characters of their digests."""
        listed = self._list(namespace, job_uid, keys.shards_prefix(checkpoint))
        return frozenset(
            (key.rank, key.blake3_prefix)
            for key in (_parsed(item.key) for item in listed)
            if isinstance(key, keys.ShardObjectKey) and key.kind is not keys.ShardObject.LAYOUT
        )

    # ------------------------------------------------------------------ markers of runs (store.runs)

    def runs_prefix(self, namespace: str, job_uid: JobUid) -> str:
        """Return the beginning of the keys of the markers of runs."""
        return f"{self._prefix_of(namespace, job_uid)}{keys.RUNS}/"

    def put_document(self, key: str, document: bytes) -> None:
        """Put a document if absent. Raises AlreadyExistsError for another one."""
        self._store.write(key, Document(document))

    def get_document(self, key: str) -> bytes:
        """Return a document. Raises NotFoundError."""
        return self._store.get(key)

    def delete_documents(self, names: Collection[str]) -> None:
        """Delete documents. Absent ones are ignored."""
        if names:
            self._store.delete(tuple(names))

    def list_documents(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, a whole folder, in ascending order."""
        found: list[str] = []
        token = ""
        while True:
            page = self._store.list(prefix, token)
            found += (item.key for item in page.objects)
            if not page.next:
                return found
            token = page.next

    # ------------------------------------------------------------------ deletion

    def delete_checkpoint(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Delete a checkpoint: its manifest, then its references, then its shards and packs.

        The checkpoint does not exist any more once its manifest is deleted. If another checkpoint needs
        its shards, they stay until `sweep`. Absent objects are ignored, so a repeated call completes an
        interrupted deletion.
        """
        self._delete(namespace, job_uid, [keys.manifest_key(checkpoint)])
        self._release(namespace, job_uid, checkpoint)
        if not self._needed_by(namespace, job_uid, checkpoint):
            self._delete_below(namespace, job_uid, keys.shards_prefix(checkpoint))

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
        written within `quiet`. The objects of other checkpoints are neither listed nor read: the time
        depends on the number of checkpoints, and not on their ranks or bytes.

        Args:
            namespace: Namespace of the job.
            job_uid: UID of the job.
            round_: Restart round of the coordinator that calls.
            quiet: Minimum age of the newest object, by the store's clock.
            uploading: Returns the checkpoints that are being uploaded. It is called after the checkpoints
                were listed, so an upload that starts later has no object in the list.

        Returns:
            The checkpoints whose shards and packs were deleted.
        """
        stored = self._folders(namespace, job_uid, keys.SHARDS)
        stored |= self._folders(namespace, job_uid, keys.REFERENCES)
        busy = frozenset(uploading())
        manifests = frozenset(self.list_manifests(namespace, job_uid))

        def gone(checkpoints: Collection[CheckpointId]) -> frozenset[CheckpointId]:
            return dead(checkpoints, manifests, busy, round_)

        swept = set[CheckpointId]()
        # A checkpoint needs earlier ones, so the newest is swept first: its markers go with it.
        for checkpoint in sorted(gone(stored), reverse=True):
            by = self._needed_by(namespace, job_uid, checkpoint)
            stale = {c for c in gone(by) if by[c] >= quiet}
            markers = [keys.needed_by_key(checkpoint, c) for c in sorted(stale)]
            self._delete(namespace, job_uid, markers)
            if self._is_quiet(namespace, job_uid, keys.references_prefix(checkpoint), quiet):
                self._release(namespace, job_uid, checkpoint)
            shards = keys.shards_prefix(checkpoint)
            is_free = by.keys() <= stale and self._is_quiet(namespace, job_uid, shards, quiet)
            if is_free and self._delete_below(namespace, job_uid, shards):
                swept.add(checkpoint)
        return frozenset(swept)

    def _needed_by(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId
    ) -> dict[CheckpointId, timedelta]:
        """Return the checkpoints that need objects of this one, with the ages of their markers.

        The markers are listed twice: a marker that replaces another one may be put before a listing passes
        its name, and the other one be deleted after the listing has passed that name.
        """
        found: dict[CheckpointId, timedelta] = {}
        for _ in range(2):
            for item in self._list(namespace, job_uid, keys.references_prefix(checkpoint)):
                match _parsed(item.key):
                    case keys.NeededByKey(by=by):
                        found[by] = item.age
        return found

    def _needs(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId
    ) -> Iterator[keys.NeedsKey]:
        for item in self._list(namespace, job_uid, keys.references_prefix(checkpoint)):
            match _parsed(item.key):
                case keys.NeedsKey() as found:
                    yield found

    def _release(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Delete the markers that a checkpoint without a manifest has put."""
        needs = tuple(self._needs(namespace, job_uid, checkpoint))
        self._delete(
            namespace, job_uid, [keys.needed_by_key(key.earlier, checkpoint) for key in needs]
        )
        self._delete(
            namespace,
            job_uid,
            [keys.needs_key(checkpoint, key.earlier, key.payload_bytes) for key in needs],
        )

    def _is_quiet(self, namespace: str, job_uid: JobUid, below: str, quiet: timedelta) -> bool:
        """Return whether each object below a path was written at least `quiet` ago."""
        return all(item.age >= quiet for item in self._list(namespace, job_uid, below))

    def abort_stale(self, namespace: str, job_uid: JobUid, older_than: timedelta) -> int:
        """Remove what interrupted uploads of the job left at least `older_than` ago; return how many."""
        return self._store.abort_stale([self._prefix_of(namespace, job_uid)], older_than)

    def jobs(self) -> Iterator[tuple[str, JobUid]]:
        """Yield namespace and uid of each job that has a manifest. It takes a request for each job."""
        for namespace in self._names(self._base):
            for uid in self._names(f"{self._base}{namespace}/"):
                with suppress(FormatError):  # other programs may have folders here
                    below = self._prefix_of(namespace, JobUid(uid))
                    if keys.MANIFESTS in self._names(below):
                        yield namespace, JobUid(uid)

    # ------------------------------------------------------------------ keys

    def _names(self, prefix: str) -> list[str]:
        """Return the names of the folders below a prefix, which is empty or ends with a slash."""
        found = list[str]()
        for page in self._pages(prefix, folders=True):
            found += [folder[len(prefix) : -1] for folder in page.folders]
            if page.objects and prefix != self._base:
                break  # a folder of another program, maybe with millions of objects
        return found

    def _delete(self, namespace: str, job_uid: JobUid, relative: Iterable[str]) -> None:
        self._store.delete([self._key(namespace, job_uid, key) for key in relative])

    def _delete_below(self, namespace: str, job_uid: JobUid, below: str) -> int:
        """Delete all objects below a path, and return how many there were."""
        count = 0
        for page in self._pages(self._prefix_of(namespace, job_uid) + below):
            self._store.delete([item.key for item in page.objects])
            count += len(page.objects)
        return count

    def _list(self, namespace: str, job_uid: JobUid, below: str) -> Iterator[Listed]:
        """Yield all objects below a path, one page at a time. Their keys are relative to the job's prefix."""
        base = self._prefix_of(namespace, job_uid)
        for page in self._pages(base + below):
            for item in page.objects:
                yield Listed(item.key.removeprefix(base), item.age)

    def _folders(self, namespace: str, job_uid: JobUid, kind: str) -> set[CheckpointId]:
        """Return the checkpoints that have objects of a kind."""
        base = self._prefix_of(namespace, job_uid)
        found = (
            keys.checkpoint_of_folder(folder.removeprefix(base))
            for page in self._pages(f"{base}{kind}/", folders=True)
            for folder in page.folders
        )
        return {checkpoint for checkpoint in found if checkpoint is not None}

    def _pages(self, prefix: str, *, folders: bool = False) -> Iterator[Page]:
        """Yield the pages of a listing. Raises TierError if the store lists a page a second time."""
        token, last = "", ""
        while True:
            page = self._store.list(prefix, token, folders=folders)
            yield page
            if not page.next:
                return
            listed = max((*(item.key for item in page.objects), *page.folders), default="")
            if listed <= last:
                raise TierError(
                    f"list of {prefix}: expected keys behind {last!r}, found {listed!r}"
                )
            token, last = page.next, listed

    def _shard_key(self, namespace: str, ref: ShardRef) -> str:
        return self._key(namespace, ref.job_uid, keys.shard_key(ref))

    def _pack_key(self, namespace: str, ref: ShardRef) -> str:
        return self._key(namespace, ref.job_uid, keys.pack_key(ref))

    def _key(self, namespace: str, job_uid: JobUid, relative: str) -> str:
        return self._prefix_of(namespace, job_uid) + relative

    def _prefix_of(self, namespace: str, job_uid: JobUid) -> str:
        return self._base + keys.job_prefix(namespace, job_uid)


def _parsed(key: str) -> keys.Key | None:
    """Parse a key. None for a key that Holdfast does not write; such an object is never deleted alone."""
    try:
        return keys.parse_key(key)
    except FormatError:
        return None
