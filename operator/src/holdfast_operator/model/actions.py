"""The closed union of actions that a decision may contain. `apply` is their only interpreter.

Every action is idempotent. A create succeeds if the job's object already exists, a delete succeeds if the
object is gone, and a status write carries the resourceVersion that the decision is based on. A decision
contains at most one status write.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.api import CheckpointStatus, TrainingJobStatus
from holdfast_core.ids import JobUid, RestartRound, Step, Worker
from holdfast_core.messages.schema import FinishCommit, RestorePoint, Round
from holdfast_operator.model.job import JobMemory, PodGroup
from holdfast_operator.model.outgoing_round import OutgoingRound


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Compare-and-swap 1 (CAS 1), the fence of a new round. Only Events may accompany it in a decision.

    Until the round has a restore point, it can be repeated with more pods to replace (ADR 0008).
    """

    resource_version: str
    status: TrainingJobStatus
    confirm_gone: tuple[str, ...] = ()
    """Names of pods that the decision treats as gone. A direct GET must confirm it before the write:
    otherwise a cache that lags would cost a restart."""


@dataclass(frozen=True, slots=True)
class ChooseRestorePoint:
    """Compare-and-swap 2 (CAS 2), once per round. Only Events may accompany it in a decision."""

    resource_version: str
    status: TrainingJobStatus


@dataclass(frozen=True, slots=True)
class CommitPersisted:
    """Compare-and-swap of status.lastPersisted, which commits a step in the object tier."""

    resource_version: str
    status: TrainingJobStatus


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Write of every other status change, such as conditions, levels and counters."""

    resource_version: str
    status: TrainingJobStatus


@dataclass(frozen=True, slots=True)
class CreateService:
    name: str


@dataclass(frozen=True, slots=True)
class SetDisruptionBudget:
    """Creation of the PodDisruptionBudget, or its change to this number of workers."""

    workers: int


@dataclass(frozen=True, slots=True)
class CreateCertificates:
    """Creation of one Secret with the leaf certificates of pods that are or may be created in `round`."""

    secret: str
    round: RestartRound
    pods: tuple[str, ...]
    in_use: bool = False
    """Whether a pod names this Secret. One that exists is then taken for it, else for one of another owner:
    the operator may not read it."""


@dataclass(frozen=True, slots=True)
class CreatePod:
    name: str
    worker: Worker
    birth_round: RestartRound
    avoided_nodes: tuple[str, ...] = ()
    """Names of lost nodes that the pod's node affinity excludes."""
    failed_nodes: tuple[str, ...] = ()
    """Names of nodes that it excludes because workers of the job failed there."""
    group: PodGroup | None = None
    """The pod group in Kueue that it joins. None: it is in no queue."""
    certificates: str = ""
    """Secret with its certificate. "" means the first name for it."""


@dataclass(frozen=True, slots=True)
class CreatePlaceholder:
    """Creation of a pod that takes a node as the pod of this missing worker would, and runs no container."""

    name: str
    worker: Worker


@dataclass(frozen=True, slots=True)
class DeletePod:
    name: str
    uid: str
    """Precondition of the delete: a pod of this name with another uid is left alone."""
    force: bool = False
    """Delete with grace period 0, because the node is lost and its kubelet cannot confirm the delete."""


@dataclass(frozen=True, slots=True)
class ReleasePod:
    """Removal of Kueue's finalizer from a pod that is being deleted, or that has ended with its job."""

    name: str
    uid: str
    """Precondition: a pod of this name with another uid is left alone."""
    ends_group: bool
    """Whether Kueue may finish the pod's group: no pod of it will be replaced."""


@dataclass(frozen=True, slots=True)
class DeleteCertificates:
    """Deletion of a certificate Secret that no current member's pod uses."""

    secret: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Deletion of a job whose ttlSecondsAfterFinished has passed."""

    uid: JobUid


@dataclass(frozen=True, slots=True)
class SealWorker:
    worker: Worker
    pod: str
    pod_uid: str
    address: str
    round: RestartRound


@dataclass(frozen=True, slots=True)
class FinishInterruptedCommit:
    worker: Worker
    pod: str
    pod_uid: str
    address: str
    message: FinishCommit


@dataclass(frozen=True, slots=True)
class SendRound:
    worker: Worker
    pod: str
    pod_uid: str
    address: str
    outgoing: OutgoingRound
    sidecar_restarts: int
    """Restart count of the pod's sidecar container when the message is sent, for AckedRound."""

    @property
    def message(self) -> Round:
        return self.outgoing.message


@dataclass(frozen=True, slots=True)
class RequestSave:
    worker: Worker
    """Worker whose sidecar is the coordinator."""
    pod: str
    address: str
    round: RestartRound
    token: str
    """Name of the Checkpoint object that requests the save. It identifies the request if it is repeated."""


@dataclass(frozen=True, slots=True)
class RequestStop:
    """Request to save and stop."""

    worker: Worker
    """Worker whose sidecar is the coordinator."""
    pod: str
    address: str
    round: RestartRound
    token: str
    """Identifies the request if it is repeated."""
    job_is_over: bool = False
    """Whether the newest committed step is persisted besides, before the pods of the job are deleted."""


@dataclass(frozen=True, slots=True)
class CreateCheckpointObject:
    """Creation of a Checkpoint object, which records a commit, with its status."""

    name: str
    step: Step
    status: CheckpointStatus


@dataclass(frozen=True, slots=True)
class UpdateCheckpoint:
    """Write of a Checkpoint's status, and before it of spec.step and the finalizers if they are given."""

    name: str
    resource_version: str
    status: CheckpointStatus
    step: Step | None = None
    """Value for spec.step. None leaves it as it is."""
    finalizers: tuple[str, ...] = ()
    """Value for metadata.finalizers. () leaves them as they are."""


@dataclass(frozen=True, slots=True)
class PruneObject:
    """Deletion of a checkpoint's data in the object store, and then of its Checkpoint object.

    The coordinator deletes the data, and the operator removes its finalizer from the object. Nothing
    restores from the checkpoint any more: it is in phase Deleting, or
    a user has deleted the object.
    """

    worker: Worker
    """Worker whose sidecar is the coordinator."""
    pod: str
    address: str
    round: RestartRound
    name: str
    uid: str
    checkpoint: RestorePoint


@dataclass(frozen=True, slots=True)
class DeleteCheckpoint:
    """Deletion of a Checkpoint object without its data.

    There is no data, it must be kept, or no sidecar can delete it.
    """

    name: str
    uid: str


class EventKind(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class EmitEvent:
    kind: EventKind
    reason: str
    message: str


StatusWrite = BeginRound | ChooseRestorePoint | CommitPersisted | WriteStatus

Action = (
    BeginRound
    | ChooseRestorePoint
    | CommitPersisted
    | WriteStatus
    | CreateService
    | SetDisruptionBudget
    | CreateCertificates
    | CreatePod
    | CreatePlaceholder
    | DeletePod
    | ReleasePod
    | DeleteCertificates
    | DeleteJob
    | SealWorker
    | FinishInterruptedCommit
    | SendRound
    | RequestSave
    | RequestStop
    | CreateCheckpointObject
    | UpdateCheckpoint
    | PruneObject
    | DeleteCheckpoint
    | EmitEvent
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of one pass over one job."""

    actions: tuple[Action, ...]
    requeue_after_seconds: float | None
    """Seconds until the next pass if no event comes before. None: only an event causes a pass."""
    reason: str
    """Text for the log, which is written when it changes."""
    memory: JobMemory
    """Memory for the next Observed. `apply.memory_after` corrects it for actions that failed."""
    acted_version: int | None = None
    """Version of the coordinator's state up to which everything is durable in the API. The next long poll
    sends it as `since`. None: the value that was sent before stays."""
