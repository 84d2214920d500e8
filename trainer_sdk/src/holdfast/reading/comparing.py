"""What changed between two checkpoints, tensor by tensor, in bounded memory.

Equal bytes need not be read: where a rank has the same slice at the same bytes of its payload in both, equal
digests in the two chunk tables prove that the bytes are equal. What is not proved is read from both, some MiB
at a time. Norms are sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from holdfast.reading.boxes import BoxReader, Memory
from holdfast.reading.checkpoint import Box, LazyTensor
from holdfast.reading.describing import DescribedTensor
from holdfast_core.errors import HoldfastError
from holdfast_core.format.rank_layout import TensorSlice
from holdfast_core.ids import Rank
from holdfast_core.shards.file import DIGEST_BYTES

_PIECE_BYTES = 4 << 20

Floats = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Slices = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Rank, TensorSlice]]
"""The slices of a tensor by offsets and lengths, each of the lowest rank that has it."""

_NUMBERS = {
    "bool": np.uint8,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.float32,
    "complex128": np.float64,
}
"""Type of the numbers of each type. A complex number is two: its norm is that of both together."""


class ChangeKind(StrEnum):
    """What became of a tensor."""

    ADDED = "added"
    REMOVED = "removed"
    RESHAPED = "reshaped"
    """It has another shape or dtype."""
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that is not the same in both checkpoints."""

    name: str
    kind: ChangeKind
    before: DescribedTensor | None
    after: DescribedTensor | None
    norm: float | None = None
    """L2 norm of the difference of all elements. None: the kind is not "changed", or numpy has no such
    numbers (float8). It is nan where the difference is (nan, or infinities in both)."""
    relative_norm: float | None = None
    """The same divided by the L2 norm of the tensor before. None: as for `norm`, or that norm is 0."""


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """What changed from one checkpoint to another."""

    changes: tuple[TensorChange, ...]
    """By name."""
    unchanged: int
    """Number of tensors that are equal, bit by bit."""
    entries: tuple[str, ...]
    """Entries of rank 0's state that differ in other values than the elements of tensors."""
    norm: float
    """L2 norm of the changes of all tensors together that have one."""
    shared_bytes: int
    """Payload bytes of the later checkpoint that the earlier one has in the same chunks of the same rank."""
    payload_bytes: int
    """Payload bytes of the later checkpoint."""
    read_bytes: int
    """Bytes of tensors that were read, of both."""

    @property
    def is_equal(self) -> bool:
        """Return whether the compared tensors are equal, bit by bit."""
        return not self.changes


class _TensorComparison:
    """One comparison of tensors that both checkpoints have."""

    def __init__(
        self, before: BoxReader, after: BoxReader, progress: Callable[[int], object]
    ) -> None:
        self._before, self._after = before, after
        self._progress = progress
        self._slices = [_slices_of(before), _slices_of(after)]
        self._chunk_bytes: dict[Rank, int] = {}
        self._same: dict[Rank, Mask] = {}
        """Which chunks are equal, of ranks whose payloads differ."""
        self._equal: set[Rank] = set()
        """Ranks whose payloads are equal."""
        self.shared_bytes = 0
        self.read_bytes = 0
        for rank in range(min(before.manifest.world_size, after.manifest.world_size)):
            self._compare_chunks(Rank(rank))

    def change(self, before: LazyTensor, after: LazyTensor) -> tuple[bool, float, float]:
        """Compare a tensor.

        Returns:
            Whether it changed, and the sums of squares of the difference and of the tensor before.
        """
        differs, squares, old_squares = False, 0.0, 0.0
        proved: list[Box] = []
        for box, is_same in self._pieces(before):
            if is_same:
                proved.append(box)
                self._progress(_bytes_of(box, before))
                continue
            old, new = self._read(before, box), self._read(after, box)
            differs = differs or not np.array_equal(old, new)
            numbers = _float64(old, before.dtype_name)
            with np.errstate(over="ignore", invalid="ignore"):
                old_squares += float(numbers @ numbers)
                numbers -= _float64(new, before.dtype_name)
                squares += float(numbers @ numbers)
            self._progress(_bytes_of(box, before))
        if differs and before.dtype_name in (*_NUMBERS, "bfloat16"):
            for box in proved:  # for the relative norm
                numbers = _float64(self._read(before, box), before.dtype_name)
                with np.errstate(over="ignore", invalid="ignore"):
                    old_squares += float(numbers @ numbers)
        return differs, squares, old_squares

    def _read(self, tensor: LazyTensor, box: Box) -> Memory:
        found = tensor.read_stored(box)
        self.read_bytes += found.nbytes
        return found

    def _pieces(self, tensor: LazyTensor) -> Iterator[tuple[Box, bool]]:
        """Yield the boxes of the pieces of a tensor, and whether they are proved to be equal."""
        before, after = (found.get(tensor.name, {}) for found in self._slices)
        covered = sum(math.prod(lengths) for _, lengths in before)
        stored = tensor.stored_shape
        if before.keys() != after.keys() or covered != math.prod(stored):
            # Other numbers of ranks saved them, or slices overlap.
            yield from ((box, False) for box in tensor.boxes(_PIECE_BYTES))
            return
        for where, (rank, item) in before.items():
            is_aligned = after[where] == (rank, item)
            dimensions = len(tensor.shape)
            at = item.byte_range.start
            for box in tensor.boxes(_PIECE_BYTES, (where[0][:dimensions], where[1][:dimensions])):
                stop = at + _bytes_of(box, tensor)
                share = self._proved_share(rank, at, stop) if is_aligned else 0.0
                if share in (0.0, 1.0):
                    yield box, bool(share)
                else:  # a part of it need not be read
                    start = at
                    for part in tensor.boxes(self._chunk_bytes[rank], box):
                        end = start + _bytes_of(part, tensor)
                        yield part, self._proved_share(rank, start, end) == 1.0
                        start = end
                at = stop

    def _proved_share(self, rank: Rank, start: int, stop: int) -> float:
        """Return the share of the chunks with these bytes of a rank's payload that are equal in both."""
        if rank in self._equal:
            return 1.0
        same = self._same.get(rank)
        if same is None:
            return 0.0
        size = self._chunk_bytes[rank]
        return float(same[start // size : -(-stop // size)].mean())

    def _compare_chunks(self, rank: Rank) -> None:
        """Find out which chunks of a rank's payload are equal in both.

        None are known to be where a shard cannot be read: other ranks may have what it holds.
        """
        shards = [one.manifest.shards[rank] for one in (self._before, self._after)]
        if shards[0].blake3 == shards[1].blake3:
            self._equal.add(rank)
            self.shared_bytes += shards[1].payload_bytes
            return
        try:
            with self._before.shard(rank) as old:
                before = old.trailer
            with self._after.shard(rank) as new:
                after = new.trailer
        except HoldfastError:
            return
        size = after.record.header.chunk_bytes
        if before.record.header.chunk_bytes != size:
            return
        old_digests, new_digests = (
            np.frombuffer(one.table.digests, np.uint8).reshape(-1, DIGEST_BYTES)
            for one in (before, after)
        )
        count = min(len(old_digests), len(new_digests))
        same: Mask = np.zeros(len(new_digests), np.bool_)
        same[:count] = (old_digests[:count] == new_digests[:count]).all(axis=1)
        self._same[rank], self._chunk_bytes[rank] = same, size
        total = int(same.sum()) * size
        if len(same) and same[-1]:  # the last chunk is shorter
            total -= len(same) * size - after.record.header.payload_bytes
        self.shared_bytes += total


def compare(
    before: tuple[Mapping[str, LazyTensor], BoxReader],
    after: tuple[Mapping[str, LazyTensor], BoxReader],
    entries: tuple[str, ...],
    progress: Callable[[int], object],
) -> CheckpointDiff:
    """Compare two checkpoints. See `SavedCheckpoint.compare`.

    Args:
        before: The tensors of the earlier one that are compared, and its reader.
        after: The same of the later one.
        entries: Entries whose other values differ.
        progress: Receives bytes of tensors that both have, when they were compared.
    """
    old, new = before[0], after[0]
    comparison = _TensorComparison(before[1], after[1], progress)
    changes: list[TensorChange] = []
    unchanged, squares = 0, 0.0
    for name in sorted(old.keys() | new.keys()):
        one, other = old.get(name), new.get(name)
        ends = _described(one), _described(other)
        if one is None or other is None:
            kind = ChangeKind.ADDED if one is None else ChangeKind.REMOVED
            changes.append(TensorChange(name, kind, *ends))
        elif (one.shape, one.dtype_name) != (other.shape, other.dtype_name):
            changes.append(TensorChange(name, ChangeKind.RESHAPED, *ends))
        else:
            differs, moved, size = comparison.change(one, other)
            if not differs:
                unchanged += 1
                continue
            has_norm = one.dtype_name in (*_NUMBERS, "bfloat16")
            norm = math.sqrt(moved) if has_norm else None
            relative = math.sqrt(moved / size) if has_norm and size else None
            squares += moved
            changes.append(TensorChange(name, ChangeKind.CHANGED, *ends, norm, relative))
    return CheckpointDiff(
        tuple(changes),
        unchanged,
        entries,
        math.sqrt(squares),
        comparison.shared_bytes,
        after[1].manifest.payload_bytes,
        comparison.read_bytes,
    )


def _described(tensor: LazyTensor | None) -> DescribedTensor | None:
    if tensor is None:
        return None
    return DescribedTensor(tensor.name, tensor.dtype_name, tensor.shape, tensor.nbytes)


def _slices_of(reader: BoxReader) -> dict[str, Slices]:
    """Return the slices of all tensors. One layout of each group of ranks with the same boxes is read."""
    found: dict[str, Slices] = {}
    for shard in reader.manifest.shards:
        if shard.same_boxes == shard.rank:
            try:
                layout = reader.layout(shard.rank)
            except HoldfastError:
                continue  # what it describes is read from other ranks, or the read says why not
            for name, item in layout.tensors.items():
                slices = found.setdefault(name, {})
                slices.setdefault((item.offsets, item.lengths), (shard.rank, item))
    return found


def _bytes_of(box: Box, tensor: LazyTensor) -> int:
    return math.prod(box[1]) * (tensor.nbytes // max(1, math.prod(tensor.shape)))


def _float64(data: Memory, dtype: str) -> Floats:
    """Return the numbers of stored bytes, or none for a type that numpy does not have."""
    if dtype == "bfloat16":  # the upper half of a float32
        wide = data.view(np.uint16).astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    kind = _NUMBERS.get(dtype)
    return np.zeros(0) if kind is None else data.view(kind).astype(np.float64)
