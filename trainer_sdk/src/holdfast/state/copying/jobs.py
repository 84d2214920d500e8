"""Calls that copy tensors and arrays into memory, split and batched so that two threads share the work."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from holdfast.state.tensors import Leaf, bytes_of, is_tensor, torch_view

_NOTHING = nullcontext()
_MOST_OF_ONE_THREAD = 32_768
"""Largest number of elements that torch copies in the calling thread (`at::internal::GRAIN_SIZE`)."""


Copy = Callable[[Sequence[Any]], object]
"""Copies some of the sources into their places. Its argument is `Snapshot.sources`."""


class Places:
    """The memory of a payload, as tensors and arrays into which `copies_into` copies."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        """`memory` is a uint8 array."""
        self._memory = memory
        self._typed: dict[Any, Any] = {}
        """All of the memory as a flat tensor of each dtype."""

    def of(self, leaf: Leaf, start: int) -> Any:
        """Return the memory of a leaf's stored bytes, which begin at `start`."""
        source, stop = leaf.source, start + leaf.byte_count
        if leaf.is_raw:
            # The memory may not be aligned to the element size, so that only bytes can be copied.
            return self._memory[start:stop]
        if not is_tensor(source):
            return self._memory[start:stop].view(source.dtype).reshape(source.shape)
        import torch

        # In inference mode it would be a tensor that no other thread, and no later save, may write.
        with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else _NOTHING:
            return self._tensor(source, start)

    def _tensor(self, source: Any, start: int) -> Any:
        dtype, size = source.dtype, source.element_size()
        typed = self._typed.get(dtype)
        if typed is None:
            whole = len(self._memory) // size
            typed = torch_view(self._memory[: whole * size], dtype, (whole,))
            self._typed[dtype] = typed
        # One call for each place. A slice of the bytes, seen as a tensor of the dtype, takes five.
        return typed.as_strided(source.shape, _strides(source.shape), start // size)


def copies_into(
    placed: Iterable[tuple[int, Leaf, Any]], piece_bytes: int, batch_bytes: int
) -> Iterator[tuple[int, Copy]]:
    """Yield calls that together copy the leaves' bytes, each after its byte count.

    Large contiguous tensors in host memory are split and small tensors are batched, so that two threads can
    share the work. A call serves all snapshots in which the leaves differ by nothing but their data.

    Args:
        placed: The position of each leaf's source, the leaf, and its memory; see `Places`. No leaf is empty.
        piece_bytes: Largest size of a piece of a split tensor.
        batch_bytes: Largest size of a batch of two tensors or more.
    """
    batch, batched = _Batch(), 0
    for position, leaf, place in placed:
        source, size = leaf.source, leaf.byte_count
        if leaf.is_raw:
            yield size, _copy_one(_copy_raw, place, position)
        elif isinstance(source, np.ndarray):
            yield size, _copy_one(np.copyto, place, position)
        elif size > piece_bytes and source.device.type == "cpu" and source.is_contiguous():
            element_bytes = source.element_size()
            count = max(1, piece_bytes // element_bytes)
            for number, piece in enumerate(place.view(-1).split(count)):
                copy = _copy_piece(piece, number * count, position)
                yield piece.numel() * element_bytes, copy
        else:
            if batched and batched + size > batch_bytes:
                yield batched, batch.copy
                batch, batched = _Batch(), 0
            batch.add(source, place, position)
            batched += size
    if batched:
        yield batched, batch.copy


class _Batch:
    """Tensors that one call copies.

    torch copies the large ones with its thread pool. Two threads run these calls at the same time, and their
    pools would take the cores from one another: 1 GiB in tensors of 0.5 MiB took 114 ms on two cores, and 78
    with `memmove`, which copies in the calling thread and without Python's lock.
    """

    def __init__(self) -> None:
        self._places: list[Any] = []
        self._positions: list[int] = []
        self._moves: list[tuple[Any, int, int, int]] = []

    def add(self, source: Any, place: Any, position: int) -> None:
        import torch

        plain = type(source) is torch.Tensor and source.is_cpu and source.is_contiguous()
        if plain and source.numel() > _MOST_OF_ONE_THREAD:
            self._moves.append((place, place.data_ptr(), place.nbytes, position))
        else:
            self._places.append(place)
            self._positions.append(position)

    def copy(self, sources: Sequence[Any]) -> None:
        import torch

        if self._places:  # a call for each of thousands would cost more than their bytes
            torch._foreach_copy_(self._places, [sources[i] for i in self._positions])
        for place, address, size, position in self._moves:
            source = sources[position]
            if source.is_neg() or source.is_conj():  # the values are not those in memory
                place.copy_(source)
            else:
                ctypes.memmove(address, source.data_ptr(), size)


def _copy_one(copy: Callable[[Any, Any], object], place: Any, position: int) -> Copy:
    return lambda sources: copy(place, sources[position])


def _copy_piece(piece: Any, first: int, position: int) -> Copy:
    last = first + piece.numel()
    return lambda sources: piece.copy_(sources[position].view(-1)[first:last])


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides = accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(strides)[::-1] if shape else ()


def stored_tensor(leaf: Leaf) -> Any:
    """Return the tensor that a copy into the leaf's place reads: its source, or the bytes of a raw leaf."""
    return bytes_of(_plain(leaf.source)) if leaf.is_raw else leaf.source


def _copy_raw(target: np.ndarray[Any, Any], source: Any) -> None:
    if is_tensor(source):
        target[:] = bytes_of(_plain(source.cpu())).numpy()
    else:
        target[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)


def _plain(source: Any) -> Any:
    """Return a contiguous tensor of the values. The bytes of a conjugate or negative view are different."""
    return source.resolve_conj().resolve_neg().contiguous()
