"""Real sidecars restore a checkpoint on another number of ranks: from peers, and from a store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.shards.builders import weights
from tests.support.shards.placements import Tensor, layout_of, objects_of, planned
from tests.support.sidecar import SidecarProcess
from tests.support.sidecar.gang import Gangs
from tests.support.trainer.snapshots import take_snapshot
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.state.snapshot import PayloadTarget, plan_save
from holdfast_core.contract import PodContract, StoreConfig
from holdfast_core.errors import RefusedError
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import Level, Rank, TierName
from holdfast_core.messages.schema import Policy
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.shm.slot_file import SlotState

pytestmark = pytest.mark.integration

ROWS = 1 << 14
WHOLE = np.random.default_rng(3).integers(0, 256, (ROWS, 16), dtype=np.uint8)

LARGE = {"w": Tensor("F32", (24 << 16, 4), [0])}
"""24 MiB: in a smaller tensor the ends of each part would be more than a tenth of it."""
LARGE_BYTES = weights(24 << 20, seed=4)


def tensors(*placement: int | None) -> dict[str, Tensor]:
    return {"w": Tensor("F32", (ROWS, 4), placement)}


def payload_of(layout: RankLayout, saved_by: int) -> bytes:
    item = layout.tensors["w"]
    rows = WHOLE[item.offsets[0] : item.offsets[0] + item.lengths[0]].tobytes()
    return payload_plan(layout).header + rows + objects_of(saved_by)


def large(layout: RankLayout, saved_by: int) -> bytes:
    """Return the payload of LARGE, as `payload_of` does for the small tensor."""
    item = layout.tensors["w"]
    start = item.offsets[0] * 16
    rows = LARGE_BYTES[start : start + item.byte_range.length_bytes]
    return payload_plan(layout).header + rows + objects_of(saved_by)


async def save(
    gang: Any,
    layouts: list[RankLayout],
    step: int,
    level: Level,
    payload: Callable[[RankLayout, int], bytes] = payload_of,
) -> None:
    for layout in layouts:
        rank = gang.ranks[layout.rank]
        await rank.save(step, payload(layout, layout.rank), layout.to_bytes())
        rank.progress(step)
    for rank in gang.ranks.values():
        await rank.reached(step, level)


async def test_four_ranks_become_two_with_what_is_on_two_nodes(gangs: Gangs) -> None:
    """Two copies of two halves are saved on four nodes.

    Two nodes are lost, and with them the shard of rank 2.
    """
    policy = Policy(interval_steps=1, peer_copies=1)
    async with gangs(4) as gang:
        await gang.start(policy=policy)
        old = [layout_of(tensors(None, 0), [2, 2], rank) for rank in range(4)]
        await save(gang, old, 1, Level.REPLICATED)
        point = await gang.point(1)
        for worker in (2, 3):
            gang.lose(worker)
            del gang.operator.members[worker]
        gang.workers, gang.copies = 2, ((0, 1), (1, 0))
        for worker in (0, 1):
            await gang.operator.seal(worker, 1)
        await gang.begin(1, restore=point, policy=policy)
        for worker, tier in ((0, TierName.PEER), (1, TierName.NODE)):
            rank = gang.ranks[worker]
            wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], worker)
            reply, data, filled = await rank.reshard(wanted)
            assert (reply.world_size, reply.payload_bytes) == (4, 0)
            assert data == payload_of(wanted, worker)
            assert filled.tier is tier
            header = rank.header(filled.slot)
            assert (header.state, header.step) == (SlotState.FREE, None)
            with pytest.raises(RefusedError, match="expected one, because another number"):
                await rank.restore()


async def save_and_restore_in_memory(gang: Any, layouts: list[RankLayout], policy: Policy) -> None:
    """Save step 2 with these layouts in round 1, and restore it from memory in round 2."""
    await save(gang, layouts, 2, Level.REPLICATED)
    point = await gang.point(2)
    for worker in range(len(layouts)):
        await gang.operator.seal(worker, 2)
    await gang.begin(2, restore=point, policy=policy)
    for layout in layouts:
        _, data, filled = await gang.ranks[layout.rank].restore()
        assert (data, filled.tier) == (payload_of(layout, layout.rank), TierName.MEMORY)


async def test_two_ranks_become_four_from_the_store(gangs: Gangs, tmp_path: Path) -> None:
    """The four ranks then save, and restore as four."""
    policy = Policy(interval_steps=1, peer_copies=1, object_every_steps=1)
    store = StoreConfig(f"file://{tmp_path}/objects", False, "", "", "")
    async with gangs(2, store=store) as gang:
        await gang.start(policy=policy)
        old = [layout_of(tensors(0), [2], rank) for rank in range(2)]
        await save(gang, old, 1, Level.PERSISTED)
        state = await gang.operator.state_until(
            0, lambda s: s.last_persisted is not None, "step 1 persisted"
        )
        for worker in (0, 1):
            gang.lose(worker)
        gang.workers, gang.copies = 4, tuple((w, (w + 1) % 4) for w in range(4))
        for worker in range(4):
            await gang.launch(worker, birth_round=1)
        await gang.begin(1, restore=state.last_persisted, policy=policy)
        new = [layout_of(tensors(0), [4], rank) for rank in range(4)]
        for wanted in new:
            reply, data, filled = await gang.ranks[wanted.rank].reshard(wanted)
            given = gang.sidecars[wanted.rank].shared / "layouts"
            home = (given / f"{reply.home.removeprefix('b3:')}.json").read_bytes()
            assert parse_rank_layout(home) == old[wanted.rank % 2]
            assert [*reply.layouts.values()] == [2]
            assert data == payload_of(wanted, wanted.rank % 2)
            assert filled.tier is TierName.OBJECT
        await save_and_restore_in_memory(gang, new, policy)


@pytest.mark.parametrize(
    ("sizes", "tier", "compression"),
    [
        pytest.param((8, 6, 8), TierName.PEER, "None", id="8-6-8-peer"),
        pytest.param((2, 4, 2), TierName.PEER, "None", id="2-4-2-peer"),
        pytest.param((8, 6, 8), TierName.OBJECT, "None", id="8-6-8-object"),
        pytest.param((2, 4, 2), TierName.OBJECT, "None", id="2-4-2-object"),
        pytest.param((2, 4, 2), TierName.OBJECT, "Zstd", id="2-4-2-object-compressed"),
    ],
)
async def test_a_restore_reads_little_more_than_it_needs(
    gangs: Gangs, store: dict[str, Any], sizes: tuple[int, ...], tier: TierName, compression: str
) -> None:
    """Every rank reads at most 1.1 bytes for every byte needed, chunk tables included.

    It reads from other nodes, or from the store where every node is lost.
    """
    from_store = tier is TierName.OBJECT
    policy = Policy(
        interval_steps=1,
        peer_copies=1,
        object_every_steps=1 if from_store else None,
        object_compression=compression,
    )
    async with gangs(sizes[0], **(store if from_store else {})) as gang:
        gang.slot_bytes = 16 << 20
        gang.copies = across(sizes[0])
        await gang.start(policy=policy)
        old = [layout_of(LARGE, [sizes[0]], rank) for rank in range(sizes[0])]
        await save(gang, old, 1, Level.PERSISTED if from_store else Level.REPLICATED, large)
        for round_, count in enumerate(sizes[1:], 1):
            point = await newest(gang, round_, from_store)
            await become(gang, count, round_, everything_lost=from_store)
            await gang.begin(round_, restore=point, policy=policy)
            new = [layout_of(LARGE, [count], rank) for rank in range(count)]
            for wanted in new:
                before = await counted(gang, wanted.rank)
                _, data, _ = await gang.ranks[wanted.rank].reshard(wanted)
                assert data == large(wanted, wanted.rank % len(old))
                read = await counted(gang, wanted.rank) - before
                moves = planned(wanted, old, count)
                needed = sum(move.total_bytes for move in moves)
                assert needed <= read.total() <= 1.1 * needed
                assert set(read) <= ({tier} if from_store else {TierName.NODE, tier})
            old = new
            level = Level.PERSISTED if from_store else Level.REPLICATED
            await save(gang, new, round_ + 1, level, large)


def across(workers: int) -> tuple[tuple[int, int], ...]:
    """Place the copies of the upper half of the workers on the lower half, and vice versa."""
    return tuple((w, (w + workers // 2) % workers) for w in range(workers))


async def newest(gang: Any, step: int, persisted: bool) -> Any:
    """Return the restore point of this step."""
    if not persisted:
        return await gang.point(step)
    state = await gang.operator.state_until(
        0,
        lambda s: s.last_persisted is not None and s.last_persisted.step == step,
        f"step {step} persisted",
    )
    return state.last_persisted


async def become(gang: Any, workers: int, round_: int, *, everything_lost: bool) -> None:
    """Lose the pods from number `workers` on, or all, and start the missing ones."""
    for worker in sorted(gang.sidecars):
        if worker in gang.ranks and (everything_lost or worker >= workers):
            gang.lose(worker)
            gang.operator.members.pop(worker)
    gang.workers, gang.copies = workers, across(workers)
    for worker in range(workers):
        if worker in gang.ranks:
            await gang.operator.seal(worker, round_)
        else:
            await gang.launch(worker, birth_round=round_)


async def counted(gang: Any, worker: int) -> Counter[str]:
    found = await asyncio.to_thread(gang.counted, worker, "holdfast_fetched_bytes_total")
    return Counter(found)


async def test_ranks_that_are_cut_otherwise_than_when_they_saved(gangs: Gangs) -> None:
    """Four ranks save two copies of two halves, and restore quarters.

    The sidecar gives each rank its old layout, also in a new pod, and assembles the quarter from the saved
    shards.
    """
    policy = Policy(interval_steps=1, peer_copies=1)
    async with gangs(4) as gang:
        await gang.start(policy=policy)
        old = [layout_of(tensors(None, 0), [2, 2], rank) for rank in range(4)]
        await save(gang, old, 1, Level.REPLICATED)
        point = await gang.point(1)
        gang.lose(3)
        await gang.launch(3, birth_round=1)
        for worker in range(3):
            await gang.operator.seal(worker, 1)
        await gang.begin(1, restore=point, policy=policy)
        new = [layout_of(tensors(0), [4], rank) for rank in range(4)]
        for wanted in new:
            rank = gang.ranks[wanted.rank]
            reply, data, filled = await rank.reshard(wanted)
            assert reply.world_size == 4
            assert reply.payload_bytes == old[wanted.rank].payload_bytes
            given = gang.sidecars[wanted.rank].shared / "layouts"
            own = (given / f"{reply.rank_layout.removeprefix('b3:')}.json").read_bytes()
            assert parse_rank_layout(own) == old[wanted.rank]
            assert data == payload_of(wanted, wanted.rank)
            header = rank.header(filled.slot)
            assert (header.state, header.step) == (SlotState.FREE, None)
        await save_and_restore_in_memory(gang, new, policy)


async def test_a_training_process_restores_what_two_ranks_saved(
    gangs: Gangs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK shows and restores the tensors of two ranks and the objects of rank 0 from a real sidecar."""
    policy = Policy(interval_steps=1, peer_copies=1, object_every_steps=1)
    store = StoreConfig(f"file://{tmp_path}/objects", False, "", "", "")
    async with gangs(2, store=store) as gang:
        await gang.start(policy=policy)
        tensor = np.random.default_rng(5).random((64, 3))
        for rank in range(2):
            await save_state(gang, rank, {"t": tensor, "position": 10 + rank})
        point = await newest(gang, 1, persisted=True)
        for worker in (0, 1):
            gang.lose(worker)
        del gang.operator.members[1]
        gang.workers, gang.copies = 1, ()
        await gang.launch(0, birth_round=1)
        await gang.begin(1, restore=point, policy=policy)
        gang.ranks[0].close()
        state: dict[str, Any] = {"t": np.zeros((64, 3)), "position": -1}
        pretend(monkeypatch, gang.sidecars[0], world_size=1)
        info = holdfast.TensorInfo("float64", (64, 3))
        assert await asyncio.to_thread(looked_at) == holdfast.RestorePoint(
            1, {"t": info}, {"t": info, "position": 10}
        )
        assert await asyncio.to_thread(restored, state) == 1
        assert state["position"] == 10
        assert state["t"].tobytes() == tensor.tobytes()


def test_a_training_process_notices_that_it_is_cut_otherwise(
    gangs: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of ranks is unchanged. Each saved a full copy, and now holds half of the rows."""
    policy = Policy(interval_steps=1, peer_copies=1)

    async def scenario() -> None:
        async with gangs(2) as gang:
            await gang.start(policy=policy)
            tensor = np.random.default_rng(6).random((64, 3))
            for rank in range(2):
                await save_state(gang, rank, {"t": torch.from_numpy(tensor), "position": 10 + rank})
            point = await gang.point(1)
            for worker in (0, 1):
                await gang.operator.seal(worker, 1)
            await gang.begin(1, restore=point, policy=policy)
            gang.ranks[1].close()
            mesh = DeviceMesh("cpu", torch.arange(2))
            half = torch.zeros((32, 3), dtype=torch.float64)
            cut = DTensor.from_local(half, mesh, [Shard(0)], run_check=False)
            state: dict[str, Any] = {"t": cut, "position": -1}
            pretend(monkeypatch, gang.sidecars[1], world_size=2)
            assert await asyncio.to_thread(restored, state) == 1
            assert state["position"] == 11
            assert state["t"].to_local().numpy().tobytes() == tensor[32:].tobytes()

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        asyncio.run(scenario())
    finally:
        dist.destroy_process_group()


async def save_state(gang: Any, rank: int, state: dict[str, Any]) -> None:
    """Save step 1 as the SDK does."""
    snapshot = take_snapshot(state, Rank(rank))
    planned = plan_save(snapshot, Rank(rank))
    data = np.zeros(planned.payload_bytes, dtype=np.uint8)
    PayloadTarget(planned, data).write(snapshot, lambda jobs: [copy() for _, copy in jobs])
    await gang.ranks[rank].save(1, data.tobytes(), planned.layout)


def pretend(monkeypatch: pytest.MonkeyPatch, sidecar: SidecarProcess, *, world_size: int) -> None:
    """Set the environment of this process to that of the pod's rank in round 1."""
    of = sidecar.contract
    contract = PodContract(
        of.job_uid, of.job, of.namespace, of.worker, of.birth_round, 1, of.shared_dir, slots=1
    )
    env = {"HOLDFAST_ROUND": "1", "RANK": str(of.worker), "WORLD_SIZE": str(world_size)}
    for name, value in {**contract.to_env(), **env}.items():
        monkeypatch.setenv(name, value)


def looked_at() -> holdfast.RestorePoint | None:
    with holdfast.Checkpointer() as ckpt:
        return ckpt.peek()


def restored(state: dict[str, Any]) -> int | None:
    with holdfast.Checkpointer() as ckpt:
        return ckpt.restore(state)
