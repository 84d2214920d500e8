"""Which bytes of a shard file go up as which part, and the CRC32C of each, without a second pass.

The chunk table already holds the CRC32C of every payload chunk, computed when the tensors were
first read. Combined, they are the checksum that the store must find: a bit that flipped on the
node's disk since then is refused by the store instead of being blessed by a fresh checksum.
Knows no store and no network.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from holdfast_core.errors import CorruptionError
from holdfast_core.format.digest import combine, crc32c
from holdfast_core.format.shard import head_bytes
from holdfast_core.ids import ByteRange
from holdfast_core.tiers.base import ShardReader

MIN_PART_BYTES = 5 << 20
MAX_PARTS = 10_000
_MIB = 1 << 20
_POLYNOMIAL = 0x82F63B78
"""CRC32C, bits reflected."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a multipart upload; all but the last are equally long (some stores insist)."""

    number: int
    """From 1."""
    span: ByteRange
    """Of the shard file."""
    crc32c: int


@dataclass(frozen=True, slots=True)
class PartPlan:
    """A whole shard file as parts."""

    parts: tuple[Part, ...]
    size_bytes: int
    crc32c: int
    """Of the whole file."""


def part_spans(size_bytes: int, part_bytes: int) -> tuple[ByteRange, ...]:
    """Cuts a file into parts of `part_bytes`, longer where 10,000 would not be enough."""
    least = -(-size_bytes // MAX_PARTS)
    if least > part_bytes:
        part_bytes = -(-least // _MIB) * _MIB
    starts = range(0, max(size_bytes, 1), part_bytes)
    return tuple(ByteRange(start, min(start + part_bytes, size_bytes)) for start in starts)


def plan_parts(reader: ShardReader, part_bytes: int) -> PartPlan:
    """Parts of an open shard with their checksums. Reads header and trailer, and those chunks that
    a part boundary cuts (verified). Raises CorruptionError."""
    sums = _FileChecksums(reader)
    size = reader.record.file_bytes
    parts: list[Part] = []
    whole = 0
    for number, span in enumerate(part_spans(size, part_bytes), start=1):
        crc = sums.of(span)
        whole = append_crc(whole, crc, span.length_bytes)
        parts.append(Part(number, span, crc))
    return PartPlan(tuple(parts), size, whole)


def append_crc(crc_a: int, crc_b: int, length_b: int) -> int:
    """CRC32C of A followed by B. Many calls with few lengths: the map of each is kept."""
    shifted = 0
    columns = _shift_map(length_b)
    while crc_a:
        low = crc_a & -crc_a
        shifted ^= columns[low.bit_length() - 1]
        crc_a ^= low
    return shifted ^ crc_b


@functools.lru_cache(maxsize=16)
def _shift_map(length_bytes: int) -> tuple[int, ...]:
    # The CRC of A moves linearly over GF(2) when bytes are appended: 32 columns say all. Bit 31 is
    # the polynomial 1, and each bit below is x times the one above it.
    columns = [combine(1 << 31, 0, length_bytes)]
    for _ in range(31):
        last = columns[-1]
        columns.append(last >> 1 ^ (_POLYNOMIAL if last & 1 else 0))
    return tuple(reversed(columns))


class _FileChecksums:
    """CRC32C of any range of the shard file."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        header = reader.record.header
        self._chunk_bytes = header.chunk_bytes
        start = head_bytes(header)
        self._payload = ByteRange(start, start + header.payload_bytes)

    def of(self, span: ByteRange) -> int:
        crc, position = 0, span.start
        while position < span.stop:
            piece_crc, length = self._piece(position, span.stop)
            crc = append_crc(crc, piece_crc, length)
            position += length
        return crc

    def _piece(self, start: int, limit: int) -> tuple[int, int]:
        """CRC and length of the longest piece from `start` that lies in one chunk, or outside of
        the payload."""
        payload = self._payload
        if start < payload.start:
            return self._plain(start, min(limit, payload.start))
        if start >= payload.stop:
            return self._plain(start, limit)
        index, within = divmod(start - payload.start, self._chunk_bytes)
        chunk = ByteRange(
            payload.start + index * self._chunk_bytes,
            min(payload.start + (index + 1) * self._chunk_bytes, payload.stop),
        )
        stop = min(chunk.stop, limit)
        if within == 0 and stop == chunk.stop:
            return self._reader.chunk_crcs[index], chunk.length_bytes
        # Cut by a part boundary: only verified bytes may get a checksum of their own.
        buffer = memoryview(bytearray(chunk.length_bytes))
        self._reader.read_payload_into(chunk.start - payload.start, buffer)
        return crc32c(buffer[within : stop - chunk.start]), stop - start

    def _plain(self, start: int, stop: int) -> tuple[int, int]:
        stop = min(stop, start + _MIB)
        data = os.pread(self._reader.fd, stop - start, start)
        if len(data) != stop - start:
            raise CorruptionError(
                f"shard file {self._reader.record.ref}: ends at byte {start + len(data)}, "
                f"expected {self._reader.record.file_bytes} bytes"
            )
        return crc32c(data), len(data)
