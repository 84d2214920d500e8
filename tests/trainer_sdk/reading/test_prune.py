"""A policy prunes a folder and a store: what is deleted, what stays, and what an interruption leaves."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from tests.support.crash.crash import report_of
from tests.support.crash.traced import can_trace
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import write_checkpoint
from tests.support.shards.placements import Tensor
from tests.support.tiers.stored_checkpoints import StoredStep, Values, store_step, values

import holdfast
from holdfast.reading.opening import verify
from holdfast.reading.pruning import PrunePlan
from holdfast_core.errors import ConfigError, CorruptionError, TierError
from holdfast_core.node.files import TEMP_PREFIX
from holdfast_core.retention import BestMode, KeepBest, RetentionPolicy, RetentionReason
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier

Reason = RetentionReason
WHOLE = {"w": (Tensor("F32", (12,)), np.arange(12, dtype=np.float32))}


def steps(plan: PrunePlan) -> tuple[list[int], dict[int, RetentionReason]]:
    pruned = [one.checkpoint.step for one in plan.prune]
    return pruned, {one.checkpoint.step: one.reason for one in plan.keep}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the steps 1 to 6, an hour apart."""
    for step in range(1, 7):
        write_checkpoint(tmp_path, WHOLE, [2], step=step)
        (manifest,) = tmp_path.rglob(f"manifests/s{step:012d}/*")
        at = manifest.stat().st_mtime - 3600 * (6 - step)
        os.utime(manifest, (at, at))
    return tmp_path


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (RetentionPolicy(2), {6: Reason.KEEP_LAST, 5: Reason.KEEP_LAST}),
        (RetentionPolicy(1), {6: Reason.KEEP_LAST}),
        (
            RetentionPolicy(1, every_steps=3),
            {6: Reason.KEEP_LAST, 3: Reason.KEEP_EVERY},
        ),
        (
            RetentionPolicy(1, keep_for=timedelta(minutes=150)),
            {6: Reason.KEEP_LAST, 5: Reason.KEEP_FOR, 4: Reason.KEEP_FOR},
        ),
        (
            RetentionPolicy(1, hourly=3),
            {6: Reason.KEEP_LAST, 5: Reason.KEEP_HOURLY, 4: Reason.KEEP_HOURLY},
        ),
    ],
)
def test_a_folder_is_pruned_by_the_rules_of_all_tiers(
    folder: Path, policy: RetentionPolicy, kept: dict[int, RetentionReason]
) -> None:
    with holdfast.open(folder) as found:
        before = {one.step: one.stored_bytes for one in found.listing()}
        plan = found.plan_prune(policy)
        pruned = sorted(set(range(1, 7)) - set(kept), reverse=True)
        assert steps(plan) == (pruned, kept)
        assert plan.stored_bytes == sum(before[step] for step in pruned)
        assert found.steps() == (1, 2, 3, 4, 5, 6)  # a plan deletes nothing
        seen: list[int] = []
        assert found.prune(plan, lambda one: seen.append(one.checkpoint.step)) == ()
        assert seen == pruned
        assert found.steps() == tuple(sorted(kept))
    shards = {path.parent.name for path in folder.rglob("*.shard")}
    assert shards == {f"s{step:012d}-r000000" for step in kept}


def test_what_is_pinned_or_read_stays_also_if_it_became_so_after_the_plan(folder: Path) -> None:
    with holdfast.open(folder) as found:
        found.pin(1)
        with found.at(2):
            plan = found.plan_prune(RetentionPolicy(1))
            assert steps(plan)[1] == {
                6: Reason.KEEP_LAST,
                2: Reason.BEING_READ,
                1: Reason.PINNED,
            }
            found.pin(3)
            with found.at(4):
                stayed = found.prune(plan)
        assert [(one.checkpoint.step, one.reason) for one in stayed] == [
            (4, Reason.BEING_READ),
            (3, Reason.PINNED),
        ]
        assert found.steps() == (1, 2, 3, 4, 6)


def test_a_running_training_keeps_its_restore_point_and_goes_on(tmp_path: Path) -> None:
    def save(ckpt: holdfast.Checkpointer, *wanted: int) -> None:
        for step in wanted:
            ckpt.save(step, {"w": np.full(9, float(step))}).wait(timeout=HANG_SECONDS)

    place = holdfast.Folder(tmp_path, keep_last=9)
    with holdfast.Checkpointer(place, when_busy="wait") as ckpt:
        ckpt.restore({"w": np.zeros(9)})
        save(ckpt, 1, 2, 3)
    with holdfast.Checkpointer(place, when_busy="wait") as ckpt:
        ckpt.restore({"w": np.zeros(9)}, step=2)
        save(ckpt, 4, 5)
        with holdfast.open(tmp_path) as found:
            plan = found.plan_prune(RetentionPolicy(1))
            assert steps(plan)[1] == {5: Reason.KEEP_LAST, 2: Reason.BEING_READ}
            assert found.prune(plan) == ()
        save(ckpt, 6)
        assert [one.step for one in ckpt.list()] == [2, 5, 6]


def test_the_best_of_a_metric_stay(tmp_path: Path) -> None:
    with holdfast.Checkpointer(holdfast.Folder(tmp_path, keep_last=9), when_busy="wait") as ckpt:
        for step, loss in enumerate((0.5, 0.1, 0.9, 0.4), 1):
            ckpt.report(loss=loss)
            ckpt.save(step, {"w": np.ones(3)}).wait(timeout=HANG_SECONDS)
    policy = RetentionPolicy(1, best=KeepBest("loss", BestMode.MIN, 1))
    with holdfast.open(tmp_path) as found:
        assert steps(found.plan_prune(policy))[1] == {4: Reason.KEEP_LAST, 2: Reason.KEEP_BEST}
        misspelt = RetentionPolicy(1, best=KeepBest("los", BestMode.MIN, 1))
        with pytest.raises(ConfigError, match=r"no checkpoint has the metric los \(found loss\)"):
            found.plan_prune(misspelt)
        (shard,) = tmp_path.rglob("s000000000001-*/*.shard")
        shard.write_bytes(b"damaged")
        with pytest.raises(CorruptionError):  # it might be the best
            found.plan_prune(policy)


@pytest.mark.parametrize("place", ["folder", "store"])
@pytest.mark.parametrize("part", ["manifest", "shard"])
def test_what_can_be_restored_stays_although_newer_ones_are_damaged(
    tmp_path: Path, place: str, part: str
) -> None:
    root = tmp_path / "place"
    root.mkdir()
    if place == "folder":
        for step in (1, 2, 3):
            write_checkpoint(root, WHOLE, [2], step=step)
    else:
        with closing(ObjectTier(DirectoryObjectStore(root))) as tier:
            for step in (1, 2, 3):
                store_step(tier, tmp_path, step, values(step), packed=False).close()
    if part == "manifest":
        (damaged,) = root.rglob("manifests/s000000000003/*")
        damaged.write_bytes(b"{}")
    else:
        min(root.rglob("s000000000003-*/*.shard")).unlink()
    with holdfast.open(root) as found:
        plan = found.plan_prune(RetentionPolicy(1))
        assert steps(plan) == ([1], {3: Reason.QUARANTINED, 2: Reason.KEEP_LAST})
        found.prune(plan)
    assert not verify(root, 2).bad


def test_a_policy_that_keeps_everything_is_refused(folder: Path) -> None:
    with holdfast.open(folder) as found, pytest.raises(ConfigError, match="keep_last"):
        found.plan_prune(RetentionPolicy(None, hourly=1))


def test_a_store_keeps_the_objects_that_others_need_and_leaves_none_behind(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    frozen = {"whole": values(1)["whole"], "rows": values(1)["rows"]}
    with closing(ObjectTier(DirectoryObjectStore(root))) as tier:
        made = [store_step(tier, tmp_path, 1, values(1))]
        for step in (2, 3, 4):
            made.append(store_step(tier, tmp_path, step, {**values(step), **frozen}, base=made[-1]))
        made.append(store_step(tier, tmp_path, 5, values(5)))
    with holdfast.open(root) as found:
        plan = found.plan_prune(RetentionPolicy(2))
        assert steps(plan) == ([3, 2, 1], {5: Reason.KEEP_LAST, 4: Reason.KEEP_LAST})
        assert found.prune(plan) == ()
        assert found.steps() == (4, 5)
        with found.at(4) as saved:
            read = saved.tensors()["whole"].read()
            assert np.array_equal(read.numpy(), values(1)["whole"])
        # Step 4 needs objects of step 3, and step 2 needed some of step 1.
        folders = {path.name for path in root.glob("*/*/shards/*") if any(path.iterdir())}
        assert folders == {f"s{step:012d}-r000000" for step in (3, 4, 5)}
    for one in made:
        one.close()


def test_a_folder_whose_lock_cannot_be_taken_is_not_pruned(folder: Path) -> None:
    (folder / ".prune").symlink_to(folder)
    with holdfast.open(folder) as found:
        plan = found.plan_prune(RetentionPolicy(1))
        with pytest.raises(TierError, match=r"pruning .*: "):
            found.prune(plan)
        assert found.steps() == (1, 2, 3, 4, 5, 6)


def test_every_kept_checkpoint_of_a_store_has_its_bytes_after_any_prunes(tmp_path: Path) -> None:
    """Random steps share tensors with earlier ones, and random policies prune between the saves."""
    random = np.random.default_rng(7)
    root = tmp_path / "store"
    root.mkdir()
    saved: dict[int, Values] = {}
    with closing(ObjectTier(DirectoryObjectStore(root))) as tier:
        made: dict[int, StoredStep] = {}
        for step in range(1, 25):
            stored = sorted(made)
            base = made[stored[-1]] if stored and random.random() < 0.8 else None
            state = dict(values(step))
            if base is not None:
                before = saved[base.checkpoint.step]
                state |= {name: before[name] for name in state if random.random() < 0.6}
            shard_files = tmp_path / f"files-{step}"
            shard_files.mkdir()
            made[step] = store_step(tier, shard_files, step, state, base=base)
            saved[step] = state
            if random.random() < 0.4:
                policy = RetentionPolicy(
                    int(random.integers(1, 5)), every_steps=int(random.integers(2, 9))
                )
                with holdfast.open(root) as found:
                    plan = found.plan_prune(policy)
                    if len(plan.prune) > 1 and random.random() < 0.5:  # it was interrupted
                        plan = replace(plan, prune=plan.prune[: len(plan.prune) // 2])
                    found.prune(plan)
                    if random.random() < 0.5:
                        found.sweep()
                    kept = found.steps()
                for gone in made.keys() - set(kept):
                    made.pop(gone).close()
                assert len(kept) > 1 or step == 1
                for one in kept:
                    assert_stored(root, one, saved[one])
        for left in made.values():
            left.close()
    assert len(made) < 20


def test_a_sweep_keeps_the_shards_of_an_upload_that_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    with closing(ObjectTier(DirectoryObjectStore(root))) as tier:
        store_step(tier, tmp_path, 1, values(1)).close()
        store_step(tier, tmp_path, 2, values(2)).close()
    (manifest,) = root.rglob("manifests/s000000000002/*")
    manifest.unlink()
    (shards,) = root.rglob("shards/s000000000002-*")
    for path in shards.iterdir():
        os.utime(path, (0, 0))
    running = shards / f"{TEMP_PREFIX}0123"  # the shard of a rank that is being uploaded
    running.touch()
    before = sorted(shards.iterdir())
    with holdfast.open(root) as found:
        assert found.sweep() == 0
        assert sorted(shards.iterdir()) == before
        os.utime(running, (0, 0))
        assert found.sweep() > 0
        assert not [path for path in shards.glob("*") if path != running]


def assert_stored(root: Path, step: int, expected: Values) -> None:
    """Assert that a step is whole, and that its tensors have these bytes."""
    assert verify(root, step).bad == ()
    with holdfast.open(root) as found, found.at(step) as opened:
        for name, tensor in opened.tensors().items():
            assert tensor.read().numpy().tobytes() == expected[name].tobytes(), (step, name)


@pytest.mark.skipif(can_trace() is not None, reason=str(can_trace()))
@pytest.mark.fault("A prune of a folder or a store is killed at any system call")
@pytest.mark.parametrize("place", ["folder", "store"])
def test_a_prune_killed_at_any_call_leaves_whole_checkpoints_only(place: str) -> None:
    found = report_of(Path(__file__).with_name("prune_crash_programs.py"), place)
    assert found.problems == ()
    assert any("/manifests/" in call for call in found.calls)
    assert found.tried > 10
