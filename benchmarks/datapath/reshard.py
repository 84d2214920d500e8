"""A10: bytes that the worst rank reads for each byte that it needs, for changes of the number of ranks.

The bytes are counted from the plans that restores follow; nothing is timed. The model has 1.2e9 parameters
in fp32 with Adam's two tensors each. Its layers are identical, so four of them represent all.
"""

from __future__ import annotations

import math

from tests.support.shards.placements import (
    Placement,
    bytes_read,
    layout_of,
    plan,
    shards_of,
    transformer,
)

from holdfast_core.shards.file import CHUNK_BYTES

_LAYERS = 4

CASES: dict[str, tuple[list[int], Placement | None, list[int], Placement | None]] = {
    "rows 8 to 6": ([8], [0], [6], [0]),
    "rows 6 to 8": ([6], [0], [8], [0]),
    "1 to rows 4": ([1], None, [4], [0]),
    "rows 4 to 1": ([4], [0], [1], None),
    "columns 4 to 2": ([4], [1], [2], [1]),
    "mesh 2x2 (copies, rows) to rows 4": ([2, 2], [None, 0], [4], [0]),
}


def ratios() -> dict[str, float]:
    """Return for each case the largest ratio of bytes read to bytes needed over all ranks."""
    return {name: _worst(*case) for name, case in CASES.items()}


def _worst(
    old: list[int], before: Placement | None, new: list[int], after: Placement | None
) -> float:
    old_ranks, new_ranks = math.prod(old), math.prod(new)
    saved = [layout_of(transformer(_LAYERS, before), old, rank) for rank in range(old_ranks)]
    shards, sizes = shards_of(saved), [layout.payload_bytes for layout in saved]
    worst = 0.0
    for rank in range(new_ranks):
        wanted = layout_of(transformer(_LAYERS, after), new, rank)
        moves = plan(wanted, new_ranks, shards, saved.__getitem__)
        needed = sum(move.total_bytes for move in moves)
        worst = max(worst, bytes_read(moves, sizes, CHUNK_BYTES) / needed)
    return worst
