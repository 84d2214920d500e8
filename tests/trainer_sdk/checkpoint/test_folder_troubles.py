"""A folder that becomes full, or is deleted or unmounted, while a training saves into it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, payload, rank_layout_and_plan
from tests.support.shards.folders import delete_at_once
from tests.support.trainer.launched import committed_step, persisters_of, until

import holdfast
from holdfast.directory.choice import JOB_UID, candidates
from holdfast.directory.commit import Committer
from holdfast.places import slot_directory
from holdfast_core.errors import CapacityError, SaveFailedError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardHeader

MIB = 1 << 20
mounts = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")


class Volume:
    """A small file system that can be unmounted. A different directory lies below its mount point."""

    def __init__(self, path: Path, size_mib: int) -> None:
        self.path = path
        path.mkdir()
        self.run("mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", str(path))

    def run(self, *command: str) -> None:
        subprocess.run(command, check=True)

    def unmount(self) -> None:
        self.run("umount", "--lazy", str(self.path))

    def move(self, to: Path) -> None:
        """Unmount the volume here and keep it mounted at `to`."""
        to.mkdir(exist_ok=True)
        self.run("mount", "--bind", str(self.path), str(to))
        self.unmount()

    def bring_back(self, kept: Path) -> None:
        self.run("mount", "--bind", str(kept), str(self.path))
        self.run("umount", "--lazy", str(kept))


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    made = Volume(tmp_path / "volume", 10)
    yield made
    for path in (made.path, tmp_path / "kept"):
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


def state(value: float, mib: int = 3) -> dict[str, Any]:
    return {"t": np.full(mib * MIB // 8, value)}


def steps_in(folder: Path) -> list[int]:
    tier = DiskNodeTier(folder / "tier", fill_limit=1.0, read_only=True)
    tier.open()
    return sorted(checkpoint.step for checkpoint in candidates(tier))


@pytest.mark.fault("A folder has room for two of three checkpoints")
@mounts
def test_a_folder_with_room_for_two_of_three_checkpoints_keeps_saving(
    volume: Volume, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: only a commit pruned, and without room for a further commit no later save succeeded."""
    folder = volume.path / "ckpt"
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=3), on_save_error="raise") as ckpt:
        for step in range(1, 9):
            ckpt.save(step, state(step)).wait(timeout=HANG_SECONDS)
        assert ckpt.saves_failed == 0
    assert steps_in(folder)[-1] == 8
    assert "although keep_last is 3" in capfd.readouterr().err
    with holdfast.Checkpointer(dir=folder) as ckpt:
        found = state(0)
        assert ckpt.restore(found) == 8
        assert (found["t"] == 8).all()


@pytest.mark.fault("A folder has room for one checkpoint")
@mounts
def test_a_save_without_room_keeps_the_only_checkpoint(volume: Volume) -> None:
    folder = volume.path / "ckpt"
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=3)) as ckpt:
        ckpt.save(1, state(1, 6)).wait(timeout=HANG_SECONDS)
        for step in (2, 3):
            with pytest.raises(SaveFailedError, match=f"{folder} has no room for step {step}"):
                ckpt.save(step, state(step, 6)).wait(timeout=HANG_SECONDS)
    assert ckpt.saves_failed == 2
    assert steps_in(folder) == [1]


@pytest.mark.fault("The disk is full at the last step")
@mounts
def test_the_last_save_on_a_full_disk_is_an_error(volume: Volume) -> None:
    filler = volume.path / "of-another-program"
    with (
        pytest.raises(SaveFailedError, match="has no room for step 2"),
        holdfast.Checkpointer(dir=volume.path / "ckpt", on_save_error="raise") as ckpt,
    ):
        ckpt.save(1, state(1)).wait(timeout=HANG_SECONDS)
        filler.write_bytes(bytes(6 * MIB))
        ckpt.save(2, state(2))
    filler.unlink()
    with holdfast.Checkpointer(dir=volume.path / "ckpt") as ckpt:
        assert ckpt.restore(state(0)) == 1


@pytest.mark.fault("A full folder is opened and restored from")
@mounts
def test_a_full_folder_can_be_opened_and_restored_from(volume: Volume) -> None:
    with holdfast.Checkpointer(dir=volume.path / "ckpt") as ckpt:
        ckpt.save(1, state(1)).wait(timeout=HANG_SECONDS)
    with pytest.raises(OSError, match="No space"), open(volume.path / "rest", "wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    with holdfast.Checkpointer(dir=volume.path / "ckpt") as ckpt:
        found = state(0)
        assert ckpt.restore(found) == 1
        assert (found["t"] == 1).all()


class Gang:
    """Two ranks with a writer each, which share one folder."""

    def __init__(self, root: Path) -> None:
        self.layouts = [
            rank_layout_and_plan(rank=r, world_size=2, rows_per_rank=10) for r in (0, 1)
        ]
        self.committers = []
        for rank in (0, 1):
            tier = DiskNodeTier(root / "tier", fill_limit=1.0)
            tier.open()
            ranks = range(rank, rank + 1)
            self.committers.append(Committer(tier, root / "records", 2, ranks, 3))

    def write(self, rank: int, step: int) -> CheckpointId:
        layout, plan = self.layouts[rank]
        run = self.committers[rank]
        run.tier.put_layout(layout)
        header = ShardHeader(
            JOB_UID,
            RestartRound(0),
            Step(step),
            Rank(rank),
            2,
            digest_of(layout),
            plan.total_bytes,
        )
        source = BytesSource(payload(plan.total_bytes, seed=10 * step + rank))
        run.prepare(run.tier.write_shard(header, source), layout_digests(layout))
        return CheckpointId(Step(step), RestartRound(0))

    def save(self, step: int) -> CheckpointId:
        checkpoint = self.write(0, step)
        self.write(1, step)
        self.committers[0].commit(checkpoint)
        return checkpoint


@pytest.mark.fault("A folder is full and has abandoned steps")
def test_a_full_folder_deletes_old_checkpoints_and_their_orphans_first(tmp_path: Path) -> None:
    """Rank 1 never wrote steps 2 and 5. Rank 0's shards of these steps take room but form no checkpoint."""
    gang = Gang(tmp_path)
    for step in (1, 3, 4):
        gang.save(step)
    for step in (2, 5):
        gang.write(0, step)
    wanted = CheckpointId(Step(6), RestartRound(0))
    gone = []
    while (one := gang.committers[0].make_room(wanted, None)) is not None:
        gone.append(one.step)
    assert gone == [2, 1, 3, 5]
    assert [c.step for c in candidates(gang.committers[0].tier)] == [4]
    assert not gang.committers[0].is_prepared(CheckpointId(Step(5), RestartRound(0)), Rank(0))
    # Rank 0 deletes only its own shards. Rank 1 deletes its shards of the same steps when it needs room.
    gone = []
    while (one := gang.committers[1].make_room(wanted, None)) is not None:
        gone.append(one.step)
    assert gone == [1, 3]


@pytest.mark.fault("A folder is full with its restore point")
def test_the_restore_point_stays_before_this_run_has_a_checkpoint(tmp_path: Path) -> None:
    gang = Gang(tmp_path)
    first = gang.save(1)
    gang.save(2)  # the user may have found that step 2 is bad
    wanted = CheckpointId(Step(3), RestartRound(1))
    assert gang.committers[0].make_room(wanted, protected=first) is None
    assert gang.committers[0].make_room(wanted, protected=None) == first


@pytest.mark.fault("A folder is deleted under way")
def test_a_deleted_folder_is_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, state(1)).wait(timeout=HANG_SECONDS)
        delete_at_once(folder)
        until(lambda: is_saved(ckpt, 2), "a save into the new folder")
    assert committed_step(folder) == 2
    with holdfast.Checkpointer(dir=folder) as ckpt:
        assert ckpt.restore({**state(0), "extra": ""}) == 2


@pytest.mark.fault("A part of a folder is deleted under way")
@pytest.mark.parametrize("what", ["tier", "tier/standalone", "tier/layouts", "records", "rounds"])
def test_a_deleted_part_of_a_folder_is_created_again(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, state(1)).wait(timeout=HANG_SECONDS)
        shutil.rmtree(folder / what, ignore_errors=True)
        until(lambda: is_saved(ckpt, 2, extra=what), "a save after that")


@pytest.mark.fault("A folder's file system is unmounted and comes back")
@mounts
@pytest.mark.parametrize("below", ["", "team/ckpt"], ids=["the volume itself", "below it"])
def test_an_unmounted_folder_fails_saves_until_it_is_back(
    volume: Volume, tmp_path: Path, below: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = volume.path / below
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, state(1, 1)).wait(timeout=HANG_SECONDS)
        volume.move(tmp_path / "kept")
        failed = ckpt.save(2, state(2, 1))
        until(lambda: "is no longer mounted there" in caplog.text, "the reason is logged")
        assert list(volume.path.iterdir()) == [], "the directory below the mount point"
        volume.bring_back(tmp_path / "kept")
        until(lambda: "saves continue" in caplog.text, "the folder is back")
        until(lambda: failed.settled, "an end of the save in between")
        ckpt.save(3, state(3, 1)).wait(timeout=HANG_SECONDS)
    assert committed_step(folder) == 3


def is_saved(ckpt: holdfast.Checkpointer, step: int, extra: str = "") -> bool:
    handle = ckpt.save(step, {**state(step), "extra": extra})
    try:
        handle.wait(timeout=HANG_SECONDS)
    except SaveFailedError:
        return False
    return True


@pytest.fixture
def small_memory(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small shared memory, as in a container that was started without --shm-size."""
    monkeypatch.setattr(slot_directory, "SHARED_MEMORY", volume.path)
    return volume.path


@pytest.mark.fault("Docker gives a container a small /dev/shm")
@mounts
def test_slots_without_room_in_shared_memory_are_in_the_folder(
    tmp_path: Path, small_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder, on_save_error="raise") as ckpt:
        ckpt.save(1, state(1, 1)).wait(timeout=HANG_SECONDS)
        assert list(small_memory.rglob("*.slot"))
        for step in (2, 3, 4):  # the state has grown
            ckpt.save(step, state(step, 8)).wait(timeout=HANG_SECONDS)
        assert not list(small_memory.rglob("*.slot"))
    assert caplog.text.count("saves are slower") == 1
    assert "--shm-size" in caplog.text and "spec." not in caplog.text
    assert not (folder / "memory").exists()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        found = state(0, 8)
        assert ckpt.restore(found) == 4
        assert (found["t"] == 4).all()
    assert not (folder / "memory").exists()


@pytest.mark.fault("A script names `slots_dir`")
@mounts
def test_slots_are_in_the_directory_that_the_script_names(
    tmp_path: Path, small_memory: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with holdfast.Checkpointer(holdfast.Folder(tmp_path / "ckpt", slots_dir=other)) as ckpt:
        ckpt.save(1, state(1, 20)).wait(timeout=HANG_SECONDS)
        assert list(other.rglob("*.slot"))
        assert list(small_memory.iterdir()) == []
    assert list(other.iterdir()) == []
    with (
        pytest.raises(CapacityError, match="set another directory"),
        holdfast.Checkpointer(holdfast.Folder(tmp_path / "ckpt", slots_dir=small_memory)) as ckpt,
    ):
        ckpt.allocate(state(1, 20))


CLUSTER_WORDS = ("sidecar", "spec.checkpoint", "node tier", "emptyDir", "pod")


@pytest.mark.fault("A folder's message is printed where there is no cluster")
@mounts
def test_messages_about_a_folder_do_not_mention_a_cluster(
    volume: Volume,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The cases are a full disk, a killed writer, a folder that is gone, and too little memory."""
    folder = volume.path / "ckpt"
    said = []
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, state(1, 6)).wait(timeout=HANG_SECONDS)
        full = ckpt.save(2, state(2, 6))
        with pytest.raises(SaveFailedError) as error:
            full.wait(timeout=HANG_SECONDS)
        said.append(str(error.value))
        with pytest.raises(CapacityError) as no_memory:
            ckpt.allocate({"t": np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 45,), (0,))})
        said.append(str(no_memory.value))
        (writer,) = persisters_of(os.getpid(), folder)
        os.kill(writer, signal.SIGKILL)
        until(lambda: "saves continue" in caplog.text, "the next writer")
        volume.unmount()
        until(lambda: ckpt.save(3, state(3, 6)).failure is not None, "a failed save")
    said += [caplog.text, capfd.readouterr().err]
    for text in said:
        assert [word for word in CLUSTER_WORDS if word in text] == []
