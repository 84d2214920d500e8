"""A stored object with a part of a payload's chunks and an index of all of them: plan and format. Pure.

The plan says which chunks are stored, and which are references to other objects (ADR 0023). Ranks that hold
the same boxes of the same tensors form a group. Each block of chunks has one owner in the group, on which
all ranks agree. A rank leaves a chunk out if

1. the owner has the same chunk: the owner's object stores it or refers to an earlier one that does;
2. otherwise, if an object of an earlier checkpoint stores the chunk for this rank.

A chunk that another rank's object held in the earlier checkpoint is stored again. A reference to it
would need a third object, and a checkpoint would need objects that its packs do not name. Hence a
reference to an earlier checkpoint names an object that stores the chunk, and a reference within the
step names an object that stores it or refers to one that does: at most two hops, and no cycle.

The pack:

    chunks   the stored chunks, in the order of the payload, without gaps
    index    magic HFPACKI1, u32 length, u32 count
             canonical JSON {base, blake3, chunkTable, formatVersion, header, sources}
             the chunk table of the whole payload
             u16 for each chunk: its place, 0 for this pack, n for the n-th source
             u32 for each chunk: its stored bytes, 0 if it is in a source
             u8 for each chunk: its width, 0 if it is not compressed
             footer of 32 bytes at the very end

Integers are little-endian. The index contains everything that the shard file has besides its payload,
so that the file can be rebuilt bit for bit and each chunk can be verified wherever it comes from. A
source is a shard of the same job: that of another rank at the same step, or a shard of an earlier step
whose object stores the chunk itself.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self, TypeVar

from holdfast_core.errors import CorruptionError, FormatError, UnknownVersionError
from holdfast_core.format.canonical import (
    crc32c,
    digest_of,
    dumps_canonical,
    expect_checkpoint,
    expect_digest,
    expect_document,
    expect_int,
    expect_list,
    expect_object,
    loads_canonical,
)
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.ids import (
    MAX_RANK,
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    ShardRef,
    Step,
)
from holdfast_core.shards.file import (
    FOOTER,
    MAX_CHUNKS,
    MAX_HEADER_BYTES,
    ChunkTable,
    ShardHeader,
    Trailer,
    chunk_count,
    identity_json,
    parse_identity,
    record_of,
    table_bytes,
    unpack_footer,
)

BLOCK_CHUNKS = 16
"""Consecutive chunks with the same owner: 4 MiB, so that a restore requests few long ranges. All ranks of
a step must use the same number, because they must agree on the owners."""
MAX_GROUP = 64
"""Maximum ranks in a group. Each rank requests the chunk tables of all others."""
LEAST_SHARE = 8
"""A pack must leave out at least one chunk in this many. Less is not worth the objects it keeps alive."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """This rank's shard in an earlier checkpoint, as it is stored."""

    trailer: Trailer
    index: PackIndex | None
    """Index of its pack. None if the shard is stored whole."""

    def stored_in(self, chunk: int) -> ShardRef | None:
        """Return the shard whose object stores the chunk.

        Returns None if the chunk is a reference to another rank's object of that earlier step.
        """
        own = self.trailer.record.ref
        source = None if self.index is None else self.index.source(self.index.places[chunk])
        if source is None:
            return own
        return None if source.checkpoint == own.checkpoint else source


def replica_group(shards: Sequence[ManifestShard], rank: Rank) -> tuple[Rank, ...]:
    """Return the ranks that hold the same boxes of tensors at the same payload bytes as `rank`, in order.

    `shards` are the entries of the manifest. `rank` is one of the group. A group has at most MAX_GROUP ranks,
    and all its ranks find the same one.
    """
    lowest = shards[rank].same_boxes
    alike = [shard.rank for shard in shards if shard.same_boxes == lowest]
    start = alike.index(rank) // MAX_GROUP * MAX_GROUP
    return tuple(alike[start : start + MAX_GROUP])


def owner(group: Sequence[Rank], chunk: int) -> Rank:
    """Return the rank of the group that owns the chunk."""
    return group[chunk // BLOCK_CHUNKS % len(group)]


@dataclass(frozen=True, slots=True)
class SharedChunks:
    """Chunks that another rank of the group owns and that have the same bytes in this rank's shard."""

    ref: ShardRef
    chunks: tuple[range, ...]


def shared_with(trailer: Trailer, group: Sequence[Rank], other: Trailer) -> SharedChunks:
    """Return the chunks of `trailer`'s shard that the rank of `other` owns and has with the same bytes."""
    own, theirs = trailer.table, other.table
    rank = other.record.header.rank
    header = trailer.record.header
    if rank == header.rank or other.record.header.chunk_bytes != header.chunk_bytes:
        return SharedChunks(other.record.ref, ())
    found: list[range] = []
    for chunk in range(min(len(own), len(theirs))):
        if owner(group, chunk) != rank or own.digest(chunk) != theirs.digest(chunk):
            continue
        if found and found[-1].stop == chunk:
            found[-1] = range(found[-1].start, chunk + 1)
        else:
            found.append(range(chunk, chunk + 1))
    return SharedChunks(other.record.ref, tuple(found))


def plan_pack(
    trailer: Trailer,
    shared: Iterable[SharedChunks],
    earlier: Earlier | None,
    allowed: Collection[CheckpointId],
    base: CheckpointId | None,
) -> PackIndex | None:
    """Return the index of a shard's pack, or None if the shard is to be stored whole.

    Args:
        trailer: The shard.
        shared: Chunks that other ranks of the group own, from `shared_with`.
        earlier: This rank's shard in `base`, if there is one.
        allowed: Earlier checkpoints that the pack may refer to.
        base: The earlier checkpoint to compare with.
    """
    record, table = trailer.record, trailer.table
    if not len(table):
        return None
    if (
        earlier is not None
        and earlier.trailer.record.header.chunk_bytes != record.header.chunk_bytes
    ):
        earlier = None
    chosen: list[ShardRef | None] = [None] * len(table)
    for other in shared:
        for chunks in other.chunks:
            chosen[chunks.start : chunks.stop] = [other.ref] * len(chunks)
    if earlier is not None:
        for chunk in range(len(table)):
            if chosen[chunk] is None:
                chosen[chunk] = _stored_earlier(table, chunk, earlier, allowed)
    left_out = sum(source is not None for source in chosen)
    if left_out * LEAST_SHARE < len(table):
        return None
    sources = tuple(sorted({s for s in chosen if s is not None}, key=source_order))
    numbers = {source: number for number, source in enumerate(sources, start=1)}
    places = array("H", (HERE if s is None else numbers[s] for s in chosen))
    return PackIndex(
        record.header, record.blake3, table, base if earlier else None, sources, places
    )


def _stored_earlier(
    table: ChunkTable, chunk: int, earlier: Earlier, allowed: Collection[CheckpointId]
) -> ShardRef | None:
    before = earlier.trailer.table
    if chunk >= len(before) or before.digest(chunk) != table.digest(chunk):
        return None
    source = earlier.stored_in(chunk)
    return source if source is not None and source.checkpoint in allowed else None


FORMAT_VERSION = 1
MAX_EARLIER = 4
"""Maximum number of earlier checkpoints that one pack refers to. It bounds what retention must keep."""
MAX_SOURCES = 1024
HERE = 0
"""Place of a chunk that is stored in the pack itself."""

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


PLAIN = 0


WIDTHS = (1, 2, 4, 8)


PLANE_LENGTH_BYTES = 4
"""Bytes of the length of one plane, at the beginning of a compressed chunk (shards.coding)."""


@dataclass(frozen=True, slots=True)
class Coding:
    """Stored lengths and widths of consecutive chunks."""

    starts: array[int]
    """Unsigned 64-bit offset of each chunk in the object, and the end of the last chunk. Only
    differences are meaningful: the origin is arbitrary. A chunk that is stored elsewhere has length 0."""
    widths: bytes
    """Width of each chunk: PLAIN or one of WIDTHS."""

    @classmethod
    def of(cls, lengths: Iterable[int], widths: bytes) -> Self:
        """Return the coding of chunks with these stored lengths in bytes."""
        return cls(array("Q", accumulate(lengths, initial=0)), widths)

    @property
    def lengths(self) -> list[int]:
        """Stored length of each chunk in bytes."""
        return [stop - start for start, stop in pairwise(self.starts)]

    def cut(self, start: int, stop: int) -> Coding:
        """Return the coding of the chunks at positions start..stop-1."""
        return Coding(self.starts[start : stop + 1], self.widths[start:stop])

    def stored_bytes(self, start: int, stop: int) -> int:
        """Return the stored length of the chunks at positions start..stop-1 in bytes."""
        return self.starts[stop] - self.starts[start]


def check_stored(length: int, width: int, chunk_bytes: int) -> None:
    """Check a chunk's stored length and width. Raises FormatError if the encoder cannot produce them."""
    if width == PLAIN:
        possible = length == chunk_bytes
    else:
        possible = width in WIDTHS and width * PLANE_LENGTH_BYTES <= length < chunk_bytes
    if not possible:
        raise FormatError(
            f"a chunk of {chunk_bytes} bytes with width {width} stored in {length} bytes"
        )


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks with the same place."""

    chunks: range
    place: int
    offset: int
    """Offset of the first chunk in the pack. For chunks of a source, the offset at which they would be."""


@dataclass(frozen=True, slots=True)
class PackIndex:
    """Index of a pack: identity of the shard, chunk table, and the place of each chunk."""

    header: ShardHeader
    blake3: Digest
    table: ChunkTable
    """Chunk table of the whole payload."""
    base: CheckpointId | None
    """The earlier checkpoint that this one was compared with, if any."""
    sources: tuple[ShardRef, ...]
    """In the order of `source_order`."""
    places: array[int]
    """Unsigned 16-bit place of each chunk: HERE, or the number of a source, from 1."""
    coding: Coding | None = None
    """Stored lengths and widths of the chunks. None if no chunk is compressed."""

    @property
    def ref(self) -> ShardRef:
        h = self.header
        return ShardRef(h.job_uid, h.step, h.round, h.rank, self.blake3)

    @property
    def trailer(self) -> Trailer:
        """Contents of the shard file's trailer."""
        return Trailer(record_of(self.header, self.blake3, self.table), self.table)

    @property
    def stored_bytes(self) -> int:
        """Length of the stored chunks in the pack, without the index."""
        return sum(self.stored(run.chunks) for run in self.runs() if run.place == HERE)

    @property
    def payload_bytes_here(self) -> int:
        """Length of the stored chunks before compression."""
        return sum(self._bytes(run.chunks) for run in self.runs() if run.place == HERE)

    def source(self, place: int) -> ShardRef | None:
        """Return the source with this place, or None for HERE."""
        return None if place == HERE else self.sources[place - 1]

    def earlier(self) -> dict[CheckpointId, int]:
        """Return how many payload bytes each earlier checkpoint stores for this shard."""
        found: dict[CheckpointId, int] = {}
        for run in self.runs():
            source = self.source(run.place)
            if source is not None and source.checkpoint != self.ref.checkpoint:
                held = found.get(source.checkpoint, 0)
                found[source.checkpoint] = held + self._bytes(run.chunks)
        return found

    def runs(self) -> Iterator[ChunkRun]:
        """Yield the runs of all chunks in order."""
        offset = start = 0
        for chunk in range(1, len(self.places) + 1):
            if chunk == len(self.places) or self.places[chunk] != self.places[start]:
                run = ChunkRun(range(start, chunk), self.places[start], offset)
                yield run
                if run.place == HERE:
                    offset += self.stored(run.chunks)
                start = chunk

    def stored(self, chunks: range) -> int:
        """Return the bytes that consecutive chunks take in the pack. All of them have the place HERE."""
        if self.coding is None:
            return self._bytes(chunks)
        return self.coding.stored_bytes(chunks.start, chunks.stop)

    def _bytes(self, chunks: range) -> int:
        size = self.header.chunk_bytes
        return min(chunks.stop * size, self.header.payload_bytes) - chunks.start * size


class Stretch(Protocol):
    """Anything that covers consecutive chunks."""

    @property
    def chunks(self) -> range: ...


S = TypeVar("S", bound=Stretch)


def overlapping(stretches: Sequence[S], chunks: range) -> Iterator[tuple[S, range]]:
    """Yield those of the ordered `stretches` that overlap `chunks`, each with the common chunks."""
    at = bisect_right(stretches, chunks.start, key=lambda stretch: stretch.chunks.start) - 1
    while at < len(stretches) and stretches[at].chunks.start < chunks.stop:
        there = stretches[at].chunks
        cut = range(max(there.start, chunks.start), min(there.stop, chunks.stop))
        yield stretches[at], cut
        at += 1


def runs_within(
    runs: Sequence[ChunkRun], chunks: range, stored: Callable[[range], int]
) -> Iterator[ChunkRun]:
    """Yield the runs of `chunks`.

    Args:
        runs: All runs of an index.
        chunks: The requested chunks.
        stored: Function that returns the stored bytes of chunks with the place HERE.
    """
    for run, cut in overlapping(runs, chunks):
        skipped = stored(range(run.chunks.start, cut.start)) if run.place == HERE else 0
        yield ChunkRun(cut, run.place, run.offset + skipped)


def pack_index(index: PackIndex) -> bytes:
    """Return the index as bytes, which follow the stored chunks.

    Raises FormatError for an index that `unpack_index` would refuse.
    """
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
    """Return the length of the index from the last 32 bytes of a pack. Raises CorruptionError."""
    size, _, _ = _unpack_footer(footer)
    return size


def unpack_index(data: bytes, pack_bytes: int) -> PackIndex:
    """Parse `data`, which is exactly the index of a pack of `pack_bytes` bytes.

    Raises CorruptionError if the index is damaged or does not fit the pack, and also if a newer release
    wrote it.
    """
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
                f"{stored_bytes} bytes are stored, expected {index.stored_bytes} according to the "
                "places"
            )
    except UnknownVersionError:
        raise
    except FormatError as error:
        raise CorruptionError(f"pack index: {error}") from error
    return index


def _parse(body: bytes, start: int, count: int) -> PackIndex:
    text = loads_canonical(body[_PREFIX.size : start], "pack index")
    root = expect_document(text, "index", _FIELDS, version=FORMAT_VERSION)
    header = parse_identity(root["header"], "index.header")
    if count != chunk_count(header):
        raise FormatError(f"{count} chunks, expected {chunk_count(header)} according to the header")
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
        raise FormatError("the chunk table does not match its digest")
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
    """Check that the fields of an index fit each other and its bounds. Raises FormatError.

    The table must be the payload's, every place must exist, no source may be this pack or of another
    job, and the number of earlier checkpoints is bounded.
    """
    header, own = index.header, index.ref
    if len(index.table) != chunk_count(header) or len(index.places) != len(index.table):
        raise FormatError(
            f"{len(index.table)} chunks and {len(index.places)} places, expected "
            f"{chunk_count(header)} according to the header"
        )
    if index.table.payload_digest() != index.blake3:
        raise FormatError("the chunk table does not match the digest of the payload")
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
    """Return the coding of an index without compression."""
    lengths = (
        index.stored(range(chunk, chunk + 1)) if place == HERE else 0
        for chunk, place in enumerate(index.places)
    )
    return Coding.of(lengths, bytes(len(index.places)))


def _check_coding(index: PackIndex, coding: Coding) -> None:
    """Check the stored lengths and widths. Raises FormatError.

    No stored form may be longer than its chunk, and a chunk of a source must have no stored bytes. A
    range of the object is therefore never longer than the chunks that it is decoded into.
    """
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
                    f"chunks {start} to {stop} are of source {run.place}, but are also in this pack"
                )
            continue
        for chunk in run.chunks:
            left = header.payload_bytes - chunk * header.chunk_bytes
            check_stored(lengths[chunk], coding.widths[chunk], min(header.chunk_bytes, left))


def unshared_index(trailer: Trailer) -> PackIndex | None:
    """Return an index with all chunks in the pack, or None for a shard without a payload."""
    record, table = trailer.record, trailer.table
    if not len(table):
        return None
    places = array("H", bytes(_PLACE_BYTES * len(table)))
    return PackIndex(record.header, record.blake3, table, None, (), places)


def source_order(ref: ShardRef) -> tuple[Step, RestartRound, Rank]:
    """Return the sort key of sources in an index."""
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
