"""The reader: puts parts of a checkpoint into memory, from verified chunks of its shards.

A part is a span of one rank's payload, of which the whole shard is the longest, or the boxes of a layout,
which may come from the shards of several ranks. The places of a shard are tried in order. What a place has
sent before it failed is kept, and the next place continues with the rest. A shard that no place has is left
out, and other shards that hold the same slices are read.

`restore_reply` and `Reader.fill` serve a rank's Restore and Fill, in a pod and in a folder.

The reader is a coroutine, because in a sidecar each place has threads of its own. `run_blocking` runs it
where every call blocks. The calls that read one shard block and do not retry.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from holdfast_core.errors import CorruptionError, HoldfastError, NotFoundError, UnavailableError
from holdfast_core.format.manifest import Manifest, ManifestShard
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import ByteRange, Digest, Rank, TierName
from holdfast_core.messages.schema import Restore, RestorePoint, RestoreReply
from holdfast_core.reshard.boxes import holders_of
from holdfast_core.reshard.plan import (
    READ_BYTES,
    Move,
    Read,
    SliceSearch,
    by_source,
    home_of,
    reads_of,
)
from holdfast_core.shards.file import ShardRecord, trailer_bytes
from holdfast_core.shm.slot_file import SlotTarget, begin_assembly, begin_shard
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.sources import AHEAD_BYTES, ReaderSource, SourceErrors

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_ORDER = (TierName.NODE, TierName.PEER, TierName.OBJECT)


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """One place that may have a shard."""

    tier: TierName
    name: str
    """Name for messages. A place that does not answer is known by it."""
    open: Callable[[], AbstractContextManager[ShardSource]]
    """Open the shard for reading. Blocks. Raises HoldfastError."""


P = TypeVar("P", bound=ShardPlace)


class CheckpointPlaces(Protocol[P]):
    """One checkpoint, and the places that may have its parts."""

    @property
    def manifest(self) -> Manifest: ...

    async def layout(self, rank: Rank) -> RankLayout:
        """Return the layout of a rank's shard. Raises HoldfastError if no place has it, or not now."""
        ...

    def places(self, rank: Rank) -> Sequence[P]:
        """Return the places of a rank's shard, in the order in which to try them."""
        ...

    async def run(self, call: Callable[[], T], place: P | None = None) -> T:
        """Run a call that blocks on a place, or computes for long if there is none."""
        ...

    async def failed(self, place: P, rank: Rank, error: HoldfastError) -> None:
        """Report a place that failed: a CorruptionError to the owner of the copy.

        It is called for the first error of its kind of a shard at a place. A place that does not have the
        shard has not failed.
        """
        ...


class Reader(Generic[P]):
    """One read. After an UnavailableError, the same call continues it. Not thread-safe."""

    def __init__(
        self,
        saved: CheckpointPlaces[P],
        sink: PayloadSink,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a reader.

        Args:
            saved: The checkpoint.
            sink: The memory.
            check: Called before each place and after each error. What it raises ends the read, so that the
                errors of a sink that was closed are not attributed to a place.
        """
        self._saved = saved
        self._sink = sink
        self._check = check
        self._record: ShardRecord | None = None
        self._missing: dict[Rank, str] = {}
        """Why a rank's shard or layout cannot be read."""
        self._away: set[Rank] = set()
        """Those of the missing ranks whose shard or layout a place may have that did not answer."""
        self._layouts_away = False
        self._silent: set[str] = set()
        """Places that could not be reached in this pass. They are tried last, so that a pass waits for a
        place's time-out once and not once for each shard."""
        self._copying: dict[tuple[Move, ...], Copying] = {}
        self._done: set[Move] = set()
        self._failures: set[tuple[Rank, str, type[HoldfastError]]] = set()
        self.read_bytes: Counter[TierName] = Counter()
        """Payload bytes that were read from each tier."""
        self.fetched_bytes: Counter[TierName] = Counter()
        """Bytes that came from each tier, chunk tables included."""

    @property
    def farthest(self) -> TierName:
        """The farthest tier that served a part."""
        return max(self.read_bytes, key=_ORDER.index, default=TierName.NODE)

    @property
    def sources(self) -> frozenset[Rank]:
        """The ranks whose shards `read` has read."""
        return frozenset(move.source for move in self._done)

    async def read_span(self, rank: Rank, span: ByteRange) -> ShardRecord:
        """Put a span of a rank's payload at the start of the memory.

        Returns:
            The record of the shard.

        Raises:
            NotFoundError: No place has good bytes of all of it. The message lists what was tried.
            UnavailableError: As NotFoundError, but a place may have them that did not answer.
        """
        self._begin_pass()
        try:
            await self._take(rank, [Move(rank, span.start, span.length_bytes, 0)])
        except NotFoundError as error:
            if rank in self._away:
                raise UnavailableError(str(error)) from error
            raise
        if self._record is None:
            raise ValueError(f"rank {rank}: expected a span with bytes, found {span}")
        return self._record

    async def read(self, wanted: RankLayout, world_size: int) -> None:
        """Put all boxes of a layout into the memory, at the byte ranges of the layout.

        Args:
            wanted: Layout of the new payload. Its header is not written.
            world_size: Number of the ranks that read.

        Raises:
            StateMismatchError: The checkpoint does not hold the wanted tensors.
            NotFoundError: A part is available nowhere. The message lists what was tried.
            UnavailableError: As NotFoundError, but places may have all parts that did not answer.
        """
        self._begin_pass()
        while True:
            try:
                moves = await self._plan(wanted, world_size, self._missing)
            except NotFoundError as error:
                if not self._away:
                    raise
                try:
                    await self._plan(wanted, world_size, self._missing_for_good())
                except NotFoundError:
                    # Even the shards that may still come do not suffice, unless their layouts are away.
                    if not self._layouts_away:
                        raise
                raise UnavailableError(str(error)) from error
            left = by_source(move for move in moves if move not in self._done)
            for rank, group in left.items():
                try:
                    await self._take(rank, group)
                except NotFoundError as error:
                    self._missing[rank] = str(error)
                    break
                self._done.update(group)
            else:
                return

    async def fill(
        self, slot: SlotTarget, rank: Rank, wanted: RankLayout | None, world_size: int
    ) -> ShardRecord | None:
        """Put a payload into a slot, which is FREE at the end.

        Args:
            slot: The memory of this reader. While it is written, it is FILLING.
            rank: The rank that restores.
            wanted: Layout of the payload, which is no saved shard: the slot names none at the end. None: the
                rank's shard as it was saved, which the slot names at the end.
            world_size: Number of the ranks that restore.

        Returns:
            The record of the shard as it was saved, else None.

        Raises what `read_span` and `read` raise, and FormatError for a layout that is none of a payload.
        """
        run, record = self._saved.run, None
        if wanted is None:
            manifest = self._saved.manifest
            size = manifest.shards[rank].payload_bytes
            free = await run(partial(begin_shard, slot, manifest.ref(rank), size))
            record = await self.read_span(rank, ByteRange(0, size))
        else:
            free = await run(partial(begin_assembly, slot, wanted))
            await self.read(wanted, world_size)
        await run(partial(slot.write_header, free))
        return record

    def _begin_pass(self) -> None:
        self._check()
        self._missing = self._missing_for_good()
        self._away.clear()
        self._silent.clear()
        self._layouts_away = False

    def _missing_for_good(self) -> dict[Rank, str]:
        return {rank: text for rank, text in self._missing.items() if rank not in self._away}

    async def _plan(
        self, wanted: RankLayout, world_size: int, missing: dict[Rank, str]
    ) -> tuple[Move, ...]:
        """Plan without the shards of the `missing` ranks, to which a rank without a layout is added.

        Raises what `SliceSearch.moves` raises.
        """
        run, shards = self._saved.run, self._saved.manifest.shards
        search = await run(partial(SliceSearch, wanted, world_size, shards, missing))
        while (rank := await run(search.next)) is not None:
            try:
                layout = await self._saved.layout(rank)
                await run(partial(search.add, rank, layout))
            except HoldfastError as error:
                tried = SourceErrors()
                tried.failed(f"rank {rank}", error)
                missing[rank] = str(tried)
                if tried.retryable:
                    self._away.add(rank)
                    self._layouts_away = True
                search = await run(partial(SliceSearch, wanted, world_size, shards, missing))
        return await run(search.moves)

    async def _take(self, rank: Rank, moves: Sequence[Move]) -> None:
        """Copy the moves of one shard, from as many places as it takes.

        Raises NotFoundError, with what was tried, if the places together do not have good bytes of all.
        """
        copying = self._copying.setdefault(tuple(moves), Copying(moves))
        tried = SourceErrors()
        places = self._saved.places(rank)
        for place in sorted(places, key=lambda place: place.name in self._silent):
            self._check()
            before = copying.read_bytes
            try:
                await self._saved.run(partial(self._copy, place, rank, copying), place)
                return
            except HoldfastError as error:
                self._check()
                tried.failed(f"rank {rank}: {place.name}", error)
                if isinstance(error, UnavailableError):
                    self._silent.add(place.name)
                failure = (rank, place.name, type(error))
                if not isinstance(error, NotFoundError) and failure not in self._failures:
                    self._failures.add(failure)
                    await self._saved.failed(place, rank, error)
            finally:
                if copying.read_bytes > before:
                    self.read_bytes[place.tier] += copying.read_bytes - before
        if tried.retryable:
            self._away.add(rank)
        raise NotFoundError(str(tried))

    def _copy(self, place: ShardPlace, rank: Rank, copying: Copying) -> None:
        """Copy what is left from one place. Blocks. Raises HoldfastError."""
        before, table_bytes = copying.read_bytes, 0
        is_file = place.tier is TierName.NODE
        try:
            with place.open() as source:
                self._record = record = source.trailer.record
                if not is_file:
                    table_bytes = trailer_bytes(record.header)
                check_source(record, self._saved.manifest.shards[rank])
                copying.take(source, self._sink, AHEAD_BYTES if is_file else READ_BYTES)
        finally:
            self.fetched_bytes[place.tier] += table_bytes + copying.read_bytes - before


def run_blocking(read: Coroutine[Any, Any, T]) -> T:
    """Run a read of `CheckpointPlaces` whose methods block, and thus never wait for an event loop."""
    try:
        read.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    read.close()
    raise RuntimeError("the read waits for an event loop: expected that all its calls block")


async def restore_reply(
    message: Restore,
    point: RestorePoint,
    manifest: Manifest,
    is_own: bool,
    publish: Callable[[Sequence[Rank]], Awaitable[Digest]],
) -> RestoreReply:
    """Return what a rank restores from, and put the layouts that it needs into the shared directory.

    Args:
        message: What the rank sent.
        point, manifest: The checkpoint.
        is_own: Whether as many ranks have saved it as restore it, so that each has a shard of its own.
        publish: Puts the layout of the first of some old ranks that has one there. Raises HoldfastError.
    """
    rank, home, layouts = message.rank, None, dict[Digest, int]()
    if message.with_layouts or not is_own:
        old = home_of(rank, manifest.world_size)
        home = await publish([old])
        for ranks in holders_of(manifest.shards).values():
            # The home, which is read anyway, stands for its own group.
            layouts[home if old in ranks else await publish(ranks)] = len(ranks)
    rank_layout = None
    if is_own:
        try:
            rank_layout = await publish([rank])
        except (NotFoundError, CorruptionError, UnavailableError) as error:
            # By its layout a rank notices that its state is sharded differently now. One whose sharding has
            # not changed can do without, and must not fail for a document that no place has. A changed
            # sharding is then noticed by the shapes at load, unless these are equal.
            _LOG.warning("the layout of rank %d of %s: %s", rank, manifest.checkpoint, error)
    return RestoreReply(
        point,
        payload_bytes=manifest.shards[rank].payload_bytes if is_own else 0,
        world_size=manifest.world_size,
        rank_layout=rank_layout,
        home=home,
        layouts=layouts,
    )


class PayloadSink(Protocol):
    """The new payload."""

    def write_payload(self, offset: int, data: memoryview) -> None:
        """Write `data` at payload offset `offset`."""
        ...


class Copying:
    """Copy of the parts of one old rank's shard that a new payload needs.

    If `take` fails, the caller may call it with another source of the same shard, which continues
    where the first one failed.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        """Create a copy. The moves are those of one old rank, in order of start."""
        self._moves = moves
        self._left: Iterator[Read] = iter(())
        self._chunk_bytes: int | None = None
        self.read_bytes = 0
        """Payload bytes read so far from all sources, in whole verified chunks."""

    def take(self, source: ShardSource, target: PayloadSink, limit_bytes: int = READ_BYTES) -> None:
        """Copy all bytes that are left from `source` to `target`.

        After an error, all bytes that were written come from verified chunks. A read has at most
        `limit_bytes`, but at least one chunk.

        Raises:
            CorruptionError: The source yields other bytes than requested.
            HoldfastError: An error of the source or the target.
        """
        header = source.trailer.record.header
        if header.chunk_bytes != self._chunk_bytes:
            # This is the first source, or an earlier source stated a wrong chunk size. Read from the
            # start in this source's chunks.
            self._chunk_bytes = header.chunk_bytes
            self._left = reads_of(
                self._moves, header.payload_bytes, header.chunk_bytes, limit_bytes
            )
        requested: deque[Read] = deque()

        def wanted() -> Iterator[range]:
            for read in self._left:
                requested.append(read)
                yield _chunks_of(read.span, header.chunk_bytes)

        try:
            with closing(source.read(wanted())) as views:
                for view in views:
                    read = requested[0]
                    if len(view) != read.span.length_bytes:
                        raise CorruptionError(
                            f"{source.trailer.record.ref}: received {len(view)} bytes for "
                            f"{read.span}"
                        )
                    self.read_bytes += len(view)
                    for piece in read.pieces:
                        data = view[piece.start : piece.start + piece.length_bytes]
                        target.write_payload(piece.target, data)
                    requested.popleft()
        finally:
            self._left = itertools.chain(requested, self._left)
        if (missed := next(self._left, None)) is not None:
            # A source that ends too early must not leave an unnoticed gap in the payload.
            self._left = itertools.chain((missed,), self._left)
            raise CorruptionError(
                f"{source.trailer.record.ref}: received no bytes for {missed.span}"
            )


def copy_span(source: ReaderSource, span: ByteRange, target: PayloadSink) -> None:
    """Copy a span of the payload of a shard file to the start of `target`.

    Raises CorruptionError, and what the source and the target raise.
    """
    move = Move(source.trailer.record.header.rank, span.start, span.length_bytes, 0)
    Copying([move]).take(source, target, AHEAD_BYTES)


def check_source(record: ShardRecord, shard: ManifestShard) -> None:
    """Raise CorruptionError if an open shard is not the one in the manifest.

    Reads of ranges do not verify the payload's digest, so the chunk table must be the manifest's.
    """
    header = record.header
    found = (header.rank, header.payload_bytes, header.layout, record.blake3, record.chunk_table)
    expected = (shard.rank, shard.payload_bytes, shard.layout, shard.blake3, shard.chunk_table)
    if found != expected:
        raise CorruptionError(
            f"shard of {record.ref}: its head and trailer have (rank, bytes, layout, blake3, chunk "
            f"table) = {found}, expected {expected} according to the manifest"
        )


def _chunks_of(span: ByteRange, chunk_bytes: int) -> range:
    """Return the chunks of `span`, which begins and ends on chunk boundaries or at the payload's end."""
    return range(span.start // chunk_bytes, -(-span.stop // chunk_bytes))
