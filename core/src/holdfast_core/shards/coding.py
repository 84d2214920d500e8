"""Compression of single chunks: byte planes, each stored as a zstd frame or uncompressed. Pure.

A chunk of elements of `width` bytes is split: plane i holds byte i of every element, in order, so that
the exponents of floats lie together. With width 1 the only plane is the chunk. The stored form is

    for each plane, its stored length as little-endian u32
    for each plane, a zstd frame that states its content size, or the plane itself if the stored length
    equals the plane's length

A chunk that would not become shorter is stored unchanged with width PLAIN. Each chunk is coded on its
own, so that a run of chunks is a range of the object. The decoder does not trust its input: the
decoded length is known before decoding, and the caller verifies the bytes with the chunk table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import zstandard

from holdfast_core.errors import CorruptionError
from holdfast_core.format.rank_layout import RankLayout, element_bytes
from holdfast_core.shards.file import MAX_CHUNK_BYTES, ShardHeader, chunk_count
from holdfast_core.shards.pack import PLAIN, PLANE_LENGTH_BYTES, WIDTHS

LEVEL = 1
"""zstd level. Level 3 is slower and does not compress planes of floats better."""


class ChunkEncoder:
    """Compressor of chunks. Not thread-safe."""

    def __init__(self) -> None:
        self._frames = zstandard.ZstdCompressor(level=LEVEL)

    def encode(self, chunk: bytes, width: int) -> bytes | None:
        """Return the stored form of `chunk`, or None if it is not shorter than the chunk.

        `width` is one of WIDTHS.
        """
        stored = []
        for number in range(width):
            # A strided slice of bytes is seven times faster than one of a memoryview.
            plane = chunk[number::width]
            frame = self._frames.compress(plane)
            stored.append(frame if len(frame) < len(plane) else plane)
        lengths = struct.pack(f"<{width}I", *map(len, stored))
        coded = b"".join((lengths, *stored))
        return coded if len(coded) < len(chunk) else None


class ChunkDecoder:
    """Decompressor of chunks. Not thread-safe."""

    def __init__(self) -> None:
        self._frames = zstandard.ZstdDecompressor(max_window_size=MAX_CHUNK_BYTES)

    def decode(self, stored: memoryview, width: int, place: memoryview) -> None:
        """Decode a chunk into `place`, which has the chunk's length.

        A frame that states another content size is not decoded. The decoded bytes are not verified.

        Raises:
            CorruptionError: `stored` is not the stored form of a chunk of this length and width.
        """
        if width == PLAIN:
            if len(stored) != len(place):
                raise CorruptionError(
                    f"{len(stored)} uncompressed bytes are stored, expected {len(place)}"
                )
            place[:] = stored
            return
        start = width * PLANE_LENGTH_BYTES
        if len(stored) < start:
            raise CorruptionError(
                f"{len(stored)} bytes are stored, less than the sum of the planes"
            )
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
            frame = zstandard.get_frame_parameters(stored)
            if frame.content_size != plane_bytes or frame.dict_id:
                raise CorruptionError(
                    f"a frame of {frame.content_size} bytes with dictionary {frame.dict_id}, expected "
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


def chunk_widths(layout: RankLayout, header: ShardHeader) -> bytes:
    """Return a width for each chunk of a rank's payload: the element size of most of its bytes.

    Bytes outside of tensors count as one-byte elements. The choice is the writer's alone; readers take
    the widths from the pack's index.
    """
    size, count = header.chunk_bytes, chunk_count(header)
    held = {width: [0] * count for width in WIDTHS}
    for fqn, item in layout.tensors.items():
        width = element_bytes(item.dtype, fqn)
        start, stop = item.byte_range
        for chunk in range(start // size, min(count, -(-stop // size))):
            found = min(stop, (chunk + 1) * size) - max(start, chunk * size)
            held[width][chunk] += found
    for chunk in range(count):
        length = min(size, header.payload_bytes - chunk * size)
        held[1][chunk] = length - sum(held[width][chunk] for width in WIDTHS[1:])
    return bytes(_most([held[width][chunk] for width in WIDTHS]) for chunk in range(count))


def _most(held: Sequence[int]) -> int:
    return WIDTHS[max(range(len(WIDTHS)), key=lambda place: held[place])]
