"""A10: bytes that the worst rank reads for each byte that it needs, for changes of the number of ranks.

Counted from the plans that restores follow; nothing is timed. A model of 1.2e9 parameters in fp32 with
Adam's two tensors each: its layers are alike, so four stand for all.
"""

from __future__ import annotations

from holdfast_core.format.layout import merge_layouts
from holdfast_core.format.record import CHUNK_BYTES
from holdfast_core.reshard.plan import plan
from holdfast_core.reshard.reads import bytes_read
from holdfast_core.testing.placements import Placement, Tensor, layout_of

_LAYERS = 4
_WIDTH, _INNER, _WORDS = 2048, 8192, 128256

CASES: dict[str, tuple[list[int], Placement | None, list[int], Placement | None]] = {
    "rows 8 to 6": ([8], [0], [6], [0]),
    "rows 6 to 8": ([6], [0], [8], [0]),
    "1 to rows 4": ([1], None, [4], [0]),
    "rows 4 to 1": ([4], [0], [1], None),
    "columns 4 to 2": ([4], [1], [2], [1]),
    "mesh 2x2 (copies, rows) to rows 4": ([2, 2], [None, 0], [4], [0]),
}


def ratios() -> dict[str, float]:
    """Case -> bytes read / bytes needed, of the rank for which it is worst."""
    return {name: _worst(*case) for name, case in CASES.items()}


def _worst(
    old: list[int], before: Placement | None, new: list[int], after: Placement | None
) -> float:
    old_ranks, new_ranks = _size(old), _size(new)
    source = merge_layouts(
        layout_of(_transformer(before), old, rank).to_bytes() for rank in range(old_ranks)
    )
    sizes = [part.payload_bytes for part in source.ranks]
    worst = 0.0
    for rank in range(new_ranks):
        moves = plan(layout_of(_transformer(after), new, rank), source)
        needed = sum(move.total_bytes for move in moves)
        worst = max(worst, bytes_read(moves, sizes, CHUNK_BYTES) / needed)
    return worst


def _size(mesh: list[int]) -> int:
    count = 1
    for length in mesh:
        count *= length
    return count


def _transformer(placement: Placement | None) -> dict[str, Tensor]:
    shapes = {"up": (_INNER, _WIDTH), "gate": (_INNER, _WIDTH), "down": (_WIDTH, _INNER)}
    shapes |= {name: (_WIDTH, _WIDTH) for name in "qkvo"}
    tensors: dict[str, Tensor] = {}
    for part in ("model", "exp_avg", "exp_avg_sq"):
        tensors[f"{part}.words"] = Tensor("F32", (_WORDS, _WIDTH), placement)
        for layer in range(_LAYERS):
            tensors[f"{part}.{layer}.norm"] = Tensor("F32", (_WIDTH, 1), None)
            for name, shape in shapes.items():
                tensors[f"{part}.{layer}.{name}"] = Tensor("F32", shape, placement)
    return tensors
