"""Where the bytes of a payload belong in a state that is there: straight into its tensors.

A saved tensor goes into the memory of the tensor that has its name, type and shape now, or into new
memory where there is none yet (an optimizer before its first step) or it is not to be written: not in
one piece, shared with another tensor, replaced when it is loaded.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from holdfast.state.snapshot import build_state
from holdfast.state.tensors import Leaf, extent_of, memory_of
from holdfast_core.errors import CorruptionError
from holdfast_core.format.payload import PayloadPlan, PayloadTensor
from holdfast_core.ids import ByteRange

_ALIGNMENT_BYTES = 64
_NUMBERED = re.compile(r"(.*)~\d+", re.DOTALL)

Memory = np.ndarray[Any, Any]
"""uint8, one dimension."""


class Destinations:
    """Of one payload. Makes the saved state with the tensors that its bytes will be put into."""

    def __init__(self, plan: PayloadPlan, objects: bytes, leaves: Iterable[Leaf]) -> None:
        """`objects`: that part of the payload, and `plan.header` its beginning: what is put there
        later must be the same. Raises FormatError."""
        self._live = _live_memory(leaves, _twice(tensor.fqn for tensor in plan.tensors))
        self._known = [
            (ByteRange(0, len(plan.header)), np.frombuffer(plan.header, np.uint8)),
            (plan.objects, np.frombuffer(objects, np.uint8)),
        ]
        self._places: list[tuple[ByteRange, Memory]] = []
        self.saved = build_state(plan, objects, self._memory)
        """Its tensors hold their values when all bytes were put."""
        self._places.sort(key=lambda place: place[0].start)
        self._starts = [place.start for place, _ in self._places]
        self.wanted_bytes = sum(place.length_bytes for place, _ in self._places)
        """Of the payload; as many must have been put."""

    def put(self, position: int, data: memoryview) -> int:
        """`data` lies at `position` in the payload; how many bytes of it the state has. Any thread.
        Raises CorruptionError where it differs from what the state was made of."""
        piece = np.frombuffer(data, np.uint8)
        span = ByteRange(position, position + len(piece))
        for place, known in self._known:
            low, high = _overlap(place, span)
            if low < high and not np.array_equal(
                known[low - place.start : high - place.start],
                piece[low - position : high - position],
            ):
                raise CorruptionError(
                    f"payload bytes [{low}, {high}) are not what they were a moment ago"
                )
        done = 0
        first = max(0, bisect.bisect_right(self._starts, position) - 1)
        for index in range(first, len(self._places)):
            place, memory = self._places[index]
            if place.start >= span.stop:
                break
            low, high = _overlap(place, span)
            if low < high:
                memory[low - place.start : high - place.start] = piece[
                    low - position : high - position
                ]
                done += high - low
        return done

    def _memory(self, tensor: PayloadTensor) -> Memory:
        live = self._live.get((tensor.fqn, tensor.dtype, tensor.shape))
        memory = _new(tensor.byte_range.length_bytes) if live is None else live
        if memory.size:  # else it would stand before the one that begins where it does
            self._places.append((tensor.byte_range, memory))
        return memory


def _new(size_bytes: int) -> Memory:
    """Aligned for any type, so that what is made of it is no copy."""
    memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + size_bytes]


def _live_memory(
    leaves: Iterable[Leaf], ambiguous: frozenset[str]
) -> dict[tuple[str, str, tuple[int, ...]], Memory]:
    """By name, stored type and shape. What several leaves share (tied weights) is in none of them: which
    of the saved values stays there is decided by the order in which a state is loaded."""
    known = tuple(leaves)
    ambiguous |= _twice(leaf.name for leaf in known)
    shared = _sharing(known)
    found: dict[tuple[str, str, tuple[int, ...]], Memory] = {}
    for leaf in known:
        if leaf.name not in ambiguous and leaf.name not in shared:
            memory = memory_of(leaf)
            if memory is not None:
                found[leaf.name, leaf.dtype, leaf.shape] = memory
    return found


def _sharing(leaves: Iterable[Leaf]) -> frozenset[str]:
    """Names of those whose memory another one uses, too."""
    extents = sorted(
        (*extent, leaf.name) for leaf in leaves if (extent := extent_of(leaf)) is not None
    )
    shared: set[str] = set()
    behind, last = 0, ""
    for start, stop, name in extents:
        if start < behind:
            shared |= {last, name}
        if stop > behind:
            behind, last = stop, name
    return frozenset(shared)


def _twice(names: Iterable[str]) -> frozenset[str]:
    """Names that two paths of a state have in common: `state.tree` numbers them by the order in which it
    meets them, which may be another one now."""
    numbered = [(name, match[1]) for name in names if (match := _NUMBERED.fullmatch(name))]
    return frozenset(one for pair in numbered for one in pair)


def _overlap(one: ByteRange, other: ByteRange) -> tuple[int, int]:
    return max(one.start, other.start), min(one.stop, other.stop)
