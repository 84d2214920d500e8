"""Boxes of a tensor: their intersection, their difference, and the runs of elements of a part. Pure.

Elements are in row-major order. A part of a box is therefore one run of consecutive elements for every
index of the dimensions before the last one that is cut.
"""

from __future__ import annotations

import math
from typing import NamedTuple


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
