"""Which members the coordinator's outbox looks at, and that they share large messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from tests.support.clock import SteppedClock
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.ledgers import (
    LAYOUT,
    MANIFEST_DIGEST,
    new_ledger,
    shard_info,
)
from tests.support.sidecar.rounds import round_message
from tests.support.sidecar.waiting import until

from holdfast_core.errors import UnavailableError
from holdfast_core.ids import Level, RestartRound, Step, Worker
from holdfast_core.messages.schema import ManifestPut, Ok, Plan
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.coordinator.outbox import Outbox

WORKERS = 16


class Members:
    """Members that accept every message, except while they are away."""

    def __init__(self) -> None:
        self.received: list[tuple[Worker, Any]] = []
        self.away: set[int] = set()
        self.tried = Counter[Worker]()
        """Number of calls of each member, also while it was away."""

    async def call(self, worker: Worker, message: Any, reply: type[Any], **_: Any) -> Ok:
        await asyncio.sleep(0)
        self.tried[worker] += 1
        if worker in self.away:
            raise UnavailableError(f"worker {worker} is away")
        self.received.append((worker, message))
        return Ok(RestartRound(1))

    def of(self, kind: type[Any]) -> list[tuple[Worker, Any]]:
        return [(worker, m) for worker, m in self.received if isinstance(m, kind)]


class World:
    """The outbox of a coordinator at worker 0, with the ledger that it reads."""

    def __init__(self) -> None:
        self.ledger: Ledger = new_ledger(workers=WORKERS, expects_copies=False)
        self.members = Members()
        settings = Settings(contract_with(), backoff_first_seconds=0.01, backoff_last_seconds=0.01)
        self.outbox = Outbox(
            settings,
            cast(Any, self.members),
            self.ledger,
            SteppedClock(),  # the limit of a release never passes
            self._acknowledged,
            lambda step: None,
        )

    def _acknowledged(self, step: Step, worker: Worker) -> None:
        risen = self.ledger.acknowledged(step, worker)
        if risen is not None or worker == 0:
            self.outbox.wake()

    def build(self, step: int) -> None:
        """Let every rank prepare the step, and build its manifest."""
        shards = tuple(shard_info(worker) for worker in range(WORKERS))
        for shard in shards:
            self.ledger.prepared(Step(step), shard, LAYOUT)
        self.ledger.committed(Step(step), b"{}", MANIFEST_DIGEST, shards)
        self.outbox.wake()

    async def local(self, step: int) -> None:
        """Wait until every member has been sent level LOCAL of the step or a higher one."""

        def sent() -> bool:
            plans = self.members.of(Plan)
            return len({w for w, m in plans if step in {r.step for r in m.levels}}) == WORKERS

        await until(sent, f"the level of step {step} at {WORKERS} members")


@asynccontextmanager
async def running(**fields: Any) -> AsyncIterator[World]:
    world = World()
    world.outbox.start(round_message(1, **fields))
    try:
        yield world
    finally:
        await world.outbox.close()


async def test_a_commit_sends_each_member_one_manifest_and_one_level() -> None:
    async with running() as world:
        world.build(5)
        await world.local(5)
        kinds = Counter((worker, type(m)) for worker, m in world.members.received)
        assert kinds == {(w, kind): 1 for w in range(WORKERS) for kind in (ManifestPut, Plan)}


async def test_the_coordinators_own_node_stores_a_manifest_first() -> None:
    async with running() as world:
        world.members.away = {0}
        world.build(5)
        await until(lambda: world.members.tried[Worker(0)] > 2, "the own node is tried repeatedly")
        assert world.members.received == [], "a manifest that any member has also exists here"
        world.members.away = set()
        await world.local(5)
        assert world.members.of(ManifestPut)[0][0] == 0


async def test_members_share_one_message_with_the_manifest() -> None:
    async with running() as world:
        world.build(5)
        await world.local(5)
        assert len({id(m) for _, m in world.members.of(ManifestPut)}) == 1


async def test_a_member_that_is_away_gets_everything_when_it_is_back() -> None:
    async with running() as world:
        world.members.away = {3}
        world.build(5)
        others = set(range(WORKERS)) - {3}
        await until(lambda: {w for w, _ in world.members.of(ManifestPut)} == others, "the others")
        assert world.ledger.steps[Step(5)].level is None, "a member has not acknowledged"
        world.members.away = set()
        await world.local(5)
        assert world.ledger.steps[Step(5)].level is Level.REPLICATED


async def test_only_the_restarted_member_gets_everything_again() -> None:
    async with running() as world:
        world.build(5)
        await world.local(5)
        world.members.received.clear()
        world.outbox.repeat(Worker(2))
        await until(lambda: world.members.of(Plan), "the level again")
        assert {worker for worker, _ in world.members.received} == {2}


async def test_a_restarted_sidecar_is_sent_the_last_prunes_again() -> None:
    """It may have ended after it acknowledged them and before it had deleted the steps."""
    async with running() as world:
        world.build(5)
        world.build(6)
        await world.local(6)
        world.outbox.prune((Step(5),))

        def told() -> list[Worker]:
            return [w for w, m in world.members.of(Plan) if m.drop == (Step(5),)]

        await until(lambda: len(told()) == WORKERS, "every member is sent the prune")
        world.members.received.clear()
        world.outbox.repeat(Worker(2))
        await until(lambda: world.members.of(Plan), "the level again")
        assert told() == [2]


async def test_the_own_pod_is_released_after_all_others() -> None:
    async with running() as world:
        world.members.away = {4}
        world.outbox.release()

        def released() -> list[Worker]:
            return [w for w, m in world.members.of(Plan) if m.released]

        await until(lambda: len(released()) >= WORKERS - 2, "all but the absent and the own one")
        assert {0, 4}.isdisjoint(released())
        world.members.away = set()
        await until(lambda: len(released()) == WORKERS, "all")
        assert released()[-1] == 0


@pytest.mark.fault("A worker does not answer its release while its relay could end")
async def test_a_relay_is_released_after_its_group() -> None:
    """Nothing passes the release on once the relay's pod has ended."""
    async with running(workers=WORKERS, fan_in=4) as world:
        world.members.away = {6}
        world.outbox.release()

        def released() -> list[Worker]:
            return [w for w, m in world.members.of(Plan) if m.released]

        await until(lambda: len(released()) >= WORKERS - 3, "all but 6, its relay and the own one")
        tried = world.members.tried[Worker(6)]
        await until(lambda: world.members.tried[Worker(6)] >= tried + 5, "further tries of 6")
        assert {0, 4, 6}.isdisjoint(released())
        world.members.away = set()
        await until(lambda: len(released()) == WORKERS, "all")
        assert released()[-3:] == [6, 4, 0]
