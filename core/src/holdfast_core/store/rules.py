"""Decisions about the object store: what is uploaded next, how it is stored, and what may be deleted. Pure.

The coordinator of a gang and the leading persister of a folder use the queue. One checkpoint is uploaded at
a time:

1. A committed checkpoint is added. The oldest one that waits is left out if more than `MAX_WAITING` wait.
2. The uploads of the first one are requested, with the checkpoint that they are compared with.
3. When the uploads of all shards count, the caller commits the checkpoint in the store (store.commit).
4. If an object that the uploads refer to is gone, the shards that have references are uploaded whole.
5. The checkpoint is removed when it is persisted or given up.

Why no interleaving of a deletion with an upload loses a byte: ADR 0023.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from holdfast_core.ids import CheckpointId, RestartRound, age_of
from holdfast_core.messages.schema import PersistRequest, RestorePoint, StoredAs


def merged(
    stored: Iterable[StoredAs],
) -> tuple[dict[CheckpointId, int], frozenset[CheckpointId]]:
    """Return the bytes that earlier checkpoints store, and the checkpoints that vouch for these."""
    bytes_in: dict[CheckpointId, int] = {}
    bases: set[CheckpointId] = set()
    for stored_as in stored:
        for earlier, payload_bytes in stored_as.references:
            bytes_in[earlier] = bytes_in.get(earlier, 0) + payload_bytes
        if stored_as.base is not None:
            bases.add(stored_as.base)
    return bytes_in, frozenset(bases)


MAX_WAITING = 2
"""Checkpoints that wait while another one is uploaded."""


@dataclass(frozen=True, slots=True)
class UploadQueue:
    """Checkpoints on their way to the store."""

    wanted: tuple[CheckpointId, ...] = ()
    """The checkpoint that is being uploaded, and those that wait, the oldest first."""
    request: PersistRequest | None = None
    """The upload of the first one of `wanted`. None: it was not requested yet."""

    @property
    def first(self) -> CheckpointId | None:
        return self.wanted[0] if self.wanted else None

    def added(self, checkpoint: CheckpointId) -> tuple[UploadQueue, CheckpointId | None]:
        """Return the queue with this checkpoint, and the one that is left out because too many wait.

        The checkpoint that is being uploaded is never left out.
        """
        if checkpoint in self.wanted:
            return self, None
        first = self.first or checkpoint
        waiting = sorted({*self.wanted, checkpoint} - {first}, key=age_of)
        left_out = waiting.pop(0) if len(waiting) > MAX_WAITING else None
        return replace(self, wanted=(first, *waiting)), left_out

    def only_newest(self) -> UploadQueue:
        """Return the queue with the newest of the checkpoints that wait, and the one that is requested.

        While uploads are held, more of them would take room on the nodes that saves need.
        """
        requested = self.wanted[:1] if self.request is not None else ()
        waiting = self.wanted[len(requested) :]
        return replace(self, wanted=(*requested, *sorted(waiting, key=age_of)[-1:]))

    def without(self, checkpoint: CheckpointId) -> UploadQueue:
        """Return the queue after a checkpoint was persisted or given up."""
        return UploadQueue(
            tuple(one for one in self.wanted if one != checkpoint),
            None if checkpoint == self.first else self.request,
        )

    def base(self, stored: Iterable[CheckpointId]) -> CheckpointId | None:
        """Return the checkpoint with which the uploads are compared: the newest earlier one in the store."""
        first = self.first
        earlier = [one for one in stored if first is not None and age_of(one) < age_of(first)]
        return max(earlier, key=age_of, default=None)

    def requested(
        self,
        base: RestorePoint | None,
        older: tuple[CheckpointId, ...],
        *,
        compress: bool = False,
    ) -> tuple[UploadQueue, PersistRequest]:
        """Request the first checkpoint. The request stays the same in repeated attempts.

        Args:
            base: What `base` returned.
            older: Earlier checkpoints to which the uploads may refer, too.
            compress: Whether the uploads are compressed.
        """
        request = PersistRequest(self.wanted[0], base, older, compress=compress)
        return replace(self, request=request), request

    def requested_whole(self) -> UploadQueue:
        """Return the queue with a request for shards without references.

        A checkpoint that vouched for references is gone from the store.
        """
        if self.request is None:
            return self
        return replace(self, request=PersistRequest(self.request.checkpoint, whole=True))

    def counts(self, checkpoint: CheckpointId, stored: StoredAs) -> bool:
        """Return whether the upload of a shard counts.

        One with references does not, if it was made before the checkpoint was requested whole.
        """
        request = self.request if checkpoint == self.first else None
        return request is None or not (request.whole and stored.references)


STALE_UPLOADS = timedelta(hours=24)
"""Age from which what an interrupted upload left is removed. An S3 store charges for it until then."""
QUIET = timedelta(hours=1)
"""Objects of a checkpoint are deleted only if none of them was written for this long.
A coordinator that was replaced, without a record of it yet, has finished or given up its commit by then."""


def dead(
    checkpoints: Collection[CheckpointId],
    manifests: Collection[CheckpointId],
    uploading: Collection[CheckpointId],
    round_: RestartRound,
) -> frozenset[CheckpointId]:
    """Return those of `checkpoints` that do not exist and never will.

    Such a checkpoint has no manifest and is not being uploaded. It belongs to an older restart round than
    `round_`, or to `round_` and to a step before the newest step of `round_` that has a manifest.
    Checkpoints of a newer round belong to another coordinator, which may be uploading them now.

    Args:
        checkpoints: Checkpoints of which objects or references are stored.
        manifests: Checkpoints that have a manifest.
        uploading: Checkpoints that are being uploaded, or may be.
        round_: Restart round of the coordinator that deletes.
    """
    newest = max((c.step for c in manifests if c.round == round_), default=None)
    return frozenset(
        c
        for c in checkpoints
        if c not in manifests
        and c not in uploading
        and (c.round < round_ or (c.round == round_ and newest is not None and c.step < newest))
    )


def abandoned(
    checkpoints: Collection[CheckpointId], manifests: Collection[CheckpointId], *, ended: bool
) -> frozenset[CheckpointId]:
    """Return those of `checkpoints` that do not exist and never will, for a job without a coordinator here.

    Such a checkpoint has no manifest, and a newer restart round than its own has committed: no round commits
    after a newer one has begun. Another cluster may be uploading the checkpoints of the newest round, for
    days if the store is slow. Their age proves nothing.

    Args:
        checkpoints: Checkpoints of which objects or references are stored.
        manifests: Checkpoints that have a manifest.
        ended: The job uploads nothing more, as this cluster knows.
    """
    newest = max((c.round for c in manifests), default=None)
    return frozenset(
        c
        for c in checkpoints
        if c not in manifests and (ended or (newest is not None and c.round < newest))
    )


def most_needed(needs: Mapping[CheckpointId, int], limit: int) -> tuple[CheckpointId, ...]:
    """Return at most `limit` checkpoints, those that store the most bytes first.

    Of two that store equally many, the newer one comes first.
    """
    order = sorted(needs, key=lambda c: (needs[c], c), reverse=True)
    return tuple(order[:limit])
