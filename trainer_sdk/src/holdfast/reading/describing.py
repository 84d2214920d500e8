"""What a checkpoint holds, as plain values: for `holdfast show`, for notebooks and for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from holdfast.reading.source import CheckpointSource
from holdfast_core.errors import FormatError, NotFoundError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import Manifest
from holdfast_core.ids import TierName

if TYPE_CHECKING:
    from holdfast.reading.checkpoint import SavedCheckpoint

_LOOKED_AT = 16
"""Earlier checkpoints that are compared with the one from which the round started. It is nearly always the
newest of them. A store may have thousands, and each is a request."""


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor of the gang, whole."""

    name: str
    dtype: str
    """Name of the type in torch and numpy, such as "float32"."""
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class DescribedEntry:
    """An entry of the state of rank 0, such as "model"."""

    name: str
    tensors: int
    """Number of its tensors that belong to the gang."""
    nbytes: int
    """Bytes of these tensors."""


@dataclass(frozen=True, slots=True)
class OtherCheckpoint:
    """Another checkpoint to which this one is related."""

    step: int | None
    """None: this place does not have it, or not any more."""
    round: int | None
    manifest: str | None = None
    """Digest of its manifest."""
    shared_bytes: int | None = None
    """Payload bytes that it stores for this one."""


@dataclass(frozen=True, slots=True)
class CheckpointDescription:
    """All that a checkpoint says of itself. No tensor was read."""

    place: str
    """Path or URL."""
    tier: str
    """"folder" or "store"."""
    step: int
    round: int
    """Restart round of the run that saved it."""
    world_size: int
    """Number of ranks that saved it."""
    job: str
    """Namespace and name of the TrainingJob, or of the run in a folder."""
    job_uid: str
    manifest: str
    """Digest of the manifest, which is the checkpoint's."""
    saved_at: datetime | None
    """When its manifest was written here, in UTC. None: it was deleted meanwhile."""
    pinned: bool | None
    """None: checkpoints of this place cannot be pinned."""
    payload_bytes: int
    """Bytes that the ranks saved."""
    stored_bytes: int
    """Bytes that it takes here."""
    rank_bytes: tuple[int, ...]
    """Payload bytes of each rank."""
    entries: tuple[DescribedEntry, ...]
    tensors: tuple[DescribedTensor, ...]
    """The tensors of the gang by name. Those that belong to one rank alone are not among them."""
    metrics: dict[str, float]
    """What rank 0 had reported when it saved."""
    restored_from: OtherCheckpoint | None
    """The checkpoint from which the round started. None: it started from the beginning."""
    references: tuple[OtherCheckpoint, ...]
    """Earlier checkpoints that store a part of this one, which must stay as long as it does."""


def describe(
    saved: SavedCheckpoint, manifest: Manifest, source: CheckpointSource
) -> CheckpointDescription:
    """Describe an open checkpoint. See `SavedCheckpoint.describe`."""
    tensors = tuple(
        DescribedTensor(name, one.dtype_name, one.shape, one.nbytes)
        for name, one in saved.tensors().items()
    )
    listed = next(iter(source.listed(manifest.checkpoint)), None)
    needs = source.references(manifest.checkpoint)
    return CheckpointDescription(
        place=source.name,
        tier="folder" if source.tier is TierName.NODE else "store",
        step=manifest.step,
        round=manifest.restart_round,
        world_size=manifest.world_size,
        job=f"{manifest.job.namespace}/{manifest.job.name}",
        job_uid=manifest.job.uid,
        manifest=digest_of(manifest.to_bytes()),
        saved_at=None if listed is None else listed.saved_at,
        pinned=None if listed is None else listed.pinned,
        payload_bytes=manifest.payload_bytes,
        stored_bytes=0 if listed is None else listed.stored_bytes,
        rank_bytes=tuple(shard.payload_bytes for shard in manifest.shards),
        entries=tuple(_entry(name, tensors) for name in saved.objects()),
        tensors=tensors,
        metrics=saved.metrics(),
        restored_from=_restored_from(manifest, source),
        references=tuple(
            OtherCheckpoint(earlier.step, earlier.round, shared_bytes=count)
            for earlier, count in sorted(needs.items())
        ),
    )


def _entry(name: str, tensors: tuple[DescribedTensor, ...]) -> DescribedEntry:
    own = [t for t in tensors if t.name == name or t.name.startswith(f"{name}.")]
    return DescribedEntry(name, len(own), sum(t.nbytes for t in own))


def _restored_from(manifest: Manifest, source: CheckpointSource) -> OtherCheckpoint | None:
    if manifest.parent is None:
        return None
    earlier = [
        c
        for c in source.checkpoints()
        if c.round < manifest.restart_round and c.step <= manifest.step
    ]
    for checkpoint in earlier[:_LOOKED_AT]:
        try:
            found = digest_of(source.manifest(checkpoint).to_bytes())
        except (NotFoundError, FormatError):
            continue  # pruned meanwhile, or damaged
        if found == manifest.parent:
            return OtherCheckpoint(checkpoint.step, checkpoint.round, found)
    return OtherCheckpoint(None, None, manifest.parent)
