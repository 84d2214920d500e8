"""The object store in a bucket of an S3-compatible server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.format.canonical import crc32c
from holdfast_core.store.s3.client import (
    CHECKSUM_HEADER,
    CHECKSUM_MODE,
    MAX_DELETED,
    PendingUpload,
    S3Client,
    S3Request,
    decode_crc,
)
from holdfast_core.store.s3.errors import Retrier
from holdfast_core.store.s3.upload import Transport, Upload
from holdfast_core.tiers.objects import MAX_DOCUMENT_BYTES, Listed, ObjectSource, Page
from holdfast_core.tiers.sources import run_all

_PROGRESS_BYTES = 1 << 20
"""A transfer that breaks after at least this many bytes is resumed with a new retry budget. A shorter one
counts as a failed attempt, so that a server that disconnects after every byte is not asked without end."""


class StoppedError(TierError):
    """A range was not requested because the caller needs no more bytes."""


class S3ObjectStore:
    """Implementation of tiers.objects.ObjectStore. Safe for use by many threads.

    A pool of `max_concurrency` threads sends the parts and deletes of all calls, one request per thread.
    Other requests run on the caller's thread.

    Memory: an upload holds at most 1 MiB per part in flight, because the bytes go from their file to the
    socket. An upload whose parts are made while they are sent holds at most s3.parts.MAX_BUFFERED_BYTES.

    `close` ends all waits between attempts immediately. A request in progress ends at its time-out at
    the latest. A transfer that needs further requests raises UnavailableError.
    """

    def __init__(
        self,
        client: S3Client,
        *,
        retrier: Retrier | None = None,
        throttle: Callable[[int], object] | None = None,
    ) -> None:
        """Create the store. It opens connections when they are first needed.

        Args:
            client: Client of the bucket; `close` closes it.
            retrier: Retry policy of all operations; `close` sets its `stop` event.
            throttle: Receives the size of each part in bytes before the part is sent; it may block. A
                repeated part of a multipart upload is not counted again.
        """
        self._client = client
        self._retrier = retrier or Retrier()
        self._workers = ThreadPoolExecutor(
            max_workers=max(1, client.config.max_concurrency), thread_name_prefix="object-store"
        )
        self._transport = Transport(client, self._retrier, self._workers, throttle)

    @property
    def name(self) -> str:
        return f"bucket {self._client.config.bucket!r} at {self._client.config.endpoint}"

    def close(self) -> None:
        """End all waits between attempts, wait for requests in progress, and close the connections."""
        self._retrier.stop.set()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        """See ObjectStore.write. Servers detect damage themselves, so `replace` has no effect."""
        Upload(self._transport, key, source).run()

    def get(self, key: str) -> bytes:
        """See ObjectStore.get.

        Raises:
            NotFoundError: The store has no such key at three looks.
            CorruptionError: Two reads in a row did not match the store's checksum.
        """
        document = self._retrier.look(f"get of {key}", lambda: self._get(key))
        if document is None:
            raise NotFoundError(f"{self._client.describe(S3Request('GET', key))}: no such object")
        return document

    def _get(self, key: str) -> bytes | None:
        try:
            return self._get_once(key)
        except CorruptionError:
            return self._get_once(key)

    def _get_once(self, key: str) -> bytes | None:
        request = S3Request("GET", key, headers=CHECKSUM_MODE)
        reply = self._client.send(request, limit_bytes=MAX_DOCUMENT_BYTES)
        if reply.failure is not None:
            if reply.failure.is_absent and reply.failure.code != "NoSuchBucket":
                return None
            raise reply.failure.error()
        expected = decode_crc(reply.headers.get(CHECKSUM_HEADER))
        found = crc32c(reply.body)
        if expected is not None and expected != found:
            raise CorruptionError(
                f"{self._client.describe(request)}: expected CRC32C {expected:08x}, found "
                f"{found:08x} over {len(reply.body)} bytes"
            )
        return reply.body

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        """See ObjectStore.read_into. A broken transfer resumes after its last received byte."""
        filled = 0
        while filled < len(buffer):
            rest = buffer[filled:]
            filled += self._retrier.call(
                f"download of {key}",
                lambda at=start + filled, rest=rest: self._pull(key, at, rest, stopped),  # type: ignore[misc]
            )

    def _pull(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None
    ) -> int:
        """Send one GET and return the number of received bytes.

        This is less than the buffer's length if the transfer broke after _PROGRESS_BYTES or more. Raises
        UnavailableError if it broke before.
        """
        filled = 0
        if stopped is not None and stopped.is_set():
            raise StoppedError(
                f"download of {key}: the download ended before its last byte was needed"
            )
        try:
            with self._client.stream_range(key, start, start + len(buffer)) as reply:
                while filled < len(buffer):
                    count = reply.read_into(buffer[filled:])
                    if count == 0:
                        raise UnavailableError(
                            f"{self._client.describe(S3Request('GET', key))}: the reply ended at byte "
                            f"{start + filled}, expected {start + len(buffer)}"
                        )
                    filled += count
        except UnavailableError:
            if filled < _PROGRESS_BYTES:
                raise
        return filled

    def size(self, key: str, *, sure: bool = False) -> int | None:
        """See ObjectStore.size. With `sure` there are three looks."""
        found = self._retrier.look(
            f"look for {key}", lambda: self._client.head(key), looks=3 if sure else 1
        )
        return None if found is None else found.size_bytes

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        delimiter = "/" if folders else ""
        found = self._retrier.call(
            f"list of {prefix}",
            lambda: self._client.list_objects(prefix, page, delimiter=delimiter),
        )
        return Page(
            tuple(
                Listed(item.key, _age(item.key, item.modified, found.date), item.size_bytes)
                for item in found.listed
                if item.key.startswith(prefix)
            ),
            found.next,
            tuple(folder for folder in found.folders if folder.startswith(prefix)),
        )

    def delete(self, keys: Sequence[str]) -> None:
        def delete(some: Sequence[str]) -> None:
            what = f"delete of {len(some)} objects, from {some[0]} on"
            self._retrier.call(what, lambda: self._client.delete(some))

        starts = range(0, len(keys), MAX_DELETED)
        run_all(self._workers, delete, (keys[at : at + MAX_DELETED] for at in starts))

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        """See ObjectStore.unfinished. Some servers (MinIO) list nothing here, see `abort_stale`."""
        uploads, date = self._unfinished(prefix)
        found = list[Listed]()
        for upload in uploads:
            with suppress(NotFoundError):  # it has ended meanwhile
                parts = self._retrier.call(
                    f"list of the parts of {upload.key}",
                    lambda upload=upload: self._client.list_parts(upload.key, upload.upload_id),  # type: ignore[misc]
                )
                size = sum(max(0, part.size_bytes) for part in parts)
                found.append(Listed(upload.key, _age(upload.key, upload.initiated, date), size))
        return found

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        """Abort the multipart uploads below these prefixes that were begun `older_than` ago.

        Some servers (MinIO) list unfinished uploads for an exact key only, so a prefix finds none there.
        """
        aborted: set[PendingUpload] = set()
        for prefix in prefixes:
            uploads, date = self._unfinished(prefix)
            for upload in uploads:
                is_old = _age(upload.key, upload.initiated, date) >= older_than
                if is_old and upload not in aborted:
                    self._abort(upload)
                    aborted.add(upload)
        return len(aborted)

    def _unfinished(self, prefix: str) -> tuple[Sequence[PendingUpload], str]:
        uploads, date = self._retrier.call(
            f"list of unfinished uploads below {prefix}",
            lambda: self._client.list_uploads(prefix),
        )
        return [upload for upload in uploads if upload.key.startswith(prefix)], date

    def _abort(self, upload: PendingUpload) -> None:
        self._retrier.call(
            f"abort of the unfinished upload of {upload.key}",
            lambda: self._client.abort_upload(upload.key, upload.upload_id),
        )


@lru_cache(maxsize=16)
def _time(date: str) -> datetime:
    """Return the time of a Date header. A page has the same one for a thousand objects."""
    return parsedate_to_datetime(date)


def _age(key: str, since: str, date: str) -> timedelta:
    """Return the time from `since` to the server's `date`, at least 0. Raises FormatError.

    `date` has whole seconds, so it may lie before `since`.
    """
    try:
        now = _time(date)
        return max(timedelta(0), now - datetime.fromisoformat(since))
    except (TypeError, ValueError) as error:
        raise FormatError(f"list with {key}: a date is not readable: {error}") from error
