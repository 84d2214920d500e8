"""Notes of staged slots, in the same tmpfs as the slots, so that a restarted sidecar can finish their saves.

A note is written before its slot becomes OWNED and removed before the slot becomes FREE. An OWNED slot
without a note is therefore finished and may be freed. All calls block, but the files are small.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import RestartRound
from holdfast_core.messages.bounds import Natural
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import Stage
from holdfast_core.save.slot_save import check_slot
from holdfast_core.shm.shared_files import own_directory, read_regular, remove, replace_file
from holdfast_core.shm.slot_file import SlotFile, SlotState, list_slots

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
