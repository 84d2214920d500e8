"""Receive the saves of ranks that stream them through a ring of slots (ADR 0069).

A stream is an owned slot of the stager whose bytes are still arriving: it is written, reported and freed
like any other. Nothing of it outlives the process: a sidecar that restarts frees the ring's slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from holdfast_core.errors import FormatError, RefusedError
from holdfast_core.ids import Rank
from holdfast_core.messages.schema import Refusal, Stage, Staged, StageSegment
from holdfast_core.shm.slot_file import SlotFile, rank_of_slot
from holdfast_core.shm.slot_stream import SegmentStream, check_segment
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import RoundState, fence
from holdfast_sidecar.save.layouts import RankLayouts
from holdfast_sidecar.save.owned_slots import OwnedSlot, Where


class Streams:
    """The newest stream of each rank, on the event loop."""

    def __init__(
        self,
        pod: Pod,
        layouts: RankLayouts,
        owned: dict[str, OwnedSlot],
        take: Callable[[OwnedSlot], None],
    ) -> None:
        """Make the receiver.

        Args:
            pod: This pod.
            layouts: Layouts of the ranks.
            owned: The stager's slots, by name.
            take: Adds a stream to `owned` and begins its write.
        """
        self._slots_dir = pod.settings.slots_dir
        self._layouts = layouts
        self._owned = owned
        self._take = take
        self._newest: dict[Rank, tuple[OwnedSlot, SegmentStream]] = {}

    async def stage(
        self, current: Callable[[], RoundState], message: StageSegment, sender: object
    ) -> Staged:
        """Take ownership of a segment, and begin the save with the first one.

        The reply to the last segment waits until the shard is durable on the node tier.

        Args:
            current: Returns the present round. It is called again after each wait.
            message: What the rank sent.
            sender: The connection.

        Raises:
            RefusedError: The round does not match or is sealed, the segment is not the next one, or the save
                has failed (the message has the reason).
            FormatError: The slot is not of a rank of this pod, or its header contradicts the message.
            HoldfastError: The layout cannot be stored, or the slot not opened.
        """
        stage = message.stage
        expect_of_round(current(), stage)
        if message.segment.start == 0:
            await self._layouts.ensure(stage.layout)
        state = expect_of_round(current(), stage)
        slot = SlotFile.open(self._slots_dir, stage.slot)
        try:
            check_segment(slot.header(), message)  # a bad first segment must not begin a save
            owned, stream = self._stream_of(state, message, sender)
            stream.add(slot, message)
        except BaseException:
            slot.close()
            raise
        if stream.is_complete:
            await owned.digested.wait()
            if owned.failure:
                raise RefusedError(Refusal.BUSY, owned.failure)
        return Staged(stage.step)

    def _stream_of(
        self, state: RoundState, message: StageSegment, sender: object
    ) -> tuple[OwnedSlot, SegmentStream]:
        """Return the stream that the message continues or begins. Raises RefusedError."""
        stage = message.stage
        earlier = self._newest.get(stage.rank)
        if message.segment.start > 0:
            if earlier is None:
                raise RefusedError(
                    Refusal.BAD_REQUEST,
                    f"step {stage.step} of rank {stage.rank}: its first segments were not received: "
                    "the save cannot be continued",
                )
            return earlier
        if earlier is not None:
            earlier[1].stop_unless_complete("the rank has begun another save")
        name = f"rank{stage.rank:06d}.round{stage.round}.step{stage.step}"
        if name in self._owned:
            raise RefusedError(Refusal.BUSY, f"step {stage.step} is being written")
        stream = SegmentStream(stage, sender)
        owned = OwnedSlot(replace(stage, slot=name), stream, state.world_size, Where.WRITING)
        self._newest[stage.rank] = owned, stream
        self._take(owned)
        return owned, stream

    def drop(self, sender: object) -> None:
        """Stop what a connection has begun and not completed: no further segment arrives."""
        for _, stream in self._newest.values():
            if stream.sender is sender:
                stream.stop_unless_complete("the rank has not handed over the rest of its state")

    def seal(self) -> None:
        """Stop all saves whose last segment has not arrived. The others are written."""
        for _, stream in self._newest.values():
            stream.stop_unless_complete("the round was sealed")

    def hold(self, slot: str) -> bool:
        """Return whether a stream holds the slot."""
        return any(
            isinstance(owned.slot, SegmentStream) and owned.slot.holds(slot)
            for owned in self._owned.values()
        )


def expect_of_round(state: RoundState, message: Stage) -> RoundState:
    """Return `state` if the message is of its round and of a rank of this pod.

    Raises RefusedError, FormatError.
    """
    refused = fence(state, message.round)
    if refused is not None:
        raise RefusedError(refused.code, refused.message)
    if rank_of_slot(message.slot) != message.rank or message.rank not in state.own_ranks:
        raise FormatError(
            f"stage of rank {message.rank} in slot {message.slot!r}: the rank does not run in "
            "this pod"
        )
    return state
