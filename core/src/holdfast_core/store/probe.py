"""Probe of a store: checks which features it has before checkpoints are written to it.

A bucket of S3 is probed request by request, because servers differ in what they support. Another store is
probed by the calls that Holdfast makes of it.

The first request to S3 is a small signed PUT and not a HEAD: a reply to HEAD has no body, so a wrong access
key and a missing bucket could not be told apart. The probe writes only below
`<prefix>/.holdfast-probe/` and deletes what it wrote. It does not raise for anything that the store
does; the report has the reason and the server's own message.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import TypeVar

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapacityError,
    ConfigError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import crc32c
from holdfast_core.store.s3.client import (
    CHECKSUM_HEADER,
    IF_ABSENT,
    S3Client,
    S3Reply,
    S3Request,
    encode_crc,
)
from holdfast_core.store.s3.credentials import CredentialsProvider
from holdfast_core.store.s3.errors import Retrier, RetryPolicy, S3Failure
from holdfast_core.store.s3.http import CertificateError, Timeouts
from holdfast_core.store.upload import Document
from holdfast_core.tiers.objects import ObjectInfo, ObjectStore, Part

T = TypeVar("T")

PROBE_DIR = ".holdfast-probe"
MAX_MESSAGE = 1500
"""Characters of the message in the JSON report, which must fit into the 4,096 bytes of a termination
message."""
_BODY = b"holdfast store probe: this object may be deleted\n"
_OTHER = b"holdfast store probe: another writer\n"
_MUST_BE_CONSISTENT = "the store must be read-after-write consistent"
_RACERS = 4
_RACES = 5
"""Attempts to watch a race in which the store replies to two writers or more."""
_OF_A_REQUEST = RetryPolicy(max_attempts=6, budget_seconds=20)
"""Each request is repeated for itself: with many failed requests, a probe that begins again never ends."""


class ProbeReason(StrEnum):
    """Reason of the store's Available condition."""

    AVAILABLE = "Available"
    ACCESS_DENIED = "AccessDenied"
    BUCKET_NOT_FOUND = "BucketNotFound"
    UNREACHABLE = "Unreachable"
    """The host name does not resolve, the connection is refused, no reply came in time, or the server
    replied with a status such as 429 or 5xx."""
    CERTIFICATE_INVALID = "CertificateInvalid"
    CONFIGURATION_INVALID = "ConfigurationInvalid"
    """The endpoint, the region, the CA certificate or the credentials files are wrong; the message names
    which."""
    NOT_S3 = "NotS3"
    STORAGE_FULL = "StorageFull"
    REFUSED = "Refused"
    """The store refused a request for another reason, which is in the message."""
    INCONSISTENT = "Inconsistent"
    """A GET or a list does not show an object that was just written."""
    CHECKSUM_UNSUPPORTED = "ChecksumUnsupported"
    MULTIPART_UNSUPPORTED = "MultipartUnsupported"
    RANGE_GET_UNSUPPORTED = "RangeGetUnsupported"


@dataclass(frozen=True, slots=True)
class ProbedFeatures:
    """Features that the probe found. A store needs all of them but `conditional_put`."""

    conditional_put: bool = False
    """The store respects the condition that a key is free, also between concurrent writers."""
    checksum: bool = False
    """The store refuses an upload with a wrong CRC32C, and a HEAD returns the right one. A store of Azure
    or Google compares none: TLS protects the bytes on their way, and the writer's checksum is kept."""
    multipart: bool = False
    """The store takes multipart uploads with a CRC32C of the whole object."""
    range_get: bool = False
    """The store replies to a ranged GET with 206 and exactly those bytes."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Result of a probe."""

    available: bool
    """Whether checkpoints may be stored here."""
    reason: ProbeReason
    message: str
    features: ProbedFeatures = ProbedFeatures()

    def to_json(self) -> str:
        """Return the report as ASCII JSON that fits into a termination message of 4,096 bytes."""
        return json.dumps(
            {
                "available": self.available,
                "reason": str(self.reason),
                "message": self.message.encode("ascii", "replace").decode()[:MAX_MESSAGE],
                "features": {
                    "conditionalPut": self.features.conditional_put,
                    "checksum": self.features.checksum,
                    "multipart": self.features.multipart,
                    "rangeGet": self.features.range_get,
                },
            }
        )


class _RefusedError(Exception):
    """The store refused a request or failed a check that the others need; the probe ends."""

    def __init__(self, reason: ProbeReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def probe(
    config: StoreConfig,
    credentials: CredentialsProvider,
    *,
    ca_file: str | None = None,
    timeouts: Timeouts | None = None,
    retrier: Retrier | None = None,
) -> ProbeReport:
    """Probe the store and return the report.

    The call blocks for a few round trips, and for about a minute if the store does not reply. The
    arguments are those of S3Client, and the retry policy.
    """
    where = f"bucket {config.bucket!r} at {config.endpoint}"
    try:
        client = S3Client(
            config,
            credentials,
            ca_file=ca_file,
            timeouts=timeouts or Timeouts(idle_seconds=20.0),
        )
    except ConfigError as error:
        return ProbeReport(False, ProbeReason.CONFIGURATION_INVALID, str(error))
    session = _Session(client, retrier or Retrier(_OF_A_REQUEST))
    try:
        features = session.run()
    except _RefusedError as refused:
        return ProbeReport(False, refused.reason, str(refused))
    except HoldfastError as error:
        return ProbeReport(False, _reason_of(error), str(error))
    finally:
        leftovers = session.clean_up()
        client.close()
    return _judge(features, where, leftovers)


def probe_objects(
    config: StoreConfig,
    open_store: Callable[[Retrier], ObjectStore],
    *,
    retrier: Retrier | None = None,
) -> ProbeReport:
    """Probe a store by the calls that Holdfast makes of it, and return the report.

    Args:
        config: The store.
        open_store: Opens it with a retry policy.
        retrier: Retry policy of each call.
    """
    base = f"{config.prefix.strip('/')}/{PROBE_DIR}/{secrets.token_hex(8)}/".lstrip("/")
    try:
        with closing(open_store(retrier or Retrier(_OF_A_REQUEST))) as store:
            try:
                features = _probed(store, base)
            finally:
                leftovers = _not_deleted(store, base)
            return _judge(features, store.name, leftovers)
    except _RefusedError as refused:
        return ProbeReport(False, refused.reason, str(refused))
    except NotFoundError as error:  # of an object that the probe has written
        return ProbeReport(False, ProbeReason.INCONSISTENT, f"{error}; {_MUST_BE_CONSISTENT}")
    except HoldfastError as error:
        return ProbeReport(False, _reason_of(error), str(error))


def _not_deleted(store: ObjectStore, base: str) -> str:
    """Delete what a probe has written. Return why that failed, or ""."""
    try:
        store.delete([item.key for item in store.list(base).objects])
        store.abort_stale([base], timedelta(0))
    except HoldfastError as error:
        return str(error)
    return ""


def _probed(store: ObjectStore, base: str) -> ProbedFeatures:
    """Write objects below `base`, and return what the store does. It raises what the store raises."""
    key, parts = f"{base}object", f"{base}parts"
    try:
        store.write(key, Document(_BODY))
    except NotFoundError as error:
        raise _RefusedError(ProbeReason.BUCKET_NOT_FOUND, str(error)) from error
    listed = [item.key for item in store.list(base).objects]
    if store.get(key) != _BODY or key not in listed:
        raise _RefusedError(
            ProbeReason.INCONSISTENT,
            f"{store.name}: an object that was just written is not read or listed; {_MUST_BE_CONSISTENT}",
        )
    found = memoryview(bytearray(5))
    store.read_into(key, 9, found)
    store.write(parts, _InParts(_BODY))
    are_kept = [
        _is_kept(store, f"{base}kept{number}", first)
        for number, first in enumerate((Document(_BODY), _InParts(_BODY)))
    ]
    return ProbedFeatures(
        conditional_put=all(are_kept) and _one_wins(store, base),
        checksum=True,
        multipart=store.get(parts) == _BODY,
        range_get=found == _BODY[9:14],
    )


@dataclass(frozen=True, slots=True)
class _InParts(Document):
    """A document that is written as a long object is."""

    @property
    def size_limit(self) -> int:
        return 1 << 30


@dataclass(frozen=True, slots=True)
class _Late(Document):
    """A document whose key another writer takes while its parts are made."""

    meanwhile: Callable[[], object] = lambda: None
    limit: int = 0

    @property
    def size_limit(self) -> int:
        return self.limit

    def parts(self, part_bytes: int) -> Iterator[Part]:
        self.meanwhile()
        return Document(self.data).parts(part_bytes)


def _is_kept(store: ObjectStore, key: str, first: Document) -> bool:
    """Return whether an object stays although a writer has found its key free before it was written.

    A store looks at the key before it writes, so that only a writer between this look and the write shows
    whether the server checks the condition.
    """
    late = _Late(_OTHER, True, lambda: store.write(key, first), first.size_limit)
    try:
        store.write(key, late)
    except AlreadyExistsError:
        return store.get(key) == _BODY
    return False


def _one_wins(store: ObjectStore, base: str) -> bool:
    """Return whether one of several concurrent writers succeeds, and its bytes stay."""

    def write(body: bytes) -> bool:
        try:
            store.write(f"{base}race", Document(body))
        except AlreadyExistsError:
            return False
        return True

    bodies = [b"writer %d\n" % number for number in range(_RACERS)]
    with ThreadPoolExecutor(_RACERS, thread_name_prefix="store-probe") as racers:
        won = list(racers.map(write, bodies))
    return sum(won) == 1 and store.get(f"{base}race") == bodies[won.index(True)]


def _judge(features: ProbedFeatures, where: str, leftovers: str) -> ProbeReport:
    """Return the report of a probe that ran to its end. `leftovers` is why deleting failed, or ""."""
    lacking: Sequence[tuple[bool, ProbeReason, str]] = (
        (
            features.checksum,
            ProbeReason.CHECKSUM_UNSUPPORTED,
            "does not check x-amz-checksum-crc32c: a cut upload could become half a shard",
        ),
        (
            features.multipart,
            ProbeReason.MULTIPART_UNSUPPORTED,
            "has no multipart upload with a CRC32C over the whole object",
        ),
        (
            features.range_get,
            ProbeReason.RANGE_GET_UNSUPPORTED,
            "does not reply to a ranged GET with 206 and the requested bytes",
        ),
    )
    for there, reason, text in lacking:
        if not there:
            return ProbeReport(False, reason, f"{where} {text}; use another store", features)
    message = f"{where} passed every check"
    if not features.conditional_put:
        message = (
            f"{where} can be used; it ignores conditional writes, so immutability of keys rests on "
            "Holdfast alone"
        )
    if leftovers:
        message += f"; but deletes fail, so retention cannot work: {leftovers}"
    return ProbeReport(True, ProbeReason.AVAILABLE, message, features)


def _reason_of(error: HoldfastError) -> ProbeReason:
    match error:
        case ConfigError():
            return ProbeReason.CONFIGURATION_INVALID
        case UnavailableError():
            return ProbeReason.UNREACHABLE
        case CapacityError():
            return ProbeReason.STORAGE_FULL
        case CertificateError():
            return ProbeReason.CERTIFICATE_INVALID
        case AccessDeniedError():
            return ProbeReason.ACCESS_DENIED
        case _:
            return ProbeReason.REFUSED


def _refusal(failure: S3Failure) -> _RefusedError:
    error = failure.error()
    text = str(error)
    if failure.code == "NoSuchBucket":
        return _RefusedError(ProbeReason.BUCKET_NOT_FOUND, text)
    if not failure.code and failure.status not in (429, 500, 502, 503, 504, 507):
        return _RefusedError(
            ProbeReason.NOT_S3,
            (f"{text}; the reply is not one of S3: check the endpoint and its port"),
        )
    return _RefusedError(_reason_of(error), text)


class _Session:
    """The checks of one probe, in order. A refusal by the store in one of the first two ends the probe."""

    def __init__(self, client: S3Client, retrier: Retrier) -> None:
        self._client = client
        self._retrier = retrier
        head = client.config.prefix.strip("/")
        self._prefix = f"{head}/" if head else ""
        self._prefix += f"{PROBE_DIR}/{secrets.token_hex(8)}/"
        self._key = self._prefix + "object"
        self._written: set[str] = set()

    def run(self) -> ProbedFeatures:
        self._first_put()
        self._listed()
        range_get = self._range_get()
        checksum = self._checksum()
        return ProbedFeatures(
            conditional_put=self._conditional() and self._race(),
            checksum=checksum,
            multipart=checksum and self._multipart(),
            range_get=range_get,
        )

    def clean_up(self) -> str:
        """Delete the objects that may have been written.

        Return the message of a failure; "" if all were deleted.
        """
        try:
            if self._written:
                self._client.delete(sorted(self._written))
        except HoldfastError as error:
            return str(error)
        return ""

    def _first_put(self) -> None:
        """Put an object and read it back, to check credentials, bucket and read-after-write."""
        reply = self._put(self._key, _BODY)
        if reply.failure is not None:
            raise _refusal(reply.failure)
        found = self._send(S3Request("GET", self._key))
        if "etag" not in reply.headers or (found.failure is not None and not found.failure.code):
            raise _RefusedError(
                ProbeReason.NOT_S3,
                (
                    f"{self._where('PUT')}: the reply has status {reply.status} but is not one of S3; "
                    "check the endpoint and its port"
                ),
            )
        if found.failure is not None and found.failure.status == 403:
            raise _refusal(found.failure)
        if found.failure is not None or found.body != _BODY:
            text = found.failure.text if found.failure else f"{len(found.body)} other bytes"
            raise _RefusedError(
                ProbeReason.INCONSISTENT,
                f"{self._where('GET')}: expected the {len(_BODY)} bytes just written, found "
                f"{text}; {_MUST_BE_CONSISTENT}",
            )

    def _listed(self) -> None:
        """Check that a list shows the object that was just written."""
        query = {"list-type": "2", "prefix": self._prefix}
        reply = self._send(S3Request("GET", query=query))
        if reply.failure is not None:
            raise _refusal(reply.failure)
        keys = [
            listed.key
            for listed in self._call(partial(self._client.list_objects, self._prefix)).listed
        ]
        if self._key not in keys:
            raise _RefusedError(
                ProbeReason.INCONSISTENT,
                f"list of {self._prefix!r} at {self._client.config.endpoint}: expected the key "
                f"just written, found {len(keys)} keys",
            )

    def _range_get(self) -> bool:
        headers = {"Range": "bytes=9-13"}
        reply = self._send(S3Request("GET", self._key, headers=headers))
        return reply.status == 206 and reply.body == _BODY[9:14]

    def _checksum(self) -> bool:
        """Return whether a PUT with a wrong CRC32C is refused and HEAD returns the right CRC32C."""
        key = self._prefix + "wrong-checksum"
        reply = self._put(key, _BODY, crc=crc32c(_BODY) ^ 1)
        if reply.failure is None or self._head(key) is not None:
            return False
        return self._head(self._key) == ObjectInfo(len(_BODY), crc32c(_BODY))

    def _conditional(self) -> bool:
        """Return whether a PUT with `If-None-Match: *` does not replace an existing object."""
        reply = self._put(self._key, _OTHER, absent=True)
        if reply.failure is None or not reply.failure.is_precondition:
            return False
        return self._send(S3Request("GET", self._key)).body == _BODY

    def _race(self) -> bool:
        """Return whether at most one of several concurrent conditional PUTs succeeds, and its bytes stay."""
        for race in range(_RACES):
            key = f"{self._prefix}race{race}"
            self._written.add(key)
            bodies = [b"writer %d\n" % number for number in range(_RACERS)]
            with ThreadPoolExecutor(_RACERS, thread_name_prefix="store-probe") as racers:
                # No PUT is repeated: the reply to one that was written may be lost, and a second one would be
                # refused by the first.
                replies = list(racers.map(partial(self._put_once, key), bodies))
            done = [(b, r) for b, r in zip(bodies, replies, strict=True) if r is not None]
            if len(done) < 2:
                continue
            winners = [body for body, reply in done if reply.failure is None]
            unknown = [b for b, r in zip(bodies, replies, strict=True) if r is None]
            found = self._send(S3Request("GET", key)).body
            return len(winners) <= 1 and found in (winners or unknown)
        raise UnavailableError(
            f"{self._where('PUT')}: the store did not reply to two writers in {_RACES} attempts"
        )

    def _put_once(self, key: str, body: bytes) -> S3Reply | None:
        """Put a body if the key is absent. Return None if it is not known whether it was written."""
        try:
            reply = self._client.send(_put_request(key, body, absent=True))
        except UnavailableError:
            return None
        return None if reply.failure is not None and _may_pass(reply.failure) else reply

    def _multipart(self) -> bool:
        """Return whether a multipart upload with a CRC32C of the whole object works."""
        key = self._prefix + "multipart"
        self._written.add(key)
        upload_id = ""
        try:
            upload_id = self._call(partial(self._client.create_upload, key))
            checksum = encode_crc(crc32c(_BODY))
            query = {"partNumber": "1", "uploadId": upload_id}
            part = self._send(
                S3Request("PUT", key, query, {CHECKSUM_HEADER: checksum}, _BODY)
            ).checked()
            body = (
                "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
                f"<ETag>{part.headers.get('etag', '')}</ETag>"
                f"<ChecksumCRC32C>{checksum}</ChecksumCRC32C></Part></CompleteMultipartUpload>"
            ).encode()
            headers = {CHECKSUM_HEADER: checksum, "x-amz-checksum-type": "FULL_OBJECT"}
            complete = S3Request("POST", key, {"uploadId": upload_id}, headers, body)
            with suppress(NotFoundError):  # an attempt whose reply was lost has completed it
                self._send(complete).checked()
            upload_id = ""
            return self._head(key) == ObjectInfo(len(_BODY), crc32c(_BODY))
        except UnavailableError:
            raise
        except HoldfastError:
            return False  # The store replied and refused, so it lacks the feature.
        finally:
            if upload_id:
                self._call(partial(self._client.abort_upload, key, upload_id))

    def _put(
        self, key: str, body: bytes, *, crc: int | None = None, absent: bool = False
    ) -> S3Reply:
        self._written.add(key)
        return self._send(_put_request(key, body, crc=crc, absent=absent))

    def _send(self, request: S3Request) -> S3Reply:
        """Send a request, again after a failure that may pass. A refusal is returned, not raised."""

        def attempt() -> S3Reply:
            reply = self._client.send(request)
            if reply.failure is not None and _may_pass(reply.failure):
                raise reply.failure.error()
            return reply

        return self._call(attempt)

    def _head(self, key: str) -> ObjectInfo | None:
        return self._call(partial(self._client.head, key))

    def _call(self, operation: Callable[[], T]) -> T:
        return self._retrier.call("probe of the store", operation)

    def _where(self, method: str) -> str:
        return self._client.describe(S3Request(method, self._key))


def _may_pass(failure: S3Failure) -> bool:
    """Return whether the store was busy. A refusal of wrong bytes is a result, although uploads repeat it."""
    return failure.error().retryable and (failure.status == 429 or failure.status >= 500)


def _put_request(
    key: str, body: bytes, *, crc: int | None = None, absent: bool = False
) -> S3Request:
    headers = {CHECKSUM_HEADER: encode_crc(crc32c(body) if crc is None else crc)}
    return S3Request("PUT", key, {}, headers | IF_ABSENT if absent else headers, body)
