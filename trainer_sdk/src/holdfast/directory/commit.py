"""Commit of a checkpoint in a folder: records of all ranks' shards, then the manifest, then pruning.

 1. When a rank's shard and layout are durable, it writes the record
    `records/r<round>-<run id>/<checkpoint>/<rank>.json`: what a worker of a pod reports of the shard. The
    records of another run lie in another directory, so that they never count, even in the same round.
 2. When the records of all ranks of a run exist, rank 0 writes the manifest (put-if-absent). The
    checkpoint is then committed.
 3. When a rank finds the manifest, it may delete its own shards that no kept checkpoint names.
A kill between any two of these leaves the older checkpoint unchanged. After a kill between 1 and 2 the
next run commits the checkpoint. The manifest depends on the records alone, so that any process may write
it, or two processes at the same time.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.directory.choice import (
    JOB_UID,
    candidates,
    checkpoint_of_name,
    committed,
    pinned,
    pins_of,
)
from holdfast.directory.processes import claimed_checkpoints, has_writers, holder
from holdfast_core.errors import ConfigError, HoldfastError, NotFoundError
from holdfast_core.format.manifest import JobIdentity, manifest_document
from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    Level,
    Rank,
    RestartRound,
    ShardInfo,
    ShardRef,
    Step,
    age_of,
)
from holdfast_core.messages import codec
from holdfast_core.messages.schema import ReportedShard
from holdfast_core.node.documents import read_document, replace_document
from holdfast_core.node.files import disk_errors, fsync_directory, locked, make_directories
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.retention import RetentionReason, superseded
from holdfast_core.shards.file import ShardRecord

logger = logging.getLogger(__name__)

_RUN = re.compile(r"r(\d{6})-([0-9A-Za-z._-]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one rank's shard of a checkpoint."""

    shard: ReportedShard
    world_size: int
    parent: Digest | None = None
    """Digest of the manifest from which the run started."""
    failure: str = ""
    """Why the shard will never be uploaded. "" if it may be, or was."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run in one round."""

    directory: Path
    round: RestartRound
    run_id: str

    @property
    def path(self) -> Path:
        return self.directory / f"r{self.round:06d}-{self.run_id}"

    def write(self, record: Record) -> None:
        shard = record.shard
        path = self._file(CheckpointId(shard.step, shard.round), shard.shard.rank)
        replace_document(path, codec.dumps(record))

    def has(self, checkpoint: CheckpointId, rank: int) -> bool:
        return self._file(checkpoint, rank).exists()

    def read(self, checkpoint: CheckpointId, rank: int) -> Record:
        """Return a record. Raises NotFoundError, CorruptionError, FormatError."""
        return codec.loads(Record, read_document(self._file(checkpoint, rank)))

    def remove(self, checkpoint: CheckpointId, rank: Rank) -> None:
        self._file(checkpoint, rank).unlink(missing_ok=True)

    def forget(self, checkpoint: CheckpointId) -> None:
        """Remove the records of a checkpoint."""
        shutil.rmtree(self.path / str(checkpoint), ignore_errors=True)

    def checkpoints(self) -> list[CheckpointId]:
        """Return the checkpoints that have records, the oldest first. Other names are ignored."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [path.name for path in self.path.iterdir()]
        return sorted(filter(None, map(checkpoint_of_name, names)), key=age_of)

    def _file(self, checkpoint: CheckpointId, rank: int) -> Path:
        return self.path / str(checkpoint) / f"{rank}.json"


def runs_in(directory: Path) -> list[RunFiles]:
    """Return the runs that have files, of the lowest round first. Other names are ignored."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(path.name for path in directory.iterdir())
    matches = (_RUN.fullmatch(name) for name in names)
    return [RunFiles(directory, RestartRound(int(m[1])), m[2]) for m in matches if m is not None]


def remove_older(directory: Path, round_: RestartRound) -> None:
    """Remove the files of the runs of lower rounds, of which nothing more is committed or uploaded."""
    for files in runs_in(directory):
        if files.round < round_:
            shutil.rmtree(files.path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Committer:
    """Commits and prunes the checkpoints of a directory. All its state is in the directory."""

    tier: DiskNodeTier
    records_dir: Path
    world_size: int
    own_ranks: range
    keep_last: int
    run_id: str = "standalone"
    parent: Digest | None = None

    def prepare(self, record: ShardRecord, layout: LayoutDigests) -> None:
        """Write the record of this rank's durable shard. It appears atomically."""
        header = record.header
        shard = ReportedShard(header.step, header.round, record.info, layout)
        self.files(header.round).write(Record(shard, header.world_size, self.parent))

    def files(self, round_: RestartRound) -> RunFiles:
        """Return the files of this run."""
        return RunFiles(self.records_dir, round_, self.run_id)

    def is_prepared(self, checkpoint: CheckpointId, rank: Rank) -> bool:
        return self.files(checkpoint.round).has(checkpoint, rank)

    def is_complete(self, checkpoint: CheckpointId) -> bool:
        files = self.files(checkpoint.round)
        return all(files.has(checkpoint, rank) for rank in range(self.world_size))

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        try:
            self.tier.get_manifest(JOB_UID, checkpoint)
        except NotFoundError:
            return False
        return True

    def was_pruned(self, checkpoint: CheckpointId) -> bool:
        """Return whether a save that was durable on this process's ranks was committed, and deleted since.

        Before its commit, no other process deletes their shards. Raises OSError if the folder is lost.
        """
        with one_at_a_time(self.records_dir.parent):  # a deletion takes the manifest first
            known = (r.ref for r in self.tier.list_shards() if r.checkpoint == checkpoint)
            return not any(self.tier.shard_path(ref).exists() for ref in known)

    def commit(self, checkpoint: CheckpointId) -> None:
        """Commit `checkpoint`. Rank 0 calls it when all ranks are prepared. It is idempotent.

        Raises FormatError for an invalid record, and NotFoundError where a record or a shard is missing.
        """
        with one_at_a_time(
            self.records_dir.parent
        ):  # another rank may delete its shard where the folder is full
            if self.is_committed(checkpoint):
                return  # by a later run, or before this process
            try:
                self._commit(checkpoint, self.files(checkpoint.round))
            except NotFoundError as error:
                raise NotFoundError(f"checkpoint {checkpoint}: {error}") from error

    def commit_left(self) -> None:
        """Commit what all ranks of an earlier run made durable, if it is newer than every checkpoint.

        Records are written without fsync. A checkpoint with a record that a power failure damaged, or
        whose shard is missing, is skipped.
        """
        runs = runs_in(self.records_dir)
        if not runs:
            return
        # The lock prevents a commit of what that run's rank 0 prunes at the same time.
        with one_at_a_time(self.records_dir.parent):
            newest = max(map(age_of, candidates(self.tier)), default=(-1, -1))
            for files in runs:
                for checkpoint in files.checkpoints():
                    if age_of(checkpoint) > newest:
                        self._commit_if_whole(checkpoint, files)

    @property
    def rounds(self) -> list[RestartRound]:
        """Rounds of the existing records."""
        return [files.round for files in runs_in(self.records_dir)]

    def prune(
        self, newest: CheckpointId, protected: Collection[CheckpointId], *, leader: bool
    ) -> None:
        """Delete old checkpoints and shards after `newest` was committed.

        Only the leader deletes checkpoints. It keeps the last `keep_last`, `protected`, and those that a
        process reads. Every process deletes those shards of its own ranks that no manifest names and that
        are older than `newest`.

        Args:
            newest: The checkpoint that was just committed.
            protected: The restore point of this run, and what waits for its upload.
            leader: Whether this process serves rank 0.
        """
        with one_at_a_time(self.records_dir.parent):
            self._prune(newest, protected, leader)

    def make_room(
        self, wanted: CheckpointId, protected: CheckpointId | None
    ) -> CheckpointId | None:
        """Delete one item so that a save of `wanted` has more room.

        Returns the checkpoint of the deleted item, or None if nothing may be deleted. The order is:

        1. a shard of this process's ranks that no checkpoint names and that is older than the newest
           checkpoint;
        2. the oldest checkpoint, but never the newest or a pinned one, and not the restore point
           `protected` before this run has committed a checkpoint of its own;
        3. a shard of this process's ranks of an older save that other ranks have not completed. They
           cannot complete it while the disk is full for them, too.
        """
        with one_at_a_time(self.records_dir.parent):
            committed = candidates(self.tier)[::-1]  # the oldest first
            orphans = [
                record
                for record in self.tier.list_shards()
                if self._is_own(record, leader=0 in self.own_ranks)
                and record.checkpoint not in committed
                and age_of(record.checkpoint) < age_of(wanted)
            ]
            orphans.sort(key=lambda record: age_of(record.checkpoint))
            if committed and orphans and age_of(orphans[0].checkpoint) < age_of(committed[-1]):
                return self._drop(orphans[0])
            has_own = any(checkpoint.round == wanted.round for checkpoint in committed)
            kept = pinned(self.records_dir.parent)
            for checkpoint in committed[:-1]:
                if checkpoint not in kept and (has_own or checkpoint != protected):
                    self.tier.delete_checkpoint(JOB_UID, checkpoint)
                    return checkpoint
            return self._drop(orphans[0]) if orphans else None

    def _drop(self, record: ShardRecord) -> CheckpointId:
        """Delete a shard and, before it, its record: a save whose records all exist may be committed."""
        for files in runs_in(self.records_dir):
            files.remove(record.checkpoint, record.header.rank)
        self._delete(record)
        return record.checkpoint

    def _is_own(self, record: ShardRecord, *, leader: bool) -> bool:
        """Return whether this process may delete the shard.

        The leader is also responsible for ranks that exist only in an earlier, larger world.
        """
        rank = record.header.rank
        return rank in self.own_ranks or (leader and rank >= self.world_size)

    def _prune(
        self, newest: CheckpointId, protected: Collection[CheckpointId], leader: bool
    ) -> None:
        committed = candidates(self.tier)
        if leader:
            # The restore point of this run stays, to which a restart can return.
            needed = {
                RetentionReason.PINNED: pinned(self.records_dir.parent),
                RetentionReason.BEING_READ: claimed_checkpoints(self.records_dir.parent),
                RetentionReason.RESTORE_POINT: {newest, *protected},
            }
            for checkpoint in superseded(committed, Level.LOCAL, self.keep_last or None, needed):
                self.tier.delete_checkpoint(JOB_UID, checkpoint)
                committed.remove(checkpoint)
            self._drop_old_records(newest, protected)
        known = set(committed)
        for record in self.tier.list_shards():
            checkpoint = record.checkpoint
            older = age_of(checkpoint) < age_of(newest)
            if self._is_own(record, leader=leader) and older and checkpoint not in known:
                self._delete(record)

    def _delete(self, record: ShardRecord) -> None:
        # If the shard was deleted with its checkpoint, `open_shard` drops it from the tier's index.
        with contextlib.suppress(NotFoundError):
            self.tier.open_shard(record.ref).close()
            self.tier.delete_shard(record.ref)

    def _drop_old_records(self, newest: CheckpointId, protected: Collection[CheckpointId]) -> None:
        """Remove the records of what will not be committed, and is not on its way to the store."""
        remove_older(self.records_dir, newest.round)
        files = self.files(newest.round)
        for checkpoint in files.checkpoints():
            if age_of(checkpoint) < age_of(newest) and checkpoint not in protected:
                files.forget(checkpoint)

    def _commit_if_whole(self, checkpoint: CheckpointId, files: RunFiles) -> None:
        try:
            self._commit(checkpoint, files)
        except (HoldfastError, OSError) as error:
            logger.info(
                "checkpoint %s of an earlier run cannot be committed: %s", checkpoint, error
            )

    def _commit(self, checkpoint: CheckpointId, files: RunFiles) -> None:
        """Commit the checkpoint of the records.

        Raises NotFoundError while a record or a shard is missing, and FormatError for an invalid record.
        """
        first = files.read(checkpoint, 0)
        others = range(1, first.world_size)
        records = [first, *(files.read(checkpoint, rank) for rank in others)]
        entries = [self._entry(record.shard, first.world_size) for record in records]
        identity = JobIdentity("standalone", files.run_id, JOB_UID)
        manifest = manifest_document(identity, checkpoint, first.parent, entries)
        self.tier.put_manifest(JOB_UID, checkpoint, manifest)
        files.forget(checkpoint)

    def _entry(self, reported: ReportedShard, world_size: int) -> tuple[ShardInfo, LayoutDigests]:
        """Return what the manifest holds of a recorded shard, which the tier has with its layout.

        A manifest with a missing shard would count as the newest checkpoint, and older checkpoints that
        can be restored would be deleted.

        Raises NotFoundError, CorruptionError or FormatError.
        """
        shard, layout = reported.shard, reported.layout
        ref = ShardRef(JOB_UID, reported.step, reported.round, shard.rank, shard.blake3)
        with self.tier.open_shard(ref) as reader:  # the tier's index may be out of date
            found = reader.record
        if layout is None or found.info != shard:
            raise NotFoundError(
                f"the record of rank {shard.rank} names {shard}, but the folder has {found}"
            )
        header = found.header
        if (header.layout, header.world_size) != (layout.layout, world_size):
            raise NotFoundError(
                f"the record of rank {shard.rank} is of {world_size} ranks and the layout "
                f"{layout.layout}, but the folder has {found}"
            )
        if not self.tier.keep_layout(layout.layout):
            raise NotFoundError(f"the folder has no layout {layout.layout} of rank {shard.rank}")
        return shard, layout


def one_at_a_time(root: Path) -> contextlib.AbstractContextManager[None]:
    """Return the lock of the folder `root` under which processes commit and delete.

    Otherwise a process could remove an empty directory into which another one is about to write.
    """
    return locked(root / ".prune")


def delete_step(root: Path, step: Step, *, even_last: bool) -> bool:
    """Delete the checkpoints of a step, of all rounds, from a folder that trainings and readers may use.

    1. The records of its shards are removed, so that no run commits it again.
    2. The manifests are removed durably. From here on it does not exist.
    3. The shards are removed. After a kill before or during this, the next save in the folder removes them.

    Return False if the folder has no such step. Raises ConfigError for a checkpoint in use or pinned, for the
    newest one while a training runs, and for the newest one without `even_last`.
    """
    if not _of_step(root, step):
        return False  # before the folder's directories are created
    tier = DiskNodeTier(root / "tier", fill_limit=1.0, name="folder")
    tier.open()  # reads the heads of all shards, for which no commit should wait
    with one_at_a_time(root):
        wanted = _of_step(root, step)
        if not wanted:
            return False
        if not claimed_checkpoints(root).isdisjoint(wanted):
            raise ConfigError(
                f"step {step} in {root} is in use: a training was restored from it and still runs, or a "
                "process reads or uploads it. Delete it when that process has ended"
            )
        if not pinned(root).isdisjoint(wanted):
            raise ConfigError(
                f"step {step} in {root} is pinned: release it before (holdfast.open(dir).unpin({step}), or "
                f"`holdfast unpin {root}@{step}`)"
            )
        if committed(root)[0] in wanted:
            _expect_not_needed(root, step, even_last=even_last)
        for checkpoint in reversed(wanted):  # the newest one last: it is the restore point
            _delete(root, tier, checkpoint)
        tier.volume.remove_spare_files()
        return True


def delete_unneeded(
    root: Path, wanted: Iterable[CheckpointId]
) -> Iterator[tuple[CheckpointId, RetentionReason | None]]:
    """Delete checkpoints of a folder that a plan prunes, each as `delete_step` does.

    The lock is released between two of them, so that the commits of a training do not wait for all. Each is
    looked at again under the lock, because a training or a reader may need it since the plan was made.

    Yields:
        Each checkpoint, when it is gone, with None, or with the reason why it stays.
    """
    tier = DiskNodeTier(root / "tier", fill_limit=1.0, name="folder")
    tier.open()
    for checkpoint in wanted:
        with disk_errors(f"pruning {root}"), one_at_a_time(root):
            needed = needed_in(root)
            reason = next((why for why, found in needed.items() if checkpoint in found), None)
            if reason is None:
                _delete(root, tier, checkpoint)
        yield checkpoint, reason
    tier.volume.remove_spare_files()


def needed_in(root: Path) -> dict[RetentionReason, Collection[CheckpointId]]:
    """Return the checkpoints of a folder that must stay whatever a policy says, by reason."""
    waiting: list[CheckpointId] = []
    if has_writers(root / "processes"):  # else the queue is of a run that has ended
        from holdfast.directory.plan import PlanFile  # a folder without a store has none

        for files in runs_in(root / "records"):
            plan = PlanFile(files.path / "plan.json").read()
            waiting += () if plan is None else plan.queue.wanted
    return {
        RetentionReason.PINNED: pinned(root),
        RetentionReason.BEING_READ: claimed_checkpoints(root),
        RetentionReason.UPLOADING: waiting,
    }


def pin_checkpoint(root: Path, checkpoint: CheckpointId) -> None:
    """Keep a checkpoint of a folder from being deleted, until `unpin_checkpoint`. It may be pinned already.

    The mark is durable when this returns. Raises NotFoundError if the checkpoint was deleted meanwhile, and
    TierError.
    """
    mark = pins_of(root) / str(checkpoint)
    with disk_errors(f"writing {mark}"), one_at_a_time(root):
        if checkpoint not in committed(root):
            raise NotFoundError(
                f"step {checkpoint.step} in {root} was deleted before it was pinned"
            )
        make_directories(mark.parent)
        mark.touch(0o640)
        fsync_directory(mark.parent)


def unpin_checkpoint(root: Path, checkpoint: CheckpointId) -> None:
    """Remove the mark of a pinned checkpoint durably. One that is not pinned is no error."""
    mark = pins_of(root) / str(checkpoint)
    with disk_errors(f"removing {mark}"), contextlib.suppress(FileNotFoundError):
        mark.unlink()
        fsync_directory(mark.parent)


def _delete(root: Path, tier: DiskNodeTier, checkpoint: CheckpointId) -> None:
    for files in runs_in(root / "records"):
        files.forget(checkpoint)
    tier.delete_checkpoint(JOB_UID, checkpoint)


def _of_step(root: Path, step: Step) -> list[CheckpointId]:
    """Return the committed checkpoints of a step, the newest first."""
    return [checkpoint for checkpoint in committed(root) if checkpoint.step == step]


def _expect_not_needed(root: Path, step: Step, *, even_last: bool) -> None:
    """Raise ConfigError if the newest checkpoint must stay."""
    training = holder(root / "training.lock")
    if training is not None:
        raise ConfigError(
            f"step {step} in {root} is the newest checkpoint of a running training ({training}), which "
            "continues from it after a failure: delete an older one, or end the training before"
        )
    if not even_last:
        raise ConfigError(
            f"step {step} in {root} is the newest checkpoint, which the next run restores: to delete it all "
            "the same, use delete(step, even_last=True)"
        )
