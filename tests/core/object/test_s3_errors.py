"""What a store says, as an error of ours: class, words, advice, and no secret in it."""

from __future__ import annotations

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
from holdfast_core.tiers.s3_errors import is_error_document, parse_failure, parse_xml

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
def test_class_of_an_answer(
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
def test_what_is_no_error_document_becomes_the_message(body: bytes, message: str) -> None:
    failure = parse_failure(500, body, REQUEST, ())
    assert (failure.code, failure.message) == ("", message)


def test_namespaces_and_padding_are_accepted() -> None:
    body = b'  \n<?xml version="1.0"?><Error xmlns="http://s3/"><Code>A</Code></Error>'
    assert is_error_document(body)
    assert parse_failure(200, body, REQUEST, ()).code == "A"


def test_a_secret_that_the_server_repeats_is_blotted_out() -> None:
    body = document("InvalidToken", "token TOPSECRET of key hunter2 is bad")
    error = parse_failure(400, body, REQUEST, ("TOPSECRET", "hunter2", "")).error()
    assert "TOPSECRET" not in str(error) and "hunter2" not in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>',
        '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a><a/>'.encode("utf-16"),
        b"",
        b"<a>" * 3,
    ],
    ids=["entities", "utf-16", "empty", "cut"],
)
def test_xml_that_is_refused(body: bytes) -> None:
    assert parse_xml(body) is None
