"""How a chunk is stored compressed: its byte planes, each a zstd frame or as it is. Pure.

Elements of `width` bytes are taken apart: plane i holds byte i of every element, in order, so that
exponents stand beside exponents; with width 1 there is one plane, the chunk. What is stored:

    u32 a plane, little-endian: its stored length
    the planes: a zstd frame that says its content's length, or, where the stored length is the
    plane's own, the plane as it is

A chunk that would not become shorter is stored as it is: its width is PLAIN. Each chunk stands
alone, so that a run of chunks is a range of the object. Nothing here believes what it decodes: how
much comes out is known before a byte is decoded, and whoever asks compares with the chunk table.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import zstandard

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.dtypes import element_bytes
from holdfast_core.format.layout import Layout
from holdfast_core.ids import Rank
from holdfast_core.shards.file import MAX_CHUNK_BYTES, chunk_count
from holdfast_core.shards.record import ShardHeader

PLAIN = 0
WIDTHS = (1, 2, 4, 8)
LEVEL = 1
"""Of zstd. Level 3 gains nothing on planes of floats, and is slower."""
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Coding:
    """How chunks in a row are stored."""

    starts: array[int]
    """Unsigned 64 bit, one a chunk and one more: where each begins in the object, counted from
    anywhere, and where the last ends. A chunk that is stored elsewhere has no bytes."""
    widths: bytes
    """One a chunk: PLAIN, or one of WIDTHS."""

    @classmethod
    def of(cls, lengths: Iterable[int], widths: bytes) -> Self:
        """By the stored bytes of each chunk."""
        return cls(array("Q", accumulate(lengths, initial=0)), widths)

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.starts)]

    def cut(self, start: int, stop: int) -> Coding:
        """Of the chunks at these positions."""
        return Coding(self.starts[start : stop + 1], self.widths[start:stop])

    def stored_bytes(self, start: int, stop: int) -> int:
        """Of the chunks at these positions."""
        return self.starts[stop] - self.starts[start]


def check_stored(length: int, width: int, chunk_bytes: int) -> None:
    """A chunk of so many bytes can be stored so. Raises FormatError."""
    if width == PLAIN:
        possible = length == chunk_bytes
    else:
        possible = width in WIDTHS and width * _LENGTH_BYTES <= length < chunk_bytes
    if not possible:
        raise FormatError(
            f"a chunk of {chunk_bytes} bytes with width {width} stored in {length} bytes"
        )


class ChunkEncoder:
    """Compresses chunks, one after the other. One thread at a time."""

    def __init__(self) -> None:
        self._frames = zstandard.ZstdCompressor(level=LEVEL)

    def encode(self, chunk: bytes, width: int) -> bytes | None:
        """What is stored; None where that would not be shorter than the chunk."""
        stored = []
        for number in range(width):
            # Slices of bytes with a step are copied by a loop in C; those of a memoryview are seven
            # times slower.
            plane = chunk[number::width]
            frame = self._frames.compress(plane)
            stored.append(frame if len(frame) < len(plane) else plane)
        lengths = struct.pack(f"<{width}I", *map(len, stored))
        coded = b"".join((lengths, *stored))
        return coded if len(coded) < len(chunk) else None


class ChunkDecoder:
    """The reverse. One thread at a time."""

    def __init__(self) -> None:
        self._frames = zstandard.ZstdDecompressor(max_window_size=MAX_CHUNK_BYTES)

    def decode(self, stored: memoryview, width: int, place: memoryview) -> None:
        """Fills `place`, which is as long as the chunk, and nothing else: a frame that says another
        length is not decoded. Raises CorruptionError. The bytes are not verified."""
        if width == PLAIN:
            if len(stored) != len(place):
                raise CorruptionError(f"{len(stored)} bytes stored of {len(place)}, as they are")
            place[:] = stored
            return
        start = width * _LENGTH_BYTES
        if len(stored) < start:
            raise CorruptionError(f"{len(stored)} bytes stored, less than the lengths of planes")
        lengths = struct.unpack_from(f"<{width}I", stored)
        if start + sum(lengths) != len(stored):
            raise CorruptionError(f"planes of {lengths} bytes in {len(stored)} stored ones")
        whole = bytearray(len(place))
        for number, length in enumerate(lengths):
            plane_bytes = -(-(len(place) - number) // width)
            whole[number::width] = self._plane(stored[start : start + length], plane_bytes)
            start += length
        place[:] = whole

    def _plane(self, stored: memoryview, plane_bytes: int) -> bytes | memoryview:
        if len(stored) == plane_bytes:
            return stored
        try:
            said = zstandard.get_frame_parameters(stored)
            if said.content_size != plane_bytes or said.dict_id:
                raise CorruptionError(
                    f"a frame of {said.content_size} bytes with dictionary {said.dict_id}, expected "
                    f"{plane_bytes} without one"
                )
            plane = self._frames.decompress(
                stored, max_output_size=plane_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise CorruptionError(f"a plane of {plane_bytes} bytes: {error}") from error
        if len(plane) != plane_bytes:
            raise CorruptionError(f"a plane of {len(plane)} bytes, expected {plane_bytes}")
        return plane


def chunk_widths(layout: Layout, rank: Rank, header: ShardHeader) -> bytes:
    """The width for each chunk of a rank's payload: the element size that most of its bytes have.
    Bytes of no tensor count as elements of one byte. The writer's choice: the index says it."""
    size, count = header.chunk_bytes, chunk_count(header)
    held = {width: [0] * count for width in WIDTHS}
    for fqn, tensor in layout.tensors.items():
        width = element_bytes(tensor.dtype, fqn)
        for item in tensor.slices:
            if item.rank != rank:
                continue
            start, stop = item.byte_range.start, item.byte_range.stop
            for chunk in range(start // size, min(count, -(-stop // size))):
                found = min(stop, (chunk + 1) * size) - max(start, chunk * size)
                held[width][chunk] += found
    for chunk in range(count):
        length = min(size, header.payload_bytes - chunk * size)
        held[1][chunk] = length - sum(held[width][chunk] for width in WIDTHS[1:])
    return bytes(_most([held[width][chunk] for width in WIDTHS]) for chunk in range(count))


def _most(held: Sequence[int]) -> int:
    return WIDTHS[max(range(len(WIDTHS)), key=lambda place: held[place])]
