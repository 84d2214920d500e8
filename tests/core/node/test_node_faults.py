"""Errors of the disk: what the node tier reports and what it keeps."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.support.crash.failpoints import failpoints
from tests.support.shards.builders import JOB_UID, BytesSource, payload, shard_file, shard_header

from holdfast_core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    NotFoundError,
    StaleRoundError,
    TierError,
    UnreadableError,
)
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step, Worker
from holdfast_core.node.tier import DiskNodeTier, OpenReport
from holdfast_core.node.volume import QUARANTINE_KEPT, Volume
from holdfast_core.shards.file import ChunkTable, ShardRecord, pack_trailer, trailer_offset
from holdfast_core.shards.stream import TableDigester

SIZE = 200_000
CHECKPOINT = CheckpointId(Step(10), RestartRound(0))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "node"


@pytest.fixture
def tier(root: Path) -> DiskNodeTier:
    return reopened(root)[0]


def reopened(root: Path) -> tuple[DiskNodeTier, OpenReport]:
    tier = DiskNodeTier(root, capacity_bytes=64 << 20)
    return tier, tier.open()


def write(tier: DiskNodeTier, *, rank: int = 0, step: int = 10, seed: int = 0) -> ShardRecord:
    source = BytesSource(payload(SIZE, seed=seed))
    return tier.write_shard(shard_header(SIZE, rank=rank, step=step), source)


def only_shard(root: Path) -> Path:
    (path,) = root.glob("*/shards/**/*.shard")
    return path


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x20]))


def test_files_and_directories_are_the_owners_alone(root: Path, tier: DiskNodeTier) -> None:
    write(tier)
    tier.put_manifest(JOB_UID, CHECKPOINT, b"{}")
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_files_have_the_paths_that_the_format_defines(root: Path, tier: DiskNodeTier) -> None:
    record = write(tier)
    name = f"rank000000-{record.blake3[3:19]}.shard"
    assert only_shard(root) == root / JOB_UID / "shards/s000000000010-r000000" / name


@pytest.mark.fault("An fsync fails once and would then report success")
@pytest.mark.parametrize("times", [1, 2])
def test_a_failed_fsync_is_never_repeated_on_the_same_file(
    root: Path, tier: DiskNodeTier, times: int
) -> None:
    rules = ",".join(f"node.fsync=err@{n + 1}" for n in range(times))
    with failpoints(rules) as points:
        if times == 1:
            record = write(tier)
            assert points.hits("node.after_create") == 2
            with tier.open_shard(record.ref) as reader:
                reader.verify()
        else:
            with pytest.raises(TierError, match="fsync of"):
                write(tier)
            assert tier.list_shards() == ()
    assert not [path for path in root.rglob(".tmp-*")]


@pytest.mark.parametrize("point", ["node.write", "node.mid_write"])
def test_an_error_of_the_disk_leaves_nothing(root: Path, tier: DiskNodeTier, point: str) -> None:
    free = tier.free_bytes()
    with failpoints(f"{point}=err@1"):
        with pytest.raises(TierError, match="writing the shard of rank 0 step 10"):
            write(tier)
    assert tier.list_shards() == ()
    assert tier.free_bytes() == free
    assert not [path for path in root.rglob(".tmp-*")]


def test_what_the_disk_gives_back_is_compared(tier: DiskNodeTier) -> None:
    """The first save of a rank is read back whole. A read that fails counts as a bad write."""
    with failpoints("node.read=err@1") as points:
        record = write(tier)
        assert points.hits("node.after_create") == 2
    assert tier.find(record.ref) == record


def test_later_saves_are_read_back_by_sample(root: Path) -> None:
    tier, _ = reopened(root)
    header = shard_header(64 * 4096, chunk_bytes=4096)
    tier.write_shard(header, BytesSource(payload(64 * 4096)))
    with failpoints("node.unused=err") as points:
        second = shard_header(64 * 4096, chunk_bytes=4096, step=11)
        tier.write_shard(second, BytesSource(payload(64 * 4096)))
        # head, trailer, one chunk of 64
        assert points.hits("node.read") == 3


@pytest.mark.fault("The power fails in the middle of a write, so that a file is torn")
@pytest.mark.parametrize("position", [0, 30, -1, -40, -4000])
def test_torn_heads_and_tails_are_quarantined_at_the_start(root: Path, position: int) -> None:
    tier, _ = reopened(root)
    write(tier)
    flip(only_shard(root), position)
    tier, report = reopened(root)
    assert report.shards == 0
    assert len(report.quarantined) == 1
    assert tier.list_shards() == ()
    assert len(list((root / "quarantine").glob("*.shard"))) == 1
    assert len(list((root / "quarantine").glob("*.reason"))) == 1


@pytest.mark.fault("A file was torn, and the disk is full or read-only at the next start")
def test_a_torn_file_that_cannot_be_quarantined_holds_up_no_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's other shards can be restored, and the next write replaces the file."""

    def refuse(*_: object) -> None:
        raise CapacityError("quarantining a shard: no space left on device")

    tier, _ = reopened(root)
    write(tier)
    flip(only_shard(root), 0)
    monkeypatch.setattr(Volume, "quarantine", refuse)
    tier, _ = reopened(root)
    assert tier.list_shards() == ()
    write(tier)
    assert len(reopened(root)[0].list_shards()) == 1


@pytest.mark.fault("A shard's file is truncated or extended")
@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 200_000])
def test_truncated_files_are_quarantined_at_the_start(root: Path, size: int) -> None:
    tier, _ = reopened(root)
    write(tier)
    os.truncate(only_shard(root), size)
    assert len(reopened(root)[1].quarantined) == 1


@pytest.mark.fault("A shard's file is truncated or extended")
def test_extended_files_are_quarantined_at_the_start(root: Path) -> None:
    tier, _ = reopened(root)
    write(tier)
    with only_shard(root).open("ab") as file:
        file.write(bytes(4096))
    assert len(reopened(root)[1].quarantined) == 1


def test_renamed_shards_are_refused(root: Path) -> None:
    tier, _ = reopened(root)
    first = write(tier, rank=0)
    second = write(tier, rank=1)
    directory = root / JOB_UID / "shards/s000000000010-r000000"
    (path_a, path_b) = sorted(directory.iterdir())
    os.replace(path_b, path_a)
    with pytest.raises(CorruptionError):
        tier.open_shard(first.ref)
    with pytest.raises(NotFoundError):
        tier.open_shard(second.ref)
    assert len(reopened(root)[1].quarantined) == 1


@pytest.mark.fault("A name or a link leads out of the cache")
def test_a_link_in_place_of_a_shard_is_not_followed(root: Path, tier: DiskNodeTier) -> None:
    record = write(tier)
    path = only_shard(root)
    path.rename(root / "elsewhere")
    path.symlink_to(root / "elsewhere")
    with pytest.raises(UnreadableError):
        tier.open_shard(record.ref)


@pytest.mark.fault("A bit is flipped in a shard's body, its header or a manifest")
@pytest.mark.parametrize("position", [4096, 100_000, 4096 + SIZE - 1])
def test_a_flipped_payload_bit_shows_when_it_is_read(
    root: Path, tier: DiskNodeTier, position: int
) -> None:
    record = write(tier)
    flip(only_shard(root), position)
    with tier.open_shard(record.ref) as reader:
        with pytest.raises(CorruptionError, match="chunk"):
            reader.verify()
        with pytest.raises(CorruptionError, match="chunk"):
            reader.read_payload_into(0, memoryview(bytearray(SIZE)))
        with pytest.raises(CorruptionError, match=r"CRC32C of chunks? \[?0\b"):
            list(reader.read_payload())


def test_a_payload_that_only_its_crcs_agree_with_is_refused(root: Path, tier: DiskNodeTier) -> None:
    record = write(tier)
    path = only_shard(root)
    with tier.open_shard(record.ref) as reader:
        digests = reader.table.digests
    flip(path, 100_000)
    forged = TableDigester(record.header.chunk_bytes)
    forged.update(memoryview(path.read_bytes())[4096 : 4096 + SIZE])
    table = ChunkTable(forged.finish()[1].crcs, digests)
    with path.open("r+b") as file:
        file.seek(trailer_offset(record.header))
        file.write(pack_trailer(record.header, record.blake3, table))
    with tier.open_shard(record.ref) as reader:
        with pytest.raises(CorruptionError, match="the digest of the payload is"):
            list(reader.read_payload())


@pytest.mark.parametrize("write_call", [1, 2, 3])
def test_a_copy_that_the_disk_refuses_leaves_nothing(
    root: Path, tier: DiskNodeTier, write_call: int
) -> None:
    size = 20 << 20
    file, record = shard_file(shard_header(size), payload(size))
    free = tier.free_bytes()
    writer = tier.begin_copy(record.ref, len(file))
    with failpoints(f"node.write=err@{write_call}"):
        with pytest.raises(TierError, match="writing the copy"):
            writer.write(file)
            writer.commit()
    assert tier.free_bytes() == free
    assert list(root.rglob(".tmp-*")) == list(root.rglob("*.shard")) == []


def test_a_shard_that_was_cut_while_it_is_open_ends_within_its_payload(
    root: Path, tier: DiskNodeTier
) -> None:
    record = write(tier)
    with tier.open_shard(record.ref) as reader:
        os.truncate(only_shard(root), 8192)
        with pytest.raises(CorruptionError, match="ends within its payload, at 8192"):
            list(reader.read_payload())


def test_a_shard_that_is_pruned_while_it_is_read_is_read_to_its_end(tier: DiskNodeTier) -> None:
    record = write(tier)
    with tier.open_shard(record.ref) as reader:
        tier.delete_shard(record.ref)
        assert b"".join(bytes(piece) for piece in reader.read_payload()) == payload(SIZE)


def test_quarantine_is_bounded(root: Path, tier: DiskNodeTier) -> None:
    for step in range(QUARANTINE_KEPT + 3):
        tier.quarantine(write(tier, step=step).ref, CorruptionError("test"))
    assert len(list((root / "quarantine").glob("*.shard"))) == QUARANTINE_KEPT
    assert len(list((root / "quarantine").glob("*.reason"))) == QUARANTINE_KEPT


@pytest.mark.fault("A bit is flipped in a shard's body, its header or a manifest")
@pytest.mark.parametrize("position", [0, 3, -3, -70])
def test_a_damaged_manifest_shows_and_can_be_put_again(
    root: Path, tier: DiskNodeTier, position: int
) -> None:
    tier.put_manifest(JOB_UID, CHECKPOINT, b'{"step":10}')
    (path,) = root.glob("*/manifests/**/*.json")
    flip(path, position)
    with pytest.raises(CorruptionError):
        tier.get_manifest(JOB_UID, CHECKPOINT)
    tier.put_manifest(JOB_UID, CHECKPOINT, b'{"step":10}')
    assert tier.get_manifest(JOB_UID, CHECKPOINT) == b'{"step":10}'


def test_a_misplaced_layout_is_refused(root: Path, tier: DiskNodeTier) -> None:
    one, two = tier.put_layout(b"[1]"), tier.put_layout(b"[2]")
    os.replace(root / f"layouts/{two[3:]}.json", root / f"layouts/{one[3:]}.json")
    with pytest.raises(CorruptionError):
        tier.get_layout(one)


def test_rounds_only_go_up(tier: DiskNodeTier) -> None:
    assert tier.records.read_round() is None
    tier.records.write_round(RestartRound(3), 2)
    tier.records.write_round(RestartRound(3), 2)
    for older in [(3, 1), (2, 9)]:
        with pytest.raises(StaleRoundError) as caught:
            tier.records.write_round(RestartRound(older[0]), older[1])
        assert (caught.value.own_round, caught.value.own_version) == (3, 2)
    tier.records.write_round(RestartRound(4), 0)
    assert tier.records.read_round() == (4, 0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"round":-1,"version":0}', b'{"round":1}'])
def test_a_damaged_round_is_an_error_and_not_round_0(
    root: Path, tier: DiskNodeTier, content: bytes
) -> None:
    (root / "round.json").write_bytes(content)
    with pytest.raises(CorruptionError):
        tier.records.read_round()


@pytest.mark.fault("The record of the round is damaged on the disk of a sidecar that runs")
def test_a_round_that_was_read_can_be_recorded_over_a_damaged_file(
    root: Path, tier: DiskNodeTier
) -> None:
    """The sidecar would refuse every SEAL, and its pod would not be replaced, because it answers."""
    tier.records.write_round(RestartRound(3), 2)
    (root / "round.json").write_bytes(b"")
    with pytest.raises(StaleRoundError):
        tier.records.write_round(RestartRound(3), 1)
    tier.records.write_round(RestartRound(4), 0)
    again, _ = reopened(root)
    assert again.records.read_round() == (4, 0)


def test_a_spare_becomes_a_worker_for_good(root: Path, tier: DiskNodeTier) -> None:
    assert tier.records.read_worker() is None
    tier.records.write_worker(Worker(3))
    again, _ = reopened(root)
    assert again.records.read_worker() == 3


@pytest.mark.parametrize("content", [b"", b"{", b'{"worker":-1}', b'{"round":1}'])
def test_a_damaged_worker_is_an_error_and_not_a_spare(
    root: Path, tier: DiskNodeTier, content: bytes
) -> None:
    (root / "worker.json").write_bytes(content)
    with pytest.raises(CorruptionError):
        tier.records.read_worker()


@pytest.mark.fault("The disk refuses a write because of a quota")
def test_the_budget_is_a_part_of_the_volume(root: Path) -> None:
    tier = DiskNodeTier(root, capacity_bytes=1_000_000, fill_limit=0.85)
    tier.open()
    assert tier.free_bytes() == 850_000
    record = write(tier)
    assert (
        tier.free_bytes() == 850_000 - record.file_bytes == 850_000 - tier.volume.budget.used_bytes
    )
    for rank in range(1, 3):
        write(tier, rank=rank)
    write(tier, rank=3, step=11)
    with pytest.raises(CapacityError, match=r"needs 208896 bytes, \d+ available of 850000"):
        write(tier, step=12)


def test_usage_is_counted_again_at_the_start(root: Path, tier: DiskNodeTier) -> None:
    write(tier)
    tier.put_manifest(JOB_UID, CHECKPOINT, b"{}")
    tier.put_layout(b"{}")
    tier.records.write_round(RestartRound(1), 0)
    again, _ = reopened(root)
    assert (
        0 <= again.volume.budget.used_bytes - tier.volume.budget.used_bytes < 100
    )  # the difference is round.json


def test_wrong_use_is_refused(root: Path, tier: DiskNodeTier) -> None:
    with pytest.raises(TierError, match="already open"):
        tier.open()
    with pytest.raises(TierError, match="not open yet"):
        DiskNodeTier(root).list_manifests()
    with pytest.raises(ConfigError):
        DiskNodeTier(root, fill_limit=0)
    with pytest.raises(TierError, match="reserved by the node tier"):
        tier.put_manifest(JobUid("layouts"), CHECKPOINT, b"{}")


def test_large_shards_take_several_blocks(tier: DiskNodeTier) -> None:
    data = payload((33 << 20) + 5)
    record = tier.write_shard(shard_header(len(data)), BytesSource(data))
    with tier.open_shard(record.ref) as reader:
        reader.verify()
        assert len(reader.table) == 133
        buffer = bytearray(len(data))
        reader.read_payload_into(0, memoryview(buffer))
    assert bytes(buffer) == data
