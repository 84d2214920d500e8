"""What differs between the saves of a pod and those of a folder, as the engine of a save needs it.

In a pod the place is the node tier, the coordinator chooses which waiting step is written, and a restarted
sidecar finds the slots of its predecessor by their notes. In a folder the place is the folder, waiting steps
are written in order, and a rank hands its saves over again to the next persister.

The layouts of saves come from the shared volume (shm.shared_files) and are stored on the node tier. From
there they go to the nodes and to the object store that get a copy of a shard which names them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast_core.errors import CorruptionError, NotFoundError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import (
    LayoutDigests,
    RankLayout,
    layout_digests,
    parse_rank_layout,
)
from holdfast_core.ids import Digest, JobUid, RestartRound, ShardRef
from holdfast_core.messages.schema import Refused, SaveFailed, Stage
from holdfast_core.save.slots import SlotNotes
from holdfast_core.shards.file import ShardHeader, ShardRecord
from holdfast_core.shm.shared_files import LayoutFiles
from holdfast_core.shm.slot_file import SlotFile, SlotState
from holdfast_core.tasks import Pool
from holdfast_core.tiers.base import NodeTier


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


class RankLayouts:
    """Access to the layout documents of this pod's ranks, in the shared volume and on the node tier."""

    def __init__(self, directory: Path, node: NodeTier, pools: SavePools) -> None:
        self._files = LayoutFiles(directory)
        self._node = node
        self._pools = pools
        self.known: dict[Digest, LayoutDigests] = {}
        """What layouts of saves have in common with others. `ensure` adds those of its layouts."""

    async def ensure(self, digest: Digest, put: Callable[[bytes], object] | None = None) -> None:
        """Make the document durable on the node tier. One that is there is only marked as used.

        Args:
            digest: Digest of the document.
            put: Puts the document into the node tier, in place of `put_layout`.

        Raises:
            NotFoundError: The document is not in the shared volume.
            FormatError: The document is too large, or is no regular file, or no layout.
            CorruptionError: The document has another digest.
            UnavailableError: The document cannot be read.
        """
        if digest not in self.known or not await self._pools.meta.run(
            self._node.keep_layout, digest
        ):
            self.known[digest] = await self._pools.meta.run(self._store, digest, put)

    async def digests(self, digest: Digest) -> LayoutDigests:
        """Return what the layout of an own shard has in common with others.

        Raises what `document` raises.
        """
        if digest not in self.known:
            # The process that stored this shard has ended since.
            self.known[digest] = await self._pools.read.run(self._digests, digest)
        return self.known[digest]

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
