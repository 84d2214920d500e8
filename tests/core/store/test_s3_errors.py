"""Errors of a store become errors of Holdfast: class, text and advice, without any secret."""

from __future__ import annotations

import base64
import codecs
import json
from collections.abc import Callable
from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest

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
from holdfast_core.store.s3.errors import (
    MAX_TAGS,
    is_error_document,
    parse_failure,
    parse_xml,
)

REQUEST = "PUT 'k' in bucket 'b' at store:9000"


def document(code: str, message: str = "some words") -> bytes:
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "code", "expected", "retryable"),
    [
        (400, "AuthorizationHeaderMalformed", ConfigError, False),
        (301, "PermanentRedirect", ConfigError, False),
        (403, "AccessDenied", AccessDeniedError, False),
        (403, "SignatureDoesNotMatch", AccessDeniedError, False),
        (403, "RequestTimeTooSkewed", AccessDeniedError, False),
        (404, "XAdminUserNotFound", AccessDeniedError, False),
        (400, "ExpiredToken", AccessDeniedError, False),
        (404, "NoSuchBucket", NotFoundError, False),
        (404, "NoSuchKey", NotFoundError, False),
        (404, "NoSuchUpload", NotFoundError, False),
        (409, "OperationAborted", UnavailableError, True),
        (412, "PreconditionFailed", AlreadyExistsError, False),
        (200, "PreconditionFailed", AlreadyExistsError, False),
        (200, "InternalError", UnavailableError, True),
        (400, "BadDigest", UnavailableError, True),
        (400, "XAmzContentChecksumMismatch", UnavailableError, True),
        (400, "RequestTimeout", UnavailableError, True),
        (400, "EntityTooSmall", TierError, False),
        (429, "TooManyRequests", UnavailableError, True),
        (500, "InternalError", UnavailableError, True),
        (501, "NotImplemented", TierError, False),
        (503, "SlowDown", UnavailableError, True),
        (503, "", UnavailableError, True),
        (507, "XMinioStorageFull", CapacityError, False),
        (507, "InsufficientStorage", CapacityError, False),
        (400, "XMinioAdminBucketQuotaExceeded", CapacityError, False),
    ],
)
def test_a_reply_becomes_the_error_of_its_status_and_code(
    status: int, code: str, expected: type[HoldfastError], retryable: bool
) -> None:
    error = parse_failure(status, document(code), REQUEST, ()).error()
    assert type(error) is expected
    assert error.retryable is retryable
    assert str(error).startswith(f"{REQUEST}: {status}")
    assert code in str(error) and "some words" in str(error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", ""),
        (b"<html><body>nginx</body></html>", "<html><body>nginx</body></html>"),
        (b"\xff\xfe garbage \r\n\x00", "�� garbage"),
        (b"<Error><Code>", "<Error><Code>"),
        (b"x" * 5000, "x" * 300),
    ],
    ids=["empty", "html", "binary", "cut", "long"],
)
def test_a_body_that_is_not_an_error_document_becomes_the_message(
    body: bytes, message: str
) -> None:
    failure = parse_failure(500, body, REQUEST, ())
    assert (failure.code, failure.message) == ("", message)


def test_namespaces_and_padding_are_accepted() -> None:
    body = b'  \n<?xml version="1.0"?><Error xmlns="http://s3/"><Code>A</Code></Error>'
    assert is_error_document(body)
    assert parse_failure(200, body, REQUEST, ()).code == "A"


TOKEN = "FwoGZXIvYXdzEBYaDKq1v0Zt7+Example/Session5Token=="
KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


def test_a_secret_that_the_server_repeats_is_removed() -> None:
    body = document("InvalidToken", "token TOPSECRET of key hunter2 is bad")
    error = parse_failure(400, body, REQUEST, ("TOPSECRET", "hunter2", "")).error()
    assert "TOPSECRET" not in str(error) and "hunter2" not in str(error)
    assert "token *** of key *** is bad" in str(error)


PADDING = "a b " * 70 + "12345 "
"""Padding up to just before the end of the part of a message that is shown."""


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def _spaced(secret: str) -> str:
    return " ".join(secret[start : start + 3] for start in range(0, len(secret), 3))


ECHOES: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "small letters": str.lower,
    "the first half": lambda s: s[: len(s) // 2],
    "the last half": lambda s: s[len(s) // 2 :],
    "in pieces": _spaced,
    "backwards": lambda s: s[::-1],
    "quoted for a URL": lambda s: quote(s, safe=""),
    "JSON": lambda s: json.dumps(s).replace("/", "\\/"),
    "HTML": lambda s: "".join(f"&#{ord(c)};" if c in "+/=" else c for c in s),
    "Base64": lambda s: base64.b64encode(s.encode()).decode(),
    "Base64 of a line": lambda s: base64.b64encode(f"x: {s}\n".encode()).decode(),
    "hex": lambda s: s.encode().hex(),
    "rotated": lambda s: codecs.encode(s, "rot13"),
    "cut by the end of the message": lambda s: PADDING + s,
}


@pytest.mark.fault("A hostile store repeats credentials in its reply")
@pytest.mark.parametrize("secret", [TOKEN, KEY], ids=["session token", "secret key"])
@pytest.mark.parametrize("echo", ECHOES)
def test_no_echo_of_a_secret_is_shown(secret: str, echo: str) -> None:
    repeated = ECHOES[echo](secret)
    for body in (
        document("AccessDenied", escape(f"you sent {repeated} to us")),
        document(escape(repeated)),
        f"500 you sent {repeated} to us".encode(),
    ):
        text = str(parse_failure(500, body, REQUEST, (secret,)).error())
        shown, hidden = _letters(text), _letters(repeated.removeprefix(PADDING))
        longest = max(
            stop - start
            for start in range(len(hidden))
            for stop in range(start, min(start + 40, len(hidden)) + 1)
            if hidden[start:stop] in shown
        )
        assert longest < 16, text


@pytest.mark.parametrize(
    "text",
    [
        "The specified bucket does not exist: holdfast-checkpoints-2026",
        "prefix team-a/jobs/11111111-2222-3333-4444-555555555555/step-000000000100 is not yours",
        "digest b3:196203ac4dd4f181d6cc512d112e28ae92c2fbecbf079d3941d9b2e08dd3ee77 differs",
    ],
)
def test_text_that_is_not_secret_is_shown(text: str) -> None:
    assert parse_failure(403, document("AccessDenied", text), REQUEST, (TOKEN, KEY)).message == text


@pytest.mark.parametrize(
    "body",
    [
        b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>',
        '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a><a/>'.encode("utf-16"),
        b"",
        b"<a>" * 3,
        b"<a>" + b"<b/>" * MAX_TAGS + b"</a>",
        b"<a " + b" ".join(b"a%d = ''" % n for n in range(100_000)) + b"/>",
        b"<a>" + b"<b c='' d='' e=''/>" * 50_000 + b"</a>",
    ],
    ids=["entities", "utf-16", "empty", "cut", "many tags", "many attributes", "some attributes"],
)
def test_unsafe_xml_is_refused(body: bytes) -> None:
    assert parse_xml(body) is None


def test_a_list_of_all_parts_with_their_checksums_is_parsed() -> None:
    part = b"<Part><ETag>&quot;0&quot;</ETag><ChecksumSHA256>+0==</ChecksumSHA256></Part>"
    root = parse_xml(b"<ListPartsResult>" + part * 10_000 + b"</ListPartsResult>")
    assert root is not None
    assert len(root) == 10_000
