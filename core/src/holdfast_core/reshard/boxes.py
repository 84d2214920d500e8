"""Boxes of a tensor: what two have in common, what one leaves of another, and as which bytes.

A tensor's bytes are in row-major order, so a part of a box is one run of bytes for every index of
the dimensions before the first one that is cut.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Box(NamedTuple):
    """In each dimension `lengths` elements from `offsets`. No dimensions: one element."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.lengths)


class Run(NamedTuple):
    """Elements that lie next to each other in both boxes, as often as `times` says, at equal distances.

    Positions and steps count elements, from each box's first."""

    source: int
    target: int
    length: int
    times: int = 1
    source_step: int = 0
    target_step: int = 0


def intersect(one: Box, other: Box) -> Box | None:
    """None where they have no element in common."""
    offsets, lengths = [], []
    for a, n, b, m in zip(one.offsets, one.lengths, other.offsets, other.lengths, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        offsets.append(start)
        lengths.append(stop - start)
    return Box(tuple(offsets), tuple(lengths))


def subtract(whole: Box, part: Box) -> list[Box]:
    """What is left of `whole` without `part`, which lies within it: boxes without an overlap."""
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


def runs(part: Box, source: Box, target: Box) -> list[Run]:
    """The elements of `part`, which lies within both, in order of its rows."""
    cut = len(part.lengths)
    while cut and part.lengths[cut - 1] == source.lengths[cut - 1] == target.lengths[cut - 1]:
        cut -= 1
    # Everything behind `cut - 1` is whole in both, so a run goes on over that dimension.
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
        return [Run(a, b, length) for a, b in starts]
    count = part.lengths[outer - 1]
    from_step, to_step = math.prod(source.lengths[outer:]), math.prod(target.lengths[outer:])
    return [Run(a, b, length, count, from_step, to_step) for a, b in starts]


def _position(part: Box, within: Box) -> int:
    """Of the first element of `part`, counted from the first of `within`."""
    position = 0
    for start, offset, length in zip(part.offsets, within.offsets, within.lengths, strict=True):
        position = position * length + start - offset
    return position
