"""The queue of checkpoints for the object store: what is uploaded, what waits, and what is left out. Pure.

The coordinator of a gang and the leading persister of a folder use it. One checkpoint is uploaded at a time:

1. A committed checkpoint is added. The oldest one that waits is left out if more than `MAX_WAITING` wait.
2. The uploads of the first one are requested, with the checkpoint that they are compared with.
3. When the uploads of all shards count, the caller commits the checkpoint in the store (store.commit).
4. If an object that the uploads refer to is gone, the shards that have references are uploaded whole.
5. The checkpoint is removed when it is persisted or given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast_core.ids import CheckpointId, RestartRound, age_of
from holdfast_core.messages.schema import PersistRequest, Reference, RestorePoint
from holdfast_core.store.stored_as import StoredAs

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
        round_: RestartRound,
        base: RestorePoint | None,
        older: tuple[Reference, ...],
        *,
        compress: bool = False,
    ) -> tuple[UploadQueue, PersistRequest]:
        """Request the first checkpoint. The request stays the same in repeated attempts.

        Args:
            round_: The round of those who upload.
            base: What `base` returned.
            older: Earlier checkpoints to which the uploads may refer, too.
            compress: Whether the uploads are compressed.
        """
        step, step_round = self.wanted[0].step, self.wanted[0].round
        request = PersistRequest(round_, step, step_round, base, older, compress=compress)
        return replace(self, request=request), request

    def requested_whole(self) -> UploadQueue:
        """Return the queue with a request for shards without references.

        A checkpoint that vouched for references is gone from the store.
        """
        request = self.request
        if request is None:
            return self
        whole = PersistRequest(request.round, request.step, request.step_round, whole=True)
        return replace(self, request=whole)

    def counts(self, checkpoint: CheckpointId, stored: StoredAs) -> bool:
        """Return whether the upload of a shard counts.

        One with references does not, if it was made before the checkpoint was requested whole.
        """
        request = self.request if checkpoint == self.first else None
        return request is None or not (request.whole and stored.references)
