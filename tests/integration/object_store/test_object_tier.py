"""The object tier against a real MinIO without injected faults."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.servers.hostile_s3 import Answer, HostileProxy, Replace, Seen, on
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID, rank_layout, shard_file, shard_header
from tests.support.shards.shard_files import CopyWriters, flip_bit, write_shard
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CorruptionError,
    TierError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, RestartRound, ShardRef, Step
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.credentials import FileCredentials
from holdfast_core.store.s3.errors import Retrier
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20
NAMESPACE = "team-a"
SIZES = {"empty": 0, "small": 70_001, "one-part": 4 * MIB, "parts": 11 * MIB + 4097}


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


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_a_shard_comes_back_as_it_was(
    tmp_path: Path, tier: ObjectTier, server: StoreServer, store: StoreConfig, size: int
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    with write_shard(source, shard_header(size), os.urandom(size)) as reader:
        tier.upload_shard(NAMESPACE, reader)
        ref = reader.record.ref
        assert tier.download_shard(NAMESPACE, ref, CopyWriters(target)) == reader.record
        assert unfinished(S3Client(store, server.credentials), store.prefix, ref) == 0
    (before,), (after,) = source.iterdir(), target.iterdir()
    assert after.read_bytes() == before.read_bytes()
    assert keys_below(server, store.prefix) == [
        f"{store.prefix}/team-a/{JOB_UID}/shards/s000000000010-r000000/"
        f"rank000000-{ref.blake3[3:19]}.shard"
    ]


@pytest.mark.parametrize("size", [70_001, 11 * MIB], ids=["whole", "parts"])
def test_the_second_upload_sends_no_bytes(
    tmp_path: Path, tier: ObjectTier, proxied: ObjectTier, proxy: HostileProxy, size: int
) -> None:
    with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
        tier.upload_shard(NAMESPACE, reader)
        proxied.upload_shard(NAMESPACE, reader)
    assert [seen.method for seen in proxy.requests] == ["HEAD"]


@pytest.mark.parametrize("size", [70_001, 11 * MIB], ids=["whole", "parts"])
def test_something_else_under_the_key_is_never_overwritten(
    tmp_path: Path, tier: ObjectTier, server: StoreServer, store: StoreConfig, size: int
) -> None:
    with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
        tier.upload_shard(NAMESPACE, reader)
        (key,) = keys_below(server, store.prefix)
        with (tmp_path / "other").open("w+b") as file:
            file.write(b"other")
            file.seek(0)
            server.admin().put_object(server.bucket, key, file, 5)
        with pytest.raises(AlreadyExistsError, match="found 5 bytes"):
            tier.upload_shard(NAMESPACE, reader)
    answer = server.admin().get_object(server.bucket, key)
    assert answer.read() == b"other"
    answer.close()


@pytest.mark.parametrize("size", [200_000, 11 * MIB], ids=["whole", "parts"])
def test_a_shard_that_went_bad_on_the_node_is_not_stored(
    tmp_path: Path, tier: ObjectTier, server: StoreServer, store: StoreConfig, size: int
) -> None:
    """The store refuses the bytes, because the checksum in the request is that of the original tensors."""
    with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
        (path,) = tmp_path.iterdir()
        flip_bit(path, 4096 + 1000)
        with pytest.raises(CorruptionError, match="chunk"):
            tier.upload_shard(NAMESPACE, reader)
        client = S3Client(store, server.credentials)
        assert unfinished(client, store.prefix, reader.record.ref) == 0
    assert keys_below(server, store.prefix) == []


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


def test_a_checkpoint_is_deleted_manifest_first_and_nothing_else_is(
    tmp_path: Path,
    tier: ObjectTier,
    proxied: ObjectTier,
    proxy: HostileProxy,
    server: StoreServer,
    store: StoreConfig,
) -> None:
    for step in (100, 1000):
        for rank in range(3):
            with write_shard(tmp_path, shard_header(10, step=step, rank=rank), b"x" * 10) as reader:
                tier.upload_shard(NAMESPACE, reader)
        tier.put_manifest(NAMESPACE, JOB_UID, checkpoint(step), b"{}")
    left: list[list[str]] = []

    def look(seen: Seen) -> bool:
        """Note what is left of the checkpoint before each request that deletes."""
        if seen.method == "POST":
            assert seen.query == "delete="
            left.append([k for k in keys_below(server, store.prefix) if "s000000000100" in k])
        return False

    proxy.add(look, Answer(500))
    proxied.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(100))
    assert [len(keys) for keys in left] == [4, 3]
    assert not any("/manifests/" in key for key in left[1])
    assert all("s000000001000" in key for key in keys_below(server, store.prefix))
    assert len(keys_below(server, store.prefix)) == 4
    proxied.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(100))


WRITERS = 8


def race(action: Callable[[int], object]) -> list[object]:
    """Return the results or errors of 8 writers that start together."""
    start = threading.Barrier(WRITERS)

    def run(number: int) -> object:
        start.wait(HANG_SECONDS)
        try:
            return action(number)
        except AlreadyExistsError as error:
            return error

    with ThreadPoolExecutor(WRITERS) as threads:
        return list(threads.map(run, range(WRITERS)))


def test_eight_writers_of_different_manifests_one_wins(tier: ObjectTier) -> None:
    for step in range(10):
        documents = [b'{"writer":%d}' % number for number in range(WRITERS)]
        results = race(
            lambda n, s=step, d=documents: tier.put_manifest(  # type: ignore[misc]
                NAMESPACE, JOB_UID, checkpoint(s), d[n]
            )
        )
        winners = [n for n, r in enumerate(results) if not isinstance(r, AlreadyExistsError)]
        assert len(winners) == 1
        stored = tier.get_manifest(NAMESPACE, JOB_UID, checkpoint(step))
        assert stored == documents[winners[0]]


@pytest.mark.parametrize("size", [100_000, 6 * MIB], ids=["whole", "parts"])
def test_eight_writers_of_the_same_shard_leave_one_object_and_no_upload(
    tmp_path: Path, tier: ObjectTier, server: StoreServer, store: StoreConfig, size: int
) -> None:
    with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
        results = race(lambda _: tier.upload_shard(NAMESPACE, reader))
        assert results == [None] * WRITERS
        client = S3Client(store, server.credentials)
        assert unfinished(client, store.prefix, reader.record.ref) == 0
    assert len(keys_below(server, store.prefix)) == 1


def test_keys_that_are_corrected_are_used_without_a_restart(
    tmp_path: Path, server: StoreServer, store: StoreConfig, quick: Retrier
) -> None:
    right = server.credentials.keys
    (tmp_path / "accessKey").write_text(right.access_key)
    (tmp_path / "secretKey").write_text("wrong-for-now")
    tier = s3_tier(store, FileCredentials(tmp_path), retrier=quick)
    with pytest.raises(AccessDeniedError, match="SignatureDoesNotMatch") as caught:
        tier.put_manifest(NAMESPACE, JOB_UID, checkpoint(1), b"{}")
    assert "wrong-for-now" not in str(caught.value)
    (tmp_path / "secretKey").write_text(right.secret_key)
    tier.put_manifest(NAMESPACE, JOB_UID, checkpoint(1), b"{}")
    tier.close()


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
