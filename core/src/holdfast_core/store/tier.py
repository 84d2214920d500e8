"""The object tier: shards, packs, layouts, references and manifests of jobs in one object store.

A restore tries this tier last; it is the only tier that survives the loss of all nodes. Objects are
immutable and written only if absent. The manifest of a checkpoint is deleted before its shards, and the
shards stay while other checkpoints need them (ADR 0023): a checkpoint that needs objects of an earlier one
has a marker of it, and the earlier one has a marker of the later one. Retention decides elsewhere which
checkpoints to keep, and `store.rules` which of the others are dead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from holdfast_core.errors import AlreadyExistsError, CorruptionError, FormatError, TierError
from holdfast_core.format import keys
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import misnamed
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, ShardRef
from holdfast_core.shards.file import ShardRecord
from holdfast_core.shards.pack import PackIndex
from holdfast_core.store.download.shard import StoredShardReader, is_damaged, open_stored_shard
from holdfast_core.store.download.stored import StoredShard, StoredShards
from holdfast_core.store.rules import dead
from holdfast_core.store.upload import CompressedPack, Document, PlainPack, WhileWanted, WholeShard
from holdfast_core.tiers.base import OpenWriter, ShardReader
from holdfast_core.tiers.objects import Listed, ObjectSource, ObjectStore, Page

Dead = Callable[[Collection[CheckpointId], frozenset[CheckpointId]], frozenset[CheckpointId]]
"""Takes checkpoints and those that have a manifest, and returns those that do not exist and never will."""


@dataclass(slots=True)
class Total:
    """Number, bytes and greatest age of objects."""

    objects: int = 0
    size_bytes: int = 0
    oldest: timedelta = timedelta(0)

    def add(self, item: Listed) -> None:
        """Count an object."""
        self.objects += 1
        self.size_bytes += item.size_bytes
        self.oldest = max(self.oldest, item.age)

    def add_all(self, other: Total) -> None:
        """Count the objects of another total."""
        self.objects += other.objects
        self.size_bytes += other.size_bytes
        self.oldest = max(self.oldest, other.oldest)


class JobObjects:
    """The objects of one job, or of all jobs of a store. It raises what the store raises."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self.prefix = prefix

    def key(self, relative: str) -> str:
        """Return the key in the store."""
        return self.prefix + relative

    def get(self, relative: str) -> bytes:
        """Return a document. Raises NotFoundError."""
        return self._store.get(self.key(relative))

    def put(
        self,
        relative: str,
        document: bytes,
        is_damaged: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Put a document if absent; replace one that is there if it cannot belong to this key.

        Raises AlreadyExistsError for another document.
        """
        try:
            self._store.write(self.key(relative), Document(document))
        except AlreadyExistsError:
            if is_damaged is None or not is_damaged(self.get(relative)):
                raise
            self._store.write(self.key(relative), Document(document), replace=True)

    def delete(self, relative: Iterable[str]) -> None:
        """Delete objects. Absent ones are ignored."""
        self._store.delete([self.key(key) for key in relative])

    def delete_below(self, below: str) -> Total:
        """Delete all objects below a path, and return how much that was."""
        total = Total()
        for page in pages(self._store, self.key(below)):
            self._store.delete([item.key for item in page.objects])
            for item in page.objects:
                total.add(item)
        return total

    def list(self, below: str) -> Iterator[Listed]:
        """Yield all objects below a path, one page at a time. Their keys are relative."""
        for page in pages(self._store, self.key(below)):
            for item in page.objects:
                yield Listed(item.key.removeprefix(self.prefix), item.age, item.size_bytes)

    def list_each(self, below: Iterable[str]) -> Iterator[Listed]:
        """Yield all objects below several paths in their order. The paths are listed at the same time."""
        with ThreadPoolExecutor(READERS, "listing") as pool:
            for found in pool.map(lambda path: tuple(self.list(path)), below):
                yield from found

    def unfinished(self) -> Sequence[Listed]:
        """Return what interrupted or running writes have stored (ObjectStore.unfinished)."""
        return self._store.unfinished(self.prefix)

    def abort_stale(self, older_than: timedelta) -> int:
        """Remove what interrupted uploads left at least `older_than` ago; return how many."""
        return self._store.abort_stale([self.prefix], older_than)

    def parsed(self, below: str) -> Iterator[tuple[keys.Key, timedelta]]:
        """Yield key and age of all objects below a path, without those that Holdfast does not write."""
        for item in self.list(below):
            try:
                key = keys.parse_key(item.key)
            except FormatError:
                continue  # such an object is never deleted alone
            yield key, item.age

    def folders(self, kind: str) -> set[CheckpointId]:
        """Return the checkpoints that have objects of a kind."""
        found = (
            keys.checkpoint_of_folder(folder.removeprefix(self.prefix))
            for page in pages(self._store, f"{self.prefix}{kind}/", folders=True)
            for folder in page.folders
        )
        return {checkpoint for checkpoint in found if checkpoint is not None}

    def manifests(self) -> tuple[CheckpointId, ...]:
        """Return the checkpoints that have a manifest, by step and round. The manifests are not read."""
        found = (key for key, _ in self.parsed(f"{keys.MANIFESTS}/"))
        return tuple(sorted(key.checkpoint for key in found if isinstance(key, keys.ManifestKey)))

    def delete_checkpoint(self, checkpoint: CheckpointId) -> None:
        """See ObjectTier.delete_checkpoint."""
        self.delete([keys.manifest_key(checkpoint)])
        self._release(checkpoint)
        if not self._needed_by(checkpoint):
            self.delete_below(keys.shards_prefix(checkpoint))

    def sweep(self, quiet: timedelta, judge: Callable[[], Dead]) -> dict[CheckpointId, Total]:
        """Delete the objects of checkpoints that have no manifest and that no other checkpoint needs.

        A checkpoint is swept only if none of its objects was written within `quiet`. The objects of other
        checkpoints are neither listed nor read: the time depends on the number of checkpoints, and not on
        their ranks or bytes.

        Args:
            quiet: Minimum age of the newest object, by the store's clock.
            judge: Returns which checkpoints do not exist and never will. It is called after the
                checkpoints were listed, so an upload that starts later has no object in the list.

        Returns:
            The checkpoints whose shards and packs were deleted, and how much that was.
        """
        stored = self.folders(keys.SHARDS)
        stored |= self.folders(keys.REFERENCES)
        judged = judge()
        manifests = frozenset(self.manifests())

        def gone(checkpoints: Collection[CheckpointId]) -> frozenset[CheckpointId]:
            return judged(checkpoints, manifests)

        swept = dict[CheckpointId, Total]()
        # A checkpoint needs earlier ones, so the newest is swept first: its markers go with it.
        for checkpoint in sorted(gone(stored), reverse=True):
            by = self._needed_by(checkpoint)
            stale = {c for c in gone(by) if by[c] >= quiet}
            self.delete([keys.needed_by_key(checkpoint, c) for c in sorted(stale)])
            if self._is_quiet(keys.references_prefix(checkpoint), quiet):
                self._release(checkpoint)
            shards = keys.shards_prefix(checkpoint)
            is_free = by.keys() <= stale and self._is_quiet(shards, quiet)
            if is_free and (deleted := self.delete_below(shards)).objects:
                swept[checkpoint] = deleted
        return swept

    def needs(self, checkpoint: CheckpointId) -> Iterator[keys.NeedsKey]:
        """Yield the markers of the earlier checkpoints that a checkpoint needs."""
        for key, _ in self.parsed(keys.references_prefix(checkpoint)):
            if isinstance(key, keys.NeedsKey):
                yield key

    def is_needed_by(self, checkpoint: CheckpointId, by: CheckpointId) -> bool:
        """Return whether a marker says that another checkpoint needs objects of this one."""
        key = self.key(keys.needed_by_key(checkpoint, by))
        return self._store.size(key, sure=True) is not None

    def _needed_by(self, checkpoint: CheckpointId) -> dict[CheckpointId, timedelta]:
        """Return the checkpoints that need objects of this one, with the ages of their markers.

        The markers are listed twice: a marker that replaces another one may be put before a listing passes
        its name, and the other one be deleted after the listing has passed that name.
        """
        return {
            key.by: age
            for _ in range(2)
            for key, age in self.parsed(keys.references_prefix(checkpoint))
            if isinstance(key, keys.NeededByKey)
        }

    def _release(self, checkpoint: CheckpointId) -> None:
        """Delete the markers that a checkpoint without a manifest has put."""
        found = tuple(self.needs(checkpoint))
        self.delete([keys.needed_by_key(key.earlier, checkpoint) for key in found])
        self.delete([keys.needs_key(checkpoint, key.earlier, key.payload_bytes) for key in found])

    def _is_quiet(self, below: str, quiet: timedelta) -> bool:
        """Return whether each object below a path was written at least `quiet` ago."""
        return all(item.age >= quiet for item in self.list(below))


def pages(store: ObjectStore, prefix: str, *, folders: bool = False) -> Iterator[Page]:
    """Yield the pages of a listing. Raises TierError if the store lists a page a second time."""
    token, last = "", ""
    while True:
        page = store.list(prefix, token, folders=folders)
        yield page
        if not page.next:
            return
        listed = max((*(item.key for item in page.objects), *page.folders), default="")
        if listed <= last:
            raise TierError(f"list of {prefix}: expected keys behind {last!r}, found {listed!r}")
        token, last = page.next, listed


def folder_names(store: ObjectStore, prefix: str, *, all_pages: bool = False) -> list[str]:
    """Return the names of the folders below a prefix, which is empty or ends with a slash.

    Without `all_pages`, the list ends at a page with objects: another program has the folder, maybe with
    millions of them.
    """
    found = list[str]()
    for page in pages(store, prefix, folders=True):
        found += [folder[len(prefix) : -1] for folder in page.folders]
        if page.objects and not all_pages:
            break
    return found


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
        self.all_jobs = JobObjects(store, self._base)
        """All objects below the prefix of the store."""
        self._compressed = compressed
        self._conflicts: set[str] = set()
        """Keys of shards under which the store holds other bytes that it does not replace."""
        self._uploads_over = threading.Event()
        self._workers = ThreadPoolExecutor(max(1, readers), thread_name_prefix="object-tier")

    def job(self, namespace: str, job_uid: JobUid) -> JobObjects:
        """Return the objects of a job."""
        return JobObjects(self._store, self._base + keys.job_prefix(namespace, job_uid))

    def close(self) -> None:
        """End all waits, wait for requests in progress, and close the store.

        No method may be called afterwards.
        """
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._store.close()
        self._workers.shutdown(wait=True)

    # ------------------------------------------------------------------ shards

    def end_uploads(self) -> None:
        """End the uploads of shards that run now, each before its next part. They raise TierError."""
        over, self._uploads_over = self._uploads_over, threading.Event()
        over.set()

    def _write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        self._store.write(key, WhileWanted(source, self._uploads_over), replace=replace)

    def upload_shard(self, namespace: str, reader: ShardReader) -> None:
        """Store a whole shard. Send nothing if the store holds exactly these bytes already.

        If the stored object does not verify as this shard, it is replaced where the store can do that.

        Raises:
            AlreadyExistsError: The store holds other bytes under the shard's key.
            CorruptionError: The local shard is damaged.
        """
        ref = reader.record.ref
        key, source = self._key(namespace, ref, keys.shard_key), WholeShard(reader)
        try:
            self._write(key, source)
        except AlreadyExistsError:
            # A caller that tries again must not read the whole object each time.
            if key in self._conflicts:
                raise
            try:
                if not is_damaged(self._store, key, self._workers, ref):
                    raise
                self._write(key, source, replace=True)
            except AlreadyExistsError:
                self._conflicts.add(key)
                raise

    def upload_pack(self, namespace: str, reader: ShardReader, index: PackIndex) -> None:
        """Store a pack: the chunks that `index` places in it, and the index.

        The caller makes sure that the shards to which the index refers stay in the store. Raises what
        `upload_shard` raises.
        """
        self._write(
            self._key(namespace, reader.record.ref, keys.pack_key), PlainPack(reader, index)
        )

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
        self._write(self._key(namespace, reader.record.ref, keys.pack_key), source)
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
        return self._store.size(self._key(namespace, ref, keys.shard_key)) is not None

    def download_shard(self, namespace: str, ref: ShardRef, open_writer: OpenWriter) -> ShardRecord:
        """Download a shard that is stored whole or as a pack, and commit the writer.

        Raises:
            NotFoundError: The store has neither the shard nor its pack.
            CorruptionError: Stored bytes do not verify, or a shard to which the pack refers is gone.
            HoldfastError: Whatever else the writer raises.
        """
        shards = self._shards(namespace)
        return open_stored_shard(self._store, shards, self._workers, ref).copy_to(open_writer)

    def open_shard(self, namespace: str, ref: ShardRef) -> StoredShardReader:
        """Open a shard that is stored whole or as a pack; its ranges are fetched when they are read.

        The shards to which a pack refers are looked up when their chunks are read. Raises what `stored`
        raises.
        """
        return open_stored_shard(self._store, self._shards(namespace), self._workers, ref)

    def _shards(self, namespace: str) -> StoredShards:
        def key_of(ref: ShardRef, packed: bool) -> str:
            return self._key(namespace, ref, keys.pack_key if packed else keys.shard_key)

        return StoredShards(self._store, key_of)

    def _key(self, namespace: str, ref: ShardRef, relative: Callable[[ShardRef], str]) -> str:
        return self.job(namespace, ref.job_uid).key(relative(ref))

    # ------------------------------------------------------------------ documents

    def put_manifest(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId, document: bytes
    ) -> Digest:
        """Put a manifest if absent and return its digest.

        A stored document that is not a manifest of this checkpoint is replaced where the store can do
        that. Raises AlreadyExistsError if the store holds another manifest of this checkpoint.
        """
        self.job(namespace, job_uid).put(
            keys.manifest_key(checkpoint),
            document,
            lambda found: misnamed(found, job_uid, checkpoint) is not None,
        )
        return digest_of(document)

    def get_manifest(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Return the manifest as stored. The caller compares its digest. Raises NotFoundError."""
        return self.job(namespace, job_uid).get(keys.manifest_key(checkpoint))

    def missing_manifest(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId
    ) -> str | None:
        """Return key and store of a manifest that the store does not have, or None if it has it.

        The manifest is not read. The store has looked repeatedly.
        """
        key = self.job(namespace, job_uid).key(keys.manifest_key(checkpoint))
        found = self._store.size(key, sure=True) is not None
        return None if found else f"{key} in {self._store.name}"

    def list_manifests(self, namespace: str, job_uid: JobUid) -> tuple[CheckpointId, ...]:
        """Return the checkpoints that have a manifest, by step and round. The manifests are not read."""
        return self.job(namespace, job_uid).manifests()

    def put_layout(self, namespace: str, ref: ShardRef, document: bytes) -> None:
        """Put the layout of a shard if absent. A damaged one is replaced where possible.

        It is an object of the checkpoint, as its shards are, and is deleted with them.
        """
        digest = digest_of(document)
        self.job(namespace, ref.job_uid).put(
            keys.stored_layout_key(ref), document, lambda found: digest_of(found) != digest
        )

    def get_layout(self, namespace: str, ref: ShardRef, digest: Digest) -> bytes:
        """Return a shard's layout.

        Raises:
            NotFoundError: The store does not have it.
            CorruptionError: Two reads do not match the digest.
        """
        key = self.job(namespace, ref.job_uid).key(keys.stored_layout_key(ref))
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
        objects = self.job(namespace, job_uid)
        for earlier, count in sorted(needs.items()):
            # The process that deletes `checkpoint` finds its `by` markers through its `needs` markers.
            objects.put(keys.needs_key(checkpoint, earlier, count), b"")
            objects.put(keys.needed_by_key(earlier, checkpoint), b"")

    def get_references(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId
    ) -> dict[CheckpointId, int]:
        """Return the payload bytes that each earlier checkpoint stores for this one."""
        found: dict[CheckpointId, int] = {}
        for key in self.job(namespace, job_uid).needs(checkpoint):
            found[key.earlier] = max(key.payload_bytes, found.get(key.earlier, 0))
        return found

    def shards_stored(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId
    ) -> frozenset[tuple[Rank, str]]:
        """Return the ranks whose shard or pack is stored, with the 16 hex characters of their digests."""
        objects = self.job(namespace, job_uid)
        return frozenset(
            (key.rank, key.blake3_prefix)
            for key, _ in objects.parsed(keys.shards_prefix(checkpoint))
            if isinstance(key, keys.ShardObjectKey) and key.kind is not keys.ShardObject.LAYOUT
        )

    # ------------------------------------------------------------------ deletion

    def delete_checkpoint(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Delete a checkpoint: its manifest, then its references, then its shards and packs.

        The checkpoint does not exist any more once its manifest is deleted. If another checkpoint needs
        its shards, they stay until `sweep`. Absent objects are ignored, so a repeated call completes an
        interrupted deletion.
        """
        self.job(namespace, job_uid).delete_checkpoint(checkpoint)

    def sweep(
        self,
        namespace: str,
        job_uid: JobUid,
        round_: RestartRound,
        quiet: timedelta,
        uploading: Callable[[], Collection[CheckpointId]],
    ) -> frozenset[CheckpointId]:
        """Delete what rules.dead returns, as JobObjects.sweep does.

        Args:
            namespace: Namespace of the job.
            job_uid: UID of the job.
            round_: Restart round of the coordinator that calls.
            quiet: Minimum age of the newest object, by the store's clock.
            uploading: Returns the checkpoints that are being uploaded.

        Returns:
            The checkpoints whose shards and packs were deleted.
        """

        def judge() -> Dead:
            busy = frozenset(uploading())
            return lambda checkpoints, manifests: dead(checkpoints, manifests, busy, round_)

        return frozenset(self.job(namespace, job_uid).sweep(quiet, judge))

    def abort_stale(self, namespace: str, job_uid: JobUid, older_than: timedelta) -> int:
        """Remove what interrupted uploads of the job left at least `older_than` ago; return how many."""
        return self.job(namespace, job_uid).abort_stale(older_than)

    def jobs(self, only: str | None = None) -> Iterator[tuple[str, JobUid]]:
        """Yield namespace and uid of each job that has a manifest. It takes a request for each job.

        Args:
            only: The namespace. None: those of all namespaces.
        """
        store, base = self._store, self._base
        namespaces = folder_names(store, base, all_pages=True) if only is None else [only]
        for namespace in namespaces:
            for uid in folder_names(store, f"{base}{namespace}/"):
                with suppress(FormatError):  # other programs may have folders here
                    if keys.MANIFESTS in folder_names(
                        store, self.job(namespace, JobUid(uid)).prefix
                    ):
                        yield namespace, JobUid(uid)
