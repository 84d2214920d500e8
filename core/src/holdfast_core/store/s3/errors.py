"""What a store answered when it did not do what was asked, and which of our errors that is.

Only the server's Code and Message are kept, cut and cleaned: they go into conditions that people
read. Never a header, a signature or a key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapacityError,
    ConfigError,
    HoldfastError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.store.s3.redact import redact

MAX_WORDS = 300
_CLEANED_WORDS = 4 * MAX_WORDS
MAX_ELEMENTS = 200_000
"""A list of 10,000 parts (some servers send all at once) has 60,000."""
MAX_DEPTH = 32
_BAD_BYTES_CODES = frozenset(
    {
        "BadDigest",
        "ChecksumMismatch",
        "InvalidDigest",
        "IncompleteBody",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
_CREDENTIAL_CODES = frozenset(
    {"XAdminUserNotFound", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken"}
)
_BUSY_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "SlowDownRead", "SlowDownWrite", "InternalError", "ServerBusy"}
)
_FULL_CODES = frozenset({"XMinioStorageFull", "InsufficientStorage", "EntityTooLarge"})
_ABSENT_CODES = frozenset({"NoSuchKey", "NoSuchBucket", "NoSuchUpload", "NoSuchVersion"})


@dataclass(frozen=True, slots=True)
class S3Failure:
    """One refused request."""

    status: int
    code: str
    """The server's Code; "" where it sent none (every HEAD)."""
    message: str
    """The server's Message, or the start of whatever else it sent."""
    request: str
    """What was asked of what: method, key, bucket, endpoint."""

    @property
    def is_bad_bytes(self) -> bool:
        """The server received other bytes than the signed checksum says."""
        return self.code in _BAD_BYTES_CODES

    @property
    def is_credentials(self) -> bool:
        """The server refused who asks, or what they may do; 400 and 404 are used for it, too."""
        return self.code in _CREDENTIAL_CODES or self.status in (401, 403)

    @property
    def is_absent(self) -> bool:
        return self.code in _ABSENT_CODES or (self.status == 404 and not self.code)

    @property
    def is_precondition(self) -> bool:
        """If-None-Match found an object."""
        return self.status == 412 or self.code == "PreconditionFailed"

    @property
    def words(self) -> str:
        """Status, Code and Message in one line."""
        return " ".join(
            w for w in (str(self.status), self.code and f"{self.code}:", self.message) if w
        )

    def error(self) -> HoldfastError:
        """The error of our tree that this is, with what to do where that is known."""
        text = f"{self.request}: {self.words}"
        status, code = self.status, self.code
        if code == "AuthorizationHeaderMalformed" or 300 <= status < 400:
            return ConfigError(f"{text}; check region and endpoint of the store")
        if self.is_credentials:
            return AccessDeniedError(f"{text}; {advice_on_denial(code)}")
        if code in _FULL_CODES or "QuotaExceeded" in code or status == 507:
            return CapacityError(f"{text}; free space in the store or raise its quota")
        if code == "NoSuchBucket":
            return NotFoundError(f"{text}; create the bucket or correct its name")
        if status == 404 or self.is_absent:
            return NotFoundError(text)
        if self.is_precondition:
            return AlreadyExistsError(text)
        if self.is_bad_bytes or code in _BUSY_CODES:
            return UnavailableError(text)
        if status in (408, 409, 425, 429) or (status >= 500 and status != 501):
            return UnavailableError(text)
        return TierError(text)


def advice_on_denial(code: str) -> str:
    """What a person should look at when the store refused the credentials with this Code."""
    match code:
        case "SignatureDoesNotMatch":
            return "the secret key is not the one of this access key"
        case "InvalidAccessKeyId" | "XAdminUserNotFound":
            return "the store does not know this access key"
        case "ExpiredToken" | "InvalidToken":
            return "the session token is no longer valid"
        case "RequestTimeTooSkewed":
            return "the clocks of this node and of the store differ"
        case _:
            return "check the policy of this access key for the bucket and prefix"


def parse_failure(status: int, body: bytes, request: str, secrets: tuple[str, ...]) -> S3Failure:
    """Reads an <Error> document; anything else becomes the message, without what a server may
    repeat of `secrets` (see `redact`)."""
    code = message = ""
    root = parse_xml(body)
    if root is not None and local_name(root) == "Error":
        code, message = child_text(root, "Code"), child_text(root, "Message")
    elif body:
        message = body[:_CLEANED_WORDS].decode("utf-8", "replace")
    return S3Failure(status, clean(code, secrets), clean(message, secrets), request)


def is_error_document(body: bytes) -> bool:
    """A 200 may carry <Error>: the work failed after the status line had been sent."""
    root = parse_xml(body) if b"<Error" in body[:1024] else None
    return root is not None and local_name(root) == "Error"


def parse_xml(body: bytes) -> ElementTree.Element | None:
    """None where it is no XML in UTF-8, is larger or deeper than S3's, or declares entities: S3 has
    none, an attacker would."""
    try:
        text = body.decode("utf-8").strip()
        if "<!DOCTYPE" in text:
            return None
        parser = ElementTree.XMLParser(target=_BoundedBuilder())
        parser.feed(text)
        root: ElementTree.Element = parser.close()
        return root
    except (UnicodeDecodeError, ElementTree.ParseError, ValueError):
        return None


class _BoundedBuilder(ElementTree.TreeBuilder):
    """Raises ValueError instead of building hundreds of megabytes from a few."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._depth = 0

    def start(self, tag: str, attrs: dict[str, str]) -> ElementTree.Element:
        self._count += 1
        self._depth += 1
        if self._count > MAX_ELEMENTS or self._depth > MAX_DEPTH:
            raise ValueError(f"XML of more than {MAX_ELEMENTS} elements or {MAX_DEPTH} levels")
        return super().start(tag, attrs)

    def end(self, tag: str) -> ElementTree.Element:
        self._depth -= 1
        return super().end(tag)


def local_name(element: ElementTree.Element) -> str:
    """Tag without its namespace; servers differ in which they send."""
    return element.tag.rpartition("}")[2]


def child_text(element: ElementTree.Element, name: str) -> str:
    """Text of the first direct child of that name, "" where there is none."""
    for child in element:
        if local_name(child) == name:
            return (child.text or "").strip()
    return ""


def clean(text: str, secrets: tuple[str, ...]) -> str:
    """What a server said, in one bounded line without credentials."""
    # First without secrets, then cut: a secret that the end cuts in two would not be found.
    shown = redact(text[:_CLEANED_WORDS], secrets)
    return re.sub(r"[\x00-\x20\x7f]+", " ", shown).strip()[:MAX_WORDS]
