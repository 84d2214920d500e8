"""Errors of the S3 client that need no server."""

from __future__ import annotations

import pytest
from tests.support.servers.credentials import StaticCredentials

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import AccessDeniedError, HoldfastError, TierError, UnavailableError
from holdfast_core.store.s3.client import S3Client, S3Reply, S3Request
from holdfast_core.store.s3.credentials import Keys
from holdfast_core.store.s3.errors import S3Failure
from holdfast_core.store.s3.store import S3ObjectStore

CONFIG = StoreConfig("localhost:1", False, "bucket", "", "")


def client_without_server() -> S3Client:
    return S3Client(CONFIG, StaticCredentials(Keys("access", "secret")))


def error_of(patch: pytest.MonkeyPatch, status: int, code: str) -> HoldfastError:
    """Return the error of a HEAD that is refused with `status`; a GET is refused with `code`, too."""
    client = client_without_server()

    def send(request: S3Request, *, limit_bytes: int = 0) -> S3Reply:
        found = "" if request.method == "HEAD" else code
        if request.method == "GET" and not code:
            return S3Reply(206, {}, b"x", None)
        return S3Reply(status, {}, b"", S3Failure(status, found, "", request.method))

    patch.setattr(client, "send", send)
    with pytest.raises(HoldfastError) as caught:
        client.head("one")
    return caught.value


@pytest.mark.fault("A HEAD is refused with 400")
@pytest.mark.parametrize(
    ("status", "code"), [(400, "ExpiredToken"), (403, "SignatureDoesNotMatch")]
)
def test_a_get_asks_for_the_reason_that_the_refusal_of_a_head_lacks(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    error = error_of(monkeypatch, status, code)
    assert isinstance(error, AccessDeniedError)
    assert code in str(error)


def test_without_a_reason_the_status_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(error_of(monkeypatch, 400, "")) is TierError
    assert isinstance(error_of(monkeypatch, 403, ""), AccessDeniedError)


@pytest.mark.fault("A delete is called on a closed S3 store")
def test_a_store_that_is_closed_deletes_nothing() -> None:
    objects = S3ObjectStore(client_without_server())
    objects.close()
    with pytest.raises(UnavailableError, match="being closed"):
        objects.delete(["one"])
