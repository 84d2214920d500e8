"""A pinned checkpoint of a folder stays: in every retention, in a full folder, and in the store beside it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import write_checkpoint
from tests.support.shards.placements import Tensor

import holdfast
from holdfast.directory.choice import JOB_UID, pinned, pins_of
from holdfast.directory.commit import Committer
from holdfast_core.errors import ConfigError, NotFoundError, TierError
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier

WHOLE = {"w": (Tensor("F32", (12,)), np.arange(12, dtype=np.float32))}


def ids(*steps: int) -> list[CheckpointId]:
    return [CheckpointId(Step(step), RestartRound(0)) for step in steps]


def train(folder: holdfast.Folder, *steps: int) -> None:
    with holdfast.Checkpointer(folder, when_busy="wait") as ckpt:
        ckpt.restore({"w": np.zeros(12)})
        for step in steps:
            ckpt.save(step, {"w": np.full(12, float(step))}).wait(timeout=HANG_SECONDS)


def steps_of(place: Path | str) -> tuple[int, ...]:
    with holdfast.open(place) as found:
        return found.steps()


def test_a_training_keeps_what_is_pinned_until_it_is_released(tmp_path: Path) -> None:
    folder = holdfast.Folder(tmp_path, keep_last=2)
    train(folder, 1, 2)
    with holdfast.open(tmp_path) as found:
        found.pin(1)
        found.pin(1)  # a repeated pin is no error
        assert [one.pinned for one in found.listing()] == [True, False]
    train(folder, 3, 4, 5)
    assert steps_of(tmp_path) == (1, 2, 4, 5)  # 2 is what the second run restored
    with holdfast.open(tmp_path) as found:
        found.unpin(1)
        found.unpin(1)
    train(folder, 6, 7)
    assert steps_of(tmp_path) == (5, 6, 7)


def test_a_pin_holds_the_copy_in_the_store_too(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    (tmp_path / "store").mkdir()
    folder = holdfast.Folder(tmp_path / "ckpt", keep_last=2, store=store, store_keep_last=2)

    def persist(*steps: int) -> None:
        with holdfast.Checkpointer(folder, when_busy="wait") as ckpt:
            ckpt.restore({"w": np.zeros(12)})
            for step in steps:
                ckpt.save(step, {"w": np.full(12, float(step))}).wait(
                    holdfast.Level.PERSISTED, timeout=HANG_SECONDS
                )

    persist(1)
    with holdfast.open(tmp_path / "ckpt") as found:
        found.pin(1)
    persist(2, 3, 4)
    persist(5)
    assert 1 in steps_of(store)
    assert 2 not in steps_of(store)


def test_a_pinned_checkpoint_is_not_deleted_by_name(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, WHOLE, [1], step=step)
    with holdfast.open(tmp_path) as found:
        found.pin(1)
        ckpt = holdfast.Checkpointer(tmp_path)
        with pytest.raises(ConfigError, match=rf"step 1 in .* is pinned.*unpin {tmp_path}@1"):
            ckpt.delete(1)
        found.unpin(1)
        assert ckpt.delete(1)


def test_a_full_folder_keeps_pinned_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, WHOLE, [1], step=step)
    with holdfast.open(tmp_path) as found:
        found.pin(1)
    tier = DiskNodeTier(tmp_path / "tier", fill_limit=1.0)
    tier.open()
    committer = Committer(tier, tmp_path / "records", 1, range(1), keep_last=3)
    wanted = CheckpointId(Step(4), RestartRound(1))
    assert committer.make_room(wanted, None) == ids(2)[0]
    assert committer.make_room(wanted, None) is None
    assert [c for uid, c in tier.list_manifests() if uid == JOB_UID] == ids(1, 3)


def test_only_what_exists_can_be_pinned(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, WHOLE, [1], step=1)
    with holdfast.open(tmp_path) as found:
        with pytest.raises(NotFoundError, match="expected step 7, found steps 1"):
            found.pin(7)
    assert not pins_of(tmp_path).exists()


def test_the_newest_checkpoint_of_a_step_is_pinned_and_all_are_released(tmp_path: Path) -> None:
    for round_ in (0, 1):
        write_checkpoint(tmp_path, WHOLE, [1], step=5, round=round_)
    with holdfast.open(tmp_path) as found:
        found.pin(5)
        assert pinned(tmp_path) == {CheckpointId(Step(5), RestartRound(1))}
        found.unpin(5)
    assert pinned(tmp_path) == frozenset()


@pytest.mark.fault("The directory of the pins of a folder cannot be listed")
def test_nothing_is_deleted_where_the_pins_cannot_be_listed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, WHOLE, [1], step=step)
    pins_of(tmp_path).write_text("no directory")
    with pytest.raises(TierError, match=r"listing .*/pins"):
        holdfast.Checkpointer(tmp_path).delete(1)
    assert steps_of(tmp_path) == (1, 2, 3)


def test_names_that_are_no_checkpoints_pin_nothing(tmp_path: Path) -> None:
    pins_of(tmp_path).mkdir()
    for name in ("s1-r0", "s1-r0.tmp", ".nfs0001", "README"):
        (pins_of(tmp_path) / name).touch()
    assert pinned(tmp_path) == set(ids(1))


def test_a_store_keeps_no_pins(tmp_path: Path) -> None:
    (tmp_path / "team-a/uid-1/manifests/s000000000007").mkdir(parents=True)
    (tmp_path / "team-a/uid-1/manifests/s000000000007/r000000.json").write_text("{}")
    with holdfast.open(tmp_path) as found:
        for call in (found.pin, found.unpin):
            with pytest.raises(ConfigError, match=r"cannot be pinned.*folder.*Checkpoint object"):
                call(7)


def test_a_folder_that_cannot_be_written_is_not_pinned_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, WHOLE, [1], step=1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with holdfast.open(tmp_path) as found, pytest.raises(ConfigError, match="cannot be written"):
        found.pin(1)
