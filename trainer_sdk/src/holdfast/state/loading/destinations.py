"""Copies the bytes of a payload directly into the tensors of the current state.

A saved tensor goes into the memory of the current tensor with the same name, dtype and shape. It goes
into new memory where there is no such tensor (an optimizer before its first step), or where that tensor
must not be written: it is not contiguous, shares memory with another tensor, or is replaced by the load.
"""

from __future__ import annotations

import bisect
import ctypes
import re
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import numpy as np

from holdfast.state.kinds import NO_CLASSES, Classes
from holdfast.state.snapshot import build_state, paused_collector, view_payload
from holdfast.state.tensors import Leaf, extent_of, is_tensor, is_writable, memory_of, own_name
from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.payload import PayloadPlan, PayloadTensor
from holdfast_core.ids import ByteRange

_ALIGNMENT_BYTES = 64
_SMALL_BYTES = 64 << 10
"""Smaller copies do not let other threads run: changing threads takes longer than such a copy."""
_NUMBERED = re.compile(r"(.*)~\d+", re.DOTALL)

_move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""`ctypes.memmove` without a release of the interpreter lock. Neither it nor a view of each tensor's memory
is made per tensor: with 100,000 tensors the views took longer than all copies."""

Memory = np.ndarray[Any, Any]
"""One-dimensional uint8 array."""


class Destinations:
    """Destinations of one payload's bytes, and the saved state whose tensors they fill."""

    @paused_collector()
    def __init__(
        self,
        plan: PayloadPlan,
        objects: bytes,
        leaves: Iterable[Leaf],
        classes: Classes = NO_CLASSES,
    ) -> None:
        """Build the saved state.

        Args:
            plan: Plan of the payload. Bytes that are put later must agree with its header.
            objects: The objects of the payload. Bytes that are put later must agree with them.
            leaves: Tensors of the current state.
            classes: Enums and named tuples of the current state.

        Raises:
            FormatError: The objects are invalid.
            StateMismatchError: A value does not fit its class any more.
        """
        self._live = _live_leaves(leaves, _twice(tensor.fqn for tensor in plan.tensors))
        self._known = [
            (ByteRange(0, len(plan.header)), np.frombuffer(plan.header, np.uint8)),
            (plan.objects, np.frombuffer(objects, np.uint8)),
        ]
        self._places: list[tuple[int, int, int, Any]] = []
        """Start and stop in the payload, the address of the memory, and the object that owns the memory."""
        self.saved = build_state(plan, objects, self._make, classes)
        """The saved state. Its tensors have their values only after all bytes were put."""
        self._places.sort(key=itemgetter(0))
        self._starts = [start for start, _, _, _ in self._places]
        self.wanted_bytes = sum(stop - start for start, stop, _, _ in self._places)
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
        done, source = 0, piece.ctypes.data
        first = max(0, bisect.bisect_right(self._starts, position) - 1)
        last = bisect.bisect_left(self._starts, span.stop)
        for start, stop, address, _ in self._places[first:last]:
            low, high = max(start, position), min(stop, span.stop)
            size = high - low
            if size > 0:
                move = _move_small if size < _SMALL_BYTES else ctypes.memmove
                move(address + low - start, source + low - position, size)
                done += size
        return done

    def _make(self, tensor: PayloadTensor, raw_dtype: str | None, is_array: bool) -> Any:
        leaf = self._live.get(tensor.fqn)
        if leaf is not None and (leaf.dtype, leaf.shape) != (tensor.dtype, tensor.shape):
            leaf = None
        size = tensor.byte_range.length_bytes
        if raw_dtype is None and not is_array and (leaf is None or _is_plain_tensor(leaf)):
            value = owner = _new_tensor(tensor) if leaf is None else leaf.source
            address = value.data_ptr()
        else:
            owner = _new(size) if leaf is None else memory_of(leaf)
            value = view_payload(tensor, owner, raw_dtype, is_array=is_array)
            address = owner.ctypes.data
        if owner.nbytes != size:  # `put` would write over other memory
            raise FormatError(
                f"payload: tensor {tensor.fqn!r} has {size} bytes, expected {owner.nbytes}"
            )
        if size:  # an empty tensor could come before the tensor with the same start
            self._places.append((*tensor.byte_range, address, owner))
        return value


def _is_plain_tensor(leaf: Leaf) -> bool:
    """Return whether the leaf's source is a tensor that is stored in its own dtype."""
    return not leaf.is_raw and is_tensor(leaf.source)


def _new_tensor(tensor: PayloadTensor) -> Any:
    import torch

    return torch.empty(tensor.shape, dtype=getattr(torch, own_name(tensor.dtype)), device="cpu")


def _new(size_bytes: int) -> Memory:
    """Return new memory that is aligned for every dtype, so that a view of it needs no copy."""
    memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + size_bytes]


def _live_leaves(leaves: Iterable[Leaf], ambiguous: frozenset[str]) -> dict[str, Leaf]:
    """Return the current tensors into whose memory a restore may write, by name.

    Tensors that share memory (tied weights) are left out: the order in which a state is loaded decides
    which of their saved values remains.
    """
    known = tuple(leaves)
    excluded = ambiguous | _twice(leaf.name for leaf in known) | _sharing(known)
    return {leaf.name: leaf for leaf in known if leaf.name not in excluded and is_writable(leaf)}


def _sharing(leaves: Iterable[Leaf]) -> frozenset[str]:
    """Return the names of leaves whose memory overlaps with that of another leaf."""
    extents = [(*extent, leaf.name) for leaf in leaves if (extent := extent_of(leaf)) is not None]
    extents.sort(key=itemgetter(0))
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
    numbered = [
        (name, match[1]) for name in names if "~" in name and (match := _NUMBERED.fullmatch(name))
    ]
    return frozenset(one for pair in numbered for one in pair)


def _overlap(one: ByteRange, other: ByteRange) -> tuple[int, int]:
    return max(one.start, other.start), min(one.stop, other.stop)
