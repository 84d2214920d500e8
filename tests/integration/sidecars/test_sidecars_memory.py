"""A gang that saves every step, where the disk of one worker does not keep up: its steps wait in memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from tests.support.crash.failpoints import PANIC_EXIT_CODE, VARIABLE
from tests.support.sidecar import FakeRank, until
from tests.support.sidecar.gang import Gang, Gangs

from holdfast_core.errors import UnavailableError
from holdfast_core.ids import Level, Step, TierName
from holdfast_core.messages.schema import (
    OVERTAKEN,
    CoordinatorState,
    Inventory,
    Policy,
    RestorePoint,
)
from holdfast_core.shm.slot_header import SlotState

pytestmark = pytest.mark.integration

POLICY = Policy(interval_steps=1, slots=3, peer_copies=1)


class SlowGang:
    """Two workers with three slots a rank, whose worker 1 writes to its disk only while the gate is open."""

    def __init__(self, gang: Gang, gate: Path) -> None:
        self.gang = gang
        self.gang.slots = 3
        self.gang.failpoints[1] = f"node.mid_write=wait:{gate}"
        self.gate = gate

    async def __aenter__(self) -> Gang:
        await self.gang.__aenter__()
        await self.gang.start(policy=POLICY)
        return self.gang

    async def __aexit__(self, *error: object) -> None:
        await self.gang.__aexit__(*error)

    async def relaunch(self, worker: int = 1, failpoints: str | None = None) -> None:
        """Start the worker's sidecar again in the same round, with a disk that keeps up."""
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
        """Seal both workers and open the gate once both are sealed.

        No step is chosen after that. An inventory that is requested earlier is not an answer to the SEAL:
        it is of the older round, or lists the same shards.
        """
        workers = sorted(self.gang.sidecars)
        seals = [asyncio.ensure_future(self.gang.operator.seal(w, round_)) for w in workers]
        named = f"holdfast_restart_round {float(round_)}"
        await until(
            lambda: all(named in self.gang.metrics(worker) for worker in workers),
            "both are sealed",
        )
        early = await asyncio.gather(*(self.gang.operator.inventory(w) for w in workers))
        self.gate.touch()
        answers = dict(zip(workers, await asyncio.gather(*seals), strict=True))
        for worker, inventory in zip(workers, early, strict=True):
            assert inventory.round < round_ or inventory.shards == answers[worker].shards
        return answers


@pytest.fixture
def slow(gangs: Gangs, tmp_path: Path) -> SlowGang:
    return SlowGang(gangs(2), tmp_path / "gate")


async def complete_steps(gang: Gang, inventories: dict[int, Inventory]) -> list[int]:
    """Return the steps with a manifest and all of its shards, from which a round may start."""
    there = {(s.step, s.round, s.rank, s.blake3) for i in inventories.values() for s in i.shards}
    manifests = [
        await gang.operator.manifest(worker, listed)
        for worker, inventory in inventories.items()
        for listed in inventory.manifests
    ]
    steps = {
        m.step
        for m in manifests
        if all((m.step, m.restart_round, s.rank, s.blake3) in there for s in m.shards)
    }
    return sorted(steps)


def point_of(inventories: dict[int, Inventory], step: int) -> RestorePoint:
    """Return the restore point of the step, of which the inventories list one manifest."""
    found = {
        (m.round, m.manifest) for i in inventories.values() for m in i.manifests if m.step == step
    }
    ((round_, manifest),) = found
    return RestorePoint(Step(step), round_, manifest)


async def in_memory(gang: Gang, step: int, *, coordinator: int = 0) -> CoordinatorState:
    """Wait until the step is committed in memory."""

    def there(state: CoordinatorState) -> bool:
        return state.last_memory is not None and state.last_memory.step == step

    return await gang.operator.state_until(coordinator, there, f"step {step} in memory")


def newest_in_memory(gang: Gang, rank: int) -> int | None:
    """Return the newest step of the rank in shared memory, as its sidecar's metrics name it."""
    wanted = f'holdfast_newest_step{{rank="{rank}",tier="memory"}} '
    found = [line for line in gang.metrics(rank).splitlines() if line.startswith(wanted)]
    return int(float(found[0].split()[-1])) if found else None


async def test_the_newest_step_in_memory_is_restored_when_ranks_die(slow: SlowGang) -> None:
    async with slow as gang:
        await gang.save(1)
        for step in range(2, 8):
            saved = await gang.commit(step, Level.MEMORY)
        state = await in_memory(gang, 7)
        assert state.last_local is None
        assert state.steps_dropped == 5
        assert state.saves_skipped == 0
        rank: FakeRank = gang.ranks[1]
        overtaken = {(s, Level.LOCAL, OVERTAKEN) for s in range(2, 7)}

        def notified() -> bool:
            return {(m.step, m.level, m.reason) for m in rank.failures} == overtaken

        await until(notified, "the rank receives which steps were dropped")
        dropped = "holdfast_steps_dropped_total 5.0"
        await until(lambda: dropped in gang.metrics(1), "five steps are counted")
        assert 'holdfast_committed_step{level="memory"} 7.0' in gang.metrics(0)

        inventories = await slow.seal(1)
        assert await complete_steps(gang, inventories) == [7]
        await gang.begin(1, restore=point_of(inventories, 7), policy=POLICY)
        assert await gang.restored() == saved


async def test_after_the_loss_of_a_pod_the_newest_step_on_the_nodes_is_restored(
    slow: SlowGang,
) -> None:
    slow.gate.touch()
    async with slow as gang:
        saved = await gang.commit(1, Level.REPLICATED)
        slow.gate.unlink()
        await gang.save(2)
        await gang.commit(3, Level.MEMORY)
        await gang.commit(4, Level.MEMORY)
        gang.lose(1)
        inventories = {0: await gang.operator.seal(0, 1)}
        assert 4 in [m.step for m in inventories[0].manifests]
        assert await complete_steps(gang, inventories) == [1]
        slow.gate.touch()
        await gang.launch(1, birth_round=1)
        await gang.begin(1, restore=point_of(inventories, 1), policy=POLICY)
        assert await gang.restored() == saved
        assert [m.step for m in (await gang.operator.inventory(0)).manifests] == [1]


async def test_a_step_without_a_manifest_is_not_written_by_a_seal(slow: SlowGang) -> None:
    async with slow as gang:
        await gang.save(1)
        await gang.commit(2, Level.MEMORY)
        await gang.ranks[1].save(3, b"one rank alone" * 1000)
        await until(lambda: newest_in_memory(gang, 1) == 3, "step 3 is digested")
        inventories = await slow.seal(1)
        assert await complete_steps(gang, inventories) == [2]
        found = {s.step for i in inventories.values() for s in i.shards}
        assert 3 not in found
        await gang.begin(1, restore=point_of(inventories, 2), policy=POLICY)
        states = {gang.ranks[1].header(n).state for n in gang.ranks[1].names}
        assert states == {SlotState.FREE}


async def test_a_disk_that_continues_writes_the_newest_step_and_drops_the_older_ones(
    slow: SlowGang,
) -> None:
    async with slow as gang:
        await gang.save(1)
        for step in range(2, 6):
            await gang.commit(step, Level.MEMORY)
        slow.gate.touch()
        for rank in gang.ranks.values():
            await rank.reached(5, Level.REPLICATED)
        await gang.commit(6, Level.REPLICATED)
        inventories = await slow.seal(1)
        assert await complete_steps(gang, inventories) == [1, 5, 6]
        for inventory in inventories.values():
            assert {s.step for s in inventory.shards if s.tier is TierName.NODE} == {1, 5, 6}


async def test_a_restarted_sidecar_finds_the_steps_that_it_had_in_memory(slow: SlowGang) -> None:
    async with slow as gang:
        await gang.save(1)
        await gang.commit(2, Level.MEMORY)
        saved = await gang.commit(3, Level.MEMORY)
        gang.sidecars[1].kill()
        await slow.relaunch()
        for rank in gang.ranks.values():
            await rank.reached(3, Level.REPLICATED)
        await gang.commit(4, Level.REPLICATED)
        inventories = await slow.seal(1)
        await gang.begin(1, restore=point_of(inventories, 3), policy=POLICY)
        assert await gang.restored() == saved


async def test_a_restarted_coordinator_commits_the_steps_that_it_had_in_memory(
    slow: SlowGang, tmp_path: Path
) -> None:
    """It receives the manifests before it has digested its own shards again."""
    slow.gang.failpoints[0] = slow.gang.failpoints[1]
    async with slow as gang:
        await gang.save(1)
        await gang.commit(2, Level.MEMORY)
        saved = await gang.commit(3, Level.MEMORY)
        gang.sidecars[0].kill()
        digest = tmp_path / "digest"
        await slow.relaunch(0, f"memory.after_digest=wait:{digest}")

        def adopted(state: CoordinatorState) -> bool:
            return Step(3) in [s.step for s in state.steps]

        await gang.operator.state_until(0, adopted, "the manifest is known")
        digest.touch()
        await in_memory(gang, 3)
        slow.gate.touch()
        for rank in gang.ranks.values():
            await rank.reached(3, Level.REPLICATED)
        inventories = await slow.seal(1)
        await gang.begin(1, restore=point_of(inventories, 3), policy=POLICY)
        assert await gang.restored() == saved


async def test_another_coordinator_commits_the_steps_that_are_in_memory(slow: SlowGang) -> None:
    async with slow as gang:
        await gang.save(1)
        await gang.commit(2, Level.MEMORY)
        await gang.commit(3, Level.MEMORY)
        message = gang.operator.message(
            0, version=2, copies=gang.copies, policy=POLICY, coordinator=1
        )
        await gang.operator.round_all(message)
        await in_memory(gang, 3, coordinator=1)
        saved = await gang.commit(4, Level.MEMORY)
        slow.gate.touch()
        for rank in gang.ranks.values():
            await rank.reached(4, Level.REPLICATED)
        await gang.commit(5, Level.REPLICATED)
        inventories = await slow.seal(1)
        assert (await complete_steps(gang, inventories))[-2:] == [4, 5]
        await gang.begin(1, restore=point_of(inventories, 4), policy=POLICY)
        assert await gang.restored() == saved


async def test_one_slow_rank_of_a_pod_costs_only_older_steps(gangs: Gangs, tmp_path: Path) -> None:
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
        found = await complete_steps(gang, {0: await gang.operator.seal(0, 1)})
        assert found[-2:] == [5, 6]
        assert not {2, 3, 4} & set(found)
        other.close()


@pytest.mark.parametrize(
    "dies",
    ["memory.after_digest=panic@2", "node.before_tombstone=panic@1", "memory.before_free=panic@1"],
    ids=["after digest", "before the manifest is deleted", "before the slot is free"],
)
async def test_a_sidecar_that_dies_while_step_3_replaces_step_2_loses_no_slot(
    slow: SlowGang, dies: str
) -> None:
    """Step 3 is committed, step 2 is either complete or deleted, and every slot becomes free."""
    slow.gang.failpoints[1] += f",{dies}"
    async with slow as gang:
        await gang.save(1)
        await gang.commit(2, Level.MEMORY)
        await gang.ranks[0].save(3, b"rank 0" * 1000)
        with suppress(UnavailableError):  # the sidecar may die before it answers
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
        found = await complete_steps(gang, inventories)
        assert found in ([3], [2, 3]), "step 2 is complete, if the next process wrote it, or gone"
        manifests = {m.step for i in inventories.values() for m in i.manifests}
        assert manifests == set(found)


async def test_a_sidecar_that_dies_in_a_seal_writes_the_step_when_it_is_sealed_again(
    slow: SlowGang,
) -> None:
    slow.gang.failpoints[1] += "@1,node.mid_write=panic@2"
    async with slow as gang:
        await gang.save(1)
        saved = await gang.commit(2, Level.MEMORY)
        with pytest.raises(aiohttp.ClientError):
            await slow.seal(1)
        gang.launchers.pop(1).close()
        await gang.relaunch(1)
        early = await gang.operator.inventory(1)
        assert early.round == 0 or 2 in [s.step for s in early.shards], (
            "the inventory is of round 0, or has step 2"
        )
        inventories = await slow.seal(1)
        assert await complete_steps(gang, inventories) == [2]
        assert {i.round for i in inventories.values()} == {1}
        await gang.begin(1, restore=point_of(inventories, 2), policy=POLICY)
        assert await gang.restored() == saved
