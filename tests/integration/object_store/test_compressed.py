"""Compressed packs in real stores: every bit is restored, and wrong bytes are detected."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from tests.support.servers.hostile_s3 import (
    CutReply,
    FlipReply,
    HostileProxy,
    Seen,
)
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import payload, weights
from tests.support.shards.replicas import NAMESPACE, WIDTH, Compressing, key_of, stored_objects
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import CorruptionError
from holdfast_core.shards.file import CHUNK_BYTES
from holdfast_core.shards.pack import PLAIN, Coding, PackIndex, pack_index
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20


def last_object(server: StoreServer, key: str, tmp_path: Path) -> bytes:
    server.admin().fget_object(server.bucket, key, str(tmp_path / "object"))
    return (tmp_path / "object").read_bytes()


def overwrite(server: StoreServer, key: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(data)
    server.admin().fput_object(server.bucket, key, str(tmp_path / "object"))


@pytest.mark.parametrize(
    "size",
    [1, 4097, CHUNK_BYTES, 3 * CHUNK_BYTES + 1001, 23 * MIB + 1001],
    ids=["a byte", "a page", "a chunk", "one part", "several parts"],
)
def test_a_shard_comes_back(
    gang: Compressing, server: StoreServer, store: StoreConfig, size: int
) -> None:
    gang.write(1, weights(size))
    stored = gang.compress(1, 0)
    assert stored_objects(server, store) == {
        key_of(store, gang.ref(1, 0)).rsplit("/", 1)[-1]: stored.stored_bytes
        + len(pack_index(stored))
    }
    if size > CHUNK_BYTES:
        assert stored.stored_bytes < 0.88 * size
    assert gang.tier.stored(NAMESPACE, gang.ref(1, 0)).index == stored
    gang.assert_comes_back(1, 0)
    count = len(stored.places)
    gang.assert_ranges_come_back(1, 0, [range(0, 1), range(count // 2, count)])


def test_noise_is_stored_as_it_is_and_counted(
    gang: Compressing, server: StoreServer, store: StoreConfig
) -> None:
    counted: list[tuple[int, int]] = []
    tier = s3_tier(
        store, server.credentials, compressed=lambda before, after: counted.append((before, after))
    )
    gang.tier = tier
    floats = weights(2 * MIB)
    gang.write(1, payload(3 * MIB) + floats)
    stored = gang.compress(1, 0)
    assert stored.coding.widths == bytes([PLAIN] * 12 + [WIDTH] * 8)
    assert counted == [(5 * MIB, stored.stored_bytes)]
    gang.assert_comes_back(1, 0)
    tier.close()


def test_a_range_of_chunks_is_a_range_of_the_object(
    gang: Compressing, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    gang.write(1, weights(9 * MIB))
    stored = gang.compress(1, 0)
    gang.tier = proxied
    gang.assert_ranges_come_back(1, 0, [range(20, 24)])
    asked = [seen for seen in proxy.requests if seen.method == "GET"][-1]
    first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
    assert (first, last + 1) == (stored.coding.starts[20], stored.coding.starts[24])
    assert last + 1 - first < 4 * CHUNK_BYTES


# ------------------------------------------------------------------ wrong bytes


def in_chunk(index: PackIndex, chunk: int, offset: int) -> int:
    return index.coding.starts[chunk] + offset


Damage = Callable[[PackIndex, bytes], bytes]


def flipped(offset: int) -> Damage:
    def damage(index: PackIndex, data: bytes) -> bytes:
        at = in_chunk(index, 3, offset)
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    return damage


def again(index: PackIndex, lengths: list[int], chunks: bytes) -> bytes:
    """Return a pack with a valid index that states these lengths."""
    coding = Coding.of(lengths, index.coding.widths)
    return chunks + pack_index(replace(index, coding=coding))


def shifted(index: PackIndex, data: bytes) -> bytes:
    """Return a pack with a wrong index: chunk 3 ends, and chunk 4 begins, one byte too late."""
    lengths = index.coding.lengths
    lengths[3], lengths[4] = lengths[3] + 1, lengths[4] - 1
    return again(index, lengths, data[: index.stored_bytes])


def swapped(index: PackIndex, data: bytes) -> bytes:
    """Return a pack with chunks 3 and 4 exchanged.

    The index matches the exchanged lengths, so each decodes to the other's bytes.
    """
    starts, lengths = index.coding.starts, index.coding.lengths
    lengths[3], lengths[4] = lengths[4], lengths[3]
    chunks = data[: starts[3]] + data[starts[4] : starts[5]] + data[starts[3] : starts[4]]
    return again(index, lengths, chunks + data[starts[5] : starts[-1]])


def bomb(index: PackIndex, data: bytes) -> bytes:
    """Return a pack with a plane that decompresses to the 64 MiB that its header states."""
    starts, lengths = index.coding.starts, index.coding.lengths
    plane = zstandard.ZstdCompressor(level=19).compress(b"\0" * (64 * MIB))
    chunk = array("I", [len(plane), 0, 0, 0]).tobytes() + plane
    lengths[3] = len(chunk)
    return again(index, lengths, data[: starts[3]] + chunk + data[starts[4] : starts[-1]])


DAMAGES: dict[str, Damage] = {
    "a bit in the lengths of planes": flipped(2),
    "a bit in a frame's header": flipped(16 + 65536 * 3 + 5),
    "a bit in a frame": flipped(16 + 65536 * 3 + 9000),
    "a bit in a plane that is as it was": flipped(16 + 1000),
    "an index that is wrong by a byte": shifted,
    "two chunks in each other's place": swapped,
    "a decompression bomb": bomb,
}


@pytest.mark.fault("A bit is flipped in a shard's body, its header or a manifest")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_not_the_chunk_is_corruption(
    gang: Compressing, server: StoreServer, store: StoreConfig, tmp_path: Path, damage: Damage
) -> None:
    gang.write(1, weights(3 * MIB))
    index = gang.compress(1, 0)
    key = key_of(store, gang.ref(1, 0))
    overwrite(server, key, damage(index, last_object(server, key, tmp_path)), tmp_path)
    with pytest.raises(CorruptionError, match=r"rank000000-.*\.pack.*chunk.*at 2 reads"):
        gang.assert_comes_back(1, 0)
    with pytest.raises(CorruptionError, match=r"rank000000-.*\.pack.*chunks \[3.*at 2 reads"):
        gang.assert_ranges_come_back(1, 0, [range(0, 12)])
    gang.assert_ranges_come_back(1, 0, [range(0, 3), range(5, 12)])


@pytest.mark.fault("A shard's file is truncated or extended")
@pytest.mark.parametrize("missing", [1, 40, 300_000])
def test_an_object_that_was_cut_is_corruption(
    gang: Compressing, server: StoreServer, store: StoreConfig, tmp_path: Path, missing: int
) -> None:
    gang.write(1, weights(3 * MIB))
    gang.compress(1, 0)
    key = key_of(store, gang.ref(1, 0))
    overwrite(server, key, last_object(server, key, tmp_path)[:-missing], tmp_path)
    with pytest.raises(CorruptionError, match="pack"):
        gang.assert_comes_back(1, 0)


def is_chunks(seen: Seen) -> bool:
    """Return whether the request is a GET of chunks. They begin at byte 0, unlike the index."""
    return seen.method == "GET" and seen.headers.get("range", "").startswith("bytes=0-")


@pytest.mark.fault("The store returns a flipped bit in the body of an object")
@pytest.mark.parametrize("fault", [FlipReply(300_000), CutReply(1000)], ids=["flipped", "cut"])
def test_a_download_gets_over_it(
    gang: Compressing,
    proxied: ObjectTier,
    proxy: HostileProxy,
    fault: FlipReply | CutReply,
) -> None:
    gang.write(1, weights(9 * MIB))
    gang.compress(1, 0)
    gang.tier = proxied
    struck = proxy.add(is_chunks, fault)
    gang.assert_comes_back(1, 0)
    assert struck.applied == 1
    struck = proxy.add(is_chunks, fault)
    gang.assert_ranges_come_back(1, 0, [range(0, 16)])
    assert struck.applied == 1
