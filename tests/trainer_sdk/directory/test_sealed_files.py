"""One reader reads each small sealed file of a folder. It neither follows a link nor waits at a FIFO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.obstructed import directory, fifo, link
from tests.support.shards.folders import write_checkpoint
from tests.support.shards.placements import Tensor

from holdfast.base.kept_run import kept_run_id
from holdfast.directory.choice import load_choice
from holdfast.directory.commit import Committer
from holdfast.directory.folder_store import FolderStore
from holdfast.directory.plan import FolderPlan, PlanFile
from holdfast_core.errors import UnreadableError
from holdfast_core.format.canonical import sealed
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.store_url import parse_store_url

ROUND = RestartRound(1)
CHECKPOINT = CheckpointId(Step(1), ROUND)
IDENTITY = "0123456789abcdef"


Damage = Callable[[Path], None]
every_kind = pytest.mark.parametrize("damage", [link, fifo, directory])


def store_of(root: Path) -> FolderStore:
    (root / "objects").mkdir()
    url = parse_store_url(f"file://{root / 'objects'}")
    return FolderStore(url, {}, root / "store", "run", lambda seconds: True)


def training_of(root: Path) -> Path:
    path = root / "store" / "training"
    path.parent.mkdir()
    path.write_bytes(sealed(IDENTITY.encode()))
    return path


@every_kind
def test_the_record_of_a_rank(tmp_path: Path, damage: Damage) -> None:
    path = tmp_path / "records/r000001-standalone" / str(CHECKPOINT) / "0.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(sealed(b"{}"))
    damage(path)
    tier = DiskNodeTier(tmp_path / "tier", fill_limit=1.0)
    tier.open()
    committer = Committer(tier, tmp_path / "records", 1, range(1), 1)
    with pytest.raises(UnreadableError, match=r"0\.json"):
        committer.commit(CHECKPOINT)


@every_kind
def test_the_plan_of_the_leader(tmp_path: Path, damage: Damage) -> None:
    file = PlanFile(tmp_path / "plan.json")
    file.write(FolderPlan(over="taken"))
    assert file.read() is not None
    damage(file.path)
    assert file.read() is None


@every_kind
def test_the_kept_manifest_of_the_restore_point(tmp_path: Path, damage: Damage) -> None:
    saved = {"t": (Tensor("F32", (4, 4)), np.zeros((4, 4), np.float32))}
    checkpoint = write_checkpoint(tmp_path, saved, (1,), step=1, round=ROUND)
    tier = DiskNodeTier(tmp_path / "tier", fill_limit=1.0)
    tier.open()
    store = store_of(tmp_path)
    store.keep(load_choice(tier, checkpoint))
    assert store.kept(checkpoint) is not None
    damage(tmp_path / "store" / f"{checkpoint}.json")
    assert store.kept(checkpoint) is None
    store.close()


@every_kind
def test_the_training_of_the_store(
    tmp_path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    path = training_of(tmp_path)
    assert kept_run_id(tmp_path, read_only=False) == IDENTITY
    damage(path)
    store = store_of(tmp_path)
    marker = store.run(ROUND).marker
    assert marker.training == IDENTITY
    assert "the identity of the folder is used" in caplog.text
    store.close()


@every_kind
def test_the_training_of_the_store_as_identity_of_the_folder(
    tmp_path: Path, damage: Damage
) -> None:
    path = training_of(tmp_path)
    damage(path)
    found = kept_run_id(tmp_path, read_only=False)
    assert found is not None
    assert found != IDENTITY
