"""The receiver's side of a save that streams through a ring of slots (ADR 0069).

A connection's thread, or the event loop, adds segments. The thread that writes the shard reads them in order
and sets each slot FREE when its bytes are read.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from holdfast_core.errors import FormatError, HoldfastError, RefusedError, UnavailableError
from holdfast_core.failpoint import failpoint
from holdfast_core.messages.schema import Refusal, Stage, StageSegment
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.shm.slot_header import SlotHeader, SlotState


def check_segment(header: SlotHeader, message: StageSegment) -> None:
    """Raise FormatError if the slot's header contradicts the message, or its range is not valid."""
    stage, segment = message.stage, message.segment
    found = (header.state, header.round, header.step, header.payload_bytes)
    wanted = (SlotState.FULL, stage.round, stage.step, segment.stop - segment.start)
    if found != wanted or not segment.start < segment.stop <= stage.payload_bytes:
        raise FormatError(
            f"slot {stage.slot}: state, round, step, bytes are {found}, expected {wanted} as in the "
            f"message, for bytes [{segment.start}, {segment.stop}) of a payload of "
            f"{stage.payload_bytes}"
        )


class SegmentStream:
    """PayloadSource of a payload whose segments arrive one after the other. Thread-safe.

    The stream owns the slots of the segments that it holds. It can be read once, from the start on.
    """

    def __init__(self, stage: Stage, sender: object) -> None:
        """Make a stream without segments.

        Args:
            stage: The save. Its slot is ignored.
            sender: The connection that the segments arrive on.
        """
        self.stage = stage
        self.sender = sender
        self.bytes_read = 0
        """Payload bytes read so far. It shows whether a slow write still makes progress."""
        self.bytes_verified = 0
        """Payload bytes that the write has read back from its file so far."""
        self._changed = threading.Condition()
        self._queue: deque[tuple[SlotFile, int]] = deque()
        """Each slot, with the payload offset at which its segment ends."""
        self._end = 0
        """Payload bytes that were added."""
        self._position = 0
        """Payload offset of the next byte to read. Unlike `bytes_read`, it never decreases."""
        self._start = 0
        """Payload offset of the first slot in the queue."""
        self._is_reading = False
        """Whether `read_into` reads the first slot of the queue, which only it may free then."""
        self._stopped: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all segments were added."""
        return self._end == self.stage.payload_bytes

    @property
    def is_starved(self) -> bool:
        """Whether the next bytes have not arrived, so that a pause is the rank's and not the disk's."""
        return not self._queue and not self.is_complete

    @property
    def can_be_read_again(self) -> bool:
        """Whether all bytes that were read so far are still in memory."""
        return self._position == 0

    def holds(self, slot: str) -> bool:
        """Return whether the stream owns a slot of this name."""
        with self._changed:
            return any(held.name == slot for held, _ in self._queue)

    def add(self, slot: SlotFile, message: StageSegment) -> None:
        """Take ownership of a FULL slot, set it OWNED, and let the reader read it.

        If this raises, the slot is unchanged and still belongs to the caller.

        Raises:
            RefusedError: The stream has stopped, or the segment is not the next one of this save.
            FormatError: The slot does not hold the segment.
            UnavailableError: The slot cannot be written.
        """
        check_segment(slot.header(), message)
        with self._changed:
            if self._stopped is not None:
                raise RefusedError(Refusal.BUSY, self._stopped)
            if not self.is_next(message):
                raise RefusedError(
                    Refusal.BAD_REQUEST,
                    f"segment at byte {message.segment.start} of step {message.stage.step}: expected "
                    f"that at {self._end} of step {self.stage.step}",
                )
            slot.set_state(SlotState.OWNED)
            self._end = message.segment.stop
            self._queue.append((slot, self._end))
            self._changed.notify_all()

    def is_next(self, message: StageSegment) -> bool:
        """Return whether the message is of this save and continues at its end."""
        one, other = message.stage, self.stage
        same = (one.round, one.step, one.rank, one.payload_bytes, one.layout) == (
            other.round,
            other.step,
            other.rank,
            other.payload_bytes,
            other.layout,
        )
        return same and message.segment.start == self._end

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of the payload. Wait until its segments were added.

        Raises:
            UnavailableError: The stream was stopped, or the bytes were read before and are not in memory
                any more.
            FormatError: A slot's file ends too early.
        """
        if offset != self._position:
            raise UnavailableError(
                f"step {self.stage.step}: byte {offset} of a streamed save is not in memory any more, "
                f"only bytes from {self._position} on: the save cannot be written again"
            )
        while len(buffer) > 0:
            slot, stop = self._next()
            try:
                piece = buffer[: stop - self._position]
                slot.read_into(self._position - self._start, piece)
                self._position += len(piece)
                self.bytes_read += len(piece)
                buffer = buffer[len(piece) :]
            finally:
                self._has_read()

    def verified(self, byte_count: int) -> None:
        """Count bytes of the written file that were read back."""
        self.bytes_verified += byte_count

    def stop(self, why: str) -> None:
        """Refuse further segments, let a waiting reader fail, and free all slots but the one being read.

        The reader frees that one. A second call keeps the first reason.
        """
        with self._changed:
            if self._stopped is None:
                self._stopped = why
            kept = [self._queue.popleft()] if self._is_reading else []
            freed, self._queue = self._queue, deque(kept)
            self._changed.notify_all()
        for slot, _ in freed:
            _free(slot)

    def free(self) -> None:
        """Free all slots, at the end of the save."""
        self.stop("the save has ended")

    def close(self) -> None:
        """Free all slots: without their reader no process would."""
        self.free()

    def stop_unless_complete(self, why: str) -> None:
        """Stop the stream if segments are missing, which will not arrive any more."""
        if not self.is_complete:
            self.stop(why)

    def _next(self) -> tuple[SlotFile, int]:
        """Wait for the segment at `_position`, and keep its slot until `_has_read`."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped is not None)
            if self._stopped is not None:
                raise UnavailableError(f"save of step {self.stage.step}: {self._stopped}")
            self._is_reading = True
            return self._queue[0]

    def _has_read(self) -> None:
        """Free the first slot if it was read completely, or if the stream was stopped meanwhile."""
        with self._changed:
            self._is_reading = False
            slot, stop = self._queue[0]
            if self._stopped is None and self._position < stop:
                return
            self._queue.popleft()
            self._start = stop
        _free(slot)
        failpoint("stream.segment_read")


def _free(slot: SlotFile) -> None:
    with suppress(HoldfastError):  # the trainer may have truncated the file
        slot.free()
