"""Packs in the store: how one goes up, and which objects store the chunks of a shard.

Nothing here decides what is left out (format.pack_plan) or what is kept (object_prune).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from holdfast_core.errors import CorruptionError, NotFoundError
from holdfast_core.format.chunk_table import DIGEST_BYTES, table_bytes
from holdfast_core.format.digest import append_crc, crc32c
from holdfast_core.format.pack import (
    HERE,
    PackIndex,
    Run,
    index_bytes_of,
    pack_index,
    runs_within,
    unpack_index,
)
from holdfast_core.format.record import CHUNK_BYTES
from holdfast_core.format.shard import (
    BLOCK_BYTES,
    FOOTER,
    Trailer,
    head_bytes,
    trailer_bytes_of,
    unpack_trailer,
)
from holdfast_core.format.shard import FORMAT_VERSION as SHARD_VERSION
from holdfast_core.format.stream import check_ref
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.tiers.object_parts import MAX_PARTS, Part, PartPlan
from holdfast_core.tiers.object_ranges import Extent
from holdfast_core.tiers.object_source import READS, Source
from holdfast_core.tiers.retry import Retrier
from holdfast_core.tiers.s3_client import ObjectInfo, S3Client, S3Request
from holdfast_core.tiers.s3_http import Body, FileBody, JoinedBody

_LOG = logging.getLogger(__name__)
_PACK_TAIL_BYTES = 1 << 20
"""Of a pack, read at first: holds the index of a payload of up to 6 GiB."""
_MAX_HOPS = 4
"""A writer of this release needs two; more, or a circle, is nobody's pack."""

KeyOf = Callable[[ShardRef, bool], str]
"""The key of a shard, or of its pack where the second argument is true."""


@dataclass(frozen=True)
class StoredShard:
    """A shard as the store has it: whole, or packed. Its end has been read and verified."""

    key: str
    trailer: Trailer
    tail: bytes
    """The trailer's bytes; of a pack its index's."""
    index: PackIndex | None

    @cached_property
    def runs(self) -> list[Run]:
        """Of all chunks, in order."""
        if self.index is not None:
            return list(self.index.runs())
        return [Run(range(len(self.trailer.table)), HERE, head_bytes(self.trailer.record.header))]


class StoredShards:
    """Finds out how shards are stored; what packs refer to is looked at once."""

    def __init__(self, client: S3Client, retrier: Retrier, key_of: KeyOf) -> None:
        self._client = client
        self._retrier = retrier
        self._key_of = key_of
        self._sources: dict[ShardRef, StoredShard] = {}

    def find(self, ref: ShardRef, *, looks: int = 3) -> StoredShard:
        """Whole before packed: a whole one needs nobody else. Raises NotFoundError, CorruptionError,
        UnavailableError."""
        whole, pack = self._key_of(ref, False), self._key_of(ref, True)

        def look() -> tuple[str, ObjectInfo] | None:
            for key in (whole, pack):
                if (info := self._client.head(key)) is not None:
                    return key, info
            return None

        found = self._retrier.look(f"look for {whole}", look, looks)
        if found is None:
            where = self._client.describe(S3Request("HEAD", whole))
            raise NotFoundError(f"{where}: no such shard, and no pack of it")
        key, info = found
        source = Source(self._client, self._retrier, key)
        for _ in range(READS - 1):
            try:
                return _read(source, ref, info.size_bytes, packed=key == pack)
            except CorruptionError as error:
                _LOG.warning("%s: reading its end once more: %s", source.describe(), error)
        return _read(source, ref, info.size_bytes, packed=key == pack)

    def source_of(self, own: StoredShard, ref: ShardRef) -> StoredShard:
        """A shard that a pack refers to. Raises CorruptionError, naming it, when it is not there."""
        try:
            if ref not in self._sources:
                self._sources[ref] = self.find(ref)
            return self._sources[ref]
        except NotFoundError as error:
            raise CorruptionError(f"{own.key}: needs chunks of {ref}: {error}") from error


def extents(
    own: StoredShard, wanted: range, load: Callable[[StoredShard, ShardRef], StoredShard]
) -> Iterator[Extent]:
    """The objects that store the chunks `wanted` of `own`, in order. Raises CorruptionError where a
    source has other chunks or refers in a circle, and what `load` raises."""

    def follow(stored: StoredShard, chunks: range, hops: int) -> Iterator[Extent]:
        for run in runs_within(stored.runs, chunks, stored.trailer.record.header.chunk_bytes):
            ref = None if stored.index is None else stored.index.source(run.place)
            if ref is None:
                yield Extent(run.chunks, stored.key, run.offset)
                continue
            if hops >= _MAX_HOPS:
                raise CorruptionError(
                    f"{own.key}: chunks {run.chunks}: no end of references: {ref}"
                )
            source = load(own, ref)
            _check_same(own, source, run.chunks)
            yield from follow(source, run.chunks, hops + 1)

    if wanted:
        yield from follow(own, wanted, 0)


def _check_same(own: StoredShard, source: StoredShard, chunks: range) -> None:
    span = slice(chunks.start * DIGEST_BYTES, chunks.stop * DIGEST_BYTES)
    here, there = own.trailer, source.trailer
    sizes = here.record.header.chunk_bytes, there.record.header.chunk_bytes
    if sizes[0] != sizes[1] or here.table.digests[span] != there.table.digests[span]:
        raise CorruptionError(f"{own.key}: chunks {chunks} are not those of {source.key}")


def _read(source: Source, ref: ShardRef, size_bytes: int, *, packed: bool) -> StoredShard:
    length_of = index_bytes_of if packed else trailer_bytes_of
    likely = _PACK_TAIL_BYTES if packed else _likely_trailer(size_bytes)
    tail = source.last_bytes(min(size_bytes, likely), size_bytes)
    length = length_of(tail[-FOOTER.size :])
    if length > size_bytes:
        raise CorruptionError(
            f"{source.describe()}: {length} bytes at its end, it has {size_bytes}"
        )
    if length > len(tail):
        tail = source.last_bytes(length, size_bytes)
    tail = tail[-length:]
    index = unpack_index(tail, size_bytes) if packed else None
    trailer = unpack_trailer(tail) if index is None else index.trailer
    check_ref(trailer.record, ref)
    if index is None and trailer.record.file_bytes != size_bytes:
        raise CorruptionError(
            f"{source.describe()}: has {size_bytes} bytes, its trailer means "
            f"{trailer.record.file_bytes}"
        )
    return StoredShard(source.key, trailer, tail, index)


def _likely_trailer(size_bytes: int) -> int:
    """Enough of a file's end for the trailer of a shard as they are written, and little more: many
    ranks read it. Where that is too little, the footer says how much it is."""
    return table_bytes(size_bytes // CHUNK_BYTES + 1, SHARD_VERSION) + 2 * BLOCK_BYTES


# ---------------------------------------------------------------------------- upload


@dataclass(frozen=True, slots=True)
class PackParts:
    """A pack as parts, each of them runs of chunks of the open shard file, the last with the index.

    No part cuts a chunk, so that the checksums of all follow from the chunk table: nothing is read.
    """

    plan: PartPlan
    bodies: tuple[Body, ...]

    def body(self, part: Part) -> Body:
        return self.bodies[part.number - 1]


def plan_pack_parts(fd: int, index: PackIndex, part_bytes: int) -> PackParts:
    """`fd`: the whole shard file. Raises FormatError for an index that no reader would take."""
    tail = pack_index(index)
    size = index.header.chunk_bytes
    stored = index.stored_bytes
    total = stored + len(tail)
    part_bytes = -(-max(part_bytes, -(-total // MAX_PARTS)) // size) * size
    chunks = [chunk for run in index.runs() if run.place == HERE for chunk in run.chunks]
    parts: list[Part] = []
    bodies: list[Body] = []
    whole = 0
    for number, start in enumerate(range(0, total, part_bytes), start=1):
        span = ByteRange(start, min(start + part_bytes, total))
        inside = chunks[start // size : -(-min(span.stop, stored) // size)]
        after = tail[max(0, start - stored) : max(0, span.stop - stored)]
        files = tuple(_file_ranges(fd, index, inside))
        crc = _checksum(index, inside, after)
        whole = append_crc(whole, crc, span.length_bytes)
        parts.append(Part(number, span, crc))
        bodies.append(JoinedBody((*files, after) if after else files))
    return PackParts(PartPlan(tuple(parts), total, whole), tuple(bodies))


def _file_ranges(fd: int, index: PackIndex, chunks: list[int]) -> Iterator[FileBody]:
    header = index.header
    first = head_bytes(header)
    start = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or chunks[at] != chunks[at - 1] + 1:
            offset = chunks[start] * header.chunk_bytes
            stop = min((chunks[at - 1] + 1) * header.chunk_bytes, header.payload_bytes)
            yield FileBody(fd, first + offset, stop - offset)
            start = at


def _checksum(index: PackIndex, chunks: list[int], after: bytes) -> int:
    header, crc = index.header, 0
    for chunk in chunks:
        length = min(header.chunk_bytes, header.payload_bytes - chunk * header.chunk_bytes)
        crc = append_crc(crc, index.table.crcs[chunk], length)
    return append_crc(crc, crc32c(after), len(after))
