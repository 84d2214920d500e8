"""Notes of staged slots, in the same tmpfs as the slots, so that a restarted sidecar can finish their saves.

A note is written before its slot becomes OWNED and removed before the slot becomes FREE. An OWNED slot
without a note is therefore finished and may be freed. All calls block, but the files are small.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, JobUid, RestartRound
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import Stage
from holdfast_core.shm.shared_files import own_directory, read_regular, remove, replace_file
from holdfast_core.shm.slot_file import SlotFile, list_slots
from holdfast_core.shm.slot_header import SlotState
from holdfast_core.shm.slot_save import check_slot
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base import logs

_MAX_NOTE_BYTES = 64 << 10


class SlotNotes:
    """Store of the notes: one file for each owned slot, in a directory that only the sidecar may write to.

    The trainer can rename that directory, since the volume above it is shared. It then loses its own
    notes, as it can lose its slots by truncating them; `shared_files` ensures that nothing else is affected.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, message: Stage) -> None:
        """Write the note of a slot. Raises UnavailableError, for example if the volume is full."""
        try:
            with self._opened() as directory:
                replace_file(directory, _name(message.slot), dumps(message))
        except OSError as error:
            raise UnavailableError(f"writing the note of slot {message.slot}: {error}") from error

    def remove(self, slot: str) -> None:
        """Remove the note of a slot. A failure is logged and not raised."""
        try:
            with self._opened() as directory:
                remove(directory, _name(slot))
        except OSError as error:
            logs.warning("removing the note of a slot failed", slot=slot, error=str(error))

    def read(self, slot: str) -> Stage | None:
        """Return the note of a slot, or None if it has none. Raises FormatError, OSError."""
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
class LeftSlot:
    """A slot that an earlier sidecar process owned, of a step whose manifest is on this node."""

    stage: Stage
    world_size: int
    """Number of ranks that saved the step, from its manifest."""


def take_or_free(slot: SlotFile, notes: SlotNotes, round_: RestartRound) -> Stage | None:
    """Return the note of a slot that an earlier sidecar process owned in this round, else None.

    Where the result is None, a slot that is OWNED, or FULL of another round, is freed: no other process
    would free it. Raises FormatError, OSError.
    """
    header = slot.header()
    if header.state is SlotState.OWNED and header.round == round_:
        message = notes.read(slot.name)
        if message is not None:
            check_slot(header, message, SlotState.OWNED)
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
) -> tuple[LeftSlot, ...]:
    """Return the slots of committed steps that an earlier sidecar process owned, except the `known` ones.

    A seal needs them where this process has received no ROUND, so that `Stager.recover` has not run. A
    slot that cannot be read is logged and left out.
    """
    found: list[LeftSlot] = []
    for name in list_slots(slots_dir):
        if name in known:
            continue
        try:
            stage = notes.read(name)
            if stage is None or CheckpointId(stage.step, stage.round) not in manifests:
                continue
            slot = SlotFile.open(slots_dir, name)
            try:
                check_slot(slot.header(), stage, SlotState.OWNED)
            finally:
                slot.close()
            checkpoint = CheckpointId(stage.step, stage.round)
            document = node.get_manifest(job_uid, checkpoint)
            manifest = parse_manifest_of(document, job_uid, checkpoint)
            found.append(LeftSlot(stage, manifest.world_size))
        except (HoldfastError, OSError) as error:
            logs.warning(
                "a slot was not written when its round was sealed", slot=name, error=str(error)
            )
    return tuple(found)
