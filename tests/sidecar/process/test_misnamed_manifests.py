"""A manifest under the name of another step, round or job is never listed and never restored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.sidecar.one_rank import DOCUMENT, HEADER, MANIFEST, PAYLOAD, rehydrator_of
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import JOB, BytesSource
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import NotFoundError, TierError
from holdfast_core.format.manifest import manifest_digest
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.messages.schema import RestorePoint
from holdfast_core.node.tier import DiskNodeTier
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.process.inventory import listed_manifests

SAVED = MANIFEST.checkpoint
WRONG = CheckpointId(Step(SAVED.step + 89), SAVED.round)


class Liars:
    """A member and a store that return the same document for every name."""

    async def manifest(self, *_: object, **options: Any) -> bytes:
        return DOCUMENT

    def get_manifest(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        return DOCUMENT


def tried(point: RestorePoint, node: ScratchTier) -> str:
    """Return what the rehydrator reports of a restore point that it cannot restore."""
    held = round_message(SAVED.round + 1, restore_point=point)
    state = accepted(held)

    async def scenario() -> str:
        pools, changed, clock = Pools(disk=1, fetch=1, store=1), asyncio.Event(), ManualClock()
        rehydrator = rehydrator_of(state, node, Liars(), pools, clock, changed.set)
        rehydrator.begin(held)
        try:
            await asyncio.wait_for(changed.wait(), HANG_SECONDS)
            assert rehydrator.restored is None
            return rehydrator.failures.text
        finally:
            await rehydrator.reset()
            pools.close()

    return asyncio.run(scenario())


@pytest.mark.fault("A manifest lies under the name of another step, round or job")
@pytest.mark.parametrize(
    ("job_uid", "checkpoint"),
    [
        pytest.param(JOB.uid, WRONG, id="step"),
        pytest.param(JOB.uid, CheckpointId(SAVED.step, RestartRound(SAVED.round + 1)), id="round"),
        pytest.param(JobUid("another-job"), SAVED, id="job"),
    ],
)
def test_a_misnamed_manifest_is_not_restored_from_any_tier(
    job_uid: JobUid, checkpoint: CheckpointId
) -> None:
    """The restore point has no digest here, as may be the case for a store's checkpoint."""
    node = ScratchTier()
    node.write_shard(HEADER, BytesSource(PAYLOAD))
    node.put_manifest(job_uid, checkpoint, DOCUMENT)
    point = RestorePoint(
        checkpoint.step, checkpoint.round, job_uid=job_uid, job_namespace=JOB.namespace
    )
    text = tried(point, node)
    for place in ("the node tier", "worker 1", "the object store"):
        assert f"manifest {'at' if place == 'worker 1' else 'in'} {place}" in text
    assert text.count("renamed or copied") == 3
    with pytest.raises(NotFoundError):
        node.get_manifest(job_uid, checkpoint)


@pytest.mark.fault("A manifest belongs to another namespace")
@pytest.mark.fault("Training code takes the store's keys, or reads objects of another job")
def test_a_manifest_of_the_same_uid_in_another_namespace_is_not_restored() -> None:
    node = ScratchTier()
    node.put_manifest(JOB.uid, SAVED, DOCUMENT)
    point = RestorePoint(SAVED.step, SAVED.round, job_uid=JOB.uid, job_namespace="another")
    assert tried(point, node).count("renamed or copied") == 3


@pytest.mark.fault("A file of the node tier has another content than its name says")
def test_an_inventory_lists_correctly_named_manifests_and_quarantines_the_others(
    tmp_path: Path,
) -> None:
    node = DiskNodeTier(tmp_path / "node", capacity_bytes=1 << 30)
    node.open()
    node.put_manifest(JOB.uid, SAVED, DOCUMENT)
    node.put_manifest(JOB.uid, WRONG, DOCUMENT)
    newer = CheckpointId(Step(SAVED.step + 1), SAVED.round)
    node.put_manifest(JOB.uid, newer, b'{"formatVersion":9}')
    counted: list[str] = []
    listed, ranks = listed_manifests(node, JOB.uid, lambda: counted.append("corrupt"))
    assert (listed, ranks) == ({manifest_digest(DOCUMENT): SAVED}, MANIFEST.world_size)
    assert counted == ["corrupt"]
    left = {checkpoint for _, checkpoint in node.list_manifests()}
    assert left == {SAVED, newer}, "what a newer release wrote is left alone"


@pytest.mark.fault(
    "A disk that cannot be written any more has a damaged manifest beside intact ones"
)
def test_an_inventory_goes_on_where_the_disk_refuses_to_quarantine_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = DiskNodeTier(tmp_path / "node", capacity_bytes=1 << 30)
    node.open()
    earlier = CheckpointId(Step(SAVED.step - 1), SAVED.round)
    node.put_manifest(JOB.uid, earlier, DOCUMENT)
    node.put_manifest(JOB.uid, SAVED, DOCUMENT)

    def refusing(*_: object) -> None:
        raise TierError("quarantining a manifest: Read-only file system")

    monkeypatch.setattr(node.volume, "quarantine", refusing)
    listed, _ = listed_manifests(node, JOB.uid, lambda: None)
    assert listed == {manifest_digest(DOCUMENT): SAVED}
