"""Plans and parses the header of a payload. A payload is a complete safetensors file. Pure.

It consists of the header length as little-endian u64, the JSON header, padded with spaces so that the
data starts on a block boundary, the tensors, and a last uint8 tensor `__holdfast_objects__`. That one is
the canonical JSON of all state that is not a tensor, padded with spaces to its capacity. The module
needs neither torch nor numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import dumps_canonical, loads_strict
from holdfast_core.format.checks import (
    expect_list,
    expect_map,
    expect_object,
    expect_range,
    expect_text,
)
from holdfast_core.format.dtypes import MAX_TENSOR_BYTES, element_bytes, tensor_bytes
from holdfast_core.format.rank_layout import check_fqn, expect_shape
from holdfast_core.ids import ByteRange

OBJECTS_NAME = "__holdfast_objects__"
METADATA_NAME = "__metadata__"
ALIGNMENT_BYTES = 64
"""The parser requires that the data starts at a multiple of this."""
_WRITTEN_ALIGNMENT_BYTES = 4096
"""The data of a new payload starts at a multiple of this. Headers of ranks that hold equal tensors may
differ by some digits in names; with the data at the same offset their chunks are still equal."""
MAX_HEADER_BYTES = 64 << 20
LENGTH_BYTES = 8
"""Number of first bytes of a payload that `header_bytes` needs."""

_METADATA = {"format": "pt", "holdfast": "1"}
"""Readers of the safetensors ecosystem expect `format: pt`."""
_LENGTH = struct.Struct("<Q")
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True)
class PayloadTensor:
    """A tensor in a payload's header. `byte_range` counts from the payload's start."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    byte_range: ByteRange


@dataclass(frozen=True, slots=True)
class PayloadPlan:
    """Positions of header, tensors and objects in a payload. `tensors` is in order of position."""

    header: bytes
    """First bytes of the payload: length and padded JSON."""
    tensors: tuple[PayloadTensor, ...]
    objects: ByteRange
    total_bytes: int
    """Length of the payload."""

    def byte_range(self, fqn: str) -> ByteRange:
        """Return the byte range of a tensor. Raises KeyError."""
        for tensor in self.tensors:
            if tensor.fqn == fqn:
                return tensor.byte_range
        raise KeyError(fqn)


def plan_payload(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    objects_capacity_bytes: int,
    last: Container[str] = (),
) -> PayloadPlan:
    """Plan a payload with the given tensors and room for the objects.

    Tensors are ordered by element size, largest first, then by name. Each one thus starts at a multiple
    of its element size without gaps, as safetensors requires. The order of the input does not matter.

    Args:
        tensors: (name, safetensors dtype, shape of the local slice) of each tensor.
        objects_capacity_bytes: Bytes reserved for the objects' JSON.
        last: Names that are placed behind the others of their element size. Tensors that do not change
            between steps are kept apart from those that do, so that few chunks hold bytes of both.

    Raises:
        FormatError: A dtype is unknown, a name occurs twice or is reserved, or a size is out of bounds.
    """
    ordered = sorted(
        ((fqn, dtype, tuple(shape)) for fqn, dtype, shape in tensors),
        key=lambda item: (
            -element_bytes(item[1], f"tensor {item[0]!r}"),
            item[0] in last,
            item[0],
        ),
    )
    if objects_capacity_bytes < 0:
        raise FormatError(f"payload: objects capacity of {objects_capacity_bytes} bytes")
    header: dict[str, Any] = {METADATA_NAME: _METADATA}
    position = 0
    for fqn, dtype, shape in ordered:
        path = f"tensor {fqn!r}"
        if fqn in header or fqn == OBJECTS_NAME:
            raise FormatError(f"payload: {path}: the name is reserved or appears twice")
        stop = position + tensor_bytes(dtype, expect_shape(list(shape), path), path)
        header[check_fqn(fqn, path)] = _entry(dtype, shape, position, stop)
        position = stop
    stop = position + objects_capacity_bytes
    header[OBJECTS_NAME] = _entry("U8", (objects_capacity_bytes,), position, stop)
    text = dumps_canonical(header)
    text += b" " * (-(LENGTH_BYTES + len(text)) % _WRITTEN_ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(f"payload: header of {len(text)} bytes, at most {MAX_HEADER_BYTES}")
    head = _LENGTH.pack(len(text)) + text
    return parse_payload(head, len(head) + stop)


def header_bytes(head: bytes | bytearray | memoryview, payload_bytes: int) -> int:
    """Return the length of the header, from the payload's first 8 bytes. Raises FormatError.

    The result includes the 8 bytes of the length field.
    """
    if len(head) < LENGTH_BYTES:
        raise FormatError(f"payload: {len(head)} bytes are too few for a safetensors header")
    (length,) = _LENGTH.unpack_from(head)
    if length > MAX_HEADER_BYTES or LENGTH_BYTES + length > payload_bytes:
        raise FormatError(
            f"payload: header of {length} bytes in a payload of {payload_bytes}, "
            f"at most {MAX_HEADER_BYTES} are accepted"
        )
    return LENGTH_BYTES + int(length)


def parse_payload(head: bytes, payload_bytes: int) -> PayloadPlan:
    """Parse the header at the start of `head`, which may be longer than the header.

    Raises FormatError for anything that is not a payload of Holdfast, also for other safetensors files.
    """
    size = header_bytes(head, payload_bytes)
    if len(head) < size:
        raise FormatError(f"payload: {len(head)} bytes of a header of {size}")
    if size % ALIGNMENT_BYTES:
        raise FormatError(f"payload: data starts at {size}, expected a multiple of 64")
    root = expect_map(
        loads_strict(head[LENGTH_BYTES:size], "payload header", limit_bytes=MAX_HEADER_BYTES),
        "payload header",
    )
    if root.get(METADATA_NAME) != _METADATA:
        raise FormatError(f"payload header.{METADATA_NAME}: expected {_METADATA}")
    tensors = sorted(
        (_tensor(fqn, value, size) for fqn, value in root.items() if fqn != METADATA_NAME),
        key=lambda t: (t.byte_range.start, t.byte_range.stop, t.fqn == OBJECTS_NAME),
    )
    position = size
    for tensor in tensors:
        if tensor.byte_range.start != position:
            raise FormatError(
                f"payload header: {tensor.fqn[:200]!r} starts at {tensor.byte_range.start}, "
                f"expected {position} (no gaps, no overlaps)"
            )
        position = tensor.byte_range.stop
    if position != payload_bytes:
        raise FormatError(f"payload: tensors end at {position} of {payload_bytes} bytes")
    if not tensors or tensors[-1].fqn != OBJECTS_NAME or tensors[-1].dtype != "U8":
        raise FormatError(f"payload header: the last tensor is not {OBJECTS_NAME} of U8")
    return PayloadPlan(
        header=bytes(head[:size]),
        tensors=tuple(tensors[:-1]),
        objects=tensors[-1].byte_range,
        total_bytes=payload_bytes,
    )


def pack_objects(value: Any, capacity_bytes: int) -> bytes:
    """Encode the state that is not a tensor as canonical JSON, padded to the capacity.

    Raises FormatError if JSON cannot represent it or it exceeds the capacity.
    """
    text = dumps_canonical(value)
    if len(text) > capacity_bytes:
        raise FormatError(
            f"objects: {len(text)} bytes of JSON in a capacity of {capacity_bytes}: "
            "plan the payload again with more"
        )
    return text + b" " * (capacity_bytes - len(text))


def unpack_objects(data: bytes) -> Any:
    """Parse the bytes that `pack_objects` returned. Raises FormatError."""
    return loads_strict(data, "objects", limit_bytes=max(len(data), 1))


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _tensor(fqn: str, value: Any, data_start: int) -> PayloadTensor:
    path = f"payload header[{fqn[:200]!r}]"
    entry = expect_object(value, path, _FIELDS)
    dtype = expect_text(entry["dtype"], f"{path}.dtype", limit=40)
    shape = expect_shape(expect_list(entry["shape"], path, limit=64), f"{path}.shape")
    found = expect_range(entry["data_offsets"], f"{path}.data_offsets")
    expected = tensor_bytes(dtype, shape, path)
    if found.length_bytes != expected or found.stop > MAX_TENSOR_BYTES:
        raise FormatError(
            f"{path}.data_offsets: {found.length_bytes} bytes, expected {expected} for "
            f"{dtype} {list(shape)}"
        )
    return PayloadTensor(
        check_fqn(fqn, path),
        dtype,
        shape,
        ByteRange(data_start + found.start, data_start + found.stop),
    )
