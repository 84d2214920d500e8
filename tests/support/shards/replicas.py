"""Ranks that hold the same tensors, and their uploads as packs."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID, shard_header
from tests.support.shards.shard_files import CopyWriters, file_span, write_shard

from holdfast_core.contract import StoreConfig
from holdfast_core.format import keys
from holdfast_core.ids import Rank, ShardRef
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import (
    Earlier,
    PackIndex,
    pack_index,
    plan_pack,
    shared_with,
    unshared_index,
)
from holdfast_core.store.tier import ObjectTier

NAMESPACE = "team-a"
WIDTH = 4
"""Element width in bytes of the payloads that Compressing uploads."""


class Replicas:
    """Ranks of one group with their shard files. Each uploads only the chunks that it must not leave out."""

    def __init__(self, directory: Path, tier: ObjectTier) -> None:
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
        """Plan the pack as the sidecar does."""
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
        """Upload the shard; return the bytes of its pack, or -1 if it is stored whole."""
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


class Compressing(Replicas):
    """Replicas whose packs are compressed by `compress`."""

    def plan(self, step: int, rank: int, base: int | None = None) -> PackIndex:
        index = self.planned(step, rank, base)
        return index or self.alone(step, rank)

    def alone(self, step: int, rank: int) -> PackIndex:
        index = unshared_index(self.trailer(step, rank))
        assert index is not None
        return index

    def compress(self, step: int, rank: int, base: int | None = None) -> PackIndex:
        return self.put(step, rank, self.plan(step, rank, base))

    def put(self, step: int, rank: int, index: PackIndex) -> PackIndex:
        widths = bytes([WIDTH] * len(index.places))
        return self.tier.upload_encoded(NAMESPACE, self.readers[step, rank], index, widths)


def key_of(store: StoreConfig, ref: ShardRef) -> str:
    """Return the key of the shard's pack in the store."""
    return f"{store.prefix}/{NAMESPACE}/{JOB_UID}/{keys.pack_key(ref)}"


def stored_objects(server: StoreServer, store: StoreConfig) -> dict[str, int]:
    """Return the sizes in bytes of all objects of the store, by the last part of their keys."""
    listed = server.admin().list_objects(server.bucket, prefix=store.prefix, recursive=True)
    return {str(item.object_name).rsplit("/", 1)[-1]: int(item.size or 0) for item in listed}
