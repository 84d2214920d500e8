"""Packs in real stores: every rank's bits are restored, regardless of which object stores them."""

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
from tests.support.shards.builders import payload
from tests.support.shards.replicas import NAMESPACE, Replicas, key_of, stored_objects
from tests.support.shards.shard_files import flip_bit
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import CorruptionError
from holdfast_core.ids import Rank
from holdfast_core.shards.file import CHUNK_BYTES
from holdfast_core.shards.pack import pack_index, plan_pack, shared_with
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20


@pytest.fixture
def replicas(tmp_path: Path, tier: ObjectTier) -> Iterator[Replicas]:
    gang = Replicas(tmp_path, tier)
    yield gang
    gang.close()


def go_bad(server: StoreServer, key: str, tmp_path: Path) -> None:
    """Flip a bit of an object."""
    server.admin().fget_object(server.bucket, key, str(tmp_path / "bad"))
    flip_bit(tmp_path / "bad", 1000)
    server.admin().fput_object(server.bucket, key, str(tmp_path / "bad"))


def test_replicas_store_the_common_part_once_and_each_comes_back(
    replicas: Replicas, server: StoreServer, store: StoreConfig
) -> None:
    """The shards have several parts and a short last chunk, and every rank has some bytes of its own."""
    common = payload(21 * MIB)
    replicas.write(1, *(common + bytes([rank]) * 1001 for rank in range(3)))
    sizes = [replicas.upload(1, rank) for rank in range(3)]
    assert sum(sizes) < 1.05 * len(common)
    assert sorted(stored_objects(server, store).values()) == sorted(sizes)
    for rank in range(3):
        replicas.assert_comes_back(1, rank)


def test_ranges_of_packs_are_read_where_they_are_stored(
    replicas: Replicas, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    """The ranges span several ranks and the previous checkpoint. Only the needed objects are requested."""
    frozen = payload(18 * MIB)
    for step, base in ((1, None), (2, 1)):
        replicas.write(step, *(frozen + payload(2 * MIB + 100, seed=step) for _ in range(3)))
        for rank in range(3):
            assert replicas.upload(step, rank, base) > 0
    chunks = len(replicas.trailer(2, 1).table)
    replicas.assert_ranges_come_back(2, 1, [range(0, 3), range(10, 40), range(70, chunks)])
    replicas.tier = proxied
    replicas.assert_ranges_come_back(2, 1, [range(16, 20)])
    asked = {seen.path.rsplit("/", 2)[-2] for seen in proxy.requests if seen.method == "GET"}
    assert asked == {"s000000000001-r000000", "s000000000002-r000000"}
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
    """With one rank, each step can refer only to earlier checkpoints: the previous one and the one before."""
    frozen = payload(18 * MIB)
    sent = []
    for step, base in ((1, None), (2, 1), (3, 2)):
        replicas.write(step, payload(2 * MIB, seed=step) + frozen)
        sent.append(replicas.upload(step, 0, base))
    assert sent[0] == -1
    assert all(size <= 0.11 * 20 * MIB for size in sent[1:])
    for step in (1, 2, 3):
        replicas.assert_comes_back(step, 0)


def test_a_second_upload_sends_nothing(
    replicas: Replicas, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    replicas.upload(1, 0)
    replicas.tier = proxied
    replicas.upload(1, 0)
    assert [seen.method for seen in proxy.requests] == ["HEAD"]


def test_bad_bytes_of_a_source_are_named(
    replicas: Replicas, server: StoreServer, store: StoreConfig, tmp_path: Path
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    for rank in range(2):
        replicas.upload(1, rank)
    key = key_of(store, replicas.ref(1, 1))
    go_bad(server, key, tmp_path)
    with pytest.raises(CorruptionError, match=r"rank000001-.*\.pack.*chunks"):
        replicas.assert_comes_back(1, 0)


def test_bytes_that_went_bad_on_the_node_are_not_stored(
    replicas: Replicas, server: StoreServer, store: StoreConfig
) -> None:
    replicas.write(1, *(payload(9 * MIB) for _ in range(2)))
    reader = replicas.readers[1, 0]
    flip_bit(Path(os.readlink(f"/proc/self/fd/{reader.fd}")), 4096 + 1000)
    with pytest.raises(CorruptionError, match="chunk"):
        replicas.upload(1, 0)
    assert stored_objects(server, store) == {}


def test_an_upload_that_was_killed_goes_on(
    replicas: Replicas, server: StoreServer, store: StoreConfig, proxy: HostileProxy, tmp_path: Path
) -> None:
    """SIGKILL arrives in the third of five parts. The first two are not sent again."""
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
    again = s3_tier(replace(store, part_size_mib=5), server.credentials, sent=sent.append)
    again.upload_pack(NAMESPACE, reader, index)
    again.close()
    body = index.stored_bytes + tail.stat().st_size - 10 * MIB
    assert body <= sum(sent) < body + 10_000  # the rest is the request that completes the upload
    client = S3Client(store, server.credentials)
    assert client.list_uploads(key_of(store, reader.record.ref))[0] == ()
    replicas.upload(1, 1)
    replicas.assert_comes_back(1, 0)
