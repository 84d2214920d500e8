"""One save of one rank that streams through a ring of slots, while training waits (ADR 0069)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from holdfast.base.handle import SaveHandle
from holdfast.base.layouts import LayoutFiles
from holdfast.checkpoint.saving import Saver
from holdfast.connection.session import Session
from holdfast.slots.segments import SEGMENT_SLOTS, segment_bytes, segments_of
from holdfast.slots.staging import Slot, SlotRing, run_all
from holdfast.state.copying.segments import SegmentWriter
from holdfast.state.snapshot import SavePlan, Snapshot, Snapshots
from holdfast_core.errors import UnavailableError
from holdfast_core.failpoint import failpoint
from holdfast_core.ids import RestartRound
from holdfast_core.messages.schema import Segment, Stage, StageSegment

_LONGEST_WAIT_SECONDS = 600.0
"""Time without a free slot after which a save fails: the disk hangs, or the other process is stopped."""
_LONGEST_QUEUE_SECONDS = 3600.0
"""The same before any slot was read, because the writes of other ranks of the pod may come first."""
_LOOK_SECONDS = 0.1
"""Time between two looks at the connection while all slots are busy."""


class StreamingSaver(Saver):
    """Saves states through the ring's slots. `save` returns when the shard is durable on the node tier."""

    def __init__(
        self,
        session: Session,
        ring: SlotRing,
        layouts: LayoutFiles,
        snapshots: Snapshots,
        ring_bytes: int,
    ) -> None:
        super().__init__(session, ring, layouts, snapshots)
        self._ring_bytes = ring_bytes

    def ensure_slots(self, payload_bytes: int, round_: RestartRound) -> None:
        self._ring.use(SEGMENT_SLOTS, is_bounded=True)
        self._ring.remove_busy()  # an interrupted save has left them
        super().ensure_slots(segment_bytes(self._ring_bytes, payload_bytes), round_)

    def _copy(
        self, handle: SaveHandle, snapshot: Snapshot, plan: SavePlan, wait_seconds: float
    ) -> bool:
        stage = Stage(
            handle.round,
            handle.step,
            self._rank,
            self._ring.slots[0].name,
            plan.payload_bytes,
            plan.layout_digest,
        )
        self._session.stream(stage, handle, self._segments(stage, SegmentWriter(plan, snapshot)))
        return True

    def _segments(self, stage: Stage, writer: SegmentWriter) -> Iterator[StageSegment]:
        """Yield each segment when its bytes are in a slot."""
        connection = self._session.connections
        # A helper thread does not use this thread's streams, in which a device has work that it must follow.
        run = self._copier.run if self._copies is None else run_all
        segments = segments_of(stage.payload_bytes, self._ring.capacity_bytes)
        for number, segment in enumerate(segments):
            is_read = number > SEGMENT_SLOTS
            slot = self._free_slot(
                stage, connection, _LONGEST_WAIT_SECONDS if is_read else _LONGEST_QUEUE_SECONDS
            )
            slot.begin(stage.round, stage.step, segment.length_bytes)
            try:
                writer.write(segment, slot.payload[: segment.length_bytes], run)
            except BaseException:
                slot.abandon()
                raise
            slot.complete()
            failpoint("stream.segment_copied")
            part = Segment(segment.start, segment.stop)
            yield StageSegment(
                Stage(
                    stage.round,
                    stage.step,
                    stage.rank,
                    slot.name,
                    stage.payload_bytes,
                    stage.layout,
                ),
                part,
            )

    def _free_slot(self, stage: Stage, connection: int, wait_seconds: float) -> Slot:
        """Wait for a slot that the other process has read. Raises UnavailableError."""
        deadline = time.monotonic() + wait_seconds
        while (slot := self._ring.acquire(_LOOK_SECONDS)) is None:
            if not self._session.is_connected or connection != self._session.connections:
                raise UnavailableError(
                    f"the connection to {self._session.peer} ended during the save"
                )
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"save of step {stage.step}: {self._session.peer} has read nothing for "
                    f"{wait_seconds:.0f} s: check its disk"
                )
        return slot
