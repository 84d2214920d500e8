"""Chooses the checkpoint of a directory from which a new run starts.

The order is newest history first: by round from the highest down (each round begins where an older
checkpoint was restored), and by step from the highest down within a round. A checkpoint counts only if
its manifest can be read and every shard that it names exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast_core.errors import (
    CorruptionError,
    ForbiddenByStateError,
    FormatError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.format.manifest import Manifest, manifest_digest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, ShardRef, Step, age_of
from holdfast_core.node.files import disk_errors
from holdfast_core.node.tier import DiskNodeTier, checkpoints_in
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.sources import ReaderSource

if (
    TYPE_CHECKING
):  # only a process that has a store imports what the extra `holdfast-sdk[s3]` installs
    from holdfast.directory.folder_store import FolderStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE = "standalone"
"""Namespace of every training without a cluster in the keys of a store."""
JOB_UID = JobUid("standalone")
"""Job UID in every directory. A directory holds one job's checkpoints, and no cluster assigns a UID."""

_NAME = re.compile(r"s(\d{1,18})-r(\d{1,9})", re.ASCII)
_MAX_ATTEMPTS = 100
"""Number of attempts to choose while another run changes the directory."""
_UNREADABLE_ATTEMPTS = 3
_UNREADABLE_PAUSE_SECONDS = 2.0
_SHOWN_REASONS = 5
_CANNOT_BE_RESTORED = (NotFoundError, CorruptionError, FormatError)


_OLD_NAMES = ("prepared", "store/r[0-9][0-9][0-9][0-9][0-9][0-9]")
"""What builds before the first release wrote in a folder. It is not read any more, so a save that waits there
would be lost without a word."""


def refuse_old_layout(root: Path) -> None:
    """Raise ConfigError for a folder that a build before the first release has written."""
    for found in itertools.chain.from_iterable(map(root.glob, _OLD_NAMES)):
        raise ForbiddenByStateError(
            f"{root}: {found.relative_to(root)}/ is of a build of Holdfast before its first release, "
            "whose folders are not supported: use another folder, and export the checkpoints of this one "
            "with the build that wrote them"
        )


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    manifest: Manifest
    digest: Digest
    passed_over: tuple[str, ...] = ()
    """Why newer checkpoints were not chosen: for each of them what is wrong, with the path of the file. Those
    that the caller rejected are not among them."""


def next_round(tier: DiskNodeTier, others: Iterable[RestartRound]) -> RestartRound:
    """Return a round above all rounds of the tier and of `others`.

    This does not reserve the round, see `holdfast.directory.open_folder`.
    """
    rounds = [*others]
    rounds += [checkpoint.round for checkpoint in tier.checkpoints(JOB_UID)]
    rounds += [record.header.round for record in tier.list_shards()]
    return RestartRound(max(rounds, default=-1) + 1)


def candidates(tier: DiskNodeTier) -> list[CheckpointId]:
    """Return the committed checkpoints of the tier, in the order in which `choose` tries them."""
    return _newest_first(tier.checkpoints(JOB_UID))


def committed(root: Path) -> list[CheckpointId]:
    """Return the committed checkpoints of a folder, in the order in which `choose` tries them.

    This reads only the names of files, so that another process may write to the folder.
    """
    return _newest_first(checkpoints_in(root / "tier", JOB_UID))


def pins_of(root: Path) -> Path:
    """Return the directory of a folder in which a file marks each pinned checkpoint by its name."""
    return root / "pins"


def pinned(root: Path) -> frozenset[CheckpointId]:
    """Return the checkpoints of a folder that somebody has pinned. Some may not exist any more.

    Only the names of the files count, so that a damaged byte cannot release a checkpoint. Raises TierError
    where the directory cannot be listed: nothing may be deleted then.
    """
    directory = pins_of(root)
    names: list[str] = []
    with disk_errors(f"listing {directory}"), contextlib.suppress(FileNotFoundError):
        names = [path.name for path in directory.iterdir()]
    return frozenset(filter(None, map(checkpoint_of_name, names)))


def older_than(root: Path, step: Step) -> int:
    """Return the number of checkpoints of a folder whose step is lower than `step`."""
    return sum(checkpoint.step < step for checkpoint in committed(root))


def load_choice(tier: DiskNodeTier, checkpoint: CheckpointId) -> ChosenCheckpoint:
    """Load the manifest of `checkpoint` and check that all its shards exist.

    Raises NotFoundError, CorruptionError or FormatError when the checkpoint cannot be restored from here.
    """
    document = tier.get_manifest(JOB_UID, checkpoint)
    manifest = parse_manifest_of(document, JOB_UID, checkpoint)
    refs = [manifest.ref(shard.rank) for shard in manifest.shards]
    missing = [ref for ref in refs if tier.look_up(ref) is None]
    if missing:
        raise NotFoundError(
            f"the shards of ranks {[ref.rank for ref in missing]} are missing: "
            f"{tier.why_missing(missing[0])}"
        )
    return ChosenCheckpoint(manifest, manifest_digest(document))


def read_patiently(read: Callable[[], T]) -> T:
    """Return the result of `read`, which is repeated some times if a disk fails for a moment."""
    for _ in range(_UNREADABLE_ATTEMPTS):
        try:
            return read()
        except UnreadableError as error:
            if not error.may_pass:
                raise
            logger.warning("%s; reading it again", error)
            time.sleep(_UNREADABLE_PAUSE_SECONDS)
    return read()


def open_in_folder(tier: DiskNodeTier, ref: ShardRef) -> ShardSource:
    """Open a shard of a folder, also one that another process wrote.

    Raises NotFoundError, CorruptionError.
    """
    tier.look_up(ref)  # raises for a shard that could not be read in the last minute
    return ReaderSource(tier.open_shard(ref))


def has_shard(tier: DiskNodeTier, ref: ShardRef) -> bool:
    """Return whether the folder has a shard. One that cannot be used is read from the store."""
    try:
        return tier.look_up(ref) is not None
    except FormatError as error:
        logger.warning("%s; it is read from the store", error)
        return False


def load_from(tier: DiskNodeTier, checkpoint: CheckpointId, store: FolderStore) -> ChosenCheckpoint:
    """Load a checkpoint as `load_choice` does, or from the store where the folder lacks a part of it."""
    try:
        return load_choice(tier, checkpoint)
    except _CANNOT_BE_RESTORED as error:
        here = error
    try:
        return store.load(checkpoint, lambda ref: has_shard(tier, ref))
    except _CANNOT_BE_RESTORED as error:
        text = f"{here}; in {store.url}: {error}"
        unreadable = [e for e in (here, error) if isinstance(e, UnreadableError)]
        if unreadable:
            raise UnreadableError(text, may_pass=any(e.may_pass for e in unreadable)) from error
        raise type(error)(text) from error


def choose(
    tier: DiskNodeTier,
    rejected: Collection[CheckpointId] = (),
    store: FolderStore | None = None,
    step: Step | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> ChosenCheckpoint | None:
    """Return the newest complete checkpoint of the directory and its store, or None where there is none.

    It may have been saved by any number of ranks. With `step` only checkpoints of this step count. Another
    run may commit newer checkpoints and prune older ones during the search. If a checkpoint cannot be loaded
    and the list has changed, the search begins again, so that a pruned checkpoint leads neither to an older
    step nor to an error. If a file cannot be read, it begins again some times after a pause: a disk or a
    network file system may fail for a moment, and an older checkpoint costs hours of training.

    Raises CorruptionError when there are checkpoints and none can be read, so that a run never silently
    starts from the beginning. Raises UnavailableError when the list changes in every attempt.
    """
    unreadable = 0
    for _ in range(_MAX_ATTEMPTS):
        listed = candidates(tier)
        stored = _stored(store)
        known = {c for c in (*listed, *stored) if step is None or c.step == step}
        choice, failed = _first_that_loads(tier, known, rejected, store)
        if failed and not (candidates(tier) == listed and _stored(store) == stored):
            continue
        if unreadable == _UNREADABLE_ATTEMPTS or not _may_pass(failed):
            break
        unreadable += 1
        pause(_UNREADABLE_PAUSE_SECONDS)
    else:
        raise UnavailableError(
            f"the checkpoints changed {_MAX_ATTEMPTS} times while they were read: another run saves and "
            "prunes here faster than they can be read. Keep more of them, or try again"
        )
    if choice is not None:
        reasons = (f"step {c.step}: {error}" for c, error in failed.items() if c not in rejected)
        return dataclasses.replace(choice, passed_over=tuple(reasons))
    if failed:
        reasons = (f"{c}: {error}" for c, error in failed.items())
        text = "; ".join(itertools.islice(reasons, _SHOWN_REASONS))
        if step is not None:
            raise CorruptionError(text)
        raise CorruptionError(
            f"the directory has checkpoints, but none that can be restored: {text}; move them away to start "
            "without a checkpoint"
        )
    return None


def checkpoint_of_name(name: str) -> CheckpointId | None:
    """Return the checkpoint whose text is `name`, or None if there is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return CheckpointId(Step(int(match[1])), RestartRound(int(match[2])))


def _first_that_loads(
    tier: DiskNodeTier,
    known: Collection[CheckpointId],
    rejected: Collection[CheckpointId],
    store: FolderStore | None,
) -> tuple[ChosenCheckpoint | None, dict[CheckpointId, HoldfastError]]:
    """Return the newest checkpoint that loads, and the errors of newer ones that do not."""
    failed: dict[CheckpointId, HoldfastError] = {}
    for checkpoint in _newest_first(known):
        if checkpoint in rejected:
            failed[checkpoint] = CorruptionError("a shard did not verify")
            continue
        try:
            if store is None:
                return load_choice(tier, checkpoint), failed
            return load_from(tier, checkpoint, store), failed
        except _CANNOT_BE_RESTORED as error:
            failed[checkpoint] = error
    return None, failed


def _may_pass(failed: Mapping[CheckpointId, HoldfastError]) -> bool:
    return any(isinstance(error, UnreadableError) and error.may_pass for error in failed.values())


def _stored(store: FolderStore | None) -> frozenset[CheckpointId]:
    return frozenset() if store is None else store.checkpoints()


def _newest_first(checkpoints: Iterable[CheckpointId]) -> list[CheckpointId]:
    return sorted(checkpoints, key=age_of, reverse=True)
