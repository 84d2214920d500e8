"""Errors of a store: parsing, translation to holdfast_core.errors, redaction, and retries.

A store receives the access key and the session token. A hostile store may repeat them as they are, in
parts, encoded, or with other characters in between. Long words that look like a key are removed as well,
because no list of encodings is complete.

Of a reply only the server's Code and Message are kept, shortened and redacted, because they appear in
conditions and logs. Headers, signatures and keys are never kept.

All retries of the store are made here, with full jitter, a limit of attempts and a time budget. Only the
`retryable` attribute of an error's class decides whether an operation is tried again. Operations must be
idempotent: one whose outcome may be unknown must first look at what is stored. The calling thread is
blocked.
"""

from __future__ import annotations

import base64
import random
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar
from xml.etree import ElementTree

from holdfast_core.clock import Clock, SystemClock
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

_REMOVED = "***"
_SHORTEST_SECRET = 6
"""Shorter strings are not secrets, and to remove them would remove ordinary words."""
_GRAM = 8
"""If the text and a secret have this many consecutive letters and digits in common, they are removed."""
_OPAQUE = re.compile(r"[A-Za-z0-9+/=_~.%-]{20,}")
"""A word that may be a key."""


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return the text without the secrets, parts of them, and long words that look like a key.

    Case and characters other than letters and digits are ignored when the text is searched.
    """
    places = [index for index, character in enumerate(text) if character.isalnum()]
    letters = "".join(text[index].casefold()[:1] for index in places)
    hidden: list[tuple[int, int]] = []
    known = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
    for form in {form for secret in known for form in _forms(secret)}:
        if len(form) < _SHORTEST_SECRET:
            continue
        size = min(_GRAM, len(form))
        grams = {form[start : start + size] for start in range(len(form) - size + 1)}
        hidden += [
            (places[start], places[start + size - 1] + 1)
            for start in range(len(letters) - size + 1)
            if letters[start : start + size] in grams
        ]
    return _OPAQUE.sub(_without_key, _without(text, sorted(hidden)))


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """Return the text with these spans, sorted and possibly overlapping, replaced by _REMOVED."""
    found: list[str] = []
    done = 0
    for start, stop in spans:
        if start >= done:
            found += (text[done:start], _REMOVED)
        done = max(done, stop)
    return "".join(found) + text[done:]


def _without_key(match: re.Match[str]) -> str:
    """Return _REMOVED for a word with digits, lower-case and upper-case letters, else the word.

    Keys have all three kinds of characters; paths, names and hex digests usually do not.
    """
    word = match.group()
    kinds = (str.isdigit, str.islower, str.isupper)
    return _REMOVED if all(any(map(kind, word)) for kind in kinds) else word


def _forms(secret: str) -> Iterable[str]:
    """Return the secret, reversed, in hex and in Base64, as case-folded letters and digits."""
    raw = secret.encode()
    yield _letters(secret)
    yield _letters(secret[::-1])
    yield raw.hex()
    for skipped in range(3):
        # Within a longer Base64 text the form of a secret depends on the number of bytes before it.
        whole = raw[skipped : len(raw) - (len(raw) - skipped) % 3]
        yield _letters(base64.b64encode(whole).decode())


def _letters(text: str) -> str:
    return "".join(c.casefold()[:1] for c in text if c.isalnum())


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
    # Children nearly always have the namespace of their parent, and lists have thousands of them.
    text = element.findtext(element.tag.removesuffix(local_name(element)) + name)
    if text is None:
        text = next((child.text or "" for child in element if local_name(child) == name), "")
    return text.strip()


def clean(text: str, secrets: tuple[str, ...]) -> str:
    """Return a server's text as one line of at most MAX_TEXT_CHARACTERS characters without credentials."""
    # Redact before cutting, because a secret that the cut divides would not be recognized.
    shown = redact(text[:_CLEANED_CHARACTERS], secrets)
    return re.sub(r"[\x00-\x20\x7f]+", " ", shown).strip()[:MAX_TEXT_CHARACTERS]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long one operation is tried.

    The wait before attempt n+1 is uniform in [0, min(cap, base * 2**(n-1))], so that many sidecars that
    failed together do not retry together.
    """

    max_attempts: int = 8
    budget_seconds: float = 120.0
    """No attempt begins later than this after the first attempt began."""
    base_seconds: float = 0.2
    cap_seconds: float = 20.0

    def ceiling_seconds(self, failures: int) -> float:
        """Return the longest wait after `failures` (>= 1) failed attempts."""
        # The exponent is bounded so that a huge max_attempts cannot overflow a float.
        return min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 60))


@dataclass(frozen=True, slots=True)
class Retrier:
    """Runner of operations under a retry policy. Safe for use by many threads."""

    policy: RetryPolicy = RetryPolicy()
    clock: Clock = field(default_factory=SystemClock)
    uniform: Callable[[float, float], float] = random.uniform
    sleep: Callable[[float], object] | None = None
    """Waits for the given seconds; None waits on `stop`."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Ends all waits when it is set. A waiting operation then makes one last attempt immediately."""

    def call(self, what: str, operation: Callable[[], T]) -> T:
        """Return the result of `operation`. Repeat it while it raises retryable errors.

        Args:
            what: The operation, for the error message.
            operation: Must be idempotent.

        Raises:
            HoldfastError: The operation raised an error that is not retryable.
            UnavailableError: The policy is spent or `stop` is set. The message has the last error, the
                number of attempts and the seconds spent.
        """
        began = self.clock.monotonic()
        attempt = 0
        while True:
            attempt += 1
            try:
                return operation()
            except HoldfastError as error:
                if not error.retryable:
                    raise
                spent = self.clock.monotonic() - began
                wait = self.uniform(0.0, self.policy.ceiling_seconds(attempt))
                if (
                    self.stop.is_set()
                    or attempt >= self.policy.max_attempts
                    or spent + wait > self.policy.budget_seconds
                ):
                    raise UnavailableError(
                        f"{what}: given up after {attempt} attempt(s) in {spent:.1f} s: {error}"
                    ) from error
            self._pause(wait)

    def look(self, what: str, operation: Callable[[], T | None], looks: int = 3) -> T | None:
        """Like `call`, for an operation that returns None if it does not find something.

        Returns None only after `looks` looks in a row, with the policy's waits, found nothing, because a
        store may reply 404 for an object that was just written.
        """
        left = looks

        def once() -> T | None:
            nonlocal left
            found = operation()
            left -= 1
            if found is None and left > 0:
                raise UnavailableError(f"{what}: no such object at {looks - left} look(s)")
            return found

        return self.call(what, once)

    def _pause(self, seconds: float) -> None:
        if self.sleep is None:
            self.stop.wait(seconds)
        else:
            self.sleep(seconds)
