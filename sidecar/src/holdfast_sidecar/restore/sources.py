"""List the locations that may hold one shard of the restore point, for reads of byte ranges.

The order is this node, then the other members, then the object store, as for whole shards. Among the
members, the worker whose rank saved the shard comes first. A location is opened only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from holdfast_core.errors import CorruptionError
from holdfast_core.ids import ShardRef, TierName, worker_of
from holdfast_core.messages.schema import Member
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.sources import ReaderSource
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pool
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.restore.fetch import Fetcher
from holdfast_sidecar.wire.bulk import BulkPeers


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """One location that may hold a shard."""

    tier: TierName
    name: str
    open: Callable[[], ShardSource]
    """Open the shard for reading. Blocks. Raises HoldfastError."""
    pool: Pool
    """Threads to open and read the shard in."""
    member: Member | None = None
    """The member, where the tier is PEER."""


class ShardLocations:
    """The locations of a shard, and the handling of those whose copy was bad."""

    def __init__(
        self,
        tiers: Tiers,
        bulk: BulkPeers,
        fetcher: Fetcher,
        metrics: Metrics,
        procs_per_worker: int,
    ) -> None:
        self._node = tiers.node
        self._store = tiers.store
        self._pools = tiers.pools
        self._bulk = bulk
        self._fetcher = fetcher
        self._metrics = metrics
        self._procs_per_worker = procs_per_worker

    def of(self, ref: ShardRef, namespace: str) -> tuple[ShardLocation, ...]:
        """Return the locations of a shard, in the order in which to try them.

        Args:
            ref: The shard.
            namespace: Namespace of the job that saved the shard, as in the keys of the store.
        """
        home = worker_of(ref.rank, self._procs_per_worker)
        members = sorted(self._fetcher.others(), key=lambda member: member.worker != home)
        found = [
            ShardLocation(TierName.NODE, "node tier", partial(self._own, ref), self._pools.fill)
        ]
        found += [
            ShardLocation(
                TierName.PEER,
                f"worker {member.worker}",
                partial(self._bulk.open, member, ref),
                self._pools.fetch,
                member,
            )
            for member in members
        ]
        if self._store is not None:
            opened = partial(self._store.open_shard, namespace, ref)
            found.append(ShardLocation(TierName.OBJECT, "object store", opened, self._pools.fetch))
        return tuple(found)

    async def bad(self, place: ShardLocation, ref: ShardRef, damage: CorruptionError) -> None:
        """Handle a damaged copy: quarantine the one on this node, or ask the member to verify its own."""
        self._metrics.corruption(place.tier)
        if place.member is not None:
            self._fetcher.report_bad_copy(place.member, ref)
        elif place.tier is TierName.NODE:
            logs.warning("bad copy in the node tier", rank=ref.rank, error=str(damage))
            await self._pools.meta.run(self._node.quarantine, ref, damage)

    def _own(self, ref: ShardRef) -> ShardSource:
        return ReaderSource(self._node.open_shard(ref))
