"""One committed checkpoint: what it holds, and its values, read when they are needed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from holdfast.reading.boxes import BoxReader, Memory
from holdfast.reading.source import CheckpointSource
from holdfast.state.tensors import RAW, own_name, view_stored
from holdfast.state.tree import METRICS, STATE, Decoder
from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    NotFoundError,
    UnsupportedStateError,
)
from holdfast_core.format.payload import unpack_objects
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, element_bytes
from holdfast_core.ids import ByteRange, CheckpointId, Rank
from holdfast_core.reshard.boxes import holders_of, saved_state
from holdfast_core.tasks import Closing

if TYPE_CHECKING:
    from holdfast.reading.comparing import CheckpointDiff
    from holdfast.reading.describing import CheckpointDescription

_NOWHERE = ByteRange(0, 0)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths of a part of a tensor, by dimension."""


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
    def dtype_name(self) -> str:
        """The name of the dtype, such as bfloat16, without an import of torch."""
        return self._dtype

    @property
    def stored_dtype(self) -> str:
        """The dtype of the stored bytes in safetensors, such as BF16."""
        return self._stored_dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored elements, which has one dimension more if `is_raw`."""
        return self._stored_shape

    @property
    def is_raw(self) -> bool:
        """Whether safetensors does not have the type, so that the tensor is stored as bytes."""
        return self._is_raw

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self._stored_shape) * element_bytes(self._stored_dtype, self.name)

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
        for box in self.boxes(limit_bytes):
            yield self.read_flat(box)

    def boxes(self, limit_bytes: int, within: Box | None = None) -> Iterator[Box]:
        """Yield the boxes of the parts that `pieces` yields, of the whole tensor or of one box of it."""
        offsets, lengths = ((0,) * len(self.shape), self.shape) if within is None else within
        if math.prod(lengths):
            yield from self._split(offsets, lengths, 0, limit_bytes)

    def read_flat(self, box: Box) -> Any:
        """Return a box as a flat tensor or array. Raises CorruptionError, NotFoundError."""
        shape = (math.prod(box[1]),)
        return view_stored(self.read_stored(box), self._dtype, shape, array=self.is_array)

    def read_stored(self, box: Box) -> Memory:
        """Return the stored bytes of a box in row-major order. Raises CorruptionError, NotFoundError."""
        return self._memory(*box)

    def _split(
        self, offsets: tuple[int, ...], lengths: tuple[int, ...], axis: int, limit_bytes: int
    ) -> Iterator[Box]:
        size = self.nbytes // math.prod(self.shape)
        inner = math.prod(lengths[axis + 1 :]) * size
        if axis == len(lengths) or math.prod(lengths[axis:]) * size <= limit_bytes:
            yield offsets, lengths
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


class SavedCheckpoint(Closing):
    """A checkpoint that can be read without the script that saved it. Use it in one thread at a time.

    While it is open, the training that writes to the folder does not prune it. Call `close`, or use it as a
    context manager.
    """

    def __init__(self, source: CheckpointSource, checkpoint: CheckpointId) -> None:
        """Open a checkpoint. Raises NotFoundError, CorruptionError, FormatError."""
        self._reader = BoxReader(source, checkpoint)
        self._manifest = self._reader.manifest
        self._raw: dict[str, str] | None = None

    def __repr__(self) -> str:
        return f"SavedCheckpoint(step={self.step}, ranks={self.world_size}, bytes={self.nbytes})"

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self._manifest.step

    @property
    def round(self) -> int:
        """Restart round of the run that saved it."""
        return self._manifest.restart_round

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return self._manifest.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' payloads."""
        return self._manifest.payload_bytes

    def tensors(self) -> Mapping[str, LazyTensor]:
        """Return the tensors of the gang by name, each whole. No tensor is read yet.

        Tensors that belong to one rank alone, such as states of generators, are in `objects(rank)` only.

        Raises CorruptionError when no layout of a rank with some of the tensors can be read.
        """
        groups = [
            (self._layout_of_any(ranks), len(ranks))
            for ranks in holders_of(self._manifest.shards).values()
        ]
        found = saved_state(groups[0][0], groups, self.world_size).tensors
        return {
            name: self._tensor(name, found[name].dtype, found[name].shape) for name in sorted(found)
        }

    def metrics(self) -> dict[str, float]:
        """Return what rank 0 had reported by `Checkpointer.report` when it saved. Raises CorruptionError."""
        found = self._root(Rank(0)).get(METRICS, {})
        if not isinstance(found, dict) or not all(
            isinstance(value, int | float) for value in found.values()
        ):
            raise FormatError(f"{self._reader.name}: the metrics of rank 0 are not numbers by name")
        return {name: float(value) for name, value in found.items()}

    def objects(self, rank: int = 0) -> dict[str, Any]:
        """Return the state that a rank saved, nested as it was, with a LazyTensor for each tensor.

        A tensor of which the rank had a part is the whole tensor. A member of an enum is its value, and a
        named tuple a plain tuple. Raises ConfigError for a rank that did not save, and CorruptionError.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"{self._reader.name} was saved by {self.world_size} ranks: expected a rank from 0 to "
                f"{self.world_size - 1}, found {rank!r}"
            )
        layout = self._layout_of_any([Rank(rank)])
        decoded = Decoder(lambda reference: self._referred(layout, reference)).decode(
            self._encoded(Rank(rank))
        )
        if not isinstance(decoded, dict):
            raise FormatError(f"{self._reader.name}: the state of rank {rank} is not a dict")
        return decoded

    def describe(self) -> CheckpointDescription:
        """Return all that the checkpoint says of itself, as plain values. No tensor is read.

        Raises CorruptionError and NotFoundError as `tensors`, `objects` and `metrics` do, and what the place
        raises where it does not answer.
        """
        from holdfast.reading.describing import describe

        return describe(self, self._manifest, self._reader.source)

    def compare(
        self,
        later: SavedCheckpoint,
        *,
        tensors: str = "*",
        progress: Callable[[int], object] | None = None,
    ) -> CheckpointDiff:
        """Return what changed from this checkpoint to another one, of the same place or of another.

        later: the other checkpoint.
        tensors: pattern of the names to compare, with *, ? and [...] as of a shell, such as "model.*".
        progress: receives the number of bytes each time some of the tensors that both have were compared.

        Bytes of which the chunk tables of both prove that they are equal are not read. The memory is some
        tens of MiB, and the layouts and chunk tables. Raises CorruptionError where a part that must be read
        cannot be read, and NotFoundError where one of them was deleted meanwhile.
        """
        from holdfast.reading.comparing import compare

        chosen = [
            (
                {name: t for name, t in one.tensors().items() if fnmatchcase(name, tensors)},
                one._reader,
            )
            for one in (self, later)
        ]
        before, after = (one._encoded(Rank(0)) for one in (self, later))
        entries = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
        return compare(chosen[0], chosen[1], tuple(entries), progress or (lambda _: None))

    def keep_open(self, shards: int) -> None:
        """Keep at most `shards` files open between two reads. Each may keep a buffer of 8 MiB."""
        self._reader.most_open = shards

    def close(self) -> None:
        """Release the checkpoint, which may then be pruned."""
        self._reader.close()

    # ------------------------------------------------------------------ inside

    def _encoded(self, rank: Rank) -> dict[str, Any]:
        found: dict[str, Any] = self._root(rank)[STATE]
        return found

    def _root(self, rank: Rank) -> dict[str, Any]:
        root = unpack_objects(self._reader.read_objects(rank))
        if not isinstance(root, dict) or not isinstance(root.get(STATE), dict):
            raise FormatError(f"{self._reader.name}: the objects of rank {rank} contain no state")
        return root

    def _referred(self, layout: RankLayout, reference: dict[str, Any]) -> LazyTensor:
        name = reference["$tensor"]
        item = layout.tensors.get(name)
        if item is None:
            raise FormatError(
                f"{self._reader.name}: the state of rank {layout.rank} refers to tensor {name!r}, which "
                "is not in its layout"
            )
        return LazyTensor(
            name,
            (item.dtype, tuple(item.shape)),
            self._reader,
            raw_dtype=reference.get("dtype"),
            is_array=bool(reference.get("array")),
        )

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
        raw = self._raw_dtypes().get(name) if may_be_raw(dtype, shape) else None
        return LazyTensor(name, (dtype, tuple(shape)), self._reader, raw_dtype=raw)

    def _raw_dtypes(self) -> dict[str, str]:
        """Return the dtypes of tensors whose types safetensors does not have, by name."""
        if self._raw is None:
            found: dict[str, str] = {}
            for ranks in holders_of(self._manifest.shards).values():
                for reference in _references(self._encoded(ranks[0])):
                    if "dtype" in reference:
                        found[reference["$tensor"]] = reference["dtype"]
            self._raw = found
        return self._raw

    def _layout_of_any(self, ranks: list[Rank]) -> RankLayout:
        """Return the layout of the first of these ranks that can be read."""
        reasons: list[str] = []
        for rank in ranks:
            try:
                return self._reader.layout(rank)
            except (FormatError, NotFoundError) as error:
                reasons.append(str(error))
        raise CorruptionError(
            f"{self._reader.name}: no layout of the ranks {ranks[0]} to {ranks[-1]} can be read: "
            f"{'; '.join(reasons[:3])}"
        )


def _references(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the references to tensors in encoded objects."""
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        if "$tensor" in value:
            yield value
        else:
            for item in value.values():
                yield from _references(item)
