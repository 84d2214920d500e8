"""`CheckpointSource`, the interface between the reader of checkpoints and the place where they lie.

Here is also the source of a folder, which a training may write to at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.directory.choice import JOB_UID, committed, open_in_folder
from holdfast.directory.commit import one_at_a_time
from holdfast.directory.processes import claim_checkpoint
from holdfast_core.drill import DrillPlace
from holdfast_core.errors import ConfigError, NotFoundError
from holdfast_core.format.manifest import Manifest, ManifestShard, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef, TierName
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.reading import check_source
from holdfast_core.tasks import Closing
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

    @property
    def job_uid(self) -> JobUid:
        """UID of the job, which the manifests name."""
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

    def drilled(self) -> DrillPlace:
        """Return the checkpoints as a drill reads them."""
        ...


class FolderSource(Closing):
    """CheckpointSource of a folder. It changes no file of a checkpoint and quarantines nothing.

    Raises ConfigError where `root` is not a folder of checkpoints.
    """

    tier = TierName.NODE
    job_uid = JOB_UID

    def __init__(self, root: Path) -> None:
        if not (root / "tier").is_dir():
            raise ConfigError(
                f"{root}: expected a folder in which a Checkpointer has saved, found no directory "
                f"{root / 'tier'}"
            )
        self._root = root
        self._tier = DiskNodeTier(root / "tier", read_only=True, name="folder")
        self._tier.open()

    @property
    def name(self) -> str:
        return str(self._root)

    def checkpoints(self) -> list[CheckpointId]:
        return committed(self._root)

    def claim(self, checkpoint: CheckpointId) -> object:
        try:
            with one_at_a_time(self._root):  # so that no process is about to delete it
                return claim_checkpoint(self._root, checkpoint)
        except OSError:
            return None  # the folder cannot be written

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        document = self._tier.get_manifest(JOB_UID, checkpoint)
        return parse_manifest_of(document, JOB_UID, checkpoint)

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        return self._tier.get_layout(digest)

    def open_shard(self, ref: ShardRef) -> ShardSource:
        return open_in_folder(self._tier, ref)

    def drilled(self) -> DrillPlace:
        return _DrilledFolder(self, self._tier)

    def close(self) -> None:
        """Do nothing: the tier holds no open file."""


@dataclass(frozen=True, slots=True)
class _DrilledFolder:
    """Implementation of drill.DrillPlace and drill.ShardVerifier. Each shard of a folder is a whole file."""

    source: FolderSource
    disk: DiskNodeTier
    tier: TierName = TierName.NODE

    @property
    def name(self) -> str:
        return self.source.name

    def checkpoints(self) -> list[CheckpointId]:
        return self.source.checkpoints()

    def manifest_document(self, checkpoint: CheckpointId) -> bytes:
        return self.disk.get_manifest(JOB_UID, checkpoint)

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        return self.source.layout(ref, digest)

    def open_shard(self, ref: ShardRef) -> ShardSource:
        return self.source.open_shard(ref)

    def verifier(self, checkpoint: CheckpointId) -> _DrilledFolder:
        return self

    def verify(self, ref: ShardRef, shard: ManifestShard) -> int:
        if self.disk.look_up(ref) is None:
            raise NotFoundError(f"shard of {ref}: no file {self.disk.shard_path(ref)}")
        with self.disk.open_shard(ref) as reader:
            check_source(reader.record, shard)
            reader.verify()
        return shard.payload_bytes

    def missing_references(self) -> tuple[CheckpointId, ...]:
        return ()
