"""A refusal of a HEAD: its reply has no body, so a GET asks for the reason."""

from __future__ import annotations

import pytest
from tests.support.servers.credentials import StaticCredentials

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import AccessDeniedError, HoldfastError, TierError
from holdfast_core.store.s3.client import S3Client, S3Reply, S3Request
from holdfast_core.store.s3.credentials import Keys
from holdfast_core.store.s3.errors import S3Failure

CONFIG = StoreConfig("localhost:1", False, "bucket", "", "")


def error_of(patch: pytest.MonkeyPatch, status: int, code: str) -> HoldfastError:
    """Return the error of a HEAD that is refused with `status`; a GET is refused with `code`, too."""
    client = S3Client(CONFIG, StaticCredentials(Keys("access", "secret")))

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
def test_the_error_has_the_reason(monkeypatch: pytest.MonkeyPatch, status: int, code: str) -> None:
    error = error_of(monkeypatch, status, code)
    assert isinstance(error, AccessDeniedError)
    assert code in str(error)


def test_without_a_reason_the_status_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(error_of(monkeypatch, 400, "")) is TierError
    assert isinstance(error_of(monkeypatch, 403, ""), AccessDeniedError)
