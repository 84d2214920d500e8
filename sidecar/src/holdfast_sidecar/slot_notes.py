"""What was staged, noted beside the slots in the same tmpfs: what a sidecar that died had taken is taken up
by the next one. Blocking, but small.

An owned slot without a note is done with: the note goes before the slot is free.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import FormatError, HoldfastError
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.format.slot import SlotHeader, SlotState
from holdfast_core.ids import CheckpointId, JobUid, RestartRound
from holdfast_core.slot_file import SlotFile, list_slots
from holdfast_core.tiers.base import NodeTier
from holdfast_core.transfer.codec import dumps, loads
from holdfast_core.transfer.messages import Stage
from holdfast_sidecar import logs


class SlotNotes:
    """One file for each slot that is owned."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, message: Stage) -> None:
        self._directory.mkdir(mode=0o770, exist_ok=True)
        self._path(message.slot).write_bytes(dumps(message))

    def remove(self, slot: str) -> None:
        self._path(slot).unlink(missing_ok=True)

    def read(self, slot: str) -> Stage | None:
        """Raises FormatError."""
        try:
            return loads(Stage, self._path(slot).read_bytes())
        except FileNotFoundError:
            return None

    def _path(self, slot: str) -> Path:
        return self._directory / f"{slot}.json"


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
            document = node.get_manifest(job_uid, CheckpointId(stage.step, stage.round))
            found.append(Left(stage, parse_manifest(document).world_size))
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
