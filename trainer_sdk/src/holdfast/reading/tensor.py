"""`LazyTensor`, a saved tensor whose bytes are read when they are needed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

from holdfast.reading.boxes import BoxReader, Memory
from holdfast.state.tensors import RAW, own_name, view_stored
from holdfast_core.errors import UnsupportedStateError
from holdfast_core.format.rank_layout import TensorSlice, element_bytes
from holdfast_core.ids import ByteRange

_NOWHERE = ByteRange(0, 0)


class LazyTensor:
    """A whole tensor of a checkpoint, assembled from the parts of all ranks.

    `tensor[2:5, :, 0]` reads only the chunks that hold these elements. An index has integers, slices with
    step 1 and an ellipsis, as torch has them. `tensor[:]` and `read()` read everything. Each call reads and
    verifies again, and returns a new tensor.
    """

    def __init__(
        self,
        name: str,
        stored: tuple[str, tuple[int, ...]],
        reader: BoxReader,
        *,
        raw_dtype: str | None = None,
        is_array: bool = False,
    ) -> None:
        """Make the tensor of a checkpoint.

        Args:
            name: Name in the checkpoint.
            stored: safetensors dtype and global shape.
            reader: Reads boxes of it.
            raw_dtype: The dtype, if safetensors does not have it. The stored bytes add one dimension.
            is_array: Whether a numpy array was saved.
        """
        self.name = name
        """Name in the checkpoint, such as model.layers.0.weight."""
        self.is_array = is_array
        """Whether a numpy array was saved, which `read` returns."""
        self._stored_dtype, self._stored_shape = stored
        self._dtype = own_name(self._stored_dtype) if raw_dtype is None else raw_dtype
        self._is_raw = raw_dtype is not None
        self._reader = reader
        self.shape = self._stored_shape[:-1] if self._is_raw else self._stored_shape
        """Global shape."""

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self._dtype}, {list(self.shape)})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name}: a tensor without dimensions has no length")
        return self.shape[0]

    @property
    def dtype(self) -> Any:
        """The torch.dtype, or the numpy.dtype of an array."""
        if self.is_array:
            import numpy as np

            return np.dtype(self._dtype)
        import torch

        return getattr(torch, self._dtype)

    @property
    def torch_dtype(self) -> Any:
        """The torch.dtype, also of an array. Raises UnsupportedStateError if torch has no such type."""
        import torch

        found = getattr(torch, self._dtype, None)
        if found is None:
            raise UnsupportedStateError(f"{self.name}: torch has no type {self._dtype}")
        return found

    @property
    def stored_dtype(self) -> str:
        """The dtype of the stored bytes in safetensors, such as BF16."""
        return self._stored_dtype

    @property
    def is_raw(self) -> bool:
        """Whether safetensors does not have the type, so that the tensor is stored as bytes."""
        return self._is_raw

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        size = element_bytes(self._stored_dtype, self.name)
        return math.prod(self._stored_shape) * size

    def read(self) -> Any:
        """Return the whole tensor. Raises CorruptionError, NotFoundError."""
        return self[...]

    def __getitem__(self, index: Any) -> Any:
        """Return a part. Raises IndexError, CorruptionError, NotFoundError."""
        offsets, lengths, kept = _box_of(index, self.shape, self.name)
        shape = tuple(length for length, keep in zip(lengths, kept, strict=True) if keep)
        memory = self._memory(offsets, lengths)
        return view_stored(memory, self._dtype, shape, array=self.is_array)

    def pieces(self, limit_bytes: int) -> Iterator[Any]:
        """Yield flat parts of the tensor in row-major order, each of at most about `limit_bytes`."""
        if not math.prod(self.shape):
            return
        yield from self._split((0,) * len(self.shape), self.shape, 0, limit_bytes)

    def _split(
        self, offsets: tuple[int, ...], lengths: tuple[int, ...], axis: int, limit_bytes: int
    ) -> Iterator[Any]:
        size = self.nbytes // math.prod(self.shape)
        inner = math.prod(lengths[axis + 1 :]) * size
        if axis == len(lengths) or math.prod(lengths[axis:]) * size <= limit_bytes:
            memory = self._memory(offsets, lengths)
            yield view_stored(memory, self._dtype, (math.prod(lengths),), array=self.is_array)
            return
        count = max(1, limit_bytes // inner)
        for start in range(0, lengths[axis], count):
            length = min(count, lengths[axis] - start)
            part_offsets = (*offsets[:axis], offsets[axis] + start, *offsets[axis + 1 :])
            part_lengths = (*lengths[:axis], length, *lengths[axis + 1 :])
            yield from self._split(part_offsets, part_lengths, axis + 1, limit_bytes)

    def _memory(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Memory:
        if self._is_raw:
            offsets, lengths = (*offsets, 0), (*lengths, self._stored_shape[-1])
        box = TensorSlice(self._stored_dtype, self._stored_shape, offsets, lengths, _NOWHERE)
        return self._reader.read_box(self.name, box)


def may_be_raw(dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether a stored tensor may be one of a type that safetensors does not have."""
    return dtype == RAW and len(shape) > 0 and shape[-1] > 0


def _box_of(
    index: Any, shape: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]:
    """Return offsets and lengths of the box, and which dimensions the result keeps."""
    items = index if isinstance(index, tuple) else (index,)
    given = sum(1 for item in items if item is not Ellipsis)
    if given > len(shape) or len(items) - given > 1:
        raise IndexError(f"{name}: index {index!r} does not fit the shape {list(shape)}")
    if len(items) == given:
        items = (*items, Ellipsis)
    at = next(i for i, item in enumerate(items) if item is Ellipsis)
    whole = (slice(None),) * (len(shape) - given)
    offsets, lengths, kept = [], [], []
    for item, size in zip((*items[:at], *whole, *items[at + 1 :]), shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step != 1:
                raise IndexError(f"{name}: index {index!r}: expected slices with step 1")
            offsets.append(start)
            lengths.append(max(0, stop - start))
            kept.append(True)
            continue
        try:
            position = operator.index(item)
        except TypeError as error:
            raise IndexError(
                f"{name}: index {index!r}: expected integers, slices and an ellipsis"
            ) from error
        position += size if position < 0 else 0
        if not 0 <= position < size:
            raise IndexError(f"{name}: index {index!r} is out of the shape {list(shape)}")
        offsets.append(position)
        lengths.append(1)
        kept.append(False)
    return tuple(offsets), tuple(lengths), tuple(kept)
