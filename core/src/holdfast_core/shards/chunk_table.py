"""The chunk table of a shard: what each chunk of its payload must be. Pure.

A CRC32C each, for reads and for checksums that object stores understand, and a BLAKE3 each, whose
equality means equal bytes: a chunk may be taken from whoever has one with its digest. The digest of
the whole payload is made of them, so that chunks can be read and verified in any order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

from holdfast_core.errors import FormatError
from holdfast_core.format.digest import digest_of
from holdfast_core.ids import Digest

DIGEST_BYTES = 32
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChunkTable:
    crcs: tuple[int, ...]
    digests: bytes
    """DIGEST_BYTES for each chunk."""

    def __len__(self) -> int:
        return len(self.crcs)

    def payload_digest(self) -> Digest:
        """BLAKE3 of the digests of all chunks."""
        return digest_of(self.digests)

    def digest(self, chunk: int) -> bytes:
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def pack(self) -> bytes:
        """u32 little-endian CRCs, then the digests."""
        return struct.pack(f"<{len(self.crcs)}I", *self.crcs) + self.digests

    @classmethod
    def unpack(cls, data: bytes, count: int) -> Self:
        """Raises FormatError unless `data` is as long as such a table is."""
        if len(data) != table_bytes(count):
            raise FormatError(
                f"chunk table: {len(data)} bytes, expected {table_bytes(count)} for {count} chunks"
            )
        split = _CRC_BYTES * count
        return cls(struct.unpack(f"<{count}I", data[:split]), data[split:])


def table_bytes(count: int) -> int:
    """Length in bytes of the packed table of `count` chunks."""
    return count * (_CRC_BYTES + DIGEST_BYTES)
