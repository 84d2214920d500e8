"""What was staged, noted beside the slots in the same tmpfs: what a sidecar that died had taken is taken up
by the next one. Blocking, but small.

An owned slot without a note is done with: the note goes before the slot is free.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import FormatError, HoldfastError, UnavailableError
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, JobUid, RestartRound
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import Stage
from holdfast_core.shm.shared_files import own_directory, read_regular, remove, replace_file
from holdfast_core.shm.slot_file import SlotFile, list_slots
from holdfast_core.shm.slot_header import SlotHeader, SlotState
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base import logs

_MAX_NOTE_BYTES = 64 << 10


class SlotNotes:
    """One file for each slot that is owned, in a directory that only the sidecar's user may write to.

    The trainer can rename that directory, since the volume above it is shared. Then the notes in it
    are lost, as the slots are that it truncates; `shared_files` sees to it that nothing else is."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, message: Stage) -> None:
        """Raises UnavailableError: the volume is full."""
        try:
            with self._opened() as directory:
                replace_file(directory, _name(message.slot), dumps(message))
        except OSError as error:
            raise UnavailableError(f"writing the note of slot {message.slot}: {error}") from error

    def remove(self, slot: str) -> None:
        try:
            with self._opened() as directory:
                remove(directory, _name(slot))
        except OSError as error:
            logs.warning("the note of a slot was not removed", slot=slot, error=str(error))

    def read(self, slot: str) -> Stage | None:
        """Raises FormatError, OSError."""
        try:
            with self._opened() as directory:
                return loads(Stage, read_regular(directory, _name(slot), _MAX_NOTE_BYTES))
        except FileNotFoundError:
            return None

    def _opened(self) -> AbstractContextManager[int]:
        return own_directory(self._directory.parent, self._directory.name)


def _name(slot: str) -> str:
    return f"{slot}.json"


@dataclass(frozen=True, slots=True)
class Left:
    """A slot that a sidecar owned, of a step whose manifest is on this node."""

    stage: Stage
    world_size: int


def take_or_free(slot: SlotFile, notes: SlotNotes, round_: RestartRound) -> Stage | None:
    """What an earlier life owned in this round. Else None, and the slot is free if nobody else would
    ever free it. Raises FormatError, OSError."""
    header = slot.header()
    if header.state is SlotState.OWNED and header.round == round_:
        message = notes.read(slot.name)
        if message is not None:
            check_slot(header, message, expected=SlotState.OWNED)
            return message
    if header.state is SlotState.OWNED or (
        header.state is SlotState.FULL and header.round != round_
    ):
        slot.set_state(SlotState.FREE)
    return None


def left_in_memory(
    slots_dir: Path,
    notes: SlotNotes,
    node: NodeTier,
    job_uid: JobUid,
    manifests: frozenset[CheckpointId],
    *,
    known: Container[str],
) -> tuple[Left, ...]:
    """Slots but the `known` ones, for a seal that comes before a ROUND could bring them back. One that
    cannot be read is left out and logged."""
    found: list[Left] = []
    for name in list_slots(slots_dir):
        if name in known:
            continue
        try:
            stage = notes.read(name)
            if stage is None or CheckpointId(stage.step, stage.round) not in manifests:
                continue
            slot = SlotFile.open(slots_dir, name)
            try:
                check_slot(slot.header(), stage, expected=SlotState.OWNED)
            finally:
                slot.close()
            checkpoint = CheckpointId(stage.step, stage.round)
            document = node.get_manifest(job_uid, checkpoint)
            manifest = parse_manifest_of(document, job_uid, checkpoint)
            found.append(Left(stage, manifest.world_size))
        except (HoldfastError, OSError) as error:
            logs.warning("slot not written by the seal", slot=name, error=str(error))
    return tuple(found)


def check_slot(header: SlotHeader, message: Stage, *, expected: SlotState) -> None:
    """The header is what counts: a torn or reused slot contradicts the message. Raises FormatError."""
    found = (header.state, header.round, header.step, header.payload_bytes)
    wanted = (expected, message.round, message.step, message.payload_bytes)
    if found != wanted:
        raise FormatError(
            f"slot {message.slot}: state, round, step, bytes are {found}, the message says {wanted}"
        )
