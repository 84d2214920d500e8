"""One pass over an owned slot: to the node tier, or for its digest alone. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.errors import CapacityError, CorruptionError
from holdfast_core.ids import Level, TierName
from holdfast_core.messages.schema import SaveFailed, Stage
from holdfast_core.tiers.base import NodeTier, ShardHeader, ShardRecord
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.stalled import until_done
from holdfast_sidecar.save.held import OwnedSlot, digest_slot
from holdfast_sidecar.save.room import Room


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a staged slot: a durable shard, or why not."""

    stage: Stage
    record: ShardRecord | None
    failed: SaveFailed | None = None
    is_corrupt: bool = False
    """What lies in the slot is not what was digested there: it is good for nothing."""


class SlotWrites:
    """What fails is reported, and is the outcome."""

    def __init__(
        self,
        settings: Settings,
        node: NodeTier,
        pools: Pools,
        failures: Failures,
        metrics: Metrics,
        clock: Clock,
        room: Room,
    ) -> None:
        self._settings = settings
        self._node = node
        self._pools = pools
        self._failures = failures
        self._metrics = metrics
        self._clock = clock
        self._room = room

    async def digest(self, owned: OwnedSlot) -> Outcome:
        """What the bytes in memory are; nothing is written."""
        try:
            record = await self._pools.digest.run(digest_slot, self._header(owned), owned.slot)
        except Exception as error:  # noqa: BLE001 - else the slot stays owned and nothing reports it
            return self._failed(owned, error)
        return Outcome(owned.stage, record)

    async def write(self, owned: OwnedSlot) -> Outcome:
        """Durable on the node tier. Bytes that were digested as others before are quarantined there."""
        started = self._clock.monotonic()
        try:
            record = await self._with_room(owned)
            if owned.record not in (None, record):
                error = CorruptionError(
                    f"slot {owned.stage.slot}: written as {record.blake3}, and digested as another "
                    "payload before: its memory has changed"
                )
                await self._pools.meta.run(self._node.quarantine, record.ref, str(error))
                raise error
        except Exception as error:  # noqa: BLE001 - else the slot stays owned and nothing reports it
            return self._failed(owned, error)
        self._failures.healthy(_subject(owned))
        self._metrics.stored(
            TierName.NODE, record.header.payload_bytes, self._clock.monotonic() - started
        )
        return Outcome(owned.stage, record)

    async def delete(self, record: ShardRecord) -> None:
        """Pruned while it was written: what was deleted then did not include it."""
        await self._pools.shard.run(self._node.delete_shard, record.ref)

    async def _with_room(self, owned: OwnedSlot) -> ShardRecord:
        """Write the shard; on a full volume again after each deletion, for a while. The coordinator
        sees the failure in this worker's report meanwhile, and prunes what the job can do without."""
        deadline: float | None = None
        while True:
            try:
                return await self._watched(owned)
            except CapacityError as error:
                self._failures.note(_subject(owned), TierName.NODE, error, step=owned.stage.step)
                now = self._clock.monotonic()
                if deadline is None:
                    deadline = now + self._settings.room_seconds
                if now >= deadline or not await self._room.wait(deadline - now):
                    raise
                # The write that follows may take long. The coordinator would go on pruning meanwhile
                # if this failure stayed.
                self._failures.healthy(_subject(owned))

    async def _watched(self, owned: OwnedSlot) -> ShardRecord:
        """Write the shard; while the disk hangs, that is a failure for all to see."""
        slot, header, subject = owned.slot, self._header(owned), _subject(owned)
        slot.bytes_read = 0  # a digest may have read all of it

        def stalled(quiet: float) -> None:
            self._failures.note_text(
                subject,
                TierName.NODE,
                "NodeVolumeHangs",
                f"step {header.step}: {slot.bytes_read} of {header.payload_bytes} bytes were handed to "
                f"the node volume, and none for {quiet:.0f} s: its disk hangs, or is far too slow; "
                "training goes on, saves that find no free slot are skipped; look at the node's disk",
                step=header.step,
            )

        return await until_done(
            self._pools.shard.run(self._node.write_shard, header, slot),
            lambda: slot.bytes_read,
            quiet_seconds=self._settings.disk_quiet_seconds,
            stalled=stalled,
            moving=lambda: self._failures.healthy(subject),
        )

    def _header(self, owned: OwnedSlot) -> ShardHeader:
        message = owned.stage
        return ShardHeader(
            self._settings.contract.job_uid,
            message.round,
            message.step,
            message.rank,
            owned.world_size,
            message.layout,
            message.payload_bytes,
        )

    def _failed(self, owned: OwnedSlot, error: Exception) -> Outcome:
        stage = owned.stage
        failure = self._failures.note(_subject(owned), TierName.NODE, error, step=stage.step)
        self._metrics.save_failed(failure.reason)
        failed = SaveFailed(stage.step, stage.round, Level.LOCAL, failure.reason, failure.message)
        return Outcome(stage, None, failed, isinstance(error, CorruptionError))


def _subject(owned: OwnedSlot) -> str:
    return f"save of rank {owned.stage.rank}"
