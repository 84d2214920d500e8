"""Copies to peers omit chunks that another rank also has, and chunks that have not changed (A7)."""

from __future__ import annotations

import random

import pytest
from tests.support.sidecar.gang import Gang, Gangs

from holdfast_core.ids import Level, TierName
from holdfast_core.messages.schema import Policy

pytestmark = pytest.mark.integration

MIB = 1 << 20
STATE_BYTES = 32 * MIB
WORKERS = 4


async def save(gang: Gang, step: int, states: dict[int, bytes]) -> None:
    for worker, data in states.items():
        await gang.ranks[worker].save(step, data)
        gang.ranks[worker].progress(step)
    for rank in gang.ranks.values():
        await rank.reached(step, Level.REPLICATED)


async def test_ranks_with_the_same_model_send_each_part_of_it_once(gangs: Gangs) -> None:
    """Each rank sends at most 1/N + 2 % of the state, and a lost pod is restored bit by bit."""
    async with gangs(WORKERS) as gang:
        gang.slot_bytes = STATE_BYTES + MIB
        policy = Policy(interval_steps=1, peer_copies=1)
        await gang.start(policy=policy)
        model = random.Random(5).randbytes(STATE_BYTES)
        states = {w: model + f"data of rank {w}".encode().ljust(500) for w in range(WORKERS)}
        await save(gang, 10, states)
        for worker in range(WORKERS):
            sent = await gang.sent_bytes(worker, TierName.PEER)
            assert 0 < sent <= (1 / WORKERS + 0.02) * len(states[worker])
        point = await gang.point(10)
        gang.lose(2)
        for worker in (0, 1, 3):
            await gang.operator.seal(worker, 1)
        await gang.launch(2, birth_round=1)
        await gang.begin(1, restore=point, policy=policy)
        for worker, source in ((2, TierName.PEER), (3, TierName.MEMORY)):
            _, data, filled = await gang.ranks[worker].restore()
            assert data == states[worker]
            assert filled.tier is source


async def test_a_frozen_base_is_sent_to_peers_once(gangs: Gangs) -> None:
    """From the second save on, each rank sends at most the trainable share and 1 %."""
    async with gangs(2) as gang:
        gang.slot_bytes = STATE_BYTES + MIB
        await gang.start(policy=Policy(interval_steps=1, peer_copies=1))
        bases = [random.Random(w).randbytes(STATE_BYTES * 9 // 10) for w in range(2)]

        def states(step: int) -> dict[int, bytes]:
            share = STATE_BYTES // 10
            trained = [random.Random(2 * step + w).randbytes(share) for w in range(2)]
            return {w: trained[w] + base for w, base in enumerate(bases)}

        before = [0, 0]
        for step, share in ((10, 1.01), (20, 0.11), (30, 0.11)):
            await save(gang, step, states(step))
            for worker in range(2):
                total = await gang.sent_bytes(worker, TierName.PEER)
                assert 0 < total - before[worker] <= share * STATE_BYTES
                before[worker] = total
