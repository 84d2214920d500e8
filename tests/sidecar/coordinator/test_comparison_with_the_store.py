"""The coordinator compares the newest persisted step with what the store has."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.clock import ManualClock
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.ledgers import LAYOUT, new_ledger, shard_info, store_manifests
from tests.support.sidecar.waiting import until
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.format.keys import manifest_key
from holdfast_core.ids import CheckpointId, RestartRound, Step, TierName
from holdfast_core.messages.schema import Policy, RestorePoint
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.coordinator.uploads import COMPARE_SECONDS, GangUploads

NEWEST = CheckpointId(Step(20), RestartRound(0))


class World:
    """The uploads of a round whose job has persisted step 20, over a store in memory."""

    def __init__(self) -> None:
        self.clock, self.ledger = ManualClock(), new_ledger()
        self.objects = MemoryObjectStore()
        self.failures = Failures(lambda: None)
        self.pools, self.tasks = Pools(disk=1, fetch=1, store=1), Tasks()
        self.tier = ObjectTier(self.objects)
        message: Any = Mock(
            policy=Policy(1, object_every_steps=1000),
            last_persisted=RestorePoint(NEWEST.step, NEWEST.round),
            round=self.ledger.round,
            restore_point=RestorePoint(NEWEST.step, NEWEST.round),
            quarantined=(),
        )
        self.uploads = GangUploads(
            CONTRACT,
            message,
            self.tier,
            ledger=self.ledger,
            versioned=Mock(),
            pools=self.pools,
            failures=self.failures,
            clock=self.clock,
            on_change=lambda: None,
        )

    @property
    def reasons(self) -> list[tuple[TierName, str]]:
        return [(f.tier, f.reason) for f in self.failures.current]

    async def __aenter__(self) -> World:
        self.tasks.spawn(self.uploads.compare(), "compare")
        await until(lambda: self.clock.sleepers == 1, "the first comparison")
        return self

    async def compared_again(self) -> None:
        self.clock.advance(COMPARE_SECONDS)
        await until(lambda: self.clock.sleepers == 1, "the next comparison")

    async def __aexit__(self, *_: object) -> None:
        await self.tasks.cancel()
        self.pools.close()
        self.tier.close()

    def commits(self, step: int) -> bool:
        """Commit a step locally. Return whether it is queued for the store."""
        for rank in (0, 1):
            self.ledger.prepared(Step(step), shard_info(rank), LAYOUT)
        assert store_manifests(self.ledger, step) == [True]
        self.uploads.committed(Step(step))
        return Step(step) in self.ledger.on_way_to_store


@pytest.mark.fault("The bucket is emptied, and all pods are lost")
async def test_a_missing_checkpoint_is_reported_with_its_key_and_its_store() -> None:
    async with World() as world:
        assert world.reasons == [(TierName.OBJECT, "CheckpointMissing")]
        [failure] = world.failures.current
        assert failure.step == NEWEST.step
        assert manifest_key(NEWEST) in failure.message
        assert "memory" in failure.message


async def test_the_failure_ends_when_the_checkpoint_is_there_again() -> None:
    async with World() as world:
        world.tier.put_manifest(CONTRACT.namespace, CONTRACT.job_uid, NEWEST, b"{}")
        [stored] = world.objects.objects
        await world.compared_again()
        assert world.reasons == []
        assert world.uploads.is_stored is True
        world.objects.delete([stored])
        await world.compared_again()
        assert world.uploads.is_stored is False
        assert world.reasons == [(TierName.OBJECT, "CheckpointMissing")]


async def test_the_next_commit_is_uploaded_at_once_while_the_store_lacks_the_newest() -> None:
    async with World() as world:
        assert world.commits(21)
        assert not world.commits(22), "one upload suffices"


async def test_a_store_that_is_away_does_not_count_as_empty() -> None:
    async with World() as world:

        def away(key: str, *, sure: bool = False) -> int | None:
            raise OSError("connection refused")

        world.objects.size = away  # type: ignore[method-assign]
        await world.compared_again()
        assert world.reasons == [(TierName.OBJECT, "StoreUnavailable")]
        assert world.uploads.is_stored is False, "the newest comparison that succeeded counts"
