"""Packs in real stores: every rank's bits are restored, regardless of which object stores them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.object_store.killed import kill_in_upload
from tests.support.servers.hostile_s3 import FreezeRequest, HostileProxy, on
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import payload
from tests.support.shards.replicas import NAMESPACE, Compressing, key_of, stored_objects
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


def go_bad(server: StoreServer, key: str, tmp_path: Path) -> None:
    """Flip a bit of an object."""
    server.admin().fget_object(server.bucket, key, str(tmp_path / "bad"))
    flip_bit(tmp_path / "bad", 1000)
    server.admin().fput_object(server.bucket, key, str(tmp_path / "bad"))


def test_ranges_of_packs_are_read_where_they_are_stored(
    gang: Compressing, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    """The ranges span several ranks and the previous checkpoint. Only the needed objects are requested."""
    frozen = payload(18 * MIB)
    for step, base in ((1, None), (2, 1)):
        gang.write(step, *(frozen + payload(2 * MIB + 100, seed=step) for _ in range(3)))
        for rank in range(3):
            assert gang.upload(step, rank, base) > 0
    chunks = len(gang.trailer(2, 1).table)
    gang.assert_ranges_come_back(2, 1, [range(0, 3), range(10, 40), range(70, chunks)])
    gang.tier = proxied
    gang.assert_ranges_come_back(2, 1, [range(16, 20)])
    asked = {seen.path.rsplit("/", 2)[-2] for seen in proxy.requests if seen.method == "GET"}
    assert asked == {"s000000000001-r000000", "s000000000002-r000000"}
    payloads = [seen for seen in proxy.requests if seen.method == "GET"][-1]
    first, last = map(int, payloads.headers["range"].removeprefix("bytes=").split("-"))
    assert last - first + 1 == 4 * CHUNK_BYTES


def test_bad_bytes_of_a_source_are_named(
    gang: Compressing, server: StoreServer, store: StoreConfig, tmp_path: Path
) -> None:
    gang.write(1, *(payload(9 * MIB) for _ in range(2)))
    for rank in range(2):
        gang.upload(1, rank)
    key = key_of(store, gang.ref(1, 1))
    go_bad(server, key, tmp_path)
    gang.assert_ranges_come_back(1, 0, [range(0, 16)])
    with pytest.raises(CorruptionError, match=r"rank000001-.*\.pack.*chunk table"):
        gang.assert_ranges_come_back(1, 0, [range(0, 17)])
    with pytest.raises(CorruptionError, match=r"rank000001-.*\.pack.*chunks"):
        gang.assert_comes_back(1, 0)
    server.admin().remove_object(server.bucket, key)
    with pytest.raises(CorruptionError, match=r"needs chunks of .*rank=1"):
        gang.assert_ranges_come_back(1, 0, [range(16, 17)])


def test_a_bad_whole_shard_gives_way_to_the_pack(
    gang: Compressing, server: StoreServer, store: StoreConfig, tmp_path: Path
) -> None:
    gang.write(1, *(payload(9 * MIB) for _ in range(2)))
    for rank in range(2):
        gang.upload(1, rank)
    (tmp_path / "bad").write_bytes(b"half a shard")
    key = key_of(store, gang.ref(1, 0)).removesuffix(".pack") + ".shard"
    server.admin().fput_object(server.bucket, key, str(tmp_path / "bad"))
    gang.assert_comes_back(1, 0)


def test_a_second_upload_sends_nothing(
    gang: Compressing, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    gang.write(1, *(payload(9 * MIB) for _ in range(2)))
    gang.upload(1, 0)
    gang.tier = proxied
    gang.upload(1, 0)
    assert [seen.method for seen in proxy.requests] == ["HEAD"]


def test_bytes_that_went_bad_on_the_node_are_not_stored(
    gang: Compressing, server: StoreServer, store: StoreConfig
) -> None:
    gang.write(1, *(payload(9 * MIB) for _ in range(2)))
    reader = gang.readers[1, 0]
    flip_bit(Path(os.readlink(f"/proc/self/fd/{reader.fd}")), 4096 + 1000)
    with pytest.raises(CorruptionError, match="chunk"):
        gang.upload(1, 0)
    assert stored_objects(server, store) == {}


def test_an_upload_that_was_killed_goes_on(
    gang: Compressing, server: StoreServer, store: StoreConfig, proxy: HostileProxy, tmp_path: Path
) -> None:
    """SIGKILL arrives in the third of five parts. The first two are not sent again."""
    common = payload(44 * MIB)
    gang.write(1, common, common)
    one, two = gang.trailer(1, 0), gang.trailer(1, 1)
    index = plan_pack(one, [shared_with(one, [Rank(0), Rank(1)], two)], None, (), None)
    assert index is not None and index.stored_bytes == 24 * MIB
    tail = tmp_path / "index"
    tail.write_bytes(pack_index(index))
    reader = gang.readers[1, 0]
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
    gang.upload(1, 1)
    gang.assert_comes_back(1, 0)
