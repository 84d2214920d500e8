"""The order in which a checkpoint is deleted: its manifest durably, then its shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.crash.failpoints import failpoints
from tests.support.crash.fsyncs import recorded_fsyncs
from tests.support.shards.builders import (
    JOB_UID,
    BytesSource,
    manifest,
    payload,
    shard_header,
)

from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier

SIZE = 5000
CHECKPOINT = CheckpointId(Step(10), RestartRound(0))


@pytest.fixture
def tier(tmp_path: Path) -> DiskNodeTier:
    tier = DiskNodeTier(tmp_path, capacity_bytes=64 << 20)
    tier.open()
    records = [
        tier.write_shard(
            shard_header(SIZE, step=10, rank=rank, world_size=2),
            BytesSource(payload(SIZE, seed=rank)),
        )
        for rank in (0, 1)
    ]
    tier.put_manifest(JOB_UID, CHECKPOINT, manifest(records).to_bytes())
    return tier


def shards(folder: Path) -> int:
    return len(list(folder.rglob("*.shard")))


def test_no_shard_is_deleted_while_the_manifest_exists(tier: DiskNodeTier, tmp_path: Path) -> None:
    """A kill between the two would leave a checkpoint that cannot be restored."""
    with failpoints("node.before_tombstone=raise:RuntimeError"), pytest.raises(RuntimeError):
        tier.delete_checkpoint(JOB_UID, CHECKPOINT)
    assert len(tier.list_manifests()) == 1
    assert shards(tmp_path) == 2


def test_the_deletion_of_the_manifest_is_durable_before_that_of_a_shard(
    tier: DiskNodeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut could bring the manifest back after its shards are gone."""
    synced = recorded_fsyncs(monkeypatch)
    with failpoints("node.after_tombstone=raise:RuntimeError"), pytest.raises(RuntimeError):
        tier.delete_checkpoint(JOB_UID, CHECKPOINT)
    assert tier.list_manifests() == ()
    assert [path.parent.name for path in synced] == ["manifests"]
    assert shards(tmp_path) == 2
    tier.delete_checkpoint(JOB_UID, CHECKPOINT)
    assert shards(tmp_path) == 0
