"""What pruning and making room delete, what they leave to others, and that they exclude one another."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from tests.support.shards.builders import BytesSource, payload, rank_layout_and_plan

from holdfast.directory.choice import JOB_UID
from holdfast.directory.commit import Committer, delete_step
from holdfast.directory.processes import claim_checkpoint
from holdfast_core.errors import ConfigError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, ShardRef, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardHeader

ZERO = RestartRound(0)
LAYOUT, PLAN = rank_layout_and_plan(rank=0, world_size=1, rows_per_rank=10)


def id_of(step: int) -> CheckpointId:
    return CheckpointId(Step(step), ZERO)


class Watched(DiskNodeTier):
    """A tier that calls `seen` before each change that must not happen beside another one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, fill_limit=1.0)
        self.seen: Callable[[], object] = lambda: None

    def put_manifest(self, job_uid: JobUid, checkpoint: CheckpointId, document: bytes) -> Digest:
        self.seen()
        return super().put_manifest(job_uid, checkpoint, document)

    def delete_checkpoint(self, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        self.seen()
        super().delete_checkpoint(job_uid, checkpoint)

    def delete_shard(self, ref: ShardRef) -> None:
        self.seen()
        super().delete_shard(ref)


class Folder:
    """A folder of one rank with two kept checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tier = Watched(root / "tier")
        self.tier.open()
        self.run = Committer(self.tier, root / "records", 1, range(1), 2)

    def prepare(self, step: int, round_: int = 0) -> CheckpointId:
        self.tier.put_layout(LAYOUT)
        checkpoint = CheckpointId(Step(step), RestartRound(round_))
        header = ShardHeader(
            JOB_UID,
            checkpoint.round,
            checkpoint.step,
            Rank(0),
            1,
            digest_of(LAYOUT),
            PLAN.total_bytes,
        )
        source = BytesSource(payload(PLAN.total_bytes, seed=step))
        self.run.prepare(self.tier.write_shard(header, source), layout_digests(LAYOUT))
        return checkpoint

    def commit(self, *steps: int) -> None:
        """Commit steps in round 0."""
        for step in steps:
            self.run.commit(self.prepare(step))

    def commit_in(self, round_: int, step: int) -> None:
        self.run.commit(self.prepare(step, round_))

    def prune(self, newest: int, protected: Collection[CheckpointId] = ()) -> list[int]:
        """Prune after a commit, and return the steps that stay."""
        self.run.prune(id_of(newest), protected, leader=True)
        return self.steps()

    def steps(self) -> list[int]:
        return sorted(checkpoint.step for _, checkpoint in self.tier.list_manifests())

    def is_locked(self) -> bool:
        """Return whether another process would have to wait before it may commit or delete."""
        descriptor = os.open(self.root / ".prune", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_newest_checkpoints_stay(folder: Folder) -> None:
    folder.commit(1, 2, 3, 4)
    assert folder.prune(4) == [3, 4]
    assert {r.header.step for r in folder.tier.list_shards()} == {3, 4}


def test_a_checkpoint_that_another_process_reads_stays_until_it_has_ended(folder: Folder) -> None:
    folder.commit(1, 2, 3, 4)
    reader = claim_checkpoint(folder.root, id_of(1))
    assert folder.prune(4) == [1, 3, 4]
    reader.release()
    assert folder.prune(4) == [3, 4]


def test_the_restore_point_of_the_run_stays(folder: Folder) -> None:
    folder.commit(1, 2, 3, 4)
    assert folder.prune(4, {id_of(1)}) == [1, 3, 4]


def test_a_newer_save_that_is_not_committed_yet_stays(folder: Folder) -> None:
    folder.commit(1, 2, 3)
    folder.prepare(4)
    assert folder.prune(3) == [2, 3]
    assert {r.header.step for r in folder.tier.list_shards()} == {2, 3, 4}
    folder.run.commit(id_of(4))
    assert folder.steps() == [2, 3, 4]


def test_an_older_save_that_was_never_committed_is_deleted(folder: Folder) -> None:
    folder.prepare(1)
    folder.commit(2, 3)
    folder.prune(3)
    assert {r.header.step for r in folder.tier.list_shards()} == {2, 3}
    assert not folder.run.is_prepared(id_of(1), Rank(0))


def test_a_save_that_is_deleted_for_room_loses_its_record_first(folder: Folder) -> None:
    """A kill between the two must leave no record of a shard that does not exist."""
    folder.commit(2)
    prepared = folder.prepare(3)
    had_record: list[bool] = []
    folder.tier.seen = lambda: had_record.append(folder.run.is_prepared(prepared, Rank(0)))
    assert folder.run.make_room(id_of(4), None) == prepared
    assert had_record == [False]
    assert folder.steps() == [2]


def test_the_oldest_checkpoint_makes_room_and_the_newest_one_never_does(folder: Folder) -> None:
    folder.commit(1, 2)
    assert folder.run.make_room(id_of(3), None) == id_of(1)
    assert folder.run.make_room(id_of(3), None) is None
    assert folder.steps() == [2]


def test_the_restore_point_makes_room_only_after_a_checkpoint_of_the_run(folder: Folder) -> None:
    """Before that, the run would have to start from a checkpoint that nothing has shown to be readable."""
    folder.commit(1, 2)
    wanted = CheckpointId(Step(3), RestartRound(1))
    assert folder.run.make_room(wanted, id_of(1)) is None
    folder.commit_in(1, 3)
    assert folder.run.make_room(CheckpointId(Step(4), RestartRound(1)), id_of(1)) == id_of(1)


def test_a_checkpoint_in_use_is_not_deleted_by_hand(folder: Folder) -> None:
    folder.commit(1, 2)
    reader = claim_checkpoint(folder.root, id_of(1))
    assert reader is not None
    with pytest.raises(ConfigError, match="is in use"):
        delete_step(folder.root, Step(1), even_last=False)
    assert folder.steps() == [1, 2]
    reader.release()
    assert delete_step(folder.root, Step(1), even_last=False)
    assert folder.steps() == [2]


def commit(folder: Folder) -> None:
    folder.run.commit(id_of(5))


def commit_left(folder: Folder) -> None:
    folder.run.commit_left()


def prune(folder: Folder) -> None:
    folder.prune(4)


def make_room(folder: Folder) -> None:
    folder.run.make_room(id_of(6), None)


@pytest.mark.parametrize("change", [commit, commit_left, prune, make_room])
def test_no_process_commits_or_deletes_while_another_one_does(
    folder: Folder, change: Callable[[Folder], None]
) -> None:
    folder.commit(1, 2, 3, 4)
    folder.prepare(5)
    locked: list[bool] = []
    folder.tier.seen = lambda: locked.append(folder.is_locked())
    change(folder)
    assert locked and all(locked)
    assert not folder.is_locked()
