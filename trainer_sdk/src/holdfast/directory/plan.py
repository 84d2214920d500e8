"""The plan of the leader of a folder's uploads, `plan.json` beside the records of the run.

It is replaced atomically and not synced: what a power failure takes is found out again from the folder and
the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import CheckpointId, Level
from holdfast_core.messages import codec
from holdfast_core.messages.schema import StepOutcome
from holdfast_core.node.documents import read_document, replace_document
from holdfast_core.store.rules import UploadQueue

LEFT_OUT = "newer steps were saved while it waited for the store"
NOT_UPLOADED = "NotUploaded"
"""Reason of StepOutcome for level persisted: the checkpoint will not be uploaded."""
_MAX_OUTCOMES = 128


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What the leader has uploaded next, and what became of earlier uploads."""

    queue: UploadQueue = field(default_factory=UploadQueue)
    ended: tuple[StepOutcome, ...] = ()
    """The outcomes of the newest checkpoints that are in the store, or will not be, the oldest first."""
    over: str = ""
    """Why nothing more is uploaded: another run has taken the store. "" while uploads go on."""
    conditional_put: bool = True
    """Whether the store respects If-None-Match."""

    @property
    def outcomes(self) -> dict[CheckpointId, StepOutcome]:
        return {CheckpointId(one.step, one.round): one for one in self.ended}

    def persisted(self, checkpoint: CheckpointId) -> FolderPlan:
        """Return the plan after a checkpoint was uploaded."""
        return self._with(
            checkpoint, StepOutcome(checkpoint.step, checkpoint.round, Level.PERSISTED)
        )

    def given_up(
        self, checkpoint: CheckpointId, why: str, reason: str = NOT_UPLOADED
    ) -> FolderPlan:
        """Return the plan after it was decided that a checkpoint will not be uploaded."""
        return self._with(checkpoint, not_uploaded(checkpoint, why, reason))

    def _with(self, checkpoint: CheckpointId, outcome: StepOutcome) -> FolderPlan:
        queue, ended = self.queue.without(checkpoint), (*self.ended, outcome)
        return replace(self, queue=queue, ended=ended[-_MAX_OUTCOMES:])

    def with_committed(
        self, checkpoints: Iterable[CheckpointId]
    ) -> tuple[FolderPlan, tuple[CheckpointId, ...]]:
        """Return the plan after checkpoints were committed, and those that are left out."""
        plan, left_out = self, list[CheckpointId]()
        ended = self.outcomes.keys()
        for checkpoint in checkpoints:
            if checkpoint in ended:
                continue
            queue, oldest = plan.queue.added(checkpoint)
            plan = replace(plan, queue=queue)
            if oldest is not None:
                left_out.append(oldest)
                plan = plan.given_up(oldest, LEFT_OUT)
        return plan, tuple(left_out)


def not_uploaded(checkpoint: CheckpointId, why: str, reason: str = NOT_UPLOADED) -> StepOutcome:
    return StepOutcome(checkpoint.step, checkpoint.round, Level.PERSISTED, reason, why)


@dataclass(frozen=True, slots=True)
class PlanFile:
    path: Path

    def read(self) -> FolderPlan | None:
        """Return the plan, or None where the leader has written none, or none can be read."""
        try:
            return codec.loads(FolderPlan, read_document(self.path))
        except HoldfastError:
            return None

    def write(self, plan: FolderPlan) -> None:
        replace_document(self.path, codec.dumps(plan))
