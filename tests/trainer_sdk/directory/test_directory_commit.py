"""A run commits the shards that all ranks of an ended run had made durable."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.shards.builders import BytesSource, payload, rank_layout_and_plan

from holdfast.directory.choice import JOB_UID, candidates, next_round
from holdfast.directory.commit import Committer
from holdfast_core.errors import HoldfastError, NotFoundError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.keys import layout_key, manifest_key
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import CheckpointId, Digest, Rank, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardHeader

WORLD = 2
PARENT = Digest("b3:" + 64 * "a")


@pytest.fixture
def tier(tmp_path: Path) -> DiskNodeTier:
    return opened(tmp_path)


def opened(tmp_path: Path) -> DiskNodeTier:
    tier = DiskNodeTier(tmp_path / "tier", fill_limit=1.0)
    tier.open()
    return tier


def committer(tier: DiskNodeTier, tmp_path: Path, world: int = WORLD) -> Committer:
    return Committer(tier, tmp_path / "records", world, range(world), 3, parent=PARENT)


def prepare(tier: DiskNodeTier, tmp_path: Path, step: int, ranks: int = WORLD) -> CheckpointId:
    run = committer(tier, tmp_path)
    for rank in range(ranks):
        layout, plan = rank_layout_and_plan(rank=rank, world_size=WORLD, rows_per_rank=10)
        tier.put_layout(layout)
        header = ShardHeader(
            JOB_UID,
            RestartRound(0),
            Step(step),
            Rank(rank),
            WORLD,
            digest_of(layout),
            plan.total_bytes,
        )
        data = payload(plan.total_bytes, seed=step * 10 + rank)
        run.prepare(tier.write_shard(header, BytesSource(data)), layout_digests(layout))
    return CheckpointId(Step(step), RestartRound(0))


def test_the_next_run_commits_the_same_manifest_as_the_run_itself(
    tier: DiskNodeTier, tmp_path: Path
) -> None:
    checkpoint = prepare(tier, tmp_path, 5)
    # The next run has another number of ranks and no record of the parent of this run.
    next_run = dataclasses.replace(committer(tier, tmp_path, world=3), parent=None)
    shutil.copytree(tmp_path, tmp_path.with_name("itself"))
    next_run.commit_left()
    found = tier.get_manifest(JOB_UID, checkpoint)
    itself = opened(tmp_path.with_name("itself"))
    committer(itself, tmp_path.with_name("itself")).commit(checkpoint)
    assert itself.get_manifest(JOB_UID, checkpoint) == found
    assert not any((tmp_path / "records/r000000-standalone").iterdir())
    next_run.prune(CheckpointId(Step(6), RestartRound(1)), (checkpoint,), leader=True)
    assert not any((tmp_path / "records").iterdir())


def test_a_late_commit_by_the_run_itself_is_harmless(tier: DiskNodeTier, tmp_path: Path) -> None:
    checkpoint = prepare(tier, tmp_path, 5)
    committer(tier, tmp_path).commit_left()
    committer(tier, tmp_path).commit(checkpoint)
    with pytest.raises(NotFoundError):
        committer(tier, tmp_path).commit(CheckpointId(Step(6), RestartRound(0)))


@pytest.mark.fault("Another program deletes a shard between its record and the commit")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_checkpoint_without_its_shards_is_never_committed(
    tmp_path: Path, rank: int, is_listed: bool
) -> None:
    """Another program deleted a shard between its record and the commit. `is_listed`: the process that
    commits has written the shard itself."""
    tier = opened(tmp_path)
    writer = tier if is_listed else opened(tmp_path)
    checkpoint = prepare(writer, tmp_path, 5)
    (gone,) = (r for r in writer.list_shards() if r.header.rank == rank)
    tier.shard_path(gone.ref).unlink()
    with pytest.raises(NotFoundError):
        committer(tier, tmp_path).commit(checkpoint)
    assert not committer(tier, tmp_path).is_committed(checkpoint)


def test_a_checkpoint_without_its_layouts_is_never_committed(tmp_path: Path) -> None:
    """Another number of ranks could not restore it."""
    tier = opened(tmp_path)
    checkpoint = prepare(tier, tmp_path, 5)
    for record in tier.list_shards():
        (tmp_path / "tier" / layout_key(record.header.layout)).unlink(missing_ok=True)
    with pytest.raises(NotFoundError, match="has no layout"):
        committer(tier, tmp_path).commit(checkpoint)
    assert not committer(tier, tmp_path).is_committed(checkpoint)


@pytest.mark.fault("A bit of a rank's record flips before the commit")
def test_a_flipped_bit_in_a_record_never_commits_an_unreadable_checkpoint(tmp_path: Path) -> None:
    """Each byte of both records is changed, before a commit by the run itself and by the next run."""
    tier = opened(tmp_path)
    checkpoint = prepare(tier, tmp_path, 5)
    shards = {record.ref for record in tier.list_shards()}
    directory = tmp_path / "records/r000000-standalone" / str(checkpoint)
    aside = tmp_path / "aside"
    shutil.copytree(directory, aside)
    refused = 0
    for name in ("0.json", "1.json"):
        good = (directory / name).read_bytes()
        for position, bit in ((p, 1 << (p % 7)) for p in range(len(good))):
            flipped = bytearray(good)
            flipped[position] ^= bit
            (directory / name).write_bytes(flipped)
            if position % 2:
                committer(tier, tmp_path).commit_left()
            else:
                with contextlib.suppress(HoldfastError):
                    committer(tier, tmp_path).commit(checkpoint)
            committed = tier.list_manifests()
            for uid, found in committed:
                manifest = parse_manifest(tier.get_manifest(uid, found))
                refs = {manifest.ref(shard.rank) for shard in manifest.shards}
                assert refs == shards, f"byte {position} of {name}"
                for shard in manifest.shards:
                    tier.get_layout(shard.layout)
                (tmp_path / "tier" / JOB_UID / manifest_key(found)).unlink()
            refused += not committed
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(aside, directory)
    assert refused


def torn(tmp_path: Path) -> None:
    path = tmp_path / "records/r000000-standalone/s7-r0/1.json"
    path.write_bytes(path.read_bytes()[:20])


def zeroed(tmp_path: Path) -> None:
    path = tmp_path / "records/r000000-standalone/s7-r0/0.json"
    path.write_bytes(bytes(len(path.read_bytes())))


def without_a_shard(tmp_path: Path) -> None:
    (path,) = (tmp_path / "tier").rglob("s000000000007-*/rank000001*.shard")
    path.unlink()


def of_an_older_release(tmp_path: Path) -> None:
    path = tmp_path / "records/r000000-standalone/s7-r0/0.json"
    path.write_text('{"header": {}}')


def with_other_names(tmp_path: Path) -> None:
    """Add a file of a file browser, and rename a record's directory to the name of a user's copy."""
    (tmp_path / "records/r000000-standalone/.DS_Store").touch()
    (tmp_path / "records/r000000-standalone/s7-r0").rename(
        tmp_path / "records/r000000-standalone/s7-r0 (copy)"
    )


def incomplete(tmp_path: Path) -> None:
    (tmp_path / "records/r000000-standalone/s7-r0/1.json").unlink()


@pytest.mark.parametrize(
    "damage", [torn, zeroed, without_a_shard, of_an_older_release, incomplete, with_other_names]
)
def test_an_incomplete_save_is_not_committed(
    tier: DiskNodeTier, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    older = prepare(tier, tmp_path, 5)
    prepare(tier, tmp_path, 7)
    damage(tmp_path)
    again = opened(tmp_path)
    committer(again, tmp_path).commit_left()
    assert candidates(again) == [older]


def test_a_save_below_a_committed_step_is_not_committed(tier: DiskNodeTier, tmp_path: Path) -> None:
    """The process that committed the newer checkpoint prunes the older shards, so they may disappear at
    any time."""
    newer = prepare(tier, tmp_path, 7)
    committer(tier, tmp_path).commit(newer)
    prepare(tier, tmp_path, 5)
    committer(tier, tmp_path).commit_left()
    assert candidates(tier) == [newer]


def test_a_round_that_left_records_is_not_reserved_again(
    tier: DiskNodeTier, tmp_path: Path
) -> None:
    """The user moved the checkpoints away. Another step 5 must not be combined with the records of this
    one."""
    prepare(tier, tmp_path, 5, ranks=1)
    empty = DiskNodeTier(tmp_path / "empty", fill_limit=1.0)
    empty.open()
    assert next_round(empty, committer(tier, tmp_path).rounds) == 1


def test_a_checkpoint_that_was_pruned_meanwhile_is_not_committed_again(
    tier: DiskNodeTier, tmp_path: Path
) -> None:
    """The index of this process still lists the shards."""
    prepare(tier, tmp_path, 5)
    for path in (tmp_path / "tier").rglob("*.shard"):
        path.unlink()
    committer(tier, tmp_path).commit_left()
    assert candidates(tier) == []
