"""Disks that report success and return wrong bytes. The errors are detected before the bytes are
used."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.crash.failpoints import failpoints
from tests.support.shards.builders import JOB_UID, BytesSource, payload, shard_header

from holdfast_core.errors import (
    CapacityError,
    CorruptionError,
    HoldfastError,
    TierError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.documents import list_manifests
from holdfast_core.node.files import disk_errors
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import BLOCK_BYTES, ShardRecord

SIZE = 12 * BLOCK_BYTES
CHUNK = 4 * BLOCK_BYTES


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "node"


def opened(root: Path) -> DiskNodeTier:
    tier = DiskNodeTier(root, capacity_bytes=64 << 20)
    tier.open()
    return tier


def write(tier: DiskNodeTier, step: int = 10) -> ShardRecord:
    header = shard_header(SIZE, step=step, chunk_bytes=CHUNK)
    return tier.write_shard(header, BytesSource(payload(SIZE, seed=step)))


def path_of(root: Path, step: int = 10) -> Path:
    (path,) = root.glob(f"*/shards/s{step:012d}-*/*.shard")
    return path


def blocks(path: Path) -> int:
    return path.stat().st_size // BLOCK_BYTES


def block(path: Path, number: int) -> bytes:
    return path.read_bytes()[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def put_block(path: Path, number: int, data: bytes) -> None:
    """Replace a block, but keep the size and the times of the file."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(number * BLOCK_BYTES)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def zeroed_page(root: Path, number: int) -> None:
    put_block(path_of(root), number, bytes(BLOCK_BYTES))


def misdirected_write(root: Path, number: int) -> None:
    """Write a block that belongs to another place of this file."""
    path = path_of(root)
    put_block(path, number, block(path, (number + 1) % blocks(path)))


def lost_write(root: Path, number: int) -> None:
    """Restore the bytes of another shard that used the blocks before."""
    put_block(path_of(root), number, block(path_of(root, step=9), number))


def same_size_and_mtime(root: Path, number: int) -> None:
    path = path_of(root)
    put_block(path, number, bytes(255 - byte for byte in block(path, number)))


DAMAGE: list[Callable[[Path, int], None]] = [
    zeroed_page,
    misdirected_write,
    lost_write,
    same_size_and_mtime,
]


@pytest.mark.fault("The disk returns a page of zeros, another block or an old block")
@pytest.mark.fault("The disk stores a write at another place")
@pytest.mark.fault("The disk loses a write that it has confirmed")
@pytest.mark.fault("A file has other content with the same size and time")
@pytest.mark.parametrize(
    "damage", DAMAGE, ids=["zeroed", "misdirected", "lost", "same-size-and-time"]
)
def test_a_wrong_block_anywhere_in_a_shard_is_found(
    root: Path, damage: Callable[[Path, int], None]
) -> None:
    """The scan or a reader detects each wrong block, and no reader receives it."""
    tier = opened(root)
    write(tier, step=9)
    write(tier)
    good = path_of(root).read_bytes()
    for number in range(len(good) // BLOCK_BYTES):
        damage(root, number)
        again = DiskNodeTier(root, capacity_bytes=64 << 20)
        again.open()
        for record in again.list_shards():
            with again.open_shard(record.ref) as reader:
                if record.header.step == 9:
                    reader.verify()
                    continue
                with pytest.raises(CorruptionError):
                    reader.verify()
                with pytest.raises(CorruptionError):
                    list(reader.read_payload())
        path = path_of(root) if list(root.glob("*/shards/s000000000010-*/*.shard")) else None
        if path is None:  # the scan quarantined it
            directory = root / JOB_UID / "shards/s000000000010-r000000"
            (held,) = (root / "quarantine").glob("*.shard")
            path = directory / held.name.rpartition("--")[2]
            held.rename(path)
        path.write_bytes(good)


@pytest.mark.fault("The disk stores a write at another place")
def test_a_shard_that_took_the_place_of_another_is_refused(root: Path) -> None:
    """Both files are intact, but neither belongs to its name."""
    tier = opened(root)
    write(tier, step=9)
    record = write(tier)
    os.replace(path_of(root, step=9), path_of(root))
    with pytest.raises(CorruptionError):
        tier.open_shard(record.ref)
    again = opened(root)
    assert again.list_shards() == ()
    assert len(list((root / "quarantine").glob("*.shard"))) == 1


@pytest.mark.fault("The disk fails a read with an I/O error")
def test_a_shard_that_cannot_be_read_now_is_not_a_bad_one(root: Path) -> None:
    """EIO is an error of this read. A shard is moved to quarantine only if its bytes differ."""
    seconds = 0.0
    tier = DiskNodeTier(root, capacity_bytes=64 << 20, monotonic=lambda: seconds)
    tier.open()
    record = write(tier)
    with tier.open_shard(record.ref) as reader:
        with failpoints("node.read=err@1"), pytest.raises(UnreadableError, match="reading shard"):
            list(reader.read_payload())
        for read in (1, 2, 3):  # head, trailer, payload
            with (
                failpoints(f"node.read=err@{read}"),
                pytest.raises(UnreadableError, match="reading") as raised,
            ):
                reader.verify()
        reader.verify()
    tier.quarantine(record.ref, raised.value)
    assert tier.find(record.ref) is None
    with pytest.raises(UnreadableError, match="reading"):
        tier.look_up(record.ref)
    assert tier.list_shards() == (record,), "it is not lost"
    used = tier.volume.budget.used_bytes
    data = path_of(root).read_bytes()
    writer = tier.begin_copy(record.ref, len(data))
    writer.write(data)
    writer.commit()
    assert tier.volume.budget.used_bytes == used
    assert tier.find(record.ref) == record, "the copy of another node replaces it"
    tier.quarantine(record.ref, raised.value)
    seconds = 61.0
    assert tier.find(record.ref) == record, "it is tried again"
    assert opened(root).list_shards() == (record,)


@pytest.mark.fault("The disk refuses a write because of a quota")
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EMFILE, UnavailableError),
        (errno.ENFILE, UnavailableError),
        (errno.EIO, TierError),
        (errno.EROFS, TierError),
    ],
)
def test_each_error_of_the_disk_has_its_class(number: int, expected: type[HoldfastError]) -> None:
    """A full disk is not a broken one, and a broken one is not retried for ever."""
    with pytest.raises(expected, match=os.strerror(number)) as caught:
        with disk_errors("writing x"):
            raise OSError(number, os.strerror(number))
    assert type(caught.value) is expected


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no further file. What earlier tests have left is not closed meanwhile."""
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.fault("A process has no file descriptors left")
def test_without_descriptors_nothing_is_lost_and_nothing_stays(root: Path) -> None:
    tier = opened(root)
    record = write(tier)
    free = tier.free_bytes()
    checkpoint = CheckpointId(Step(10), RestartRound(0))
    with no_descriptors():
        with pytest.raises(UnavailableError, match="Too many open files"):
            write(tier, step=11)
        with pytest.raises(UnavailableError, match="Too many open files"):
            tier.put_manifest(JOB_UID, checkpoint, b"{}")
        with pytest.raises(UnavailableError, match="Too many open files"):
            tier.open_shard(record.ref)
    assert (tier.free_bytes(), tier.list_shards()) == (free, (record,))
    write(tier, step=11)
    tier.put_manifest(JOB_UID, checkpoint, b"{}")
    with tier.open_shard(record.ref) as reader:
        reader.verify()


@pytest.mark.fault("Bad copies take the room that a save needs")
def test_bad_copies_go_before_a_write_fails_for_lack_of_room(root: Path) -> None:
    """Bad copies are kept for users to inspect, but they are deleted before a save fails."""
    tier = DiskNodeTier(root, capacity_bytes=3 * SIZE)
    tier.open()
    for step in (10, 20):
        tier.quarantine(write(tier, step).ref, CorruptionError("a test says so"))
    assert len(list((root / "quarantine").iterdir())) == 4
    write(tier, 30)
    write(tier, 40)
    assert list((root / "quarantine").iterdir()) == []
    with pytest.raises(CapacityError):
        write(tier, 50)


@pytest.mark.fault("A quota refuses a write while bad copies are kept")
@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT"])
def test_bad_copies_go_where_the_disk_has_less_room_than_the_budget(
    root: Path, number: str
) -> None:
    """The cause may be a quota, or another program that fills the volume."""
    tier = opened(root)
    tier.quarantine(write(tier, 10).ref, CorruptionError("a test says so"))
    with failpoints(f"node.write=err:{number}@1"):
        write(tier, 20)
    assert list((root / "quarantine").iterdir()) == []
    with failpoints(f"node.write=err:{number}"), pytest.raises(CapacityError):
        write(tier, 30)


@pytest.mark.fault("A directory of the node tier is removed under way, at each level")
@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_a_directory_that_another_program_removed_is_made_again(root: Path, levels: int) -> None:
    """`levels` counts from the shard's directory upwards. The root is never created, because it may be a
    mount point."""
    tier = opened(root)
    first = tier.shard_path(write(tier, 10).ref)
    shutil.rmtree(first.parents[levels])
    if first.parents[levels] == root:
        with pytest.raises(TierError):
            write(tier, 20)
        assert not root.exists()
    else:
        with tier.open_shard(write(tier, 20).ref) as reader:
            reader.verify()


@pytest.mark.fault("A directory of the node tier is removed between two shards of one step")
def test_a_directory_that_is_removed_while_a_shard_begins_is_made_again(root: Path) -> None:
    tier = opened(root)
    other = shard_header(SIZE, step=10, rank=1, world_size=2, chunk_bytes=CHUNK)
    shutil.rmtree(tier.shard_path(write(tier, 10).ref).parent)
    with tier.open_shard(tier.write_shard(other, BytesSource(payload(SIZE, seed=1))).ref) as reader:
        reader.verify()


@pytest.mark.fault("A directory listing fails while old steps are pruned")
def test_a_listing_that_fails_is_not_taken_for_an_empty_one(root: Path) -> None:
    """Otherwise a step whose manifest is not listed would lose its shards to the next pruning."""
    tier = opened(root)
    for step in (10, 20):
        tier.put_manifest(JOB_UID, CheckpointId(Step(step), RestartRound(0)), b"{}")
    with no_descriptors(), pytest.raises(UnavailableError, match="Too many open files"):
        tier.list_manifests()
    listing = list_manifests(root)
    assert next(listing)[1].step == 10
    with no_descriptors(), pytest.raises(UnavailableError, match="Too many open files"):
        next(listing)
    assert len(tier.list_manifests()) == 2


@pytest.mark.fault("The quarantine is removed under way")
def test_another_program_removes_the_quarantine(root: Path) -> None:
    tier = DiskNodeTier(root, capacity_bytes=3 * SIZE)
    tier.open()
    record = write(tier, 10)
    shutil.rmtree(root / "quarantine")
    tier.quarantine(record.ref, CorruptionError("a test says so"))
    assert len(list((root / "quarantine").iterdir())) == 2
    shutil.rmtree(root / "quarantine")
    write(tier, 20)
    with pytest.raises(CapacityError):
        for step in (30, 40, 50):
            write(tier, step)


def test_a_shard_whose_directory_is_gone_can_be_deleted(root: Path) -> None:
    tier = opened(root)
    free = tier.free_bytes()
    record = write(tier, 10)
    shutil.rmtree(tier.shard_path(record.ref).parent)
    tier.delete_shard(record.ref)
    assert (tier.find(record.ref), tier.free_bytes()) == (None, free)


def test_a_write_notes_what_it_reads_back(tmp_path: Path) -> None:
    """Otherwise a monitor of the write would report a hanging disk while the first write is read back."""
    tier = DiskNodeTier(tmp_path, capacity_bytes=64 << 20)
    tier.open()
    data = payload(10 * 4096 + 5)
    first = BytesSource(data)
    tier.write_shard(shard_header(len(data), chunk_bytes=4096), first)
    assert first.verified_bytes == len(data), "all chunks of a rank's first write"
