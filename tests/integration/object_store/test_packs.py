"""Packs against real stores: every rank's bits come back, from wherever they are stored."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.object_store.killed import kill_in_upload
from tests.support.servers.hostile_s3 import FreezeRequest, HostileProxy, on
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID, payload, shard_header
from tests.support.shards.shard_files import CopyWriters, flip_bit, write_shard

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import AlreadyExistsError, CorruptionError, NotFoundError
from holdfast_core.format import keys
from holdfast_core.ids import CheckpointId, Rank, ShardRef
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.chunks import file_span
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import PackIndex, pack_index
from holdfast_core.shards.pack_plan import Earlier, plan_pack, shared_with
from holdfast_core.shards.record import CHUNK_BYTES
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.tier import S3ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20
NAMESPACE = "team-a"


class Replicas:
    """Ranks of one group with their shard files; each uploads what it may not leave out."""

    def __init__(self, directory: Path, tier: S3ObjectTier) -> None:
        self.directory = directory
        self.tier = tier
        self.readers: dict[tuple[int, int], DiskShardReader] = {}
        self._copies = 0

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()

    def write(self, step: int, *payloads: bytes) -> None:
        for rank, data in enumerate(payloads):
            header = shard_header(len(data), step=step, rank=rank)
            self.readers[step, rank] = write_shard(self.directory, header, data)

    def trailer(self, step: int, rank: int) -> Trailer:
        reader = self.readers[step, rank]
        return Trailer(reader.record, reader.table)

    def ref(self, step: int, rank: int) -> ShardRef:
        return self.readers[step, rank].record.ref

    def planned(self, step: int, rank: int, base: int | None = None) -> PackIndex | None:
        """As its sidecar plans it."""
        group = [Rank(r) for s, r in self.readers if s == step]
        earlier, allowed = None, set()
        if base is not None:
            stored = self.tier.stored(NAMESPACE, self.ref(base, rank))
            earlier = Earlier(stored.trailer, stored.index)
            allowed = {c for s, _ in self.readers for c in [self.ref(s, 0).checkpoint] if s < step}
        own = self.trailer(step, rank)
        shared = [shared_with(own, group, self.trailer(step, r)) for r in group]
        checkpoint = None if base is None else self.ref(base, 0).checkpoint
        return plan_pack(own, shared, earlier, allowed, checkpoint)

    def upload(self, step: int, rank: int, base: int | None = None) -> int:
        """Bytes of the pack; -1 where the shard went up whole."""
        index = self.planned(step, rank, base)
        if index is None:
            self.tier.upload_shard(NAMESPACE, self.readers[step, rank])
            return -1
        self.tier.upload_pack(NAMESPACE, self.readers[step, rank], index)
        return index.stored_bytes + len(pack_index(index))

    def assert_comes_back(self, step: int, rank: int) -> None:
        self._copies += 1
        target = self.directory / f"copy{self._copies}"
        target.mkdir()
        reader = self.readers[step, rank]
        record = self.tier.download_shard(NAMESPACE, self.ref(step, rank), CopyWriters(target))
        assert record == reader.record
        (copy,) = target.iterdir()
        assert copy.read_bytes() == os.pread(reader.fd, reader.record.file_bytes, 0)

    def assert_ranges_come_back(self, step: int, rank: int, runs: list[range]) -> None:
        reader = self.readers[step, rank]
        with self.tier.open_shard(NAMESPACE, self.ref(step, rank)) as source:
            assert source.trailer == self.trailer(step, rank)
            for run, view in zip(runs, source.read(runs), strict=True):
                span = file_span(reader.record.header, run)
                assert bytes(view) == os.pread(reader.fd, span.length_bytes, span.start)


@pytest.fixture
def replicas(tmp_path: Path, tier: S3ObjectTier) -> Iterator[Replicas]:
    gang = Replicas(tmp_path, tier)
    yield gang
    gang.close()


def key_of(store: StoreConfig, ref: ShardRef) -> str:
    return f"{store.prefix}/{NAMESPACE}/{JOB_UID}/{keys.pack_key(ref)}"


def go_bad(server: StoreServer, key: str, tmp_path: Path) -> None:
    """A bit of an object flips."""
    server.admin().fget_object(server.bucket, key, str(tmp_path / "bad"))
    flip_bit(tmp_path / "bad", 1000)
    server.admin().fput_object(server.bucket, key, str(tmp_path / "bad"))


def objects(server: StoreServer, store: StoreConfig) -> dict[str, int]:
    listed = server.admin().list_objects(server.bucket, prefix=store.prefix, recursive=True)
    return {str(item.object_name).rsplit("/", 1)[-1]: int(item.size or 0) for item in listed}


def test_replicas_store_the_common_part_once_and_each_comes_back(
    replicas: Replicas, server: StoreServer, store: StoreConfig
) -> None:
    """Several parts; the last chunk is short; every rank has some bytes of its own."""
    common = payload(21 * MIB)
    replicas.write(1, *(common + bytes([rank]) * 1001 for rank in range(3)))
    sizes = [replicas.upload(1, rank) for rank in range(3)]
    assert sum(sizes) < 1.05 * len(common)
    assert sorted(objects(server, store).values()) == sorted(sizes)
    for rank in range(3):
        replicas.assert_comes_back(1, rank)


def test_ranges_of_packs_are_read_where_they_are_stored(
    replicas: Replicas, proxied: S3ObjectTier, proxy: HostileProxy
) -> None:
    """Runs over several owners and the checkpoint before; no source is asked that is not needed."""
    frozen = payload(18 * MIB)
    for step, base in ((1, None), (2, 1)):
        replicas.write(step, *(frozen + payload(2 * MIB + 100, seed=step) for _ in range(3)))
        for rank in range(3):
            assert replicas.upload(step, rank, base) > 0
    chunks = len(replicas.trailer(2, 1).table)
    replicas.assert_ranges_come_back(2, 1, [range(0, 3), range(10, 40), range(70, chunks)])
    replicas.tier = proxied
    replicas.assert_ranges_come_back(2, 1, [range(16, 20)])
    asked = {seen.path.rsplit("/", 3)[-3] for seen in proxy.requests if seen.method == "GET"}
    assert asked == {"s000000000001", "s000000000002"}
    payloads = [seen for seen in proxy.requests if seen.method == "GET"][-1]
    first, last = map(int, payloads.headers["range"].removeprefix("bytes=").split("-"))
    assert last - first + 1 == 4 * CHUNK_BYTES


def test_ranges_of_a_source_that_went_bad_are_named(
    replicas: Replicas, server: StoreServer, store: StoreConfig, tmp_path: Path
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    for rank in range(2):
        replicas.upload(1, rank)
    key = key_of(store, replicas.ref(1, 1))
    go_bad(server, key, tmp_path)
    replicas.assert_ranges_come_back(1, 0, [range(0, 16)])
    with pytest.raises(CorruptionError, match=r"rank000001-.*\.pack.*chunk table"):
        replicas.assert_ranges_come_back(1, 0, [range(0, 17)])
    server.admin().remove_object(server.bucket, key)
    with pytest.raises(CorruptionError, match=r"needs chunks of .*rank=1"):
        replicas.assert_ranges_come_back(1, 0, [range(16, 17)])


def test_a_bad_whole_shard_gives_way_to_the_pack(
    replicas: Replicas, server: StoreServer, store: StoreConfig, tmp_path: Path
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    for rank in range(2):
        replicas.upload(1, rank)
    (tmp_path / "bad").write_bytes(b"half a shard")
    key = key_of(store, replicas.ref(1, 0)).removesuffix(".pack") + ".shard"
    server.admin().fput_object(server.bucket, key, str(tmp_path / "bad"))
    replicas.assert_comes_back(1, 0)


def test_a_replica_that_diverged_comes_back_as_it_was(replicas: Replicas) -> None:
    common = payload(9 * MIB)
    other = common[: 3 * MIB] + random.Random(5).randbytes(700_000) + common[3 * MIB + 700_000 :]
    replicas.write(1, common, other)
    for rank in range(2):
        assert replicas.upload(1, rank) > 0
    for rank in range(2):
        replicas.assert_comes_back(1, rank)


def test_a_frozen_base_is_stored_once(replicas: Replicas) -> None:
    """Alone, so that only the checkpoint before can have it; and the one before that."""
    frozen = payload(18 * MIB)
    sent = []
    for step, base in ((1, None), (2, 1), (3, 2)):
        replicas.write(step, payload(2 * MIB, seed=step) + frozen)
        sent.append(replicas.upload(step, 0, base))
    assert sent[0] == -1
    assert all(size <= 0.11 * 20 * MIB for size in sent[1:])
    for step in (1, 2, 3):
        replicas.assert_comes_back(step, 0)


def test_from_packs_to_a_node_tier(replicas: Replicas, tmp_path: Path) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    for rank in range(2):
        replicas.upload(1, rank)
    node = DiskNodeTier(tmp_path / "node", capacity_bytes=1 << 30)
    node.open()
    for rank in range(2):
        ref = replicas.ref(1, rank)
        replicas.tier.download_shard(NAMESPACE, ref, node.begin_copy)
        with node.open_shard(ref) as reader:
            reader.verify()


def test_a_second_upload_sends_nothing(
    replicas: Replicas, proxied: S3ObjectTier, proxy: HostileProxy
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    replicas.upload(1, 0)
    replicas.tier = proxied
    replicas.upload(1, 0)
    assert [seen.method for seen in proxy.requests] == ["HEAD"]


def test_another_pack_of_the_same_shard_is_never_overwritten(replicas: Replicas) -> None:
    """Two attempts may know different tables: the first one stays, and is as good."""
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    replicas.upload(1, 0)
    replicas.upload(1, 1)
    one, two = replicas.trailer(1, 0), replicas.trailer(1, 1)
    other = plan_pack(one, [shared_with(one, [Rank(1), Rank(0)], two)], None, (), None)
    assert other is not None
    with pytest.raises(AlreadyExistsError):
        replicas.tier.upload_pack(NAMESPACE, replicas.readers[1, 0], other)
    replicas.assert_comes_back(1, 0)


def test_a_whole_shard_is_read_before_a_pack(
    replicas: Replicas, server: StoreServer, store: StoreConfig
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    replicas.upload(1, 0)  # refers to rank 1, which never comes
    with pytest.raises(CorruptionError, match=r"needs chunks of .*rank=1"):
        replicas.assert_comes_back(1, 0)
    replicas.tier.upload_shard(NAMESPACE, replicas.readers[1, 0])
    replicas.assert_comes_back(1, 0)


def test_bad_bytes_of_a_source_are_named(
    replicas: Replicas, server: StoreServer, store: StoreConfig, tmp_path: Path
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    for rank in range(2):
        replicas.upload(1, rank)
    key = key_of(store, replicas.ref(1, 1))
    go_bad(server, key, tmp_path)
    with pytest.raises(CorruptionError, match=r"rank000001-.*\.pack.*CRC32C"):
        replicas.assert_comes_back(1, 0)


def test_bytes_that_went_bad_on_the_node_are_not_stored(
    replicas: Replicas, server: StoreServer, store: StoreConfig
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    reader = replicas.readers[1, 0]
    flip_bit(Path(os.readlink(f"/proc/self/fd/{reader.fd}")), 4096 + 1000)
    with pytest.raises(CorruptionError, match="chunk"):
        replicas.upload(1, 0)
    assert objects(server, store) == {}


def test_an_upload_that_was_killed_goes_on(
    replicas: Replicas, server: StoreServer, store: StoreConfig, proxy: HostileProxy, tmp_path: Path
) -> None:
    """kill -9 in the third of five parts: the first two are not sent again."""
    common = payload(44 * MIB)
    replicas.write(1, common, common)
    one, two = replicas.trailer(1, 0), replicas.trailer(1, 1)
    index = plan_pack(one, [shared_with(one, [Rank(0), Rank(1)], two)], None, (), None)
    assert index is not None and index.stored_bytes == 24 * MIB
    tail = tmp_path / "index"
    tail.write_bytes(pack_index(index))
    reader = replicas.readers[1, 0]
    config = replace(
        server.config(store.prefix, endpoint=proxy.endpoint), part_size_mib=5, max_concurrency=1
    )
    proxy.add(on("PUT", query="partNumber=3&"), FreezeRequest(MIB))
    kill_in_upload(proxy, config, reader, str(tail))
    sent: list[int] = []
    again = S3ObjectTier(replace(store, part_size_mib=5), server.credentials, sent=sent.append)
    again.upload_pack(NAMESPACE, reader, index)
    again.close()
    body = index.stored_bytes + tail.stat().st_size - 10 * MIB
    assert body <= sum(sent) < body + 10_000  # and the words that complete the upload
    client = S3Client(store, server.credentials)
    assert client.list_uploads(key_of(store, reader.record.ref))[0] == ()
    replicas.upload(1, 1)
    replicas.assert_comes_back(1, 0)


def test_nothing_is_there(tier: S3ObjectTier, replicas: Replicas) -> None:
    replicas.write(1, b"x")
    with pytest.raises(NotFoundError, match="no pack"):
        tier.stored(NAMESPACE, replicas.ref(1, 0), looks=1)
    missing = CheckpointId(replicas.ref(1, 0).step, replicas.ref(1, 0).round)
    with pytest.raises(NotFoundError):
        tier.get_references(NAMESPACE, JOB_UID, missing)
