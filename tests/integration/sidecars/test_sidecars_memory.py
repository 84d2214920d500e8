"""A gang that saves every step, where the disk of one worker does not keep up: its steps wait in slots."""

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
from holdfast_core.ids import Level, Step
from holdfast_core.messages.schema import OVERTAKEN, Inventory, Policy, RestorePoint
from holdfast_core.shm.slot_file import SlotState

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
    there = {ref for i in inventories.values() for ref in (*i.shards, *i.in_memory)}
    manifests = [
        await gang.operator.manifest(worker, digest, checkpoint)
        for worker, inventory in inventories.items()
        for digest, checkpoint in inventory.manifests.items()
    ]
    steps = {m.step for m in manifests if all(m.ref(s.rank) in there for s in m.shards)}
    return sorted(steps)


def point_of(inventories: dict[int, Inventory], step: int) -> RestorePoint:
    """Return the restore point of the step, of which the inventories list one manifest."""
    found = {
        (checkpoint.round, digest)
        for inventory in inventories.values()
        for digest, checkpoint in inventory.manifests.items()
        if checkpoint.step == step
    }
    ((round_, manifest),) = found
    return RestorePoint(Step(step), round_, manifest)


async def finished(gang: Gang, sealed: dict[int, Inventory]) -> dict[int, Inventory]:
    """Finish the commit of the newest step that all members have handed over, as the operator does."""
    listed = {
        worker: {item.step: item for item in inventory.uncommitted}
        for worker, inventory in sealed.items()
    }
    step = max(set.intersection(*map(set, listed.values())), default=None)
    if step is None or step < max(await complete_steps(gang, sealed), default=-1):
        return sealed
    return {w: await gang.finish(w, [listed[o][step] for o in sorted(listed)]) for w in sealed}


def waiting(gang: Gang, worker: int) -> list[int]:
    """Return the steps in the slots that the worker's sidecar owns."""
    rank = gang.ranks[worker]
    owned = (h for name in rank.names if (h := rank.header(name)).state is SlotState.OWNED)
    return sorted(h.step for h in owned if h.step is not None)


async def handed_over(gang: Gang, step: int) -> dict[int, bytes]:
    """Save a step, and wait until it has replaced the older ones that waited on the slow worker."""
    saved = await gang.save(step)
    await until(lambda: waiting(gang, 1)[1:] == [step], f"only step {step} waits")
    return saved


@pytest.mark.fault("The disk is a hundred times slower than a step")
async def test_the_newest_step_that_all_ranks_handed_over_is_restored_when_ranks_die(
    slow: SlowGang,
) -> None:
    async with slow as gang:
        await gang.save(1)
        for step in range(2, 8):
            saved = await handed_over(gang, step)
        state = await gang.operator.state(0)
        assert state.last_local is None
        assert state.saves_skipped == 0
        rank: FakeRank = gang.ranks[1]
        overtaken = {(s, Level.LOCAL, OVERTAKEN) for s in range(2, 7)}

        def notified() -> bool:
            return {(m.step, m.level, m.reason) for m in rank.failures} == overtaken

        await until(notified, "the rank receives which steps were dropped")
        dropped = "holdfast_steps_dropped_total 5.0"
        await until(lambda: dropped in gang.metrics(1), "five steps are counted")
        assert "holdfast_steps_overtaken 5.0" in gang.metrics(0), "worker 0 coordinates"

        inventories = await finished(gang, await slow.seal(1))
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
        await handed_over(gang, 3)
        await handed_over(gang, 4)
        gang.lose(1)
        inventories = {0: await gang.operator.seal(0, 1)}
        assert 4 in [s.step for s in inventories[0].uncommitted]
        assert await complete_steps(gang, inventories) == [1]
        slow.gate.touch()
        await gang.launch(1, birth_round=1)
        await gang.begin(1, restore=point_of(inventories, 1), policy=POLICY)
        assert await gang.restored() == saved
        assert [m.step for m in (await gang.operator.inventory(0)).manifests.values()] == [1]


@pytest.mark.fault("The gang fails when one rank has handed over a step that another has not")
async def test_a_step_that_one_rank_alone_handed_over_is_not_restored(slow: SlowGang) -> None:
    """Nor is the step that this rank was copying into a slot: it is in no inventory."""
    async with slow as gang:
        await gang.save(1)
        saved = await handed_over(gang, 2)
        rank: FakeRank = gang.ranks[1]
        name = await rank.save(3, b"one rank alone" * 1000)
        inventories = await slow.seal(1)
        assert 3 in [s.step for s in inventories[1].uncommitted]
        rank.fill_slot(name, 4, b"not handed over" * 1000)
        repeated = {w: await gang.operator.seal(w, 1) for w in inventories}
        for worker, inventory in repeated.items():
            assert inventory.uncommitted == inventories[worker].uncommitted
        inventories = await finished(gang, repeated)
        assert await complete_steps(gang, inventories) == [2]
        await gang.begin(1, restore=point_of(inventories, 2), policy=POLICY)
        assert {rank.header(n).state for n in rank.names} == {SlotState.FREE}
        assert await gang.restored() == saved
        for worker in (0, 1):
            shards = (await gang.operator.inventory(worker)).shards
            assert {s.step for s in shards} == {2}


async def test_a_disk_that_continues_writes_the_newest_step_and_drops_the_older_ones(
    slow: SlowGang,
) -> None:
    async with slow as gang:
        await gang.save(1)
        for step in range(2, 6):
            await handed_over(gang, step)
        slow.gate.touch()
        for rank in gang.ranks.values():
            await rank.reached(5, Level.REPLICATED)
        await gang.commit(6, Level.REPLICATED)
        inventories = await slow.seal(1)
        assert await complete_steps(gang, inventories) == [1, 5, 6]
        for inventory in inventories.values():
            assert {s.step for s in inventory.shards} == {1, 5, 6}


async def test_a_restarted_sidecar_finds_the_steps_that_waited_in_slots(slow: SlowGang) -> None:
    async with slow as gang:
        await gang.save(1)
        await handed_over(gang, 2)
        saved = await handed_over(gang, 3)
        gang.sidecars[1].kill()
        await slow.relaunch()
        for rank in gang.ranks.values():
            await rank.reached(3, Level.REPLICATED)
        await gang.commit(4, Level.REPLICATED)
        inventories = await slow.seal(1)
        await gang.begin(1, restore=point_of(inventories, 3), policy=POLICY)
        assert await gang.restored() == saved


async def test_a_restarted_coordinator_has_the_steps_written_that_wait_in_slots(
    slow: SlowGang,
) -> None:
    slow.gang.failpoints[0] = slow.gang.failpoints[1]
    async with slow as gang:
        await gang.save(1)
        await handed_over(gang, 2)
        saved = await handed_over(gang, 3)
        gang.sidecars[0].kill()
        await slow.relaunch(0)
        slow.gate.touch()
        for rank in gang.ranks.values():
            await rank.reached(3, Level.REPLICATED)
        inventories = await slow.seal(1)
        await gang.begin(1, restore=point_of(inventories, 3), policy=POLICY)
        assert await gang.restored() == saved


async def test_another_coordinator_has_the_steps_written_that_wait_in_slots(slow: SlowGang) -> None:
    async with slow as gang:
        await gang.save(1)
        await handed_over(gang, 2)
        await handed_over(gang, 3)
        message = gang.operator.message(
            0, version=2, copies=gang.copies, policy=POLICY, coordinator=1
        )
        await gang.operator.round_all(message)
        saved = await handed_over(gang, 4)
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

        def owned() -> set[int]:
            headers = [rank.header(name) for rank in ranks for name in rank.names]
            return {h.step for h in headers if h.state is SlotState.OWNED and h.step is not None}

        async def save(step: int) -> None:
            for rank in ranks:
                await rank.save(step, bytes([step, rank.rank]) * 5000)

        await save(1)
        for step in range(2, 6):
            await save(step)
            await until(lambda step=step: owned() <= {1, step}, f"only step {step} waits")
        gate.touch()
        for rank in ranks:
            await rank.reached(5, Level.LOCAL)
        await save(6)
        for rank in ranks:
            await rank.reached(6, Level.LOCAL)
            await until(
                lambda rank=rank: {rank.header(n).state for n in rank.names} == {SlotState.FREE},
                "every slot is free",
            )
        found = await complete_steps(gang, {0: await gang.operator.seal(0, 1)})
        assert found[-2:] == [5, 6]
        assert not {2, 3, 4} & set(found)
        other.close()


@pytest.mark.fault("The disk is a hundred times slower than a step")
async def test_a_sidecar_that_dies_before_it_frees_a_dropped_step_loses_no_slot(
    slow: SlowGang,
) -> None:
    """Step 3 is committed, step 2 is either complete or deleted, and every slot becomes free."""
    slow.gang.failpoints[1] += ",memory.before_free=panic@1"
    async with slow as gang:
        await gang.save(1)
        await handed_over(gang, 2)
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
        manifests = {m.step for i in inventories.values() for m in i.manifests.values()}
        assert manifests == set(found)


@pytest.mark.fault("The disk is a hundred times slower than a step")
async def test_a_sidecar_that_dies_in_a_seal_writes_the_step_when_it_is_sealed_again(
    slow: SlowGang,
) -> None:
    slow.gang.failpoints[1] += "@1,node.mid_write=panic@2"
    async with slow as gang:
        await gang.save(1)
        saved = await handed_over(gang, 2)
        with pytest.raises(aiohttp.ClientError):
            await slow.seal(1)
        gang.launchers.pop(1).close()
        await gang.relaunch(1)
        early = await gang.operator.inventory(1)
        assert early.round == 0 or 2 in [s.step for s in (*early.shards, *early.in_memory)], (
            "the inventory is of round 0, or has step 2"
        )
        inventories = await finished(gang, await slow.seal(1))
        assert await complete_steps(gang, inventories) == [2]
        assert {i.round for i in inventories.values()} == {1}
        await gang.begin(1, restore=point_of(inventories, 2), policy=POLICY)
        assert await gang.restored() == saved
