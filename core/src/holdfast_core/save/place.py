"""What the engine of a save works on: the staged slots, and the place where they become durable.

In a pod the place is the node tier, the coordinator chooses which waiting step is written, and a restarted
sidecar finds the slots of its predecessor by their notes. In a folder the place is the folder, waiting steps
are written in order, and a rank hands its saves over again to the next persister.

The layouts of saves come from the shared volume (shm.shared_files) and are stored on the node tier. From
there they go to the nodes and to the object store that get a copy of a shard which names them.

Notes are in the same tmpfs as the slots, so that a restarted sidecar can finish their saves. A note is
written before its slot becomes OWNED and removed before the slot becomes FREE. An OWNED slot without a note
is therefore finished and may be freed. Calls that read a slot or a note block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import (
    LayoutDigests,
    RankLayout,
    layout_digests,
    parse_rank_layout,
)
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    JobUid,
    Natural,
    Rank,
    RestartRound,
    Step,
)
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import Refusal, Refused, Stage, StepOutcome
from holdfast_core.shards.file import ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester
from holdfast_core.shm.shared_files import (
    LayoutFiles,
    own_directory,
    read_regular,
    remove,
    replace_file,
)
from holdfast_core.shm.slot_file import SlotFile, SlotHeader, SlotState, list_slots, payload_pieces
from holdfast_core.tasks import Pool
from holdfast_core.tiers.base import NodeTier, PayloadSource


class SaveRound(Protocol):
    """The round of a place at one moment."""

    @property
    def round(self) -> RestartRound: ...

    @property
    def own_ranks(self) -> range: ...

    @property
    def world_size(self) -> int:
        """Number of ranks that save a step."""
        ...

    @property
    def waits_for_choice(self) -> bool:
        """Whether a step that is staged behind another one of its rank waits until it is chosen."""
        ...

    def refusal(self, round_: RestartRound) -> Refused | None:
        """Return why a Stage of `round_` is refused, or None."""
        ...


class SaveReports(Protocol):
    """Receiver of the events of the writes. The engine calls it on the event loop."""

    def stored(self, stage: Stage, payload_bytes: int, seconds: float) -> None:
        """The shard is durable."""

    def no_room(self, stage: Stage, error: Exception) -> None:
        """The write waits for room."""

    def hangs(self, stage: Stage, text: str) -> None:
        """The write makes no progress."""

    def continues(self, stage: Stage) -> None:
        """The write has room or progress again."""

    def failed(self, stage: Stage, error: Exception) -> StepOutcome:
        """The save has failed. Return what its rank is sent."""
        ...

    def dropped(self, steps: int) -> None:
        """Waiting steps were freed without a write."""


@dataclass(frozen=True, slots=True)
class SavePlace:
    """Where the shards of saves become durable. Calls that are not async block, and run in threads."""

    job_uid: JobUid
    slots_dir: Path
    open_slot: Callable[[str], SlotFile]
    ensure_layout: Callable[[Stage], Awaitable[None]]
    """Makes the layout that the message names durable, or marks it as used."""
    write_shard: Callable[[ShardHeader, SlotFile], ShardRecord]
    """Writes the shard durably, with all that must be durable before its slot is freed."""
    has_stored: Callable[[Stage], bool]
    """Returns whether the save of this rank, step and round is durable."""
    list_shards: Callable[[], Iterable[ShardRecord]]
    notes: SlotNotes | None
    """Notes of the owned slots. None: a rank hands an OWNED slot over again to the next process."""
    room_seconds: float = 0.0
    """How long a save waits in a full place for older steps to be deleted before it fails."""
    disk_quiet_seconds: float = 60.0
    """A write without progress for this long is reported as a hanging disk."""

    @property
    def staged_states(self) -> tuple[SlotState, ...]:
        """States of a slot that a rank may hand over."""
        return (SlotState.FULL,) if self.notes else (SlotState.FULL, SlotState.OWNED)


class SavePools:
    """Threads for the calls of a save that block.

    Each kind of call has a pool of its own, so that a disk that hangs does not delay a comparison in memory.

    * `shard`: write and delete shards where the saves become durable.
    * `digest`: digest slots in memory, while the disk may occupy `shard`.
    * `meta`: write small documents. They must not wait behind gigabytes of shards.
    * `read`: read the index and small documents.
    """

    def __init__(self, disk: int) -> None:
        self.shard = Pool("shard", disk)
        self.digest = Pool("digest", disk)
        self.meta = Pool("meta", 1)
        self.read = Pool("read", disk)

    def close(self, *, wait: bool = False) -> None:
        """End the threads. Calls that run now finish, and with `wait` this returns after them."""
        for pool in (self.shard, self.digest, self.meta, self.read):
            pool.close(wait=wait)


MAX_KNOWN = 1024
"""Layouts that are remembered: far more than the ranks of a pod save at a time. A state whose structure
changes at each save has another one each time."""


class RankLayouts:
    """Access to the layout documents of this pod's ranks, in the shared volume and on the node tier."""

    def __init__(self, directory: Path, node: NodeTier, pools: SavePools) -> None:
        self._files = LayoutFiles(directory)
        self._node = node
        self._pools = pools
        self.known: dict[Digest, LayoutDigests] = {}
        """What the layouts of the newest saves have in common with others, the one used last at the end.
        `ensure` adds those of its layouts."""

    async def ensure(self, stage: Stage, put: Callable[[bytes], object] | None = None) -> None:
        """Make the layout of a save durable on the node tier. One that is there is only marked as used.

        Args:
            stage: The message that names the layout.
            put: Puts the document into the node tier, in place of `put_layout`.

        Raises:
            NotFoundError: The document is not in the shared volume.
            FormatError: The document is too large, or is no regular file, or no layout.
            CorruptionError: The document has another digest.
            UnavailableError: The document cannot be read.
        """
        digest = stage.layout
        known = self.known.get(digest)
        if known is None or not await self._pools.meta.run(self._node.keep_layout, digest):
            known = await self._pools.meta.run(self._store, digest, put)
        self._remember(digest, known)

    async def digests(self, digest: Digest) -> LayoutDigests:
        """Return what the layout of an own shard has in common with others.

        Raises what `document` raises.
        """
        known = self.known.get(digest)
        if known is None:
            # The process that stored this shard has ended since.
            known = await self._pools.read.run(self._digests, digest)
            self._remember(digest, known)
        return known

    def _remember(self, digest: Digest, digests: LayoutDigests) -> None:
        self.known.pop(digest, None)
        self.known[digest] = digests
        if len(self.known) > MAX_KNOWN:
            del self.known[next(iter(self.known))]

    async def document(self, digest: Digest) -> bytes:
        """Return the layout of an own shard. It is stored again if the node tier has lost it.

        Raises what `ensure` raises.
        """
        return await self._pools.read.run(self._document, digest)

    async def wanted(self, digest: Digest) -> RankLayout:
        """Return the layout of the payload that a rank requests from the restore point.

        The document is read from the shared volume and is not stored. Raises what `ensure` raises.
        """
        return await self._pools.read.run(lambda: parse_rank_layout(self._files.read(digest)))

    async def publish(self, document: bytes) -> Digest:
        """Write a layout to the shared volume, where the ranks read it. Raises UnavailableError."""
        digest = digest_of(document)
        await self._pools.meta.run(self._files.ensure, document, digest)
        return digest

    async def clear(self) -> None:
        """Remove the layouts of the shared volume, which only ranks of an earlier round needed."""
        await self._pools.meta.run(self._files.clear)

    def _store(self, digest: Digest, put: Callable[[bytes], object] | None = None) -> LayoutDigests:
        document = self._files.read(digest)
        digests = layout_digests(document)
        (put or self._node.put_layout)(document)
        return digests

    def _digests(self, digest: Digest) -> LayoutDigests:
        return layout_digests(self._document(digest))

    def _document(self, digest: Digest) -> bytes:
        try:
            return self._node.get_layout(digest)
        except (NotFoundError, CorruptionError):
            self._store(digest)
            return self._node.get_layout(digest)


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
    """Whether the step was pruned while the slot was being written."""

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.stage.step, self.stage.round)


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
