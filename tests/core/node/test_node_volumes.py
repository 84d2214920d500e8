"""A node tier on several volumes: shards by rank, documents on the first, no file that changes its volume.

The second volume is a file system of its own (tmpfs), so that a rename between the two would fail.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.support.crash.failpoints import failpoints
from tests.support.shards.builders import JOB_UID, BytesSource, payload, shard_file, shard_header

from holdfast_core.errors import CapacityError, CorruptionError, TierError
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.files import BufferPool
from holdfast_core.node.layouts import UNUSED_SECONDS, UnusedLayouts
from holdfast_core.node.tier import DiskNodeTier, OpenReport
from holdfast_core.shards.record import ShardRecord

SIZE = 200_000
CAPACITY = 4 << 20
CHECKPOINT = CheckpointId(Step(10), RestartRound(0))


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    first = tmp_path / "node"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as second:
        yield first, Path(second, "node-1")


def opened(
    roots: tuple[Path, Path], capacities: tuple[int, int] = (CAPACITY, CAPACITY)
) -> tuple[DiskNodeTier, OpenReport]:
    tier = DiskNodeTier(
        roots[0], capacity_bytes=capacities[0], more_volumes=[(roots[1], capacities[1])]
    )
    return tier, tier.open()


def write(tier: DiskNodeTier, rank: int, step: int = 10) -> ShardRecord:
    source = BytesSource(payload(SIZE, seed=1000 * step + rank))
    return tier.write_shard(shard_header(SIZE, rank=rank, step=step), source)


def shards(root: Path) -> list[int]:
    """Return the ranks of the shards on this volume."""
    return sorted(int(path.name[4:10]) for path in root.rglob("rank*.shard"))


def _inodes(paths: Iterable[Path]) -> set[int]:
    return {path.stat().st_ino for path in paths}


def test_the_shards_of_a_rank_are_on_one_volume_and_found_again(roots: tuple[Path, Path]) -> None:
    tier, _ = opened(roots)
    records = [write(tier, rank, step) for step in (10, 20) for rank in range(4)]
    assert [shards(root) for root in roots] == [[0, 0, 2, 2], [1, 1, 3, 3]]
    again, report = opened(roots)
    assert (report.shards, report.quarantined) == (8, ())
    assert set(again.list_shards()) == set(records)
    for record in records:
        with again.open_shard(record.ref) as reader:
            reader.verify()
    assert again.used_bytes() == tier.used_bytes()


def test_a_copy_for_another_worker_is_on_the_volume_of_its_rank(roots: tuple[Path, Path]) -> None:
    tier, _ = opened(roots)
    file, record = shard_file(shard_header(SIZE, rank=3), payload(SIZE))
    writer = tier.begin_copy(record.ref, len(file))
    writer.write(file)
    writer.commit()
    assert [shards(root) for root in roots] == [[], [3]]
    reader, _ = opened(roots)
    assert reader.look_up(record.ref) == record


def test_documents_are_on_the_first_volume(roots: tuple[Path, Path]) -> None:
    tier, _ = opened(roots)
    digest = tier.put_layout(b"{}")
    tier.put_manifest(JOB_UID, CHECKPOINT, b'{"a":1}')
    tier.write_round(RestartRound(3), 1)
    assert not [path for path in roots[1].rglob("*") if path.is_file()]
    again, _ = opened(roots)
    assert again.get_layout(digest) == b"{}"
    assert again.list_manifests() == ((JOB_UID, CHECKPOINT),)
    assert again.read_round() == (3, 1)


def test_a_full_volume_refuses_its_own_ranks_only(roots: tuple[Path, Path]) -> None:
    tier, _ = opened(roots, (CAPACITY, 2 * SIZE))
    write(tier, 1)
    with pytest.raises(CapacityError, match=str(roots[1])):
        write(tier, 3)
    write(tier, 0)
    write(tier, 2)
    assert tier.list_shards() and tier.free_bytes() > 0


def test_each_rank_may_use_its_share_of_the_smallest_volume(roots: tuple[Path, Path]) -> None:
    tier, _ = opened(roots, (8_000_000, 4_000_000))
    assert tier.limit_of_each([0]) == 6_800_000
    assert tier.limit_of_each([1]) == 3_400_000
    assert tier.limit_of_each([0, 2]) == 3_400_000
    assert tier.limit_of_each(range(4)) == 1_700_000


def test_deleted_shards_become_spare_files_of_their_volume(roots: tuple[Path, Path]) -> None:
    tier, _ = opened(roots)
    before = tier.free_bytes()
    for step in (10, 20):
        for rank in range(4):
            write(tier, rank, step)
    tier.put_manifest(JOB_UID, CHECKPOINT, b'{"a":1}')
    old = [_inodes(root.rglob("s000000000010-*/*.shard")) for root in roots]
    tier.delete_checkpoint(JOB_UID, CHECKPOINT)
    assert [shards(root) for root in roots] == [[0, 2], [1, 3]]
    assert [_inodes((root / "spare").iterdir()) for root in roots] == old
    for rank in range(4):
        write(tier, rank, step=30)
    assert [_inodes(root.rglob("s000000000030-*/*.shard")) for root in roots] == old
    for record in tier.list_shards():
        tier.delete_shard(record.ref)
    tier.remove_spare_files()
    assert not tier.remove_spare_files()
    assert tier.free_bytes() == before


def test_a_damaged_shard_is_quarantined_on_its_volume(roots: tuple[Path, Path]) -> None:
    tier, _ = opened(roots)
    record = write(tier, 1)
    tier.quarantine(record.ref, CorruptionError("a test"))
    assert len(list((roots[1] / "quarantine").glob("*.shard"))) == 1
    assert tier.find(record.ref) is None


def test_a_shard_that_was_moved_to_another_volume_is_quarantined_there(
    roots: tuple[Path, Path],
) -> None:
    tier, _ = opened(roots)
    record = write(tier, 1)
    path = tier.shard_path(record.ref)
    wrong = roots[0] / path.relative_to(roots[1])
    wrong.parent.mkdir(parents=True)
    shutil.move(path, wrong)
    again, report = opened(roots)
    assert "wrong volume" in report.quarantined[0]
    assert again.find(record.ref) is None
    assert len(list((roots[0] / "quarantine").glob("*.shard"))) == 1


def test_a_layout_that_a_shard_on_another_volume_names_is_kept(roots: tuple[Path, Path]) -> None:
    now = [0.0]
    tier, _ = opened(roots)
    layout = tier.put_layout(b"{}")
    header = shard_header(SIZE, rank=1, layout=layout)
    tier.write_shard(header, BytesSource(payload(SIZE)))
    another, _ = opened(roots)
    unused = UnusedLayouts(
        roots[0], roots, frozenset(), BufferPool(1 << 20, keep=1), lambda: now[0]
    )
    for _ in range(3):
        assert unused.look(frozenset()) == 0
        now[0] += UNUSED_SECONDS
    assert another.get_layout(layout) == b"{}"


def test_a_device_that_fails_does_not_stop_the_ranks_of_the_others(
    roots: tuple[Path, Path],
) -> None:
    tier, _ = opened(roots)
    with failpoints("node.write=err@1"), pytest.raises(TierError):
        write(tier, 1)
    kept = write(tier, 0)
    shutil.rmtree(roots[1])  # the device is gone
    with pytest.raises(TierError):
        write(tier, 3)
    assert write(tier, 2).header.rank == 2
    with tier.open_shard(kept.ref) as reader:
        reader.verify()


def test_a_volume_that_cannot_be_opened_is_named(tmp_path: Path, roots: tuple[Path, Path]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="file/node-1"):
        opened((roots[0], tmp_path / "file" / "node-1"))
