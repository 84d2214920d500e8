"""Makes the payload that a rank wants of the shards that other ranks saved, by ranges.

Of each shard that the plan names only the chunks that are needed are read, from the first place that
has them (sources.py), verified, and written straight into the slot. Where a place fails in the
middle, the next one is asked for the rest. A shard that cannot be had anywhere is left out: where
another holds the same slices, the plan without it is tried. What only a place has that does not
answer now is waited for: ranks that begin together ask the same few holders.
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
    StateMismatchError,
    UnavailableError,
)
from holdfast_core.format.layout import Layout
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import Rank, ShardRef, TierName
from holdfast_core.reshard.assemble import Copying, check_source
from holdfast_core.reshard.plan import Move, payload_plan, plan
from holdfast_core.reshard.reads import by_source
from holdfast_core.shards.file import trailer_bytes
from holdfast_core.shm.slot_header import SlotHeader, SlotState
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.backoff import Patience
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.restore.fill_target import FillTarget
from holdfast_sidecar.restore.sources import Place

_ORDER = (TierName.NODE, TierName.PEER, TierName.OBJECT)


@dataclass(slots=True)
class _Read:
    """Of one fill."""

    by_tier: Counter[TierName] = field(default_factory=Counter)
    """Bytes of payloads."""
    silent: set[str] = field(default_factory=set)
    """Places that could not be reached: asked last from then on, so that a time-out is waited for
    once a pass and not once a shard."""
    away: set[Rank] = field(default_factory=set)
    """Shards that such a place may have, and no other one had."""
    copying: dict[tuple[Move, ...], Copying] = field(default_factory=dict)
    """Of one shard's moves each: a later pass goes on where this one ended."""
    said: set[tuple[Rank, str]] = field(default_factory=set)
    """Shards and places of which the log says that they failed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What the restore point holds."""

    manifest: Manifest
    layout: Layout
    namespace: str
    """Of the job that saved it, in the keys of the store."""

    def ref(self, rank: Rank) -> ShardRef:
        return self.manifest.ref(rank)


class Shards(Protocol):
    """What is needed of sources.Places."""

    def of(self, ref: ShardRef, namespace: str) -> Sequence[Place]: ...

    async def bad(self, place: Place, ref: ShardRef, words: str) -> None: ...


class Resharder:
    def __init__(
        self,
        shards: Shards,
        pools: Pools,
        metrics: Metrics,
        patience: Callable[[], Patience],
    ) -> None:
        self._shards = shards
        self._pools = pools
        self._metrics = metrics
        self._patience = patience

    async def fill(
        self,
        saved: Saved,
        wanted: RankLayout,
        target: FillTarget,
        waits: Callable[[str], None],
    ) -> TierName:
        """The whole payload is in the slot, which is FREE and says no identity: it is nobody's
        shard. Returns the farthest tier that served a part.

        Where a place that may have what is missing does not answer, or is busy, it is asked again
        until the target is stopped; `waits` hears the words once that has lasted too long.

        Raises StateMismatchError (the checkpoint holds other tensors), FormatError, NotFoundError
        with everything that was tried, RefusedError when the target is stopped."""
        header = await self._pools.fill.run(_begin, target, wanted)
        missing: dict[Rank, str] = {}
        done: set[Move] = set()
        read = _Read()
        patience: Patience | None = None
        while True:
            try:
                moves = await self._pools.fill.run(self._plan, saved, wanted, missing)
            except NotFoundError as error:
                missing = {rank: words for rank, words in missing.items() if rank not in read.away}
                if not read.away:
                    raise
                await self._pools.fill.run(self._plan, saved, wanted, missing)  # else in vain
                if patience is None:
                    patience = self._patience()
                    logs.warning("a fill waits for a source", rank=wanted.rank, error=str(error))
                if patience.over:
                    waits(str(error))
                await patience.pause()
                target.check()
                read.away.clear()
                read.silent.clear()
                continue
            for rank, group in by_source(move for move in moves if move not in done).items():
                try:
                    await self._take(saved, saved.ref(rank), group, target, read)
                    done.update(group)
                except NotFoundError as error:
                    missing[rank] = str(error)
                    break
            else:
                free = SlotHeader(SlotState.FREE, header.rank, header.capacity_bytes)
                await self._pools.fill.run(target.write_header, free)
                logs.info(
                    "payload made of other ranks' shards",
                    rank=wanted.rank,
                    payload_bytes=wanted.payload_bytes,
                    read_bytes={str(tier): count for tier, count in read.by_tier.items()},
                )
                return max(read.by_tier, key=_ORDER.index, default=TierName.NODE)

    def _plan(self, saved: Saved, wanted: RankLayout, missing: dict[Rank, str]) -> tuple[Move, ...]:
        try:
            return plan(wanted, saved.layout, avoid=missing)
        except StateMismatchError as error:
            if not missing:
                raise
            words = "; ".join(missing.values())
            raise NotFoundError(f"{words}; without them: {error}") from error

    async def _take(
        self,
        saved: Saved,
        ref: ShardRef,
        moves: Sequence[Move],
        target: FillTarget,
        read: _Read,
    ) -> None:
        """Raises NotFoundError, with what was tried, when no place has good bytes of it all."""
        copying = read.copying.setdefault(tuple(moves), Copying(moves))
        tried: list[str] = []
        away = False
        places = self._shards.of(ref, saved.namespace)
        for place in sorted(places, key=lambda place: place.name in read.silent):
            target.check()
            before = copying.read_bytes
            try:
                await place.pool.run(self._copy, place, saved, ref, copying, target)
                return
            except HoldfastError as error:
                target.check()  # what a fill that was stopped ran into is no source's fault
                tried.append(f"rank {ref.rank}: {place.name}: {error}")
                if isinstance(error, UnavailableError):
                    read.silent.add(place.name)
                    away = True
                if isinstance(error, CorruptionError):
                    await self._shards.bad(place, ref, str(error))
                if not isinstance(error, NotFoundError) and (ref.rank, place.name) not in read.said:
                    read.said.add((ref.rank, place.name))
                    logs.warning(
                        "a shard is read elsewhere",
                        rank=ref.rank,
                        source=place.name,
                        error=str(error),
                    )
            finally:
                if copying.read_bytes > before:
                    read.by_tier[place.tier] += copying.read_bytes - before
        if away:
            read.away.add(ref.rank)
        raise NotFoundError("; ".join(tried))

    def _copy(
        self, place: Place, saved: Saved, ref: ShardRef, copying: Copying, target: FillTarget
    ) -> None:
        before, table_bytes = copying.read_bytes, 0
        try:
            with place.open() as source:
                record = source.trailer.record
                if place.tier is not TierName.NODE:
                    table_bytes = trailer_bytes(record.header)
                shard, part = saved.manifest.shards[ref.rank], saved.layout.ranks[ref.rank]
                check_source(record, shard, part)
                copying.take(source, target)
        finally:
            self._metrics.fetched(place.tier, table_bytes + copying.read_bytes - before)


def _begin(target: FillTarget, wanted: RankLayout) -> SlotHeader:
    """FILLING, without an identity: a death from here on leaves a slot that nobody believes."""
    header = target.header()
    target.write_header(SlotHeader(SlotState.FILLING, header.rank, header.capacity_bytes))
    target.write_payload(0, memoryview(payload_plan(wanted).header))
    return header
