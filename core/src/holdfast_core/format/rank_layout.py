"""The layout of one rank: which slice of which tensor its payload holds, and where. The rank writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import dumps_canonical, loads_canonical
from holdfast_core.format.checks import (
    expect_document,
    expect_int,
    expect_ints,
    expect_map,
    expect_object,
    expect_range,
    expect_text,
)
from holdfast_core.format.dtypes import MAX_TENSOR_BYTES, element_bytes, tensor_bytes
from holdfast_core.format.keys import MAX_RANK
from holdfast_core.ids import ByteRange, Rank

FORMAT_VERSION = 1
MAX_FQN = 4096
MAX_DIMENSIONS = 64
MAX_DIMENSION = 1 << 50

_FIELDS = frozenset({"formatVersion", "rank", "tensors", "objects", "payloadBytes"})
_TENSOR_FIELDS = frozenset({"dtype", "shape", "offsets", "lengths", "byteRange"})
_OBJECT_FIELDS = frozenset({"byteRange"})


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of a tensor: in each dimension of `shape`, `lengths` elements from `offsets` on."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    byte_range: ByteRange
    """Bytes of the box within the rank's payload."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Layout of one rank's payload, by fully qualified names of tensors and objects."""

    rank: Rank
    tensors: dict[str, TensorSlice]
    objects: dict[str, ByteRange]
    """Bytes of the JSON that contains the object. Several objects may share one range."""
    payload_bytes: int

    def to_bytes(self) -> bytes:
        """Return the canonical document. Raises FormatError if `parse_rank_layout` would refuse it."""
        data = dumps_canonical(
            {
                "formatVersion": FORMAT_VERSION,
                "rank": self.rank,
                "tensors": {fqn: _tensor_json(t) for fqn, t in self.tensors.items()},
                "objects": {fqn: {"byteRange": range_json(r)} for fqn, r in self.objects.items()},
                "payloadBytes": self.payload_bytes,
            }
        )
        parse_rank_layout(data)
        return data


def parse_rank_layout(document: bytes) -> RankLayout:
    """Parse a rank's layout document and check that its sizes and offsets fit each other.

    Raises FormatError with the path of the wrong value.
    """
    what = "layout of a rank"
    root = expect_document(loads_canonical(document, what), what, _FIELDS, version=FORMAT_VERSION)
    payload_bytes = expect_int(root["payloadBytes"], f"{what}.payloadBytes", high=MAX_TENSOR_BYTES)
    tensors: dict[str, TensorSlice] = {}
    for fqn, value in expect_map(root["tensors"], f"{what}.tensors").items():
        path = f"{what}.tensors[{fqn[:200]!r}]"
        entry = expect_object(value, path, _TENSOR_FIELDS)
        tensors[check_fqn(fqn, path)] = check_slice(
            TensorSlice(
                dtype=expect_text(entry["dtype"], f"{path}.dtype", limit=40),
                shape=expect_shape(entry["shape"], f"{path}.shape"),
                offsets=expect_shape(entry["offsets"], f"{path}.offsets"),
                lengths=expect_shape(entry["lengths"], f"{path}.lengths"),
                byte_range=expect_range(entry["byteRange"], f"{path}.byteRange"),
            ),
            path,
        )
    objects: dict[str, ByteRange] = {}
    for fqn, value in expect_map(root["objects"], f"{what}.objects").items():
        path = f"{what}.objects[{fqn[:200]!r}]"
        entry = expect_object(value, path, _OBJECT_FIELDS)
        objects[check_fqn(fqn, path)] = expect_range(entry["byteRange"], f"{path}.byteRange")
    check_ranges(
        [t.byte_range for t in tensors.values()], set(objects.values()), payload_bytes, what
    )
    return RankLayout(
        rank=Rank(expect_int(root["rank"], f"{what}.rank", high=MAX_RANK)),
        tensors=tensors,
        objects=objects,
        payload_bytes=payload_bytes,
    )


def check_fqn(fqn: str, path: str) -> str:
    if not 0 < len(fqn) <= MAX_FQN or "\0" in fqn:
        raise FormatError(f"{path}: a name has 1..{MAX_FQN} characters and no NUL")
    return fqn


def expect_shape(value: Any, path: str) -> tuple[int, ...]:
    numbers = expect_ints(value, path, limit=MAX_DIMENSIONS)
    for number in numbers:
        if number > MAX_DIMENSION:
            raise FormatError(f"{path}: dimension {number}, at most {MAX_DIMENSION} is accepted")
    return numbers


def check_slice(item: TensorSlice, path: str) -> TensorSlice:
    """Return `item`. Raises FormatError if its fields contradict each other.

    The dimensions must agree, the box must lie within the shape, and the byte range must be as long as
    the box.
    """
    element_bytes(item.dtype, f"{path}.dtype")
    if not len(item.shape) == len(item.offsets) == len(item.lengths):
        raise FormatError(f"{path}: shape, offsets and lengths differ in their dimensions")
    for axis, (size, offset, length) in enumerate(
        zip(item.shape, item.offsets, item.lengths, strict=True)
    ):
        if offset + length > size:
            raise FormatError(
                f"{path}: axis {axis} has the range {offset}..{offset + length} of a dimension of "
                f"{size}"
            )
    expected = tensor_bytes(item.dtype, item.lengths, path)
    if item.byte_range.length_bytes != expected:
        raise FormatError(
            f"{path}.byteRange: {item.byte_range.length_bytes} bytes, expected {expected} "
            f"for {item.dtype} {list(item.lengths)}"
        )
    return item


def check_ranges(
    exclusive: Iterable[ByteRange], shared: Iterable[ByteRange], payload_bytes: int, path: str
) -> None:
    """Raise FormatError if two ranges overlap or one does not lie within the payload.

    `exclusive` are the ranges of tensors; `shared` are the distinct ranges of objects.
    """
    end = 0
    for item in sorted(
        (r for r in (*exclusive, *shared) if r.length_bytes), key=lambda r: (r.start, r.stop)
    ):
        if item.start < end:
            raise FormatError(f"{path}: byte ranges overlap at {item.start}")
        end = item.stop
    if end > payload_bytes:
        raise FormatError(f"{path}: byte range ends at {end} of a payload of {payload_bytes}")


def range_json(item: ByteRange) -> list[int]:
    return [item.start, item.stop]


def slice_json(item: TensorSlice) -> dict[str, Any]:
    """Return the JSON of the fields of a slice that differ by rank."""
    return {
        "offsets": list(item.offsets),
        "lengths": list(item.lengths),
        "byteRange": range_json(item.byte_range),
    }


def _tensor_json(item: TensorSlice) -> dict[str, Any]:
    return {"dtype": item.dtype, "shape": list(item.shape), **slice_json(item)}
