"""Write an owned slot to the node tier. `Stager` decides which slots and when."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from holdfast_core.errors import CapacityError
from holdfast_core.ids import Level, TierName
from holdfast_core.messages.schema import SaveFailed, Stage
from holdfast_core.shm.slot_save import shard_header
from holdfast_core.tiers.base import ShardHeader, ShardRecord
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.tasks import until_done
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.save.owned_slots import OwnedSlot
from holdfast_sidecar.save.room import Room


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """Result of a write: the shard's record, or the failure that the rank is sent."""

    stage: Stage
    record: ShardRecord | None
    failed: SaveFailed | None = None


class SlotWrites:
    """Runner of writes. An error is noted in `Failures` and is part of the WriteOutcome."""

    def __init__(self, pod: Pod, tiers: Tiers, telemetry: Telemetry) -> None:
        self._pod = pod
        self._tiers = tiers
        self._failures = telemetry.failures
        self._metrics = telemetry.metrics
        self.room = Room()

    async def write(self, owned: OwnedSlot) -> WriteOutcome:
        """Write the slot to the node tier, durably."""
        started = self._pod.clock.monotonic()
        try:
            record = await self._with_room(owned)
        except Exception as error:  # noqa: BLE001 - else the slot stays owned and nothing reports it
            return self._failed(owned, error)
        self._failures.healthy(_subject(owned))
        self._metrics.stored(
            TierName.NODE, record.header.payload_bytes, self._pod.clock.monotonic() - started
        )
        return WriteOutcome(owned.stage, record)

    async def delete(self, record: ShardRecord) -> None:
        """Delete a shard whose step was pruned during its write, which the pruning did not find."""
        await self._tiers.pools.shard.run(self._tiers.node.delete_shard, record.ref)

    async def _with_room(self, owned: OwnedSlot) -> ShardRecord:
        """Write the shard. On a full volume, retry after each deletion for up to `room_seconds`.

        This worker's report carries the failure meanwhile, upon which the coordinator prunes steps that
        the job does not need. Raises CapacityError if the room does not suffice in time.
        """
        deadline: float | None = None
        while True:
            try:
                return await self._watched(owned)
            except CapacityError as error:
                self._failures.note(_subject(owned), TierName.NODE, error, step=owned.stage.step)
                now = self._pod.clock.monotonic()
                if deadline is None:
                    deadline = now + self._pod.settings.room_seconds
                if now >= deadline or not await self.room.wait(deadline - now):
                    raise
                # The next write may take long. If this failure stayed, the coordinator would continue to
                # prune during it.
                self._failures.healthy(_subject(owned))

    async def _watched(self, owned: OwnedSlot) -> ShardRecord:
        """Write the shard, and report a failure as long as the disk hangs."""
        slot, header, subject = owned.slot, self._header(owned), _subject(owned)
        slot.bytes_read = slot.bytes_verified = 0  # an earlier attempt may have increased them

        has_begun = threading.Event()

        def write() -> ShardRecord:
            has_begun.set()
            return self._tiers.node.write_shard(header, slot)

        def stalled(quiet: float) -> None:
            if not has_begun.is_set():
                return  # the write waits for those of other ranks, which are watched themselves
            self._failures.note_text(
                subject,
                TierName.NODE,
                "NodeVolumeHangs",
                (
                    f"step {header.step}: {slot.bytes_read} of {header.payload_bytes} bytes were "
                    f"written to the node volume and {slot.bytes_verified} of them read back, and none "
                    f"for {quiet:.0f} s: its disk hangs or is far "
                    "too slow. Training continues, and saves are skipped while no slot is free. Check "
                    "the node's disk"
                ),
                step=header.step,
            )

        return await until_done(
            self._tiers.pools.shard.run(write),
            lambda: slot.bytes_read + slot.bytes_verified,
            quiet_seconds=self._pod.settings.disk_quiet_seconds,
            stalled=stalled,
            moving=lambda: self._failures.healthy(subject),
        )

    def _header(self, owned: OwnedSlot) -> ShardHeader:
        return shard_header(owned.stage, self._pod.settings.contract.job_uid, owned.world_size)

    def _failed(self, owned: OwnedSlot, error: Exception) -> WriteOutcome:
        """Report and count the failed save, and return its WriteOutcome."""
        stage = owned.stage
        failure = self._failures.note(_subject(owned), TierName.NODE, error, step=stage.step)
        self._metrics.save_failed(failure.reason)
        failed = SaveFailed(stage.step, stage.round, Level.LOCAL, failure.reason, failure.message)
        return WriteOutcome(stage, None, failed)


def _subject(owned: OwnedSlot) -> str:
    return f"save of rank {owned.stage.rank}"
