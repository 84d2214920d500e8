"""What differs between the saves of a pod and those of a folder, as the engine of a save needs it.

In a pod the place is the node tier, the coordinator chooses which waiting step is written, and a restarted
sidecar finds the slots of its predecessor by their notes. In a folder the place is the folder, waiting steps
are written in order, and a rank hands its saves over again to the next persister.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast_core.ids import JobUid, RestartRound, ShardRef
from holdfast_core.messages.schema import Refused, SaveFailed, Stage
from holdfast_core.save.slot_notes import SlotNotes
from holdfast_core.shards.record import ShardHeader, ShardRecord
from holdfast_core.shm.slot_file import SlotFile, SlotState
from holdfast_core.tasks import Pool


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

    def failed(self, stage: Stage, error: Exception) -> SaveFailed:
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
    list_shards: Callable[[], Iterable[ShardRecord]]
    delete_shard: Callable[[ShardRef], None]
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
