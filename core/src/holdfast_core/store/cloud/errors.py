"""Errors of obstore, of Azure Blob Storage and of Google Cloud Storage as errors of holdfast_core.

obstore has few classes of errors, and its texts contain whole requests. Of a text only the status and the
server's Code and Message are kept, cleaned of keys (`s3.errors.clean`).
"""

from __future__ import annotations

import re

from obstore.exceptions import BaseError

from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapacityError,
    ConfigError,
    CutError,
    HoldfastError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.store.cloud.keys import CloudKeys
from holdfast_core.store.s3.errors import clean, parse_failure
from holdfast_core.store.s3.http import CertificateError

ObstoreError = (BaseError, OSError, ValueError)
"""What calls of obstore raise. FileNotFoundError is an OSError."""
_STATUS = re.compile(r"(?:status code|\(code): (\d{3})")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*([A-Za-z]+)")
_MESSAGE = re.compile(r'message: "([^"]+)"')
_REQUEST_ID = re.compile(r"\s*RequestId:[^<]*")
"""Id and time that the server appends to each Message."""
_REASONS = (
    ("dns error", "the host name has no address; an account that does not exist has none"),
    ("InvalidMessage", "the server does not speak TLS"),
    ("TimedOut", "no reply came in time"),
)
"""What the half for debugging shows, and what it means."""
_TOKEN = "Error performing token request"
_EXISTS = frozenset(
    {"BlobAlreadyExists", "ConditionNotMet", "UnauthorizedBlobOverwrite", "PreconditionFailed"}
)
_FULL = frozenset({"AccountLimitExceeded", "InsufficientAccountCapacity", "BlobTooLarge"})
_NO_CONTAINER = frozenset(
    {"ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled", "ResourceNotFound"}
)


def translated(error: Exception, request: str, keys: CloudKeys) -> HoldfastError:
    """Return the matching error of holdfast_core.errors, with advice where the cause is known.

    Args:
        error: What obstore raised.
        request: What was asked of which container, for the message.
        keys: The keys of the request, which must not be shown.
    """
    text, secrets = str(error), keys.secrets()
    if (match := _STATUS.search(text)) is None:
        return _without_status(text, request, keys)
    status, body = int(match.group(1)), _document(text)
    if _TOKEN in text:
        return _token_refused(status, request, clean(body, secrets), keys)
    failure = parse_failure(status, body.encode(), request, secrets)
    code, shown = failure.code, f"{request}: {failure.text}"
    if code in _EXISTS or (status in (409, 412) and not code):
        return AlreadyExistsError(shown)
    if failure.is_credentials:
        return AccessDeniedError(f"{shown}; {_advice(code)}")
    if code == "NoSuchBucket":
        return NotFoundError(f"{shown}; create the bucket or correct its name")
    if code in _NO_CONTAINER:
        return NotFoundError(
            f"{shown}; create the container, or correct its name or that of the account"
        )
    if status == 404:
        return NotFoundError(shown)
    if status == 416:
        return CutError(f"{shown}: the object ends before the range")
    if code in _FULL or status == 507:
        return CapacityError(f"{shown}; free space in the store or raise its limit")
    if 300 <= status < 400:
        return ConfigError(f"{shown}; check the endpoint of the store")
    if status in (408, 409, 425, 429) or (status >= 500 and status != 501):
        return UnavailableError(shown)
    return TierError(shown)


def _advice(code: str) -> str:
    match code:
        case "AuthenticationFailed":
            return (
                "the key is not one of this account, the shared access signature is wrong or has expired, "
                "or the clocks of this node and of the store differ"
            )
        case "AuthorizationPermissionMismatch":
            return (
                "the identity lacks the role Storage Blob Data Contributor, or the shared access signature "
                "lacks a permission"
            )
        case "AuthorizationFailure":
            return (
                "the key or the shared access signature is wrong or has expired, or the account's firewall "
                "refuses this network"
            )
        case "AccessDenied":
            return "the account lacks the role Storage Object User (roles/storage.objectUser) for the bucket"
        case "AuthenticationRequired" | "InvalidSecurity" | "ExpiredToken" | "InvalidToken":
            return "the key was deleted or disabled, or the clock of this node is wrong"
        case "AccountIsDisabled":
            return "the account is disabled"
        case _:
            return "check the rights of these keys for the container and prefix"


def _token_refused(status: int, request: str, text: str, keys: CloudKeys) -> HoldfastError:
    shown = f"{request}: no token for the identity: {status} {text}"
    if status == 429 or status >= 500:
        return UnavailableError(shown)
    return AccessDeniedError(f"{shown}; {keys.advice_on_tokens}")


def _without_status(text: str, request: str, keys: CloudKeys) -> HoldfastError:
    """Return the error of a request without a reply."""
    if "federated token file" in text:
        return ConfigError(f"{request}: the file with the token of the web identity cannot be read")
    what = f"{request}: the issuer of tokens did not answer" if _TOKEN in text else request
    if match := _CERTIFICATE.search(text):
        return CertificateError(
            f"{what}: the server's certificate does not verify: {match.group(1)}"
        )
    reason = next((reason for sign, reason in _REASONS if sign in text), "")
    if not reason and (match := _MESSAGE.search(text)):
        reason = clean(match.group(1), keys.secrets())
    shown = f"{what}: {reason or clean(_beginning(text), keys.secrets())}"
    return UnavailableError(f"{shown}; {keys.advice_on_tokens}" if _TOKEN in text else shown)


def _beginning(text: str) -> str:
    """Return obstore's text without its second half, which is for debugging, and without the request."""
    first = text.partition("\n\nDebug source:")[0]
    return first.rpartition(" - ")[2] or first


def _document(text: str) -> str:
    """Return the body of a reply: an <Error> document, or what follows the status."""
    start, stop = text.find("<?xml"), text.find("</Error>")
    if start < 0:
        start = text.find("<Error>")
    if 0 <= start < stop:
        document = text[start : stop + len("</Error>")]
        return _REQUEST_ID.sub("", document)
    return _beginning(text).partition("status code: ")[2].partition(": ")[2]
