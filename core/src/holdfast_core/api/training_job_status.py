"""status of a TrainingJob: the only place that decides a round. Written by the operator alone.

Absent means "none yet"; no sentinel values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from holdfast_core.api.base import ApiModel, Conditions, Timestamp, WithConditions, changed
from holdfast_core.ids import (
    MAX_SPARES,
    MAX_WORKERS,
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    Step,
    TierName,
    Worker,
)
from holdfast_core.names import RECOVERY_PHASES

MAX_LINEAGE = 256
MAX_RECENT_RESTARTS = 1024
"""More than the largest maxRestarts, or the limit could never be reached."""
MAX_NODE_FAILURES = 256
MAX_RECOVERIES = 10
MAX_STRAGGLERS = 16
MAX_QUARANTINED = 16
"""Each of them takes room on the nodes. A job that would need more fails."""
MAX_MISSING = 64
"""More than a retention keeps. The oldest entries are dropped."""
MAX_NAMED_WORKERS = 8
"""Largest number of workers that the record of a recovery names. Records must stay small."""


class JobPhase(StrEnum):
    """Computed from conditions, for people; never read back."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class JobCondition(StrEnum):
    """Types of the conditions of a TrainingJob."""

    ACCEPTED = "Accepted"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    LAST_CHECKPOINT_SUCCEEDED = "LastCheckpointSucceeded"
    REMOTE_TIER_HEALTHY = "RemoteTierHealthy"
    READABLE = "Readable"
    """False while the operator cannot read the job or one of its pods; absent before that happens."""
    HANGS_REPEAT = "HangsRepeat"
    """True after the gang was restarted several times because it hung at the same step, until it has passed
    the step; absent before that happens. The message says how to announce a pause."""
    SPEC_APPLIED = "SpecApplied"
    """False while pods of the gang have an earlier value of a field, or no pod can be created from the
    template; absent before that happens."""
    RECONCILED = "Reconciled"
    """False while passes of the operator over the job end with an exception, whose text is the message;
    absent before that happens."""
    SIDECARS_UNREACHABLE = "SidecarsUnreachable"
    QUARANTINED = "Quarantined"
    """True while a checkpoint of the job is quarantined; absent before that happens."""
    CHECKPOINT_MISSING = "CheckpointMissing"
    """True while a checkpoint that the status names cannot be read anywhere, for example because the bucket
    was emptied; absent before that happens."""
    NODES_AVOIDED = "NodesAvoided"
    """True while new pods avoid nodes on which workers failed; absent before that happens."""
    NODES_LEAVING = "NodesLeaving"
    """True while workers run on nodes that will be taken away soon; absent before that happens."""
    ADOPTED = "Adopted"
    """Of a CheckpointAdoption: whether its pods are workers, and what their controller's restart policy
    costs. Absent until a pod exists."""
    UNSCHEDULABLE = "Unschedulable"
    """True after the pods of a gang could not all be scheduled in time, until all of them are; absent before
    that happens."""
    RESIZING = "Resizing"
    """True while the gang changes to another number of workers; absent before that happens."""
    QUEUED = "Queued"
    """True while pods of the gang wait for their queue in Kueue; absent before they were in one."""
    SPARES_READY = "SparesReady"
    """True while all spare pods can take the place of lost workers; absent before the job has spares."""
    WORKERS_MISSING = "WorkersMissing"
    """True while an elastic gang has nodes for fewer workers than spec.workers; absent before that
    happens."""
    PODS_KEPT = "PodsKept"
    """True while the pods of a job that has failed stay, because they have the only copy of its newest
    committed step; absent before that happens."""
    CHECKPOINTS_LOST = "CheckpointsLost"
    """True while the gang waits for a person, because every copy of its checkpoints is lost and to start over
    would give up more training than failurePolicy.startOver.atMost; absent before that happens."""
    ROLLED_BACK = "RolledBack"
    """True once a round has begun from the step of spec.rollback. False while that is not possible, and the
    message says why; absent before the job was to be rolled back."""
    UPLOADS_HELD = "UploadsHeld"
    """True while the next upload of the job waits, because a quota of its store is reached; absent before
    that happens."""
    FAILURE_RULES_APPLY = "FailureRulesApply"
    """False while a rule of failurePolicy.rules can never match; absent before that happens."""


_ID = re.compile(r"^s(0|[1-9][0-9]{0,18})-r(0|[1-9][0-9]{0,18})$")


def _read_id(value: Any) -> Any:
    if isinstance(value, CheckpointId):
        return value
    found = _ID.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError("a checkpoint is named by its step and round, as s40-r2")
    return CheckpointId(Step(int(found[1])), RestartRound(int(found[2])))


StepField = Annotated[Step, Field(ge=0)]
RoundField = Annotated[RestartRound, Field(ge=0)]
DigestField = Annotated[Digest, Field(max_length=128)]
CheckpointIdField = Annotated[
    CheckpointId,
    BeforeValidator(_read_id),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "maxLength": 48, "pattern": _ID.pattern}),
]
"""A checkpoint of the job as text, its step and the round that saved it: s40-r2."""
WorkerField = Annotated[Worker, Field(ge=0)]
Seconds = Annotated[float, PlainSerializer(lambda value: round(value, 3), return_type=float)]
Share = Annotated[float, PlainSerializer(lambda value: round(value, 4), return_type=float)]


class PersistedStep(ApiModel):
    """A checkpoint that is committed in the object store."""

    step: Annotated[StepField, Field(description="Optimizer step.")]
    round: Annotated[RoundField, Field(description="Restart round that saved it.")]
    manifest: Annotated[DigestField, Field(description="BLAKE3 of the manifest, b3:<hex>.")]

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.step, self.round)


class RestorePointStatus(ApiModel):
    """The step that the current round starts from. An empty object: chosen, from the beginning."""

    step: Annotated[
        StepField | None,
        Field(description=("Optimizer step. Absent: the round started without a checkpoint.")),
    ] = None
    round: Annotated[RoundField | None, Field(description="Restart round that saved it.")] = None
    job_uid: Annotated[
        JobUid | None,
        Field(max_length=64, description="uid of the job that saved it, if it was another job."),
    ] = None
    job_namespace: Annotated[
        str | None,
        Field(max_length=63, description="Namespace in the object keys of that other job."),
    ] = None

    @property
    def id(self) -> CheckpointId | None:
        """Return step and round to restore, or None if the round starts without a checkpoint."""
        if self.step is None or self.round is None:
            return None
        return CheckpointId(self.step, self.round)


class LineageEntry(ApiModel):
    """What one restart round started from."""

    round: Annotated[RoundField, Field(description="The restart round.")]
    base: Annotated[
        CheckpointIdField | None,
        Field(
            description="Checkpoint that it restored, by its step and the restart round that saved it, as "
            "s40-r2. Absent: it started without one."
        ),
    ] = None
    base_manifest: Annotated[
        DigestField | None, Field(description="BLAKE3 of its manifest, b3:<hex>.")
    ] = None
    rolled_back_from: Annotated[
        StepField | None,
        Field(
            description="Step that the gang had reached before a person rolled it back, if the base is below "
            "it. Later rounds have it too, until one starts from this step or a later one."
        ),
    ] = None


def on_lineage(checkpoint: CheckpointId, lineage: tuple[LineageEntry, ...]) -> bool:
    """Return whether step s of round r is on the lineage: s <= base step of r' for every later round r'.

    A later round that started without a checkpoint takes all steps of earlier rounds off the lineage.
    """
    for entry in lineage:
        if entry.round <= checkpoint.round:
            continue
        if entry.base is None or checkpoint.step > entry.base.step:
            return False
    return True


class RecoveryStatus(ApiModel):
    """One recovery. Its phases follow each other: those that are set add up to the total.

    A phase that was not measured is missing, as after a restart of the operator. The total is missing until
    every rank has finished a step, and for ever if another failure interrupted the recovery.
    """

    round: Annotated[RoundField | None, Field(description="Restart round that it began.")] = None
    reason: Annotated[
        str, Field(max_length=128, description="What was lost, as one CamelCase word.")
    ]
    workers: Annotated[
        tuple[WorkerField, ...],
        Field(
            max_length=MAX_NAMED_WORKERS,
            description=f"Workers that failed, at most the first {MAX_NAMED_WORKERS}.",
        ),
    ] = ()
    nodes: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...],
        Field(
            max_length=MAX_NAMED_WORKERS,
            description="Nodes of these workers, where their pods still existed.",
        ),
    ] = ()
    begun_at: Annotated[Timestamp | None, Field(description="When the round began (UTC).")] = None
    phase_seconds: Annotated[
        dict[str, Annotated[float, Field(ge=0)]],
        Field(
            max_length=len(RECOVERY_PHASES),
            description="Seconds of the phases, named as by the label phase of holdfast_recovery_seconds. "
            "detect: from the failure until the operator knew what was lost, with the wait for sidecars that "
            "did not answer. back_off: until the round began. seal: until the survivors had stopped and "
            "reported what they hold. schedule: until the sidecars of new pods ran and the restore point was "
            "chosen. rehydrate: until the shards were on the nodes. rendezvous: until all ranks had met. "
            "first_step: until every rank had finished a step.",
        ),
    ] = Field(default_factory=dict)
    total_seconds: Annotated[
        float | None,
        Field(ge=0, description="From the failure to the first step of every rank, seconds."),
    ] = None
    restored_step: Annotated[
        StepField | None,
        Field(description="Step from which the round starts. Absent: it has no checkpoint."),
    ] = None
    sources: Annotated[
        dict[str, Annotated[int, Field(ge=1)]] | None,
        Field(
            max_length=len(TierName),
            description="Number of ranks by the farthest tier from which their state was read: memory, node, "
            "peer, object.",
        ),
    ] = None
    lost_steps: Annotated[
        int | None, Field(ge=0, description="Last trained step minus the restore point.")
    ] = None

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase that was measured, in the order of the phases."""
        known = self.phase_seconds
        return {name: known[name] for name in RECOVERY_PHASES if name in known}

    def with_phases(self, **seconds: float | None) -> RecoveryStatus:
        """Return the record with these phases as well. Those that are None were not measured."""
        measured = {name: value for name, value in seconds.items() if value is not None}
        return changed(self, phase_seconds={**self.phase_seconds, **measured})


class GoodputStatus(ApiModel):
    """Where the job's time went."""

    ratio: Annotated[
        Share,
        Field(
            ge=0,
            le=1,
            description=("Share of the time that was spent on training that no failure undid."),
        ),
    ]
    training_seconds: Annotated[Seconds, Field(ge=0, description="Training, seconds.")] = 0
    checkpoint_seconds: Annotated[
        Seconds, Field(ge=0, description="Time for which saves blocked training, seconds.")
    ] = 0
    recovery_seconds: Annotated[
        Seconds, Field(ge=0, description="Time spent in recoveries, seconds.")
    ] = 0
    lost_work_seconds: Annotated[
        Seconds,
        Field(
            ge=0, description=("Time of training that was lost and had to be repeated, seconds.")
        ),
    ] = 0


class SchedulingStatus(ApiModel):
    """Tries to schedule a gang that took longer than spec.scheduleTimeoutSeconds."""

    timeouts: Annotated[
        int, Field(ge=1, description="Tries in a row that ended with the time-out.")
    ] = 1
    retry_at: Annotated[
        Timestamp | None,
        Field(
            description="When the pods are created again (UTC). Absent: they are created, or exist."
        ),
    ] = None


class ResizeStatus(ApiModel):
    """The newest change of the number of workers."""

    round: Annotated[
        RoundField, Field(description="Restart round that began with the present number.")
    ]
    from_workers: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_WORKERS,
            description="Number of workers to which the gang goes back if its ranks fail before their "
            "first step. Absent: a round with the present number has trained.",
        ),
    ] = None
    refused_workers: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_WORKERS,
            description="Number of workers with which the gang failed before its first step. It is not "
            "tried again until spec.workers changes.",
        ),
    ] = None
    refused_of_workers: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_WORKERS,
            description="spec.workers when that number was refused. With another value, the refusal "
            "no longer counts.",
        ),
    ] = None


class ElasticStatus(ApiModel):
    """The number of workers of an elastic gang for which there are nodes."""

    workers: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_WORKERS,
            description="Number of workers with which the gang continues, fewer than spec.workers.",
        ),
    ]
    of_workers: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_WORKERS,
            description="spec.workers when nodes were missing. With another value, the gang first "
            "tries the new number.",
        ),
    ]


@dataclass(frozen=True, slots=True)
class PromotedSpare:
    """A worker whose pod was a spare before."""

    worker: Worker
    pod: str

    def __str__(self) -> str:
        return f"{self.worker}={self.pod}"


_PROMOTED = re.compile(r"^(0|[1-9][0-9]{0,8})=([a-z0-9.-]{1,63})$")


def _read_promoted(value: Any) -> Any:
    if isinstance(value, PromotedSpare):
        return value
    found = _PROMOTED.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(
            "a spare that became a worker is named by worker and pod, as 1=gpt-x-s0-r0"
        )
    return PromotedSpare(Worker(int(found[1])), found[2])


PromotedField = Annotated[
    PromotedSpare,
    BeforeValidator(_read_promoted),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "maxLength": 80, "pattern": _PROMOTED.pattern}),
]


class SparesStatus(ApiModel):
    """Pods that wait to take the place of lost workers, and those that have."""

    ready: Annotated[
        int,
        Field(ge=0, description="Spares that can become workers now: torch is imported."),
    ] = 0
    births: Annotated[
        tuple[RoundField, ...],
        Field(
            max_length=MAX_SPARES,
            description="Birth round of the pod of each spare, by its number.",
        ),
    ] = ()
    promoted: Annotated[
        tuple[PromotedField, ...],
        Field(
            max_length=MAX_WORKERS,
            description="Workers of the gang whose pods were spares, with these pods, as 1=gpt-x-s0-r0.",
        ),
    ] = ()


class RestartRecord(ApiModel):
    """One restart after a failure of the gang itself, not after a disruption."""

    round: Annotated[RoundField, Field(description="Restart round that it began.")]
    at: Annotated[Timestamp, Field(description="When (UTC).")]
    ignored: Annotated[
        bool,
        Field(
            description="true: a rule with action Ignore applied, so the restart does not count "
            "towards failurePolicy.maxRestarts."
        ),
    ] = False
    failed_from: Annotated[
        CheckpointIdField | None,
        Field(
            description="Checkpoint, as s40-r2, that the previous round had restored, if its ranks failed on "
            "their own before they had finished a step."
        ),
    ] = None


class HangsStatus(ApiModel):
    """Restarts because no step followed the same step."""

    step: Annotated[
        StepField, Field(description="Newest step that a rank had finished when the gang hung.")
    ]
    restarts: Annotated[
        int, Field(ge=1, description="Restarts in a row with reason Hung, none of which passed it.")
    ]


class NodeFailure(ApiModel):
    """A failure of a worker that may be the fault of its node."""

    node: Annotated[str, Field(max_length=253, description="Name of the node.")]
    at: Annotated[Timestamp, Field(description="When (UTC).")]
    late_in_round: Annotated[
        RoundField | None,
        Field(
            description="Restart round in which a pod did not start on it within startTimeoutSeconds. "
            "Absent: the failure was another one."
        ),
    ] = None
    by_rule: Annotated[
        bool,
        Field(
            description="true: it alone suffices, because a rule with action AvoidNode applied, or a pod did "
            "not start within startTimeoutSeconds."
        ),
    ] = False


class TrainingJobStatus(WithConditions):
    """What the operator decided and saw. Step, levels, goodput: at most every 10 s."""

    phase: Annotated[
        JobPhase | None,
        Field(description="Summary for people, computed from the conditions."),
    ] = None
    restart_round: Annotated[
        RoundField | None,
        Field(description="+1 at each restart of the gang: the fencing token. Absent: not begun."),
    ] = None
    restarts: Annotated[int, Field(ge=0, description="All restarts of the gang.")] = 0
    recent_restarts: Annotated[
        tuple[RestartRecord, ...],
        Field(
            max_length=MAX_RECENT_RESTARTS,
            description="Newest restarts within failurePolicy.window or since the newest committed step was "
            "saved, and older ones that failed from a checkpoint of the job, oldest first. Those after "
            "disruptions are left out.",
        ),
    ] = ()
    quarantined: Annotated[
        tuple[CheckpointIdField, ...],
        Field(
            max_length=MAX_QUARANTINED,
            description="Checkpoints, by step and round as s40-r2, that are kept and not restored, oldest "
            "quarantine first.",
        ),
    ] = ()
    missing: Annotated[
        tuple[CheckpointIdField, ...],
        Field(
            max_length=MAX_MISSING,
            description="Checkpoints, by step and round as s40-r2, that could not be read anywhere since the "
            "gang last trained. An older one is restored, or the newest of them is waited for.",
        ),
    ] = ()
    hangs: Annotated[
        HangsStatus | None,
        Field(
            description="Restarts because the gang hung at one step. Each doubles the limits of the search "
            "for hangs, except while every rank waits for others. Absent: the gang has passed the step at "
            "which it last hung."
        ),
    ] = None
    node_failures: Annotated[
        tuple[NodeFailure, ...],
        Field(
            max_length=MAX_NODE_FAILURES,
            description="Newest failures on nodes within failurePolicy.avoidNodes.window.",
        ),
    ] = ()
    step: Annotated[StepField | None, Field(description="Newest step that was trained.")] = None
    last_committed_step: Annotated[
        StepField | None, Field(description="Newest step committed at level local.")
    ] = None
    last_replicated_step: Annotated[
        StepField | None, Field(description="Newest step committed at level replicated.")
    ] = None
    flush_seconds: Annotated[
        int | None,
        Field(
            ge=0,
            description="Longest measured time from the local commit of a step until its peers had "
            "durable copies of all shards, seconds rounded up.",
        ),
    ] = None
    last_persisted: Annotated[
        PersistedStep | None, Field(description="Newest checkpoint in the object store.")
    ] = None
    members: Annotated[
        tuple[RoundField, ...],
        Field(
            max_length=MAX_WORKERS,
            description="Birth round of the pod of each worker, by index: the current gang.",
        ),
    ] = ()
    coordinator: Annotated[
        WorkerField | None,
        Field(description="Worker whose sidecar commits this round's checkpoints."),
    ] = None
    restore_point: Annotated[
        RestorePointStatus | None,
        Field(
            description=(
                "The step that this round starts from. Absent: not chosen yet; an empty "
                "object: the round starts without a checkpoint."
            )
        ),
    ] = None
    lineage: Annotated[
        tuple[LineageEntry, ...],
        Field(
            max_length=MAX_LINEAGE,
            description="The restore point of each round, oldest first, compacted.",
        ),
    ] = ()
    recoveries: Annotated[
        tuple[RecoveryStatus, ...],
        Field(
            max_length=MAX_RECOVERIES,
            description=f"The newest {MAX_RECOVERIES} recoveries, oldest first, phase by phase.",
        ),
    ] = ()
    trained_seconds: Annotated[
        Seconds | None,
        Field(
            ge=0,
            description="Longest time for which the gang can have trained since it last began from "
            "restoreFrom or from step 0, without this round. A start over loses this training.",
        ),
    ] = None
    chosen_at: Annotated[
        Timestamp | None,
        Field(
            description="When the restore point of this round was chosen (UTC). Absent: not chosen yet."
        ),
    ] = None
    goodput: Annotated[GoodputStatus | None, Field(description="How the job's time was spent.")] = (
        None
    )
    expected_mtbf_seconds: Annotated[
        Seconds | None,
        Field(
            ge=0,
            description="Mean time between failures that this round expects, seconds. It follows from "
            "interval.mtbf, the restarts and the training time of the job. Only with interval.auto.",
        ),
    ] = None
    scheduling: Annotated[
        SchedulingStatus | None,
        Field(
            description="Tries that could not schedule all pods; absent once all of them have nodes."
        ),
    ] = None
    resize: Annotated[
        ResizeStatus | None,
        Field(
            description="The newest change of the number of workers; absent before there was one."
        ),
    ] = None
    stragglers: Annotated[
        tuple[Annotated[Rank, Field(ge=0)], ...],
        Field(
            max_length=MAX_STRAGGLERS,
            description=f"The slowest {MAX_STRAGGLERS} ranks that are stragglers by "
            "failurePolicy.stragglers. Events with reason Straggler and metric "
            "holdfast_straggler_factor say how slow they are.",
        ),
    ] = ()
    elastic: Annotated[
        ElasticStatus | None,
        Field(description="The number of workers that have nodes; absent while all of them do."),
    ] = None
    ready_workers: Annotated[
        str | None,
        Field(
            max_length=16,
            description="Workers whose ranks train, and the workers of the present gang, as 3/4. While nodes "
            "are missing for some, the second number is spec.workers. All are ready once the "
            "job is complete.",
        ),
    ] = None
    spares: Annotated[
        SparesStatus | None,
        Field(description="The spare pods; absent if the job has none and no worker was one."),
    ] = None
    start_time: Annotated[
        Timestamp | None,
        Field(
            description="When the first round, or the round after a suspension, began, or when Kueue "
            "admitted the gang after that (UTC); absent while the job is suspended or all of its pods wait "
            "for their queue. activeDeadlineSeconds counts from here."
        ),
    ] = None
    completion_time: Annotated[
        Timestamp | None, Field(description="When the job succeeded or failed (UTC).")
    ] = None
    conditions: Conditions = ()
    observed_generation: Annotated[
        int | None, Field(ge=0, description="metadata.generation that this status describes.")
    ] = None

    @property
    def last_recovery(self) -> RecoveryStatus | None:
        """Return the newest recovery, which may not be complete, or None."""
        return self.recoveries[-1] if self.recoveries else None

    def promoted_since(self, before: TrainingJobStatus) -> tuple[PromotedSpare, ...]:
        """Return the spares that have become workers since an earlier status."""
        old = () if before.spares is None else before.spares.promoted
        new = () if self.spares is None else self.spares.promoted
        return tuple(r for r in new if r not in old)

    def with_recovery(self, recovery: RecoveryStatus) -> TrainingJobStatus:
        """Return the status with this recovery as the newest, instead of an older record of its round."""
        older = tuple(r for r in self.recoveries if r.round != recovery.round)
        return changed(self, recoveries=(*older, recovery)[-MAX_RECOVERIES:])
