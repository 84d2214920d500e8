"""Which checkpoint a reader chooses while another run saves and prunes in the same folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from tests.support.shards.builders import BytesSource, payload, rank_layout_and_plan

import holdfast
from holdfast.directory.choice import JOB_UID, ChosenCheckpoint, choose, load_choice
from holdfast.directory.commit import Committer
from holdfast.directory.folder_store import FolderStore
from holdfast_core.errors import ConfigError, CorruptionError, NotFoundError, UnavailableError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import CheckpointId, JobUid, Rank, RestartRound, ShardRef, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardHeader
from holdfast_core.store_url import parse_store_url


class Trainer:
    """A run that commits a step and prunes, as its writer does."""

    def __init__(self, root: Path, keep_last: int, ranks: int = 1) -> None:
        self.tier = opened(root)
        self.ranks = range(ranks)
        self.committer = Committer(self.tier, root / "records", ranks, self.ranks, keep_last)

    def save(self, step: int) -> None:
        for rank in self.ranks:
            layout, plan = rank_layout_and_plan(
                rank=rank, world_size=len(self.ranks), rows_per_rank=10
            )
            self.tier.put_layout(layout)
            header = ShardHeader(
                JOB_UID,
                RestartRound(0),
                Step(step),
                Rank(rank),
                len(self.ranks),
                digest_of(layout),
                plan.total_bytes,
            )
            source = BytesSource(payload(plan.total_bytes, seed=step))
            self.committer.prepare(self.tier.write_shard(header, source), layout_digests(layout))
        checkpoint = CheckpointId(Step(step), RestartRound(0))
        self.committer.commit(checkpoint)
        self.committer.prune(checkpoint, (), leader=True)


class Reader(DiskNodeTier):
    """A reader's tier that lets the trainer continue before each read of a manifest."""

    def __init__(self, root: Path, meanwhile: Callable[[], None]) -> None:
        super().__init__(root / "tier", fill_limit=1.0, read_only=True)
        self._meanwhile = meanwhile
        self.open()

    def get_manifest(self, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        self._meanwhile()
        return super().get_manifest(job_uid, checkpoint)


def opened(root: Path) -> DiskNodeTier:
    tier = DiskNodeTier(root / "tier", fill_limit=1.0)
    tier.open()
    return tier


def chosen_step(tier: DiskNodeTier) -> int | None:
    choice = choose(tier)
    return None if choice is None else choice.manifest.step


def test_a_reader_finds_a_save_made_after_it_opened(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, keep_last=2)
    trainer.save(1)
    reader = opened(tmp_path)
    trainer.save(2)
    assert chosen_step(reader) == 2


@pytest.mark.fault("A reader reads while a training saves and prunes with keep_last=1")
def test_a_choice_finds_the_checkpoint_that_replaces_the_only_one_meanwhile(tmp_path: Path) -> None:
    """Regression: the reader asked the user to move good checkpoints away."""
    trainer = Trainer(tmp_path, keep_last=1)
    trainer.save(1)
    steps = iter([2, 3, 4])

    def meanwhile() -> None:
        step = next(steps, None)
        if step is not None:
            trainer.save(step)

    assert chosen_step(Reader(tmp_path, meanwhile)) == 4


@pytest.mark.fault("A reader takes an older step because the newest was pruned")
def test_pruning_of_the_newest_step_does_not_lead_to_an_older_choice(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, keep_last=2)
    trainer.save(1)
    trainer.save(2)
    steps = iter([3, 4])

    def meanwhile() -> None:
        for step in steps:
            trainer.save(step)

    assert chosen_step(Reader(tmp_path, meanwhile)) == 4


@pytest.mark.fault("A folder changes faster than it can be read")
def test_a_folder_that_changes_all_the_time_is_not_reported_as_damaged(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, keep_last=1)
    trainer.save(1)
    step = 1

    def meanwhile() -> None:
        nonlocal step
        step += 1
        trainer.save(step)

    with pytest.raises(UnavailableError, match="another run saves and prunes"):
        choose(Reader(tmp_path, meanwhile))


def test_a_damaged_newest_checkpoint_is_skipped(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, keep_last=2)
    trainer.save(1)
    trainer.save(2)
    (manifest,) = (tmp_path / "tier").rglob("manifests/s000000000002/*.json")
    manifest.write_bytes(b"{" + manifest.read_bytes()[1:-1])
    assert chosen_step(opened(tmp_path)) == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_checkpoint_without_the_shard_of_one_rank_is_skipped(tmp_path: Path, rank: int) -> None:
    trainer = Trainer(tmp_path, keep_last=2, ranks=3)
    trainer.save(1)
    trainer.save(2)
    (gone,) = (
        r.ref for r in trainer.tier.list_shards() if (r.header.step, r.header.rank) == (2, rank)
    )
    trainer.tier.shard_path(gone).unlink()
    assert chosen_step(opened(tmp_path)) == 1


@pytest.mark.fault("A manifest lies under another step's name in a folder")
def test_a_manifest_under_the_name_of_another_step_is_not_that_step(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, keep_last=2)
    trainer.save(1)
    manifests = tmp_path / "tier" / JOB_UID / "manifests"
    shutil.copytree(manifests / "s000000000001", manifests / "s000000000009")
    assert chosen_step(opened(tmp_path)) == 1
    shutil.rmtree(manifests / "s000000000001")
    with pytest.raises(CorruptionError, match=r"manifest of s9.* names s1"):
        choose(opened(tmp_path))


def test_a_reader_without_write_permission_changes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, keep_last=2)
    trainer.save(1)
    (shard,) = (tmp_path / "tier").rglob("*.shard")
    torn = shard.with_name(shard.name.replace("rank000000", "rank000001"))
    torn.write_bytes(shard.read_bytes()[:5000])
    (shard.parent / ".tmp-1-1").touch()
    before = sorted(tmp_path.rglob("*"))
    reader = Reader(tmp_path, lambda: None)
    assert chosen_step(reader) == 1
    reader.quarantine(reader.list_shards()[0].ref, CorruptionError("bad"))
    assert sorted(tmp_path.rglob("*")) == before


class ChangingStore:
    """A store whose only checkpoint another run replaces by the next one, as soon as it was listed."""

    url = parse_store_url("file:///store")

    def __init__(self, tier: DiskNodeTier, *listed: CheckpointId) -> None:
        self._tier = tier
        self._listed = list(listed)

    def checkpoints(self) -> frozenset[CheckpointId]:
        return frozenset({self._listed.pop(0) if len(self._listed) > 1 else self._listed[0]})

    def load(self, checkpoint: CheckpointId, has: Callable[[ShardRef], bool]) -> ChosenCheckpoint:
        if checkpoint != self._listed[-1]:
            raise NotFoundError(f"{checkpoint} was pruned")
        return load_choice(self._tier, checkpoint)


@pytest.mark.fault("Another run prunes the store during a start")
def test_a_choice_finds_the_checkpoint_that_replaces_the_only_one_of_the_store(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path / "other", keep_last=1)
    trainer.save(2)
    ids = [CheckpointId(Step(step), RestartRound(0)) for step in (1, 2)]
    store = ChangingStore(trainer.tier, *ids)
    choice = choose(opened(tmp_path), store=cast(FolderStore, store))
    assert choice.manifest.step == 2


def test_an_absent_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert choose(Reader(tmp_path / "absent", lambda: None)) is None


@pytest.mark.fault("A folder is of a build before the first release")
@pytest.mark.parametrize("old", ["prepared", "store/r000003"])
@pytest.mark.parametrize("use", [holdfast.Checkpointer, holdfast.open], ids=["train", "open"])
def test_a_folder_of_an_old_layout_is_refused_by_name(
    tmp_path: Path, old: str, use: Callable[[Path], object]
) -> None:
    (tmp_path / old).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{old}/ is of a build of Holdfast before its first"):
        use(tmp_path)


def test_a_directory_of_the_user_is_not_taken_for_an_old_layout(tmp_path: Path) -> None:
    (tmp_path / "store/run-1").mkdir(parents=True)
    holdfast.Checkpointer(tmp_path).close()
