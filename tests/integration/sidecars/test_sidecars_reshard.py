"""Real sidecars restore a checkpoint on another number of ranks: from peers, and from a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.state.snapshot import plan_save, take_snapshot, write_payload
from holdfast_core.contract import PodContract, StoreConfig
from holdfast_core.errors import RefusedError
from holdfast_core.format.layout import parse_layout
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.format.slot import SlotState
from holdfast_core.ids import Level, Rank, TierName
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.testing.placements import Tensor, layout_of, objects_of
from holdfast_core.transfer.messages import Policy
from holdfast_sidecar.testing import SidecarProcess

pytestmark = pytest.mark.integration

Gangs = Callable[..., Any]
ROWS = 1 << 14
WHOLE = np.random.default_rng(3).integers(0, 256, (ROWS, 16), dtype=np.uint8)


def tensors(*placement: int | None) -> dict[str, Tensor]:
    return {"w": Tensor("F32", (ROWS, 4), placement)}


def payload_of(layout: RankLayout, saved_by: int) -> bytes:
    item = layout.tensors["w"]
    rows = WHOLE[item.offsets[0] : item.offsets[0] + item.lengths[0]].tobytes()
    return payload_plan(layout).header + rows + objects_of(saved_by)


async def save(gang: Any, layouts: list[RankLayout], step: int, level: Level) -> None:
    for layout in layouts:
        rank = gang.ranks[layout.rank]
        await rank.save(step, payload_of(layout, layout.rank), layout.to_bytes())
        rank.progress(step)
    for rank in gang.ranks.values():
        await rank.reached(step, level)


def test_four_ranks_become_two_with_what_is_on_two_nodes(gangs: Gangs) -> None:
    """Two copies of two halves on four nodes, of which two are lost with the shard of rank 2."""
    policy = Policy(interval_steps=1, peer_copies=1)

    async def scenario() -> None:
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
                with pytest.raises(RefusedError, match="expected one where another number"):
                    await rank.restore()

    asyncio.run(scenario())


def test_two_ranks_become_four_from_the_store(gangs: Gangs, tmp_path: Path) -> None:
    """Then the four save, and restore as four."""
    policy = Policy(interval_steps=1, peer_copies=1, object_every_steps=1)
    store = StoreConfig(f"file://{tmp_path}/objects", False, "", "", "")

    async def scenario() -> None:
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
            # Rank 1 finds the first half at worker 0 by now, and objects in the store alone.
            near, far = TierName.PEER, TierName.OBJECT
            for wanted, tier in zip(new, (far, far, near, near), strict=True):
                reply, data, filled = await gang.ranks[wanted.rank].reshard(wanted)
                given = gang.sidecars[wanted.rank].shared / "layouts"
                document = (given / f"{reply.layout.removeprefix('b3:')}.json").read_bytes()
                assert len(parse_layout(document).ranks) == 2
                assert data == payload_of(wanted, wanted.rank % 2)
                assert filled.tier is tier
            await save(gang, new, 2, Level.REPLICATED)
            point = await gang.point(2)
            for worker in range(4):
                await gang.operator.seal(worker, 2)
            await gang.begin(2, restore=point, policy=policy)
            for wanted in new:
                _, data, filled = await gang.ranks[wanted.rank].restore()
                assert data == payload_of(wanted, wanted.rank)
                assert filled.tier is TierName.MEMORY

    asyncio.run(scenario())


def test_a_training_process_restores_what_two_ranks_saved(
    gangs: Gangs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK and a real sidecar: tensors of both, objects of the old rank 0."""
    policy = Policy(interval_steps=1, peer_copies=1, object_every_steps=1)
    store = StoreConfig(f"file://{tmp_path}/objects", False, "", "", "")

    def restored(sidecar: SidecarProcess) -> tuple[int | None, dict[str, Any]]:
        of = sidecar.contract
        contract = PodContract(
            of.job_uid, of.job, of.namespace, of.worker, of.birth_round, 1, of.shared_dir, slots=1
        )
        for name, value in {**contract.to_env(), "HOLDFAST_ROUND": "1"}.items():
            monkeypatch.setenv(name, value)
        state: dict[str, Any] = {"t": np.zeros((64, 3)), "position": -1}
        with holdfast.Checkpointer() as ckpt:
            return ckpt.restore(state), state

    async def scenario() -> None:
        async with gangs(2, store=store) as gang:
            await gang.start(policy=policy)
            tensor = np.random.default_rng(5).random((64, 3))
            for rank in range(2):
                snapshot = take_snapshot({"t": tensor, "position": 10 + rank}, Rank(rank))
                planned = plan_save(snapshot, Rank(rank))
                data = np.zeros(planned.payload_bytes, dtype=np.uint8)
                write_payload(planned, snapshot, data, lambda jobs: [copy() for _, copy in jobs])
                await gang.ranks[rank].save(1, data.tobytes(), planned.layout)
            state = await gang.operator.state_until(
                0, lambda s: s.last_persisted is not None, "step 1 persisted"
            )
            for worker in (0, 1):
                gang.lose(worker)
            del gang.operator.members[1]
            gang.workers, gang.copies = 1, ()
            await gang.launch(0, birth_round=1)
            await gang.begin(1, restore=state.last_persisted, policy=policy)
            gang.ranks[0].close()
            step, found = await asyncio.to_thread(restored, gang.sidecars[0])
            assert (step, found["position"]) == (1, 10)
            assert found["t"].tobytes() == tensor.tobytes()

    asyncio.run(scenario())
