"""A7 towards the store: bytes that the worst rank uploads for each byte of its state.

The bytes are counted from the plans that uploads follow, including indexes. Nothing is timed and no store
is needed.
"""

from __future__ import annotations

import random

from tests.support.shards.packs import Saved, plan_ranks, trailer_of

from holdfast_core.shards.file import CHUNK_BYTES
from holdfast_core.shards.pack import BLOCK_CHUNKS

STATE_BYTES = 32 << 20
RANKS = 4
TRAINED = 0.1


SHARED = ("data-parallel ranks, first save",)
FROZEN = ("one rank, frozen base, second save", "one rank, frozen base, sixth save")
BOTH = ("data-parallel ranks, frozen base, second save",)

SHARED_TARGET = 1 / RANKS + 0.02
FROZEN_TARGET = TRAINED + 0.01
BOTH_TARGET = TRAINED / RANKS + BLOCK_CHUNKS * CHUNK_BYTES / STATE_BYTES + 0.02
"""Allowance beyond the design's target: ranks share whole blocks, so one rank may upload one block more."""


def ratios(state_bytes: int = STATE_BYTES) -> dict[str, float]:
    """Return for each case the upload of the worst rank, divided by the bytes of its state."""
    alone = _saves(state_bytes, ranks=1, count=6)
    together = _saves(state_bytes, ranks=RANKS, count=2)
    found = (together[0], alone[1], alone[5], together[1])
    return {
        name: max(saved.upload_bytes(rank) for rank in range(len(saved.trailers))) / state_bytes
        for name, saved in zip((*SHARED, *FROZEN, *BOTH), found, strict=True)
    }


def _saves(state_bytes: int, *, ranks: int, count: int) -> list[Saved]:
    """Return the saves of a state with a frozen base, a trained part and some bytes that differ by rank."""
    trained = int(state_bytes * TRAINED)
    frozen = random.Random(0).randbytes(state_bytes - trained - 1000)
    saves: list[Saved] = []
    for step in range(1, count + 1):
        common = random.Random(step).randbytes(trained) + frozen
        payloads = [
            common + random.Random(1000 * step + rank).randbytes(1000) for rank in range(ranks)
        ]
        trailers = [trailer_of(data, step=step, rank=rank) for rank, data in enumerate(payloads)]
        base = saves[-1] if saves else None
        saves.append(plan_ranks(trailers, base, tuple(base.needs) if base else ()))
    return saves
