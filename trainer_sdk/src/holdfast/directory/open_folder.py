"""A folder that is opened for one round of a run, with its options, and what may be deleted from it.

A run reserves a round by creating `rounds/r<round>` with O_EXCL, which is atomic on every local file
system and on NFS since version 3. The content of the file is for people. Only its name counts, so that a
damaged byte cannot hide a checkpoint.

The options are also an argument of the persister, so they can be encoded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from holdfast.directory.choice import (
    JOB_UID,
    ChosenCheckpoint,
    candidates,
    choose,
    load_choice,
    load_from,
    next_round,
    read_patiently,
)
from holdfast.directory.commit import Committer
from holdfast.directory.processes import Presence, expect_not_unmounted, is_directory_gone
from holdfast_core.errors import (
    CapacityError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import Policy
from holdfast_core.node.files import disk_errors, fsync_directory, make_directories
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shm.slot_file import SlotFile

if TYPE_CHECKING:
    from holdfast.directory.folder_store import FolderStore


_NAME = re.compile(r"r(\d{6})", re.ASCII)


def claim_round(directory: Path, at_least: RestartRound, run_id: str) -> RestartRound:
    """Reserve and return the lowest round that is at least `at_least` and above all reserved rounds.

    The reservation is durable when this returns. Raises OSError.
    """
    make_directories(directory)
    while True:
        round_ = RestartRound(
            max(at_least, *(reserved + 1 for reserved in _reserved(directory)), 0)
        )
        sys.audit("holdfast.directory.before_round")
        if not _create(_path(directory, round_), run_id):
            continue
        fsync_directory(directory)
        reserved = _reserved(directory)
        # Between the listing and the creation, another run may have reserved this round and a higher one,
        # and have removed the file of this round.
        if max(reserved) > round_:
            continue
        for older in reserved:
            if older < round_:
                # An old file does no harm, and the next run removes it.
                with contextlib.suppress(OSError):
                    _path(directory, older).unlink()
        return round_


def keep_round(directory: Path, round_: RestartRound, run_id: str) -> None:
    """Reserve this run's round again if the folder was deleted and holds no reservation."""
    make_directories(directory)
    if not _reserved(directory):
        _create(_path(directory, round_), run_id)


def has_rounds(directory: Path) -> bool:
    """Return whether a run has ever reserved a round in this folder."""
    return directory.is_dir() and bool(_reserved(directory))


def _reserved(directory: Path) -> list[RestartRound]:
    matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return [RestartRound(int(match.group(1))) for match in matches if match is not None]


def _create(path: Path, run_id: str) -> bool:
    """Create the file. Return False if it already exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o640)
    except FileExistsError:
        return False
    try:
        # A full disk may have no room for the text, but only the name counts.
        with contextlib.suppress(OSError):
            text = f"run {run_id} of process {os.getpid()} on {socket.gethostname()}\n"
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _path(directory: Path, round_: RestartRound) -> Path:
    return directory / f"r{round_:06d}"


UPLOAD_SECONDS = 600.0
"""Time that the last checkpoint may wait for its upload. A sidecar waits as long."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    root: Path
    slots_dir: Path
    layouts_dir: Path
    world_size: int
    own_ranks: range
    policy: Policy
    round: RestartRound | None = None
    """Restart round. None: choose a new round and reserve it (on rank 0)."""
    restore: CheckpointId | None = None
    """The checkpoint that rank 0 chose, or None if there is none."""
    choose_restore: bool = True
    """Whether to choose the restore point. If False, it is `restore`, which may be None."""
    rejected: tuple[CheckpointId, ...] = ()
    """Checkpoints that must not be chosen."""
    step: Step | None = None
    """The only step that may be chosen. None: the newest one is chosen."""
    run_id: str = "standalone"
    """Identity of the run, which is written into records and manifests. All ranks have the same."""
    device: int | None = None
    """Device number of the folder's file system when the run first opened it."""
    spare_slots_dir: Path | None = None
    """Directory for slots that do not fit into `slots_dir`."""
    read_only: bool = False
    """Whether the folder cannot be written, so that it serves restores only."""
    store: str | None = None
    """URL of the object store that the folder uploads to, or None."""
    store_keep_last: int = 3
    """Number of checkpoints to keep in the store."""
    writer: Path | None = None
    """File to claim until all that was staged is durable, see holdfast.directory.processes."""

    @property
    def leads(self) -> bool:
        """Whether the process serves rank 0, which commits and deletes checkpoints."""
        return 0 in self.own_ranks


def format_options(options: ServiceOptions) -> str:
    """Encode the options as the persister's argument, which `parse_options` decodes."""
    # The module `json` accepts paths that are not valid UTF-8, and msgspec's encoder does not.
    return json.dumps(msgspec.to_builtins(options, enc_hook=_plain))


def parse_options(text: str) -> ServiceOptions:
    """Decode the result of `format_options`."""
    return msgspec.convert(json.loads(text), ServiceOptions, dec_hook=_typed)


def _plain(value: Any) -> Any:
    return [value.start, value.stop] if isinstance(value, range) else str(value)


def _typed(kind: type, value: Any) -> Any:
    return range(*value) if kind is range else kind(value)


logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """The folder of a run. All that changes lies in its files, so that threads may share this object."""

    options: ServiceOptions
    tier: DiskNodeTier
    committer: Committer
    round: RestartRound
    presence: Presence | None
    """Identity of the folder when it was opened. None for a folder that cannot be written."""
    choice: ChosenCheckpoint | None
    """The restore point."""
    choice_error: HoldfastError | None
    """Why the restore point that rank 0 chose cannot be loaded. Restores raise it, so that all ranks choose
    again."""
    store: FolderStore | None = None
    """The object store that the folder uploads to."""

    @classmethod
    def open(cls, options: ServiceOptions, store: FolderStore | None = None) -> Self:
        """Open the directory and determine the round and the restore point.

        With a store this waits for its answer if the folder has nothing that can be restored.

        Raises CorruptionError or UnavailableError (see `choose`), TierError, and ConfigError for a store
        that cannot be used.
        """
        if options.round is not None and not has_rounds(options.root / "rounds"):
            expect_not_unmounted(options.root, options.device)
        tier = DiskNodeTier(
            options.root / "tier",
            fill_limit=1.0,
            read_only=options.read_only,
            name="folder",
            advice="free space in its file system, or keep fewer checkpoints (keep_last)",
        )
        tier.open()
        presence = None if options.read_only else Presence.of(options.root / "tier")
        committer = Committer(
            tier,
            options.root / "records",
            options.world_size,
            options.own_ranks,
            options.policy.keep_last,
            options.run_id,
        )
        choice, choice_error = None, None
        used: list[RestartRound] = []
        """Rounds of the store."""
        if options.choose_restore:
            if not options.read_only:
                committer.commit_left()
            if store is None:
                choice = choose(tier, options.rejected, step=options.step)
            else:
                choice, used = _choose_with_store(options, tier, store)
        elif options.restore is not None:
            try:
                choice = read_patiently(partial(_load, tier, options.restore, store))
            except (NotFoundError, CorruptionError) as error:
                choice_error = error  # another run pruned it after rank 0 had chosen it
        round_ = _take_round(options, tier, [*committer.rounds, *used])
        parent = None if choice is None else choice.digest
        committer = dataclasses.replace(committer, parent=parent)
        return cls(options, tier, committer, round_, presence, choice, choice_error, store)

    @property
    def protected(self) -> CheckpointId | None:
        """The restore point of this run, which pruning keeps."""
        return None if self.choice is None else self.choice.manifest.checkpoint

    @property
    def has_checkpoints(self) -> bool:
        return bool(candidates(self.tier))

    def keep_restored(self) -> None:
        """Make the restore point a checkpoint of the folder, if all of it was brought from the store."""
        if self.choice is None or self.store is None or self.options.read_only:
            return
        manifest = self.choice.manifest
        checkpoint = manifest.checkpoint
        try:
            with contextlib.suppress(CorruptionError):  # a damaged manifest is replaced
                if self.committer.is_committed(checkpoint):
                    return
            if all(self.tier.look_up(manifest.ref(s.rank)) is not None for s in manifest.shards):
                self.tier.put_manifest(JOB_UID, checkpoint, manifest.to_bytes())
        except HoldfastError as error:
            logger.warning("%s; the restore point %s stays in the store only", error, checkpoint)

    def remove_spare_files(self) -> None:
        """Remove the files that no further save overwrites, so that a folder at rest has no more of them."""
        if not self.options.read_only:
            try:
                self.tier.volume.remove_spare_files()
            except HoldfastError as error:
                logger.warning("%s; the next run removes them or uses them", error)

    def open_slot(self, name: str) -> SlotFile:
        """Open a slot in the slots' directory or in the spare one. Raises FormatError, UnavailableError.

        A missing slot does not raise NotFoundError, because ranks would then reject the checkpoint.
        """
        spare = self.options.spare_slots_dir
        try:
            return SlotFile.open(self.options.slots_dir, name)
        except NotFoundError as error:
            if spare is None:
                raise UnavailableError(str(error)) from error
        try:
            return SlotFile.open(spare, name)
        except NotFoundError as error:
            raise UnavailableError(f"{error}, nor in {self.options.slots_dir}") from error

    def expect_present(self) -> None:
        """Raise NotFoundError if the folder was deleted or unmounted since it was opened."""
        if self._is_lost():
            raise NotFoundError(
                f"{self.options.root}: the folder that this run opened no longer exists: it was "
                "deleted or unmounted"
            )

    def is_lost_by(self, error: BaseException) -> bool:
        """Return whether a write failed with this error because the folder was deleted or unmounted."""
        return is_directory_gone(error) or self._is_lost()

    def write(
        self, wanted: CheckpointId, call: Callable[[], T], deleted: Callable[[CheckpointId], None]
    ) -> T:
        """Call `call`, which writes for the checkpoint `wanted`, and return its result.

        While the folder is full, the spare files are removed, or else an old item is deleted, and `call` is
        called again. The file of a deleted item may become a spare one.

        Args:
            wanted: The checkpoint that needs room.
            call: Writes to the folder.
            deleted: Called with the checkpoint of each deleted item.

        Raises:
            CapacityError: Nothing may be deleted any more.
            NotFoundError: The folder was deleted or unmounted.
        """
        self.expect_present()
        while True:
            try:
                return call()
            except CapacityError as error:
                if self.tier.volume.remove_spare_files():
                    continue
                gone = self.committer.make_room(wanted, self.protected)
                if gone is None:
                    raise CapacityError(
                        f"{self.options.root} has no room for step {wanted.step}, and nothing in "
                        f"it may be deleted, because the newest checkpoint and those that are pinned are "
                        f"kept ({error})"
                    ) from error
                logger.warning(
                    "%s has no room for step %d: %s was deleted, although keep_last is %d. Free space in "
                    "its file system, or keep fewer checkpoints",
                    self.options.root,
                    wanted.step,
                    gone,
                    self.options.policy.keep_last,
                )
                deleted(gone)

    def _is_lost(self) -> bool:
        return self.presence is not None and self.presence.is_lost()


def _choose_with_store(
    options: ServiceOptions, tier: DiskNodeTier, store: FolderStore
) -> tuple[ChosenCheckpoint | None, list[RestartRound]]:
    """Return the restore point, and the rounds that the store has.

    If the store does not answer, the folder's newest checkpoint is the restore point. If it has none, this
    waits: the run would otherwise start from the beginning although the store has a checkpoint.
    """

    def ask() -> tuple[ChosenCheckpoint | None, list[RestartRound]]:
        store.adopt(
            has_checkpoints=bool(candidates(tier)),
            is_writable=not options.read_only,
        )
        return choose(tier, options.rejected, store, options.step), store.rounds()

    try:
        choice, rounds = store.usable(ask)
    except UnavailableError as error:
        found = _newest_in_folder(options, tier)
        # The store may have what the folder has only damaged.
        if found is not None and not found.passed_over:
            logger.warning(
                "%s does not answer (%s): this run starts from step %d of the folder %s, and uploads are "
                "tried again during the training",
                store.url,
                error,
                found.manifest.step,
                options.root,
            )
            return found, []
        why = (
            f"the folder {options.root} has no checkpoint, or its newest one is damaged, and this run must "
            "not start from the beginning or from an older step if the store has a newer one"
        )
        choice, rounds = store.usable(lambda: store.patiently(why, ask))
    if choice is not None and not options.read_only:
        store.keep(choice)
    return choice, rounds


def _newest_in_folder(options: ServiceOptions, tier: DiskNodeTier) -> ChosenCheckpoint | None:
    try:
        return choose(tier, options.rejected, step=options.step)
    except CorruptionError as error:
        logger.warning("%s", error)
        return None


def _load(
    tier: DiskNodeTier, checkpoint: CheckpointId, store: FolderStore | None
) -> ChosenCheckpoint:
    """Load the checkpoint that rank 0 has chosen."""
    if store is None:
        return load_choice(tier, checkpoint)
    kept = store.kept(checkpoint)
    if kept is not None:
        return kept
    return store.patiently(
        f"it has the manifest of {checkpoint}, which this run restores",
        lambda: load_from(tier, checkpoint, store),
    )


def _take_round(
    options: ServiceOptions, tier: DiskNodeTier, used: list[RestartRound]
) -> RestartRound:
    directory = options.root / "rounds"
    if options.round is None:
        lowest = next_round(tier, used)
        if options.read_only:
            return lowest
        with disk_errors(f"claiming a round in {directory}"):
            return claim_round(directory, lowest, options.run_id)
    if options.leads and not options.read_only:
        with disk_errors(f"recording round {options.round} in {directory}"):
            keep_round(directory, options.round, options.run_id)
    return options.round
