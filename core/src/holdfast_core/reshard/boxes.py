"""Boxes of a tensor: intersection, difference, runs of elements of a part, and the saved boxes. Pure.

Elements are in row-major order. A part of a box is therefore one run of consecutive elements for every
index of the dimensions before the last one that is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast_core.errors import FormatError
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.format.rank_layout import RankLayout, owner_of
from holdfast_core.ids import Rank


class Box(NamedTuple):
    """In each dimension, `lengths` elements from `offsets` on. Without dimensions, one element."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.lengths)


class StridedRun(NamedTuple):
    """`times` runs of `length` elements that are consecutive in both boxes, at equal distances.

    `source` and `target` are the positions of the first run, and the steps are the distances between
    runs, in elements from the first element of each box.
    """

    source: int
    target: int
    length: int
    times: int = 1
    source_step: int = 0
    target_step: int = 0


def intersect(one: Box, other: Box) -> Box | None:
    """Return the box of the common elements, or None if there are none."""
    offsets, lengths = [], []
    for a, n, b, m in zip(one.offsets, one.lengths, other.offsets, other.lengths, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        offsets.append(start)
        lengths.append(stop - start)
    return Box(tuple(offsets), tuple(lengths))


def subtract(whole: Box, part: Box) -> list[Box]:
    """Return disjoint boxes that cover `whole` without `part`. `part` lies within `whole`."""
    left: list[Box] = []
    offsets, lengths = list(whole.offsets), list(whole.lengths)
    for axis, (start, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
        stop, end = start + length, offsets[axis] + lengths[axis]
        for low, high in ((offsets[axis], start), (stop, end)):
            if low < high:
                left.append(
                    Box(
                        (*offsets[:axis], low, *offsets[axis + 1 :]),
                        (*lengths[:axis], high - low, *lengths[axis + 1 :]),
                    )
                )
        offsets[axis], lengths[axis] = start, length
    return left


def runs(part: Box, source: Box, target: Box) -> list[StridedRun]:
    """Return the runs of the elements of `part`, which lies within both boxes, in row-major order."""
    cut = len(part.lengths)
    while cut and part.lengths[cut - 1] == source.lengths[cut - 1] == target.lengths[cut - 1]:
        cut -= 1
    # The dimensions after `cut - 1` are whole in both boxes, so a run covers dimension `cut - 1`.
    outer = max(0, cut - 1)
    length = math.prod(part.lengths[outer:])
    starts = [(_position(part, source), _position(part, target))]
    for axis in range(outer - 1):
        from_step, to_step = (
            math.prod(source.lengths[axis + 1 :]),
            math.prod(target.lengths[axis + 1 :]),
        )
        starts = [
            (a + i * from_step, b + i * to_step)
            for a, b in starts
            for i in range(part.lengths[axis])
        ]
    if outer == 0 or part.lengths[outer - 1] == 1:
        return [StridedRun(a, b, length) for a, b in starts]
    count = part.lengths[outer - 1]
    from_step, to_step = math.prod(source.lengths[outer:]), math.prod(target.lengths[outer:])
    return [StridedRun(a, b, length, count, from_step, to_step) for a, b in starts]


def _position(part: Box, within: Box) -> int:
    """Return the position of the first element of `part` in `within`, in elements."""
    position = 0
    for start, offset, length in zip(part.offsets, within.offsets, within.lengths, strict=True):
        position = position * length + start - offset
    return position


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the gang."""

    dtype: str
    shape: tuple[int, ...]
    is_cut: bool
    """Whether a rank holds only a part of it."""
    holders: int
    """Number of ranks that have the tensor, or an empty part of it."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The tensors of a checkpoint, and the layout of the home, whose objects the new rank takes."""

    world_size: int
    tensors: Mapping[str, SavedTensor]
    """Tensors of the gang by name. Tensors that belong to one rank only are in `home`."""
    home: RankLayout


def holders_of(shards: Sequence[ManifestShard]) -> dict[Rank, list[Rank]]:
    """Return the ranks that have tensors of the same names, by the lowest of them.

    The layout of one rank of each group shows which tensors the checkpoint has.
    """
    groups: dict[Rank, list[Rank]] = {}
    for shard in shards:
        groups.setdefault(shard.same_tensors, []).append(shard.rank)
    return groups


def saved_state(
    home: RankLayout, groups: Iterable[tuple[RankLayout, int]], world_size: int
) -> SavedState:
    """Return what a checkpoint holds.

    Args:
        home: Layout of the home of the new rank.
        groups: For each group of ranks with the same tensors one layout, and the number of ranks.
        world_size: Number of ranks that saved the checkpoint.

    Raises:
        FormatError: Ranks have different dtypes or shapes of a tensor.
    """
    tensors: dict[str, SavedTensor] = {}
    for layout, holders in groups:
        for fqn, item in layout.tensors.items():
            if owner_of(fqn) is not None:
                continue
            is_cut, before = item.lengths != item.shape, tensors.get(fqn)
            if before is not None:
                if (before.dtype, before.shape) != (item.dtype, item.shape):
                    raise FormatError(
                        f"layout: tensor {fqn!r} is {item.dtype} {list(item.shape)} on rank "
                        f"{layout.rank}, but {before.dtype} {list(before.shape)} on another rank"
                    )
                is_cut, holders_before = is_cut or before.is_cut, before.holders
            else:
                holders_before = 0
            tensors[fqn] = SavedTensor(item.dtype, item.shape, is_cut, holders_before + holders)
    return SavedState(world_size, tensors, home)
