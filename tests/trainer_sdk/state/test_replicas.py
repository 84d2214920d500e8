"""Data-parallel ranks have the model at the same offsets of their payloads, so the store keeps it once."""

from __future__ import annotations

import numpy as np
import torch
from tests.support.shards.packs import plan_ranks, trailer_of
from tests.support.shards.placements import shards_of
from tests.support.trainer.snapshots import take_snapshot

import holdfast
from holdfast.slots.staging import Copier
from holdfast.state.snapshot import PayloadTarget, SavePlan, plan_save
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import Rank
from holdfast_core.shards.pack import replica_group

CHUNK = 4096
RANKS = 12
"""A world size at which the names of the ranks differ in length."""


def saved(rank: int) -> tuple[SavePlan, bytes]:
    """Return the plan and the payload of a rank. All have the same model; generators, and the length of
    the non-tensor part, differ."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(200)).sum().backward()
    optimizer.step()
    torch.manual_seed(rank)
    state = {
        "model": model,
        "optimizer": optimizer,
        "rng": holdfast.RNG(),
        "data": {"file": "x" * 1000 * rank},
    }
    snapshot = take_snapshot(state, Rank(rank))
    plan = plan_save(snapshot, Rank(rank))
    target = np.zeros(plan.payload_bytes, dtype=np.uint8)
    PayloadTarget(plan, target).write(snapshot, Copier().run)
    return plan, target.tobytes()


def test_replicas_of_a_real_state_share_their_model() -> None:
    plans, payloads = zip(*(saved(rank) for rank in range(RANKS)), strict=True)
    shards = shards_of([parse_rank_layout(plan.layout) for plan in plans])
    assert replica_group(shards, Rank(0)) == tuple(range(RANKS))
    step = plan_ranks(
        [
            trailer_of(data, step=1, rank=rank, chunk_bytes=CHUNK)
            for rank, data in enumerate(payloads)
        ]
    )
    whole = sum(len(data) for data in payloads)
    stored = sum(pack.stored_bytes for pack in step.packs if pack is not None)
    assert None not in step.packs
    assert stored < whole / RANKS + RANKS * 30_000
