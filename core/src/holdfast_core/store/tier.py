"""The object tier: shards, packs, layouts and manifests of jobs in one S3-compatible store.

The last tier that a restore tries and the only one that survives everything. Objects are immutable
and written if absent. A manifest is deleted before its shards, and these stay while other checkpoints
need them. Credentials stay in the sidecar and in the store's own short-lived pods; nothing here
decides what to keep.
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
"""A list that is longer is refused: no job has so many, a broken server may."""


class S3ObjectTier:
    """base.ObjectTier on an S3-compatible store. Safe for use by many threads.

    At most `config.max_concurrency` parts and ranges are in flight over all transfers, a thread
    each. An upload holds at most 1 MiB a part (the bytes of a shard go from its file to the
    socket), one that compresses upload.encode.MAX_HELD_BYTES, a download
    download.shard.MAX_AHEAD_BYTES and chunk tables. `close` ends waits between attempts at once; a
    request in progress ends with its time-out, and a transfer that needs more of them with
    UnavailableError.
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
        """`throttle` is called with the bytes of each part before it is sent, and may block; `sent`
        with the bytes of bodies that were handed to the network, those of failed attempts too;
        `compressed`, of each object that was, with the bytes before and after."""
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
        """Nothing may be called after it."""
        self._retrier.stop.set()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def upload_shard(self, namespace: str, reader: ShardReader) -> None:
        """Returns at once when the store holds exactly these bytes already. Raises
        AlreadyExistsError when it holds others, CorruptionError when the local shard is bad."""
        ref = reader.record.ref
        key = self._key(namespace, ref.job_uid, keys.shard_key(ref))
        plan = plan_parts(reader, self._part_bytes)
        ShardUpload(self._transport, key, reader, plan).run()

    def upload_pack(self, namespace: str, reader: ShardReader, index: PackIndex) -> None:
        """The chunks that `index` places here, and the index. What it refers to is the caller's
        affair. Raises what `upload_shard` raises."""
        ref = reader.record.ref
        key = self._key(namespace, ref.job_uid, keys.pack_key(ref))
        parts = plan_pack_parts(reader.fd, index, self._part_bytes)
        ShardUpload(self._transport, key, reader, parts.plan, parts.body).run()

    def upload_encoded(
        self, namespace: str, reader: ShardReader, index: PackIndex, widths: bytes
    ) -> PackIndex:
        """Like `upload_pack`, the chunks compressed (format.coding; `widths`: one a chunk of the
        payload); returns the index with how they are stored. Raises AlreadyExistsError where anything
        is under the key: `stored` says what. At most upload.encode.MAX_HELD_BYTES are in memory."""
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
        """How the store holds a shard: whole, or packed. Raises NotFoundError (also where `looks`
        looks in a row did not find it), CorruptionError."""
        return StoredShards(self._client, self._retrier, self._key_of(namespace)).find(
            ref, looks=looks
        )

    def has_whole(self, namespace: str, ref: ShardRef) -> bool:
        """There is an object under the name of the whole shard, good or bad."""
        return StoredShards(self._client, self._retrier, self._key_of(namespace)).has_whole(ref)

    def download_shard(self, namespace: str, ref: ShardRef, open_writer: OpenWriter) -> ShardRecord:
        """Whole or packed. Raises NotFoundError, CorruptionError (also where something that a pack
        refers to is gone), UnavailableError and what the writer raises."""
        key_of = self._key_of(namespace)
        return download_shard(self._client, self._retrier, self._workers, key_of, ref, open_writer)

    def open_shard(self, namespace: str, ref: ShardRef) -> ShardSource:
        """Whole or packed. What a pack refers to is looked for when it is read."""
        key_of = self._key_of(namespace)
        return open_ranged_shard(self._client, self._retrier, self._workers, key_of, ref)

    def put_manifest(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId, document: bytes
    ) -> Digest:
        """The document's digest. Raises AlreadyExistsError when another document is there."""
        self._documents.put(self._key(namespace, job_uid, keys.manifest_key(checkpoint)), document)
        return digest_of(document)

    def get_manifest(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """The bytes as stored; the caller compares their digest with the one it expects. Raises
        NotFoundError."""
        return self._documents.get(self._key(namespace, job_uid, keys.manifest_key(checkpoint)))

    def list_manifests(self, namespace: str, job_uid: JobUid) -> tuple[CheckpointId, ...]:
        """In order of step and round. A listing is a hint: what it names may not verify."""
        return tuple(sorted(_by_checkpoint(self._list(namespace, job_uid, f"{keys.MANIFESTS}/"))))

    def put_layout(self, namespace: str, job_uid: JobUid, document: bytes) -> Digest:
        digest = digest_of(document)
        self._documents.put(self._key(namespace, job_uid, keys.layout_key(digest)), document)
        return digest

    def get_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> bytes:
        """Raises NotFoundError, CorruptionError (the bytes are not those the digest names)."""
        key = self._key(namespace, job_uid, keys.layout_key(digest))
        document = self._documents.get(key)
        if digest_of(document) != digest:
            document = self._documents.get(key)  # once more: it may have been the way here
        found = digest_of(document)
        if found != digest:
            raise CorruptionError(f"layout {key}: expected digest {digest}, found {found}")
        return document

    def list_layouts(
        self, namespace: str, job_uid: JobUid, older_than: timedelta
    ) -> frozenset[Digest]:
        """Layouts that were written so long ago by the server's own clock."""
        found = set[Digest]()
        for item in self._list(namespace, job_uid, f"{keys.LAYOUTS}/"):
            digest = _layout_of(item.key)
            if digest is not None and item.age >= older_than:
                found.add(digest)
        return frozenset(found)

    def delete_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> None:
        self._delete([self._key(namespace, job_uid, keys.layout_key(digest))])

    def put_references(self, namespace: str, job_uid: JobUid, references: References) -> None:
        """put-if-absent, before the manifest. Raises AlreadyExistsError where others are there."""
        key = self._key(namespace, job_uid, keys.references_key(references.checkpoint))
        self._documents.put(key, references.to_bytes())

    def get_references(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Raises NotFoundError: it needs no other checkpoint."""
        key = self._key(namespace, job_uid, keys.references_key(checkpoint))
        return self._documents.get(key)

    def delete_checkpoint(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """1. the manifest: from here the checkpoint does not exist; 2. its references; 3. its shards,
        if no other checkpoint needs them: else they stay until `sweep`. Tolerates absence, so a
        delete that was interrupted is finished by another."""
        self._delete([self._key(namespace, job_uid, keys.manifest_key(checkpoint))])
        try:
            references = self._references(namespace, job_uid)
        except FormatError as error:
            # The checkpoint is gone as was asked; retention must not stop for what somebody else wrote.
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
        """Deletes objects of checkpoints that do not exist (any more), that nobody needs and of which
        nothing was written for `quiet`; returns whose. `round_`: the caller's, of which it is the
        coordinator. `uploading`: what is on its way to the store when it is called; whatever begins
        later is newer than what is looked at here."""
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
        """All documents. Listed until nothing new appears, twice at least: one that was put while
        another was deleted must not be missed. Raises FormatError: what is not understood keeps
        everything."""
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
                    continue  # deleted meanwhile, after its manifest
                found[checkpoint] = parse_references_of(document, checkpoint)

    def abort_stale_uploads(
        self,
        namespace: str,
        job_uid: JobUid,
        older_than: timedelta,
        refs: Sequence[ShardRef] = (),
    ) -> int:
        """Aborts unfinished multipart uploads of the job that were begun more than `older_than` ago
        by the server's own clock; returns how many. Some servers (MinIO) list unfinished uploads
        for an exact key only: `refs` names shards to look at one by one."""
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
        """Keys relative to the job's prefix."""
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
    """Nobody wants to know what was compressed."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """An object of the job, as it was listed."""

    key: str
    modified: str
    date: str

    @property
    def age(self) -> timedelta:
        return _age(self.key, self.modified, self.date)


def _age(key: str, since: str, date: str) -> timedelta:
    """By the server's own clock, whose date counts whole seconds. Raises FormatError."""
    try:
        now = parsedate_to_datetime(date)
        return max(timedelta(0), now - datetime.fromisoformat(since))
    except (TypeError, ValueError) as error:
        raise FormatError(f"list with {key}: a date is not readable: {error}") from error


def _by_checkpoint(listed: Iterable[_Stored]) -> dict[CheckpointId, list[str]]:
    """Names that Holdfast writes, by checkpoint."""
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
    """None: no layout."""
    try:
        parsed = keys.parse_key(key)
    except FormatError:
        return None
    return parsed.digest if isinstance(parsed, keys.LayoutKey) else None


def _checkpoint_of(key: str) -> CheckpointId | None:
    """None: not one of ours, nobody asked us to delete it."""
    try:
        parsed = keys.parse_key(key)
    except FormatError:
        return None
    return None if isinstance(parsed, keys.LayoutKey) else parsed.checkpoint
