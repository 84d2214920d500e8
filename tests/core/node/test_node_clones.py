"""Chunks that have not changed since the last save are cloned where the file system can do that."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.crash.failpoints import failpoints
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.volumes import cannot_make, free_bytes, make_image, mounted, small_volume

from holdfast_core.errors import CapacityError, CorruptionError
from holdfast_core.node.clone import Clone, clone_range
from holdfast_core.node.files import write_at
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.record import ShardRecord

CHUNK = 8192
FROZEN = payload(38 * CHUNK, seed=1000)
MIB = 1 << 20


@dataclass
class CopyingClone:
    """Stands for a file system that clones: the target gets the bytes that the source file has now. Each
    call that is not refused is recorded as (target's offset, bytes)."""

    refuses: int | None = None
    refused: int = 0
    made: list[tuple[int, int]] = field(default_factory=list)

    def __call__(
        self, source: int, offset: int, target: int, target_offset: int, length: int
    ) -> None:
        if offset % 4096 or target_offset % 4096 or length % 4096 or not length:
            raise AssertionError(f"a kernel refuses {offset}, {target_offset}, {length}")
        data = memoryview(os.pread(source, length, offset))
        if self.refuses is not None:
            self.refused += 1
            # The kernel may have cloned a part before the error.
            write_at(target, data[:4096], target_offset)
            raise OSError(self.refuses, os.strerror(self.refuses))
        write_at(target, data, target_offset)
        self.made.append((target_offset, length))


def opened(root: Path, clone: Clone) -> DiskNodeTier:
    tier = DiskNodeTier(root / "node", capacity_bytes=256 * MIB, clone=clone)
    tier.open()
    return tier


def state(step: int) -> bytes:
    """Return 2.5 chunks that change, 38 chunks that do not and are not aligned, and 100 bytes."""
    return payload(2 * CHUNK + CHUNK // 2, seed=step) + FROZEN + payload(100, seed=step)


def save(tier: DiskNodeTier, step: int, data: bytes | None = None) -> ShardRecord:
    data = state(step) if data is None else data
    return tier.write_shard(
        shard_header(len(data), step=step, chunk_bytes=CHUNK), BytesSource(data)
    )


def saved(tier: DiskNodeTier, record: ShardRecord) -> bytes:
    with tier.open_shard(record.ref) as reader:
        reader.verify()
        return b"".join(bytes(piece) for piece in reader.read_payload())


def test_the_third_save_clones_whole_chunks_that_did_not_change(tmp_path: Path) -> None:
    clone = CopyingClone()
    tier = opened(tmp_path, clone)
    records = [save(tier, step) for step in (1, 2)]
    assert clone.made == []
    records += [save(tier, step) for step in (3, 4)]
    head = 4096
    assert clone.made == 2 * [(head + 3 * CHUNK, 37 * CHUNK)]
    assert [saved(tier, record) for record in records] == [state(step) for step in (1, 2, 3, 4)]


def test_a_state_that_changes_everywhere_is_written(tmp_path: Path) -> None:
    clone = CopyingClone()
    tier = opened(tmp_path, clone)
    for step in range(4):
        save(tier, step, payload(40 * CHUNK, seed=step))
    assert clone.made == []


def test_the_first_saves_of_a_process_are_written_whole(tmp_path: Path) -> None:
    """The files of an earlier process may have decayed since then, so a run does not rely on them alone."""
    for step in (1, 2, 3):
        save(opened(tmp_path, CopyingClone()), step)
    clone = CopyingClone()
    tier = opened(tmp_path, clone)
    save(tier, 4)
    save(tier, 5)
    assert clone.made == []


def test_a_state_that_grows_and_shrinks_clones_what_is_in_both(tmp_path: Path) -> None:
    clone = CopyingClone()
    tier = opened(tmp_path, clone)
    sizes = [40, 40, 30, 50, 50]
    states = [(FROZEN + FROZEN)[: n * CHUNK] + bytes([n]) for n in sizes]
    records = [save(tier, step, data) for step, data in enumerate(states)]
    assert [length // CHUNK for _, length in clone.made] == [30, 30, 50]
    assert [saved(tier, record) for record in records] == states


@pytest.mark.parametrize("how", ["pruned", "quarantined", "torn", "removed"])
def test_a_last_shard_that_is_gone_or_bad_is_not_cloned(tmp_path: Path, how: str) -> None:
    clone = CopyingClone()
    tier = opened(tmp_path, clone)
    records = [save(tier, step) for step in (1, 2)]
    last = tier.shard_path(records[1].ref)
    match how:
        case "pruned":
            tier.delete_shard(records[1].ref)
        case "quarantined":
            tier.quarantine(records[1].ref, CorruptionError("a test says so"))
        case "torn":
            os.truncate(last, last.stat().st_size - 4096)
        case _:
            last.unlink()
    assert saved(tier, save(tier, 3)) == state(3)
    assert clone.made == []
    assert saved(tier, save(tier, 4)) == state(4)
    assert len(clone.made) == 1


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EIO])
def test_a_file_system_that_refuses_is_asked_once(tmp_path: Path, number: int) -> None:
    clone = CopyingClone(refuses=number)
    tier = opened(tmp_path, clone)
    records = [save(tier, step) for step in range(5)]
    assert clone.refused == 1
    assert [saved(tier, record) for record in records] == [state(step) for step in range(5)]


def test_a_full_file_system_is_not_one_that_refuses(tmp_path: Path) -> None:
    clone = CopyingClone()
    tier = opened(tmp_path, clone)
    save(tier, 1)
    save(tier, 2)
    clone.refuses = errno.ENOSPC
    free = tier.free_bytes()
    with pytest.raises(CapacityError):
        save(tier, 3)
    assert tier.free_bytes() == free
    assert not list(tmp_path.rglob(".tmp-*"))
    clone.refuses = None
    assert saved(tier, save(tier, 3)) == state(3)
    assert len(clone.made) == 1


def test_a_shared_chunk_that_decays_is_found_and_written_again(tmp_path: Path) -> None:
    """F26 in blocks that all steps share: within 64 saves, each chunk is read back once."""
    clone = CopyingClone()
    tier = opened(tmp_path, clone)
    save(tier, 1)
    rotten = 20
    with tier.shard_path(save(tier, 2).ref).open("r+b") as file:
        file.seek(4096 + rotten * CHUNK)
        file.write(b"rot")
    good = [saved_or_bad(tier, save(tier, step)) == state(step) for step in range(3, 80)]
    first = good.index(True)
    assert 0 < first < 64, "the damage spread at first, and was found"
    assert all(good[first:])


def saved_or_bad(tier: DiskNodeTier, record: ShardRecord) -> bytes | None:
    with tier.open_shard(record.ref) as reader:
        data = bytearray(record.header.payload_bytes)
        try:
            reader.read_payload_into(0, memoryview(data))
        except Exception as error:  # noqa: BLE001 - the assertion of the caller tells
            assert "CRC32C of chunk" in str(error)
            return None
    return bytes(data)


def test_a_cloned_shard_that_reads_back_badly_is_written_whole(tmp_path: Path) -> None:
    clone = CopyingClone()
    tier = opened(tmp_path, clone)
    save(tier, 1)
    save(tier, 2)
    with failpoints("node.fsync=err@1"):
        record = save(tier, 3)
    assert len(clone.made) == 1, "by the first attempt alone"
    assert saved(tier, record) == state(3)


def leave_hole(source: int, offset: int, target: int, target_offset: int, length: int) -> None:
    """Play a clone that takes no room. The bytes are wrong, which only a read-back detects."""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_cloned_chunks_need_no_room(tmp_path: Path) -> None:
    """The volume has room for the changed chunks of a third step, but not for another whole shard."""
    size = len(state(1))
    with small_volume(tmp_path / "volume", size * 5 // 2) as volume:
        tier = DiskNodeTier(volume / "node", fill_limit=1.0, clone=leave_hole)
        tier.open()
        save(tier, 1)
        record = save(tier, 2)
        assert tier.free_bytes() < size
        third = save(tier, 3)  # the read-back of this write checks a chunk that was not cloned
        free = tier.free_bytes()
        with pytest.raises(CapacityError, match=f"needs {third.file_bytes} bytes,"):
            save(
                tier, 4
            )  # a hole is read back, and the attempt without clones needs the whole room
        assert tier.free_bytes() == free, "nothing stays reserved"
        assert set(tier.list_shards()) >= {record, third}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_volume_that_refuses_clones_is_filled_at_most_once(tmp_path: Path) -> None:
    """The write that detects the refusal fails, because it reserved too little. The next one reserves the
    whole size."""
    size = len(state(1))
    clone = CopyingClone(refuses=errno.EOPNOTSUPP)
    with small_volume(tmp_path / "volume", size * 5 // 2) as volume:
        tier = DiskNodeTier(volume / "node", fill_limit=1.0, clone=clone)
        tier.open()
        save(tier, 1)
        save(tier, 2)
        with pytest.raises(CapacityError, match="no room on the volume"):
            save(tier, 3)
        with pytest.raises(CapacityError, match=r"into .*: needs"):
            save(tier, 3)
        assert clone.refused == 1


KINDS = [
    pytest.param(
        kind, marks=pytest.mark.skipif(cannot_make(kind) is not None, reason=str(cannot_make(kind)))
    )
    for kind in ("xfs", "btrfs")
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_file_system_stores_unchanged_chunks_once(tmp_path: Path, kind: str) -> None:
    """The chunks stay as long as a step needs them, and acknowledged steps survive a power cut."""
    make_image(kind, tmp_path / "image")

    def big(step: int) -> bytes:
        return payload(MIB, seed=step) + 32 * payload(MIB, seed=1000)

    with mounted(tmp_path / "image", tmp_path / "volume") as volume:
        tier = opened(volume, clone_range)
        records = [save(tier, step, big(step)) for step in (1, 2)]
        free = free_bytes(volume)
        records += [save(tier, step, big(step)) for step in (3, 4, 5, 6)]
        # A power cut leaves on the device what had been synced.
        shutil.copyfile(tmp_path / "image", tmp_path / "after")
        assert 4 * MIB <= free - free_bytes(volume) < 6 * MIB
        for record in records[:-1]:
            tier.delete_shard(record.ref)
        assert saved(tier, records[-1]) == big(6)
    with mounted(tmp_path / "after", tmp_path / "restarted") as volume:
        again = opened(volume, clone_range)
        assert [saved(again, record) for record in records] == [big(n) for n in range(1, 7)]
