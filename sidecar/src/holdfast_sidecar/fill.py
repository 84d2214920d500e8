"""Puts a rank's shard of the restore point into one of the slots that the rank offers.

A slot that still holds exactly those bytes (survived the restart in shared memory) is answered
without a copy, after its checksums were compared. Otherwise the payload is read from the node tier,
verified chunk by chunk as it goes; a bad copy is quarantined and the next source is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from holdfast_core.errors import (
    CapacityError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
)
from holdfast_core.format.digest import crc32c
from holdfast_core.format.layout import parse_layout
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.format.slot import SlotHeader, SlotState
from holdfast_core.ids import Digest, Rank, ShardRef, TierName
from holdfast_core.slot_file import SlotFile, rank_of_slot
from holdfast_core.tiers.base import NodeTier, ShardReader
from holdfast_core.transfer.messages import (
    Fill,
    Filled,
    Refusal,
    Restore,
    RestoreReply,
)
from holdfast_sidecar import logs
from holdfast_sidecar.layouts import RankLayouts
from holdfast_sidecar.metrics import Metrics
from holdfast_sidecar.pools import Pools
from holdfast_sidecar.rehydrate import Rehydrator, Restored
from holdfast_sidecar.reshard import Resharder, Saved
from holdfast_sidecar.rounds import RoundState, fence
from holdfast_sidecar.settings import Settings
from holdfast_sidecar.staging import Stager

_MAX_TRIES = 8
"""Bad copies in a row before a rank is told no."""


class Filler:
    def __init__(
        self,
        settings: Settings,
        node: NodeTier,
        rehydrator: Rehydrator,
        resharder: Resharder,
        layouts: RankLayouts,
        *,
        stager: Stager,
        pools: Pools,
        metrics: Metrics,
        on_change: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._node = node
        self._rehydrator = rehydrator
        self._resharder = resharder
        self._layouts = layouts
        self._stager = stager
        self._pools = pools
        self._metrics = metrics
        self._on_change = on_change

    async def restore(self, state: RoundState, message: Restore) -> RestoreReply:
        """Raises RefusedError; BUSY while the shards are not here (Run comes after that)."""
        restored = self._restored(state, message)
        if restored.manifest is None:
            return RestoreReply(restored.point)
        same = restored.layout is None
        layout = None
        if message.with_layout or not same:
            layout = await self._layouts.give(await self._rehydrator.layout())
        return RestoreReply(
            restored.point,
            payload_bytes=restored.payload_bytes.get(message.rank, 0),
            world_size=restored.manifest.world_size,
            rank_layout=await self._rank_layout(restored.refs[message.rank]) if same else None,
            layout=layout,
        )

    async def fill(self, state: RoundState, message: Fill) -> Filled:
        """Raises RefusedError, NotFoundError, CapacityError, FormatError, StateMismatchError."""
        restored = self._restored(state, message)
        if message.layout is None and restored.layout is not None:
            raise RefusedError(
                Refusal.BAD_REQUEST,
                f"rank {message.rank} says no layout: expected one, since another number of ranks "
                "saved the checkpoint",
            )
        for offer in message.slots:
            if rank_of_slot(offer.name) != message.rank:
                raise RefusedError(
                    Refusal.BAD_REQUEST, f"slot {offer.name!r} is not one of rank {message.rank}"
                )
        names = tuple(o.name for o in message.slots)
        if message.layout is not None:
            return await self._from_others(names, message.rank, message.layout, restored)
        ref = restored.refs.get(message.rank)
        if ref is None:
            raise NotFoundError(f"rank {message.rank} has nothing to restore in this round")
        payload_bytes = restored.payload_bytes[message.rank]
        kept = await self._pools.fill.run(self._from_memory, names, ref, payload_bytes)
        if kept is not None:
            restored.sources[message.rank] = TierName.MEMORY
            self._on_change()
            return Filled(kept, payload_bytes, TierName.MEMORY)
        return await self._from_node(names, ref, payload_bytes, restored)

    def _restored(self, state: RoundState, message: Restore | Fill) -> Restored:
        refused = fence(state, message.round)
        if refused is not None:
            raise RefusedError(refused.code, refused.message)
        if message.rank not in state.own_ranks:
            raise RefusedError(Refusal.BAD_REQUEST, f"rank {message.rank} is not of this pod")
        if self._rehydrator.restored is None:
            raise RefusedError(Refusal.BUSY, "the restore point is not here yet")
        return self._rehydrator.restored

    async def _rank_layout(self, ref: ShardRef) -> Digest | None:
        """Of a shard as it was saved, so that a rank that is cut otherwise now notices."""
        try:
            try:
                document = await self._layouts.saved(ref)
            except HoldfastError:
                document = await self._layouts.part(await self._rehydrator.layout(), ref.rank)
        except HoldfastError as error:
            # The shard is good without it: a rank that is cut as it was must not wait for a document,
            # and of one that is not the shapes tell when it loads, unless they are the same.
            logs.warning("a shard's layout is not here", rank=ref.rank, error=str(error))
            return None
        return await self._layouts.give(document)

    async def _from_others(
        self, names: tuple[str, ...], rank: Rank, digest: Digest, restored: Restored
    ) -> Filled:
        wanted = parse_rank_layout(await self._layouts.wanted(digest))
        if wanted.rank != rank:
            raise FormatError(f"fill of rank {rank}: the layout is of rank {wanted.rank}")
        if restored.manifest is None:
            raise NotFoundError(f"rank {rank} has nothing to restore in this round")
        document = await self._rehydrator.layout()
        layout = await self._pools.fill.run(parse_layout, document)
        saved = Saved(restored.manifest, layout, self._rehydrator.namespace_of(restored.point))
        slot, _ = await self._pools.fill.run(self._room, names, wanted.payload_bytes)
        try:
            self._stager.memory.pop(slot.name, None)
            tier = await self._resharder.fill(saved, wanted, slot)
        except NotFoundError as error:
            self._rehydrator.failed(f"rank {rank}: {error}")
            raise
        finally:
            slot.close()
        restored.sources[rank] = tier
        self._on_change()
        return Filled(slot.name, wanted.payload_bytes, tier)

    async def _from_node(
        self, names: tuple[str, ...], ref: ShardRef, payload_bytes: int, restored: Restored
    ) -> Filled:
        rank = Rank(ref.rank)
        for _ in range(_MAX_TRIES):
            try:
                slot = await self._pools.fill.run(self._copy, names, ref, payload_bytes)
                return Filled(slot, payload_bytes, restored.sources[rank])
            except CorruptionError as error:
                self._metrics.corruption(TierName.NODE)
                logs.warning("bad copy in the node tier", rank=rank, error=str(error))
                await self._pools.meta.run(self._node.quarantine, ref, str(error))
            except NotFoundError as error:
                logs.warning("a shard left the node tier", rank=rank, error=str(error))
            await self._rehydrator.refetch(rank)
            self._on_change()
        raise NotFoundError(f"rank {rank}: {_MAX_TRIES} copies in a row were bad")

    # ------------------------------------------------------------------ in a thread

    def _from_memory(self, names: tuple[str, ...], ref: ShardRef, payload_bytes: int) -> str | None:
        for name in names:
            try:
                slot = SlotFile.open(self._settings.slots_dir, name)
            except HoldfastError:
                continue
            try:
                header = slot.header()
                identity = (header.round, header.step, header.payload_bytes)
                if (
                    header.state is not SlotState.FILLING
                    and identity == (ref.round, ref.step, payload_bytes)
                    and self._holds(slot, ref, payload_bytes)
                ):
                    if not self._stager.owns(name):
                        slot.set_state(SlotState.FREE)
                    return name
            except HoldfastError as error:
                logs.warning("slot not usable", slot=name, error=str(error))
            finally:
                slot.close()
        return None

    def _holds(self, slot: SlotFile, ref: ShardRef, payload_bytes: int) -> bool:
        """Compare with the chunk table where the node tier has it (fast), else by BLAKE3."""
        try:
            with self._node.open_shard(ref) as reader:
                return self._chunks_agree(slot, reader, payload_bytes)
        except (NotFoundError, CorruptionError):
            return slot.payload_digest(payload_bytes) == ref.blake3

    def _chunks_agree(self, slot: SlotFile, reader: ShardReader, payload_bytes: int) -> bool:
        chunk = reader.record.header.chunk_bytes
        buffer = memoryview(bytearray(min(chunk, max(payload_bytes, 1))))
        for index, crc in enumerate(reader.table.crcs):
            part = buffer[: min(chunk, payload_bytes - index * chunk)]
            slot.read_into(index * chunk, part)
            if crc32c(part) != crc:
                return False
        return True

    def _copy(self, names: tuple[str, ...], ref: ShardRef, payload_bytes: int) -> str:
        with self._node.open_shard(ref) as reader:
            slot, header = self._room(names, payload_bytes)
            try:
                filling = SlotHeader(SlotState.FILLING, header.rank, header.capacity_bytes)
                slot.write_header(filling)
                written = 0
                with closing(reader.read_payload()) as parts:
                    for part in parts:
                        slot.write_payload(written, part)
                        written += len(part)
                slot.write_header(
                    SlotHeader(
                        SlotState.FREE,
                        header.rank,
                        header.capacity_bytes,
                        ref.round,
                        ref.step,
                        payload_bytes,
                    )
                )
                self._stager.memory[slot.name] = reader.record
                self._metrics.fetched(TierName.NODE, payload_bytes)
                return slot.name
            finally:
                slot.close()

    def _room(self, names: tuple[str, ...], payload_bytes: int) -> tuple[SlotFile, SlotHeader]:
        """The first offered slot that nobody writes from and that is large enough."""
        found: list[str] = []
        for name in names:
            if self._stager.owns(name):
                found.append(f"{name}: being written")
                continue
            slot = SlotFile.open(self._settings.slots_dir, name)
            try:
                header = slot.header()
            except BaseException:
                slot.close()
                raise
            if header.capacity_bytes >= payload_bytes:
                return slot, header
            slot.close()
            found.append(f"{name}: {header.capacity_bytes} bytes")
        raise CapacityError(
            f"no slot for a shard of {payload_bytes} bytes: {', '.join(found) or 'none offered'}"
        )
