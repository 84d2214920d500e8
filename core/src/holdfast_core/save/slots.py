"""Staged slots: what they are checked against, their notes, and which of those that wait is written next.

Notes are in the same tmpfs as the slots, so that a restarted sidecar can finish their saves. A note is
written before its slot becomes OWNED and removed before the slot becomes FREE. An OWNED slot without a note
is therefore finished and may be freed. Calls that read a slot or a note block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from holdfast_core.errors import FormatError, HoldfastError, RefusedError, UnavailableError
from holdfast_core.ids import CheckpointId, JobUid, Rank, RestartRound, Step
from holdfast_core.messages.codec import Natural, dumps, loads
from holdfast_core.messages.schema import Refusal, ShardInfo, Stage
from holdfast_core.shards.file import ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester
from holdfast_core.shm.shared_files import own_directory, read_regular, remove, replace_file
from holdfast_core.shm.slot_file import SlotFile, SlotHeader, SlotState, list_slots, payload_pieces
from holdfast_core.tiers.base import PayloadSource


def check_slot(header: SlotHeader, message: Stage, *expected: SlotState) -> None:
    """Raise FormatError if the slot's header contradicts the message, as in a torn or reused slot.

    Args:
        header: Header of the slot that the message names.
        message: What the rank sent.
        expected: States that the slot may have.
    """
    found = (header.state, header.round, header.step, header.payload_bytes)
    wanted = (message.round, message.step, message.payload_bytes)
    if header.state not in expected or found[1:] != wanted:
        states = " or ".join(state.name for state in expected)
        raise FormatError(
            f"slot {message.slot}: state, round, step, bytes are {found}, expected {states} and, as in "
            f"the message, {wanted}"
        )


def shard_header(message: Stage, job_uid: JobUid, world_size: int) -> ShardHeader:
    """Return the header of the shard that a staged slot becomes."""
    return ShardHeader(
        job_uid,
        message.round,
        message.step,
        message.rank,
        world_size,
        message.layout,
        message.payload_bytes,
    )


def digest_slot(header: ShardHeader, slot: PayloadSource) -> ShardRecord:
    """Digest the payload in one pass over the shared memory, and return the record of its shard.

    Raises what `slot.read_into` raises.
    """
    digester = PayloadDigester(header)
    for piece in payload_pieces(slot, 0, header.payload_bytes):
        digester.update(piece)
    record, _ = digester.finish()
    return record


def saved_before(message: Stage, detail: object) -> RefusedError:
    """Return the refusal of a repeated save whose bytes are not those of the earlier one."""
    return RefusedError(
        Refusal.CONFLICT,
        f"rank {message.rank} has saved step {message.step} with other bytes before, and those are kept: "
        f"{detail}; save a step again only with the same state",
    )


_MAX_NOTE_BYTES = 64 << 10
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotNote:
    """What is known of a staged slot besides its header."""

    stage: Stage
    world_size: Natural
    """Number of ranks that save the step."""


class SlotNotes:
    """Store of the notes: one file for each owned slot, in a directory that only the sidecar may write to.

    The trainer can rename that directory, since the volume above it is shared. It then loses its own
    notes, as it can lose its slots by truncating them; `shared_files` ensures that nothing else is affected.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, note: SlotNote) -> None:
        """Write the note of a slot. Raises UnavailableError, for example if the volume is full."""
        slot = note.stage.slot
        try:
            with self._opened() as directory:
                replace_file(directory, _name(slot), dumps(note))
        except OSError as error:
            raise UnavailableError(f"writing the note of slot {slot}: {error}") from error

    def remove(self, slot: str) -> None:
        """Remove the note of a slot. A failure is logged and not raised."""
        try:
            with self._opened() as directory:
                remove(directory, _name(slot))
        except OSError as error:
            _LOG.warning("removing the note of slot %s failed: %s", slot, error)

    def read(self, slot: str) -> SlotNote | None:
        """Return the note of a slot, or None if it has none. Raises FormatError, OSError."""
        try:
            with self._opened() as directory:
                return loads(SlotNote, read_regular(directory, _name(slot), _MAX_NOTE_BYTES))
        except FileNotFoundError:
            return None

    def _opened(self) -> AbstractContextManager[int]:
        return own_directory(self._directory.parent, self._directory.name)


def _name(slot: str) -> str:
    return f"{slot}.json"


def take_or_free(slot: SlotFile, notes: SlotNotes, round_: RestartRound) -> Stage | None:
    """Return the message that handed a slot over to an earlier sidecar process in this round, else None.

    Where the result is None, a slot that is OWNED, or FULL of another round, is freed: no other process
    would free it. Raises FormatError, OSError.
    """
    header = slot.header()
    if header.state is SlotState.OWNED and header.round == round_:
        note = notes.read(slot.name)
        if note is not None:
            check_slot(header, note.stage, SlotState.OWNED)
            return note.stage
    if header.state is SlotState.OWNED or (
        header.state is SlotState.FULL and header.round != round_
    ):
        slot.set_state(SlotState.FREE)
    return None


def left_in_slots(
    slots_dir: Path, notes: SlotNotes, *, known: Container[str]
) -> tuple[SlotNote, ...]:
    """Return the notes of slots that an earlier sidecar process owned, except the `known` ones.

    A seal needs them where this process has received no ROUND, so that `Stager.recover` has not run. A
    slot that cannot be read is logged and left out.
    """
    found: list[SlotNote] = []
    for name in list_slots(slots_dir):
        if name in known:
            continue
        try:
            note = notes.read(name)
            if note is None:
                continue
            slot = SlotFile.open(slots_dir, name)
            try:
                check_slot(slot.header(), note.stage, SlotState.OWNED)
            finally:
                slot.close()
            found.append(note)
        except (HoldfastError, OSError) as error:
            _LOG.warning("slot %s was not written when its round was sealed: %s", name, error)
    return tuple(found)


class Where(Enum):
    """Stage of an owned slot: it waits, or is being written."""

    WAITING = auto()
    WRITING = auto()


@dataclass(slots=True)
class OwnedSlot:
    """A slot that the stager owns, from Stage until it is freed."""

    stage: Stage
    slot: SlotFile
    world_size: int
    where: Where
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: bool = False
    """Whether the step was pruned while the slot was being written. The shard is then deleted."""

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.stage.step, self.stage.round)


def info_of(record: ShardRecord) -> ShardInfo:
    """Return the description of a digested shard that messages carry."""
    return ShardInfo(
        record.header.rank, record.header.payload_bytes, record.blake3, record.chunk_table
    )


def next_write(rank: Rank, owned: Iterable[OwnedSlot], chosen: Step | None) -> OwnedSlot | None:
    """Return the rank's waiting slot of the chosen step, if it may be written now.

    None while another slot of the rank is being written: each rank has at most one write under way.
    """
    of_rank = [o for o in owned if o.stage.rank == rank]
    if any(o.where is Where.WRITING for o in of_rank):
        return None
    ready = (o for o in of_rank if o.where is Where.WAITING and o.stage.step == chosen)
    return next(ready, None)


def to_seal(owned: Iterable[OwnedSlot]) -> tuple[OwnedSlot, ...]:
    """Return the slots that a seal writes: all that wait, oldest first.

    The newest one alone would not suffice. A rank may have handed over a step that another one has not, and
    if time runs out after the older step, all ranks have at least that one.
    """
    found = [o for o in owned if o.where is Where.WAITING]
    return tuple(sorted(found, key=lambda o: (o.checkpoint, o.stage.rank)))
