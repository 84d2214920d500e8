"""The object tier: shards, packs, layouts, references and manifests of jobs in one S3-compatible store.

A restore tries this tier last; it is the only tier that survives the loss of all nodes. Objects are
immutable and written only if absent. The manifest of a checkpoint is deleted before its shards, and the
shards stay while other checkpoints need them. Only the sidecar and the short-lived store pods hold the
credentials. Retention decides elsewhere which checkpoints to keep.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import CorruptionError, FormatError, NotFoundError
from holdfast_core.format import keys
from holdfast_core.format.digest import digest_of
from holdfast_core.format.references import References, parse_references_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, ShardRef
from holdfast_core.shards.pack import PackIndex
from holdfast_core.store.documents import DocumentStore
from holdfast_core.store.download.ranged_shard import open_ranged_shard
from holdfast_core.store.download.shard import download_shard
from holdfast_core.store.download.stored import KeyOf, StoredShard, StoredShards
from holdfast_core.store.prune import dead, needed
from holdfast_core.store.s3.client import PendingUpload, S3Client
from holdfast_core.store.s3.credentials import CredentialsProvider
from holdfast_core.store.s3.http import Timeouts
from holdfast_core.store.s3.retry import Retrier
from holdfast_core.store.upload.encode import part_sizes
from holdfast_core.store.upload.encoded import EncodedUpload
from holdfast_core.store.upload.file import ShardUpload
from holdfast_core.store.upload.pack import plan_pack_parts
from holdfast_core.store.upload.parts import MIN_PART_BYTES, plan_parts
from holdfast_core.store.upload.sending import Transport
from holdfast_core.tiers.base import OpenWriter, ShardReader, ShardRecord, ShardSource

_LOG = logging.getLogger(__name__)
MAX_LISTED_KEYS = 1_000_000
"""A longer list raises FormatError: no job has so many objects, so the server is broken."""


class S3ObjectTier:
    """Implementation of tiers.base.ObjectTier on an S3-compatible store. Safe for use by many threads.

    A pool of `config.max_concurrency` threads sends the parts, ranges and deletes of all transfers, one
    request per thread. Other requests run on the caller's thread.

    Memory: an upload holds at most 1 MiB per part in flight, because a shard's bytes go from its file to
    the socket. An upload that compresses holds at most upload.encode.MAX_HELD_BYTES. A download holds
    at most download.shard.MAX_AHEAD_BYTES and the chunk tables.

    `close` ends all waits between attempts immediately. A request in progress ends at its time-out at
    the latest. A transfer that needs further requests raises UnavailableError.
    """

    def __init__(
        self,
        config: StoreConfig,
        credentials: CredentialsProvider,
        *,
        ca_file: str | None = None,
        timeouts: Timeouts | None = None,
        retrier: Retrier | None = None,
        clock: Clock | None = None,
        throttle: Callable[[int], object] | None = None,
        sent: Callable[[int], object] | None = None,
        compressed: Callable[[int, int], object] | None = None,
    ) -> None:
        """Create the tier. It opens connections when they are first needed.

        Args:
            config: Endpoint, bucket, prefix and limits.
            credentials: Source of the keys; it is asked at every request.
            ca_file: CA certificates of the store's server; None uses those of the system.
            timeouts: Time-outs of connections and replies.
            retrier: Retry policy of all operations; `close` sets its `stop` event.
            clock: Clock of signatures, time-outs and retries.
            throttle: Receives the size of each part in bytes before the part is sent; it may block. A
                repeated part of a multipart upload is not counted again.
            sent: Receives the number of request body bytes that were handed to the network, including
                those of failed attempts. Any thread may call it.
            compressed: Receives the payload bytes of each compressed pack before and after compression.
        """
        self._config = config
        self._stop = threading.Event()
        self._retrier = retrier or Retrier(clock=clock or SystemClock(), stop=self._stop)
        self._client = S3Client(
            config, credentials, ca_file=ca_file, timeouts=timeouts, clock=clock, sent=sent
        )
        self._compressed = compressed or _nobody
        self._documents = DocumentStore(self._client, self._retrier)
        self._workers = ThreadPoolExecutor(
            max_workers=max(1, config.max_concurrency), thread_name_prefix="object-tier"
        )
        self._transport = Transport(self._client, self._retrier, self._workers, throttle)
        self._part_bytes = max(MIN_PART_BYTES, config.part_size_mib << 20)

    def close(self) -> None:
        """End all waits between attempts, wait for requests in progress, and close the connections.

        No method may be called afterwards.
        """
        self._retrier.stop.set()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def upload_shard(self, namespace: str, reader: ShardReader) -> None:
        """Upload a whole shard. Send nothing if the store holds exactly these bytes already.

        Raises:
            AlreadyExistsError: The store holds other bytes under the shard's key.
            CorruptionError: The local shard is damaged.
            AccessDeniedError: The store refuses the credentials.
            CapacityError: The store is full.
            NotFoundError: The bucket does not exist.
            UnavailableError: The retry policy is spent, or the tier is being closed.
        """
        ref = reader.record.ref
        key = self._key(namespace, ref.job_uid, keys.shard_key(ref))
        plan = plan_parts(reader, self._part_bytes)
        ShardUpload(self._transport, key, reader, plan).run()

    def upload_pack(self, namespace: str, reader: ShardReader, index: PackIndex) -> None:
        """Upload a pack: the chunks that `index` places in it, and the index.

        The caller makes sure that the shards to which the index refers stay in the store. Raises what
        `upload_shard` raises.
        """
        ref = reader.record.ref
        key = self._key(namespace, ref.job_uid, keys.pack_key(ref))
        parts = plan_pack_parts(reader.fd, index, self._part_bytes)
        ShardUpload(self._transport, key, reader, parts.plan, parts.body).run()

    def upload_encoded(
        self, namespace: str, reader: ShardReader, index: PackIndex, widths: bytes
    ) -> PackIndex:
        """Upload a pack with compressed chunks (shards.coding).

        Args:
            namespace: Namespace of the job.
            reader: The shard on the node.
            index: Which chunks the pack stores; its coding is replaced.
            widths: Element width in bytes for each chunk of the payload.

        Returns:
            The index with the coding of the stored chunks.

        Raises:
            AlreadyExistsError: Any object has the pack's key; `stored` returns which.
            HoldfastError: Whatever else `upload_shard` raises.
        """
        ref = reader.record.ref
        key = self._key(namespace, ref.job_uid, keys.pack_key(ref))
        at_once = max(1, self._config.max_concurrency)
        sizes = part_sizes(index.payload_bytes_here, self._part_bytes, at_once)
        stored = EncodedUpload(
            self._transport, key, reader, index, widths=widths, sizes=sizes
        ).run()
        self._compressed(stored.payload_bytes_here, stored.stored_bytes)
        return stored

    def stored(self, namespace: str, ref: ShardRef, *, looks: int = 3) -> StoredShard:
        """Return how the store holds a shard: whole, or as a pack.

        Args:
            namespace: Namespace of the job.
            ref: The shard.
            looks: How often the store is asked in a row before NotFoundError is raised.

        Raises:
            NotFoundError: The store has neither the shard nor its pack.
            CorruptionError: The end of the object does not verify.
        """
        return StoredShards(self._client, self._retrier, self._key_of(namespace)).find(
            ref, looks=looks
        )

    def has_whole(self, namespace: str, ref: ShardRef) -> bool:
        """Return whether an object has the key of the whole shard. The object is not verified."""
        return StoredShards(self._client, self._retrier, self._key_of(namespace)).has_whole(ref)

    def download_shard(self, namespace: str, ref: ShardRef, open_writer: OpenWriter) -> ShardRecord:
        """Download a shard that is stored whole or as a pack, and commit the writer.

        Raises:
            NotFoundError: The store has neither the shard nor its pack.
            CorruptionError: Stored bytes do not verify, or a shard to which the pack refers is gone.
            UnavailableError: The retry policy is spent, or the tier is being closed.
            HoldfastError: Whatever else the writer raises.
        """
        key_of = self._key_of(namespace)
        return download_shard(self._client, self._retrier, self._workers, key_of, ref, open_writer)

    def open_shard(self, namespace: str, ref: ShardRef) -> ShardSource:
        """Open a shard that is stored whole or as a pack.

        The shards to which a pack refers are looked up when their chunks are read.
        """
        key_of = self._key_of(namespace)
        return open_ranged_shard(self._client, self._retrier, self._workers, key_of, ref)

    def put_manifest(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId, document: bytes
    ) -> Digest:
        """Put a manifest if absent and return its digest.

        Raises AlreadyExistsError if the store holds another manifest of this checkpoint.
        """
        self._documents.put(self._key(namespace, job_uid, keys.manifest_key(checkpoint)), document)
        return digest_of(document)

    def get_manifest(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Return the manifest as stored. The caller compares its digest. Raises NotFoundError."""
        return self._documents.get(self._key(namespace, job_uid, keys.manifest_key(checkpoint)))

    def list_manifests(self, namespace: str, job_uid: JobUid) -> tuple[CheckpointId, ...]:
        """Return the checkpoints that have a manifest, by step and round. The manifests are not read."""
        return tuple(sorted(_by_checkpoint(self._list(namespace, job_uid, f"{keys.MANIFESTS}/"))))

    def put_layout(self, namespace: str, job_uid: JobUid, document: bytes) -> Digest:
        digest = digest_of(document)
        self._documents.put(self._key(namespace, job_uid, keys.layout_key(digest)), document)
        return digest

    def get_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> bytes:
        """Return a layout. Raises NotFoundError; CorruptionError if two reads do not match the digest."""
        key = self._key(namespace, job_uid, keys.layout_key(digest))
        document = self._documents.get(key)
        if digest_of(document) != digest:
            document = self._documents.get(key)  # the first read may have been damaged in transit
        found = digest_of(document)
        if found != digest:
            raise CorruptionError(f"layout {key}: expected digest {digest}, found {found}")
        return document

    def list_layouts(
        self, namespace: str, job_uid: JobUid, older_than: timedelta
    ) -> frozenset[Digest]:
        """Return the layouts that were written at least `older_than` ago, by the server's clock."""
        found = set[Digest]()
        for item in self._list(namespace, job_uid, f"{keys.LAYOUTS}/"):
            digest = _layout_of(item.key)
            if digest is not None and item.age >= older_than:
                found.add(digest)
        return frozenset(found)

    def delete_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> None:
        self._delete([self._key(namespace, job_uid, keys.layout_key(digest))])

    def put_references(self, namespace: str, job_uid: JobUid, references: References) -> None:
        """Put a checkpoint's references if absent. This must come before its manifest (ADR 0025).

        Raises AlreadyExistsError if the store holds other references of this checkpoint.
        """
        key = self._key(namespace, job_uid, keys.references_key(references.checkpoint))
        self._documents.put(key, references.to_bytes())

    def get_references(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Return a checkpoint's references. NotFoundError means that it needs no other checkpoint."""
        key = self._key(namespace, job_uid, keys.references_key(checkpoint))
        return self._documents.get(key)

    def delete_checkpoint(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Delete a checkpoint: its manifest, then its references, then its shards and packs.

        The checkpoint does not exist any more once its manifest is deleted. If another checkpoint needs
        its shards, they stay until `sweep`. Absent objects are ignored, so a repeated call completes an
        interrupted deletion.
        """
        self._delete([self._key(namespace, job_uid, keys.manifest_key(checkpoint))])
        try:
            references = self._references(namespace, job_uid)
        except FormatError as error:
            # The manifest is deleted, so the checkpoint is gone. Unreadable references of another
            # checkpoint must not stop retention.
            _LOG.warning(
                "the shards of %s stay, nobody knows who needs them: %s", checkpoint, error
            )
            return
        if checkpoint in references:
            self._delete([self._key(namespace, job_uid, keys.references_key(checkpoint))])
        if checkpoint in needed(references, ignored={checkpoint}):
            return
        below = self._list(namespace, job_uid, keys.shards_prefix(checkpoint))
        self._delete([self._key(namespace, job_uid, item.key) for item in below])

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
            quiet: Minimum age of the newest object, by the server's clock.
            uploading: Returns the checkpoints that are being uploaded. It is called after the objects
                were listed, so an upload that starts later has no object in the list.

        Returns:
            The checkpoints whose shards and packs were deleted.

        Raises:
            FormatError: A references document cannot be parsed; nothing was deleted.
        """
        shards = self._list(namespace, job_uid, f"{keys.SHARDS}/")
        documents = self._list(namespace, job_uid, f"{keys.REFERENCES}/")
        stored, said = _by_checkpoint(shards), _by_checkpoint(documents).keys()
        busy = frozenset(uploading()) | _written_lately([*shards, *documents], quiet)
        manifests = frozenset(self.list_manifests(namespace, job_uid))
        references = self._references(namespace, job_uid)
        gone = dead({*stored, *said}, manifests, busy, round_)
        kept = needed(references, ignored=gone & said)
        swept = frozenset(c for c in stored if c in gone and c not in kept)
        below = [keys.references_key(checkpoint) for checkpoint in sorted(gone & said)]
        below += [key for checkpoint in sorted(swept) for key in stored[checkpoint]]
        self._delete([self._key(namespace, job_uid, key) for key in below])
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

    def abort_stale_uploads(
        self,
        namespace: str,
        job_uid: JobUid,
        older_than: timedelta,
        refs: Sequence[ShardRef] = (),
    ) -> int:
        """Abort the job's multipart uploads that were begun more than `older_than` ago; return how many.

        The age is by the server's clock. Some servers (MinIO) list unfinished uploads for an exact key
        only; `refs` names the shards whose keys are listed one by one.
        """
        prefixes = [self._prefix(namespace, job_uid)]
        for name in (keys.shard_key, keys.pack_key):
            prefixes += [self._key(namespace, job_uid, name(ref)) for ref in refs]
        aborted: set[tuple[str, str]] = set()
        for prefix in prefixes:
            for upload in self._stale_uploads(prefix, older_than):
                if (upload.key, upload.upload_id) not in aborted:
                    self._abort(upload)
                    aborted.add((upload.key, upload.upload_id))
        return len(aborted)

    def _stale_uploads(self, prefix: str, older_than: timedelta) -> Iterable[PendingUpload]:
        uploads, date = self._retrier.call(
            f"list of unfinished uploads below {prefix}", lambda: self._client.list_uploads(prefix)
        )
        return [
            upload
            for upload in uploads
            if upload.key.startswith(prefix)
            and _age(upload.key, upload.initiated, date) > older_than
        ]

    def _abort(self, upload: PendingUpload) -> None:
        self._retrier.call(
            f"abort of the unfinished upload of {upload.key}",
            lambda: self._client.abort_upload(upload.key, upload.upload_id),
        )

    def _delete(self, object_keys: Sequence[str]) -> None:
        def delete(key: str) -> None:
            self._retrier.call(f"delete of {key}", lambda: self._client.delete(key))

        for _ in self._workers.map(delete, object_keys):
            pass

    def _list(self, namespace: str, job_uid: JobUid, below: str) -> list[_Stored]:
        """Return all objects below a path. Their keys are relative to the job's prefix."""
        base = self._prefix(namespace, job_uid)
        found: list[_Stored] = []
        token = ""
        while True:
            page = self._retrier.call(
                f"list of {base}{below}",
                lambda token=token: self._client.list_objects(base + below, token),  # type: ignore[misc]
            )
            found += [
                _Stored(item.key.removeprefix(base), item.modified, page.date)
                for item in page.listed
                if item.key.startswith(base + below)
            ]
            if len(found) > MAX_LISTED_KEYS:
                raise FormatError(f"list of {base}{below}: more than {MAX_LISTED_KEYS} keys")
            if not page.next:
                return found
            token = page.next

    def _prefix(self, namespace: str, job_uid: JobUid) -> str:
        head = self._config.prefix.strip("/")
        return (head + "/" if head else "") + keys.job_prefix(namespace, job_uid)

    def _key_of(self, namespace: str) -> KeyOf:
        def key_of(ref: ShardRef, packed: bool) -> str:
            name = keys.pack_key(ref) if packed else keys.shard_key(ref)
            return self._key(namespace, ref.job_uid, name)

        return key_of

    def _key(self, namespace: str, job_uid: JobUid, relative: str) -> str:
        return self._prefix(namespace, job_uid) + relative


def _nobody(_before: int, _after: int) -> None:
    """Do nothing: the default of `compressed`."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """One listed object of the job."""

    key: str
    """Relative to the job's prefix."""
    modified: str
    """RFC 3339, by the server's clock."""
    date: str
    """Time of the listing by the server's clock, RFC 9110."""

    @property
    def age(self) -> timedelta:
        return _age(self.key, self.modified, self.date)


def _age(key: str, since: str, date: str) -> timedelta:
    """Return the time from `since` to the server's `date`, at least 0. Raises FormatError.

    `date` has whole seconds, so it may lie before `since`.
    """
    try:
        now = parsedate_to_datetime(date)
        return max(timedelta(0), now - datetime.fromisoformat(since))
    except (TypeError, ValueError) as error:
        raise FormatError(f"list with {key}: a date is not readable: {error}") from error


def _by_checkpoint(listed: Iterable[_Stored]) -> dict[CheckpointId, list[str]]:
    """Return the listed keys by the checkpoint that they belong to. Keys that belong to none are left out."""
    found: dict[CheckpointId, list[str]] = {}
    for item in listed:
        checkpoint = _checkpoint_of(item.key)
        if checkpoint is not None:
            found.setdefault(checkpoint, []).append(item.key)
    return found


def _written_lately(listed: Iterable[_Stored], within: timedelta) -> frozenset[CheckpointId]:
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
