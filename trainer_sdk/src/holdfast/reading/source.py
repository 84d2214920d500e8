"""`CheckpointSource`, the interface between the reader of checkpoints and the place where they lie."""

from __future__ import annotations

from typing import Protocol

from holdfast_core.closing import Closing
from holdfast_core.format.manifest import Manifest
from holdfast_core.ids import CheckpointId, Digest, ShardRef, TierName
from holdfast_core.tiers.base import ShardSource


class CheckpointSource(Closing, Protocol):
    """The committed checkpoints of one training. Nothing is written except the record of `claim`."""

    @property
    def tier(self) -> TierName:
        """NODE for a folder, OBJECT for a store."""
        ...

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        ...

    def checkpoints(self) -> list[CheckpointId]:
        """Return the committed checkpoints, the one that a restore would choose first."""
        ...

    def claim(self, checkpoint: CheckpointId) -> object:
        """Keep others from deleting `checkpoint` while the returned object exists, where that is possible."""
        ...

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        """Return the manifest, verified. Raises NotFoundError, CorruptionError, FormatError."""
        ...

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        """Return the layout of a shard, verified. Raises NotFoundError, CorruptionError."""
        ...

    def open_shard(self, ref: ShardRef) -> ShardSource:
        """Open a shard. Chunks are verified when they are read.

        Raises NotFoundError, CorruptionError.
        """
        ...
