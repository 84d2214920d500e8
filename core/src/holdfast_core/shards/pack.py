"""The pack: those chunks of one rank's payload that are stored here, and where each other chunk is. Pure.

    chunks   stored here, in the order of the payload, without gaps
    index    magic HFPACKI1, u32 length, u32 count, canonical JSON {base, blake3, chunkTable,
             formatVersion, header, sources}, the chunk table of the whole payload, u16 a chunk: 0 is
             here, n is the n-th source; u32 a chunk: stored bytes; u8 a chunk: width, 0 for a chunk
             that is not compressed; footer of 32 bytes at the very end

An index says everything that the shard file has besides its payload, so that the file is rebuilt bit
for bit and each chunk is verified wherever it comes from. A source is a shard of the same job: of
another rank at the same step, or one that stores the chunk itself at an earlier one.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.canonical import dumps_canonical, loads_canonical
from holdfast_core.format.checks import (
    expect_checkpoint,
    expect_digest,
    expect_document,
    expect_int,
    expect_list,
    expect_object,
)
from holdfast_core.format.digest import crc32c, digest_of
from holdfast_core.format.keys import MAX_RANK
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, ShardRef, Step
from holdfast_core.shards.chunk_table import ChunkTable, table_bytes
from holdfast_core.shards.coding import Coding, check_stored
from holdfast_core.shards.file import (
    FOOTER,
    MAX_CHUNKS,
    MAX_HEADER_BYTES,
    Trailer,
    chunk_count,
    identity_json,
    parse_identity,
    record_of,
    unpack_footer,
)
from holdfast_core.shards.record import ShardHeader

FORMAT_VERSION = 1
MAX_EARLIER = 4
"""Earlier checkpoints that one pack may need: what retention keeps alive for it is bounded."""
MAX_SOURCES = 1024
HERE = 0

_INDEX_MAGIC = b"HFPACKI1"
_FOOTER_MAGIC = b"HFPKEND1"
_PREFIX = struct.Struct("<8sII")
_PLACE_BYTES = 2
_LENGTH_BYTES = 4
_WIDTH_BYTES = 1
_CHUNK_BYTES = _PLACE_BYTES + _LENGTH_BYTES + _WIDTH_BYTES
_MAX_INDEX_BYTES = table_bytes(MAX_CHUNKS) + _CHUNK_BYTES * MAX_CHUNKS + 2 * MAX_HEADER_BYTES
_FIELDS = frozenset({"base", "blake3", "chunkTable", "formatVersion", "header", "sources"})
_SOURCE_FIELDS = frozenset({"blake3", "rank", "restartRound", "step"})
_BASE_FIELDS = frozenset({"restartRound", "step"})


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks in a row that are in one place."""

    chunks: range
    place: int
    offset: int
    """Where the first of them begins in the pack; of another source's chunks: where they are left out."""


@dataclass(frozen=True, slots=True)
class PackIndex:
    header: ShardHeader
    blake3: Digest
    table: ChunkTable
    base: CheckpointId | None
    """The checkpoint that this one was compared with."""
    sources: tuple[ShardRef, ...]
    places: array[int]
    """Unsigned 16 bit, one a chunk: HERE, or the number of a source, from 1."""
    coding: Coding | None = None
    """None: no chunk is compressed."""

    @property
    def ref(self) -> ShardRef:
        h = self.header
        return ShardRef(h.job_uid, h.step, h.round, h.rank, self.blake3)

    @property
    def trailer(self) -> Trailer:
        """What the shard file ends with."""
        return Trailer(record_of(self.header, self.blake3, self.table), self.table)

    @property
    def stored_bytes(self) -> int:
        return sum(self.stored(run.chunks) for run in self.runs() if run.place == HERE)

    @property
    def payload_bytes_here(self) -> int:
        """What the stored chunks are before they are compressed."""
        return sum(self._bytes(run.chunks) for run in self.runs() if run.place == HERE)

    def source(self, place: int) -> ShardRef | None:
        return None if place == HERE else self.sources[place - 1]

    def earlier(self) -> dict[CheckpointId, int]:
        """Payload bytes that earlier checkpoints store for this one."""
        found: dict[CheckpointId, int] = {}
        for run in self.runs():
            source = self.source(run.place)
            if source is not None and source.checkpoint != self.ref.checkpoint:
                held = found.get(source.checkpoint, 0)
                found[source.checkpoint] = held + self._bytes(run.chunks)
        return found

    def runs(self) -> Iterator[Run]:
        offset = start = 0
        for chunk in range(1, len(self.places) + 1):
            if chunk == len(self.places) or self.places[chunk] != self.places[start]:
                run = Run(range(start, chunk), self.places[start], offset)
                yield run
                if run.place == HERE:
                    offset += self.stored(run.chunks)
                start = chunk

    def stored(self, chunks: range) -> int:
        """Bytes that chunks in a row take here."""
        if self.coding is None:
            return self._bytes(chunks)
        return self.coding.stored_bytes(chunks.start, chunks.stop)

    def _bytes(self, chunks: range) -> int:
        size = self.header.chunk_bytes
        return min(chunks.stop * size, self.header.payload_bytes) - chunks.start * size


class Stretch(Protocol):
    @property
    def chunks(self) -> range: ...


S = TypeVar("S", bound=Stretch)


def overlapping(stretches: Sequence[S], chunks: range) -> Iterator[tuple[S, range]]:
    """Those of `stretches` (in order) that cover `chunks`, each with the chunks it is asked for."""
    at = bisect_right(stretches, chunks.start, key=lambda stretch: stretch.chunks.start) - 1
    while at < len(stretches) and stretches[at].chunks.start < chunks.stop:
        there = stretches[at].chunks
        cut = range(max(there.start, chunks.start), min(there.stop, chunks.stop))
        yield stretches[at], cut
        at += 1


def runs_within(
    runs: Sequence[Run], chunks: range, stored: Callable[[range], int]
) -> Iterator[Run]:
    """Those of `runs` (all of an index) that cover `chunks`, cut to them. `stored`: bytes that chunks
    take where they are stored here."""
    for run, cut in overlapping(runs, chunks):
        skipped = stored(range(run.chunks.start, cut.start)) if run.place == HERE else 0
        yield Run(cut, run.place, run.offset + skipped)


def pack_index(index: PackIndex) -> bytes:
    """What follows the stored chunks. Raises FormatError for what `unpack_index` would refuse."""
    _check(index)
    packed = index.table.pack()
    text = dumps_canonical(
        {
            "base": None if index.base is None else _checkpoint_json(index.base),
            "blake3": index.blake3,
            "chunkTable": digest_of(packed),
            "formatVersion": FORMAT_VERSION,
            "header": identity_json(index.header),
            "sources": [
                {
                    "blake3": source.blake3,
                    "rank": source.rank,
                    **_checkpoint_json(source.checkpoint),
                }
                for source in index.sources
            ],
        }
    )
    body = _PREFIX.pack(_INDEX_MAGIC, len(text), len(index.table)) + text + packed
    body += _little_endian(index.places).tobytes()
    coding = _uncompressed(index) if index.coding is None else index.coding
    body += _little_endian(array("I", coding.lengths)).tobytes() + coding.widths
    size = len(body) + FOOTER.size
    footer = struct.pack("<QQI", size, index.stored_bytes, crc32c(body))
    return body + footer + struct.pack("<I8s", crc32c(footer), _FOOTER_MAGIC)


def index_bytes_of(footer: bytes) -> int:
    """Length of the index from the last 32 bytes of a pack. Raises CorruptionError."""
    size, _, _ = _unpack_footer(footer)
    return size


def unpack_index(data: bytes, pack_bytes: int) -> PackIndex:
    """`data` is exactly the index of a pack of so many bytes. Raises CorruptionError if any of its
    bits is wrong."""
    size, stored_bytes, crc = _unpack_footer(data[-FOOTER.size :])
    if size != len(data) or stored_bytes + size != pack_bytes:
        raise CorruptionError(
            f"pack index: {len(data)} bytes behind {pack_bytes - len(data)} of chunks, its footer "
            f"says {size} behind {stored_bytes}"
        )
    body = data[: -FOOTER.size]
    if crc32c(body) != crc:
        raise CorruptionError(f"pack index: CRC {crc32c(body):08x}, expected {crc:08x}")
    if len(body) < _PREFIX.size:
        raise CorruptionError(f"pack index: {len(body)} bytes before its footer")
    magic, length, count = _PREFIX.unpack_from(body)
    if magic != _INDEX_MAGIC:
        raise CorruptionError(f"pack index: magic {magic!r}, expected {_INDEX_MAGIC!r}")
    start = _PREFIX.size + length
    try:
        index = _parse(body, start, count)
        _check(index)
        if index.coding is not None and not any(index.coding.widths):
            index = replace(index, coding=None)
        if index.stored_bytes != stored_bytes:
            raise FormatError(
                f"{stored_bytes} bytes are stored, the places mean {index.stored_bytes}"
            )
    except FormatError as error:
        raise CorruptionError(f"pack index: {error}") from error
    return index


def _parse(body: bytes, start: int, count: int) -> PackIndex:
    text = loads_canonical(body[_PREFIX.size : start], "pack index")
    root = expect_document(text, "index", _FIELDS, version=FORMAT_VERSION)
    header = parse_identity(root["header"], "index.header")
    if count != chunk_count(header):
        raise FormatError(f"{count} chunks, its header means {chunk_count(header)}")
    middle = start + table_bytes(count)
    if len(body) != middle + _CHUNK_BYTES * count:
        raise FormatError(
            f"{len(body)} bytes before the footer, expected {middle + _CHUNK_BYTES * count}"
        )
    lengths, widths = (
        middle + each * count for each in (_PLACE_BYTES, _CHUNK_BYTES - _WIDTH_BYTES)
    )
    packed = body[start:middle]
    if digest_of(packed) != expect_digest(root["chunkTable"], "index.chunkTable"):
        raise FormatError("the chunk table is not the one its digest names")
    sources = expect_list(root["sources"], "index.sources", limit=MAX_SOURCES)
    base = root["base"]
    return PackIndex(
        header,
        expect_digest(root["blake3"], "index.blake3"),
        ChunkTable.unpack(packed, count),
        None
        if base is None
        else expect_checkpoint(expect_object(base, "index.base", _BASE_FIELDS), "index.base"),
        tuple(
            _parse_source(value, f"index.sources[{number}]", header.job_uid)
            for number, value in enumerate(sources)
        ),
        _little_endian(array("H", body[middle:lengths])),
        Coding.of(_little_endian(array("I", body[lengths:widths])), body[widths:]),
    )


def _check(index: PackIndex) -> None:
    """What makes a pack more than a list: the table is the payload's, every place exists, no chunk is
    said to be where it cannot be, and what is kept alive is bounded."""
    header, own = index.header, index.ref
    if len(index.table) != chunk_count(header) or len(index.places) != len(index.table):
        raise FormatError(
            f"{len(index.table)} chunks and {len(index.places)} places, the header means "
            f"{chunk_count(header)}"
        )
    if index.table.payload_digest() != index.blake3:
        raise FormatError("the chunk table is not that of its payload's digest")
    if max(index.places, default=HERE) > len(index.sources):
        raise FormatError(f"place {max(index.places)} among {len(index.sources)} sources")
    order = [source_order(source) for source in index.sources]
    if order != sorted(set(order)):
        raise FormatError("the sources are not in order of step, round and rank, each once")
    for source in index.sources:
        if source.job_uid != own.job_uid or source_order(source) == source_order(own):
            raise FormatError(f"source {source} is of another job or this pack itself")
    earlier = {source.checkpoint for source in index.sources} - {own.checkpoint}
    if len(earlier) > MAX_EARLIER:
        raise FormatError(f"{len(earlier)} earlier checkpoints, at most {MAX_EARLIER}")
    if (earlier and index.base is None) or index.base == own.checkpoint:
        raise FormatError(f"base {index.base} of a pack with {len(earlier)} earlier checkpoints")
    if index.coding is not None:
        _check_coding(index, index.coding)


def _uncompressed(index: PackIndex) -> Coding:
    """Each chunk that is here takes as many bytes as it has."""
    lengths = (
        index.stored(range(chunk, chunk + 1)) if place == HERE else 0
        for chunk, place in enumerate(index.places)
    )
    return Coding.of(lengths, bytes(len(index.places)))


def _check_coding(index: PackIndex, coding: Coding) -> None:
    """No chunk is stored longer than it is, and none that is elsewhere takes a byte: so a range of the
    object is never longer than what it is decoded into."""
    header, count = index.header, len(index.places)
    lengths = coding.lengths
    if len(lengths) != count or len(coding.widths) != count:
        raise FormatError(
            f"{len(lengths)} lengths and {len(coding.widths)} widths of {count} chunks"
        )
    for run in index.runs():
        start, stop = run.chunks.start, run.chunks.stop
        if run.place != HERE:
            if coding.stored_bytes(start, stop) or any(coding.widths[start:stop]):
                raise FormatError(
                    f"chunks {start} to {stop} are of source {run.place}, yet also here"
                )
            continue
        for chunk in run.chunks:
            left = header.payload_bytes - chunk * header.chunk_bytes
            check_stored(lengths[chunk], coding.widths[chunk], min(header.chunk_bytes, left))


def unshared_index(trailer: Trailer) -> PackIndex | None:
    """All chunks here. None for a shard without a payload."""
    record, table = trailer.record, trailer.table
    if not len(table):
        return None
    places = array("H", bytes(_PLACE_BYTES * len(table)))
    return PackIndex(record.header, record.blake3, table, None, (), places)


def source_order(ref: ShardRef) -> tuple[Step, RestartRound, Rank]:
    """Sources stand in this order."""
    return ref.step, ref.round, ref.rank


def _unpack_footer(footer: bytes) -> tuple[int, int, int]:
    size, stored_bytes, crc = unpack_footer(footer, _FOOTER_MAGIC, "pack footer")
    if not FOOTER.size < size <= _MAX_INDEX_BYTES:
        raise CorruptionError(f"pack footer: index of {size} bytes, at most {_MAX_INDEX_BYTES}")
    return size, stored_bytes, crc


def _checkpoint_json(checkpoint: CheckpointId) -> dict[str, int]:
    return {"restartRound": checkpoint.round, "step": checkpoint.step}


def _parse_source(value: Any, path: str, job_uid: JobUid) -> ShardRef:
    entry = expect_object(value, path, _SOURCE_FIELDS)
    checkpoint = expect_checkpoint(entry, path)
    rank = Rank(expect_int(entry["rank"], f"{path}.rank", high=MAX_RANK))
    blake3 = expect_digest(entry["blake3"], f"{path}.blake3")
    return ShardRef(job_uid, checkpoint.step, checkpoint.round, rank, blake3)


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return numbers
    swapped = array(numbers.typecode, numbers)
    swapped.byteswap()
    return swapped
