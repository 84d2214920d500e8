"""Write an owned slot to its place. `Stager` decides which slots and when."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.errors import CapacityError
from holdfast_core.messages.schema import SaveFailed, Stage
from holdfast_core.save.owned_slots import OwnedSlot
from holdfast_core.save.place import SavePlace, SavePools, SaveReports
from holdfast_core.save.slot_save import shard_header
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tasks import until_done


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """Result of a write: the shard's record, or the failure that the rank is sent."""

    stage: Stage
    record: ShardRecord | None
    failed: SaveFailed | None = None


class Room:
    """Signal that space was freed where shards are written, for use on the event loop.

    It is closed while the sidecar is sealed, because nothing is deleted then.
    """

    def __init__(self) -> None:
        self._made = asyncio.Event()
        self._is_open = True

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Let all present waits return False, and later ones until `open`."""
        self._is_open = False
        self._wake()

    def made(self) -> None:
        """Wake all waits after a deletion."""
        self._wake()

    async def wait(self, seconds: float) -> bool:
        """Wait for a deletion. Return False if there is none within `seconds` or the sidecar is sealed."""
        if not self._is_open:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._made.wait()
        except TimeoutError:
            return False
        return self._is_open

    def _wake(self) -> None:
        made, self._made = self._made, asyncio.Event()
        made.set()


class SlotWrites:
    """Runner of writes. An error is reported and is part of the WriteOutcome."""

    def __init__(
        self, place: SavePlace, pools: SavePools, reports: SaveReports, clock: Clock
    ) -> None:
        self._place = place
        self._pools = pools
        self._reports = reports
        self._clock = clock
        self.room = Room()

    async def write(self, owned: OwnedSlot) -> WriteOutcome:
        """Write the slot to its place, durably."""
        started = self._clock.monotonic()
        try:
            record = await self._with_room(owned)
        except Exception as error:  # noqa: BLE001 - else the slot stays owned and nothing reports it
            return WriteOutcome(owned.stage, None, self._reports.failed(owned.stage, error))
        seconds = self._clock.monotonic() - started
        self._reports.stored(owned.stage, record.header.payload_bytes, seconds)
        return WriteOutcome(owned.stage, record)

    async def delete(self, record: ShardRecord) -> None:
        """Delete a shard whose step was pruned during its write, which the pruning did not find."""
        await self._pools.shard.run(self._place.delete_shard, record.ref)

    async def _with_room(self, owned: OwnedSlot) -> ShardRecord:
        """Write the shard. In a full place, retry after each deletion for up to `room_seconds`.

        In a pod, this worker's report carries the failure meanwhile, upon which the coordinator prunes
        steps that the job does not need. Raises CapacityError if the room does not suffice in time.
        """
        deadline: float | None = None
        while True:
            try:
                return await self._watched(owned)
            except CapacityError as error:
                self._reports.no_room(owned.stage, error)
                now = self._clock.monotonic()
                if deadline is None:
                    deadline = now + self._place.room_seconds
                if now >= deadline or not await self.room.wait(deadline - now):
                    raise
                # The next write may take long. If this failure stayed, the coordinator would continue to
                # prune during it.
                self._reports.continues(owned.stage)

    async def _watched(self, owned: OwnedSlot) -> ShardRecord:
        """Write the shard, and report a failure as long as the disk hangs."""
        slot = owned.slot
        header = shard_header(owned.stage, self._place.job_uid, owned.world_size)
        slot.bytes_read = slot.bytes_verified = 0  # an earlier attempt may have increased them

        has_begun = threading.Event()

        def write() -> ShardRecord:
            has_begun.set()
            return self._place.write_shard(header, slot)

        def stalled(quiet: float) -> None:
            if not has_begun.is_set():
                return  # the write waits for those of other ranks, which are watched themselves
            self._reports.hangs(
                owned.stage,
                f"step {header.step}: {slot.bytes_read} of {header.payload_bytes} bytes were "
                f"written and {slot.bytes_verified} of them read back, and none for {quiet:.0f} s: the "
                "disk hangs or is far too slow. Training continues, and saves are skipped while no slot "
                "is free. Check the disk",
            )

        return await until_done(
            self._pools.shard.run(write),
            lambda: slot.bytes_read + slot.bytes_verified,
            quiet_seconds=self._place.disk_quiet_seconds,
            stalled=stalled,
            moving=lambda: self._reports.continues(owned.stage),
        )
