"""Give a rank its shard of the restore point: as an open file, or in one of the slots that the rank offers.

A rank whose tensors lie in host memory and that restores its shard as it was saved gets the shard's file,
and the name of a slot that may still hold the shard. It verifies and copies their chunks in one pass. For
all other ranks the payload is put into a slot.

If a slot still holds exactly these bytes, because it survived the restart in shared memory, its checksums
are compared and nothing is copied. Otherwise the payload is read from the places that have it, chunk by
chunk (slot_reader.py). A damaged copy on this node is quarantined.

If the restore point was saved by another number of ranks, the payload is assembled from the shards of
several ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from holdfast_core.errors import FormatError, NotFoundError, RefusedError, UnavailableError
from holdfast_core.format.keys import shard_key
from holdfast_core.format.manifest import Manifest
from holdfast_core.ids import Digest, Rank, ShardRef, TierName
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import (
    Fill,
    Filled,
    Refusal,
    Restore,
    RestoreReply,
    ShardFile,
)
from holdfast_core.reading import restore_reply
from holdfast_core.shm.slot_file import (
    SlotFile,
    SlotState,
    first_fitting,
    kept_slot,
    rank_of_slot,
)
from holdfast_core.tasks import Signal
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import RoundState, fence
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.restore.fetch import PodPlaces
from holdfast_sidecar.restore.rehydrate import Rehydrator, Restored
from holdfast_sidecar.restore.slot_reader import FillTarget, fill
from holdfast_sidecar.save.components import SaveComponents
from holdfast_sidecar.wire.intake import Attached


class Filler:
    """Handler of the Restore and Fill requests of this pod's ranks, on the event loop."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        saves: SaveComponents,
        rehydrator: Rehydrator,
        places: Callable[[Manifest, str], PodPlaces],
        metrics: Metrics,
    ) -> None:
        """Create the handler. `places` returns those of a checkpoint from its manifest and namespace."""
        self._pod = pod
        self._tiers = tiers
        self._layouts = saves.layouts
        self._stager = saves.stager
        self._rehydrator = rehydrator
        self._places = places
        self._metrics = metrics
        self.changed: Signal[[]] = Signal()
        """Called when the source of a rank's shard may have changed."""
        self.lost: Signal[[ShardRef]] = Signal()
        """Called with a shard of this node that other places had to serve, completely or in part."""
        self._targets: dict[Rank, FillTarget] = {}
        """Target of the newest fill of each rank, while it runs."""

    @property
    def busy(self) -> bool:
        """Whether a fill is running."""
        return bool(self._targets)

    async def restore(self, state: RoundState, message: Restore) -> RestoreReply:
        """Return what a rank restores from, and put the layouts that it needs into the shared volume.

        Raises:
            RefusedError: The round does not match or is sealed, or the rank is not of this pod. BUSY: the
                restore point is not on this node yet, or its layout is not available now.
            NotFoundError: No place has the layout.
            FormatError: The layout is not valid.
            UnavailableError: The layout cannot be written to the shared volume.
        """
        restored = self._restored(state, message)
        manifest = restored.manifest
        if manifest is None:
            return RestoreReply(restored.point)
        publish = partial(self._publish, message.rank, restored)
        is_own = not restored.is_of_others
        return await restore_reply(message, restored.point, manifest, is_own, publish)

    async def opened(self, state: RoundState, message: Fill) -> Attached:
        """Return the file of the rank's shard, and the offered slot that may hold the shard, unverified.

        Raises:
            RefusedError, NotFoundError: As `fill`.
            CorruptionError: The copy on this node is damaged. The rank asks for a filled slot then, and
                `fill` quarantines the copy and fetches another one.
        """
        restored = self._restored(state, message)
        ref = restored.refs.get(message.rank)
        if ref is None:
            raise NotFoundError(f"rank {message.rank} has no shard of its own in this round")
        target = self._replace(message)
        try:
            attached = await self._tiers.pools.fill.run(
                self._open, message, ref, _source_of_file(restored, message.rank), target
            )
        finally:
            self._end(message.rank, target)
        if attached.message.slot is not None:
            restored.sources[message.rank] = TierName.MEMORY
        self._rehydrator.failures.healthy(message.rank)
        self.changed()
        return attached

    async def fill(self, state: RoundState, message: Fill) -> Filled:
        """Put the rank's payload into one of the offered slots, and return which one and from which tier.

        Raises:
            RefusedError: The request does not fit the round or the restore point, or an offered slot is
                not of the rank. BUSY: the restore point is not on this node yet, or the fill was stopped.
            NotFoundError: No source has a good copy of a needed shard.
            CapacityError: No offered slot is free and large enough.
            FormatError: A layout is not valid, or is not that of the rank.
            StateMismatchError: The checkpoint does not hold the tensors that the rank requests.
        """
        restored = self._restored(state, message)
        if message.layout is None and restored.is_of_others:
            raise RefusedError(
                Refusal.BAD_REQUEST,
                (
                    f"rank {message.rank} sent no layout: expected one, because another number of "
                    "ranks saved the checkpoint"
                ),
            )
        target = self._replace(message)
        try:
            filled = await self._fill(message, restored, target)
            target.check()
        finally:
            self._end(message.rank, target)
        restored.sources[message.rank] = filled.tier
        self._rehydrator.failures.healthy(message.rank)
        self.changed()
        return filled

    def stop(self, why: str) -> None:
        """Stop all fills. After this returns none writes another byte, and each raises RefusedError."""
        for target in self._targets.values():
            target.stop(why)

    def _replace(self, message: Fill) -> FillTarget:
        """Register a new target for the rank's fill, and stop the fill before it.

        A rank asks again only after its connection was lost, and it offers the same slots. There must be no
        await between the check of the round and this call. The target is then of the current round, and a
        SEAL that arrives from now on finds and stops it.

        Raises RefusedError if an offered slot is not of the rank.
        """
        rank = message.rank
        for name in message.slots:
            if rank_of_slot(name) != rank:
                raise RefusedError(Refusal.BAD_REQUEST, f"slot {name!r} is not one of rank {rank}")
        old = self._targets.get(rank)
        if old is not None:
            old.stop("the rank sent another request")
        self._targets[rank] = target = FillTarget(rank)
        return target

    def _end(self, rank: Rank, target: FillTarget) -> None:
        target.stop("the fill has ended")
        if self._targets.get(rank) is target:
            del self._targets[rank]

    async def _fill(self, message: Fill, restored: Restored, target: FillTarget) -> Filled:
        rank, names = message.rank, message.slots
        wanted = None if message.layout is None else await self._layouts.wanted(message.layout)
        ref = restored.refs.get(rank)
        if restored.manifest is None or (wanted is None and ref is None):
            raise NotFoundError(f"rank {rank} has nothing to restore in this round")
        if wanted is not None and wanted.rank != rank:
            raise FormatError(f"fill of rank {rank}: the layout is of rank {wanted.rank}")
        size = restored.payload_bytes[rank] if wanted is None else wanted.payload_bytes
        if wanted is None and ref is not None:
            node = self._tiers.node
            kept = await self._tiers.pools.fill.run(self._kept, names, ref, size, target, node)
            if kept is not None:
                return Filled(kept, size, TierName.MEMORY)
        slot = await self._tiers.pools.fill.run(self._room, names, size, target)
        self._stager.memory.pop(slot, None)
        saved = self._places(restored.manifest, self._pod.namespace_of(restored.point))
        waits = partial(self._failed, rank, target=target, is_final=False)
        try:
            world_size, patience = self._pod.state.world_size, self._pod.patience
            record, tier = await fill(saved, target, rank, wanted, world_size, patience, waits)
        except NotFoundError as error:
            text = f"cannot be restored: {error}"
            self._failed(rank, text, target)
            raise NotFoundError(text) from error
        if record is None:  # the payload was assembled
            return Filled(slot, size, tier)
        target.check()
        self._stager.memory[slot] = record
        if tier is TierName.NODE:
            return Filled(slot, size, _source_of_file(restored, rank))
        self.lost(record.ref)
        return Filled(slot, size, tier)

    def _restored(self, state: RoundState, message: Restore | Fill) -> Restored:
        """Return what the ranks restore from, if the request fits the round.

        Raises StaleRoundError, RefusedError.
        """
        raise_refused(fence(state, message.round))
        if message.rank not in state.own_ranks:
            raise RefusedError(Refusal.BAD_REQUEST, f"rank {message.rank} does not run in this pod")
        if self._rehydrator.restored is None:
            raise RefusedError(
                Refusal.BUSY, ("the shards of the restore point are not on the node yet")
            )
        return self._rehydrator.restored

    async def _publish(self, rank: Rank, restored: Restored, holders: Sequence[Rank]) -> Digest:
        """Put a layout into the shared volume. Raises what `_layout` raises, and UnavailableError."""
        return await self._layouts.publish(await self._layout(rank, restored, holders))

    async def _layout(self, rank: Rank, restored: Restored, holders: Sequence[Rank]) -> bytes:
        """Return the layout of the first of the old ranks `holders` whose layout any place has.

        This is retried for a while if a place that may have one is unreachable.

        Raises:
            NotFoundError: No place has any of the layouts.
            RefusedError: BUSY: no place could provide one in time. The fill does not proceed without it,
                since the rank could then load another part of a tensor as its own.
        """
        patience = self._pod.patience()
        while True:
            problems: list[str] = []
            is_away = False
            for holder in holders:
                try:
                    return await self._rehydrator.layout(restored, holder)
                except UnavailableError as error:
                    is_away = True
                    problems.append(str(error))
                except NotFoundError as error:
                    problems.append(str(error))
            text = f"layout of step {restored.point.step} cannot be read: {'; '.join(problems)}"
            if not is_away:
                raise NotFoundError(text)
            if patience.over:
                raise RefusedError(Refusal.BUSY, text)
            await patience.pause()
            if self._rehydrator.restored is not restored:
                raise RefusedError(
                    Refusal.BUSY, "the round of the restore ended before its layout was read"
                )

    def _failed(self, rank: Rank, text: str, target: FillTarget, *, is_final: bool = True) -> None:
        """Report why the rank cannot be restored, unless the fill was stopped.

        The error of a stopped fill would be attributed to the next round. Raises RefusedError then.
        """
        target.check()
        self._rehydrator.failures.note(rank, f"rank {rank}: {text}", is_final=is_final)

    # ------------------------------------------------------------------ in a thread

    def _kept(
        self,
        names: tuple[str, ...],
        ref: ShardRef,
        payload_bytes: int,
        target: FillTarget,
        node: NodeTier | None,
    ) -> str | None:
        """Return `kept_slot` of the offered slots, and make the slot FREE."""

        def take(slot: SlotFile) -> bool:
            with target.writing():
                if not self._stager.owns(slot):
                    slot.set_state(SlotState.FREE)
            return True

        opened = partial(SlotFile.open, self._pod.settings.slots_dir)
        return kept_slot(names, ref, payload_bytes, opened, take, node)

    def _open(self, message: Fill, ref: ShardRef, source: TierName, target: FillTarget) -> Attached:
        with self._tiers.node.open_shard(ref) as reader:
            size = reader.record.header.payload_bytes
            slot = self._kept(message.slots, ref, size, target, None)
            if slot is None:
                self._metrics.fetched(TierName.NODE, size)
            file = ShardFile(shard_key(ref), ref, source, slot, is_attached=True)
            return Attached(file, os.dup(reader.fd))

    def _room(self, names: tuple[str, ...], payload_bytes: int, target: FillTarget) -> str:
        """Give the target the first offered slot that is large enough and that the stager does not own.

        Returns the slot's name. Raises CapacityError without such a slot.
        """

        def capacity_of(name: str) -> int | None:
            slot = SlotFile.open(self._pod.settings.slots_dir, name)
            if self._stager.owns(slot):
                slot.close()
                return None
            target.take(slot)
            return target.header().capacity_bytes

        return first_fitting(names, payload_bytes, capacity_of)


def _source_of_file(restored: Restored, rank: Rank) -> TierName:
    """Return the tier from which the file on this node came. MEMORY is that of a slot, not of the file."""
    found = restored.sources[rank]
    return TierName.NODE if found is TierName.MEMORY else found
