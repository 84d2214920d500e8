"""Assemble the payload of one rank from byte ranges of the shards that other ranks saved.

The plan lists the byte ranges of each shard. It is made from the layouts of those old ranks that it needs,
which are fetched one at a time. Only the chunks that contain them are read, from the first
place that has them (sources.py), verified, and written directly into the slot. If a place fails midway,
the next place continues with the rest. A shard that no place has is left out, and a plan without it is
made, since other shards may hold the same slices. A shard that only an unreachable place may have is
waited for, because ranks that start together read from the same few holders and may overload them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast_core.errors import (
    CorruptionError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import Digest, Rank, ShardRef, TierName
from holdfast_core.reshard.assemble import Copying, check_source
from holdfast_core.reshard.plan import Move, SliceSearch
from holdfast_core.reshard.reads import by_source
from holdfast_core.shards.file import trailer_bytes
from holdfast_core.shm.slot_fill import begin_assembly
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.backoff import Patience
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.restore.fill_target import FillTarget
from holdfast_sidecar.restore.sources import ShardLocation

_ORDER = (TierName.NODE, TierName.PEER, TierName.OBJECT)


@dataclass(slots=True)
class _Read:
    """State of the reads of one fill."""

    by_tier: Counter[TierName] = field(default_factory=Counter)
    """Payload bytes that were read from each tier."""
    silent: set[str] = field(default_factory=set)
    """Names of the places that could not be reached in this pass. They are tried last, so that a pass
    waits for a place's time-out once and not once for each shard."""
    away: set[Rank] = field(default_factory=set)
    """Ranks whose shard or layout no place has provided, and which an unreachable place may have."""
    layouts_away: bool = False
    """Whether an unreachable place may have a layout that was needed in this pass."""
    copying: dict[tuple[Move, ...], Copying] = field(default_factory=dict)
    """Progress for each group of one shard's moves. A later pass continues there."""
    reported: set[tuple[Rank, str]] = field(default_factory=set)
    """Pairs of shard and place whose failure was logged."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The restore point: its manifest, and where the store keeps it."""

    manifest: Manifest
    namespace: str
    """Namespace of the job that saved it, as in the keys of the store."""

    def ref(self, rank: Rank) -> ShardRef:
        return self.manifest.ref(rank)


class Shards(Protocol):
    """The part of `sources.ShardLocations` that a Resharder needs."""

    def of(self, ref: ShardRef, namespace: str) -> Sequence[ShardLocation]: ...

    async def bad(self, place: ShardLocation, ref: ShardRef, damage: CorruptionError) -> None: ...


class Layouts(Protocol):
    """The part of `fetch.Fetcher` that a Resharder needs."""

    async def layout(self, ref: ShardRef, digest: Digest, namespace: str) -> bytes: ...


class Resharder:
    """Assembler of payloads from the shards of other ranks."""

    def __init__(
        self,
        shards: Shards,
        layouts: Layouts,
        pools: Pools,
        metrics: Metrics,
        patience: Callable[[], Patience],
    ) -> None:
        self._shards = shards
        self._layouts = layouts
        self._pools = pools
        self._metrics = metrics
        self._patience = patience

    async def fill(
        self,
        saved: Saved,
        wanted: RankLayout,
        world_size: int,
        target: FillTarget,
        waits: Callable[[str], None],
    ) -> TierName:
        """Write the whole payload into the target's slot.

        The slot is then FREE and its header names no round and step, since its bytes are not a saved
        shard. If a place that may have a missing part is unreachable or busy, it is tried again until it
        serves the part or the target is stopped.

        Args:
            saved: The restore point.
            wanted: Layout of the payload to assemble.
            world_size: Number of the ranks that restore.
            target: Guard of the slot to write.
            waits: Called with the reason, on each retry, once waiting has lasted longer than the patience.

        Returns:
            The farthest tier that served a part of the payload.

        Raises:
            StateMismatchError: The checkpoint does not hold the wanted tensors.
            FormatError: `wanted` is not a valid layout of a payload.
            NotFoundError: A part is available nowhere. The message lists what was tried.
            RefusedError: The target was stopped.
        """
        free = await self._pools.fill.run(begin_assembly, target, wanted)
        missing: dict[Rank, str] = {}
        done: set[Move] = set()
        read = _Read()
        patience: Patience | None = None
        while True:
            try:
                moves = await self._plan(saved, wanted, world_size, missing, read)
            except NotFoundError as error:
                missing = {rank: text for rank, text in missing.items() if rank not in read.away}
                if not read.away:
                    raise
                try:
                    await self._plan(saved, wanted, world_size, dict(missing), read)
                except NotFoundError:
                    # Even the shards that may still come do not suffice, unless their layouts are away.
                    if not read.layouts_away:
                        raise
                if patience is None:
                    patience = self._patience()
                    logs.warning("a fill waits for a source", rank=wanted.rank, error=str(error))
                if patience.over:
                    waits(str(error))
                await patience.pause()
                target.check()
                read.away.clear()
                read.silent.clear()
                read.layouts_away = False
                continue
            for rank, group in by_source(move for move in moves if move not in done).items():
                try:
                    await self._take(saved, saved.ref(rank), group, target, read)
                    done.update(group)
                except NotFoundError as error:
                    missing[rank] = str(error)
                    break
            else:
                await self._pools.fill.run(target.write_header, free)
                logs.info(
                    "a payload was built from other ranks' shards",
                    rank=wanted.rank,
                    payload_bytes=wanted.payload_bytes,
                    read_bytes={str(tier): count for tier, count in read.by_tier.items()},
                )
                return max(read.by_tier, key=_ORDER.index, default=TierName.NODE)

    async def _plan(
        self,
        saved: Saved,
        wanted: RankLayout,
        world_size: int,
        missing: dict[Rank, str],
        read: _Read,
    ) -> tuple[Move, ...]:
        """Plan without the shards of the `missing` ranks.

        A rank whose layout no place has is added to `missing`, and to `read.away` if an unreachable place
        may have it. The search then begins anew. Raises what `SliceSearch.moves` raises.
        """
        shards, run = saved.manifest.shards, self._pools.fill.run
        search = await run(SliceSearch, wanted, world_size, shards, missing)
        while (rank := await run(search.next)) is not None:
            try:
                document = await self._layouts.layout(
                    saved.ref(rank), shards[rank].layout, saved.namespace
                )
            except (NotFoundError, UnavailableError) as error:
                missing[rank] = f"rank {rank}: {error}"
                if isinstance(error, UnavailableError):
                    read.away.add(rank)
                    read.layouts_away = True
                search = await run(SliceSearch, wanted, world_size, shards, missing)
                continue
            await run(_add, search, rank, document)
        return await run(search.moves)

    async def _take(
        self,
        saved: Saved,
        ref: ShardRef,
        moves: Sequence[Move],
        target: FillTarget,
        read: _Read,
    ) -> None:
        """Copy the moves of one shard, from as many places as it takes.

        Raises NotFoundError, with what was tried, if the places together do not have good bytes of all.
        """
        copying = read.copying.setdefault(tuple(moves), Copying(moves))
        source_errors: list[str] = []
        away = False
        places = self._shards.of(ref, saved.namespace)
        for place in sorted(places, key=lambda place: place.name in read.silent):
            target.check()
            before = copying.read_bytes
            try:
                await place.pool.run(self._copy, place, saved, ref, copying, target)
                return
            except HoldfastError as error:
                target.check()  # the error of a stopped fill must not be attributed to the place
                source_errors.append(f"rank {ref.rank}: {place.name}: {error}")
                if isinstance(error, UnavailableError):
                    read.silent.add(place.name)
                    away = True
                if isinstance(error, CorruptionError):
                    await self._shards.bad(place, ref, error)
                if (
                    not isinstance(error, NotFoundError)
                    and (ref.rank, place.name) not in read.reported
                ):
                    read.reported.add((ref.rank, place.name))
                    logs.warning(
                        "a shard is read from another source",
                        rank=ref.rank,
                        source=place.name,
                        error=str(error),
                    )
            finally:
                if copying.read_bytes > before:
                    read.by_tier[place.tier] += copying.read_bytes - before
        if away:
            read.away.add(ref.rank)
        raise NotFoundError("; ".join(source_errors))

    def _copy(
        self,
        place: ShardLocation,
        saved: Saved,
        ref: ShardRef,
        copying: Copying,
        target: FillTarget,
    ) -> None:
        """Copy what is left of the moves from one place. Blocks. Raises HoldfastError."""
        before, table_bytes = copying.read_bytes, 0
        try:
            with place.open() as source:
                record = source.trailer.record
                if place.tier is not TierName.NODE:
                    table_bytes = trailer_bytes(record.header)
                check_source(record, saved.manifest.shards[ref.rank])
                copying.take(source, target)
        finally:
            self._metrics.fetched(place.tier, table_bytes + copying.read_bytes - before)


def _add(search: SliceSearch, rank: Rank, document: bytes) -> None:
    search.add(rank, parse_rank_layout(document))
