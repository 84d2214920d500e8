"""Lookup of how the store holds a shard, whole or as a pack, and of the objects that store its chunks."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

from holdfast_core.errors import CorruptionError, NotFoundError
from holdfast_core.ids import ShardRef
from holdfast_core.shards.file import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DIGEST_BYTES,
    FOOTER,
    Trailer,
    head_bytes,
    table_bytes,
    trailer_bytes_of,
    unpack_trailer,
)
from holdfast_core.shards.pack import (
    HERE,
    ChunkRun,
    Coding,
    PackIndex,
    index_bytes_of,
    overlapping,
    runs_within,
    unpack_index,
)
from holdfast_core.shards.stream import check_ref
from holdfast_core.tiers.objects import RangedStore
from holdfast_core.tiers.sources import run_all

READS = 2
"""How often bytes that do not verify are read in all. A bit may have flipped in transit."""


@dataclass(frozen=True, slots=True)
class Source:
    """One object of a store."""

    store: RangedStore
    key: str
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when the download has failed or ended. No further request is sent then."""

    def fill(self, start: int, buffer: memoryview) -> None:
        """Read the object's bytes [start, start + len(buffer)). See RangedStore.read_into."""
        self.store.read_into(self.key, start, buffer, self.stopped)

    def last_bytes(self, count: int, size_bytes: int) -> bytes:
        """Return the last `count` bytes of the object, which has `size_bytes` bytes."""
        if not count:
            return b""
        # An anonymous map, whose pages exist only once bytes have arrived: `count` may come from a peer.
        data = memoryview(mmap.mmap(-1, count))
        self.fill(size_bytes - count, data)
        return bytes(data)

    def describe(self) -> str:
        return f"{self.key!r} in {self.store.name}"


_LOG = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 20
"""Length of the first read of a pack's end; it holds the index of a payload of up to 6 GiB. It is also the
limit of the first read of a shard file's end, because the size that the store reports may be wrong."""

MAX_TRAILER_BYTES = 256 << 20
"""Largest trailer or index that is accepted. It suffices for a payload of 1.8 TiB."""

KeyOf = Callable[[ShardRef, bool], str]
"""Returns the key of a shard, or of its pack if the second argument is true."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive chunks that one object stores consecutively."""

    chunks: range
    key: str
    offset: int
    """Where the first chunk begins in the object."""
    coding: Coding | None = None
    """How these chunks are compressed; None if they are not."""

    def cut(self, chunks: range, chunk_bytes: int) -> Extent:
        """Return the extent of some of these chunks, which must be consecutive."""
        first, stop = (at - self.chunks.start for at in (chunks.start, chunks.stop))
        if self.coding is None:
            return Extent(chunks, self.key, self.offset + first * chunk_bytes)
        skipped = self.coding.stored_bytes(0, first)
        return Extent(chunks, self.key, self.offset + skipped, self.coding.cut(first, stop))


@dataclass(frozen=True)
class StoredShard:
    """A shard that the store holds whole or as a pack. The end of the object has been verified."""

    key: str
    trailer: Trailer
    tail_bytes: int
    """Length of the trailer, or of a pack's index."""
    index: PackIndex | None
    """None if the shard is stored whole."""

    @cached_property
    def runs(self) -> list[ChunkRun]:
        """The runs of all chunks, in order."""
        if self.index is not None:
            return list(self.index.runs())
        return [
            ChunkRun(range(len(self.trailer.table)), HERE, head_bytes(self.trailer.record.header))
        ]

    @property
    def has_coding(self) -> bool:
        """Whether chunks of this object are compressed."""
        return self.index is not None and self.index.coding is not None

    def source(self, run: ChunkRun) -> ShardRef | None:
        """Return the shard that stores a run; None if this object stores it."""
        return None if self.index is None else self.index.source(run.place)

    def within(self, chunks: range) -> Iterator[ChunkRun]:
        """Return the runs that cover these chunks, cut to them, in order."""
        return runs_within(self.runs, chunks, self._stored)

    def extent(self, run: ChunkRun) -> Extent:
        """Return the extent of a run that this object stores."""
        coding = None if self.index is None else self.index.coding
        if coding is not None:
            coding = coding.cut(run.chunks.start, run.chunks.stop)
        return Extent(run.chunks, self.key, run.offset, coding)

    def _stored(self, chunks: range) -> int:
        if self.index is not None:
            return self.index.stored(chunks)
        # `runs_within` asks only for chunks before others, so the shorter last chunk is not among them.
        return len(chunks) * self.trailer.record.header.chunk_bytes


class StoredShards:
    """Lookup of shards in one store."""

    def __init__(self, store: RangedStore, key_of: KeyOf, *, packs: bool = True) -> None:
        """Create the lookup.

        Args:
            store: The objects.
            key_of: Returns their keys.
            packs: Whether the store may have packs. A peer has none, and one that claims to is not asked.
        """
        self._store = store
        self._key_of = key_of
        self._kinds = (False, True) if packs else (False,)

    def find(
        self, ref: ShardRef, *, sure: bool = True, tail_bytes: int = _TAIL_BYTES
    ) -> StoredShard:
        """Find a shard, and read and verify the end of its object.

        The whole shard is preferred because it needs no other object. If its end is damaged, the pack is
        used.

        Args:
            ref: The shard.
            sure: Whether the store is asked repeatedly before NotFoundError is raised.
            tail_bytes: Length of the first read of a pack's end.

        Raises:
            NotFoundError: The store has neither the shard nor its pack.
            CorruptionError: The end of the object was wrong at every read.
            UnavailableError: The store cannot be reached.
        """
        packed, size_bytes = self._look(ref, sure)
        try:
            return self._read(ref, size_bytes, tail_bytes, packed=packed)
        except CorruptionError as error:
            key = self._key_of(ref, True)
            other = None if packed or True not in self._kinds else self._store.size(key)
            if other is None:
                raise
            _LOG.warning("%s: using the pack %s instead: %s", self._key_of(ref, False), key, error)
            return self._read(ref, other, tail_bytes, packed=True)

    def _look(self, ref: ShardRef, sure: bool) -> tuple[bool, int]:
        """Return whether the shard is packed, and the length of its object. Raises NotFoundError."""
        for surely in (False, True) if sure else (False,):
            for packed in self._kinds:
                size_bytes = self._store.size(self._key_of(ref, packed), sure=surely)
                if size_bytes is not None:
                    return packed, size_bytes
        whole = Source(self._store, self._key_of(ref, False))
        raise NotFoundError(f"{whole.describe()}: no such shard, and no pack of it")

    def _read(
        self, ref: ShardRef, size_bytes: int, tail_bytes: int, *, packed: bool
    ) -> StoredShard:
        source = Source(self._store, self._key_of(ref, packed))
        likely = tail_bytes if packed else _likely_trailer(size_bytes)
        for _ in range(READS - 1):
            try:
                return _read_end(source, ref, size_bytes, likely, packed=packed)
            except CorruptionError as error:
                _LOG.warning("%s: reading its end again: %s", source.describe(), error)
        return _read_end(source, ref, size_bytes, likely, packed=packed)


class ShardPlaces:
    """The objects that store the chunks of one shard.

    Of other packs only the places of the needed chunks are kept, not the chunk tables: a rank in a group
    of 64 may need 127 packs, whose tables take 300 MiB if each pack has a payload of 16 GiB.
    """

    def __init__(self, own: StoredShard, find: Callable[[ShardRef], StoredShard]) -> None:
        """`find` looks up the shards to which `own` refers."""
        self._own = own
        self._find = find
        self._wanted: dict[ShardRef, list[range]] = {}
        for run in own.runs:
            if (ref := own.source(run)) is not None:
                self._wanted.setdefault(ref, []).append(run.chunks)
        self._known: dict[ShardRef, list[Extent]] = {}
        self._size = own.trailer.record.header.chunk_bytes

    def look(self, workers: ThreadPoolExecutor) -> None:
        """Look up all shards to which this one refers, in parallel, before any chunk is fetched.

        Raises:
            CorruptionError: A shard is gone, has other chunks, or refers to one that it must not.
            UnavailableError: The retry policy is spent, or the tier is being closed.
        """
        run_all(workers, self._behind, self._wanted)

    @property
    def has_coding(self) -> bool:
        """Whether chunks are compressed, as far as their places have been looked up."""
        known = (extent for extents in self._known.values() for extent in extents)
        return self._own.has_coding or any(extent.coding is not None for extent in known)

    def of(self, chunks: range) -> Iterator[Extent]:
        """Return the extents that store these chunks, in order.

        Shards that `look` did not look up are looked up now, which raises what `look` raises.
        """
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
        """Return the extents that store the chunks `wanted`, found by way of the shard `ref`, in order."""
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
        """Raise CorruptionError unless `source` has the same chunks, by chunk size and digest."""
        span = slice(chunks.start * DIGEST_BYTES, chunks.stop * DIGEST_BYTES)
        here, there = self._own.trailer.table.digests, source.trailer.table.digests
        if source.trailer.record.header.chunk_bytes != self._size or here[span] != there[span]:
            raise CorruptionError(f"{self._own.key}: chunks {chunks} are not those of {source.key}")

    def _check_ends(self, ref: ShardRef, source: ShardRef) -> None:
        """Check that the shard `ref` may refer to `source`. Raise CorruptionError if not.

        Only a shard of the same checkpoint may refer to another shard, which must be of another
        checkpoint and must store the chunk itself. So there are at most two hops and no cycle.
        """
        step = self._own.trailer.record.checkpoint
        if ref.checkpoint != step or source.checkpoint == step:
            raise CorruptionError(
                f"{self._own.key}: expected no second reference, found that {ref} refers to "
                f"{source}"
            )


def places_in(shards: StoredShards, stored: StoredShard) -> ShardPlaces:
    """Return the places of a shard's chunks.

    The indexes of one group's packs are about equally long, so the length of this one's end is the length
    of the first read of each other one.
    """
    tail_bytes = stored.tail_bytes + BLOCK_BYTES
    return ShardPlaces(stored, lambda ref: shards.find(ref, tail_bytes=tail_bytes))


def _read_end(
    source: Source, ref: ShardRef, size_bytes: int, likely_bytes: int, *, packed: bool
) -> StoredShard:
    length_of = index_bytes_of if packed else trailer_bytes_of
    tail = source.last_bytes(min(size_bytes, likely_bytes), size_bytes)
    length = length_of(tail[-FOOTER.size :])
    if length > min(size_bytes, MAX_TRAILER_BYTES):
        raise CorruptionError(
            f"{source.describe()}: {length} bytes at its end, but the object has {size_bytes}, and at "
            f"most {MAX_TRAILER_BYTES} are accepted"
        )
    if length > len(tail):
        tail = source.last_bytes(length, size_bytes)
    tail = tail[-length:]
    index = unpack_index(tail, size_bytes) if packed else None
    trailer = unpack_trailer(tail) if index is None else index.trailer
    check_ref(trailer.record, ref)
    if index is None and trailer.record.file_bytes != size_bytes:
        raise CorruptionError(
            f"{source.describe()}: has {size_bytes} bytes, expected {trailer.record.file_bytes} "
            "according to its trailer"
        )
    return StoredShard(source.key, trailer, length, index)


def _likely_trailer(size_bytes: int) -> int:
    """Return how much of a shard file's end to read first.

    It is little more than the trailer of a shard with the usual chunk size, because many ranks read it.
    If it is too short, the footer has the length for a second read.
    """
    table = table_bytes(size_bytes // CHUNK_BYTES + 1)
    return min(table + 2 * BLOCK_BYTES, _TAIL_BYTES)
