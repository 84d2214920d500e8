"""The layout of one rank: which slice of which tensor its payload holds, and where. The rank writes it.

The manifest names the layouts of all ranks by their digests. No document describes more than one rank.
Element types have their safetensors names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import (
    TypedDocument,
    decode_document,
    digest_of,
    encode_document,
)
from holdfast_core.ids import MAX_RANK, ByteRange, Digest, Rank

DTYPE_BYTES = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E5M2": 1,
        "F8_E4M3": 1,
        "F8_E8M0": 1,
        "I16": 2,
        "U16": 2,
        "F16": 2,
        "BF16": 2,
        "I32": 4,
        "U32": 4,
        "F32": 4,
        "I64": 8,
        "U64": 8,
        "F64": 8,
        "C64": 8,
    }
)

MAX_TENSOR_BYTES = 1 << 50


def element_bytes(dtype: str, path: str) -> int:
    """Return the size of one element in bytes. Raises FormatError for an unknown dtype."""
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise FormatError(f"{path}: dtype {dtype[:40]!r} is not one of {', '.join(DTYPE_BYTES)}")
    return size


def tensor_bytes(dtype: str, shape: Sequence[int], path: str) -> int:
    """Return the size of a dense tensor in bytes.

    Raises FormatError for an unknown dtype or a size above MAX_TENSOR_BYTES. The size is compared after
    each dimension, so that a shape such as 2^63 x 2^63 is refused early.
    """
    size = element_bytes(dtype, path)
    if 0 in shape:
        return 0
    for length in shape:
        size *= length
        if size > MAX_TENSOR_BYTES:
            raise FormatError(
                f"{path}: {dtype} {list(shape)} is more than {MAX_TENSOR_BYTES} bytes"
            )
    return size


FORMAT_VERSION = 1
MAX_FQN = 4096
MAX_DIMENSIONS = 64
MAX_DIMENSION = 1 << 50

_WHAT = "layout of a rank"
_RANK_LOCAL = re.compile(r"@rank(\d+)(~\d+)?\Z")
"""End of the name that the SDK gives to a tensor that belongs to one rank only."""


class TensorSlice(
    msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, rename="camel"
):
    """A box of a tensor: in each dimension of `shape`, `lengths` elements from `offsets` on."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    byte_range: ByteRange
    """Bytes of the box within the rank's payload."""


class _Place(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, rename="camel"):
    byte_range: ByteRange


class _StoredLayout(TypedDocument, frozen=True, tag=FORMAT_VERSION):
    rank: int
    tensors: dict[str, TensorSlice]
    objects: dict[str, _Place]
    payload_bytes: int


_DECODER = msgspec.json.Decoder(_StoredLayout)
_ENCODER = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class LayoutDigests:
    """What a rank's layout has in common with those of other ranks, without the layouts themselves.

    Tensors that belong to one rank only, and objects, count for `layout` alone.
    """

    layout: Digest
    """Digest of the document."""
    tensors: Digest
    """Digest of the names, dtypes and global shapes of the tensors."""
    boxes: Digest
    """Digest of the tensors with their boxes and byte ranges. Ranks that have it in common hold the same
    tensors at the same bytes of their payloads."""


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
        _check(self)
        return encode_document(
            _StoredLayout(
                rank=self.rank,
                tensors=self.tensors,
                objects={fqn: _Place(place) for fqn, place in self.objects.items()},
                payload_bytes=self.payload_bytes,
            ),
            f"layout of rank {self.rank} with {len(self.tensors)} tensors",
        )


def parse_rank_layout(document: bytes) -> RankLayout:
    """Parse a rank's layout document and check that its sizes and offsets fit each other.

    Raises FormatError with the path of the wrong value.
    """
    found = decode_document(_DECODER, document, _WHAT, FORMAT_VERSION)
    layout = RankLayout(
        Rank(found.rank),
        found.tensors,
        {fqn: place.byte_range for fqn, place in found.objects.items()},
        found.payload_bytes,
    )
    _check(layout)
    return layout


def layout_digests(document: bytes) -> LayoutDigests:
    """Return the digests of a layout document. Raises FormatError if it is not valid."""
    layout = parse_rank_layout(document)
    shared = {fqn: item for fqn, item in layout.tensors.items() if owner_of(fqn) is None}
    names = sorted((fqn, item.dtype, item.shape) for fqn, item in shared.items())
    # A rank without tensors of the gang has nothing in common with another one.
    boxes: object = shared or layout.rank
    return LayoutDigests(
        digest_of(document), digest_of(_ENCODER.encode(names)), digest_of(_ENCODER.encode(boxes))
    )


def owner_of(fqn: str) -> Rank | None:
    """Return the rank that a tensor belongs to, by its name. None if it belongs to the gang."""
    found = _RANK_LOCAL.search(fqn) if "@rank" in fqn else None
    return None if found is None else Rank(int(found[1]))


def check_fqn(fqn: str, path: str) -> str:
    if not 0 < len(fqn) <= MAX_FQN or "\0" in fqn:
        raise FormatError(f"{path}: a name has 1..{MAX_FQN} characters and no NUL")
    return fqn


def _check(layout: RankLayout) -> None:
    """Raise FormatError if fields of the layout contradict each other or are out of bounds."""
    if not 0 <= layout.rank <= MAX_RANK:
        raise FormatError(f"{_WHAT}.rank: {layout.rank} is not within 0..{MAX_RANK}")
    if not 0 <= layout.payload_bytes <= MAX_TENSOR_BYTES:
        raise FormatError(
            f"{_WHAT}.payloadBytes: {layout.payload_bytes} is not within 0..{MAX_TENSOR_BYTES}"
        )
    for names in (layout.tensors, layout.objects):
        for fqn in names:
            check_fqn(fqn, _WHAT)
    for fqn, item in layout.tensors.items():
        if (problem := _contradiction(item)) is not None:
            raise FormatError(f"{_WHAT}.tensors[{fqn[:200]!r}]{problem}")
    for fqn, (start, stop) in layout.objects.items():
        if not 0 <= start <= stop:
            raise FormatError(
                f"{_WHAT}.objects[{fqn[:200]!r}].byteRange: {[start, stop]} is not a byte range "
                "[start, stop)"
            )
    _check_ranges(layout)


def _contradiction(item: TensorSlice) -> str | None:
    """Return the path and the text of a contradiction between the fields of a slice."""
    size = element_bytes(item.dtype, f"{_WHAT}.dtype")
    shape, offsets, lengths = item.shape, item.offsets, item.lengths
    if not len(shape) == len(offsets) == len(lengths) <= MAX_DIMENSIONS:
        return f": shape, offsets and lengths differ in their dimensions, or have over {MAX_DIMENSIONS}"
    for axis, (whole, offset, length) in enumerate(zip(shape, offsets, lengths, strict=True)):
        if not 0 <= offset <= offset + length <= whole <= MAX_DIMENSION:
            return (
                f": axis {axis} has the range {offset}..{offset + length} of a dimension of {whole}, "
                f"at most {MAX_DIMENSION} is accepted"
            )
        size *= length
    start, stop = item.byte_range
    if not 0 <= start <= stop:
        return f".byteRange: {[start, stop]} is not a byte range [start, stop)"
    if stop - start != size or size > MAX_TENSOR_BYTES:
        return (
            f".byteRange: {stop - start} bytes, expected {size} for {item.dtype} {list(lengths)}, "
            f"at most {MAX_TENSOR_BYTES}"
        )
    return None


def _check_ranges(layout: RankLayout) -> None:
    """Raise FormatError if two ranges overlap or one does not lie within the payload.

    The ranges of tensors are exclusive. Objects may share one range.
    """
    end = 0
    ranges: Iterable[ByteRange] = (item.byte_range for item in layout.tensors.values())
    for start, stop in sorted([*ranges, *set(layout.objects.values())]):
        if start == stop:
            continue
        if start < end:
            raise FormatError(f"{_WHAT}: byte ranges overlap at {start}")
        end = stop
    if end > layout.payload_bytes:
        raise FormatError(
            f"{_WHAT}: byte range ends at {end} of a payload of {layout.payload_bytes}"
        )
