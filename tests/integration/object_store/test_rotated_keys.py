"""Keys that end in the middle of a transfer."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from tests.support.servers.hostile_s3 import (
    Answer,
    Matches,
    Seen,
    on,
)
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID
from tests.support.tiers.store_bench import (
    CHECKPOINT,
    COMPLETE,
    CREATE,
    NAMESPACE,
    PUT_WHOLE,
    SECOND_PART,
    Bench,
)
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.store.s3.credentials import FileCredentials, Keys
from holdfast_core.store.s3.errors import Retrier

pytestmark = pytest.mark.integration


class Rotation:
    """Credentials in files, as in a mounted Secret, which are replaced during a request.

    The store revokes the old credentials while the first request of a kind is on its way with them.
    """

    def __init__(self, directory: Path, server: StoreServer, prefix: str) -> None:
        self.directory = directory
        self._server = server
        self._prefix = prefix
        self._keys: Keys | None = None
        self.rotated = 0
        directory.mkdir()
        self.rotate()

    def rotate(self) -> None:
        old, new = self._keys, Keys(secrets.token_hex(8), secrets.token_hex(16))
        self._server.add_user(new, self._prefix)
        (self.directory / "accessKey").write_text(new.access_key)
        (self.directory / "secretKey").write_text(new.secret_key)
        if old is not None:
            self._server.remove_user(old)
        self._keys = new
        self.rotated += 1

    def within(self, kind: Matches) -> Matches:
        """Return a condition that never matches, and rotates the keys at the first request of this kind."""

        def matches(seen: Seen) -> bool:
            if kind(seen) and self.rotated == 1:
                self.rotate()
            return False

        return matches


@pytest.mark.fault("The keys of the store end in the middle of a transfer")
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("upload", SECOND_PART),
        ("upload", COMPLETE),
        ("whole", PUT_WHOLE),
        ("download", on("GET", query="")),
        ("manifest", on("GET", query="")),
    ],
    ids=["part", "completion", "put", "range", "document"],
)
def test_keys_that_end_in_the_middle_are_read_again_and_it_goes_on(
    bench: Bench, store: StoreConfig, quick: Retrier, tmp_path: Path, way: str, kind: Matches
) -> None:
    rotation = Rotation(tmp_path / "keys", bench.server, store.prefix)
    bench.proxy.add(rotation.within(kind), Answer(500))
    if way in ("download", "manifest"):
        bench.honest.upload_shard(NAMESPACE, bench.parts)
        bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b"{}")
    config = bench.server.config(store.prefix, endpoint=bench.proxy.endpoint)
    tier = s3_tier(config, FileCredentials(rotation.directory), retrier=quick)
    ref = bench.parts.record.ref
    match way:
        case "upload":
            tier.upload_shard(NAMESPACE, bench.parts)
            assert bench.proxy.count(CREATE) == 1
            assert bench.is_stored(bench.parts)
        case "whole":
            tier.upload_shard(NAMESPACE, bench.whole)
            assert bench.is_stored(bench.whole)
        case "download":
            assert tier.download_shard(NAMESPACE, ref, bench.writers()) == bench.parts.record
        case _:
            assert tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT) == b"{}"
    assert rotation.rotated == 2
    tier.close()


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (404, "XAdminUserNotFound")])
def test_a_refusal_of_keys_that_is_no_403(
    bench: Bench, store: StoreConfig, quick: Retrier, tmp_path: Path, status: int, code: str
) -> None:
    rotation = Rotation(tmp_path / "keys", bench.server, store.prefix)
    bench.proxy.add(rotation.within(SECOND_PART), Answer(500))
    bench.proxy.add(SECOND_PART, Answer(status, code))
    config = bench.server.config(store.prefix, endpoint=bench.proxy.endpoint)
    tier = s3_tier(config, FileCredentials(rotation.directory), retrier=quick)
    tier.upload_shard(NAMESPACE, bench.parts)
    assert bench.is_stored(bench.parts)
    tier.close()
