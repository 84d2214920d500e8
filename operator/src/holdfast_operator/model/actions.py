"""What a decision consists of. `apply` is the only place that carries it out.

1. At most one write of the job's status, with the resourceVersion that the decision is based on.
2. Whole objects, which are created or compared with the ones of their names.
3. Deletes, each with the uid that must be deleted and the reason.
4. Calls to sidecars, as values.
5. Events.
All of them are idempotent: a create succeeds if the job's object already exists, a delete succeeds if the
object is gone, and a call is repeated until its effect is observed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, assert_never

from holdfast_core.api import TrainingJobStatus
from holdfast_core.ids import Digest, Worker
from holdfast_core.messages.codec import dumps
from holdfast_core.messages.operator import Round
from holdfast_core.messages.schema import FinishCommit, GangRequest, Prune, Seal
from holdfast_operator.model import labels
from holdfast_operator.model.job import JobMemory


@dataclass(frozen=True)
class OutgoingRound:
    """One version of ROUND, encoded and digested once. The members' sends share the object.

    For 4,096 workers ROUND has 0.4 MB. The operator sends it to each of them, so that an encoding and a
    digest for each member would take six minutes of its CPU.
    """

    message: Round
    digest: Digest
    """`message.content_digest()`."""

    @classmethod
    def of(cls, message: Round) -> OutgoingRound:
        return cls(message, message.content_digest())

    @cached_property
    def body(self) -> bytes:
        """The encoded message."""
        return dumps(self.message)


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """Compare-and-swap of the job's whole status, at the resourceVersion that the decision is based on."""

    status: TrainingJobStatus


@dataclass(frozen=True, slots=True)
class BeginRound(StatusWrite):
    """Compare-and-swap 1 (CAS 1), the fence of a new round. Only Events may accompany it in a decision.

    Until the round has a restore point, it can be repeated with more pods to replace (ADR 0008).
    """

    confirm_gone: tuple[str, ...] = ()
    """Names of pods that the decision treats as gone. A direct GET must confirm it before the write:
    otherwise a cache that lags would cost a restart."""


class ChooseRestorePoint(StatusWrite):
    """Compare-and-swap 2 (CAS 2), once per round. Only Events may accompany it in a decision."""


class CommitPersisted(StatusWrite):
    """The write of status.lastPersisted, which commits a step in the object tier."""


class WriteStatus(StatusWrite):
    """Every other status change, such as conditions, levels and counters."""


@dataclass(frozen=True, slots=True)
class DesiredObject:
    """An object of the job as it should be. One that exists must belong to the job.

    A body with a resourceVersion changes the object of that version: a Checkpoint, or parts of it.
    """

    body: Mapping[str, Any]
    leaves: tuple[str, ...] = ()
    """Secret with certificates: names of the pods whose leaf certificates it holds. Only the edge has the
    job's authority, so it adds them to the body."""
    in_use: bool = False
    """Secret: whether a pod names it. One that exists is then taken for it, else for one of another owner,
    because the operator may not read it."""

    @property
    def kind(self) -> str:
        return str(self.body["kind"])

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def labels(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.body["metadata"].get("labels") or {}
        return found

    @property
    def resource_version(self) -> str | None:
        found: str | None = self.body["metadata"].get("resourceVersion")
        return found


class CallPath(StrEnum):
    """Path of a call to a sidecar (docs/protocol.md)."""

    SEAL = "/v1/seal"
    FINISH_COMMIT = "/v1/finish-commit"
    ROUND = "/v1/round"
    SAVE = "/v1/save-now"
    STOP = "/v1/stop"
    END = "/v1/end"
    """As STOP. The newest committed step is persisted besides, before the pods of the job are deleted."""
    PRUNE = "/v1/prune"


Message = Seal | FinishCommit | OutgoingRound | GangRequest | Prune


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the sidecar of a pod. It is only started: its result is part of a later Observed."""

    path: CallPath
    worker: Worker
    pod: str
    """Name of the pod in its certificate."""
    pod_uid: str
    message: Message


@dataclass(frozen=True, slots=True)
class Delete:
    kind: str
    name: str
    uid: str
    """Precondition: an object of this name with another uid is left alone. "" for a Secret, which the
    operator may not read."""
    reason: str = field(compare=False)
    """Why it is deleted, for the log."""
    force: bool = False
    """Delete with grace period 0, because the node is lost and its kubelet cannot confirm the delete."""
    data: Call | None = None
    """Call to the coordinator that deletes the data of a Checkpoint in the object store. The object is
    deleted when its reply confirms that."""


@dataclass(frozen=True, slots=True)
class ReleasePod:
    """Removal of Kueue's finalizer from a pod that is being deleted, or that has ended with its job."""

    name: str
    uid: str
    """Precondition: a pod of this name with another uid is left alone."""
    ends_group: bool
    """Whether Kueue may finish the pod's group: no pod of it will be replaced."""
    kind = labels.POD


class EventKind(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class EmitEvent:
    kind: EventKind
    reason: str
    message: str


def normal(reason: str, message: str) -> EmitEvent:
    return EmitEvent(EventKind.NORMAL, reason, message)


def warning(reason: str, message: str) -> EmitEvent:
    return EmitEvent(EventKind.WARNING, reason, message)


Action = StatusWrite | DesiredObject | Delete | ReleasePod | Call | EmitEvent


def described(action: Action) -> str:
    """Return what the action does to which object, such as "create Pod gpt-1-r3"."""
    match action:
        case StatusWrite():
            return "write the status"
        case DesiredObject():
            verb = "create" if action.resource_version is None else "change"
            return f"{verb} {action.kind} {action.name}"
        case Delete():
            verb = "delete" if action.data is None else "prune"
            return f"{verb} {action.kind} {action.name}"
        case ReleasePod():
            return f"release Pod {action.name}"
        case Call():
            return f"call {action.path} of Pod {action.pod}"
        case EmitEvent():
            return f"emit Event {action.reason}"
        case _:
            assert_never(action)


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of one pass over one job."""

    status: StatusWrite | None
    objects: tuple[DesiredObject, ...]
    deletes: tuple[Delete | ReleasePod, ...]
    calls: tuple[Call, ...]
    events: tuple[EmitEvent, ...]
    requeue_after_seconds: float | None
    """Seconds until the next pass if no event comes before. None: only an event causes a pass."""
    reason: str
    """Text for the log, which is written when it changes."""
    acted_version: int | None = None
    """Version of the coordinator's state up to which everything is durable in the API. The next long poll
    sends it as `since`. None: the value that was sent before stays."""
    memory: JobMemory = field(default_factory=JobMemory)
    """Memory for the next Observed. `apply.memory_after` corrects it for actions that failed."""

    @classmethod
    def of(
        cls,
        actions: Iterable[Action],
        requeue_after_seconds: float | None,
        reason: str,
        acted_version: int | None = None,
    ) -> Decision:
        """Return the decision of these actions, in any order."""
        given = tuple(actions)
        writes = [a for a in given if isinstance(a, StatusWrite)]
        assert len(writes) <= 1, f"a pass writes the status at most once, not {len(writes)} times"
        return cls(
            writes[0] if writes else None,
            tuple(a for a in given if isinstance(a, DesiredObject)),
            tuple(a for a in given if isinstance(a, Delete | ReleasePod)),
            tuple(a for a in given if isinstance(a, Call)),
            tuple(a for a in given if isinstance(a, EmitEvent)),
            requeue_after_seconds,
            reason,
            acted_version,
        )

    @property
    def actions(self) -> tuple[Action, ...]:
        """Return everything that the decision does, in the order in which it is carried out."""
        write = () if self.status is None else (self.status,)
        return (*write, *self.calls, *self.objects, *self.deletes, *self.events)
