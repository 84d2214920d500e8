"""Requests that write one object, in one PUT or in parts, and that confirm that the store holds it.

Every request that carries bytes of the object has a signed CRC32C, because some stores publish half an
object as a whole one when the client dies while it sends the body. Before each PUT of an object and
before a completion is repeated, a HEAD in checksum mode finds out what is stored. The stored object
therefore decides the outcome after a lost reply, a 412 or an upload that is gone.

An interrupted upload (this process is killed or stopped, or the store is unavailable for longer than the
retry budget) stays in the store. The next attempt finds it by its key, keeps the parts with the right
checksums and sends the rest. An upload that failed with an error that is not retryable is aborted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from holdfast_core.errors import (
    AlreadyExistsError,
    HoldfastError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.store.s3.client import (
    CHECKSUM_HEADER,
    IF_ABSENT,
    ObjectInfo,
    S3Client,
    S3Reply,
    S3Request,
    UploadedPart,
    encode_crc,
)
from holdfast_core.store.s3.http import Body
from holdfast_core.store.s3.retry import Retrier
from holdfast_core.store.upload.parts import Part, PartPlan
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.pooled import CLOSING, submit

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_RESTARTS = 3
"""Attempts of an upload that disappears from the store (lifecycle rule, abort by another process)."""
_MAX_LEFTOVERS = 16
"""Unfinished uploads of one object that are considered; each comes from one interrupted attempt."""
_PART_CODES = frozenset({"InvalidPart", "InvalidPartOrder"})


class UploadLostError(TierError):
    """The multipart upload is gone or unusable, and the object does not exist.

    `Upload._begin_again` catches this error and starts again.
    """


class AbandonedError(TierError):
    """A part was not sent because another part failed. `Upload._results` raises that part's error."""


@dataclass(frozen=True, slots=True)
class Transport:
    """Client, retries, workers and throttle that all uploads of one tier share."""

    client: S3Client
    retrier: Retrier
    workers: ThreadPoolExecutor
    throttle: Callable[[int], object] | None = None
    """Receives the size of each part in bytes before the part is sent; it may block."""


def confirm(client: S3Client, key: str, size_bytes: int, crc32c: int) -> bool:
    """Return True if the key holds exactly these bytes, by size and CRC32C, and False if it is free.

    Raises AlreadyExistsError if it holds anything else: objects are immutable and never overwritten.
    """
    found = client.head(key)
    if found is None:
        return False
    if found == ObjectInfo(size_bytes, crc32c):
        return True
    checksum = "no CRC32C" if found.crc32c is None else f"CRC32C {found.crc32c:08x}"
    raise AlreadyExistsError(
        f"{client.describe(S3Request('HEAD', key))}: expected {size_bytes} bytes with CRC32C "
        f"{crc32c:08x}, found {found.size_bytes} bytes with {checksum}"
    )


def confirm_written(client: S3Client, key: str, size_bytes: int, crc32c: int) -> None:
    """Check that the key holds exactly these bytes after the store has acknowledged the write.

    Raises:
        UnavailableError: The object is absent or differs; the caller looks again.
        TierError: The store keeps no CRC32C of the object.
    """
    found = client.head(key)
    if found == ObjectInfo(size_bytes, crc32c):
        return
    where = client.describe(S3Request("HEAD", key))
    if found is None:
        raise UnavailableError(f"{where}: not there right after it was written")
    if found.crc32c is None and found.size_bytes == size_bytes:
        raise TierError(
            f"{where}: the store kept no CRC32C of the whole object; it cannot hold shards safely"
        )
    raise UnavailableError(
        f"{where}: expected {size_bytes} bytes with CRC32C {crc32c:08x} right after they were "
        f"written, found {found}"
    )


class Upload:
    """Base class of the upload of one object. A subclass makes the parts and chooses their order."""

    def __init__(self, transport: Transport, key: str, reader: ShardReader) -> None:
        """`reader` is the shard on the node. It is verified once if the store reports wrong bytes."""
        self._client = transport.client
        self._retrier = transport.retrier
        self._workers = transport.workers
        self._throttle = transport.throttle
        self._key = key
        self._reader = reader
        self._verified = threading.Lock()
        self._conditional = IF_ABSENT if self._client.config.conditional_put else {}

    def _begin_again(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, repeated while the multipart upload disappears.

        Raises UnavailableError after _RESTARTS attempts.
        """
        for _ in range(_RESTARTS):
            try:
                return attempt()
            except UploadLostError as error:
                lost = str(error)  # The error's traceback would keep the bytes of parts in memory.
        raise UnavailableError(f"upload of {self._key}: {_RESTARTS} uploads vanished: {lost}")

    def _put_whole(self, plan: PartPlan, body: Callable[[], Body]) -> None:
        """Make one attempt to put an object of one part, unless the store holds it already."""
        if self._confirm(plan):
            return
        (part,) = plan.parts
        headers = {
            CHECKSUM_HEADER: encode_crc(part.crc32c),
            "Content-Type": "application/octet-stream",
            **self._conditional,
        }
        self._settle(
            plan,
            self._client.send(S3Request("PUT", self._key, {}, headers, self._paced(part, body))),
        )

    def _begin(self) -> str:
        return self._retrier.call(
            f"begin of upload {self._key}", lambda: self._client.create_upload(self._key)
        )

    def _finish(
        self,
        upload_id: str,
        send: Callable[[], tuple[PartPlan, list[str]]],
        taken_over: Callable[[], bool],
        leftovers: Collection[str],
    ) -> None:
        """Send the parts and complete the upload. Afterwards abort the other unfinished uploads.

        Args:
            upload_id: The multipart upload.
            send: Sends the parts; returns the plan and the ETags of its parts.
            taken_over: Returns whether parts of an earlier attempt were kept.
            leftovers: Ids of all unfinished uploads of this object.
        """
        ended = completing = False
        try:
            plan, etags = send()
            completing = True
            ended = self._complete(plan, upload_id, etags)
        except UnavailableError:
            # The next attempt continues an interrupted upload. But an upload with kept parts that cannot
            # be completed may be broken in the store, and every attempt would choose it again.
            ended = not (completing and taken_over())
            raise
        finally:
            if not ended:
                self._abort(upload_id)
        for other in set(leftovers) - {upload_id}:
            self._abort(other)  # The object is stored, so no process needs the other uploads.

    def _leftovers(self) -> dict[str, tuple[UploadedPart, ...]]:
        """Return the parts that the store holds of each unfinished upload of this object, by upload id.

        Returns an empty mapping if the store does not list uploads or does not permit it; the object is
        then uploaded from its first part. Raises UnavailableError.
        """
        try:
            uploads, _ = self._retrier.call(
                f"look for unfinished uploads of {self._key}",
                lambda: self._client.list_uploads(self._key),
            )
            return {
                upload.upload_id: parts
                for upload in uploads[:_MAX_LEFTOVERS]
                if upload.key == self._key
                and (parts := self._parts_of(upload.upload_id)) is not None
            }
        except TierError as error:
            if error.retryable:
                raise
            _LOG.info("unfinished uploads of %s are not looked for: %s", self._key, error)
            return {}

    def _parts_of(self, upload_id: str) -> tuple[UploadedPart, ...] | None:
        """Return the stored parts of an upload, or None if the upload ended since it was listed."""
        try:
            return self._retrier.call(
                f"list of parts of {self._key}",
                lambda: self._client.list_parts(self._key, upload_id),
            )
        except NotFoundError:
            return None

    def _submit(
        self, upload_id: str, part: Part, body: Callable[[], Body], failed: threading.Event
    ) -> Future[str]:
        """Send a part on a worker; the future's result is its ETag.

        Once `failed` is set no further attempt is made; a part that fails sets it. Raises
        UnavailableError if the tier is being closed.
        """
        return submit(self._workers, self._send_part, upload_id, part, body, failed)

    def _results(self, futures: dict[int, Future[str]]) -> dict[int, str]:
        """Return the ETags by part number, from futures that have all ended. Empty `futures`.

        `futures` and the locals are cleared, because an error refers through its traceback to the frames
        and the futures refer to the error. This cycle would keep the bytes of parts in memory until the
        garbage collector runs.

        Raises:
            HoldfastError: The error of the first part that failed other than by AbandonedError.
            UnavailableError: No part failed, but some were cancelled because the tier is being closed.
        """
        ended = tuple(futures.items())
        futures.clear()
        error = _first_error(future for _, future in ended)
        try:
            if error is not None:
                raise error
            if any(future.cancelled() for _, future in ended):
                raise UnavailableError(f"{self._key}: {CLOSING}")
            return {number: future.result() for number, future in ended}
        finally:
            del ended, error

    def _send_part(
        self, upload_id: str, part: Part, body: Callable[[], Body], failed: threading.Event
    ) -> str:
        try:
            return self._sent(upload_id, part, body, failed)
        except BaseException:
            failed.set()
            raise

    def _sent(
        self, upload_id: str, part: Part, body: Callable[[], Body], failed: threading.Event
    ) -> str:
        what = f"part {part.number} of {self._key}"
        checksum = encode_crc(part.crc32c)

        def expect_no_failure() -> None:
            if failed.is_set():
                raise AbandonedError(f"{what}: another part failed")

        expect_no_failure()
        request = S3Request(
            "PUT",
            self._key,
            {"partNumber": str(part.number), "uploadId": upload_id},
            {CHECKSUM_HEADER: checksum},
            self._paced(part, body),
        )

        def attempt() -> str:
            expect_no_failure()
            reply = self._client.send(request)
            self._raise_failure(reply)
            found = reply.headers.get(CHECKSUM_HEADER, checksum)
            etag = reply.headers.get("etag", "")
            if found != checksum or not etag:
                raise UnavailableError(
                    f"{self._client.describe(request)}: {what}: expected checksum {checksum} and "
                    f"an ETag in the reply, found {self._client.shown(found)!r} and "
                    f"{self._client.shown(etag)!r}"
                )
            return etag

        return self._retrier.call(what, attempt)

    def _complete(self, plan: PartPlan, upload_id: str, etags: list[str]) -> bool:
        """Complete the multipart upload.

        Returns True if a completion of this upload was acknowledged. Returns False if the object was
        found in the store instead: another writer put it, or an earlier completion succeeded whose reply
        was lost.

        Raises UploadLostError if the upload is gone or its stored parts are unusable.
        """
        headers = {
            CHECKSUM_HEADER: encode_crc(plan.crc32c),
            "x-amz-checksum-type": "FULL_OBJECT",
            "x-amz-mp-object-size": str(plan.size_bytes),
            "Content-Type": "application/xml",
            **self._conditional,
        }
        body = _completion(plan.parts, etags)
        request = S3Request("POST", self._key, {"uploadId": upload_id}, headers, body)
        asked_before = False

        def attempt() -> bool:
            nonlocal asked_before
            if asked_before and self._confirm(plan):
                return False
            asked_before = True
            reply = self._client.send(request)
            failure = reply.failure
            if failure is None:
                return True
            if failure.is_precondition or failure.is_absent:
                if self._confirm(plan):
                    return False
                if failure.is_absent and failure.code != "NoSuchBucket":
                    raise UploadLostError(f"{failure.request}: {failure.text}")
                raise UnavailableError(f"{failure.request}: {failure.text}; yet nothing is there")
            if failure.is_bad_bytes or failure.code in _PART_CODES:
                # The stored parts differ from the store's list of them, so the upload is abandoned.
                self._reader.verify()
                raise UploadLostError(f"{failure.request}: {failure.text}")
            self._raise_failure(reply)
            return True

        mine = self._retrier.call(f"completion of {self._key}", attempt)
        if mine:
            self._retrier.call(f"check of {self._key}", lambda: self._confirm_written(plan))
        return mine

    def _settle(self, plan: PartPlan, reply: S3Reply) -> None:
        """Check the reply to a PUT of the whole object, and then what the store holds."""
        if reply.failure is None:
            self._confirm_written(plan)
        elif not reply.failure.is_precondition:
            self._raise_failure(reply)
        elif not self._confirm(plan):
            raise UnavailableError(
                f"{reply.failure.request}: {reply.failure.text}; yet nothing is there"
            )

    def _raise_failure(self, reply: S3Reply) -> None:
        failure = reply.failure
        if failure is None:
            return
        if failure.code == "NoSuchUpload":
            raise UploadLostError(f"{failure.request}: {failure.text}")
        if failure.is_bad_bytes and self._verified.acquire(blocking=False):
            # The bytes changed in transit or on this node's disk. One verification of the local shard per
            # upload tells which: it raises CorruptionError, which ends the upload, if the disk is at
            # fault.
            self._reader.verify()
        raise failure.error()

    def _confirm(self, plan: PartPlan) -> bool:
        return confirm(self._client, self._key, plan.size_bytes, plan.crc32c)

    def _confirm_written(self, plan: PartPlan) -> None:
        confirm_written(self._client, self._key, plan.size_bytes, plan.crc32c)

    def _paced(self, part: Part, body: Callable[[], Body]) -> Body:
        if self._throttle is not None:
            self._throttle(part.span.length_bytes)
        return body()

    def _abort(self, upload_id: str) -> None:
        try:
            self._client.abort_upload(self._key, upload_id)
        except HoldfastError as error:
            # The error that ended the upload is more important. abort_stale_uploads aborts this one later.
            _LOG.warning("unfinished upload of %s stays in the store: %s", self._key, error)


def _first_error(futures: Iterable[Future[str]]) -> BaseException | None:
    """Return the first error other than AbandonedError; None if there is none."""
    errors = (None if future.cancelled() else future.exception() for future in futures)
    own = (e for e in errors if e is not None and not isinstance(e, AbandonedError))
    return next(own, None)


def _completion(parts: tuple[Part, ...], etags: list[str]) -> bytes:
    items = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><ETag>{_escape(etag)}</ETag>"
        f"<ChecksumCRC32C>{encode_crc(part.crc32c)}</ChecksumCRC32C></Part>"
        for part, etag in zip(parts, etags, strict=True)
    )
    return f"<CompleteMultipartUpload>{items}</CompleteMultipartUpload>".encode()


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
