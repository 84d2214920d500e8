"""Five real sidecars in groups of two: messages between the coordinator and other groups go through relays.

Worker 0 coordinates. Worker 2 is the relay of worker 3, and worker 4 is alone in its group.
"""

from __future__ import annotations

import pytest
from tests.support.sidecar.gang import Gang, Gangs
from tests.support.sidecar.ranks import FakeRank
from tests.support.sidecar.waiting import until

from holdfast_core.ids import Level, Rank, Worker
from holdfast_core.messages.schema import DeadRank, Policy
from holdfast_core.shm.slot_file import SlotState

WORKERS = 5
GROUPS = {"fan_in": 2}


async def resume(gang: Gang, worker: int, version: int, **fields: object) -> None:
    """Start a sidecar that was killed, and send ROUND again as the operator does."""
    await gang.relaunch(worker)
    gang.launchers[worker].close()
    rank = await gang.connect_rank(worker, 0)
    await gang.launcher(worker, last_round=0, running=0)
    free_slots(rank)
    await repeat_round(gang, version, **fields)


async def repeat_round(gang: Gang, version: int, **fields: object) -> None:
    message = gang.operator.message(
        0,
        version=version,
        copies=gang.copies,
        **GROUPS,
        **fields,  # type: ignore[arg-type]
    )
    await gang.operator.round_all(message)


def free_slots(rank: FakeRank) -> None:
    for name in rank.names:
        if rank.header(name).state is not SlotState.FREE:
            rank.free_slot(name)


async def test_a_gang_with_relays_commits_and_restores(gangs: Gangs) -> None:
    async with gangs(WORKERS) as gang:
        policy = Policy(interval_steps=1, peer_copies=1)
        await gang.start(policy=policy, **GROUPS)
        await gang.commit(1, Level.REPLICATED)
        saved = await gang.commit(2, Level.REPLICATED)
        point = await gang.point(2)
        gang.lose(3)
        await gang.operator.seal(0, 1)
        for worker in (1, 2, 4):
            await gang.operator.seal(worker, 1)
        await gang.launch(3, birth_round=1)
        await gang.begin(1, restore=point, policy=policy, **GROUPS)
        assert await gang.restored() == saved
        await gang.commit(3, Level.REPLICATED)


@pytest.mark.fault("A copy goes to or from the coordinator's worker in a gang with relays")
async def test_copies_to_and_from_the_coordinator_pass_no_relay(gangs: Gangs) -> None:
    """Worker 2 is the relay of worker 3, and would take a request for a copy for its own."""
    async with gangs(WORKERS) as gang:
        gang.copies = ((0, 3), (1, 4), (2, 1), (3, 0), (4, 2))
        await gang.start(**GROUPS)
        await gang.commit(1, Level.REPLICATED)
        for source, target in gang.copies:
            found = await gang.operator.inventory(target)
            assert {s.rank for s in found.shards} >= {source}


@pytest.mark.fault("A relay of a large gang dies between two commits")
async def test_a_relay_that_was_killed_costs_no_committed_step(gangs: Gangs) -> None:
    """While the relay is away, the other workers prepare a step, which is not committed without it."""
    async with gangs(WORKERS) as gang:
        await gang.start(**GROUPS)
        await gang.commit(1, Level.REPLICATED)
        gang.sidecars[2].kill()
        for worker in (0, 1, 3, 4):
            rank = gang.ranks[worker]
            slot = await rank.save(2, b"%d" % worker * 1000)
            await until(
                lambda rank=rank, slot=slot: rank.header(slot).state is SlotState.FREE,
                f"the shard of rank {worker} is durable",
            )
            rank.progress(2)

        state = await gang.operator.state_until(
            0,
            lambda s: s.progress is not None and s.progress.total_steps == 2 * WORKERS - 1,
            "the report of worker 3 without its relay",
        )
        assert state.last_local is not None and state.last_local.step == 1
        await resume(gang, 2, 2)
        await gang.ranks[2].save(2, b"2" * 1000)
        for rank in gang.ranks.values():
            await rank.reached(2, Level.REPLICATED)


@pytest.mark.fault("A rank dies behind a relay that is dead")
async def test_a_rank_that_dies_behind_a_dead_relay_is_reported(gangs: Gangs) -> None:
    async with gangs(WORKERS) as gang:
        await gang.start(**GROUPS)
        gang.sidecars[2].kill()
        gang.launchers[3].report(DeadRank(Rank(3), Worker(3), 1, "it failed"))
        state = await gang.operator.state_until(0, lambda s: bool(s.dead), "the dead rank")
        assert [d.rank for d in state.dead] == [3]


@pytest.mark.fault("The coordinator of a gang with relays restarts")
async def test_a_coordinator_that_was_killed_resumes_behind_its_relays(gangs: Gangs) -> None:
    """The next process has no acknowledgement and no layout. All groups report to it again."""
    async with gangs(WORKERS) as gang:
        await gang.start(**GROUPS)
        await gang.commit(1, Level.REPLICATED)
        gang.sidecars[0].kill()
        await resume(gang, 0, 2)
        await gang.commit(2, Level.REPLICATED)
        # The coordinator learns of step 1 beside the commit of step 2.
        await gang.operator.state_until(
            0, lambda s: s.committed == (1, 2), "the record of both steps"
        )


async def test_another_group_may_take_over_the_coordination(gangs: Gangs) -> None:
    """Worker 3 is the relay of its group then, and worker 0 that of worker 1."""
    async with gangs(WORKERS) as gang:
        await gang.start(**GROUPS)
        await gang.commit(1, Level.REPLICATED)
        await repeat_round(gang, 2, coordinator=3)
        await gang.commit(2, Level.REPLICATED)
        await gang.replicated(3, {1, 2})


async def test_steps_in_memory_are_chosen_through_relays(gangs: Gangs) -> None:
    async with gangs(WORKERS) as gang:
        gang.slots = 3
        await gang.start(policy=Policy(interval_steps=1, peer_copies=1, slots=3), **GROUPS)
        for step in (1, 2, 3, 4):
            await gang.save(step)
        for rank in gang.ranks.values():
            await rank.reached(4, Level.REPLICATED)
        found = await gang.operator.inventory(3)
        assert 4 in {s.step for s in found.shards}
        await until(
            lambda: all(
                r.header(n).state is SlotState.FREE for r in gang.ranks.values() for n in r.names
            ),
            "all slots are free",
        )
