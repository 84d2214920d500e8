"""Compare a step that a rank saves again in the same round with its earlier save.

Levels and failures name only the step. A rank may rely on them for the second save only if both saves have
the same bytes, and the shard of the first one is the only one that can be committed. The second slot is
therefore not written but compared, and Stage is replied to after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast_core.ids import CheckpointId
from holdfast_core.messages.schema import Stage
from holdfast_core.save.owned_slots import OwnedSlot, Where
from holdfast_core.save.place import SavePlace, SavePools
from holdfast_core.save.slot_save import check_slot, digest_slot, saved_before, shard_header
from holdfast_core.shards.record import ShardRecord
from holdfast_core.shm.slot_file import SlotState


class RepeatedSaves:
    """Comparisons of repeated saves, on the event loop. `owned` are the slots that the stager owns."""

    def __init__(
        self, place: SavePlace, pools: SavePools, owned: Mapping[tuple[int, int], OwnedSlot]
    ) -> None:
        self._place = place
        self._pools = pools
        self._owned = owned

    async def compare(self, check: Callable[[], object], message: Stage) -> bool:
        """Return whether the rank has saved the step before. The slot is then FREE again.

        Args:
            check: Raises RefusedError if the round of the message has ended. Called after each wait.
            message: The Stage of a slot that the stager does not own. There is one call for it at a time.

        Raises:
            RefusedError: The earlier save has other bytes (CONFLICT), or `check` raised.
            FormatError: The slot's header contradicts the message.
        """
        earlier = self._earlier(message)
        while isinstance(earlier, OwnedSlot):
            record = await self._digested(earlier)
            check()
            earlier = record or self._earlier(message)
        if earlier is None:
            return False  # the earlier save has failed: this one is the first that can be durable
        slot = self._place.open_slot(message.slot)
        try:
            check_slot(slot.header(), message, *self._place.staged_states)
            kept = earlier.header
            header = shard_header(message, kept.job_uid, kept.world_size)
            found = await self._pools.digest.run(digest_slot, header, slot)
            check()
            check_slot(slot.header(), message, *self._place.staged_states)
            if found != earlier:
                raise saved_before(message, f"{kept.payload_bytes} bytes with {earlier.blake3}")
            slot.set_state(SlotState.FREE)
        finally:
            slot.close()
        return True

    async def _digested(self, owned: OwnedSlot) -> ShardRecord | None:
        """Return the record of a waiting slot. None once the slot is freed, and its bytes are gone."""
        if owned.where is Where.WAITING:
            slot = owned.slot.duplicate()
            header = shard_header(owned.stage, self._place.job_uid, owned.world_size)
            try:
                record = await self._pools.digest.run(digest_slot, header, slot)
            finally:
                slot.close()
            return None if owned.freed.is_set() else record
        await owned.freed.wait()
        return None

    def _earlier(self, message: Stage) -> OwnedSlot | ShardRecord | None:
        """Return the record of the earlier save, its slot if that is not durable yet, or None."""
        checkpoint = CheckpointId(message.step, message.round)
        for owned in self._owned.values():
            if (owned.stage.rank, owned.checkpoint) == (message.rank, checkpoint):
                return owned
        job_uid = self._place.job_uid
        for record in self._place.list_shards():
            found = (record.header.job_uid, record.header.rank, record.checkpoint)
            if found == (job_uid, message.rank, checkpoint):
                return record
        return None
