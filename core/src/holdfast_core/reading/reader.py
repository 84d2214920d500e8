"""The reader: puts parts of a checkpoint into memory, from verified chunks of its shards.

A part is a span of one rank's payload, of which the whole shard is the longest, or the boxes of a layout,
which may come from the shards of several ranks. The places of a shard are tried in order. What a place has
sent before it failed is kept, and the next place continues with the rest. A shard that no place has is left
out, and other shards that hold the same slices are read.

The reader is a coroutine, because in a sidecar each place has threads of its own. `run_blocking` runs it
where every call blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from holdfast_core.errors import HoldfastError, NotFoundError, UnavailableError
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import ByteRange, Rank, TierName
from holdfast_core.reading.copying import Copying, PayloadSink, check_source
from holdfast_core.reshard.plan import Move, SliceSearch
from holdfast_core.reshard.reads import READ_BYTES, by_source
from holdfast_core.shards.file import trailer_bytes
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.source_errors import SourceErrors
from holdfast_core.tiers.sources import AHEAD_BYTES

T = TypeVar("T")
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
