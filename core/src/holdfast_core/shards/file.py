"""The shard file, and the record of a shard: its identity and the digests of its payload. Pure.

The chunk table has a CRC32C and a BLAKE3 for each chunk of the payload. Reads from the node's disk are
verified by the CRCs, and the checksums of uploads are combined from them. Equal BLAKE3 digests mean equal
bytes, so a chunk may be taken from any shard that has one with its digest. The payload's digest is the
BLAKE3 of the chunks' digests, so that chunks can be verified in any order.

A checkpoint exists when its manifest is durable. There is no pointer to the latest checkpoint.

The shard file has a head, a payload and a trailer, each a whole number of 4 KiB blocks:

    head     magic HFSHARD1, u32 length, u32 CRC32C, canonical JSON of the identity, zeros
    payload  padded with zeros
    trailer  magic HFTRAIL1, u32 length, u32 count, JSON {blake3, chunkTable, header}, chunk table,
             zeros, footer of 32 bytes at the very end

Integers are little-endian. Head and trailer both hold the identity, so that a torn head, a torn trailer
and a renamed file are detected. The head determines the size of the file; the trailer can be found from
the head or from the end of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from holdfast_core.errors import CorruptionError, CutError, FormatError, UnknownVersionError
from holdfast_core.format.canonical import (
    chunk_digest,
    crc32c,
    digest_of,
    dumps_canonical,
    expect_digest,
    expect_int,
    expect_object,
    expect_text,
    expect_version,
    loads_canonical,
)
from holdfast_core.format.keys import checked_job_uid
from holdfast_core.format.rank_layout import MAX_TENSOR_BYTES
from holdfast_core.ids import (
    MAX_RANK,
    MAX_ROUND,
    MAX_STEP,
    ByteRange,
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    ShardInfo,
    ShardRef,
    Step,
)

CHUNK_BYTES = 256 << 10
"""Chunk size in bytes, the smallest unit that can be read and verified. Measured against chunks of
4 MiB, a write costs the same CPU time and a verified read 5 % more."""


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """Identity of a shard. Head and trailer of the shard file both store it."""

    job_uid: JobUid
    round: RestartRound
    step: Step
    rank: Rank
    world_size: int
    layout: Digest
    """BLAKE3 of the rank's layout document."""
    payload_bytes: int
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard's header and the digests of its payload."""

    header: ShardHeader
    blake3: Digest
    chunk_table: Digest
    """BLAKE3 of the packed chunk table."""
    file_bytes: int
    """Length of the shard file."""

    @property
    def ref(self) -> ShardRef:
        h = self.header
        return ShardRef(h.job_uid, h.step, h.round, h.rank, self.blake3)

    @property
    def info(self) -> ShardInfo:
        h = self.header
        return ShardInfo(h.rank, h.payload_bytes, self.blake3, self.chunk_table)

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.header.step, self.header.round)


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


FORMAT_VERSION = 1
BLOCK_BYTES = 4096
"""O_DIRECT requires offsets, lengths and memory addresses in multiples of this."""
MAX_HEADER_BYTES = 16 << 20
MAX_CHUNK_BYTES = 64 << 20
MAX_CHUNKS = 1 << 24

HEAD_MAGIC = b"HFSHARD1"
TRAILER_MAGIC = b"HFTRAIL1"
FOOTER_MAGIC = b"HFSHEND1"

HEAD_PREFIX = struct.Struct("<8sII")
_TRAILER_PREFIX = struct.Struct("<8sII")
FOOTER = struct.Struct("<QQII8s")
"""Trailer bytes, payload bytes, CRC of the trailer before the footer, CRC of these 20 bytes, magic."""

_HEADER_FIELDS = frozenset(
    {
        "formatVersion",
        "jobUid",
        "restartRound",
        "step",
        "rank",
        "worldSize",
        "layout",
        "payloadBytes",
        "chunkBytes",
    }
)
_TRAILER_FIELDS = frozenset({"blake3", "chunkTable", "header"})
_MAX_TRAILER_BYTES = table_bytes(MAX_CHUNKS) + 2 * MAX_HEADER_BYTES
_ANY_DIGEST = Digest("b3:" + "0" * 64)


@dataclass(frozen=True, slots=True)
class Trailer:
    """The parsed trailer of a shard file."""

    record: ShardRecord
    table: ChunkTable


def align(size: int) -> int:
    """Round `size` up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def chunk_count(header: ShardHeader) -> int:
    return -(-header.payload_bytes // header.chunk_bytes)


def head_bytes(header: ShardHeader) -> int:
    """Return the length of the head, which is the payload's offset in the file."""
    return align(HEAD_PREFIX.size + len(_identity(header)))


def trailer_offset(header: ShardHeader) -> int:
    return head_bytes(header) + align(header.payload_bytes)


def trailer_bytes(header: ShardHeader) -> int:
    text = _trailer_text(header, _ANY_DIGEST, _ANY_DIGEST)
    table = table_bytes(chunk_count(header))
    return align(_TRAILER_PREFIX.size + len(text) + table + FOOTER.size)


def file_bytes(header: ShardHeader) -> int:
    """Return the length of the whole file in bytes. It does not depend on the payload's contents."""
    return trailer_offset(header) + trailer_bytes(header)


def check_header(header: ShardHeader) -> ShardHeader:
    """Return `header`. Raises FormatError if a field is out of bounds or contradicts another."""
    return parse_identity(identity_json(header), "shard header")


def record_of(header: ShardHeader, blake3: Digest, table: ChunkTable) -> ShardRecord:
    return ShardRecord(header, blake3, digest_of(table.pack()), file_bytes(header))


def pack_head(header: ShardHeader) -> bytes:
    """Return the head, padded to whole blocks. Raises FormatError if the header is not valid."""
    text = _identity(check_header(header))
    head = HEAD_PREFIX.pack(HEAD_MAGIC, len(text), crc32c(text)) + text
    return head.ljust(head_bytes(header), b"\0")


def head_bytes_of(prefix: bytes | bytearray | memoryview) -> int:
    """Return the length of the head from its first 16 bytes. Raises CorruptionError."""
    if len(prefix) < HEAD_PREFIX.size:
        raise CorruptionError(f"shard head: {len(prefix)} bytes, expected {HEAD_PREFIX.size}")
    magic, length, _ = HEAD_PREFIX.unpack_from(prefix)
    if magic != HEAD_MAGIC:
        raise CorruptionError(f"shard head: magic {magic!r}, expected {HEAD_MAGIC!r}")
    if length > MAX_HEADER_BYTES:
        raise CorruptionError(f"shard head: {length} bytes, at most {MAX_HEADER_BYTES}")
    return align(HEAD_PREFIX.size + int(length))


def unpack_head(data: bytes) -> ShardHeader:
    """Parse the head at the start of `data`.

    Raises CorruptionError if the head is incomplete or damaged; FormatError for a newer version.
    """
    size = head_bytes_of(data)
    if len(data) < size:
        raise CorruptionError(f"shard head: {len(data)} bytes, expected {size}")
    _, length, crc = HEAD_PREFIX.unpack_from(data)
    text = bytes(data[HEAD_PREFIX.size : HEAD_PREFIX.size + length])
    if crc32c(text) != crc:
        raise CorruptionError(f"shard head: CRC {crc32c(text):08x}, expected {crc:08x}")
    expect_zeros(data[HEAD_PREFIX.size + length : size], "shard head")
    return _as_corruption(text, "shard head")


def pack_trailer(header: ShardHeader, blake3: Digest, table: ChunkTable) -> bytes:
    """Return the trailer, padded to whole blocks. Raises FormatError if the table has a wrong length."""
    packed = table.pack()
    expected = table_bytes(chunk_count(header))
    if len(packed) != expected:
        raise FormatError(f"shard: chunk table of {len(packed)} bytes, expected {expected}")
    text = _trailer_text(header, blake3, digest_of(packed))
    size = trailer_bytes(header)
    body = _TRAILER_PREFIX.pack(TRAILER_MAGIC, len(text), len(table)) + text + packed
    body = body.ljust(size - FOOTER.size, b"\0")
    footer = struct.pack("<QQI", size, header.payload_bytes, crc32c(body))
    return body + footer + struct.pack("<I8s", crc32c(footer), FOOTER_MAGIC)


def trailer_bytes_of(footer: bytes) -> int:
    """Return the length of the trailer from the last 32 bytes of a file. Raises CorruptionError."""
    size, _, _ = _unpack_footer(footer)
    return size


def unpack_trailer(data: bytes) -> Trailer:
    """Parse `data`, which is exactly the trailer.

    Raises CorruptionError if the trailer is damaged, and also if a newer release wrote it.
    """
    size, payload_bytes, crc = _unpack_footer(data[-FOOTER.size :])
    if size != len(data) or len(data) < FOOTER.size + _TRAILER_PREFIX.size:
        raise CorruptionError(f"shard trailer: {len(data)} bytes, expected {size}")
    body = data[: -FOOTER.size]
    if crc32c(body) != crc:
        raise CorruptionError(f"shard trailer: CRC {crc32c(body):08x}, expected {crc:08x}")
    magic, length, count = _TRAILER_PREFIX.unpack_from(data)
    start = _TRAILER_PREFIX.size + length
    if magic != TRAILER_MAGIC or start > len(body):
        raise CorruptionError(f"shard trailer: magic {magic!r}, {length} bytes and {count} chunks")
    text = bytes(body[_TRAILER_PREFIX.size : start])
    try:
        root = expect_object(loads_canonical(text, "shard trailer"), "trailer", _TRAILER_FIELDS)
        header = parse_identity(root["header"], "trailer.header")
        blake3 = expect_digest(root["blake3"], "trailer.blake3")
        chunk_table = expect_digest(root["chunkTable"], "trailer.chunkTable")
        if header.payload_bytes != payload_bytes or count != chunk_count(header):
            raise FormatError("footer, table and identity contradict each other")
        packed = bytes(body[start : start + table_bytes(count)])
        table = ChunkTable.unpack(packed, count)
    except UnknownVersionError:
        raise
    except FormatError as error:
        raise CorruptionError(f"shard trailer: {error}") from error
    if digest_of(packed) != chunk_table:
        raise CorruptionError("shard trailer: the chunk table does not match its digest")
    if table.payload_digest() != blake3:
        raise CorruptionError(
            "shard trailer: the chunk table does not match the digest of the payload"
        )
    return Trailer(ShardRecord(header, blake3, chunk_table, file_bytes(header)), table)


def check_trailer(header: ShardHeader, trailer: Trailer, length: int) -> Trailer:
    """Return `trailer`. Raises CorruptionError if head, trailer and file length do not match."""
    if trailer.record.header != header:
        raise CorruptionError(
            f"shard: the head has {header}, the trailer has {trailer.record.header}: the file is "
            "torn or spliced"
        )
    if trailer.record.file_bytes != length:
        raise CorruptionError(
            f"shard: the file has {length} bytes, expected {trailer.record.file_bytes}"
        )
    return trailer


def expect_zeros(data: bytes | bytearray | memoryview, what: str) -> None:
    if bytes(data).strip(b"\0"):
        raise CorruptionError(f"{what}: padding is not zero")


def _unpack_footer(footer: bytes) -> tuple[int, int, int]:
    size, payload_bytes, crc = unpack_footer(footer, FOOTER_MAGIC, "shard footer")
    if size % BLOCK_BYTES or not BLOCK_BYTES <= size <= _MAX_TRAILER_BYTES:
        raise CorruptionError(f"shard footer: trailer of {size} bytes")
    return size, payload_bytes, crc


def unpack_footer(footer: bytes, expected: bytes, what: str) -> tuple[int, int, int]:
    """Parse a footer with the magic `expected`.

    Returns:
        Length of the part that ends with the footer, length of the data before that part (for a
        trailer: of the payload), and CRC of the part without the footer.

    Raises:
        CutError: There is no footer.
        CorruptionError: The footer is damaged.
    """
    if len(footer) != FOOTER.size:
        raise CutError(f"{what}: {len(footer)} bytes, expected {FOOTER.size}")
    size, other_bytes, crc, own_crc, magic = FOOTER.unpack(footer)
    if magic != expected:
        raise CutError(f"{what}: magic {magic!r}, expected {expected!r}")
    if crc32c(footer[:20]) != own_crc:
        raise CorruptionError(f"{what}: CRC does not match")
    return int(size), int(other_bytes), int(crc)


def identity_json(header: ShardHeader) -> dict[str, Any]:
    """Return the identity as a JSON value."""
    return {
        "formatVersion": FORMAT_VERSION,
        "jobUid": header.job_uid,
        "restartRound": header.round,
        "step": header.step,
        "rank": header.rank,
        "worldSize": header.world_size,
        "layout": header.layout,
        "payloadBytes": header.payload_bytes,
        "chunkBytes": header.chunk_bytes,
    }


def _identity(header: ShardHeader) -> bytes:
    return dumps_canonical(identity_json(header))


def _trailer_text(header: ShardHeader, blake3: Digest, chunk_table: Digest) -> bytes:
    return dumps_canonical(
        {"blake3": blake3, "chunkTable": chunk_table, "header": identity_json(header)}
    )


def _as_corruption(text: bytes, what: str) -> ShardHeader:
    """Parse an identity. Raises CorruptionError for a wrong field, UnknownVersionError for a newer version.

    A file of a newer version is not damaged, so it must not be quarantined.
    """
    try:
        return parse_identity(loads_canonical(text, what, limit_bytes=MAX_HEADER_BYTES), what)
    except UnknownVersionError:
        raise
    except FormatError as error:
        raise CorruptionError(str(error)) from error


def parse_identity(value: Any, path: str) -> ShardHeader:
    """Parse the JSON value of `identity_json`. Raises FormatError."""
    if isinstance(value, dict) and "formatVersion" in value:
        expect_version(value["formatVersion"], f"{path}.formatVersion", FORMAT_VERSION)
    root = expect_object(value, path, _HEADER_FIELDS)
    world_size = expect_int(root["worldSize"], f"{path}.worldSize", low=1, high=MAX_RANK + 1)
    payload_bytes = expect_int(root["payloadBytes"], f"{path}.payloadBytes", high=MAX_TENSOR_BYTES)
    chunk_bytes = expect_int(
        root["chunkBytes"], f"{path}.chunkBytes", low=BLOCK_BYTES, high=MAX_CHUNK_BYTES
    )
    if chunk_bytes % BLOCK_BYTES or -(-payload_bytes // chunk_bytes) > MAX_CHUNKS:
        raise FormatError(
            f"{path}.chunkBytes: {chunk_bytes} for a payload of {payload_bytes}, expected a "
            f"multiple of {BLOCK_BYTES} and at most {MAX_CHUNKS} chunks"
        )
    return ShardHeader(
        job_uid=checked_job_uid(JobUid(expect_text(root["jobUid"], f"{path}.jobUid", limit=128))),
        round=RestartRound(
            expect_int(root["restartRound"], f"{path}.restartRound", high=MAX_ROUND)
        ),
        step=Step(expect_int(root["step"], f"{path}.step", high=MAX_STEP)),
        rank=Rank(expect_int(root["rank"], f"{path}.rank", high=world_size - 1)),
        world_size=world_size,
        layout=expect_digest(root["layout"], f"{path}.layout"),
        payload_bytes=payload_bytes,
        chunk_bytes=chunk_bytes,
    )


FindBad = Callable[[Trailer, range, memoryview], Iterable[int]]
"""Returns those of some chunks whose bytes do not verify."""


def payload_span(header: ShardHeader, chunks: range) -> ByteRange:
    """Return the byte range of consecutive chunks in the payload.

    Raises FormatError if `chunks` is empty or not within the payload.
    """
    if chunks.step != 1 or not 0 <= chunks.start < chunks.stop <= chunk_count(header):
        raise FormatError(
            f"shard of rank {header.rank} step {header.step}: expected chunks below "
            f"{chunk_count(header)}, found {chunks}"
        )
    stop = min(chunks.stop * header.chunk_bytes, header.payload_bytes)
    return ByteRange(chunks.start * header.chunk_bytes, stop)


def payload_runs(header: ShardHeader, run_bytes: int) -> Iterator[range]:
    """Cut the payload into runs of whole chunks of about `run_bytes` each, in order."""
    count, total = max(1, run_bytes // header.chunk_bytes), chunk_count(header)
    return (range(first, min(first + count, total)) for first in range(0, total, count))


def bad_chunks(trailer: Trailer, chunks: range, data: memoryview) -> list[int]:
    """Return those of `chunks`, whose bytes are in `data`, that do not match their BLAKE3 in the table."""
    size = trailer.record.header.chunk_bytes
    return [
        chunk
        for place, chunk in enumerate(chunks)
        if chunk_digest(data[place * size : (place + 1) * size]) != trailer.table.digest(chunk)
    ]
