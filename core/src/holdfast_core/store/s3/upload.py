"""Upload of one object to S3, in one PUT or in parts, and the confirmation that the store holds it.

Every request that carries bytes of the object has a signed CRC32C, because some stores publish half an
object as a whole one when the client dies while it sends the body. Before each PUT of an object and
before a completion is repeated, a HEAD in checksum mode finds out what is stored. The stored object
therefore decides the outcome after a lost reply, a 412 or an upload that is gone.

An interrupted upload (this process is killed or stopped, or the store is unavailable for longer than the
retry budget) stays in the store. The next attempt finds it by its key. It makes the same parts again,
keeps those that the store lists with the right length and CRC32C, and sends the rest. An upload that
failed with an error that is not retryable is aborted.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from holdfast_core.errors import (
    AlreadyExistsError,
    HoldfastError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.format.canonical import append_crc
from holdfast_core.store.s3.client import (
    CHECKSUM_HEADER,
    IF_ABSENT,
    S3Client,
    S3Reply,
    S3Request,
    UploadedPart,
    encode_crc,
)
from holdfast_core.store.s3.errors import Retrier
from holdfast_core.tiers.objects import ObjectInfo, ObjectSource, Part, info_of
from holdfast_core.tiers.sources import CLOSING, submit, wait_all

MIN_PART_BYTES = 5 << 20
MAX_PARTS = 10_000
MAX_BUFFERED_BYTES = 48 << 20
"""Memory limit of an upload whose parts are made while they are sent: the parts that are being made,
wait, or are being sent. A download has the same limit (download.shard.MAX_AHEAD_BYTES)."""
_BEING_MADE = 2
"""Memory to make one part, in parts: the collected bytes, and the part that is copied from them."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Length of all parts but the last, and how many may wait or be in flight."""

    part_bytes: int
    at_once: int


def part_sizes(size_limit: int, part_bytes: int, at_once: int, *, in_memory: bool) -> PartSizes:
    """Return the part length and the number of concurrent parts for an upload.

    Parts are longer than `part_bytes` if the object would have more than 10,000 of them. If the parts are
    made in memory, both values are reduced where the upload would hold more than MAX_BUFFERED_BYTES; only an
    object of more than 10,000 such parts may hold more.

    Args:
        size_limit: Upper bound of the object's length.
        part_bytes: Preferred length of a part.
        at_once: Preferred number of parts in flight.
        in_memory: Whether each part is in memory from when it is made until it has been sent.
    """
    least = -(-size_limit // (MAX_PARTS - 1) // _MIB) * _MIB
    if not in_memory:
        return PartSizes(max(MIN_PART_BYTES, least, part_bytes), at_once)
    fitting = MAX_BUFFERED_BYTES // (at_once + _BEING_MADE) // _MIB * _MIB
    chosen = max(MIN_PART_BYTES, least, min(part_bytes, fitting))
    return PartSizes(chosen, max(1, min(at_once, MAX_BUFFERED_BYTES // chosen - _BEING_MADE)))


_LOG = logging.getLogger(__name__)
_RESTARTS = 3
"""Attempts of an upload that disappears from the store (lifecycle rule, abort by another process)."""
_MAX_LEFTOVERS = 16
"""Unfinished uploads of one object that are considered; each comes from one interrupted attempt."""
_PART_CODES = frozenset({"InvalidPart", "InvalidPartOrder"})


class UploadLostError(TierError):
    """The multipart upload is gone or unusable, and the object does not exist.

    `Upload.run` catches this error and starts again.
    """


class AbandonedError(TierError):
    """A part was not sent because another part failed. The upload raises that part's error."""


@dataclass(frozen=True, slots=True)
class Transport:
    """What all uploads of one store share."""

    client: S3Client
    retrier: Retrier
    workers: Executor
    throttle: Callable[[int], object] | None = None
    """Receives the length of each part in bytes before the part is sent; it may block."""


class Upload:
    """One upload of one object. An object of this class is used for one `run`."""

    def __init__(self, transport: Transport, key: str, source: ObjectSource) -> None:
        self._client = transport.client
        self._retrier = transport.retrier
        self._workers = transport.workers
        self._throttle = transport.throttle or _no_throttle
        self._key = key
        self._source = source
        self._verified = threading.Lock()
        self._conditional = IF_ABSENT if self._client.config.conditional_put else {}
        config = self._client.config
        self._sizes = part_sizes(
            source.size_limit,
            config.part_size_mib << 20,
            max(1, config.max_concurrency),
            in_memory=source.made_while_sent,
        )

    def run(self) -> None:
        """Upload the object. Block until the store holds it; send nothing if it does already.

        Raises:
            AlreadyExistsError: The store holds other bytes under the key, or any bytes if the parts are
                made while they are sent.
            AccessDeniedError: The store refuses the credentials.
            CapacityError: The store is full.
            NotFoundError: The bucket does not exist.
            CorruptionError: The source is damaged.
            UnavailableError: The retry policy is spent, or the store is being closed.
        """
        for _ in range(_RESTARTS):
            try:
                self._attempt()
                return
            except UploadLostError as error:
                lost = str(error)  # The error's traceback would keep the bytes of parts in memory.
                _clear_frames(error)  # The thread that raised it may still refer to it.
        raise UnavailableError(
            f"upload of {self._key}: {_RESTARTS} uploads disappeared in the store: {lost}"
        )

    def _attempt(self) -> None:
        parts = self._source.parts(self._sizes.part_bytes)
        expected = None
        if not self._source.made_while_sent:
            expected, parts = info_of(parts), self._source.parts(self._sizes.part_bytes)
        if self._retrier.call(f"look for {self._key}", lambda: self._is_stored(expected)):
            return
        made = deque([next(parts)])
        if made[0].is_last:
            self._put_whole(made[0])
        else:
            self._multipart(made, parts)

    def _put_whole(self, part: Part) -> None:
        """Put an object of one part. The caller has not found it in the store."""
        expected = info_of([part])
        headers = {
            CHECKSUM_HEADER: encode_crc(part.crc32c),
            "Content-Type": "application/octet-stream",
            **self._conditional,
        }
        asked_before = False

        def attempt() -> None:
            nonlocal asked_before
            if asked_before and self._is_stored(expected):
                return
            asked_before = True
            self._throttle(part.length_bytes)
            reply = self._client.send(S3Request("PUT", self._key, {}, headers, part.pieces))
            if reply.failure is None:
                self._confirm_written(expected)
            elif not reply.failure.is_precondition:
                self._raise_failure(reply)
            elif not self._is_stored(expected):
                raise UnavailableError(
                    f"{reply.failure.request}: {reply.failure.text}; but no such object exists"
                )

        self._retrier.call(f"upload of {self._key}", attempt)

    def _multipart(self, made: deque[Part], rest: Iterator[Part]) -> None:
        """Send the parts and complete the upload. Afterwards abort the other unfinished uploads."""
        leftovers = self._leftovers()
        upload_id = fullest_upload(leftovers) or self._begin()
        sent = _UploadParts(leftovers.get(upload_id, ()))
        ended = completing = False
        try:
            self._send_parts(upload_id, made, rest, sent)
            completing = True
            ended = self._complete(upload_id, sent)
        except UnavailableError:
            # The next attempt continues an interrupted upload. But an upload with kept parts that cannot
            # be completed may be broken in the store, and every attempt would choose it again.
            ended = not (completing and sent.kept)
            raise
        finally:
            if not ended:
                self._abort(upload_id)
        for other in set(leftovers) - {upload_id}:
            self._abort(other)  # The object is stored, so no process needs the other uploads.

    def _begin(self) -> str:
        return self._retrier.call(
            f"begin of upload {self._key}", lambda: self._client.create_upload(self._key)
        )

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
            _LOG.info("listing the unfinished uploads of %s failed: %s", self._key, error)
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

    def _send_parts(
        self, upload_id: str, made: deque[Part], rest: Iterator[Part], sent: _UploadParts
    ) -> None:
        """Send the parts that the store does not hold yet.

        At most `at_once` parts wait or are in flight while the next one is made. After a part has failed
        no other part is made or sent. All parts in flight have ended before the error is raised, because
        an abort must not race with a part in flight.

        Args:
            upload_id: The multipart upload.
            made: Parts that were made before `rest`. They are removed, so that their bytes are freed
                once they have been sent.
            rest: The remaining parts.
            sent: Receives what is sent.
        """
        futures: dict[int, Future[str]] = {}
        failed, room = threading.Event(), threading.Semaphore(self._sizes.at_once)
        try:
            while True:
                room.acquire()
                if failed.is_set():
                    break
                part = made.popleft() if made else next(rest, None)
                if part is None:
                    break
                waiting = sent.add(part, room)
                del part
                if waiting.number in sent.etags:
                    waiting.drop()
                    continue
                # Without `drop` the room of a part that is cancelled would never be free again.
                future = submit(self._workers, self._send_part, upload_id, waiting, failed)
                future.add_done_callback(waiting.drop)
                futures[waiting.number] = future
        except BaseException:
            failed.set()
            raise
        finally:
            wait_all(futures.values())
        sent.etags.update(self._results(futures))

    def _results(self, futures: dict[int, Future[str]]) -> dict[int, str]:
        """Return the ETags by part number, from futures that have all ended. Empty `futures`.

        `futures` and the locals are cleared, because an error refers through its traceback to the frames
        and the futures refer to the error. This cycle would keep the parts in memory until the garbage
        collector runs.

        Raises:
            HoldfastError: The error of the first part that failed other than by AbandonedError.
            UnavailableError: No part failed, but some were cancelled because the store is being closed.
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

    def _send_part(self, upload_id: str, waiting: _WaitingPart, failed: threading.Event) -> str:
        try:
            return self._send_until_stored(upload_id, waiting, failed)
        except BaseException as error:
            failed.set()
            _clear_frames(error)
            raise
        finally:
            # The bytes must be free before the caller knows that the part has ended: it makes the next
            # part then, while this thread may still wait for the interpreter.
            waiting.drop()

    def _send_until_stored(
        self, upload_id: str, waiting: _WaitingPart, failed: threading.Event
    ) -> str:
        what = f"part {waiting.number} of {self._key}"
        checksum = encode_crc(waiting.crc32c)
        query = {"partNumber": str(waiting.number), "uploadId": upload_id}

        def expect_no_failure() -> None:
            if failed.is_set():
                raise AbandonedError(f"{what}: another part failed")

        def attempt() -> str:
            expect_no_failure()
            request = S3Request(
                "PUT", self._key, query, {CHECKSUM_HEADER: checksum}, waiting.pieces
            )
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

        expect_no_failure()
        self._throttle(waiting.length_bytes)
        return self._retrier.call(what, attempt)

    def _complete(self, upload_id: str, sent: _UploadParts) -> bool:
        """Complete the multipart upload.

        Returns True if a completion of this upload was acknowledged. Returns False if the object was
        found in the store instead: another writer put it, or an earlier completion succeeded whose reply
        was lost.

        Raises UploadLostError if the upload is gone or its stored parts are unusable.
        """
        expected = sent.info
        headers = {
            CHECKSUM_HEADER: encode_crc(sent.crc32c),
            "x-amz-checksum-type": "FULL_OBJECT",
            "x-amz-mp-object-size": str(sent.size_bytes),
            "Content-Type": "application/xml",
            **self._conditional,
        }
        request = S3Request("POST", self._key, {"uploadId": upload_id}, headers, sent.completion())
        asked_before = False

        def attempt() -> bool:
            nonlocal asked_before
            if asked_before and self._is_stored(expected):
                return False
            asked_before = True
            reply = self._client.send(request)
            failure = reply.failure
            if failure is None:
                return True
            if failure.is_precondition or failure.is_absent:
                if self._is_stored(expected):
                    return False
                if failure.is_absent and failure.code != "NoSuchBucket":
                    raise UploadLostError(f"{failure.request}: {failure.text}")
                raise UnavailableError(
                    f"{failure.request}: {failure.text}; but no such object exists"
                )
            if failure.is_bad_bytes or failure.code in _PART_CODES:
                # The stored parts differ from the store's list of them, so the upload is abandoned.
                self._source.verify()
                raise UploadLostError(f"{failure.request}: {failure.text}")
            if failure.code == "InvalidRequest" and self._is_stored(expected):
                # VersityGW reads no checksum mode of an upload that it is just removing, because another
                # writer has completed it.
                return False
            self._raise_failure(reply)
            return True

        mine = self._retrier.call(f"completion of {self._key}", attempt)
        if mine:
            self._retrier.call(f"check of {self._key}", lambda: self._confirm_written(expected))
        return mine

    def _raise_failure(self, reply: S3Reply) -> None:
        failure = reply.failure
        if failure is None:
            return
        if failure.code == "NoSuchUpload":
            raise UploadLostError(f"{failure.request}: {failure.text}")
        if failure.is_bad_bytes and self._verified.acquire(blocking=False):
            # The bytes changed in transit or on this node's disk. One verification of the source per
            # upload tells which: it raises CorruptionError, which ends the upload, if the disk is at
            # fault.
            self._source.verify()
        raise failure.error()

    def _is_stored(self, expected: ObjectInfo | None) -> bool:
        """Return True if the key holds exactly these bytes, by size and CRC32C, and False if it is free.

        Raises AlreadyExistsError if it holds anything else, or anything at all if `expected` is None:
        objects are immutable and never overwritten.
        """
        found = self._client.head(self._key)
        if found is None or found == expected:
            return found is not None
        checksum = "no CRC32C" if found.crc32c is None else f"CRC32C {found.crc32c:08x}"
        wanted = "nothing"
        if expected is not None:
            wanted = f"{expected.size_bytes} bytes with CRC32C {expected.crc32c:08x}"
        raise AlreadyExistsError(
            f"{self._described()}: expected {wanted}, found {found.size_bytes} bytes with {checksum}"
        )

    def _confirm_written(self, expected: ObjectInfo) -> None:
        """Check that the key holds exactly these bytes after the store has acknowledged the write.

        Raises:
            UnavailableError: The object is absent or differs; the caller looks again.
            TierError: The store keeps no CRC32C of the object.
        """
        found = self._client.head(self._key)
        if found == expected:
            return
        if found is None:
            raise UnavailableError(
                f"{self._described()}: no such object right after it was written"
            )
        if found.crc32c is None and found.size_bytes == expected.size_bytes:
            raise TierError(
                f"{self._described()}: the store has no CRC32C of the whole object; it cannot "
                "store shards safely"
            )
        raise UnavailableError(
            f"{self._described()}: expected {expected.size_bytes} bytes with CRC32C "
            f"{expected.crc32c:08x} right after they were written, found {found}"
        )

    def _described(self) -> str:
        return self._client.describe(S3Request("HEAD", self._key))

    def _abort(self, upload_id: str) -> None:
        try:
            self._client.abort_upload(self._key, upload_id)
        except HoldfastError as error:
            # The error that ended the upload is more important. abort_stale aborts this one later.
            _LOG.warning(
                "aborting the unfinished upload of %s failed, so it remains in the store: %s",
                self._key,
                error,
            )


class _WaitingPart:
    """A part that waits for a worker or is being sent. Its bytes are counted until `drop`."""

    def __init__(self, part: Part, number: int, room: threading.Semaphore) -> None:
        self.number = number
        self.length_bytes = part.length_bytes
        self.crc32c = part.crc32c
        self.pieces = part.pieces
        self._room: threading.Semaphore | None = room

    def drop(self, _ended: object = None) -> None:
        """Release the bytes, and then the room for another part. Further calls do nothing."""
        self.pieces = ()
        room, self._room = self._room, None
        if room is not None:
            room.release()


class _UploadParts:
    """The parts of one multipart upload as they are made and sent."""

    def __init__(self, listed: Sequence[UploadedPart]) -> None:
        self._listed = {part.number: part for part in listed}
        self._crcs: list[int] = []
        self.size_bytes = 0
        self.crc32c = 0
        self.etags: dict[int, str] = {}
        """ETags of the stored parts by number, counted from 1."""
        self.kept = 0
        """Number of parts that an earlier attempt had sent."""

    @property
    def info(self) -> ObjectInfo:
        return ObjectInfo(self.size_bytes, self.crc32c)

    def add(self, part: Part, room: threading.Semaphore) -> _WaitingPart:
        """Count the next part. It is kept if the store lists it with its length and CRC32C.

        A store may list a part at full size whose bytes it never received. Every other part is sent again
        under the same number.
        """
        waiting = _WaitingPart(part, len(self._crcs) + 1, room)
        self._crcs.append(part.crc32c)
        self.crc32c = append_crc(self.crc32c, part.crc32c, part.length_bytes)
        self.size_bytes += part.length_bytes
        there = self._listed.get(waiting.number)
        if there is not None and is_part(part, there):
            self.etags[waiting.number] = there.etag
            self.kept += 1
        return waiting

    def completion(self) -> bytes:
        """Return the document that completes the upload."""
        items = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{_escape(self.etags[number])}</ETag>"
            f"<ChecksumCRC32C>{encode_crc(crc)}</ChecksumCRC32C></Part>"
            for number, crc in enumerate(self._crcs, start=1)
        )
        return f"<CompleteMultipartUpload>{items}</CompleteMultipartUpload>".encode()


def is_part(part: Part, there: UploadedPart) -> bool:
    """Return whether the listed part has an ETag and the size and CRC32C of `part`."""
    same = (there.size_bytes, there.crc32c) == (part.length_bytes, part.crc32c)
    return bool(there.etag) and same


def fullest_upload(uploads: Mapping[str, Collection[UploadedPart]]) -> str | None:
    """Return the id of the upload of which the store holds most bytes; None if it holds none of any.

    Whether a stored part can be kept is decided when the part has been made.
    """

    def held(upload_id: str) -> int:
        return sum(part.size_bytes for part in uploads[upload_id])

    best = max(uploads, key=held, default=None)
    return best if best is not None and held(best) > 0 else None


def _first_error(futures: Iterator[Future[str]]) -> BaseException | None:
    """Return the first error other than AbandonedError; None if there is none."""
    errors = (None if future.cancelled() else future.exception() for future in futures)
    own = (e for e in errors if e is not None and not isinstance(e, AbandonedError))
    return next(own, None)


def _clear_frames(error: BaseException | None) -> None:
    """Release the local variables of the frames that an error has left, and those of its causes.

    They refer to the bytes of the part. The future keeps the error until the upload has ended.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _no_throttle(_length: int) -> None:
    """Do nothing: the default of `throttle`."""
