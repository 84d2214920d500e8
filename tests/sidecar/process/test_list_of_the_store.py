"""A sealed sidecar lists the job's checkpoints in the object store when SEAL asks for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.sidecar.one_rank import DOCUMENT, MANIFEST
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import JOB
from tests.support.sidecar.lifecycle_bed import SlowNode, World
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.errors import UnavailableError
from holdfast_core.format.manifest import manifest_digest
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import Seal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.base.rounds import OPERATOR
from holdfast_sidecar.process.inventory import stored_manifests

SAVED = MANIFEST.checkpoint
LISTED = {manifest_digest(DOCUMENT): SAVED}
ROUND = RestartRound(5)
LOOK = Seal(ROUND, look_in_store=True)


class Away(MemoryObjectStore):
    """An object store that cannot be reached until the test sets `back`."""

    back = False

    def list(self, *args: Any, **options: Any) -> Any:
        if not self.back:
            raise UnavailableError("the store does not answer")
        return super().list(*args, **options)


def tier_of(store: MemoryObjectStore) -> ObjectTier:
    tier = ObjectTier(store, "ckpt")
    tier.put_manifest(JOB.namespace, JOB.uid, SAVED, DOCUMENT)
    return tier


@pytest.fixture
def node(tmp_path: Path) -> SlowNode:
    disk = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    disk.open()
    slow = SlowNode(disk)
    slow.go_on.set()
    return slow


def test_the_list_names_step_round_and_digest() -> None:
    assert stored_manifests(tier_of(MemoryObjectStore()), JOB.namespace, JOB.uid) == LISTED


@pytest.mark.fault("A manifest lies under the name of another step, round or job")
def test_a_manifest_under_another_name_is_not_listed() -> None:
    store = MemoryObjectStore()
    tier = tier_of(store)
    other = CheckpointId(Step(SAVED.step + 1), SAVED.round)
    tier.put_manifest(JOB.namespace, JOB.uid, other, DOCUMENT)
    assert stored_manifests(tier, JOB.namespace, JOB.uid) == LISTED


async def test_the_list_is_made_after_the_seal_and_ends_with_its_round(
    node: SlowNode, tmp_path: Path
) -> None:
    world = World(node, tmp_path, job_uid=JOB.uid, store=tier_of(MemoryObjectStore()))
    seal = world.lifecycle.seal
    assert (await seal(OPERATOR, Seal(ROUND))).stored is None
    assert (await seal(OPERATOR, LOOK)).stored == LISTED
    assert (await world.lifecycle.inventory()).stored == LISTED
    world.current.state = accepted(round_message(ROUND))
    assert (await world.lifecycle.inventory()).stored is None, "the gang persists steps from now on"
    assert (await seal(OPERATOR, Seal(RestartRound(ROUND + 1)))).stored is None
    world.pools.close()


@pytest.mark.fault("The object store is down while the gang looks there for its last checkpoint")
async def test_a_store_that_is_down_is_asked_again(node: SlowNode, tmp_path: Path) -> None:
    store = Away()
    store.back = True
    world = World(node, tmp_path, job_uid=JOB.uid, store=tier_of(store))
    store.back = False
    assert (await world.lifecycle.seal(OPERATOR, LOOK)).stored is None
    store.back = True
    assert (await world.lifecycle.seal(OPERATOR, LOOK)).stored == LISTED
    world.pools.close()


async def test_a_job_without_a_store_has_no_list(node: SlowNode, tmp_path: Path) -> None:
    world = World(node, tmp_path)
    found = await asyncio.wait_for(world.lifecycle.seal(OPERATOR, LOOK), HANG_SECONDS)
    assert found.stored is None
    world.pools.close()
