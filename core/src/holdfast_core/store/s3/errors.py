"""Parsing of a store's error replies, and their translation to errors of holdfast_core.errors.

Only the server's Code and Message are kept, shortened and redacted, because they appear in conditions and
logs. Headers, signatures and keys are never kept.
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

MAX_TEXT_CHARACTERS = 300
"""Longest text of a server that is shown, in characters."""
_CLEANED_CHARACTERS = 4 * MAX_TEXT_CHARACTERS
"""Longest text of a server that is redacted, in characters; the rest is dropped first."""
MAX_TAGS = 200_000
"""Limit of "<" in XML: a few megabytes of tags could otherwise take hundreds of megabytes of memory. A list
of 10,000 parts, which some servers send as one page, has 120,000."""
MAX_EQUAL_SIGNS = 50_000
"""Limit of "=" in XML, one of which each attribute has. The parser would hold the interpreter for seconds
over an element with as many attributes as a reply has room for. S3 sends one or two attributes, but up to
two such signs in the checksum of each part of a list."""
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
    """A request that the store refused."""

    status: int
    code: str
    """The server's Code; "" if it sent none, which includes every HEAD."""
    message: str
    """The server's Message, or the beginning of a body that is not an S3 error document."""
    request: str
    """Description of the request: method, key, bucket, endpoint."""

    @property
    def is_bad_bytes(self) -> bool:
        """Whether the server received bytes that do not match the signed checksum or length."""
        return self.code in _BAD_BYTES_CODES

    @property
    def is_credentials(self) -> bool:
        """Whether the server refused the keys, or the keys lack a permission.

        The Code counts under any status, because servers also send 400 or 404 with these codes.
        """
        return self.code in _CREDENTIAL_CODES or self.status in (401, 403)

    @property
    def is_absent(self) -> bool:
        return self.code in _ABSENT_CODES or (self.status == 404 and not self.code)

    @property
    def is_precondition(self) -> bool:
        """Whether If-None-Match failed because the object exists."""
        return self.status == 412 or self.code == "PreconditionFailed"

    @property
    def text(self) -> str:
        """Status, Code and Message in one line."""
        return " ".join(
            w for w in (str(self.status), self.code and f"{self.code}:", self.message) if w
        )

    def error(self) -> HoldfastError:
        """Return the matching error of holdfast_core.errors, with advice where the cause is known."""
        text = f"{self.request}: {self.text}"
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
    """Return what an operator should check if the store refused the credentials with this Code."""
    match code:
        case "SignatureDoesNotMatch":
            return "the secret key does not belong to this access key"
        case "InvalidAccessKeyId" | "XAdminUserNotFound":
            return "the store has no such access key"
        case "ExpiredToken" | "InvalidToken":
            return "the session token is no longer valid"
        case "RequestTimeTooSkewed":
            return "the clocks of this node and of the store differ"
        case _:
            return "check the policy of this access key for the bucket and prefix"


def parse_failure(status: int, body: bytes, request: str, secrets: tuple[str, ...]) -> S3Failure:
    """Parse an <Error> document. The beginning of any other body becomes the message.

    Code and message are cleaned of `secrets`, which a server may repeat (see `redact`).
    """
    code = message = ""
    root = parse_xml(body)
    if root is not None and local_name(root) == "Error":
        code, message = child_text(root, "Code"), child_text(root, "Message")
    elif body:
        message = body[:_CLEANED_CHARACTERS].decode("utf-8", "replace")
    return S3Failure(status, clean(code, secrets), clean(message, secrets), request)


def is_error_document(body: bytes) -> bool:
    """Return whether the body is an <Error> document.

    A reply with status 200 may have one if the operation failed after the status line was sent.
    """
    root = parse_xml(body) if b"<Error" in body[:1024] else None
    return root is not None and local_name(root) == "Error"


def parse_xml(body: bytes) -> ElementTree.Element | None:
    """Return the root element of a body.

    Returns None if the body is not XML in UTF-8, has more than MAX_TAGS tags or MAX_EQUAL_SIGNS signs, or
    has a DOCTYPE. S3 sends no DOCTYPE; an attacker could declare entities in one.
    """
    try:
        text = body.decode("utf-8").strip()
        if "<!DOCTYPE" in text or text.count("<") > MAX_TAGS or text.count("=") > MAX_EQUAL_SIGNS:
            return None
        parser = ElementTree.XMLParser()
        parser.feed(text)
        root: ElementTree.Element = parser.close()
        return root
    except (UnicodeDecodeError, ElementTree.ParseError, ValueError):
        return None


def local_name(element: ElementTree.Element) -> str:
    """Return the tag without its namespace, because servers use different namespaces."""
    return element.tag.rpartition("}")[2]


def child_text(element: ElementTree.Element, name: str) -> str:
    """Return the text of the first direct child with this name; "" if there is none."""
    for child in element:
        if local_name(child) == name:
            return (child.text or "").strip()
    return ""


def clean(text: str, secrets: tuple[str, ...]) -> str:
    """Return a server's text as one line of at most MAX_TEXT_CHARACTERS characters without credentials."""
    # Redact before cutting, because a secret that the cut divides would not be recognized.
    shown = redact(text[:_CLEANED_CHARACTERS], secrets)
    return re.sub(r"[\x00-\x20\x7f]+", " ", shown).strip()[:MAX_TEXT_CHARACTERS]
