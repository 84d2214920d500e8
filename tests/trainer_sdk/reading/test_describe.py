"""Checkpoints are listed and described from names, manifests and layouts, without a tensor."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.tiers.stored_checkpoints import store_step, values

import holdfast
from holdfast.reading.describing import DescribedEntry, DescribedTensor, OtherCheckpoint
from holdfast.reading.opening import open_each
from holdfast.reading.source import ListedCheckpoint
from holdfast_core.errors import CorruptionError
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier


def save(folder: holdfast.Folder, *steps: int, restore: int | None = None) -> None:
    state = {"model": {"w": np.ones((4, 2), np.float32), "b": np.ones(2)}, "epoch": 3}
    with holdfast.Checkpointer(folder, when_busy="wait") as ckpt:
        ckpt.restore(state, step=restore)
        for step in steps:
            ckpt.report(loss=1 / step)
            ckpt.save(step, state).wait(timeout=HANG_SECONDS)


def test_a_folder_is_listed_and_described(tmp_path: Path) -> None:
    folder = holdfast.Folder(tmp_path, keep_last=9)
    begun = datetime.now(UTC) - timedelta(seconds=2)
    save(folder, 1, 2, 3)
    save(folder, 3, restore=2)
    with holdfast.open(tmp_path) as found:
        listed = found.listing()
        assert [(one.step, one.round, one.ranks, one.pinned) for one in listed] == [
            (1, 0, 1, False),
            (2, 0, 1, False),
            (3, 0, 1, False),
            (3, 2, 1, False),
        ]
        for one in listed:
            assert begun <= one.saved_at <= datetime.now(UTC)
            (shard,) = tmp_path.rglob(f"s{one.step:012d}-r{one.round:06d}/*.shard")
            assert one.stored_bytes == shard.stat().st_size
        with found.at(3) as saved:
            shown = saved.describe()
            payload_bytes = saved.nbytes
    assert (shown.place, shown.tier, shown.step, shown.round) == (str(tmp_path), "folder", 3, 2)
    assert (shown.world_size, shown.pinned) == (1, False)
    assert shown.saved_at is not None and shown.saved_at >= begun
    assert shown.rank_bytes == (payload_bytes,) and shown.payload_bytes == payload_bytes
    assert shown.stored_bytes == listed[-1].stored_bytes
    assert shown.tensors == (
        DescribedTensor("model.b", "float64", (2,), 16),
        DescribedTensor("model.w", "float32", (4, 2), 32),
    )
    assert shown.entries[:1] == (DescribedEntry("epoch", 0, 0),)
    assert DescribedEntry("model", 2, 48) in shown.entries
    assert shown.metrics == {"loss": pytest.approx(1 / 3)}
    assert (shown.restored_from.step, shown.restored_from.round) == (2, 0)
    assert shown.references == ()
    assert asdict(shown)["restored_from"]["step"] == 2


def test_a_checkpoint_whose_origin_was_deleted_names_its_digest(tmp_path: Path) -> None:
    folder = holdfast.Folder(tmp_path, keep_last=9)
    save(folder, 1, 2)
    save(folder, 3, restore=1)
    holdfast.Checkpointer(tmp_path).delete(1)
    with holdfast.open(tmp_path) as found, found.at(3) as saved:
        origin = saved.describe().restored_from
    assert (origin.step, origin.round) == (None, None)
    assert origin.manifest is not None and origin.manifest.startswith("b3:")


def test_a_listing_of_a_folder_reads_no_shard(tmp_path: Path) -> None:
    save(holdfast.Folder(tmp_path, keep_last=9), 1)
    for path in (*tmp_path.rglob("*.shard"), *tmp_path.rglob("r0*.json")):
        path.write_bytes(b"damaged")
    with holdfast.open(tmp_path) as found:
        assert [one.stored_bytes for one in found.listing()] == [7]
        with pytest.raises(CorruptionError):
            found.at(1)


def test_a_store_shows_what_one_checkpoint_stores_for_another(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    with closing(ObjectTier(DirectoryObjectStore(root))) as tier:
        first = store_step(tier, tmp_path, 1, values(1))
        second = store_step(
            tier, tmp_path, 2, {**values(2), "whole": values(1)["whole"]}, base=first
        )
    with holdfast.open(root) as found:
        listed = found.listing()
        assert [(one.step, one.ranks, one.pinned) for one in listed] == [(1, 4, None), (2, 4, None)]
        objects = [*root.rglob("shards/s000000000002-r000000/*")]
        assert len(objects) == 8  # shards or packs, and layouts
        assert listed[1].stored_bytes == sum(path.stat().st_size for path in objects)
        with found.at(2) as saved:
            shown = saved.describe()
            assert shown.stored_bytes == listed[1].stored_bytes < saved.nbytes
    assert (shown.tier, shown.job) == ("store", "team-a/gpt-small")
    (reference,) = shown.references
    assert (reference.step, reference.round) == (1, 0)
    assert reference.shared_bytes is not None and reference.shared_bytes > 0
    first.close()
    second.close()


def test_a_checkpoint_without_its_manifest_is_not_listed(tmp_path: Path) -> None:
    save(holdfast.Folder(tmp_path, keep_last=9), 1, 2)
    (manifest,) = tmp_path.rglob("manifests/s000000000002/*")
    manifest.unlink()
    with holdfast.open(tmp_path) as found:
        assert [one.step for one in found.listing()] == [1]


def test_many_checkpoints_of_a_store_are_listed_with_all_of_their_objects(tmp_path: Path) -> None:
    for step in range(1, 301):
        shards = tmp_path / f"team-a/uid-1/shards/s{step:012d}-r000000"
        shards.mkdir(parents=True)
        for rank in range(2):
            (shards / f"rank{rank:06d}-{step:016x}.shard").write_bytes(b"x" * step)
        manifest = tmp_path / f"team-a/uid-1/manifests/s{step:012d}/r000000.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("{}")
    with holdfast.open(tmp_path) as found:
        listed = [(one.step, one.ranks, one.stored_bytes) for one in found.listing()]
    assert listed == [(step, 2, 2 * step) for step in range(1, 301)]


def test_all_trainings_of_a_prefix_are_opened(tmp_path: Path) -> None:
    for job, step in (("team-a/uid-1", 7), ("team-b/uid-2", 8)):
        folder = tmp_path / job / f"manifests/s{step:012d}"
        folder.mkdir(parents=True)
        (folder / "r000000.json").write_text("{}")
    with open_each(tmp_path) as found:
        assert {place: places.steps() for place, places in found.items()} == {
            f"file://{tmp_path}/team-a/uid-1": (7,),
            f"file://{tmp_path}/team-b/uid-2": (8,),
        }
    save(holdfast.Folder(tmp_path / "ckpt"), 1)
    with open_each(tmp_path / "ckpt") as found:
        assert {place: places.steps() for place, places in found.items()} == {
            str(tmp_path / "ckpt"): (1,)
        }


def test_the_classes_of_a_description_are_plain() -> None:
    origin = OtherCheckpoint(1, 0, "b3:00")
    assert asdict(origin) == {"step": 1, "round": 0, "manifest": "b3:00", "shared_bytes": None}
    one = ListedCheckpoint(3, 1, datetime.now(UTC), 2, 10, None)
    assert str(one.id) == "s3-r1"
