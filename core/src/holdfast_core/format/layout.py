"""The layout of a whole checkpoint: which rank's shard holds which slice of which tensor.

`merge_layouts` builds it from the ranks' layouts and is deterministic, so that every coordinator writes
the same bytes. Manifests name a layout by its BLAKE3: checkpoints with the same structure share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import dumps_canonical, loads_canonical
from holdfast_core.format.checks import (
    expect_digest,
    expect_document,
    expect_int,
    expect_list,
    expect_map,
    expect_object,
    expect_range,
    expect_text,
)
from holdfast_core.format.digest import digest_of
from holdfast_core.format.dtypes import MAX_TENSOR_BYTES, element_bytes, tensor_bytes
from holdfast_core.format.manifest import MAX_SHARDS
from holdfast_core.format.rank_layout import (
    RankLayout,
    TensorSlice,
    check_fqn,
    expect_shape,
    parse_rank_layout,
)
from holdfast_core.ids import ByteRange, Digest, Rank

FORMAT_VERSION = 1

_FIELDS = frozenset({"formatVersion", "ranks", "tensors", "objects"})
_RANK_FIELDS = frozenset({"layout", "payloadBytes"})
_TENSOR_FIELDS = frozenset({"dtype", "shape", "slices"})
_SLICE_FIELDS = frozenset({"rank", "offsets", "lengths", "byteRange"})
_OBJECT_FIELDS = frozenset({"rank", "byteRange"})


@dataclass(frozen=True, slots=True)
class RankPart:
    """Entry of one rank in the layout."""

    layout: Digest
    """Digest of the rank's own layout document, which the headers of its shards contain."""
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class PlacedSlice:
    """A box of a tensor, and the byte range of one rank's payload that holds it."""

    rank: Rank
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    byte_range: ByteRange


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A global tensor. Slices are in order of rank; those of a replicated tensor are equal boxes."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[PlacedSlice, ...]


@dataclass(frozen=True, slots=True)
class PlacedObject:
    """The byte range of one rank's payload that holds an object."""

    rank: Rank
    byte_range: ByteRange


@dataclass(frozen=True, slots=True)
class Layout:
    """The layouts of all ranks. `ranks` is indexed by rank."""

    ranks: tuple[RankPart, ...]
    tensors: dict[str, TensorLayout]
    objects: dict[str, tuple[PlacedObject, ...]]
    """By name, the places of the object in all ranks that hold it, in order of rank."""

    def to_bytes(self) -> bytes:
        """Return the canonical document. Raises FormatError if `parse_layout` would refuse it."""
        data = dumps_canonical(
            {
                "formatVersion": FORMAT_VERSION,
                "ranks": [
                    {"layout": part.layout, "payloadBytes": part.payload_bytes}
                    for part in self.ranks
                ],
                "tensors": {fqn: _tensor_json(tensor) for fqn, tensor in self.tensors.items()},
                "objects": {
                    fqn: [
                        {"rank": place.rank, "byteRange": range_json(place.byte_range)}
                        for place in places
                    ]
                    for fqn, places in self.objects.items()
                },
            }
        )
        parse_layout(data)
        return data


def merge_layouts(documents: Iterable[bytes]) -> Layout:
    """Merge the layout documents of all ranks, which may be in any order.

    Raises FormatError if a document is not valid, a rank is missing or occurs twice, or two ranks have
    different dtypes or shapes of a tensor.
    """
    parsed: dict[Rank, tuple[Digest, RankLayout]] = {}
    for document in documents:
        layout = parse_rank_layout(document)
        if layout.rank in parsed:
            raise FormatError(f"layout: rank {layout.rank} appears twice")
        parsed[layout.rank] = (digest_of(document), layout)
    if sorted(parsed) != list(range(len(parsed))):
        raise FormatError(f"layout: ranks {sorted(parsed)[:10]} are not 0..{len(parsed) - 1}")
    shapes: dict[str, TensorSlice] = {}
    slices: dict[str, list[PlacedSlice]] = {}
    objects: dict[str, list[PlacedObject]] = {}
    for rank in sorted(parsed):
        for fqn, item in parsed[rank][1].tensors.items():
            first = shapes.setdefault(fqn, item)
            if (first.dtype, first.shape) != (item.dtype, item.shape):
                raise FormatError(
                    f"layout: tensor {fqn!r} is {item.dtype} {list(item.shape)} on rank {rank}, "
                    f"but {first.dtype} {list(first.shape)} on an earlier rank"
                )
            placed = PlacedSlice(rank, item.offsets, item.lengths, item.byte_range)
            slices.setdefault(fqn, []).append(placed)
        for fqn, place in parsed[rank][1].objects.items():
            objects.setdefault(fqn, []).append(PlacedObject(rank, place))
    return Layout(
        ranks=tuple(
            RankPart(digest, layout.payload_bytes)
            for digest, layout in (parsed[rank] for rank in sorted(parsed))
        ),
        tensors={
            fqn: TensorLayout(first.dtype, first.shape, tuple(slices[fqn]))
            for fqn, first in shapes.items()
        },
        objects={fqn: tuple(places) for fqn, places in objects.items()},
    )


def rank_layout_of(layout: Layout, rank: Rank) -> RankLayout:
    """Return the layout of one rank, whose document has the digest in `layout.ranks[rank]`."""
    return RankLayout(
        rank=rank,
        tensors={
            fqn: TensorSlice(
                tensor.dtype, tensor.shape, item.offsets, item.lengths, item.byte_range
            )
            for fqn, tensor in layout.tensors.items()
            for item in tensor.slices
            if item.rank == rank
        },
        objects={
            fqn: place.byte_range
            for fqn, places in layout.objects.items()
            for place in places
            if place.rank == rank
        },
        payload_bytes=layout.ranks[rank].payload_bytes,
    )


def parse_layout(document: bytes) -> Layout:
    """Parse a layout document and check that its sizes and offsets fit each other.

    Raises FormatError with the path of the wrong value.
    """
    what = "layout"
    root = expect_document(loads_canonical(document, what), what, _FIELDS, version=FORMAT_VERSION)
    ranks = tuple(
        _rank_part(value, f"{what}.ranks[{index}]")
        for index, value in enumerate(expect_list(root["ranks"], f"{what}.ranks", limit=MAX_SHARDS))
    )
    if not ranks:
        raise FormatError(f"{what}.ranks: empty, expected one entry per rank")
    tensors = {
        check_fqn(fqn, f"{what}.tensors"): _tensor(
            value, f"{what}.tensors[{fqn[:200]!r}]", len(ranks)
        )
        for fqn, value in expect_map(root["tensors"], f"{what}.tensors").items()
    }
    objects = {
        check_fqn(fqn, f"{what}.objects"): _objects(
            value, f"{what}.objects[{fqn[:200]!r}]", len(ranks)
        )
        for fqn, value in expect_map(root["objects"], f"{what}.objects").items()
    }
    layout = Layout(ranks, tensors, objects)
    _check_payloads(layout)
    return layout


def _check_payloads(layout: Layout) -> None:
    tensors: list[list[ByteRange]] = [[] for _ in layout.ranks]
    objects: list[set[ByteRange]] = [set() for _ in layout.ranks]
    for tensor in layout.tensors.values():
        for item in tensor.slices:
            tensors[item.rank].append(item.byte_range)
    for places in layout.objects.values():
        for place in places:
            objects[place.rank].add(place.byte_range)
    for rank, part in enumerate(layout.ranks):
        check_ranges(tensors[rank], objects[rank], part.payload_bytes, f"layout of rank {rank}")


def _rank_part(value: Any, path: str) -> RankPart:
    entry = expect_object(value, path, _RANK_FIELDS)
    return RankPart(
        layout=expect_digest(entry["layout"], f"{path}.layout"),
        payload_bytes=expect_int(
            entry["payloadBytes"], f"{path}.payloadBytes", high=MAX_TENSOR_BYTES
        ),
    )


def _tensor(value: Any, path: str, world_size: int) -> TensorLayout:
    entry = expect_object(value, path, _TENSOR_FIELDS)
    dtype = expect_text(entry["dtype"], f"{path}.dtype", limit=40)
    element_bytes(dtype, f"{path}.dtype")
    shape = expect_shape(entry["shape"], f"{path}.shape")
    slices: list[PlacedSlice] = []
    items = expect_list(entry["slices"], f"{path}.slices", limit=MAX_SHARDS)
    for index, item in enumerate(items):
        where = f"{path}.slices[{index}]"
        fields = expect_object(item, where, _SLICE_FIELDS)
        rank = _rank(fields["rank"], where, world_size, slices[-1].rank if slices else None)
        checked = check_slice(
            TensorSlice(
                dtype=dtype,
                shape=shape,
                offsets=expect_shape(fields["offsets"], f"{where}.offsets"),
                lengths=expect_shape(fields["lengths"], f"{where}.lengths"),
                byte_range=expect_range(fields["byteRange"], f"{where}.byteRange"),
            ),
            where,
        )
        slices.append(PlacedSlice(rank, checked.offsets, checked.lengths, checked.byte_range))
    return TensorLayout(dtype, shape, tuple(slices))


def _objects(value: Any, path: str, world_size: int) -> tuple[PlacedObject, ...]:
    places: list[PlacedObject] = []
    for index, item in enumerate(expect_list(value, path, limit=MAX_SHARDS)):
        where = f"{path}[{index}]"
        fields = expect_object(item, where, _OBJECT_FIELDS)
        rank = _rank(fields["rank"], where, world_size, places[-1].rank if places else None)
        places.append(PlacedObject(rank, expect_range(fields["byteRange"], f"{where}.byteRange")))
    return tuple(places)


def _rank(value: Any, path: str, world_size: int, before: Rank | None) -> Rank:
    rank = Rank(expect_int(value, f"{path}.rank", high=world_size - 1))
    if before is not None and rank <= before:
        raise FormatError(f"{path}.rank: {rank} after {before}, expected ranks in order, once")
    return rank


def _tensor_json(tensor: TensorLayout) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "slices": [
            {
                "rank": item.rank,
                **slice_json(
                    TensorSlice(
                        tensor.dtype, tensor.shape, item.offsets, item.lengths, item.byte_range
                    )
                ),
            }
            for item in tensor.slices
        ],
    }


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
