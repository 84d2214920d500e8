"""The file of a deleted shard is overwritten by a later write, unless a process may still read it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.crash.failpoints import failpoints
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, payload, shard_file, shard_header
from tests.support.trainer.launched import until

from holdfast_core.errors import CapacityError
from holdfast_core.node.files import DurableDirectories
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.node.volume import Budget, SpareFiles
from holdfast_core.shards.file import ShardRecord

SIZE = 300_000
MIB = 1 << 20


def opened(tmp_path: Path, capacity_bytes: int = 64 * MIB) -> DiskNodeTier:
    tier = DiskNodeTier(tmp_path / "node", capacity_bytes=capacity_bytes, fill_limit=1.0)
    tier.open()
    return tier


def save(tier: DiskNodeTier, step: int, rank: int = 0, size: int = SIZE) -> ShardRecord:
    header = shard_header(size, step=step, rank=rank, world_size=16)
    return tier.write_shard(header, BytesSource(payload(size, seed=step)))


def inode(tier: DiskNodeTier, record: ShardRecord) -> int:
    return tier.shard_path(record.ref).stat().st_ino


def spare_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "node" / "spare").iterdir())


def expect_intact(tier: DiskNodeTier, record: ShardRecord) -> None:
    with tier.open_shard(record.ref) as reader:
        reader.verify()
        data = b"".join(bytes(piece) for piece in reader.read_payload())
    step = record.header.step
    assert data == payload(record.header.payload_bytes, seed=step)


def test_a_save_overwrites_the_file_of_a_deleted_shard(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old = save(tier, 1)
    file = inode(tier, old)
    save(tier, 2)
    tier.delete_shard(old.ref)
    new = save(tier, 3)
    assert inode(tier, new) == file
    assert spare_files(tmp_path) == []
    expect_intact(tier, new)


def test_a_copy_overwrites_the_file_of_a_deleted_shard(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old = save(tier, 1)
    file_inode = inode(tier, old)
    save(tier, 2)
    tier.delete_shard(old.ref)
    header = shard_header(SIZE, step=3, rank=1, world_size=16)
    file, record = shard_file(header, payload(SIZE, seed=3))
    writer = tier.begin_copy(record.ref, len(file))
    writer.write(file)
    writer.commit()
    assert inode(tier, record) == file_inode
    expect_intact(tier, record)


@pytest.mark.parametrize("size", [SIZE * 3 // 4, SIZE * 5 // 4])
def test_a_file_of_another_size_gets_the_size_of_the_shard(tmp_path: Path, size: int) -> None:
    tier = opened(tmp_path)
    old = save(tier, 1)
    file = inode(tier, old)
    save(tier, 2)
    tier.delete_shard(old.ref)
    new = save(tier, 3, size=size)
    assert inode(tier, new) == file
    assert tier.shard_path(new.ref).stat().st_size == new.file_bytes
    expect_intact(tier, new)


@pytest.mark.fault("A shard is deleted while a reader of the process has it open")
def test_a_reader_that_is_open_still_reads_the_deleted_shard(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old = save(tier, 1)
    save(tier, 2)
    with tier.open_shard(old.ref) as reader:
        tier.delete_shard(old.ref)
        new = save(tier, 3)
        reader.verify()
        assert b"".join(map(bytes, reader.read_payload())) == payload(SIZE, seed=1)
        expect_intact(tier, new)
    file = spare_files(tmp_path)[0].stat().st_ino
    assert inode(tier, save(tier, 4)) == file  # the reader is closed now


@pytest.mark.fault("A shard is deleted while another process has it open")
def test_another_process_still_reads_the_deleted_shard(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old = save(tier, 1)
    content = tier.shard_path(old.ref).read_bytes()
    save(tier, 2)
    program = (
        "import sys; file = open(sys.argv[1], 'rb', buffering=0); print(flush=True); input(); "
        "sys.stdout.buffer.write(file.readall())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tier.shard_path(old.ref))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as reader:
        assert reader.stdout.readline() == b"\n"  # the file is open
        tier.delete_shard(old.ref)
        expect_intact(tier, save(tier, 3))
        assert reader.communicate(b"\n")[0] == content


@pytest.mark.fault("A deleted shard has a second name (hard link)")
def test_a_file_with_a_second_name_is_not_overwritten(tmp_path: Path) -> None:
    """A user may have copied the folder by hard links."""
    tier = opened(tmp_path)
    old = save(tier, 1)
    linked = tmp_path / "copy.shard"
    os.link(tier.shard_path(old.ref), linked)
    content = linked.read_bytes()
    save(tier, 2)
    tier.delete_shard(old.ref)
    expect_intact(tier, save(tier, 3))
    is_unchanged = linked.read_bytes() == content
    assert is_unchanged  # without a description of the difference, which takes minutes


@pytest.mark.fault("Fsync fails while a spare file is written")
def test_a_second_attempt_of_a_write_uses_a_new_file(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old = [save(tier, 1, rank) for rank in (0, 1)]
    for rank in (0, 1):
        save(tier, 2, rank)
    for record in old:
        tier.delete_shard(record.ref)
    with failpoints("node.fsync=err@1"):
        new = save(tier, 3)
    assert len(spare_files(tmp_path)) == 1  # only the first attempt took one
    expect_intact(tier, new)


def test_spare_files_do_not_take_room_from_other_files(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    one = save(tier, 1).file_bytes
    tier = opened(tmp_path, capacity_bytes=3 * one)
    save(tier, 2)
    tier.delete_shard(tier.list_shards()[0].ref)
    assert (tier.volume.budget.used_bytes, tier.free_bytes()) == (one, one)
    small = save(
        tier, 3, size=SIZE // 4
    )  # the spare file is too large for it, and too large beside it
    big = save(tier, 4, size=SIZE * 3 // 2)
    assert spare_files(tmp_path) == []
    assert tier.volume.budget.used_bytes == one + small.file_bytes + big.file_bytes
    with pytest.raises(CapacityError):
        save(tier, 5)


@pytest.mark.fault("The volume has room only in spare files")
def test_a_volume_without_free_room_holds_a_save_in_a_spare_file(tmp_path: Path) -> None:
    one = save(opened(tmp_path), 1).file_bytes
    tier = opened(tmp_path, capacity_bytes=2 * one)
    old, _ = tier.list_shards()[0], save(tier, 2)
    file = inode(tier, old)
    tier.delete_shard(old.ref)
    assert tier.free_bytes() == 0
    assert inode(tier, save(tier, 3)) == file


def test_a_restarted_process_uses_the_spare_files(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old = save(tier, 1)
    file = inode(tier, old)
    kept = save(tier, 2)
    tier.delete_shard(old.ref)
    tier = opened(tmp_path)
    assert tier.volume.budget.used_bytes == kept.file_bytes
    assert inode(tier, save(tier, 3)) == file
    assert tier.volume.budget.used_bytes == 2 * kept.file_bytes


def test_processes_with_one_folder_share_the_spare_files(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    old = [save(first, 1, rank) for rank in (0, 1)]
    files = {inode(first, record) for record in old}
    for rank in (0, 1):
        save(first, 2, rank)
    for record in old:
        first.delete_shard(record.ref)
    new = [save(first, 3, 0), save(second, 3, 1)]
    assert {inode(first, record) for record in new} == files


def test_no_more_spare_files_are_kept_than_ranks_have_shards(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old = [save(tier, step, rank) for step in range(3) for rank in range(2)]
    for rank in range(2):
        save(tier, 9, rank)
    for record in old:
        tier.delete_shard(record.ref)
    until(lambda: len(spare_files(tmp_path)) == 2, "spare files of two ranks")
    tier.volume.remove_spare_files()
    assert spare_files(tmp_path) == []
    assert tier.free_bytes() == 64 * MIB - tier.volume.budget.used_bytes


@pytest.mark.fault("Another program removes the directory of spare files")
def test_a_delete_works_without_the_directory_of_spare_files(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old = save(tier, 1)
    save(tier, 2)
    (tmp_path / "node" / "spare").rmdir()
    tier.delete_shard(old.ref)
    assert not tier.shard_path(old.ref).exists()
    expect_intact(tier, save(tier, 3))


class SlowBudget(Budget):
    """A budget whose first update waits for that of another thread, which has changed the files since."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, MIB, 1.0)
        self.spare_bytes = 0
        self.threads = ThreadPoolExecutor(1)
        self.other: Future[object] | None = None
        self.meanwhile = lambda: None

    def set_spare_bytes(self, size: int) -> None:
        if self.other is None:
            self.other = self.threads.submit(self.meanwhile)
            with suppress(FutureTimeoutError):
                self.other.result(0.2)
        self.spare_bytes = size


@pytest.mark.fault("Two threads count spare files")
def test_counts_of_two_threads_end_with_the_newer_number(tmp_path: Path) -> None:
    budget = SlowBudget(tmp_path)
    spares = SpareFiles(tmp_path / "spare", DurableDirectories(tmp_path), budget)
    shard = tmp_path / "a.shard"
    shard.write_bytes(bytes(1000))
    budget.meanwhile = lambda: spares.put_aside(shard)
    spares.count()
    budget.other.result(HANG_SECONDS)
    budget.threads.shutdown()
    assert budget.spare_bytes == 1000
