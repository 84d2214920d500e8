"""Delete checkpoints from a store: the manifest first, and no object that another one needs (ADR 0023).

A checkpoint that needs objects of an earlier one has a marker of it, and the earlier one has a marker of the
later one. Which checkpoints may go is decided in `prune`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from datetime import timedelta

from holdfast_core.format import keys
from holdfast_core.ids import CheckpointId, RestartRound
from holdfast_core.store.job_objects import JobObjects
from holdfast_core.store.rules import dead


def delete_checkpoint(objects: JobObjects, checkpoint: CheckpointId) -> None:
    """See ObjectTier.delete_checkpoint."""
    objects.delete([keys.manifest_key(checkpoint)])
    _release(objects, checkpoint)
    if not _needed_by(objects, checkpoint):
        objects.delete_below(keys.shards_prefix(checkpoint))


def sweep(
    objects: JobObjects,
    round_: RestartRound,
    quiet: timedelta,
    uploading: Callable[[], Collection[CheckpointId]],
) -> frozenset[CheckpointId]:
    """See ObjectTier.sweep."""
    stored = objects.folders(keys.SHARDS)
    stored |= objects.folders(keys.REFERENCES)
    busy = frozenset(uploading())
    manifests = frozenset(objects.manifests())

    def gone(checkpoints: Collection[CheckpointId]) -> frozenset[CheckpointId]:
        return dead(checkpoints, manifests, busy, round_)

    swept = set[CheckpointId]()
    # A checkpoint needs earlier ones, so the newest is swept first: its markers go with it.
    for checkpoint in sorted(gone(stored), reverse=True):
        by = _needed_by(objects, checkpoint)
        stale = {c for c in gone(by) if by[c] >= quiet}
        objects.delete([keys.needed_by_key(checkpoint, c) for c in sorted(stale)])
        if _is_quiet(objects, keys.references_prefix(checkpoint), quiet):
            _release(objects, checkpoint)
        shards = keys.shards_prefix(checkpoint)
        is_free = by.keys() <= stale and _is_quiet(objects, shards, quiet)
        if is_free and objects.delete_below(shards):
            swept.add(checkpoint)
    return frozenset(swept)


def needs(objects: JobObjects, checkpoint: CheckpointId) -> Iterator[keys.NeedsKey]:
    """Yield the markers of the earlier checkpoints that a checkpoint needs."""
    for key, _ in objects.parsed(keys.references_prefix(checkpoint)):
        if isinstance(key, keys.NeedsKey):
            yield key


def _needed_by(objects: JobObjects, checkpoint: CheckpointId) -> dict[CheckpointId, timedelta]:
    """Return the checkpoints that need objects of this one, with the ages of their markers.

    The markers are listed twice: a marker that replaces another one may be put before a listing passes
    its name, and the other one be deleted after the listing has passed that name.
    """
    return {
        key.by: age
        for _ in range(2)
        for key, age in objects.parsed(keys.references_prefix(checkpoint))
        if isinstance(key, keys.NeededByKey)
    }


def _release(objects: JobObjects, checkpoint: CheckpointId) -> None:
    """Delete the markers that a checkpoint without a manifest has put."""
    found = tuple(needs(objects, checkpoint))
    objects.delete([keys.needed_by_key(key.earlier, checkpoint) for key in found])
    objects.delete([keys.needs_key(checkpoint, key.earlier, key.payload_bytes) for key in found])


def _is_quiet(objects: JobObjects, below: str, quiet: timedelta) -> bool:
    """Return whether each object below a path was written at least `quiet` ago."""
    return all(item.age >= quiet for item in objects.list(below))
