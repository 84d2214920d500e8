"""The usage of a real store is what a plain listing says, before and after a sweep."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID, manifest, shard_header
from tests.support.shards.shard_files import write_shard

from holdfast_core.contract import StoreConfig
from holdfast_core.format.canonical import crc32c
from holdfast_core.store.s3.client import CHECKSUM_HEADER, S3Client, S3Request, encode_crc
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.usage import Orphan, sweep, usage_of
from holdfast_core.tiers.objects import ObjectStore

pytestmark = pytest.mark.integration
NAMESPACE = "team-a"
AT_ONCE = timedelta(0)


def put(tier: ObjectTier, folder: Path, step: int, round_: int, *, committed: bool) -> None:
    header = shard_header(70_000, step=step, round=round_, world_size=1)
    with write_shard(folder, header, os.urandom(70_000)) as reader:
        tier.upload_shard(NAMESPACE, reader)
        tier.put_layout(NAMESPACE, reader.record.ref, b"{}")
        if committed:
            document = manifest([reader.record]).to_bytes()
            tier.put_manifest(NAMESPACE, JOB_UID, reader.record.ref.checkpoint, document)


def test_the_usage_is_what_a_listing_says(objects: ObjectStore, tmp_path: Path) -> None:
    prefix = f"usage/{secrets.token_hex(4)}"
    tier = ObjectTier(objects, prefix)
    put(tier, tmp_path, 10, 0, committed=False)
    put(tier, tmp_path, 20, 1, committed=True)
    put(tier, tmp_path, 30, 1, committed=False)

    def listed() -> tuple[int, int]:
        found = objects.list(f"{prefix}/").objects
        sizes = [objects.size(item.key) for item in found]
        assert [item.size_bytes for item in found] == sizes
        return len(found), sum(item.size_bytes for item in found)

    usage = usage_of(tier, AT_ONCE)
    assert (usage.total.objects, usage.total.size_bytes) == listed()
    assert usage.orphans[Orphan.SHARDS].objects == 2
    assert usage.orphans[Orphan.LAYOUTS].objects == 2
    before = usage.total.size_bytes
    usage = sweep(tier, usage, AT_ONCE)
    assert (usage.total.objects, usage.total.size_bytes) == listed()
    assert before - usage.total.size_bytes == usage.swept.size_bytes > 70_000
    assert usage.orphans[Orphan.SHARDS].objects == 1, "step 30 may be on its way"
    assert [c.step for c in tier.list_manifests(NAMESPACE, JOB_UID)] == [20]
    usage = sweep(tier, usage, AT_ONCE, ended=(JOB_UID,))
    assert usage.orphans[Orphan.SHARDS].objects == 0
    tier.close()


def test_an_unfinished_upload_has_count_bytes_and_age(
    store: StoreConfig, tier: ObjectTier, server: StoreServer
) -> None:
    """MinIO lists unfinished uploads for an exact key only."""
    folder = f"{store.prefix}/{NAMESPACE}/{JOB_UID}/shards/s000000000001-r000000"
    key, part = f"{folder}/rank000000-{'0' * 16}.shard", os.urandom(5 << 20)
    client = S3Client(store, server.credentials)
    query = {"partNumber": "1", "uploadId": client.create_upload(key)}
    headers = {CHECKSUM_HEADER: encode_crc(crc32c(part))}
    client.send(S3Request("PUT", key, query, headers, part)).checked()
    seen = client.list_uploads(store.prefix)[0]
    uploads = usage_of(tier, AT_ONCE).orphans[Orphan.UPLOADS]
    assert (uploads.objects, uploads.size_bytes) == (len(seen), len(seen) * len(part))
    assert tier.all_jobs.abort_stale(AT_ONCE) == len(seen)
    assert usage_of(tier, AT_ONCE).orphans[Orphan.UPLOADS].objects == 0
    client.close()
