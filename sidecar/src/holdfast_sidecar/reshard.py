"""Makes the payload that a rank wants of the shards that another number of ranks saved.

The shards that the plan names are brought to the node tier whole, each verified on its way like any
copy, and read there in ranges. A shard that cannot be had anywhere is left out: where another holds
the same slices, the plan without it is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.errors import CorruptionError, NotFoundError, StateMismatchError
from holdfast_core.format.layout import Layout
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.format.slot import SlotHeader, SlotState
from holdfast_core.ids import Rank, ShardRef, TierName
from holdfast_core.reshard.assemble import check_source, copy_moves
from holdfast_core.reshard.plan import Move, payload_plan, plan
from holdfast_core.reshard.reads import by_source
from holdfast_core.slot_file import SlotFile
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar import logs
from holdfast_sidecar.metrics import Metrics
from holdfast_sidecar.pools import Pools
from holdfast_sidecar.rehydrate import Rehydrator

_MAX_TRIES = 8
"""Bad copies of one shard in a row before it counts as missing."""
_ORDER = (TierName.NODE, TierName.PEER, TierName.OBJECT)


@dataclass(frozen=True, slots=True)
class Saved:
    """What the restore point holds."""

    manifest: Manifest
    layout: Layout

    def ref(self, rank: Rank) -> ShardRef:
        return self.manifest.ref(rank)


class Resharder:
    def __init__(
        self, node: NodeTier, rehydrator: Rehydrator, pools: Pools, metrics: Metrics
    ) -> None:
        self._node = node
        self._rehydrator = rehydrator
        self._pools = pools
        self._metrics = metrics

    async def fill(self, saved: Saved, wanted: RankLayout, slot: SlotFile) -> TierName:
        """The whole payload is in the slot, which is FREE and says no identity: it is nobody's
        shard. Returns the farthest tier that served a part.

        Raises StateMismatchError (the checkpoint holds other tensors), FormatError, NotFoundError
        with everything that was tried."""
        header = await self._pools.fill.run(_begin, slot, wanted)
        missing: dict[Rank, str] = {}
        farthest = TierName.NODE
        while True:
            moves = await self._pools.fill.run(self._plan, saved, wanted, missing)
            for rank, group in by_source(moves).items():
                try:
                    tier = await self._take(saved, rank, group, slot)
                except NotFoundError as error:
                    missing[rank] = str(error)
                    break
                farthest = max(farthest, tier, key=_ORDER.index)
            else:
                free = SlotHeader(SlotState.FREE, header.rank, header.capacity_bytes)
                await self._pools.fill.run(slot.write_header, free)
                return farthest

    def _plan(self, saved: Saved, wanted: RankLayout, missing: dict[Rank, str]) -> tuple[Move, ...]:
        try:
            return plan(wanted, saved.layout, avoid=missing)
        except StateMismatchError as error:
            if not missing:
                raise
            words = "; ".join(missing.values())
            raise NotFoundError(f"{words}; without them: {error}") from error

    async def _take(self, saved: Saved, rank: Rank, moves: list[Move], slot: SlotFile) -> TierName:
        """Raises NotFoundError when no source has a good copy of the shard."""
        ref = saved.ref(rank)
        for _ in range(_MAX_TRIES):
            tier = await self._rehydrator.bring(ref)
            try:
                await self._pools.fill.run(self._copy, saved, ref, moves, slot)
                return tier
            except CorruptionError as error:
                # It was good when it came: the next source is asked, until there is none.
                self._metrics.corruption(TierName.NODE)
                logs.warning("bad copy in the node tier", rank=rank, error=str(error))
                await self._pools.meta.run(self._node.quarantine, ref, str(error))
            except NotFoundError as error:
                logs.warning("a shard left the node tier", rank=rank, error=str(error))
        raise NotFoundError(f"rank {rank}: {_MAX_TRIES} copies in a row were bad")

    def _copy(self, saved: Saved, ref: ShardRef, moves: list[Move], slot: SlotFile) -> None:
        with self._node.open_shard(ref) as reader:
            manifest, layout = saved.manifest, saved.layout
            check_source(reader.record, manifest.shards[ref.rank], layout.ranks[ref.rank])
            copy_moves(moves, reader, slot)


def _begin(slot: SlotFile, wanted: RankLayout) -> SlotHeader:
    """FILLING, without an identity: a death from here on leaves a slot that nobody believes."""
    header = slot.header()
    slot.write_header(SlotHeader(SlotState.FILLING, header.rank, header.capacity_bytes))
    slot.write_payload(0, memoryview(payload_plan(wanted).header))
    return header
