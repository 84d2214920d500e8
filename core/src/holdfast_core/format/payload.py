"""Plans and parses the header of a payload. A payload is a complete safetensors file. Pure.

It consists of the header length as little-endian u64, the JSON header, padded with spaces so that the
data starts on a block boundary, the tensors, and a last uint8 tensor `__holdfast_objects__`. That one is
the canonical JSON of all state that is not a tensor, padded with spaces to its capacity. The module
needs neither torch nor numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import msgspec

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import loads_strict
from holdfast_core.format.rank_layout import (
    MAX_DIMENSION,
    MAX_DIMENSIONS,
    MAX_TENSOR_BYTES,
    check_fqn,
    element_bytes,
    tensor_bytes,
)
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


class _Entry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A tensor as the header describes it. `data_offsets` counts from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: ByteRange


_TEXTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_ENCODER = msgspec.json.Encoder(order="sorted")


class PayloadTensor(msgspec.Struct, frozen=True, gc=False):
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
    entries: dict[str, _Entry] = {}
    position = 0
    for fqn, dtype, shape in ordered:
        path = f"tensor {fqn!r}"
        if fqn in entries or fqn in (OBJECTS_NAME, METADATA_NAME):
            raise FormatError(f"payload: {path}: the name is reserved or appears twice")
        stop = position + _stored_bytes(dtype, shape, path)
        entries[check_fqn(fqn, path)] = _Entry(dtype, shape, ByteRange(position, stop))
        position = stop
    stop = position + objects_capacity_bytes
    entries[OBJECTS_NAME] = _Entry("U8", (objects_capacity_bytes,), ByteRange(position, stop))
    text = _encode(entries)
    text += b" " * (-(LENGTH_BYTES + len(text)) % _WRITTEN_ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(f"payload: header of {len(text)} bytes, at most {MAX_HEADER_BYTES}")
    head = _LENGTH.pack(len(text)) + text
    return _plan(head, entries, len(head) + stop)


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
    try:
        texts = _TEXTS.decode(head[LENGTH_BYTES:size])
    except (UnicodeError, msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"payload header: {error}") from error
    if bytes(texts.pop(METADATA_NAME, b"")) != _ENCODER.encode(_METADATA):
        raise FormatError(f"payload header.{METADATA_NAME}: expected {_METADATA}")
    entries = _entries(texts)
    if _encode(entries) != head[LENGTH_BYTES:size].rstrip(b" "):
        raise FormatError(
            "payload header: not in canonical form (sorted keys, no whitespace, no duplicate keys)"
        )
    return _plan(head[:size], entries, payload_bytes)


def unpack_objects(data: bytes) -> Any:
    """Parse the canonical JSON of a payload's objects, padded with spaces. Raises FormatError."""
    return loads_strict(data, "objects", limit_bytes=max(len(data), 1))


def _entries(texts: Mapping[str, msgspec.Raw]) -> dict[str, _Entry]:
    """Parse the entries of all tensors. Raises FormatError that names the tensor of a bad entry."""
    try:
        entries = _ENTRIES.decode(msgspec.json.encode(texts))
    except (UnicodeError, msgspec.MsgspecError, RecursionError):
        entries = {fqn: _entry(fqn, text) for fqn, text in texts.items()}
    # Thousands of tensors have few different shapes.
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for fqn, entry in entries.items():
        dtype, shape, (start, stop) = entry.dtype, entry.shape, entry.data_offsets
        size = sizes.get((dtype, shape))
        if size is None:
            size = sizes[dtype, shape] = _stored_bytes(dtype, shape, _path(fqn))
        if not 0 <= start <= stop <= MAX_TENSOR_BYTES or stop - start != size:
            raise FormatError(
                f"{_path(fqn)}.data_offsets: {[start, stop]} is not a byte range [start, stop) of "
                f"{size} bytes for {dtype} {list(shape)}"
            )
        check_fqn(fqn, "payload header")
    return entries


def _entry(fqn: str, text: msgspec.Raw) -> _Entry:
    try:
        return _ENTRY.decode(text)
    except (UnicodeError, msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{_path(fqn)}: {error}") from error


def _path(fqn: str) -> str:
    return f"payload header[{fqn[:200]!r}]"


def _encode(entries: Mapping[str, _Entry]) -> bytes:
    # msgspec's own sort of very many names takes seconds for some orders.
    items = sorted([*entries.items(), (METADATA_NAME, _METADATA)], key=itemgetter(0))
    try:
        return _ENCODER.encode(dict(items))
    except (UnicodeError, msgspec.MsgspecError) as error:
        raise FormatError(f"payload header: cannot be written: {error}") from error


def _plan(head: bytes, entries: Mapping[str, _Entry], total_bytes: int) -> PayloadPlan:
    """Return the plan of a header. Raises FormatError if its ranges do not fill the payload."""
    base = len(head)
    tensors = [
        PayloadTensor(fqn, entry.dtype, entry.shape, ByteRange(base + start, base + stop))
        for fqn, entry in sorted(entries.items(), key=itemgetter(0))
        for start, stop in (entry.data_offsets,)
    ]
    # Empty tensors that start at the same byte stay in the order of their names, before the objects.
    tensors.sort(key=lambda tensor: (tensor.byte_range, tensor.fqn == OBJECTS_NAME))
    position = base
    for tensor in tensors:
        if tensor.byte_range.start != position:
            raise FormatError(
                f"payload header: {tensor.fqn[:200]!r} starts at {tensor.byte_range.start}, "
                f"expected {position} (no gaps, no overlaps)"
            )
        position = tensor.byte_range.stop
    if position != total_bytes:
        raise FormatError(f"payload: tensors end at {position} of {total_bytes} bytes")
    if not tensors or tensors[-1].fqn != OBJECTS_NAME or tensors[-1].dtype != "U8":
        raise FormatError(f"payload header: the last tensor is not {OBJECTS_NAME} of U8")
    return PayloadPlan(head, tuple(tensors[:-1]), tensors[-1].byte_range, total_bytes)


def _stored_bytes(dtype: str, shape: Sequence[int], path: str) -> int:
    """Return the bytes of a tensor. Raises FormatError if its shape or size is out of bounds."""
    if len(shape) > MAX_DIMENSIONS or not all(0 <= length <= MAX_DIMENSION for length in shape):
        raise FormatError(
            f"{path}: {list(shape)[:70]} has over {MAX_DIMENSIONS} dimensions, or one of them is not "
            f"within 0..{MAX_DIMENSION}"
        )
    return tensor_bytes(dtype, shape, path)
