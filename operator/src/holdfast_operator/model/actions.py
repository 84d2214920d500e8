"""The closed union of effects that a decision may ask for; `apply` is their only interpreter.

Every action is idempotent: creates tolerate that the object exists, deletes that it is gone,
status writes carry the resourceVersion that the decision was taken on. One of those a decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from blake3 import blake3

from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Worker
from holdfast_core.messages.codec import dumps
from holdfast_core.messages.schema import RestorePoint, Round
from holdfast_operator.model.job import JobMemory, JobStatusView


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Compare-and-swap 1: the fence. Alone in its decision, apart from events."""

    resource_version: str
    status: JobStatusView
    confirm_gone: tuple[str, ...] = ()
    """Pods that the decision takes for gone: a direct GET must confirm it first, because a
    lagging list must not cost a restart."""


@dataclass(frozen=True, slots=True)
class ChooseRestorePoint:
    """Compare-and-swap 2: once per round. Alone in its decision, apart from events."""

    resource_version: str
    status: JobStatusView


@dataclass(frozen=True, slots=True)
class CommitPersisted:
    """Compare-and-swap of lastPersisted: the commit of the object tier."""

    resource_version: str
    status: JobStatusView


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Conditions, levels, counters: everything of status that is not one of the three above."""

    resource_version: str
    status: JobStatusView


@dataclass(frozen=True, slots=True)
class CreateService:
    name: str


@dataclass(frozen=True, slots=True)
class CreateCertificates:
    """One Secret with the leaves of the pods that are born in `round`."""

    secret: str
    round: RestartRound
    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CreatePod:
    name: str
    worker: Worker
    birth_round: RestartRound
    avoided_nodes: tuple[str, ...] = ()
    """Names of nodes that the scheduler must not place it on."""


@dataclass(frozen=True, slots=True)
class DeletePod:
    name: str
    uid: str
    """Precondition."""
    force: bool = False
    """Grace 0: the node is lost and will not confirm."""


@dataclass(frozen=True, slots=True)
class DeleteCertificates:
    """A Secret of a round that no pod of the job was born in any more."""

    secret: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """ttlSecondsAfterFinished has passed."""

    uid: JobUid


@dataclass(frozen=True, slots=True)
class SealWorker:
    worker: Worker
    pod: str
    pod_uid: str
    address: str
    round: RestartRound


@dataclass(frozen=True, slots=True)
class SendRound:
    worker: Worker
    pod: str
    pod_uid: str
    address: str
    message: Round
    sidecar_restarts: int
    """Goes into AckedRound."""


@dataclass(frozen=True, slots=True)
class AskSave:
    worker: Worker
    """The coordinator."""
    pod: str
    address: str
    round: RestartRound
    token: str


@dataclass(frozen=True, slots=True)
class AskStop:
    worker: Worker
    pod: str
    address: str
    round: RestartRound
    token: str


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Status of a Checkpoint object as the operator writes it."""

    phase: str
    checkpoint: CheckpointId | None = None
    manifest: Digest | None = None
    payload_bytes: int = 0
    world_size: int | None = None
    job_uid: JobUid | None = None
    parent: Digest | None = None
    started_at: datetime | None = None
    committed_at: datetime | None = None
    persisted: bool = False
    replicated: bool = False
    held: bool = False
    finalizer: bool = False
    """Our finalizer belongs on the object: its deletionPolicy is DeleteData and there is data."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class CreateCheckpointObject:
    """Create it and write its status. deletion_policy: what becomes of the data with it."""

    name: str
    checkpoint: CheckpointId
    deletion_policy: str
    record: CheckpointRecord


@dataclass(frozen=True, slots=True)
class UpdateCheckpointStatus:
    """Write the status; where it names a step and spec.step is not set, set that too."""

    name: str
    resource_version: str
    record: CheckpointRecord


@dataclass(frozen=True, slots=True)
class PruneObject:
    """Order the delete in the object store; when it is confirmed, delete the Checkpoint object
    (and our finalizer). The object is in phase Deleting already, so nothing restores from it."""

    worker: Worker
    """The coordinator."""
    pod: str
    address: str
    round: RestartRound
    name: str
    uid: str
    checkpoint: RestorePoint


@dataclass(frozen=True, slots=True)
class DeleteCheckpoint:
    """Delete the object alone (no data behind it, or it is to be kept)."""

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
    | CreateCertificates
    | CreatePod
    | DeletePod
    | DeleteCertificates
    | DeleteJob
    | SealWorker
    | SendRound
    | AskSave
    | AskStop
    | CreateCheckpointObject
    | UpdateCheckpointStatus
    | PruneObject
    | DeleteCheckpoint
    | EmitEvent
)


@dataclass(frozen=True, slots=True)
class Decision:
    actions: tuple[Action, ...]
    requeue_after_seconds: float | None
    """Look again after this long even if nothing changes; None: the next event is enough."""
    reason: str
    """For logs: a changed reason is logged once."""
    memory: JobMemory
    """Handed back in the next Observed, through apply.memory_after."""
    acted_version: int | None = None
    """Version of the coordinator's state up to which everything is durable in the API; what the
    next long poll says as `since`. None: nothing yet (say 0)."""


def round_digest(message: Round) -> Digest:
    """Content of a ROUND without what may differ between repetitions.

    last_persisted is left out: the coordinator knows what it persisted, and a change of it alone
    must not repeat ROUND to the whole gang.
    """
    content = replace(message, version=0, last_persisted=None)
    return Digest("b3:" + blake3(dumps(content)).hexdigest())
