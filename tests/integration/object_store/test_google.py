"""What is particular to stores of Google: kills, keys, bad input and the probe, over a played server."""

from __future__ import annotations

import json
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tests.support.servers.pki import Authority
from tests.support.servers.played_google import BUCKET, LOGIN, PlayedGoogle
from tests.support.tiers.cloud_writer import killed_at
from tests.support.tiers.ending_source import EndingSource, kept_of_parts
from tests.support.tiers.object_tier_contract import ObjectTierContract

from holdfast.testing import ObjectStoreContract
from holdfast.testing.object_store_contract import check_same, payload
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import (
    AccessDeniedError,
    ConfigError,
    HoldfastError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.store.access import access_by_url, access_in_pod
from holdfast_core.store.s3.errors import Retrier, RetryPolicy
from holdfast_core.store.upload import Document
from holdfast_core.store_url import parse_store_url
from holdfast_core.tiers.objects import ObjectStore
from holdfast_sidecar.process.store_probe import probe_store

pytestmark = pytest.mark.integration
LONG = 20 << 20
"""Three parts."""


@pytest.fixture
def server() -> Iterator[PlayedGoogle]:
    with PlayedGoogle() as server:
        yield server


@pytest.fixture
def keys(server: PlayedGoogle, tmp_path: Path) -> Path:
    """Return the directory of the mounted Secret."""
    directory = tmp_path / "keys"
    directory.mkdir()
    (directory / "serviceAccount.json").write_text(server.key())
    return directory


@pytest.fixture
def objects(server: PlayedGoogle, keys: Path) -> Iterator[ObjectStore]:
    """Return a bucket without objects."""
    config = server.config(bucket=server.create_bucket())
    with closing(access_in_pod(config, str(keys)).open()) as found:
        yield found


class TestObjectStores(ObjectStoreContract):
    """The contract of object stores, for Google."""


class TestObjectTiers(ObjectTierContract):
    """The contract of object tiers, for Google."""


@pytest.mark.fault("A process is killed in the middle of an upload to Google")
@pytest.mark.parametrize(
    ("size", "where", "count"),
    [(1000, "part", 1), (LONG, "part", 1), (LONG, "part", 3), (LONG, "copy", 1)],
    ids=["one request", "first part", "last part", "copy"],
)
def test_a_killed_upload_leaves_no_object_and_the_next_one_completes_it(
    server: PlayedGoogle, keys: Path, objects: ObjectStore, size: int, where: str, count: int
) -> None:
    config = server.config(bucket=next(name for name in server.stored if name != BUCKET))
    killed_at(config, keys, "a/one", size, where, count)
    assert objects.size("a/one") is None
    assert objects.list("a/").objects == ()
    left = 1 if where == "copy" else 0  # parts that were not put together are invisible
    assert [item.size_bytes for item in objects.unfinished("a/")] == [size] * left
    objects.write("a/one", Document(payload(size)))
    check_same(objects.get("a/one"), payload(size))
    assert objects.abort_stale(["a/"], timedelta(hours=1)) == 0
    assert objects.abort_stale(["a/"], timedelta(0)) == left
    assert [item.key for item in objects.list("a/").objects] == ["a/one"]


def test_each_write_of_an_immutable_object_is_conditional(
    server: PlayedGoogle, objects: ObjectStore
) -> None:
    objects.write("a/short", Document(payload(1000)))
    objects.write("a/long", Document(payload(LONG)))
    put = Counter(
        (unquote(path).rpartition("/")[2], headers.get("x-goog-if-generation-match"))
        for method, path, headers in server.asked
        if method == "PUT" and "?" not in path
    )
    assert put == {("short", "0"): 1, ("long", "0"): 1}


def test_a_listing_has_pages(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_core.store.cloud.store._PAGE_KEYS", 3)
    names = [f"a/{number:02d}" for number in range(8)]
    for name in names:
        objects.write(name, Document(b"x"))
    found, page, pages = list[str](), "", 0
    while page or not pages:
        listed = objects.list("a/", page)
        found += [item.key for item in listed.objects]
        page, pages = listed.next, pages + 1
    assert (found, pages) == (names, 3)
    objects.delete([*names, "a/absent"])
    assert objects.list("a/").objects == ()


@pytest.mark.fault("An upload makes a part while the memory has no room for the one before it")
def test_no_part_is_kept_while_the_next_one_is_made(objects: ObjectStore) -> None:
    with pytest.raises(TierError, match="no more parts") as ended:
        objects.write("a/one", EndingSource(), replace=True)
    assert kept_of_parts(ended.tb) == []


# --------------------------------------------------------------------------- keys


def test_a_key_that_was_replaced_is_read_again(
    server: PlayedGoogle, keys: Path, objects: ObjectStore
) -> None:
    objects.write("a/one", Document(b"x"))
    server.replace_key()
    (keys / "serviceAccount.json").write_text(server.key())
    assert objects.get("a/one") == b"x"
    server.replace_key()
    with pytest.raises(AccessDeniedError, match="the key was deleted or disabled"):
        objects.get("a/one")


def test_the_identity_of_a_pod_gets_its_tokens_from_the_metadata_server(
    server: PlayedGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", server.endpoint)
    monkeypatch.setenv("GCE_METADATA_IP", server.endpoint)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = StoreConfig(server.endpoint, False, BUCKET, "x", "", google="identity")
    report = tmp_path / "report"
    assert probe_store(config.to_json(), str(tmp_path / "absent"), report) == 0
    assert json.loads(report.read_text())["available"]
    server.gives_tokens = False
    assert probe_store(config.to_json(), str(tmp_path / "absent"), report) == 0
    found = json.loads(report.read_text())
    assert (found["available"], found["reason"]) == (False, "AccessDenied")
    assert "no token for the identity: 404" in found["message"]
    assert "check that the pool of nodes has workload identity" in found["message"]


@pytest.mark.fault("The login of a person at Google has expired or was taken back")
def test_the_login_of_a_person_gets_its_tokens_from_google(
    server: PlayedGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy plays accounts.google.com, whose name obstore has no setting for."""
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.certificate_pem)
    (tmp_path / "leaf.pem").write_bytes(b"".join(authority.leaf("accounts.google.com")))
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(tmp_path / "leaf.pem")
    monkeypatch.setenv("HTTPS_PROXY", f"http://{server.endpoint}")
    file = tmp_path / "key.json"
    file.write_text(json.dumps({"type": "authorized_user", **LOGIN}))
    environment = server.environment(str(file)) | {"SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    access = access_by_url(parse_store_url(f"gs://{BUCKET}/x"), environment)
    with closing(access.open()) as store:
        store.write("x/one", Document(b"x"))
        assert store.get("x/one") == b"x"
    server.gives_tokens = False
    with closing(access.open()) as store, pytest.raises(AccessDeniedError) as refused:
        store.get("x/one")
    assert f"log in again (gcloud auth application-default login), and correct {file}" in str(
        refused.value
    )
    assert "login-of-ann" not in str(refused.value)


# --------------------------------------------------------------------------- bad input


@pytest.mark.fault("A store of Google refuses the key, does not exist, or does not answer")
@pytest.mark.parametrize(
    ("bucket", "key", "changes", "error", "text"),
    [
        (BUCKET, None, {}, ConfigError, "key.json: No such file"),
        (BUCKET, "{", {}, ConfigError, "key.json: the key is not JSON"),
        (BUCKET, "", {}, ConfigError, "key.json: the key is not JSON"),
        (BUCKET, "[]", {}, ConfigError, "expected the type service_account or authorized_user"),
        (BUCKET, {"type": "external_account"}, {}, ConfigError, "found 'external_account'"),
        (BUCKET, {"client_email": None}, {}, ConfigError, "the key lacks client_email"),
        (BUCKET, {"private_key": "none"}, {}, ConfigError, "private_key is none of RSA in PEM"),
        ("absent", {}, {}, NotFoundError, "create the bucket or correct its name"),
        (
            BUCKET,
            {},
            {"GOOGLE_BASE_URL": "http://127.0.0.1:9"},
            UnavailableError,
            "Connection refused",
        ),
        (BUCKET, {}, {"GOOGLE_BASE_URL": "127.0.0.1"}, ConfigError, "correct GOOGLE_BASE_URL"),
    ],
    ids=[
        "no file",
        "broken file",
        "empty file",
        "no object",
        "another kind",
        "key without a name",
        "key that is none",
        "no bucket",
        "endpoint down",
        "endpoint without a scheme",
    ],
)
def test_a_store_that_cannot_be_used_says_why(
    server: PlayedGoogle,
    tmp_path: Path,
    bucket: str,
    key: dict[str, Any] | str | None,
    changes: dict[str, str],
    error: type[HoldfastError],
    text: str,
) -> None:
    file = tmp_path / "key.json"
    if key is not None:
        file.write_text(key if isinstance(key, str) else server.key(**key))
    environment = server.environment(str(file)) | changes
    retrier = Retrier(RetryPolicy(max_attempts=2, base_seconds=0.01))
    with pytest.raises(error, match=text) as raised:
        store = access_by_url(parse_store_url(f"gs://{bucket}/x"), environment).open(
            retrier=retrier
        )
        with closing(store):
            store.write("x/one", Document(b"x"))
    assert "BEGIN" not in str(raised.value)


def test_an_account_without_the_role_is_told_its_name(
    server: PlayedGoogle, objects: ObjectStore
) -> None:
    server.is_forbidden = True
    for call in (
        lambda: objects.get("a/one"),
        lambda: objects.size("a/one"),
        lambda: objects.write("a/one", Document(b"x")),
    ):
        with pytest.raises(AccessDeniedError, match="Storage Object User"):
            call()


# --------------------------------------------------------------------------- probe


def probed(config: StoreConfig, keys: Path) -> dict[str, Any]:
    report = keys / "report"
    assert probe_store(config.to_json(), str(keys), report) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_a_probe_in_a_pod_finds_every_feature_and_deletes_what_it_wrote(
    server: PlayedGoogle, keys: Path
) -> None:
    found = probed(server.config("x"), keys)
    assert (found["available"], found["reason"]) == (True, "Available")
    assert set(found["features"].values()) == {True}
    assert server.stored[BUCKET] == {}
    assert probed(server.config("x", bucket="absent"), keys)["reason"] == "BucketNotFound"
    (keys / "serviceAccount.json").unlink()
    report = probed(server.config("x"), keys)
    assert report["reason"] == "ConfigurationInvalid"
    assert "expected a file serviceAccount.json" in report["message"]


@pytest.mark.fault("A server of Google replaces objects although a write is conditional")
def test_the_probe_reports_a_server_that_ignores_conditions(
    server: PlayedGoogle, keys: Path
) -> None:
    server.ignores_conditions = True
    found = probed(server.config("x"), keys)
    assert found["features"]["conditionalPut"] is False
    assert "it ignores conditional writes" in found["message"]
