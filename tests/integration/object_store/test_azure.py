"""What is particular to stores of Azure: kills, keys, identities and bad input, over Azurite."""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import BaseError
from tests.support.clock import ManualClock
from tests.support.servers.azurite_server import ACCOUNT, ACCOUNT_KEY, AzuriteServer
from tests.support.servers.pki import Authority
from tests.support.tiers.cloud_writer import killed_at
from tests.support.tiers.object_tier_contract import ObjectTierContract

from holdfast.testing import ObjectStoreContract
from holdfast.testing.object_store_contract import check_same, payload
from holdfast_core.clock import SystemClock
from holdfast_core.contract import WEB_TOKEN_FILE, StoreConfig
from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.store.access import access_by_url
from holdfast_core.store.cloud.azure import AzureFiles, AzureKeys
from holdfast_core.store.cloud.keys import FixedKeys
from holdfast_core.store.cloud.store import CloudObjectStore
from holdfast_core.store.s3.errors import Retrier, RetryPolicy
from holdfast_core.store.s3.http import CertificateError, HttpPool
from holdfast_core.store.upload import Document
from holdfast_core.store_url import parse_store_url
from holdfast_core.tiers.objects import ObjectStore
from holdfast_sidecar.process.store_probe import probe_store

pytestmark = pytest.mark.integration
LONG = 20 << 20
"""Three blocks."""


@pytest.fixture
def objects(azurite: AzuriteServer) -> Iterator[ObjectStore]:
    """Return a container without objects."""
    name = f"contract-{secrets.token_hex(6)}"
    assert azurite.create_container(name) == ""
    config = StoreConfig(azurite.endpoint, False, name, "", "", account=ACCOUNT)
    found = CloudObjectStore(config, azurite.credentials)
    yield found
    found.close()


class TestObjectStores(ObjectStoreContract):
    """The contract of object stores, for Azure."""


class TestObjectTiers(ObjectTierContract):
    """The contract of object tiers, for Azure."""


@pytest.fixture
def opened(quick: Retrier) -> Iterator[Callable[..., CloudObjectStore]]:
    """Return a function that opens a store. It is closed when the test ends."""
    stores = list[CloudObjectStore]()

    def open_store(config: StoreConfig, keys: Any, **options: Any) -> CloudObjectStore:
        stores.append(CloudObjectStore(config, keys, retrier=quick, **options))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@pytest.mark.fault("A process is killed in the middle of an upload to Azure")
@pytest.mark.parametrize(
    ("size", "where", "count"),
    [(1000, "part", 1), (LONG, "part", 1), (LONG, "part", 3), (LONG, "copy", 1)],
    ids=["one request", "first block", "last block", "copy"],
)
def test_a_killed_upload_leaves_no_object_and_the_next_one_completes_it(
    azurite: AzuriteServer,
    prefix: str,
    opened: Callable[..., CloudObjectStore],
    tmp_path: Path,
    size: int,
    where: str,
    count: int,
) -> None:
    config, key = azurite.config(prefix), f"{prefix}/one"
    (tmp_path / "accountKey").write_text(ACCOUNT_KEY)
    killed_at(config, tmp_path, key, size, where, count)
    store = opened(config, azurite.credentials)
    assert store.size(key) is None
    assert store.list(f"{prefix}/").objects == ()
    left = 1 if where == "copy" else 0  # parts that were not put together are invisible
    assert [item.size_bytes for item in store.unfinished(f"{prefix}/")] == [size] * left
    store.write(key, Document(payload(size)))
    check_same(store.get(key), payload(size))
    assert store.abort_stale([f"{prefix}/"], timedelta(hours=1)) == 0
    assert store.abort_stale([f"{prefix}/"], timedelta(0)) == left
    assert [item.key for item in store.list(f"{prefix}/").objects] == [key]


def test_an_object_that_another_writer_makes_during_a_long_upload_is_compared(
    azurite: AzuriteServer, prefix: str, opened: Callable[..., CloudObjectStore]
) -> None:
    config, key = azurite.config(prefix), f"{prefix}/one"
    other = opened(config, azurite.credentials)
    written = threading.Event()

    def meanwhile(_length: int) -> None:
        if not written.is_set():
            written.set()
            other.write(key, Document(b"other"))

    store = opened(config, azurite.credentials, throttle=meanwhile)
    with pytest.raises(AlreadyExistsError, match="expected 20971520 bytes"):
        store.write(key, Document(payload(LONG)))
    assert store.get(key) == b"other"
    assert store.unfinished(f"{prefix}/") == []


def test_a_long_object_is_written_again_without_reading_or_sending_it(
    azurite: AzuriteServer, prefix: str, opened: Callable[..., CloudObjectStore]
) -> None:
    sent = list[int]()
    store = opened(azurite.config(prefix), azurite.credentials, sent=sent.append)
    store.write(f"{prefix}/one", Document(payload(LONG)))
    assert sum(sent) == LONG
    store.write(f"{prefix}/one", Document(payload(LONG)))
    assert sum(sent) == LONG


class CutReply:
    """A reply of obstore whose connection is lost after 12 MiB."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def stream(self, size: int) -> Iterator[Any]:
        sent = 0
        for data in self._found.stream(size):
            if sent >= 12 << 20:
                raise BaseError(
                    "Generic MicrosoftAzure error: HTTP error: request or response body error"
                )
            sent += len(data)
            yield data


@pytest.mark.fault("Connections to Azure last for a part of a long object only")
def test_a_long_object_without_a_checksum_is_read_in_parts_to_compare_it(
    azurite: AzuriteServer,
    prefix: str,
    opened: Callable[..., CloudObjectStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    get = obstore.get
    monkeypatch.setattr(obstore, "get", lambda *args, **options: CutReply(get(*args, **options)))
    store = opened(azurite.config(prefix), azurite.credentials)
    store.write(f"{prefix}/one", Document(payload(LONG), made_while_sent=True))
    assert store.size(f"{prefix}/one") == LONG
    with pytest.raises(AlreadyExistsError):
        store.write(f"{prefix}/one", Document(payload(LONG - 1) + b"x"))


@pytest.mark.fault("The time of Azure's server cannot be asked, as behind a proxy")
def test_a_listing_asks_for_the_time_of_the_server_once(
    azurite: AzuriteServer,
    prefix: str,
    opened: Callable[..., CloudObjectStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[str]()

    class Silent(HttpPool):
        def request(self, method: str, *_: Any, **__: Any) -> Any:
            asked.append(method)
            raise UnavailableError("no reply came in time")

    monkeypatch.setattr("holdfast_core.store.cloud.client.HttpPool", Silent)
    clock = ManualClock()
    store = opened(azurite.config(prefix), azurite.credentials, clock=clock)
    for number in range(3):
        store.write(f"{prefix}/{number}", Document(b"x"))
    listed = store.list(f"{prefix}/").objects
    assert [item.age for item in listed] == [timedelta(0)] * 3
    assert asked == ["HEAD"]
    clock.advance(61)
    store.list(f"{prefix}/")
    assert asked == ["HEAD"] * 2


def test_a_listing_has_pages(
    azurite: AzuriteServer,
    prefix: str,
    opened: Callable[..., CloudObjectStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast_core.store.cloud.store._PAGE_KEYS", 3)
    store = opened(azurite.config(prefix), azurite.credentials)
    names = [f"{prefix}/{number:02d}" for number in range(8)]
    for name in names:
        store.write(name, Document(b"x"))
    found, page, pages = list[str](), "", 0
    while True:
        listed = store.list(f"{prefix}/", page)
        found += [item.key for item in listed.objects]
        page, pages = listed.next, pages + 1
        if not page:
            break
    assert (found, pages) == (names, 3)
    store.delete(names)
    assert store.list(f"{prefix}/").objects == ()


# --------------------------------------------------------------------------- keys


def test_keys_that_were_rotated_are_read_again(
    tmp_path: Path, opened: Callable[..., CloudObjectStore]
) -> None:
    keys = [ACCOUNT_KEY, base64.b64encode(b"another key".ljust(64)).decode()]
    files = tmp_path / "keys"
    files.mkdir()
    (files / "accountKey").write_text(keys[0])
    with AzuriteServer() as server:
        rotated = threading.Event()

        def rotate(_length: int) -> None:
            if not rotated.is_set():
                rotated.set()
                server.kill()
                server.keys = keys[1:]
                server.revive()
                (files / "accountKey").write_text(keys[1])

        store = opened(server.config(), AzureFiles(files), throttle=rotate)
        store.write("a/one", Document(payload(LONG)))
        check_same(store.get("a/one"), payload(LONG))
        assert rotated.is_set()
        # A key that is not there any more, and no other one.
        refused = opened(server.config(), FixedKeys(AzureKeys(account_key=keys[0])))
        with pytest.raises(AccessDeniedError, match="the key or the shared access signature"):
            refused.get("a/one")


def test_a_shared_access_signature_is_used_until_it_expires(
    azurite: AzuriteServer, prefix: str, opened: Callable[..., CloudObjectStore]
) -> None:
    config, key = azurite.config(prefix), f"{prefix}/one"
    store = opened(config, FixedKeys(AzureKeys(sas_token=azurite.sas_token())))
    store.write(key, Document(payload(LONG)))  # the copy needs the signature for its source, too
    check_same(store.get(key), payload(LONG))
    ended = azurite.sas_token(seconds=-60)
    for call in (
        lambda: opened(config, FixedKeys(AzureKeys(sas_token=ended))).get(key),
        lambda: opened(config, FixedKeys(AzureKeys(sas_token=ended))).size(key),
        lambda: opened(config, FixedKeys(AzureKeys(sas_token=ended))).write(key, Document(b"x")),
    ):
        with pytest.raises(AccessDeniedError, match="wrong or has expired") as raised:
            call()
        assert ended.partition("sig=")[2] not in str(raised.value)


class Issuer(ThreadingHTTPServer):
    """An issuer of tokens, which accepts one token of a service account."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _IssuerHandler)
        self.accepts = b"token-of-the-service-account"
        self.asked = list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _IssuerHandler(BaseHTTPRequestHandler):
    server: Issuer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        if self.server.accepts not in body:
            self._reply(401, {"error": "invalid_client"})
            return
        now = int(SystemClock().utc_now().timestamp())
        claims = {
            "aud": "https://storage.azure.com",
            "iss": "https://sts.windows.net/tenant/",
            "iat": now - 60,
            "nbf": now - 60,
            "exp": now + 3600,
        }
        parts = ({"alg": "none", "typ": "JWT"}, claims)
        token = ".".join(
            base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
            for part in parts
        )
        self._reply(200, {"access_token": f"{token}.c2ln", "expires_in": 3600})

    def _reply(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing to stderr."""


@pytest.fixture(scope="module")
def secure_azurite() -> Iterator[AzuriteServer]:
    with AzuriteServer(certificates=Authority()) as server:
        yield server


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_web_identity_of_the_environment_is_exchanged_for_a_token(
    secure_azurite: AzuriteServer, issuer: Issuer, prefix: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_bytes(issuer.accepts)
    environment = {
        "AZURE_STORAGE_ENDPOINT": f"https://{secure_azurite.endpoint}",
        "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "token"),
        "AZURE_CLIENT_ID": "client",
        "AZURE_TENANT_ID": "tenant",
        "AZURE_AUTHORITY_HOST": f"{issuer.url}/",
        "SSL_CERT_FILE": secure_azurite.ca_file or "",
    }
    url = parse_store_url(f"az://{ACCOUNT}/{secure_azurite.bucket}/{prefix}")
    store = access_by_url(url, environment).open()
    store.write(f"{prefix}/one", Document(payload(LONG)))
    check_same(store.get(f"{prefix}/one"), payload(LONG))
    store.close()
    assert set(issuer.asked) == {"/tenant/oauth2/v2.0/token"}


def test_a_web_identity_in_a_pod_is_exchanged_or_refused_by_name(
    secure_azurite: AzuriteServer, issuer: Issuer, prefix: str, tmp_path: Path
) -> None:
    (tmp_path / WEB_TOKEN_FILE).write_bytes(issuer.accepts)
    (tmp_path / "ca.crt").write_text(Path(secure_azurite.ca_file or "").read_text())
    place = secure_azurite.config(prefix)
    config = StoreConfig(
        place.endpoint,
        True,
        place.bucket,
        prefix,
        "",
        account=ACCOUNT,
        client_id="client",
        tenant_id="tenant",
        authority=issuer.url,
    )
    report = tmp_path / "report"
    assert probe_store(config.to_json(), str(tmp_path), report) == 0
    assert json.loads(report.read_text())["available"]
    (tmp_path / WEB_TOKEN_FILE).write_text("another token")
    assert probe_store(config.to_json(), str(tmp_path), report) == 0
    found = json.loads(report.read_text())
    assert (found["available"], found["reason"]) == (False, "AccessDenied")
    assert "no token for the identity: 401" in found["message"]
    (tmp_path / WEB_TOKEN_FILE).unlink()
    assert probe_store(config.to_json(), str(tmp_path), report) == 0
    assert json.loads(report.read_text())["reason"] == "ConfigurationInvalid"


def test_a_certificate_that_does_not_verify_is_named(
    secure_azurite: AzuriteServer, opened: Callable[..., CloudObjectStore]
) -> None:
    store = opened(secure_azurite.config(), secure_azurite.credentials)
    with pytest.raises(CertificateError, match="the server's certificate does not verify"):
        store.get("a/one")


# --------------------------------------------------------------------------- bad input


WRONG_KEY = base64.b64encode(b"of nobody".ljust(64)).decode()


def environment_of(server: AzuriteServer, **changes: str) -> dict[str, str]:
    return {**server.client_environment(), **changes}


@pytest.mark.fault("A store of Azure refuses the keys, does not exist, or does not answer")
@pytest.mark.parametrize(
    ("account", "container", "changes", "error", "text"),
    [
        (ACCOUNT, "holdfast", {"AZURE_STORAGE_KEY": WRONG_KEY}, AccessDeniedError, "the key or"),
        (ACCOUNT, "holdfast", {"AZURE_STORAGE_KEY": "short!"}, ConfigError, "is not Base64"),
        (ACCOUNT, "holdfast", {"AZURE_STORAGE_KEY": ""}, ConfigError, "no keys for Azure"),
        (ACCOUNT, "holdfast", {"AZURE_STORAGE_SAS_TOKEN": "a=b"}, ConfigError, "has no sig="),
        (
            ACCOUNT,
            "holdfast",
            {"AZURE_STORAGE_KEY": "", "AZURE_FEDERATED_TOKEN_FILE": "/x"},
            ConfigError,
            "AZURE_CLIENT_ID and AZURE_TENANT_ID is not",
        ),
        (ACCOUNT, "absent", {}, NotFoundError, "create the container, or correct its name"),
        ("nobody", "holdfast", {}, NotFoundError, "or that of the account"),
        (
            "nobody",
            "holdfast",
            {"AZURE_STORAGE_ENDPOINT": "https://nobody.blob.invalid"},
            UnavailableError,
            "an account that does not exist has none",
        ),
        (
            ACCOUNT,
            "holdfast",
            {"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9"},
            UnavailableError,
            "Connection refused",
        ),
        (
            ACCOUNT,
            "holdfast",
            {"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/account"},
            ConfigError,
            "without the account as its path",
        ),
    ],
    ids=[
        "wrong key",
        "key that is none",
        "no key",
        "signature that is none",
        "half an identity",
        "no container",
        "no account",
        "host without an address",
        "endpoint down",
        "endpoint with a path",
    ],
)
def test_a_store_that_cannot_be_used_says_why(
    azurite: AzuriteServer,
    prefix: str,
    account: str,
    container: str,
    changes: dict[str, str],
    error: type[HoldfastError],
    text: str,
) -> None:
    url = parse_store_url(f"az://{account}/{container}/{prefix}")
    retrier = Retrier(RetryPolicy(max_attempts=2, base_seconds=0.01))
    with pytest.raises(error, match=text) as raised:
        store = access_by_url(url, environment_of(azurite, **changes)).open(retrier=retrier)
        try:
            store.write(f"{prefix}/one", Document(b"x"))
        finally:
            store.close()
    assert WRONG_KEY not in str(raised.value)


def test_a_probe_in_a_pod_finds_every_feature_and_deletes_what_it_wrote(
    azurite: AzuriteServer, prefix: str, tmp_path: Path, opened: Callable[..., CloudObjectStore]
) -> None:
    (tmp_path / "accountKey").write_text(ACCOUNT_KEY)
    config = azurite.config(prefix)
    assert probe_store(config.to_json(), str(tmp_path), tmp_path / "report") == 0
    found = json.loads((tmp_path / "report").read_text())
    assert (found["available"], found["reason"]) == (True, "Available")
    assert set(found["features"].values()) == {True}
    assert opened(config, azurite.credentials).list(f"{prefix}/").objects == ()
    missing = StoreConfig(azurite.endpoint, False, "absent", "", "", account=ACCOUNT)
    assert probe_store(missing.to_json(), str(tmp_path), tmp_path / "report") == 0
    assert json.loads((tmp_path / "report").read_text())["reason"] == "BucketNotFound"
    (tmp_path / "accountKey").unlink()
    assert probe_store(config.to_json(), str(tmp_path), tmp_path / "report") == 0
    report = json.loads((tmp_path / "report").read_text())
    assert report["reason"] == "ConfigurationInvalid"
    assert "expected a file accountKey or sasToken" in report["message"]
