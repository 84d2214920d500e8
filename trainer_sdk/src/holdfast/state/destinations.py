"""Copies the bytes of a payload directly into the tensors of the current state.

A saved tensor goes into the memory of the current tensor with the same name, dtype and shape. It goes
into new memory where there is no such tensor (an optimizer before its first step), or where that tensor
must not be written: it is not contiguous, shares memory with another tensor, or is replaced by the load.
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
"""One-dimensional uint8 array."""


class Destinations:
    """Destinations of one payload's bytes, and the saved state whose tensors they fill."""

    def __init__(self, plan: PayloadPlan, objects: bytes, leaves: Iterable[Leaf]) -> None:
        """Build the saved state.

        Args:
            plan: Plan of the payload. Bytes that are put later must agree with its header.
            objects: The objects of the payload. Bytes that are put later must agree with them.
            leaves: Tensors of the current state.

        Raises:
            FormatError: The objects are invalid.
        """
        self._live = _live_memory(leaves, _twice(tensor.fqn for tensor in plan.tensors))
        self._known = [
            (ByteRange(0, len(plan.header)), np.frombuffer(plan.header, np.uint8)),
            (plan.objects, np.frombuffer(objects, np.uint8)),
        ]
        self._places: list[tuple[ByteRange, Memory]] = []
        self.saved = build_state(plan, objects, self._memory)
        """The saved state. Its tensors have their values only after all bytes were put."""
        self._places.sort(key=lambda place: place[0].start)
        self._starts = [place.start for place, _ in self._places]
        self.wanted_bytes = sum(place.length_bytes for place, _ in self._places)
        """Number of bytes that must be put in total."""

    def put(self, position: int, data: memoryview) -> int:
        """Copy bytes of the payload into the tensors. Return how many bytes of `data` belong to tensors.

        Any thread may call it. Raises CorruptionError where `data` differs from the header or the objects
        from which the state was built.

        Args:
            position: Position of `data` in the payload.
            data: The bytes.
        """
        piece = np.frombuffer(data, np.uint8)
        span = ByteRange(position, position + len(piece))
        for place, known in self._known:
            low, high = _overlap(place, span)
            if low < high and not np.array_equal(
                known[low - place.start : high - place.start],
                piece[low - position : high - position],
            ):
                raise CorruptionError(f"payload bytes [{low}, {high}) changed between two reads")
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
        if memory.size:  # an empty tensor could come before the tensor with the same start
            self._places.append((tensor.byte_range, memory))
        return memory


def _new(size_bytes: int) -> Memory:
    """Return new memory that is aligned for every dtype, so that a view of it needs no copy."""
    memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + size_bytes]


def _live_memory(
    leaves: Iterable[Leaf], ambiguous: frozenset[str]
) -> dict[tuple[str, str, tuple[int, ...]], Memory]:
    """Return the memory of the current tensors by name, stored dtype and shape.

    Tensors that share memory (tied weights) are left out: the order in which a state is loaded decides
    which of their saved values remains.
    """
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
    """Return the names of leaves whose memory overlaps with that of another leaf."""
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
    """Return the names that stand for several paths of a state.

    `state.tree` numbers such names in the order in which it finds them. That order may differ now.
    """
    numbered = [(name, match[1]) for name in names if (match := _NUMBERED.fullmatch(name))]
    return frozenset(one for pair in numbered for one in pair)


def _overlap(one: ByteRange, other: ByteRange) -> tuple[int, int]:
    return max(one.start, other.start), min(one.stop, other.stop)
