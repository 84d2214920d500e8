"""Every NodeTier passes the same contract."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.shards.builders import JOB_UID, BytesSource, payload, shard_file, shard_header

from holdfast_core.errors import (
    AlreadyExistsError,
    CapacityError,
    CorruptionError,
    NotFoundError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import ByteRange, CheckpointId, JobUid, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import CHUNK_BYTES, ShardRecord
from holdfast_core.tiers.base import NodeTier

CHECKPOINT = CheckpointId(Step(10), RestartRound(0))


class TierContract:
    """Tests of a NodeTier.

    A subclass `TestX(TierContract)` overrides the fixtures `tier` and `small_tier`.
    """

    @pytest.fixture
    def tier(self) -> NodeTier:
        raise NotImplementedError

    @pytest.fixture
    def small_tier(self) -> NodeTier:
        """Return a tier with room for less than 1 MiB."""
        raise NotImplementedError

    @pytest.mark.parametrize(
        "size",
        [0, 1, 4095, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17],
    )
    def test_a_shard_reads_back_as_it_was_written(self, tier: NodeTier, size: int) -> None:
        data = payload(size)
        record = write(tier, data)
        assert tier.find(record.ref) == record
        assert tier.list_shards() == (record,)
        with tier.open_shard(record.ref) as reader:
            reader.verify()
            buffer = bytearray(size)
            reader.read_payload_into(0, memoryview(buffer))
            assert bytes(buffer) == data
            assert b"".join(bytes(piece) for piece in reader.read_payload()) == data
            assert reader.record == record

    @pytest.mark.parametrize("chunk_bytes", [4096, 12288, CHUNK_BYTES, 3 * CHUNK_BYTES])
    def test_pieces_of_the_payload_need_not_be_chunks(
        self, tier: NodeTier, chunk_bytes: int
    ) -> None:
        data = payload(5 * CHUNK_BYTES + 3)
        record = write(tier, data, chunk_bytes=chunk_bytes)
        with tier.open_shard(record.ref) as reader:
            assert b"".join(bytes(piece) for piece in reader.read_payload()) == data
            reader.verify()

    def test_ranges_of_the_file_come_in_order_and_end_with_it(self, tier: NodeTier) -> None:
        data = payload(50_000)
        expected, _ = shard_file(shard_header(50_000), data)
        record = write(tier, data)
        size = len(expected)
        ranges = [(0, 4096), (4096, 30_001), (30_001, 30_002), (10, 20), (size - 1, size + 10)]
        with tier.open_shard(record.ref) as reader:
            found = [bytes(v) for v in reader.read_file(ByteRange(*r) for r in ranges)]
            assert found == [expected[start:stop] for start, stop in ranges]
            # A caller that stops early releases everything: the reader still works.
            next(iter(reader.read_payload()))
            reader.verify()

    def test_chunks_read_alone(self, tier: NodeTier) -> None:
        data = payload(10 * 4096 + 5)
        record = write(tier, data, chunk_bytes=4096)
        with tier.open_shard(record.ref) as reader:
            assert len(reader.table) == 11
            buffer = bytearray(2 * 4096)
            reader.read_payload_into(3 * 4096, memoryview(buffer))
            assert bytes(buffer) == data[3 * 4096 : 5 * 4096]
            tail = bytearray(5)
            reader.read_payload_into(10 * 4096, memoryview(tail))
            assert bytes(tail) == data[-5:]
            with pytest.raises(ValueError, match="chunk boundaries"):
                reader.read_payload_into(1, memoryview(buffer))

    def test_the_descriptor_is_the_whole_file(self, tier: NodeTier) -> None:
        data = payload(5000)
        expected, _ = shard_file(shard_header(5000), data)
        record = write(tier, data)
        with tier.open_shard(record.ref) as reader:
            assert read_file(reader.fd, record.file_bytes + 1) == expected

    def test_writing_twice_is_writing_once(self, tier: NodeTier) -> None:
        data = payload(5000)
        assert write(tier, data) == write(tier, data)
        assert len(tier.list_shards()) == 1

    def test_another_payload_of_the_same_identity_is_refused(self, tier: NodeTier) -> None:
        write(tier, payload(5000, seed=1))
        with pytest.raises(AlreadyExistsError):
            write(tier, payload(5000, seed=2))

    def test_threads_write_different_shards(self, tier: NodeTier) -> None:
        threads = [
            threading.Thread(target=write, args=(tier, payload(50_000, seed=rank), rank))
            for rank in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r.header.rank for r in tier.list_shards()] == [0, 1, 2, 3]
        for record in tier.list_shards():
            with tier.open_shard(record.ref) as reader:
                reader.verify()

    def test_no_room_is_reported_before_anything_is_written(self, small_tier: NodeTier) -> None:
        source = BytesSource(payload(2 << 20))
        with pytest.raises(CapacityError, match=r"needs \d+ bytes, \d+ available"):
            small_tier.write_shard(shard_header(2 << 20), source)
        assert source.reads == 0
        assert small_tier.list_shards() == ()

    def test_copies_reserve_their_room(self, small_tier: NodeTier) -> None:
        file, record = shard_file(shard_header(100_000), payload(100_000))
        free = small_tier.free_bytes()
        writer = small_tier.begin_copy(record.ref, len(file))
        assert small_tier.free_bytes() <= free - len(file)
        with pytest.raises(CapacityError):
            small_tier.begin_copy(record.ref, free)
        writer.abort()
        assert small_tier.free_bytes() == free

    @pytest.mark.parametrize("piece", [1000, 4096, 1 << 20])
    def test_a_copy_is_the_same_shard(self, tier: NodeTier, piece: int) -> None:
        file, record = shard_file(shard_header(100_000), payload(100_000))
        writer = tier.begin_copy(record.ref, len(file))
        for start in range(0, len(file), piece):
            assert writer.offset == start
            writer.write(file[start : start + piece])
        assert tier.find(record.ref) is None
        assert writer.commit() == record
        assert tier.find(record.ref) == record
        with tier.open_shard(record.ref) as reader:
            reader.verify()
            assert read_file(reader.fd, len(file) + 1) == file

    @pytest.mark.parametrize("piece", [4 << 20, (3 << 20) + 1])
    def test_a_copy_is_received_into_the_writers_room(self, tier: NodeTier, piece: int) -> None:
        size = 20 << 20
        file, record = shard_file(shard_header(size), payload(size))
        writer = tier.begin_copy(record.ref, len(file))
        while writer.offset < len(file):
            # The first attempt simulates a broken connection: the writer must hand out the room again.
            writer.room(piece)[:1000] = b"x" * 1000
            part = file[writer.offset : writer.offset + piece]
            room = writer.room(len(part))
            assert len(room) == len(part)
            room[:] = part
            before = writer.offset
            writer.advance(len(part))
            assert writer.offset == before + len(part)
        assert writer.commit() == record
        with tier.open_shard(record.ref) as reader:
            reader.verify()
            assert read_file(reader.fd, len(file) + 1) == file

    @pytest.mark.parametrize("position", [0, 20, 4096, 60_000, -5000, -4000, -1])
    def test_a_copy_with_a_flipped_bit_is_refused(self, tier: NodeTier, position: int) -> None:
        file, record = shard_file(shard_header(100_000), payload(100_000))
        bad = bytearray(file)
        bad[position] ^= 0x10
        free = tier.free_bytes()
        writer = tier.begin_copy(record.ref, len(file))
        with pytest.raises(CorruptionError):
            writer.write(bytes(bad))
            writer.commit()
        writer.abort()
        assert tier.list_shards() == ()
        assert tier.free_bytes() >= free - (1 << 20)

    @pytest.mark.parametrize(
        "field", [{"step": 11}, {"round": 1}, {"rank": 1}, {"job_uid": JobUid("another")}]
    )
    def test_a_copy_of_something_else_is_refused(
        self, tier: NodeTier, field: dict[str, int]
    ) -> None:
        asked = shard_file(shard_header(5000), payload(5000))[1].ref
        file, _ = shard_file(shard_header(5000, **field), payload(5000))  # type: ignore[arg-type]
        writer = tier.begin_copy(asked, len(file))
        with pytest.raises(CorruptionError):
            writer.write(file)
        assert tier.list_shards() == ()

    def test_a_copy_that_ends_early_is_refused(self, tier: NodeTier) -> None:
        file, record = shard_file(shard_header(5000), payload(5000))
        writer = tier.begin_copy(record.ref, len(file))
        writer.write(file[:-1])
        with pytest.raises(CorruptionError):
            writer.commit()
        assert tier.find(record.ref) is None

    def test_an_absent_shard_is_not_found(self, tier: NodeTier) -> None:
        ref = shard_file(shard_header(10), payload(10))[1].ref
        assert tier.find(ref) is None
        with pytest.raises(NotFoundError):
            tier.open_shard(ref)
        with pytest.raises(NotFoundError):
            tier.get_manifest(JOB_UID, CHECKPOINT)
        with pytest.raises(NotFoundError):
            tier.get_layout(ref.blake3)
        tier.delete_shard(ref)
        tier.delete_checkpoint(JOB_UID, CHECKPOINT)
        tier.quarantine(ref, CorruptionError("was never here"))

    def test_a_manifest_is_put_once(self, tier: NodeTier) -> None:
        digest = tier.put_manifest(JOB_UID, CHECKPOINT, b'{"a":1}')
        assert tier.put_manifest(JOB_UID, CHECKPOINT, b'{"a":1}') == digest
        with pytest.raises(AlreadyExistsError):
            tier.put_manifest(JOB_UID, CHECKPOINT, b'{"a":2}')
        assert tier.get_manifest(JOB_UID, CHECKPOINT) == b'{"a":1}'
        assert tier.list_manifests() == ((JOB_UID, CHECKPOINT),)

    def test_layouts_are_named_by_their_digest(self, tier: NodeTier) -> None:
        digest = tier.put_layout(b"{}")
        assert tier.put_layout(b"{}") == digest
        assert tier.get_layout(digest) == b"{}"
        assert tier.keep_layout(digest)
        assert not tier.keep_layout(digest_of(b"[]"))

    def test_deleting_a_checkpoint_leaves_the_others(self, tier: NodeTier) -> None:
        gone = [write(tier, payload(5000, seed=rank), rank) for rank in range(2)]
        stays = write(tier, payload(5000), step=11)
        tier.put_manifest(JOB_UID, CHECKPOINT, b"{}")
        tier.put_manifest(JOB_UID, stays.checkpoint, b"{}")
        tier.delete_checkpoint(JOB_UID, CHECKPOINT)
        assert tier.list_manifests() == ((JOB_UID, stays.checkpoint),)
        assert tier.list_shards() == (stays,)
        assert all(tier.find(record.ref) is None for record in gone)
        tier.delete_checkpoint(JOB_UID, CHECKPOINT)

    def test_deleting_gives_the_room_back(self, tier: NodeTier) -> None:
        record = write(tier, payload(5000))
        tier.delete_shard(record.ref)
        assert tier.find(record.ref) is None
        assert write(tier, payload(5000)) == record

    def test_an_open_reader_outlives_the_deletion(self, tier: NodeTier) -> None:
        record = write(tier, payload(5000))
        with tier.open_shard(record.ref) as reader:
            tier.delete_shard(record.ref)
            reader.verify()

    def test_quarantined_shards_are_not_read_again(self, tier: NodeTier) -> None:
        record = write(tier, payload(5000))
        tier.quarantine(record.ref, CorruptionError("scrub: chunk 0 differs"))
        assert tier.list_shards() == ()
        with pytest.raises(NotFoundError):
            tier.open_shard(record.ref)


def write(
    tier: NodeTier, data: bytes, rank: int = 0, *, step: int = 10, chunk_bytes: int = CHUNK_BYTES
) -> ShardRecord:
    header = shard_header(len(data), rank=rank, step=step, chunk_bytes=chunk_bytes)
    return tier.write_shard(header, BytesSource(data))


def read_file(fd: int, limit_bytes: int) -> bytes:
    return os.pread(fd, limit_bytes, 0)


SMALL_BYTES = 1_000_000


def opened(root: Path, capacity_bytes: int) -> DiskNodeTier:
    tier = DiskNodeTier(root, capacity_bytes=capacity_bytes)
    tier.open()
    return tier


class TestDiskNodeTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> NodeTier:
        return opened(tmp_path / "node", 256 << 20)

    @pytest.fixture
    def small_tier(self, tmp_path: Path) -> NodeTier:
        return opened(tmp_path / "small", SMALL_BYTES)


class TestDiskNodeTierOnTmpfs(TierContract):
    @pytest.fixture
    def root(self) -> Iterator[Path]:
        shared = Path("/dev/shm")
        if not shared.is_dir():
            pytest.skip("no tmpfs at /dev/shm")
        with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir=shared) as root:
            yield Path(root)

    @pytest.fixture
    def tier(self, root: Path) -> NodeTier:
        return opened(root, 256 << 20)

    @pytest.fixture
    def small_tier(self, root: Path) -> NodeTier:
        return opened(root, SMALL_BYTES)
