"""`CheckpointSource`, the interface between the reader of checkpoints and the place where they lie.

Here is also the source of a folder, which a training may write to at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Protocol

from holdfast.directory.choice import (
    JOB_UID,
    committed,
    open_in_folder,
    pinned,
    read_patiently,
)
from holdfast.directory.commit import (
    delete_unneeded,
    needed_in,
    one_at_a_time,
    pin_checkpoint,
    unpin_checkpoint,
)
from holdfast.directory.processes import claim_checkpoint
from holdfast_core.clock import SystemClock
from holdfast_core.drill import DrillPlace
from holdfast_core.errors import ConfigError, ForbiddenByStateError, FormatError
from holdfast_core.format import keys
from holdfast_core.format.manifest import Manifest, ManifestShard, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef, TierName, age_of
from holdfast_core.node.files import disk_errors
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.reading import check_source
from holdfast_core.retention import RetentionReason
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.objects import CheckpointObjects, Listed, checkpoints_in, count_shards


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A committed checkpoint as a listing of its place shows it. Nothing of it was read."""

    step: int
    round: int
    """Restart round of the run that saved it."""
    saved_at: datetime
    """When its manifest was written here, in UTC, by the clock of the file system or the store."""
    ranks: int
    """Number of ranks that have a shard here."""
    stored_bytes: int
    """Bytes that it takes here. Chunks that an earlier checkpoint stores for it do not count."""
    pinned: bool | None
    """None: checkpoints of this place cannot be pinned."""

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.step, self.round)  # type: ignore[arg-type] # public fields are plain


def listed_from(
    found: Mapping[CheckpointId, CheckpointObjects],
    pins: Collection[CheckpointId] | None,
    only: CheckpointId | None,
) -> list[ListedCheckpoint]:
    """Return what a listing shows, the oldest checkpoint first.

    Args:
        found: The checkpoints.
        pins: Those that are pinned. None: none can be.
        only: The only checkpoint to return. None: all.
    """
    now = SystemClock().utc_now()
    return [
        ListedCheckpoint(
            checkpoint.step,
            checkpoint.round,
            now - objects.age,
            objects.ranks,
            objects.size_bytes,
            None if pins is None else checkpoint in pins,
        )
        for checkpoint, objects in sorted(found.items(), key=lambda item: age_of(item[0]))
        if only in (None, checkpoint)
    ]


def listed_below(only: CheckpointId | None) -> tuple[str, str]:
    """Return the directories of a job, each with a slash, that list its manifests and its shards.

    Args:
        only: The only checkpoint of interest. None: all.
    """
    if only is None:
        return f"{keys.MANIFESTS}/", f"{keys.SHARDS}/"
    return f"{keys.manifest_key(only).rpartition('/')[0]}/", keys.shards_prefix(only)


class CheckpointSource(Closing, Protocol):
    """The committed checkpoints of one training.

    Nothing is written except the record of `claim`, unless `delete`, `pin` or `unpin` is called.
    """

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

    def listed(self, only: CheckpointId | None = None) -> Sequence[ListedCheckpoint]:
        """Return the committed checkpoints, or one of them, as a listing shows them, the oldest first.

        Nothing is read.
        """
        ...

    def references(self, checkpoint: CheckpointId) -> Mapping[CheckpointId, int]:
        """Return the payload bytes that each earlier checkpoint stores for this one."""
        ...

    def needed(self) -> Mapping[RetentionReason, Collection[CheckpointId]]:
        """Return the checkpoints that must stay whatever a policy says, by reason."""
        ...

    def delete(
        self, wanted: Iterable[CheckpointId]
    ) -> Iterator[tuple[CheckpointId, RetentionReason | None]]:
        """Delete checkpoints. Yield each when it is gone, or with the reason why it stays."""
        ...

    def job_name(self) -> str | None:
        """Return namespace/name of the TrainingJob that saved them. None for a training in a folder."""
        ...

    def sweep(self) -> int:
        """Delete what no checkpoint needs, where nothing is saved any more. Return the number of bytes."""
        ...

    def pin(self, checkpoint: CheckpointId) -> None:
        """Keep a checkpoint from being deleted. Raises ConfigError where that is not possible."""
        ...

    def unpin(self, checkpoint: CheckpointId) -> None:
        """Undo `pin`. Raises ConfigError where nothing can be pinned."""
        ...

    def claim(self, checkpoint: CheckpointId) -> object:
        """Keep others from deleting `checkpoint` while the returned object exists, where that is possible."""
        ...

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        """Return the manifest, verified. Raises NotFoundError, CorruptionError, FormatError."""
        ...

    def lacks(self, checkpoint: CheckpointId) -> Sequence[int]:
        """Return the ranks whose shards are not here, or are known to be damaged. No payload is read.

        Raises as `manifest` does.
        """
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

    @cached_property
    def _tier(self) -> DiskNodeTier:
        """The tier, which reads the heads of all shards when it is opened. A listing needs none of them."""
        tier = DiskNodeTier(self._root / "tier", read_only=True, name="folder")
        tier.open()
        return tier

    @property
    def name(self) -> str:
        return str(self._root)

    def checkpoints(self) -> list[CheckpointId]:
        return committed(self._root)

    def listed(self, only: CheckpointId | None = None) -> list[ListedCheckpoint]:
        job = self._root / "tier" / JOB_UID
        with disk_errors(f"listing {job}"):
            manifests, shards = listed_below(only)
            found = checkpoints_in(_listed(job, manifests))
            count_shards(found, _listed(job, shards))
        return listed_from(found, pinned(self._root), only)

    def references(self, checkpoint: CheckpointId) -> Mapping[CheckpointId, int]:
        """Return nothing: each shard of a folder is a whole file."""
        return {}

    def needed(self) -> Mapping[RetentionReason, Collection[CheckpointId]]:
        return needed_in(self._root)

    def delete(
        self, wanted: Iterable[CheckpointId]
    ) -> Iterator[tuple[CheckpointId, RetentionReason | None]]:
        self._expect_writable()
        return delete_unneeded(self._root, wanted)

    def job_name(self) -> str | None:
        return None

    def sweep(self) -> int:
        """Delete nothing: a deletion of a folder leaves nothing, and the next save removes the rest."""
        return 0

    def pin(self, checkpoint: CheckpointId) -> None:
        self._expect_writable()
        pin_checkpoint(self._root, checkpoint)

    def unpin(self, checkpoint: CheckpointId) -> None:
        self._expect_writable()
        unpin_checkpoint(self._root, checkpoint)

    def claim(self, checkpoint: CheckpointId) -> object:
        try:
            with one_at_a_time(self._root):  # so that no process is about to delete it
                return claim_checkpoint(self._root, checkpoint)
        except OSError:
            return None  # the folder cannot be written

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        document = self._tier.get_manifest(JOB_UID, checkpoint)
        return parse_manifest_of(document, JOB_UID, checkpoint)

    def lacks(self, checkpoint: CheckpointId) -> list[int]:
        manifest = self.manifest(checkpoint)
        return [shard.rank for shard in manifest.shards if not self._has(manifest.ref(shard.rank))]

    def _has(self, ref: ShardRef) -> bool:
        try:
            return read_patiently(lambda: self._tier.look_up(ref)) is not None
        except FormatError:
            return False

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        return self._tier.get_layout(digest)

    def open_shard(self, ref: ShardRef) -> ShardSource:
        return open_in_folder(self._tier, ref)

    def drilled(self) -> DrillPlace:
        return _DrilledFolder(self, self._tier)

    def close(self) -> None:
        """Do nothing: the tier holds no open file."""

    def _expect_writable(self) -> None:
        if not os.access(self._root, os.W_OK):
            raise ForbiddenByStateError(
                f"{self._root} cannot be written by this process (user {os.getuid()}): nothing in it can be "
                "deleted or pinned"
            )


def _listed(job: Path, below: str) -> Iterator[Listed]:
    """Yield the files below a directory of a job, those of one directory after each other."""
    now = SystemClock().utc_now().timestamp()
    folders = [(str(job / below), below)]
    while folders:
        folder, prefix = folders.pop()
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, f"{prefix}{entry.name}/"))
                    continue
                with suppress(FileNotFoundError):  # a training has just pruned it
                    found = entry.stat(follow_symlinks=False)
                    age = timedelta(seconds=max(0.0, now - found.st_mtime))
                    yield Listed(f"{prefix}{entry.name}", age, found.st_size)


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
        with self.disk.open_shard(ref) as reader:
            check_source(reader.record, shard)
            reader.verify()
        return shard.payload_bytes

    def missing_references(self) -> tuple[CheckpointId, ...]:
        return ()
