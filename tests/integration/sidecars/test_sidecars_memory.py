"""Every step is saved and one worker's disk does not keep up: what shared memory has of it."""

from __future__ import annotations

import asyncio
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.crash.failpoints import PANIC_EXIT_CODE, VARIABLE
from tests.support.sidecar import FakeRank, until
from tests.support.sidecar.gang import Gangs

from holdfast_core.errors import UnavailableError
from holdfast_core.ids import Level, Step, TierName
from holdfast_core.messages.schema import (
    OVERTAKEN,
    CoordinatorState,
    Inventory,
    Policy,
    RestorePoint,
    SaveFailed,
)
from holdfast_core.shm.slot_header import SlotState

pytestmark = pytest.mark.integration

POLICY = Policy(interval_steps=1, slots=3, peer_copies=1)


class Slow:
    """Two workers with three slots a rank; worker 1 writes to its disk only while the gate is open."""

    def __init__(self, gangs: Gangs, gate: Path) -> None:
        self.gang = gangs(2)
        self.gang.slots = 3
        self.gang.failpoints[1] = f"node.mid_write=wait:{gate}"
        self.gate = gate

    async def start(self) -> None:
        await self.gang.start(policy=POLICY)

    async def save(self, step: int, level: Level) -> dict[int, bytes]:
        saved: dict[int, bytes] = await self.gang.commit(step, level)
        return saved

    async def relaunch(self, worker: int = 1, failpoints: str | None = None) -> None:
        """The worker's sidecar again, in the same round; its disk keeps up."""
        gang = self.gang
        gang.launchers[worker].close()
        gang.ranks[worker].close()
        gang.sidecars[worker].start(None if failpoints is None else {VARIABLE: failpoints})
        await gang.learn(worker)
        await gang.launcher(worker, last_round=0, running=0)
        message = gang.operator.message(0, version=2, copies=gang.copies, policy=POLICY)
        await gang.operator.round_all(message)
        await gang.connect_rank(worker, 0)

    async def seal(self, round_: int) -> dict[int, Inventory]:
        """The gate opens once both are sealed, so that nothing is chosen any more. Until then nobody may
        take an inventory for the answer to the SEAL."""
        workers = sorted(self.gang.sidecars)
        seals = [asyncio.ensure_future(self.gang.operator.seal(w, round_)) for w in workers]
        named = f"holdfast_restart_round {float(round_)}"
        await until(
            lambda: all(named in metrics(self.gang, worker) for worker in workers),
            "both are sealed",
        )
        early = await asyncio.gather(*(self.gang.operator.inventory(w) for w in workers))
        self.gate.touch()
        answers = dict(zip(workers, await asyncio.gather(*seals), strict=True))
        for worker, inventory in zip(workers, early, strict=True):
            assert inventory.round < round_ or inventory.shards == answers[worker].shards
        return answers


def complete(inventories: dict[int, Inventory]) -> list[int]:
    """Steps with a manifest of which every shard is somewhere: what a round may start from."""
    there = {(s.step, s.round, s.rank, s.blake3) for i in inventories.values() for s in i.shards}
    steps = {
        m.step
        for i in inventories.values()
        for m in i.manifests
        if all((m.step, m.round, s.rank, s.blake3) in there for s in m.shards)
    }
    return sorted(steps)


def point_of(inventories: dict[int, Inventory], step: int) -> RestorePoint:
    found = {
        (m.round, m.manifest) for i in inventories.values() for m in i.manifests if m.step == step
    }
    ((round_, manifest),) = found
    return RestorePoint(Step(step), round_, manifest)


async def state_with(gang: Any, memory: int, *, coordinator: int = 0) -> CoordinatorState:
    def there(state: CoordinatorState) -> bool:
        return state.last_memory is not None and state.last_memory.step == memory

    what = f"{memory} in memory"
    state: CoordinatorState = await gang.operator.state_until(coordinator, there, what)
    return state


async def test_the_newest_step_in_memory_is_restored_when_ranks_die(
    gangs: Gangs, tmp_path: Path
) -> None:
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    async with gang:
        await slow.start()
        await gang.save(1)
        for step in range(2, 8):
            saved = await slow.save(step, Level.MEMORY)
        state = await state_with(gang, 7)
        assert state.last_local is None
        assert state.steps_dropped == 5
        assert state.saves_skipped == 0
        rank: FakeRank = gang.ranks[1]
        overtaken = {(s, Level.LOCAL, OVERTAKEN) for s in range(2, 7)}

        def heard() -> bool:
            text = [m for m in rank.pushed if isinstance(m, SaveFailed)]
            return {(m.step, m.level, m.reason) for m in text} == overtaken

        await until(heard, "the rank hears which steps gave way")
        dropped = "holdfast_steps_dropped_total 5.0"
        await until(lambda: dropped in metrics(gang, 1), "five steps are counted")
        assert 'holdfast_committed_step{level="memory"} 7.0' in metrics(gang, 0)

        inventories = await slow.seal(1)
        assert complete(inventories) == [7]
        await gang.begin(1, restore=point_of(inventories, 7), policy=POLICY)
        assert await gang.restored() == saved


async def test_with_a_pod_lost_the_newest_step_on_the_nodes_is_restored(
    gangs: Gangs, tmp_path: Path
) -> None:
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    slow.gate.touch()
    async with gang:
        await slow.start()
        saved = await slow.save(1, Level.REPLICATED)
        slow.gate.unlink()
        await gang.save(2)
        await slow.save(3, Level.MEMORY)
        await slow.save(4, Level.MEMORY)
        gang.lose(1)
        inventories = {0: await gang.operator.seal(0, 1)}
        assert 4 in [m.step for m in inventories[0].manifests]
        assert complete(inventories) == [1]
        slow.gate.touch()
        await gang.launch(1, birth_round=1)
        await gang.begin(1, restore=point_of(inventories, 1), policy=POLICY)
        assert await gang.restored() == saved
        assert [m.step for m in (await gang.operator.inventory(0)).manifests] == [1]


async def test_a_step_without_a_manifest_is_not_written_by_a_seal(
    gangs: Gangs, tmp_path: Path
) -> None:
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    async with gang:
        await slow.start()
        await gang.save(1)
        await slow.save(2, Level.MEMORY)
        await gang.ranks[1].save(3, b"one rank alone" * 1000)
        await until(lambda: newest_in_memory(gang, 1) == 3, "step 3 is digested")
        inventories = await slow.seal(1)
        assert complete(inventories) == [2]
        found = {s.step for i in inventories.values() for s in i.shards}
        assert 3 not in found
        await gang.begin(1, restore=point_of(inventories, 2), policy=POLICY)
        states = {gang.ranks[1].header(n).state for n in gang.ranks[1].names}
        assert states == {SlotState.FREE}


async def test_when_the_disk_goes_on_the_newest_step_becomes_local_and_the_rest_is_gone(
    gangs: Gangs, tmp_path: Path
) -> None:
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    async with gang:
        await slow.start()
        await gang.save(1)
        for step in range(2, 6):
            await slow.save(step, Level.MEMORY)
        slow.gate.touch()
        for rank in gang.ranks.values():
            await rank.reached(5, Level.REPLICATED)
        await slow.save(6, Level.REPLICATED)
        inventories = await slow.seal(1)
        assert complete(inventories) == [1, 5, 6]
        for inventory in inventories.values():
            assert {s.step for s in inventory.shards if s.tier is TierName.NODE} == {1, 5, 6}


async def test_a_sidecar_that_restarts_finds_what_it_held(gangs: Gangs, tmp_path: Path) -> None:
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    async with gang:
        await slow.start()
        await gang.save(1)
        await slow.save(2, Level.MEMORY)
        saved = await slow.save(3, Level.MEMORY)
        gang.sidecars[1].kill()
        await slow.relaunch()
        for rank in gang.ranks.values():
            await rank.reached(3, Level.REPLICATED)
        await slow.save(4, Level.REPLICATED)
        inventories = await slow.seal(1)
        await gang.begin(1, restore=point_of(inventories, 3), policy=POLICY)
        assert await gang.restored() == saved


async def test_a_coordinator_that_restarts_takes_up_what_it_holds_itself(
    gangs: Gangs, tmp_path: Path
) -> None:
    """It learns of the manifests before its own shards are digested again."""
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    gang.failpoints[0] = gang.failpoints[1]
    async with gang:
        await slow.start()
        await gang.save(1)
        await slow.save(2, Level.MEMORY)
        saved = await slow.save(3, Level.MEMORY)
        gang.sidecars[0].kill()
        digest = tmp_path / "digest"
        await slow.relaunch(0, f"memory.after_digest=wait:{digest}")

        def adopted(state: CoordinatorState) -> bool:
            return Step(3) in [s.step for s in state.steps]

        await gang.operator.state_until(0, adopted, "the manifest is known")
        digest.touch()
        await state_with(gang, 3)
        slow.gate.touch()
        for rank in gang.ranks.values():
            await rank.reached(3, Level.REPLICATED)
        inventories = await slow.seal(1)
        await gang.begin(1, restore=point_of(inventories, 3), policy=POLICY)
        assert await gang.restored() == saved


async def test_another_coordinator_goes_on_with_what_is_held(gangs: Gangs, tmp_path: Path) -> None:
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    async with gang:
        await slow.start()
        await gang.save(1)
        await slow.save(2, Level.MEMORY)
        await slow.save(3, Level.MEMORY)
        message = gang.operator.message(
            0, version=2, copies=gang.copies, policy=POLICY, coordinator=1
        )
        await gang.operator.round_all(message)
        await state_with(gang, 3, coordinator=1)
        saved = await slow.save(4, Level.MEMORY)
        slow.gate.touch()
        for rank in gang.ranks.values():
            await rank.reached(4, Level.REPLICATED)
        await slow.save(5, Level.REPLICATED)
        inventories = await slow.seal(1)
        assert complete(inventories)[-2:] == [4, 5]
        await gang.begin(1, restore=point_of(inventories, 4), policy=POLICY)
        assert await gang.restored() == saved


async def test_one_of_two_ranks_of_a_pod_falls_behind(gangs: Gangs, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gang = gangs(1)
    gang.slots, gang.procs_per_worker = 3, 2
    gang.failpoints[0] = f"node.mid_write=wait:{gate}@1"
    async with gang:
        await gang.start(policy=Policy(interval_steps=1, slots=3))
        sidecar = gang.sidecars[0]
        other = FakeRank(sidecar.shared, sidecar.contract.job_uid, 1, 0, slots=3)
        await other.connect()
        ranks = (gang.ranks[0], other)

        async def save(step: int, level: Level | None) -> None:
            for rank in ranks:
                await rank.save(step, bytes([step, rank.rank]) * 5000)
            for rank in ranks if level is not None else ():
                await rank.reached(step, level)

        await save(1, None)
        for step in range(2, 6):
            await save(step, Level.MEMORY)
        gate.touch()
        for rank in ranks:
            await rank.reached(5, Level.LOCAL)
        await save(6, Level.LOCAL)
        for rank in ranks:
            await until(
                lambda rank=rank: {rank.header(n).state for n in rank.names} == {SlotState.FREE},
                "every slot is free",
            )
        found = complete({0: await gang.operator.seal(0, 1)})
        assert found[-2:] == [5, 6]
        assert not {2, 3, 4} & set(found)
        other.close()


@pytest.mark.parametrize(
    "dies",
    ["memory.after_digest=panic@2", "node.before_tombstone=panic@1", "memory.before_free=panic@1"],
    ids=["a step is digested", "its manifest is about to go", "its slot is about to be free"],
)
async def test_a_sidecar_dies_while_step_3_takes_the_place_of_step_2(
    gangs: Gangs, tmp_path: Path, dies: str
) -> None:
    """Step 3 is committed all the same, step 2 is not left half, and no slot is lost."""
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    gang.failpoints[1] += f",{dies}"
    async with gang:
        await slow.start()
        await gang.save(1)
        await slow.save(2, Level.MEMORY)
        await gang.ranks[0].save(3, b"rank 0" * 1000)
        with suppress(UnavailableError):  # the answer may not come any more
            await gang.ranks[1].save(3, b"rank 1" * 1000)
        process = gang.sidecars[1].process
        await until(lambda: process.poll() == PANIC_EXIT_CODE, "the sidecar is dead")
        await slow.relaunch()
        for rank in gang.ranks.values():
            await rank.reached(3, Level.REPLICATED)
        names = gang.ranks[1].names
        await until(
            lambda: {gang.ranks[1].header(n).state for n in names} == {SlotState.FREE},
            "every slot is free",
        )
        inventories = await slow.seal(1)
        found = complete(inventories)
        assert found in ([3], [2, 3]), "step 2 is whole, where the next life wrote it, or gone"
        manifests = {m.step for i in inventories.values() for m in i.manifests}
        assert manifests == set(found)


async def test_a_sidecar_that_dies_in_a_seal_writes_it_when_it_is_sealed_again(
    gangs: Gangs, tmp_path: Path
) -> None:
    slow = Slow(gangs, tmp_path / "gate")
    gang = slow.gang
    gang.failpoints[1] += "@1,node.mid_write=panic@2"
    async with gang:
        await slow.start()
        await gang.save(1)
        saved = await slow.save(2, Level.MEMORY)
        with pytest.raises(aiohttp.ClientError):
            await slow.seal(1)
        gang.launchers.pop(1).close()
        await gang.relaunch(1)
        there = await gang.operator.inventory(1)
        assert there.round == 0 or 2 in [s.step for s in there.shards], "no answer, or a whole one"
        inventories = await slow.seal(1)
        assert complete(inventories) == [2]
        assert {i.round for i in inventories.values()} == {1}
        await gang.begin(1, restore=point_of(inventories, 2), policy=POLICY)
        assert await gang.restored() == saved


def newest_in_memory(gang: Any, rank: int) -> int | None:
    wanted = f'holdfast_newest_step{{rank="{rank}",tier="memory"}} '
    found = [line for line in metrics(gang, rank).splitlines() if line.startswith(wanted)]
    return int(float(found[0].split()[-1])) if found else None


def metrics(gang: Any, worker: int) -> str:
    with urllib.request.urlopen(gang.metrics_url(worker)) as reply:
        text: str = reply.read().decode()
        return text
