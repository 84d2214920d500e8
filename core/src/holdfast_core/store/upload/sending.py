"""How the bytes of one object get into the store, and how it is certain that they have: whole or in
parts, whoever makes these.

Every request carries a signed CRC32C, because some stores publish half an object as a whole one
when the client dies in mid-body. Nothing is repeated blindly: each attempt looks first (HEAD in
checksum mode), so a lost reply, a 412 or an upload that is gone are all settled by what is there.

An upload that was interrupted (this process killed or stopped, the store gone for longer than the
budget) stays in the store: the next attempt finds it there by its key, keeps the parts whose
checksums are right and sends the rest. One that failed for good is aborted.
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
"""How often an upload is begun that vanishes under us (a lifecycle rule, another's abort)."""
_MAX_LEFTOVERS = 16
"""Unfinished uploads of one shard that are looked at; each comes from one interrupted attempt."""
_PART_CODES = frozenset({"InvalidPart", "InvalidPartOrder"})


class UploadLostError(TierError):
    """The multipart upload is gone or no good, the object is not there: begin again. Never leaves
    here."""


class AbandonedError(TierError):
    """A part that was not sent because another one failed. Never leaves an upload."""


@dataclass(frozen=True, slots=True)
class Transport:
    """What uploads of one tier share."""

    client: S3Client
    retrier: Retrier
    workers: ThreadPoolExecutor
    throttle: Callable[[int], object] | None = None


def confirm(client: S3Client, key: str, size_bytes: int, crc32c: int) -> bool:
    """Whether exactly these bytes are there; False if nothing is. Raises AlreadyExistsError if
    something else is: keys are immutable, so it is never overwritten."""
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
    """The same after the store has said yes: whatever is not as it should be is looked at again.
    Raises UnavailableError, or TierError where the store keeps no checksum."""
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
    """One object. What its parts are, and in which order they are made, is the affair of whoever derives
    from it."""

    def __init__(self, transport: Transport, key: str, reader: ShardReader) -> None:
        """`reader`: the shard on the node, read back once where the store says that bytes are bad."""
        self._client = transport.client
        self._retrier = transport.retrier
        self._workers = transport.workers
        self._throttle = transport.throttle
        self._key = key
        self._reader = reader
        self._verified = threading.Lock()
        self._conditional = IF_ABSENT if self._client.config.conditional_put else {}

    def _begin_again(self, attempt: Callable[[], T]) -> T:
        """Until the upload does not vanish. Raises UnavailableError."""
        for _ in range(_RESTARTS):
            try:
                return attempt()
            except UploadLostError as error:
                lost = str(error)  # the error itself would hold the parts that it met
        raise UnavailableError(f"upload of {self._key}: {_RESTARTS} uploads vanished: {lost}")

    def _put_whole(self, plan: PartPlan, body: Callable[[], Body]) -> None:
        """One attempt of a plan of one part."""
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
        """Sends the parts and completes the upload. `send`: the plan, and the ETags of its parts;
        `taken_over`: some of them were there before."""
        ended = completing = False
        try:
            plan, etags = send()
            completing = True
            ended = self._complete(plan, upload_id, etags)
        except UnavailableError:
            # Interrupted: the next attempt goes on here. But one that was taken over and cannot be
            # completed may be broken in the store, and would be taken over for ever.
            ended = not (completing and taken_over())
            raise
        finally:
            if not ended:
                self._abort(upload_id)
        for other in set(leftovers) - {upload_id}:
            self._abort(other)  # the object is there: nobody can need it

    def _leftovers(self) -> dict[str, tuple[UploadedPart, ...]]:
        """Unfinished uploads of this shard, by id, with what the store holds of each. Empty where
        the store does not list them or the credentials may not ask: the upload begins anew."""
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
        """None when it has just ended."""
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
        """The ETag of a part, when a worker has sent it. `failed`: nothing more is sent once it is set,
        and it is when this one fails. Raises UnavailableError."""
        return submit(self._workers, self._send_part, upload_id, part, body, failed)

    def _results(self, futures: dict[int, Future[str]]) -> dict[int, str]:
        """ETags by number of parts that have all ended. Raises the error of the first that failed for a
        reason of its own, UnavailableError where none did and some were never begun. Lets go of
        all: an error whose frames name the futures, and a future that names the error, would hold
        the bytes of parts until a collector comes by."""
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
        """True if this upload became the object; False if the object came from somewhere else
        (another writer, or our own earlier attempt whose reply was lost)."""
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
                    raise UploadLostError(f"{failure.request}: {failure.words}")
                raise UnavailableError(f"{failure.request}: {failure.words}; yet nothing is there")
            if failure.is_bad_bytes or failure.code in _PART_CODES:
                # The parts there are not what their list said: nothing of them is trusted again.
                self._reader.verify()
                raise UploadLostError(f"{failure.request}: {failure.words}")
            self._raise_failure(reply)
            return True

        mine = self._retrier.call(f"completion of {self._key}", attempt)
        if mine:
            self._retrier.call(f"check of {self._key}", lambda: self._confirm_written(plan))
        return mine

    def _settle(self, plan: PartPlan, reply: S3Reply) -> None:
        if reply.failure is None:
            self._confirm_written(plan)
        elif not reply.failure.is_precondition:
            self._raise_failure(reply)
        elif not self._confirm(plan):
            raise UnavailableError(
                f"{reply.failure.request}: {reply.failure.words}; yet nothing is there"
            )

    def _raise_failure(self, reply: S3Reply) -> None:
        failure = reply.failure
        if failure is None:
            return
        if failure.code == "NoSuchUpload":
            raise UploadLostError(f"{failure.request}: {failure.words}")
        if failure.is_bad_bytes and self._verified.acquire(blocking=False):
            # On the wire or on our disk? Once is enough: CorruptionError ends the upload.
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
            # The error that brought us here matters more; abort_stale_uploads finds it later.
            _LOG.warning("unfinished upload of %s stays in the store: %s", self._key, error)


def _first_error(futures: Iterable[Future[str]]) -> BaseException | None:
    """Not that of a part which was given up because another one failed."""
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
