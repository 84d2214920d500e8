"""List the places that may hold the shards of one checkpoint, for the reader (holdfast_core.reading).

The order is this node, then the other members, then the object store, as for whole shards. Among the
members, the worker whose rank saved the shard comes first. A shard is opened only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from holdfast_core.errors import CorruptionError, HoldfastError
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import Rank, ShardRef, TierName, worker_of
from holdfast_core.messages.schema import Member
from holdfast_core.reading import ShardPlace
from holdfast_core.tasks import Pool
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.sources import ReaderSource
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.restore.fetch import Fetcher
from holdfast_sidecar.wire.bulk import BulkPeers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PodShardPlace(ShardPlace):
    """One place that may hold a shard."""

    pool: Pool
    """Threads to open and read the shard in."""
    member: Member | None = None
    """The member, where the tier is PEER."""


@dataclass(frozen=True, slots=True)
class PodPlaces:
    """The places of a checkpoint's shards, as `reading.CheckpointPlaces`."""

    manifest: Manifest
    namespace: str
    """Namespace of the job that saved it, as in the keys of the store."""
    tiers: Tiers
    bulk: BulkPeers
    fetcher: Fetcher
    metrics: Metrics
    procs_per_worker: int

    async def layout(self, rank: Rank) -> RankLayout:
        digest = self.manifest.shards[rank].layout
        document = await self.fetcher.layout(self.manifest.ref(rank), digest, self.namespace)
        return await self.run(partial(parse_rank_layout, document))

    def places(self, rank: Rank) -> tuple[PodShardPlace, ...]:
        ref, pools, store = self.manifest.ref(rank), self.tiers.pools, self.tiers.store
        home = worker_of(rank, self.procs_per_worker)
        members = sorted(self.fetcher.others(), key=lambda member: member.worker != home)
        found = [PodShardPlace(TierName.NODE, "node tier", partial(self._own, ref), pools.fill)]
        found += [
            PodShardPlace(
                TierName.PEER,
                f"worker {member.worker}",
                partial(self.bulk.open, member, ref),
                pools.fetch,
                member,
            )
            for member in members
        ]
        if store is not None:
            opened = partial(store.open_shard, self.namespace, ref)
            found.append(PodShardPlace(TierName.OBJECT, "object store", opened, pools.fetch))
        return tuple(found)

    async def run(self, call: Callable[[], T], place: PodShardPlace | None = None) -> T:
        return await (self.tiers.pools.fill if place is None else place.pool).run(call)

    async def failed(self, place: PodShardPlace, rank: Rank, error: HoldfastError) -> None:
        """Quarantine a damaged copy on this node, or ask the member to verify its own."""
        logs.warning(
            "a shard is read from another source", rank=rank, source=place.name, error=str(error)
        )
        if not isinstance(error, CorruptionError):
            return
        self.metrics.corruption(place.tier)
        ref = self.manifest.ref(rank)
        if place.member is not None:
            self.fetcher.report_bad_copy(place.member, ref)
        elif place.tier is TierName.NODE:
            await self.tiers.pools.meta.run(self.tiers.node.quarantine, ref, error)

    def _own(self, ref: ShardRef) -> ShardSource:
        return ReaderSource(self.tiers.node.open_shard(ref))
