"""A MinIO server, and an environment with its endpoint and keys as boto3's users set them.

Tests that use `any_url` run on Azurite and on a played server of Google as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.servers.azurite_server import ACCOUNT, AzuriteServer
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.played_google import BUCKET, PlayedGoogle
from tests.support.zygote.persisters import forked_persisters


@pytest.fixture(scope="module")
def minio() -> Iterator[MinioServer]:
    with MinioServer() as server:
        yield server


@pytest.fixture(autouse=True)
def persister_starts() -> Iterator[None]:
    """Fork the persisters of Checkpointers in this process. Those of other processes are executed."""
    with forked_persisters():
        yield


@pytest.fixture
def url(minio: MinioServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the URL of a prefix of this test's own, with the environment set for it."""
    for name, value in {
        **minio.client_environment(),
        # Profiles of the person who runs the test have no effect.
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://{minio.bucket}/test/{secrets.token_hex(6)}"


@pytest.fixture(scope="module")
def azurite() -> Iterator[AzuriteServer]:
    with AzuriteServer() as server:
        yield server


@pytest.fixture
def azure_url(azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a prefix in Azurite, with the environment set for it."""
    for name in ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in azurite.client_environment().items():
        monkeypatch.setenv(name, value)
    return f"az://{ACCOUNT}/{azurite.bucket}/test/{secrets.token_hex(6)}"


@pytest.fixture
def google() -> Iterator[PlayedGoogle]:
    with PlayedGoogle() as server:
        yield server


@pytest.fixture
def google_url(google: PlayedGoogle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the URL of a prefix in a played server of Google, with the environment set for it."""
    key = tmp_path / "key.json"
    key.write_text(google.key())
    for name, value in google.environment(str(key)).items():
        monkeypatch.setenv(name, value)
    return f"gs://{BUCKET}/test/{secrets.token_hex(6)}"


@pytest.fixture(
    params=["url", "azure_url", "google_url"], ids=["minio", "azurite", "played google"]
)
def any_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of a prefix in each kind of server."""
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"
