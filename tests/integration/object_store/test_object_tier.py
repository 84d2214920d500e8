"""The object tier against a real MinIO without injected faults."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.servers.hostile_s3 import HostileProxy, Replace, on
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID, rank_layout, shard_file, shard_header
from tests.support.shards.shard_files import CopyWriters, write_shard

from holdfast.testing.object_store_contract import WRITERS, at_once
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import (
    AccessDeniedError,
    CorruptionError,
    TierError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, RestartRound, ShardRef, Step
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20
NAMESPACE = "team-a"


def checkpoint(step: int, restart_round: int = 0) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(restart_round))


def keys_below(server: StoreServer, prefix: str) -> list[str]:
    listed = server.admin().list_objects(server.bucket, prefix=prefix, recursive=True)
    return [str(item.object_name) for item in listed]


def unfinished(client: S3Client, tier_prefix: str, ref: ShardRef) -> int:
    """Return the unfinished uploads of exactly this shard."""
    key = (
        f"{tier_prefix}/{NAMESPACE}/{ref.job_uid}/shards/s{ref.step:012d}-r{ref.round:06d}/"
        f"rank{ref.rank:06d}-{ref.blake3[3:19]}.shard"
    )
    return len(client.list_uploads(key)[0])


@pytest.mark.parametrize("size", [70_001, 11 * MIB], ids=["whole", "parts"])
def test_the_second_upload_sends_no_bytes(
    tmp_path: Path, tier: ObjectTier, proxied: ObjectTier, proxy: HostileProxy, size: int
) -> None:
    with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
        tier.upload_shard(NAMESPACE, reader)
        proxied.upload_shard(NAMESPACE, reader)
    assert [seen.method for seen in proxy.requests] == ["HEAD"]


def test_a_shard_that_is_another_one_is_refused(
    tmp_path: Path, tier: ObjectTier, server: StoreServer, store: StoreConfig
) -> None:
    """The file has the right name but contains another rank's shard, as after a misdirected write."""
    with write_shard(tmp_path, shard_header(1000, rank=1), os.urandom(1000)) as reader:
        tier.upload_shard(NAMESPACE, reader)
        ref = reader.record.ref
    (key,) = keys_below(server, store.prefix)
    wrong = ShardRef(ref.job_uid, ref.step, ref.round, shard_header(0, rank=2).rank, ref.blake3)
    data = server.admin().get_object(server.bucket, key)
    other = key.replace("rank000001", "rank000002")
    with (tmp_path / "x").open("w+b") as file:
        length = file.write(data.read())
        file.seek(0)
        server.admin().put_object(server.bucket, other, file, length)
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(CorruptionError, match="expected"):
        tier.download_shard(NAMESPACE, wrong, CopyWriters(target))
    assert list(target.iterdir()) == []


def test_manifests_are_listed_in_order_over_pages_and_foreign_names_are_not(
    tier: ObjectTier, server: StoreServer, store: StoreConfig
) -> None:
    client = S3Client(store, server.credentials)
    wanted = [checkpoint(step, step % 3) for step in range(1005)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda c: tier.put_manifest(NAMESPACE, JOB_UID, c, b"{}"), wanted))
    for name in ("manifests/latest.json", "manifests/s1/r1.json", "manifests/../x", "shards/y"):
        key = f"{store.prefix}/{NAMESPACE}/{JOB_UID}/{name}"
        with open(os.devnull, "rb") as nothing:
            if ".." not in name:
                server.admin().put_object(server.bucket, key, nothing, 0)
    first_page = client.list_objects(f"{store.prefix}/{NAMESPACE}/{JOB_UID}/manifests/")
    assert len(first_page.listed) == 1000 and first_page.next
    assert tier.list_manifests(NAMESPACE, JOB_UID) == tuple(wanted)


@pytest.mark.fault("A layout in a real store has other bytes")
def test_a_layout_with_other_bytes_is_refused(
    tier: ObjectTier, server: StoreServer, store: StoreConfig, tmp_path: Path
) -> None:
    ref = shard_file(shard_header(1), b"x")[1].ref
    document = rank_layout()
    tier.put_layout(NAMESPACE, ref, document)
    tier.put_layout(NAMESPACE, ref, document)
    assert tier.get_layout(NAMESPACE, ref, digest_of(document)) == document
    (key,) = keys_below(server, store.prefix)
    (tmp_path / "x").write_bytes(b'{"tensors":1}')
    server.admin().fput_object(server.bucket, key, str(tmp_path / "x"))
    with pytest.raises(CorruptionError, match="expected digest"):
        tier.get_layout(NAMESPACE, ref, digest_of(document))


@pytest.mark.parametrize("size", [100_000, 6 * MIB], ids=["whole", "parts"])
def test_eight_writers_of_the_same_shard_leave_one_object_and_no_upload(
    tmp_path: Path, tier: ObjectTier, server: StoreServer, store: StoreConfig, size: int
) -> None:
    with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
        errors = at_once(lambda _: tier.upload_shard(NAMESPACE, reader))
        assert errors == [None] * WRITERS
        client = S3Client(store, server.credentials)
        assert unfinished(client, store.prefix, reader.record.ref) == 0
    assert len(keys_below(server, store.prefix)) == 1


@pytest.mark.fault("A reply of success to a deletion says that objects were not deleted")
def test_an_object_that_the_store_does_not_delete_is_an_error(
    proxied: ObjectTier, proxy: HostileProxy
) -> None:
    """One reply answers for many objects, so it is a success although some of them were not deleted."""

    def result(code: str) -> bytes:
        error = f"<Error><Key>k</Key><Code>{code}</Code><Message>said the store</Message></Error>"
        return f"<DeleteResult>{error}</DeleteResult>".encode()

    deletes = on("POST", query="delete")
    proxy.add(deletes, Replace(200, result("AccessDenied")))
    with pytest.raises(AccessDeniedError, match="said the store"):
        proxied.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(1))
    proxy.add(deletes, Replace(200, result("InternalError")), times=2)
    proxied.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(1))
    proxy.add(deletes, Replace(200, result("NoSuchKey")))
    proxied.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(1))
    proxy.add(deletes, Replace(200, b"<html>a login page</html>"))
    with pytest.raises(TierError, match="expected a DeleteResult"):
        proxied.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(1))
