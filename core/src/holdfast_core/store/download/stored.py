"""How the store holds a shard, whole or packed, and which objects store its chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.ids import ShardRef
from holdfast_core.shards.chunk_table import DIGEST_BYTES, table_bytes
from holdfast_core.shards.file import (
    BLOCK_BYTES,
    FOOTER,
    Trailer,
    head_bytes,
    trailer_bytes_of,
    unpack_trailer,
)
from holdfast_core.shards.pack import (
    HERE,
    PackIndex,
    Run,
    index_bytes_of,
    overlapping,
    runs_within,
    unpack_index,
)
from holdfast_core.shards.record import CHUNK_BYTES
from holdfast_core.shards.stream import check_ref
from holdfast_core.store.download.ranges import Extent
from holdfast_core.store.download.source import READS, Source
from holdfast_core.store.s3.client import ObjectInfo, S3Client, S3Request
from holdfast_core.store.s3.retry import Retrier
from holdfast_core.tiers.pooled import CLOSING

_LOG = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 20
"""Of an object, read at first at most: holds the index of a payload of up to 6 GiB. The size that the
store says is not believed."""

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

    def source(self, run: Run) -> ShardRef | None:
        """Where else a run is; None: it is stored here."""
        return None if self.index is None else self.index.source(run.place)

    def within(self, chunks: range) -> Iterator[Run]:
        """Where these chunks are, in order."""
        return runs_within(self.runs, chunks, self._stored)

    def extent(self, run: Run) -> Extent:
        """Of a run that is stored here."""
        coding = None if self.index is None else self.index.coding
        if coding is not None:
            coding = coding.cut(run.chunks.start, run.chunks.stop)
        return Extent(run.chunks, self.key, run.offset, coding)

    def _stored(self, chunks: range) -> int:
        if self.index is not None:
            return self.index.stored(chunks)
        return len(chunks) * self.trailer.record.header.chunk_bytes  # none of them is the last


class StoredShards:
    """Finds out how shards are stored."""

    def __init__(self, client: S3Client, retrier: Retrier, key_of: KeyOf) -> None:
        self._client = client
        self._retrier = retrier
        self._key_of = key_of

    def find(self, ref: ShardRef, *, looks: int = 3, tail_bytes: int = _TAIL_BYTES) -> StoredShard:
        """Whole before packed: a whole one needs nobody else; where its end is bad, the pack serves.
        `tail_bytes`: of a pack, how much is read at first. Raises NotFoundError, CorruptionError,
        UnavailableError."""
        whole = self._key_of(ref, False)

        def look() -> tuple[bool, ObjectInfo] | None:
            for packed in (False, True):
                info = self._client.head(self._key_of(ref, packed))
                if info is not None:
                    return packed, info
            return None

        found = self._retrier.look(f"look for {whole}", look, looks)
        if found is None:
            where = self._client.describe(S3Request("HEAD", whole))
            raise NotFoundError(f"{where}: no such shard, and no pack of it")
        packed, info = found
        try:
            return self._read(ref, info, tail_bytes, packed=packed)
        except CorruptionError as error:
            key = self._key_of(ref, True)
            other = None
            if not packed:
                other = self._retrier.call(f"look for {key}", lambda: self._client.head(key))
            if other is None:
                raise
            _LOG.warning("%s: taking the pack %s instead: %s", whole, key, error)
            return self._read(ref, other, tail_bytes, packed=True)

    def _read(
        self, ref: ShardRef, info: ObjectInfo, tail_bytes: int, *, packed: bool
    ) -> StoredShard:
        source = Source(self._client, self._retrier, self._key_of(ref, packed))
        likely = tail_bytes if packed else _likely_trailer(info.size_bytes)
        for _ in range(READS - 1):
            try:
                return _read_end(source, ref, info.size_bytes, likely, packed=packed)
            except CorruptionError as error:
                _LOG.warning("%s: reading its end once more: %s", source.describe(), error)
        return _read_end(source, ref, info.size_bytes, likely, packed=packed)

    def has_whole(self, ref: ShardRef) -> bool:
        """There is an object under the name of the whole shard, good or bad."""
        key = self._key_of(ref, False)
        return self._retrier.call(f"look for {key}", lambda: self._client.head(key)) is not None


class ShardPlaces:
    """Which objects store the chunks of one shard. Of what it refers to only places are kept: the
    chunk tables of the 127 packs that a rank of 64 may need are 300 MiB where each has 16 GiB."""

    def __init__(self, own: StoredShard, find: Callable[[ShardRef], StoredShard]) -> None:
        self._own = own
        self._find = find
        self._wanted: dict[ShardRef, list[range]] = {}
        for run in own.runs:
            if (ref := own.source(run)) is not None:
                self._wanted.setdefault(ref, []).append(run.chunks)
        self._known: dict[ShardRef, list[Extent]] = {}
        self._size = own.trailer.record.header.chunk_bytes

    def look(self, workers: ThreadPoolExecutor) -> None:
        """At all that it refers to, some at once: what cannot be had is told before a byte is fetched.
        Raises CorruptionError where a source is gone, has other chunks, or refers on without end."""
        try:
            for _ in workers.map(self._behind, self._wanted):
                pass
        except CancelledError as error:
            raise UnavailableError(f"{self._own.key}: {CLOSING}") from error

    def of(self, chunks: range) -> Iterator[Extent]:
        """In order. Raises what `look` raises, if that was not called."""
        if not chunks:
            return
        for run in self._own.within(chunks):
            ref = self._own.source(run)
            if ref is None:
                yield self._own.extent(run)
            else:
                for extent, cut in overlapping(self._behind(ref), run.chunks):
                    yield extent.cut(cut, self._size)

    def _behind(self, ref: ShardRef) -> list[Extent]:
        if ref not in self._known:
            self._known[ref] = self._resolve(ref, self._wanted[ref])
        return self._known[ref]

    def _resolve(self, ref: ShardRef, wanted: Sequence[range]) -> list[Extent]:
        """All of `wanted` that is found by way of `ref`, in order."""
        try:
            stored = self._find(ref)
        except NotFoundError as error:
            raise CorruptionError(f"{self._own.key}: needs chunks of {ref}: {error}") from error
        found: list[Extent] = []
        further: dict[ShardRef, list[range]] = {}
        for chunks in wanted:
            self._check_same(stored, chunks)
            for run in stored.within(chunks):
                source = stored.source(run)
                if source is None:
                    found.append(stored.extent(run))
                else:
                    further.setdefault(source, []).append(run.chunks)
        del stored
        for source, left in further.items():
            self._check_ends(ref, source)
            found += self._resolve(source, left)
        found.sort(key=lambda extent: extent.chunks.start)
        return found

    def _check_same(self, source: StoredShard, chunks: range) -> None:
        span = slice(chunks.start * DIGEST_BYTES, chunks.stop * DIGEST_BYTES)
        here, there = self._own.trailer.table.digests, source.trailer.table.digests
        if source.trailer.record.header.chunk_bytes != self._size or here[span] != there[span]:
            raise CorruptionError(f"{self._own.key}: chunks {chunks} are not those of {source.key}")

    def _check_ends(self, ref: ShardRef, source: ShardRef) -> None:
        """Only an object of the same step may name another, and only one of an earlier step, which
        stores the chunk itself: two hops, no circle."""
        step = self._own.trailer.record.checkpoint
        if ref.checkpoint != step or source.checkpoint == step:
            raise CorruptionError(
                f"{self._own.key}: no end of references: {ref} refers on to {source}"
            )


def places_in(shards: StoredShards, stored: StoredShard) -> ShardPlaces:
    """Indexes of one group are about as long as each other."""
    tail_bytes = len(stored.tail) + BLOCK_BYTES
    return ShardPlaces(stored, lambda ref: shards.find(ref, tail_bytes=tail_bytes))


def _read_end(
    source: Source, ref: ShardRef, size_bytes: int, likely_bytes: int, *, packed: bool
) -> StoredShard:
    length_of = index_bytes_of if packed else trailer_bytes_of
    tail = source.last_bytes(min(size_bytes, likely_bytes), size_bytes)
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
    table = table_bytes(size_bytes // CHUNK_BYTES + 1)
    return min(table + 2 * BLOCK_BYTES, _TAIL_BYTES)
