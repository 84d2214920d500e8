"""A shard that a source may still have is requested again. Only a final failure is reported immediately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.sidecar.one_rank import (
    DOCUMENT,
    HEADER,
    LAYOUT,
    MANIFEST,
    PATIENCE_SECONDS,
    PAYLOAD,
    rehydrator_of,
)
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import (
    JOB,
    BytesSource,
)
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import (
    CorruptionError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, Digest, Rank, ShardRef, Step
from holdfast_core.messages.schema import RestorePoint
from holdfast_core.shards.file import ShardRecord
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.restore.rehydrate import Restored

POINT = RestorePoint(MANIFEST.step, MANIFEST.restart_round, digest_of(DOCUMENT))
ROUND = round_message(1, workers=1, restore_point=POINT)
STATE = accepted(ROUND)
RANK = Rank(0)
AWAY = UnavailableError("connection refused")
NONE = NotFoundError("no such key")
BAD = CorruptionError("CRC32C of chunk 3 does not match")


class Store:
    """An object store that raises each of these errors in turn and then returns the shard."""

    def __init__(self, node: ScratchTier, *errors: HoldfastError) -> None:
        self._node = node
        self._errors = list(errors)
        self.asked = 0

    def download_shard(self, namespace: str, ref: ShardRef, begin_copy: Any) -> ShardRecord:
        self.asked += 1
        if self._errors:
            raise self._errors.pop(0)
        return self._node.write_shard(HEADER, BytesSource(PAYLOAD))

    def get_layout(self, namespace: str, ref: ShardRef, digest: Digest) -> bytes:
        return LAYOUT


class World:
    """One sidecar whose node has the manifest but not the shard."""

    def __init__(self, *errors: HoldfastError) -> None:
        self.node = ScratchTier()
        self.node.put_manifest(JOB.uid, MANIFEST.checkpoint, DOCUMENT)
        self.store = Store(self.node, *errors)
        self.clock = ManualClock()
        self.pools = Pools(disk=1, fetch=1, store=1)
        self.reported: list[str] = []
        """The failures at each change of them, and at the end of the restore."""
        self.changed = asyncio.Event()
        self.on_change: Callable[[], object] = self.changed.set
        """Called when a failure is reported, and when the restore point is here."""
        self.rehydrator = rehydrator_of(
            STATE, self.node, self.store, self.pools, self.clock, self._on_change
        )
        self.restored = Restored(
            POINT, MANIFEST, {RANK: MANIFEST.ref(RANK)}, {RANK: len(PAYLOAD)}, {}
        )

    def _on_change(self) -> None:
        self.reported.append(self.rehydrator.failures.text)
        self.on_change()

    async def until(self, condition: Callable[[], bool]) -> None:
        """End the pauses between attempts until the condition holds.

        The clock stands still during an attempt, so that a slow thread does not use up the patience.
        """
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():
                if self.clock.sleepers:
                    self.clock.advance(0.001)
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running(*errors: HoldfastError) -> AsyncIterator[World]:
    world = World(*errors)
    try:
        yield world
    finally:
        await world.rehydrator.reset()
        world.pools.close()


async def test_a_store_that_is_away_for_a_moment_costs_no_round() -> None:
    async with running(AWAY, AWAY, AWAY) as world:
        world.rehydrator.begin(ROUND)
        await world.until(lambda: world.rehydrator.restored is not None)
        assert world.store.asked == 4
        assert world.rehydrator.failures.text == ""


async def test_a_store_that_stays_away_is_reported_and_called_again() -> None:
    async with running(*[AWAY] * 200) as world:
        world.rehydrator.begin(ROUND)
        await world.until(lambda: world.store.asked >= 2)
        assert world.rehydrator.failures.text == ""
        world.clock.advance(PATIENCE_SECONDS)
        await world.until(lambda: "connection refused" in world.rehydrator.failures.text)
        assert world.rehydrator.failures.may_pass
        await world.until(lambda: world.rehydrator.restored is not None)
        assert not world.rehydrator.failures.may_pass
        assert world.rehydrator.failures.text == ""


@pytest.mark.parametrize("final", [NONE, BAD], ids=["no place has it", "all copies are bad"])
async def test_a_final_failure_is_reported_at_once(final: HoldfastError) -> None:
    async with running(final) as world:
        world.rehydrator.begin(ROUND)
        await asyncio.wait_for(world.changed.wait(), HANG_SECONDS)
        assert "rank 0: not in the node tier" in world.rehydrator.failures.text
        assert str(final) in world.rehydrator.failures.text
        assert not world.rehydrator.failures.may_pass
        assert world.store.asked == 1


@pytest.mark.fault("A sidecar restarts after its round has pruned the restore point")
async def test_a_restore_point_that_the_round_has_outlived_is_not_missed() -> None:
    """The operator would end the ranks, which have trained from it for long."""
    async with running(NONE, NONE, AWAY) as world:
        newer = CheckpointId(Step(MANIFEST.step + 1), ROUND.round)
        world.node.put_manifest(JOB.uid, newer, DOCUMENT)
        world.rehydrator.begin(ROUND)
        await world.until(lambda: world.store.asked >= 3)
        world.clock.advance(PATIENCE_SECONDS)
        await world.until(lambda: world.rehydrator.restored is not None)
        assert world.reported == [""]


@pytest.mark.fault("A new round begins at the moment at which a restore of the old one tries again")
async def test_a_seal_ends_a_restore_that_retries_at_the_same_moment() -> None:
    async with running(*[AWAY] * 10_000) as world:
        seals: list[asyncio.Task[None]] = []

        def seal() -> None:
            world.rehydrator.retry_now()
            seals.append(asyncio.create_task(world.rehydrator.reset()))

        def seal_soon() -> None:
            # The failure is reported immediately before the restore waits for its next attempt.
            world.on_change = world.changed.set
            asyncio.get_running_loop().call_soon(seal)

        world.on_change = seal_soon
        world.rehydrator.begin(ROUND)
        await world.until(lambda: world.store.asked >= 1)
        world.clock.advance(PATIENCE_SECONDS)
        await world.until(lambda: bool(seals))
        await seals[0]
        assert world.store.asked < 1000, "the seal waited for the end of the restore"
