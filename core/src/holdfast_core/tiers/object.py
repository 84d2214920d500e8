"""The object tier: shards, layouts and manifests of jobs in one S3-compatible store.

The last tier that a restore tries and the only one that survives everything. Objects are immutable
and written if absent; a manifest is deleted before its shards. Credentials stay in the sidecar and
in the store's own short-lived pods; nothing here decides what to keep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format import keys
from holdfast_core.format.digest import digest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef
from holdfast_core.tiers.base import OpenWriter, ShardReader, ShardRecord, ShardSource
from holdfast_core.tiers.object_documents import DocumentStore
from holdfast_core.tiers.object_download import download_shard
from holdfast_core.tiers.object_parts import MIN_PART_BYTES, plan_parts
from holdfast_core.tiers.object_source import open_stored_shard
from holdfast_core.tiers.object_upload import ShardUpload
from holdfast_core.tiers.retry import Retrier
from holdfast_core.tiers.s3_client import PendingUpload, S3Client
from holdfast_core.tiers.s3_credentials import CredentialsProvider
from holdfast_core.tiers.s3_http import Timeouts

MAX_LISTED_KEYS = 1_000_000
"""A list that is longer is refused: no job has so many, a broken server may."""


class S3ObjectTier:
    """base.ObjectTier on an S3-compatible store. Safe for use by many threads.

    At most `config.max_concurrency` parts and ranges are in flight over all transfers, a thread
    each. An upload holds at most 1 MiB a part (the bytes of a shard go from its file to the
    socket), a download object_download.MAX_AHEAD_BYTES. `close` ends waits between attempts at
    once; a transfer in progress ends with its time-out.
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
    ) -> None:
        """`throttle` is called with the bytes of each part before it is sent, and may block."""
        self._config = config
        self._throttle = throttle
        self._stop = threading.Event()
        self._retrier = retrier or Retrier(clock=clock or SystemClock(), stop=self._stop)
        self._client = S3Client(
            config, credentials, ca_file=ca_file, timeouts=timeouts, clock=clock
        )
        self._documents = DocumentStore(self._client, self._retrier)
        self._workers = ThreadPoolExecutor(
            max_workers=max(1, config.max_concurrency), thread_name_prefix="object-tier"
        )
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
        ShardUpload(
            self._client, self._retrier, self._workers, key, reader, plan, self._throttle
        ).run()

    def download_shard(self, namespace: str, ref: ShardRef, open_writer: OpenWriter) -> ShardRecord:
        """Raises NotFoundError, CorruptionError, UnavailableError and what the writer raises."""
        key = self._key(namespace, ref.job_uid, keys.shard_key(ref))
        return download_shard(self._client, self._retrier, self._workers, key, ref, open_writer)

    def open_shard(self, namespace: str, ref: ShardRef) -> ShardSource:
        key = self._key(namespace, ref.job_uid, keys.shard_key(ref))
        return open_stored_shard(self._client, self._retrier, self._workers, key, ref)

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
        found: list[CheckpointId] = []
        for key in self._list(namespace, job_uid, f"{keys.MANIFESTS}/"):
            try:
                parsed = keys.parse_key(key)
            except FormatError:
                continue  # not one of ours: whoever put it there, no checkpoint has this name
            if isinstance(parsed, keys.ManifestKey):
                found.append(parsed.checkpoint)
        return tuple(sorted(found))

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

    def delete_checkpoint(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """1. the manifest: from here the checkpoint does not exist; 2. its shards. Tolerates
        absence, so a delete that was interrupted is finished by another."""
        self._delete([self._key(namespace, job_uid, keys.manifest_key(checkpoint))])
        below = self._list(namespace, job_uid, keys.shards_prefix(checkpoint))
        self._delete([self._key(namespace, job_uid, key) for key in below])

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
        prefixes += [self._key(namespace, job_uid, keys.shard_key(ref)) for ref in refs]
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
        try:
            now = parsedate_to_datetime(date)
            return [
                upload
                for upload in uploads
                if upload.key.startswith(prefix)
                and now - datetime.fromisoformat(upload.initiated) > older_than
            ]
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"list of unfinished uploads below {prefix}: a date is not readable: {error}"
            ) from error

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

    def _list(self, namespace: str, job_uid: JobUid, below: str) -> list[str]:
        """Keys relative to the job's prefix."""
        base = self._prefix(namespace, job_uid)
        found: list[str] = []
        token = ""
        while True:
            page, token = self._retrier.call(
                f"list of {base}{below}",
                lambda token=token: self._client.list_keys(base + below, token),  # type: ignore[misc]
            )
            found += [key.removeprefix(base) for key in page if key.startswith(base + below)]
            if len(found) > MAX_LISTED_KEYS:
                raise FormatError(f"list of {base}{below}: more than {MAX_LISTED_KEYS} keys")
            if not token:
                return found

    def _prefix(self, namespace: str, job_uid: JobUid) -> str:
        head = self._config.prefix.strip("/")
        return (head + "/" if head else "") + keys.job_prefix(namespace, job_uid)

    def _key(self, namespace: str, job_uid: JobUid, relative: str) -> str:
        return self._prefix(namespace, job_uid) + relative
