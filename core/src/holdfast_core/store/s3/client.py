"""Client of one S3 bucket: it signs and sends requests, and parses replies and lists with bounds.

URLs are path-style and the signature is in the headers (minio.signer). The payload is not signed; a signed
CRC32C protects the bytes (docs/guarantees.md R20). A request is repeated only if the store refused its
keys and the credentials have changed meanwhile. The callers decide what a reply means for a checkpoint.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote, unquote_plus, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from minio.signer import sign_v4_s3
from minio.time import to_amz_date

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import TierError, UnavailableError
from holdfast_core.format.canonical import crc32c
from holdfast_core.store.s3.credentials import CredentialsProvider, Keys
from holdfast_core.store.s3.errors import (
    S3Failure,
    child_text,
    clean,
    is_error_document,
    local_name,
    parse_failure,
    parse_xml,
)
from holdfast_core.store.s3.http import Body, HttpPool, HttpReply, Timeouts, body_length
from holdfast_core.tiers.objects import ObjectInfo

MAX_CONTROL_BYTES = 8 << 20
"""Largest reply that is not an object. A page of 1,000 keys of 1 KiB fits easily."""
MAX_DELETED = 1000
"""S3's limit of objects that one request deletes."""
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_UNSIGNED = "UNSIGNED-PAYLOAD"
CHECKSUM_HEADER = "x-amz-checksum-crc32c"
CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
IF_ABSENT = {"If-None-Match": "*"}


@dataclass(frozen=True, slots=True)
class S3Request:
    """One request on the bucket, or on the object `key` in it."""

    method: str
    key: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    """Values that are not yet URL-encoded; "" for a parameter without a value."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers. All are signed."""
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class S3Reply:
    """A reply whose body has been read. `failure` is None if the server did what was requested."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    failure: S3Failure | None

    def checked(self) -> S3Reply:
        """Return this reply if it is not a failure, else raise the failure's error."""
        if self.failure is not None:
            raise self.failure.error()
        return self


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object in a list."""

    key: str
    modified: str
    """RFC 3339, by the server's clock."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ListedPage:
    """One page of a list of objects."""

    listed: tuple[ListedObject, ...]
    next: str
    """Token of the next page; "" if this is the last one."""
    date: str
    """The reply's Date header: the server's clock, RFC 9110; "" if there is none."""
    folders: tuple[str, ...]
    """Common beginnings of keys, each with a `/` at its end."""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An unfinished multipart upload."""

    key: str
    upload_id: str
    initiated: str
    """RFC 3339, by the server's clock."""


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """A part of an unfinished multipart upload that the server holds."""

    number: int
    """0 if the server sent no valid number."""
    size_bytes: int
    """-1 if the server sent no valid size."""
    crc32c: int | None
    """None if the server keeps none."""
    etag: str


def encode_crc(crc: int) -> str:
    """Return a CRC32C in the Base64 form of S3 headers."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode("ascii")


def decode_crc(text: str | None) -> int | None:
    """Return the CRC32C of a header.

    Returns None if the header is absent, is a checksum of parts (`xxxx-3`), or has not four bytes.
    """
    try:
        raw = base64.b64decode((text or "").encode("ascii"), validate=True)
    except ValueError:
        return None
    return int.from_bytes(raw, "big") if len(raw) == 4 else None


def _key_decoder(root: ElementTree.Element) -> Callable[[str], str]:
    """Return the function that decodes the keys of a list.

    A server that ignores encoding-type=url leaves out the EncodingType element.
    """
    return unquote_plus if child_text(root, "EncodingType") == "url" else str


def _number(text: str, default: int) -> int:
    """Return a number that the store sent, or `default` if it is not one.

    `isascii` is needed because `str.isdigit` accepts digits that `int` refuses.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else default


def _uploaded_part(item: ElementTree.Element) -> UploadedPart:
    return UploadedPart(
        _number(child_text(item, "PartNumber"), 0),
        _number(child_text(item, "Size"), -1),
        decode_crc(child_text(item, "ChecksumCRC32C")),
        child_text(item, "ETag"),
    )


T = TypeVar("T")


class S3Client:
    """Client of one bucket of one endpoint. Safe for use by many threads. Opens connections when needed."""

    def __init__(
        self,
        config: StoreConfig,
        credentials: CredentialsProvider,
        *,
        ca_file: str | None = None,
        timeouts: Timeouts | None = None,
        clock: Clock | None = None,
        sent: Callable[[int], object] | None = None,
    ) -> None:
        self.config = config
        self._credentials = credentials
        self._clock: Clock = clock or SystemClock()
        self._base = f"{'https' if config.secure else 'http'}://{config.endpoint}"
        self._pool = HttpPool(
            config.endpoint,
            secure=config.secure,
            ca_file=ca_file,
            timeouts=timeouts,
            max_idle=config.max_concurrency + 4,
            clock=self._clock,
            sent=sent,
        )

    def close(self) -> None:
        self._pool.close()

    def describe(self, request: S3Request) -> str:
        """Return the request's method, key, bucket and endpoint for an error message."""
        what = f"{request.method} {request.key!r} in " if request.key else f"{request.method} of "
        return f"{what}bucket {self.config.bucket!r} at {self.config.endpoint}"

    def shown(self, text: str) -> str:
        """Return a text of the store in a form that errors and logs may show (see `errors.clean`)."""
        return clean(text, self._credentials.retrieve().secrets())

    def send(self, request: S3Request, *, limit_bytes: int = MAX_CONTROL_BYTES) -> S3Reply:
        """Send one request and read its reply. A refusal by the store is returned, not raised.

        Args:
            request: The request.
            limit_bytes: Largest body of the reply; a longer one raises UnavailableError.

        Raises:
            UnavailableError: No complete reply came. The outcome of a write is then unknown.
            CertificateError: The server's certificate does not verify.
            ConfigError: The credentials or the CA certificate cannot be read.
            CorruptionError: A file of the body became shorter while it was sent.
        """
        return self._with_keys(
            lambda keys: self._send_once(request, keys, limit_bytes), lambda reply: reply.failure
        )

    @contextlib.contextmanager
    def stream_range(self, key: str, start: int, stop: int) -> Iterator[HttpReply]:
        """Request the bytes [start, stop) of an object; the caller reads them from the reply.

        Any reply but a 206 with exactly this range raises UnavailableError or the failure's error: some
        stores reply 200 with the whole object.
        """
        request = S3Request("GET", key, headers={"Range": f"bytes={start}-{stop - 1}"})
        reply, failure = self._with_keys(
            lambda keys: self._open(request, keys), lambda opened: opened[1]
        )
        if failure is not None:
            raise failure.error()
        with reply:
            expected = f"bytes {start}-{stop - 1}/"
            found = reply.headers.get("content-range", "")
            if reply.status != 206 or not found.startswith(expected):
                raise UnavailableError(
                    f"{self.describe(request)}: expected 206 with Content-Range {expected}*, "
                    f"found {reply.status} with {self.shown(found)!r}"
                )
            yield reply

    def head(self, key: str) -> ObjectInfo | None:
        """Return size and CRC32C of an object, or None if it does not exist.

        A missing bucket also gives None, because the reply to a HEAD has no body with an error code.
        """
        request = S3Request("HEAD", key, headers=CHECKSUM_MODE)
        reply = self.send(request)
        if reply.failure is not None:
            if reply.failure.is_absent:
                return None
            raise self._reason(key, reply.failure).error()
        length = _number(reply.headers.get("content-length", ""), -1)
        if length < 0:
            raise UnavailableError(f"{self.describe(request)}: no Content-Length in the reply")
        full = reply.headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT"
        crc = decode_crc(reply.headers.get(CHECKSUM_HEADER)) if full else None
        return ObjectInfo(length, crc)

    def _reason(self, key: str, failure: S3Failure) -> S3Failure:
        """Return why a HEAD was refused. The reply to a GET has the reason, that to a HEAD has no body."""
        if failure.status not in (400, 403):  # an expired token is a 400 at some servers
            return failure
        request = S3Request("GET", key, headers={"Range": "bytes=0-0"})
        reason = self.send(request).failure
        return failure if reason is None or reason.is_absent else reason

    def delete(self, keys: Sequence[str]) -> None:
        """Delete at most MAX_DELETED objects by one request. Objects that do not exist are ignored.

        Raises the error of the first object that the server did not delete; others may be deleted.
        """
        objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
        body = f'<Delete xmlns="{_NAMESPACE}">{objects}<Quiet>true</Quiet></Delete>'.encode()
        headers = {CHECKSUM_HEADER: encode_crc(crc32c(body)), "Content-Type": "application/xml"}
        request = S3Request("POST", "", {"delete": ""}, headers, body)
        for item in self._xml(request, "DeleteResult"):
            code = self.shown(child_text(item, "Code"))
            if local_name(item) == "Error" and code != "NoSuchKey":
                what = (
                    f"{self.describe(request)}: delete of {self.shown(child_text(item, 'Key'))!r}"
                )
                status = 403 if code == "AccessDenied" else 500
                raise S3Failure(status, code, self.shown(child_text(item, "Message")), what).error()

    def list_objects(self, prefix: str, after: str = "", *, delimiter: str = "") -> ListedPage:
        """Return one page of the objects whose key begins with `prefix`.

        `after` is the token of the page (`ListedPage.next`); "" asks for the first page. With a
        `delimiter` the server lists all keys with the same text up to it once, as a folder.
        Raises TierError if the reply is not a complete list.
        """
        query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
        if delimiter:
            query["delimiter"] = delimiter
        if after:
            query["continuation-token"] = after
        request = S3Request("GET", query=query)
        reply = self.send(request).checked()
        root = self._document(request, reply, "ListBucketResult")
        decode = _key_decoder(root)
        listed = tuple(
            ListedObject(
                decode(child_text(item, "Key")),
                child_text(item, "LastModified"),
                _number(child_text(item, "Size"), 0),
            )
            for item in root
            if local_name(item) == "Contents"
        )
        folders = tuple(
            decode(child_text(item, "Prefix"))
            for item in root
            if local_name(item) == "CommonPrefixes"
        )
        date = reply.headers.get("date", "")
        token = child_text(root, "NextContinuationToken")
        if child_text(root, "IsTruncated") != "true":
            return ListedPage(listed, "", date, folders)
        if not token or token == after:
            raise TierError(f"{self.describe(request)}: truncated list without a next token")
        return ListedPage(listed, token, date, folders)

    def create_upload(self, key: str) -> str:
        """Begin a multipart upload with a CRC32C of the whole object, and return its id."""
        headers = {
            "x-amz-checksum-algorithm": "CRC32C",
            "x-amz-checksum-type": "FULL_OBJECT",
            "Content-Type": "application/octet-stream",
        }
        request = S3Request("POST", key, {"uploads": ""}, headers)
        upload_id = child_text(self._xml(request, "InitiateMultipartUploadResult"), "UploadId")
        if not upload_id:
            raise TierError(f"{self.describe(request)}: no UploadId in the reply")
        return upload_id

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort a multipart upload. Ignore that it does not exist."""
        reply = self.send(S3Request("DELETE", key, {"uploadId": upload_id}))
        if reply.failure is not None and not reply.failure.is_absent:
            raise reply.failure.error()

    def list_uploads(self, prefix: str) -> tuple[tuple[PendingUpload, ...], str]:
        """Return the unfinished uploads below `prefix`, and the time by the server's clock (RFC 9110).

        Only the first page is read, which has at most 1,000 uploads. Some servers list unfinished uploads
        for an exact key only.
        """
        query = {"uploads": "", "encoding-type": "url", "prefix": prefix}
        request = S3Request("GET", query=query)
        reply = self.send(request).checked()
        root = self._document(request, reply, "ListMultipartUploadsResult")
        decode = _key_decoder(root)
        uploads = tuple(
            PendingUpload(
                decode(child_text(item, "Key")),
                child_text(item, "UploadId"),
                child_text(item, "Initiated"),
            )
            for item in root
            if local_name(item) == "Upload"
        )
        return uploads, reply.headers.get("date", "")

    def list_parts(self, key: str, upload_id: str) -> tuple[UploadedPart, ...]:
        """Return all parts of an unfinished upload, in order. Raises NotFoundError if it is gone."""
        parts: list[UploadedPart] = []
        marker = 0
        while True:
            query = {"uploadId": upload_id, "part-number-marker": str(marker)}
            request = S3Request("GET", key, query)
            root = self._xml(request, "ListPartsResult")
            page = [_uploaded_part(item) for item in root if local_name(item) == "Part"]
            parts += page
            if child_text(root, "IsTruncated") != "true":
                return tuple(parts)
            # The marker is computed here: some servers send 0, which would list the first page again.
            highest = max((part.number for part in page), default=0)
            if highest <= marker:
                raise TierError(f"{self.describe(request)}: truncated list without a next part")
            marker = highest

    def _xml(self, request: S3Request, expected: str) -> ElementTree.Element:
        return self._document(request, self.send(request).checked(), expected)

    def _document(self, request: S3Request, reply: S3Reply, expected: str) -> ElementTree.Element:
        root = parse_xml(reply.body)
        if root is not None and local_name(root) == expected:
            return root
        if expected.encode() in reply.body:
            # Over plain HTTP nothing else protects a reply. Its first and last tags have the same name.
            raise UnavailableError(
                f"{self.describe(request)}: the {expected} document was damaged on its way"
            )
        raise TierError(
            f"{self.describe(request)}: expected a {expected} document, found "
            f"{self.shown(reply.body[:1000].decode('utf-8', 'replace'))[:80]!r}; check that "
            "this is an S3 endpoint"
        )

    def _with_keys(
        self, call: Callable[[Keys], T], failure_of: Callable[[T], S3Failure | None]
    ) -> T:
        """Make the call, and make it again if the store refuses its keys and there are other ones by now."""
        keys = self._credentials.retrieve()
        found = call(keys)
        failure = failure_of(found)
        if failure is not None and failure.is_credentials:
            fresh = self._credentials.refresh()
            if fresh != keys:
                return call(fresh)
        return found

    def _send_once(self, request: S3Request, keys: Keys, limit_bytes: int) -> S3Reply:
        with self._send_signed(request, keys) as reply:
            body = reply.read(limit_bytes)
            failure = None
            if reply.status >= 300 or is_error_document(body):
                failure = parse_failure(reply.status, body, self.describe(request), keys.secrets())
            return S3Reply(reply.status, reply.headers, body, failure)

    def _open(self, request: S3Request, keys: Keys) -> tuple[HttpReply, S3Failure | None]:
        """Return an open reply and None, or a closed reply and its failure."""
        reply = self._send_signed(request, keys)
        if reply.status < 300:
            return reply, None
        with reply:
            body = reply.read(MAX_CONTROL_BYTES)
        return reply, parse_failure(reply.status, body, self.describe(request), keys.secrets())

    def _send_signed(self, request: S3Request, keys: Keys) -> HttpReply:
        query = urlencode(sorted(request.query.items()), quote_via=quote, safe="~")
        path = f"/{self.config.bucket}"
        if request.key:
            path += "/" + quote(request.key, safe="/~")
        url = urlsplit(f"{self._base}{path}" + (f"?{query}" if query else ""))
        date = self._clock.utc_now()
        headers: dict[str, str | list[str] | tuple[str]] = {
            "Host": url.netloc,
            "x-amz-date": to_amz_date(date),
            "x-amz-content-sha256": _UNSIGNED,
            **request.headers,
        }
        if keys.session_token:
            headers["X-Amz-Security-Token"] = keys.session_token
        signed = sign_v4_s3(
            method=request.method,
            url=url,
            region=self.config.region,
            headers=headers,
            credentials=keys.for_signer(),
            content_sha256=_UNSIGNED,
            date=date,
        )
        if request.body is not None or request.method in ("PUT", "POST"):
            signed["Content-Length"] = str(body_length(request.body))
        target = path + (f"?{query}" if query else "")
        plain = {name: str(value) for name, value in signed.items()}
        return self._pool.request(request.method, target, plain, request.body)
