"""Real sidecars over loopback commit, lose and restore checkpoints, and the restored bytes are identical."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.sidecar import flip_a_bit, until
from tests.support.sidecar.gang import JOB_UID, Gangs
from tests.support.sidecar.operator import FakeOperator
from tests.support.sidecar.processes import files_below
from tests.support.sidecar.waiting import DEADLINE_SECONDS

from holdfast_core.errors import RefusedError, StaleRoundError
from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import DeadRank, LauncherPlan, Member, Policy, Refusal
from holdfast_core.net import TlsFiles, client_context

pytestmark = pytest.mark.integration


async def test_commit_reaches_replicated_on_every_member(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        await gang.start()
        await gang.commit(1, Level.REPLICATED)
        state = await gang.operator.state_until(
            0, lambda s: s.last_replicated is not None and s.running, "step 1 replicated"
        )
        assert state.last_local is not None and state.last_local.step == 1
        for worker in range(2):
            inventory = await gang.operator.inventory(worker)
            assert [(m.step, m.round) for m in inventory.manifests.values()] == [(1, 0)]
            on_disk = {s.rank for s in inventory.shards}
            assert on_disk == {0, 1}, "own shard and the other's copy"


async def test_the_coordinator_says_which_round_all_members_have_accepted(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        message = await gang.start()
        state = await gang.operator.state_until(
            0, lambda s: s.accepted is not None, "both workers have reported"
        )
        assert state.accepted.content == message.content_digest()
        assert state.accepted.version >= message.version


@pytest.mark.parametrize("encryption", ["TLS", "None"])
async def test_a_lost_pod_gets_its_shard_from_its_peer(gangs: Gangs, encryption: str) -> None:
    """Worker 1 is killed and its disk is wiped. Its successor restores the same bytes from worker 0's copy.

    Worker 0 restores from its shared memory, and the copies of the restore point are made again.
    """
    async with gangs(2) as gang:
        policy = Policy(interval_steps=1, peer_copies=1, peer_encryption=encryption)
        await gang.start(policy=policy)
        saved = await gang.commit(3, Level.REPLICATED)
        point = await gang.point(3)
        gang.lose(1)
        sealed = await gang.operator.seal(0, 1)
        assert sealed.round == 1 and sealed.version == 0
        assert sealed.manifests == {point.manifest: CheckpointId(Step(3), RestartRound(0))}
        await gang.launch(1, birth_round=1)
        await gang.begin(1, restore=point, policy=policy)
        assert gang.launchers[0].ended == [1]
        for worker, source in ((0, TierName.MEMORY), (1, TierName.PEER)):
            restore_point, data, filled = await gang.ranks[worker].restore()
            assert restore_point == point
            assert data == saved[worker]
            assert filled.tier is source
        for worker, source in ((0, TierName.MEMORY), (1, TierName.PEER)):
            page = await asyncio.to_thread(gang.metrics, worker)
            assert f'holdfast_restored_from{{rank="{worker}",tier="{source}"}} 1.0' in page
        assert (await gang.operator.state(0)).cannot_restore == ""
        await gang.commit(4, Level.REPLICATED)
        # The copies of the restore point are made beside the saves of the new round.
        wanted = {(3, 0), (3, 1), (4, 0), (4, 1)}
        async with asyncio.timeout(DEADLINE_SECONDS):
            while await _on_disk(gang.operator, 1) != wanted:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)


async def _on_disk(operator: FakeOperator, worker: int) -> set[tuple[int, int]]:
    """Return step and rank of each shard on the worker's node tier."""
    inventory = await operator.inventory(worker)
    return {(s.step, s.rank) for s in inventory.shards}


@pytest.mark.fault("A replaced pod is sealed for the round that replaced it, and still runs")
async def test_a_sealed_round_replaces_a_further_pod_that_was_sealed_for_it(gangs: Gangs) -> None:
    """Worker 2 is lost after the seal of round 1. Round 1 begins with new pods of workers 1 and 2.

    The old pod of worker 2 still runs in round 1, and is no member of it.
    """
    async with gangs(3) as gang:
        gang.copies = ((0, 1), (1, 0), (2, 0))
        await gang.start()
        saved = await gang.commit(3, Level.REPLICATED)
        point = await gang.point(3)
        gang.lose(1)
        for worker in (0, 2):
            assert (await gang.operator.seal(worker, 1)).round == 1
        old = gang.sidecars.pop(2)
        gang.launchers.pop(2).close()
        gang.ranks.pop(2).close()
        for worker in (1, 2):
            await gang.launch(worker, birth_round=1)
        try:
            await gang.begin(1, restore=point)
            assert await gang.restored() == saved
            certificates = TlsFiles.in_directory(Path(old.contract.certs_dir))
            late = FakeOperator(JOB_UID, client_context(certificates), gang.operator.members)
            with pytest.raises(RefusedError) as refused:
                await late.state(0)
            assert refused.value.code == Refusal.NOT_MEMBER
            await gang.commit(4, Level.REPLICATED)
        finally:
            old.kill()


async def test_a_sealed_sidecar_refuses_the_old_round(gangs: Gangs) -> None:
    """After SEAL a rank of the old round cannot stage, and a late SEAL or ROUND is stale."""
    async with gangs(2) as gang:
        message = await gang.start()
        await gang.commit(1, Level.LOCAL)
        await gang.operator.seal(0, 5)
        with pytest.raises(StaleRoundError):
            await gang.ranks[0].save(2, b"of the old round")
        with pytest.raises(StaleRoundError) as refused:
            await gang.operator.round(0, message)
        assert refused.value.own_round == 5
        with pytest.raises(StaleRoundError):
            await gang.operator.seal(0, 4)
        again = await gang.operator.seal(0, 5)
        assert [m.step for m in again.manifests.values()] == [1], "idempotent"


async def test_a_late_survivor_loses_what_it_committed_off_the_lineage(gangs: Gangs) -> None:
    """Round 1 restores step 2, so both workers delete their step 3 of round 0.

    Round 2 restores the step 3 that was trained again in round 1.
    """
    async with gangs(2) as gang:
        await gang.start()
        await gang.commit(2, Level.REPLICATED)
        point = await gang.point(2)
        abandoned = await gang.commit(3, Level.REPLICATED)
        for worker in (0, 1):
            await gang.operator.seal(worker, 1)
        await gang.begin(1, restore=point)
        for worker in (0, 1):
            found = await gang.operator.inventory(worker)
            assert [(m.step, m.round) for m in found.manifests.values()] == [(2, 0)]
            assert {(s.step, s.round) for s in found.shards} == {(2, 0)}
        again = {w: bytes(reversed(data)) for w, data in abandoned.items()}
        for worker, data in again.items():
            await gang.ranks[worker].save(3, data)
        for rank in gang.ranks.values():
            await rank.reached(3, Level.REPLICATED)
        newest = await gang.point(3)
        assert newest.round == 1
        for worker in (0, 1):
            await gang.operator.seal(worker, 2)
        await gang.begin(2, restore=newest)
        assert await gang.restored() == again


async def test_a_dead_rank_and_a_dead_launcher_are_reported_at_once(gangs: Gangs) -> None:
    """Three events are each reported as a dead rank in the coordinator's state.

    These are a rank's exit code, a launcher's end of file, and a launcher that reconnects after it has run
    this round.
    """
    async with gangs(3) as gang:
        await gang.start()
        gang.launchers[0].report(DeadRank(Rank(0), Worker(0), 137, "killed"))
        await gang.operator.state_until(
            0, lambda s: [(d.rank, d.code) for d in s.dead] == [(0, 137)], "rank 0 dead"
        )
        gang.launchers.pop(1).close()
        await gang.operator.state_until(
            0, lambda s: [d.rank for d in s.dead] == [0, 1], "rank 1 dead"
        )
        gang.launchers.pop(2).close()
        back = await gang.launcher(2, last_round=0)
        state = await gang.operator.state_until(
            0, lambda s: [d.rank for d in s.dead] == [0, 1, 2], "rank 2 dead"
        )
        assert back.run is None, "no round runs twice"
        assert state.dead[2].worker == 2


async def test_nothing_runs_while_a_member_has_no_address(gangs: Gangs) -> None:
    """ROUND is sent again with a higher version when addresses become known. An old version is refused."""
    async with gangs(2) as gang:
        await gang.launch(0)
        gang.operator.members[1] = Member(Worker(1), "gpt-1-r0", "")
        first = gang.operator.message(0, copies=gang.copies)
        await gang.operator.round(0, first)
        launcher = await gang.launcher(0)
        hosts = LauncherPlan(RestartRound(0), hosts_store=True)
        await until(lambda: hosts in launcher.pushed, "the plan")
        await gang.launch(1)
        assert launcher.run is None
        await gang.begin(0, version=2)
        assert launcher.run is not None and launcher.run.world_size == 2
        with pytest.raises(RefusedError) as refused:
            await gang.operator.round(0, first)
        assert refused.value.code == Refusal.NOT_NEWER


async def test_bad_copies_are_quarantined_and_the_next_source_is_asked(gangs: Gangs) -> None:
    """Rank 0's shard has copies on workers 1 and 2, and worker 1's copy has a flipped bit.

    The new worker 0 gets the shard from worker 2, and worker 1 quarantines its own copy.
    """
    async with gangs(3) as gang:
        gang.copies = ((0, 1), (0, 2), (1, 2), (2, 1))
        await gang.start()
        saved = await gang.commit(7, Level.REPLICATED)
        point = await gang.point(7)
        flip_a_bit(gang.sidecars[1].node, rank=0)
        gang.lose(0)
        for worker in (1, 2):
            await gang.operator.seal(worker, 1)
        await gang.launch(0, birth_round=1)
        gang.copies = ((0, 1), (1, 2), (2, 1))
        await gang.begin(1, restore=point)
        assert await gang.restored() == saved
        _, _, filled = await gang.ranks[0].restore()
        assert filled.tier in (TierName.PEER, TierName.MEMORY)
        quarantine = (
            gang.sidecars[1].node / "quarantine"
        )  # which the sidecar makes when it needs it
        await until(lambda: files_below(quarantine, "*.shard"), "worker 1 quarantines its copy")


async def test_a_failed_restore_names_every_place_that_was_tried(gangs: Gangs) -> None:
    """Every copy of rank 1's shard is lost and there is no store. The gang waits and reports the reason."""
    async with gangs(2) as gang:
        gang.copies = ()
        await gang.start()
        await gang.commit(4, Level.LOCAL)
        point = await gang.point(4, local=True)
        gang.lose(1)
        await gang.operator.seal(0, 1)
        await gang.launch(1, birth_round=1)
        message = gang.operator.message(1, restore=point)
        await gang.operator.round_all(message)
        launcher = await gang.launcher(1)
        state = await gang.operator.state_until(
            0, lambda s: bool(s.cannot_restore), "cannot restore"
        )
        assert "worker 1: " in state.cannot_restore
        assert "not in the node tier" in state.cannot_restore
        assert "worker 0" in state.cannot_restore
        assert launcher.run is None
