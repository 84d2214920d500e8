"""The chunk table of a shard: a CRC32C and a BLAKE3 for each chunk of its payload. Pure.

Reads from the node's disk are verified by the CRCs, and the checksums of uploads are combined from them.
Equal BLAKE3 digests mean equal bytes, so a chunk may be taken from any shard that has one with its
digest. The payload's digest is the BLAKE3 of the chunks' digests, so that chunks can be verified in any
order.
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
    """Checksums of the chunks of one payload, in order."""

    crcs: tuple[int, ...]
    digests: bytes
    """BLAKE3 of each chunk, DIGEST_BYTES each, concatenated."""

    def __len__(self) -> int:
        return len(self.crcs)

    def payload_digest(self) -> Digest:
        """Return the digest of the payload, which is the BLAKE3 of the digests of all chunks."""
        return digest_of(self.digests)

    def digest(self, chunk: int) -> bytes:
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def pack(self) -> bytes:
        """Return the table as bytes: the CRCs as little-endian u32, then the digests."""
        return struct.pack(f"<{len(self.crcs)}I", *self.crcs) + self.digests

    @classmethod
    def unpack(cls, data: bytes, count: int) -> Self:
        """Parse a packed table of `count` chunks. Raises FormatError if the length is wrong."""
        if len(data) != table_bytes(count):
            raise FormatError(
                f"chunk table: {len(data)} bytes, expected {table_bytes(count)} for {count} chunks"
            )
        split = _CRC_BYTES * count
        return cls(struct.unpack(f"<{count}I", data[:split]), data[split:])


def table_bytes(count: int) -> int:
    """Return the length in bytes of the packed table of `count` chunks."""
    return count * (_CRC_BYTES + DIGEST_BYTES)
