"""Where the bytes of a payload belong in a state that is there: straight into its tensors.

A saved tensor goes into the memory of the tensor that has its name, type and shape now, or into new
memory where there is none yet (an optimizer before its first step) or it is not to be written: on a
device, not in one piece, shared with another tensor.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import numpy as np

from holdfast.state.snapshot import build_state
from holdfast.state.tensors import Leaf, memory_of, torch_module
from holdfast_core.errors import CorruptionError
from holdfast_core.format.payload import PayloadPlan, PayloadTensor
from holdfast_core.ids import ByteRange

Memory = np.ndarray[Any, Any]
"""uint8, one dimension."""


class Destinations:
    """Of one payload. Makes the saved state with the tensors that its bytes will be put into."""

    def __init__(self, plan: PayloadPlan, objects: bytes, leaves: Iterable[Leaf]) -> None:
        """`objects`: that part of the payload, and `plan.header` its beginning: what is put there
        later must be the same. Raises FormatError."""
        self._live = _live_memory(leaves)
        self._known = [
            (ByteRange(0, len(plan.header)), np.frombuffer(plan.header, np.uint8)),
            (plan.objects, np.frombuffer(objects, np.uint8)),
        ]
        self._places: list[tuple[ByteRange, Memory]] = []
        self.saved = build_state(plan, objects, self._memory)
        """Its tensors hold their values when all bytes were put."""
        self._places.sort(key=lambda place: place[0].start)
        self._starts = [place.start for place, _ in self._places]

    def put(self, position: int, data: memoryview) -> None:
        """`data` lies at `position` in the payload. Raises CorruptionError where it differs from what the
        state was made of."""
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
        first = max(0, bisect.bisect_right(self._starts, position) - 1)
        for place, memory in self._places[first:]:
            if place.start >= span.stop:
                return
            low, high = _overlap(place, span)
            if low < high:
                memory[low - place.start : high - place.start] = piece[
                    low - position : high - position
                ]

    def _memory(self, tensor: PayloadTensor) -> Memory:
        live = self._live.get((tensor.fqn, tensor.dtype, tensor.shape))
        memory = _new(tensor.byte_range.length_bytes) if live is None else live
        self._places.append((tensor.byte_range, memory))
        return memory


def _new(size_bytes: int) -> Memory:
    """Aligned as torch aligns its own, where it is there."""
    torch = torch_module()
    if torch is None:
        return np.empty(size_bytes, np.uint8)
    memory: Memory = torch.empty(size_bytes, dtype=torch.uint8).numpy()
    return memory


def _live_memory(leaves: Iterable[Leaf]) -> dict[tuple[str, str, tuple[int, ...]], Memory]:
    """By name, stored type and shape. What two leaves share (tied weights) is in none of them: which
    of the saved values stays there is decided by the order in which a state is loaded."""
    found = [
        (memory.ctypes.data, memory, leaf)
        for leaf in leaves
        if (memory := memory_of(leaf)) is not None
    ]
    found.sort(key=lambda item: item[0])
    shared: set[int] = set()
    stop, last = 0, -1
    for index, (start, memory, _) in enumerate(found):
        if start < stop:
            shared |= {last, index}
        if start + memory.size > stop:
            stop, last = start + memory.size, index
    return {
        (leaf.name, leaf.dtype, leaf.shape): memory
        for index, (_, memory, leaf) in enumerate(found)
        if index not in shared
    }


def _overlap(one: ByteRange, other: ByteRange) -> tuple[int, int]:
    return max(one.start, other.start), min(one.stop, other.stop)
