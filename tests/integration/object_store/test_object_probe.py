"""The probe reports what is wrong with a store, and leaves no objects behind."""

from __future__ import annotations

import json
import random
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.servers.credentials import StaticCredentials
from tests.support.servers.hostile_s3 import (
    Action,
    Answer,
    CutRequest,
    DropRequestHeader,
    Hang,
    HostileProxy,
    LoseReply,
    Matches,
    Replace,
    Seen,
    SetReplyHeader,
    on,
)
from tests.support.servers.ports import closed_port
from tests.support.servers.store_server import ACCESS_KEY, SECRET_KEY, StoreServer

from holdfast_core.contract import StoreConfig
from holdfast_core.store.probe import ProbedFeatures, ProbeReason, probe
from holdfast_core.store.s3.credentials import FileCredentials, Keys
from holdfast_core.store.s3.errors import Retrier, RetryPolicy
from holdfast_core.store.s3.http import Timeouts

pytestmark = pytest.mark.integration
ALL = ProbedFeatures(conditional_put=True, checksum=True, multipart=True, range_get=True)
SILENT = Timeouts(idle_seconds=10.0)
"""For a server that does not answer one kind of request. To others it may need seconds on a busy machine."""


class Unreliable:
    """Matches three of ten requests, and no request five times in a row."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._in_a_row = 0
        self._lock = threading.Lock()

    def __call__(self, seen: Seen) -> bool:
        with self._lock:
            fails = self._random.random() < 0.3 and self._in_a_row < 4
            self._in_a_row = self._in_a_row + 1 if fails else 0
            return fails


@pytest.mark.fault("A store fails three of ten requests")
@pytest.mark.parametrize("action", [Answer(503, "SlowDown"), LoseReply(), CutRequest(0)])
def test_a_store_that_fails_three_of_ten_requests_is_probed_to_the_end(
    server: StoreServer, store: StoreConfig, action: Action
) -> None:
    for seed in range(5):
        with HostileProxy(server.endpoint, Keys(ACCESS_KEY, SECRET_KEY)) as proxy:
            proxy.add(Unreliable(seed), action, times=10_000)
            report = probe(
                replace(store, endpoint=proxy.endpoint),
                server.credentials,
                retrier=Retrier(RetryPolicy(max_attempts=6), sleep=lambda seconds: None),
            )
        assert (report.reason, report.features) == (ProbeReason.AVAILABLE, ALL), report.message


def left_below(server: StoreServer, store: StoreConfig) -> list[str]:
    listed = server.admin().list_objects(server.bucket, prefix=store.prefix, recursive=True)
    return [str(item.object_name) for item in listed]


def test_a_good_store(server: StoreServer, store: StoreConfig) -> None:
    report = probe(store, server.credentials)
    assert (report.available, report.reason, report.features) == (True, ProbeReason.AVAILABLE, ALL)
    assert left_below(server, store) == []
    assert json.loads(report.to_json()) == {
        "available": True,
        "reason": "Available",
        "message": f"bucket 'holdfast' at {server.endpoint} passed every check",
        "features": {
            "conditionalPut": True,
            "checksum": True,
            "multipart": True,
            "rangeGet": True,
        },
    }


@pytest.mark.parametrize(
    ("keys", "code", "advice"),
    [
        (
            Keys(ACCESS_KEY, "not-the-secret"),
            "SignatureDoesNotMatch",
            "the secret key does not belong",
        ),
        (
            Keys("nobody", "not-the-secret"),
            "InvalidAccessKeyId|XAdminUserNotFound",
            "has no such access key",
        ),
    ],
    ids=["wrong-secret", "unknown-key"],
)
def test_wrong_keys(
    server: StoreServer, store: StoreConfig, keys: Keys, code: str, advice: str
) -> None:
    report = probe(store, StaticCredentials(keys))
    assert (report.available, report.reason) == (False, ProbeReason.ACCESS_DENIED)
    assert re.search(code, report.message)
    for text in (advice, server.endpoint, "'holdfast'"):
        assert text in report.message
    assert "not-the-secret" not in report.to_json()


def test_missing_bucket(server: StoreServer, store: StoreConfig) -> None:
    report = probe(replace(store, bucket="no-such-bucket"), server.credentials)
    assert (report.available, report.reason) == (False, ProbeReason.BUCKET_NOT_FOUND)
    for text in ("NoSuchBucket", "The specified bucket does not exist", "'no-such-bucket'"):
        assert text in report.message


def test_a_copy_to_a_closed_port_is_unavailable(
    server: StoreServer, store: StoreConfig, quick: Retrier
) -> None:
    with closed_port() as port:
        endpoint = f"127.0.0.1:{port}"
        report = probe(replace(store, endpoint=endpoint), server.credentials, retrier=quick)
    assert (report.available, report.reason) == (False, ProbeReason.UNREACHABLE)
    assert endpoint in report.message and "refused" in report.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: replace(s, endpoint="no-such-host.invalid:9000"), ProbeReason.UNREACHABLE),
        (lambda s: replace(s, endpoint="http://x:1"), ProbeReason.CONFIGURATION_INVALID),
        (lambda s: replace(s, secure=True), ProbeReason.UNREACHABLE),
    ],
    ids=["no-such-host", "scheme", "tls-to-a-plain-port"],
)
def test_endpoints_that_cannot_work(
    server: StoreServer,
    store: StoreConfig,
    quick: Retrier,
    change: Callable[[StoreConfig], StoreConfig],
    reason: ProbeReason,
) -> None:
    report = probe(change(store), server.credentials, retrier=quick)
    assert (report.available, report.reason) == (False, reason)


def test_no_credentials(store: StoreConfig, tmp_path: Path) -> None:
    report = probe(store, FileCredentials(tmp_path))
    assert (report.available, report.reason) == (False, ProbeReason.CONFIGURATION_INVALID)
    assert "expected files accessKey and secretKey" in report.message


PUT, GET, HEAD = on("PUT", query=""), on("GET", query=""), on("HEAD")


@pytest.mark.parametrize(
    ("matches", "action", "reason", "text"),
    [
        (PUT, Answer(503, "SlowDown"), ProbeReason.UNREACHABLE, "SlowDown"),
        (PUT, Hang(), ProbeReason.UNREACHABLE, "no reply in time"),
        (PUT, LoseReply(), ProbeReason.UNREACHABLE, "PUT"),
        (PUT, Answer(507, "XMinioStorageFull"), ProbeReason.STORAGE_FULL, "XMinioStorageFull"),
        (
            PUT,
            Answer(400, "AuthorizationHeaderMalformed", "expecting 'eu-west-1'"),
            ProbeReason.CONFIGURATION_INVALID,
            "expecting 'eu-west-1'; check region",
        ),
        (PUT, Answer(404, "XAdminUserNotFound"), ProbeReason.ACCESS_DENIED, "XAdminUserNotFound"),
        (PUT, Replace(405, b"<html>nginx</html>"), ProbeReason.NOT_S3, "nginx"),
        (PUT, Replace(200, b"hello"), ProbeReason.NOT_S3, "check the endpoint"),
        (on("GET"), Answer(403, "AccessDenied"), ProbeReason.ACCESS_DENIED, "AccessDenied"),
        (
            on("GET", query="list-type=2"),
            Answer(403, "AccessDenied"),
            ProbeReason.ACCESS_DENIED,
            "AccessDenied",
        ),
        (GET, Answer(404, "NoSuchKey"), ProbeReason.INCONSISTENT, "read-after-write"),
        (
            on("GET", query="list-type=2"),
            Replace(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"),
            ProbeReason.INCONSISTENT,
            "found 0 keys",
        ),
        (
            PUT,
            DropRequestHeader("x-amz-checksum-crc32c"),
            ProbeReason.CHECKSUM_UNSUPPORTED,
            "half a shard",
        ),
        (
            HEAD,
            SetReplyHeader("x-amz-checksum-crc32c", ""),
            ProbeReason.CHECKSUM_UNSUPPORTED,
            "half a shard",
        ),
        (
            on("POST", query="uploads="),
            Answer(501, "NotImplemented"),
            ProbeReason.MULTIPART_UNSUPPORTED,
            "multipart",
        ),
        (
            on("POST", query="uploadId="),
            Answer(400, "InvalidRequest"),
            ProbeReason.MULTIPART_UNSUPPORTED,
            "multipart",
        ),
    ],
    ids=[
        "busy",
        "silent",
        "lost",
        "full",
        "region",
        "unknown-key-as-404",
        "another-web-server",
        "says-yes-to-everything",
        "may-write-not-read",
        "may-not-list",
        "stale-read",
        "stale-list",
        "ignores-checksums",
        "forgets-checksums",
        "no-multipart",
        "multipart-not-completed",
    ],
)
def test_a_store_that_cannot_be_used(
    server: StoreServer,
    store: StoreConfig,
    proxy: HostileProxy,
    quick: Retrier,
    matches: Matches,
    action: Action,
    reason: ProbeReason,
    text: str,
) -> None:
    proxy.add(matches, action, times=1000)
    config = replace(store, endpoint=proxy.endpoint)
    if isinstance(action, Hang):
        once = Retrier(RetryPolicy(max_attempts=1))
        report = probe(config, server.credentials, retrier=once, timeouts=SILENT)
    else:
        report = probe(config, server.credentials, retrier=quick)
    assert (report.available, report.reason) == (False, reason)
    assert text in report.message
    assert len(report.to_json()) < 4096
    assert left_below(server, store) == []


def test_a_range_that_is_answered_with_everything(
    server: StoreServer, store: StoreConfig, proxy: HostileProxy
) -> None:
    proxy.add(lambda seen: "range" in seen.headers, Replace(200, b"everything"), times=9)
    report = probe(replace(store, endpoint=proxy.endpoint), server.credentials)
    assert (report.available, report.reason) == (False, ProbeReason.RANGE_GET_UNSUPPORTED)


def test_an_ignored_condition_is_switched_off_and_said(
    server: StoreServer, store: StoreConfig, proxy: HostileProxy
) -> None:
    proxy.add(PUT, DropRequestHeader("If-None-Match"), times=1000)
    report = probe(replace(store, endpoint=proxy.endpoint), server.credentials)
    assert report.available
    assert report.features == replace(ALL, conditional_put=False)
    assert "ignores conditional writes" in report.message


def test_a_store_that_never_deletes_is_said(
    server: StoreServer, store: StoreConfig, proxy: HostileProxy
) -> None:
    proxy.add(on("POST", query="delete"), Answer(403, "AccessDenied"), times=1000)
    report = probe(replace(store, endpoint=proxy.endpoint), server.credentials)
    assert report.available
    assert "retention cannot" in report.message and "AccessDenied" in report.message


def test_t6_a_key_that_is_limited_to_its_prefix_is_enough_and_reaches_no_further(
    server: StoreServer, store: StoreConfig
) -> None:
    keys = Keys(secrets.token_hex(8), secrets.token_hex(16))
    server.add_user(keys, store.prefix)
    credentials = StaticCredentials(keys)
    assert probe(store, credentials).features == ALL
    elsewhere = replace(store, prefix="another-tenant")
    report = probe(elsewhere, credentials)
    assert (report.available, report.reason) == (False, ProbeReason.ACCESS_DENIED)
    assert "check the policy" in report.message


def test_a_busy_moment_is_forgiven(
    server: StoreServer, store: StoreConfig, proxy: HostileProxy, quick: Retrier
) -> None:
    proxy.add(PUT, Answer(503, "SlowDown"), times=2)
    report = probe(replace(store, endpoint=proxy.endpoint), server.credentials, retrier=quick)
    assert report.available
