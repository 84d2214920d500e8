"""TrainingJob: a gang of worker pods that trains one model and survives the loss of any of them.

spec is what people write; the rules beside the fields become validations of the CRD, so that bad
input is refused at `kubectl apply`. status is training_job_status.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from holdfast_core.api.base import ApiModel, ApiObject, NameRef, Timestamp
from holdfast_core.api.checkpoint_policy import CheckpointPolicySpec, PeerTierSpec
from holdfast_core.api.failure_policy import FailurePolicySpec
from holdfast_core.api.rules import cel_rules, remedy, rule
from holdfast_core.api.template import PodTemplate
from holdfast_core.api.training_job_status import LineageEntry, TrainingJobStatus
from holdfast_core.ids import MAX_SPARES, JobUid, RestartRound, Step
from holdfast_core.retention import BestMode


class BestOfSpec(ApiModel):
    """The checkpoint with the best value of a metric that the script reported."""

    metric: Annotated[
        str,
        Field(
            min_length=1,
            max_length=128,
            description="Name of a metric in status.metrics of the Checkpoints. One without a finite value "
            "is never the best.",
        ),
    ]
    mode: Annotated[
        BestMode,
        Field(description="min: the lowest value is the best one; max: the highest."),
    ]


class CheckpointRef(NameRef):
    """A Checkpoint, by its name."""

    name: Annotated[str, Field(min_length=1, max_length=253, description="Name of the Checkpoint.")]
    namespace: Annotated[
        str | None,
        Field(
            max_length=63,
            description="Namespace of the Checkpoint. Another one than the job's needs a CheckpointGrant "
            "there. Default: the namespace of the job.",
            json_schema_extra=cel_rules(
                rule(
                    "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
                    message_expression=(
                        '\'checkpointRef.namespace is "%s", expected the name of a namespace: remove it '
                        "for a Checkpoint of the namespace of the job'.format([self])"
                    ),
                )
            ),
        ),
    ] = None


class RestoreFromSpec(ApiModel):
    """The checkpoint, of this or another job, that the first round starts from.

    It is found once, when the first round begins to train. Later edits have no effect.
    """

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "[has(self.checkpointRef), has(self.jobRef)].filter(given, given).size() == 1",
                message_expression=(
                    "'restoreFrom has %d sources, expected exactly one: set checkpointRef.name, or "
                    "jobRef.name with one of step, latest, before and best, or remove restoreFrom to start "
                    "without a checkpoint'.format([[has(self.checkpointRef), "
                    "has(self.jobRef)].filter(given, given).size()])"
                ),
            ),
            rule(
                "[has(self.step), has(self.latest), has(self.before), has(self.best)]"
                ".filter(given, given).size() == (has(self.jobRef) ? 1 : 0)",
                message_expression=(
                    "'restoreFrom has %d of step, latest, before and best, expected %s'.format([["
                    "has(self.step), has(self.latest), has(self.before), has(self.best)]"
                    ".filter(given, given).size(), has(self.jobRef) ? 'exactly one beside jobRef: "
                    "latest: true is its newest checkpoint' : 'none: they select a checkpoint of jobRef'])"
                ),
            ),
        )
    )

    checkpoint_ref: Annotated[
        CheckpointRef | None, Field(description="A committed Checkpoint.")
    ] = None
    job_ref: Annotated[
        NameRef | None,
        Field(
            description="A job of the same namespace, of which step, latest, before or best selects a "
            "checkpoint in the object store. The job may be over or deleted."
        ),
    ] = None
    step: Annotated[
        Step | None,
        Field(
            ge=0,
            description="Step of the checkpoint.",
            json_schema_extra=remedy("`kubectl holdfast list JOB` lists the steps"),
        ),
    ] = None
    latest: Annotated[
        Literal[True] | None,
        Field(description="true: the newest checkpoint of the lineage, without quarantined ones."),
    ] = None
    before: Annotated[
        Timestamp | None,
        Field(description="The newest checkpoint that was committed before this time (UTC)."),
    ] = None
    best: Annotated[
        BestOfSpec | None,
        Field(
            description="The checkpoint with the best value of a metric; of equal ones the oldest."
        ),
    ] = None

    @property
    def job(self) -> str | None:
        """Return the name of the job in jobRef, or None."""
        return None if self.job_ref is None else self.job_ref.name


class RollbackSpec(ApiModel):
    """A person's order to train again from an older step. It is carried out once at most."""

    round: Annotated[
        RestartRound,
        Field(
            ge=0,
            description="Restart round up to which a person gives up what was trained after the step: the "
            "newest round in status.lineage. The round that carries out the order is a newer one. The order "
            "has no effect on later rounds.",
            json_schema_extra=remedy("write the round of the newest entry of status.lineage"),
        ),
    ]
    step: Annotated[
        Step | None,
        Field(
            ge=0,
            description="Step of a checkpoint of the job, from which the gang trains again. "
            "`kubectl holdfast restore JOB@STEP` sets it. Absent: the start, which is restoreFrom or "
            "step 0, if nothing can be restored (`kubectl holdfast restart JOB --from-start`).",
            json_schema_extra=remedy("`kubectl holdfast list JOB` lists the steps"),
        ),
    ] = None

    def stands(self, lineage: tuple[LineageEntry, ...]) -> bool:
        """Return whether no restore point was chosen since a person gave the order."""
        return bool(lineage) and lineage[-1].round == self.round


class NodeLossSpec(ApiModel):
    """When a silent node counts as lost."""

    suspect_after_seconds: Annotated[
        int,
        Field(
            ge=15,
            le=3600,
            description="Seconds without a change of the node's lease before its workers are "
            "suspected (two direct calls to the sidecar must fail as well).",
            json_schema_extra=remedy("a healthy kubelet renews its lease every 10 s"),
        ),
    ] = 20


COPIES_BELOW_WORKERS = rule(
    "!has(self.checkpoint.peer) || self.workers < 1 || self.checkpoint.peer.copies < self.workers",
    message_expression=(
        "'checkpoint.peer.copies is %d, but only %d other workers can keep copies of "
        "a shard (workers: %d): lower copies or add "
        "workers'.format([self.checkpoint.peer.copies, self.workers - 1, "
        "self.workers])"
    ),
    field_path=".checkpoint.peer.copies",
)


class GangSpec(ApiModel):
    """How a gang is checkpointed and what it survives, whatever creates its pods."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            COPIES_BELOW_WORKERS,
        )
    )

    workers: Annotated[
        int,
        Field(
            ge=1,
            le=4096,
            description="Pods of the gang; ranks = workers * procsPerWorker. A change in a TrainingJob with "
            "an object store makes the gang save, stop and continue with the new number.",
            json_schema_extra=remedy("set the number of pods that train together"),
        ),
    ]
    procs_per_worker: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Rank processes per pod, usually one per GPU. Immutable.",
            json_schema_extra={
                **remedy("the usual value is the number of GPUs of a pod"),
                **cel_rules(
                    rule(
                        "self == oldSelf",
                        message_expression=(
                            "'procsPerWorker is immutable (%d, found %d): shards are saved by "
                            "rank; create a new job'.format([oldSelf, self])"
                        ),
                        forbidden=True,
                    )
                ),
            },
        ),
    ] = 1
    checkpoint: Annotated[
        CheckpointPolicySpec,
        Field(
            description=(
                "When checkpoints are saved, where they are stored and how long they are kept."
            )
        ),
    ]
    restore_from: Annotated[
        RestoreFromSpec | None,
        Field(description="Checkpoint from which the first round starts. Default: none."),
    ] = None
    rollback: Annotated[
        RollbackSpec | None,
        Field(
            description="Order to train again from an older step. Condition RolledBack says what became "
            "of it."
        ),
    ] = None
    failure_policy: Annotated[
        FailurePolicySpec,
        Field(
            description="What failures lead to, and how often the gang may restart before the job fails."
        ),
    ] = FailurePolicySpec()
    node_loss: Annotated[
        NodeLossSpec, Field(description=("When a node without lease renewals counts as lost."))
    ] = NodeLossSpec()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.workers * self.procs_per_worker

    @property
    def peer(self) -> PeerTierSpec:
        """Return `checkpoint.peer`, or its default: one copy if there is another worker."""
        return self.checkpoint.peer or PeerTierSpec(copies=1 if self.workers > 1 else 0)

    @property
    def store(self) -> str | None:
        """Return the name of the CheckpointStore, or None if the job has no object tier."""
        return None if self.checkpoint.object is None else self.checkpoint.object.store_ref.name

    @property
    def source_checkpoint(self) -> str | None:
        """Return the name of the Checkpoint in restoreFrom, or None if it names none."""
        ref = None if self.restore_from is None else self.restore_from.checkpoint_ref
        return None if ref is None else ref.name

    @property
    def source_job(self) -> str | None:
        """Return the name of the job in restoreFrom, or None if it names none."""
        return None if self.restore_from is None else self.restore_from.job

    def source_namespace(self, own: str) -> str:
        """Return the namespace of the Checkpoint or job in restoreFrom, for a gang of the namespace `own`."""
        ref = None if self.restore_from is None else self.restore_from.checkpoint_ref
        return (None if ref is None else ref.namespace) or own


class ElasticSpec(ApiModel):
    """How far a gang may shrink when nodes are missing, and when it shrinks and grows again."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "!has(self.max) || self.min <= self.max",
                message_expression=(
                    "'elastic.min is %d, more than elastic.max %d: lower min or raise "
                    "max'.format([self.min, self.max])"
                ),
                field_path=".min",
            )
        )
    )

    min: Annotated[
        int,
        Field(
            ge=1,
            le=4096,
            description="Smallest number of workers with which the gang continues when nodes are missing, "
            "the MIN of torchrun --nnodes=MIN:MAX.",
            json_schema_extra=remedy("set the smallest number of pods that can train the model"),
        ),
    ]
    max: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="Largest value that spec.workers may be changed to. The gang never grows beyond "
            "spec.workers: to use more nodes, raise that. Default: 4096.",
            json_schema_extra=remedy("omit it to allow every number of workers"),
        ),
    ] = None
    shrink_after_seconds: Annotated[
        int,
        Field(
            ge=30,
            le=604_800,
            description="Seconds for which pods wait for nodes before the gang continues without them. "
            "With a cluster autoscaler, set more than it needs for a new node.",
            json_schema_extra=remedy(
                "a scheduler needs some seconds for a large gang, and a new node some minutes"
            ),
        ),
    ] = 120
    grow_after_seconds: Annotated[
        int,
        Field(
            ge=60,
            le=604_800,
            description="Seconds for which a gang with missing workers trains before the operator looks "
            "for nodes again. Each growth costs a save and a restart.",
            json_schema_extra=remedy("each growth costs a save and a restart of the gang"),
        ),
    ] = 600


_ELASTIC_RULES = (
    rule(
        "!has(self.elastic) || has(self.checkpoint.object)",
        message=(
            "elastic needs an object store, from which ranks of another number of workers read their "
            "state: set checkpoint.object, or remove elastic"
        ),
        field_path=".elastic",
    ),
    rule(
        "!has(self.elastic) || self.elastic.min <= self.workers",
        message_expression=(
            "'elastic.min is %d, more than workers %d, the number that the gang grows to: lower "
            "elastic.min or raise workers'.format([self.elastic.min, self.workers])"
        ),
        field_path=".elastic.min",
    ),
    rule(
        "!has(self.elastic) || !has(self.elastic.max) || self.workers <= self.elastic.max",
        message_expression=(
            "'workers is %d, more than elastic.max %d: lower workers or raise "
            "elastic.max'.format([self.workers, self.elastic.max])"
        ),
        field_path=".workers",
    ),
    rule(
        "!has(self.elastic) || !has(self.checkpoint.peer) || "
        "self.checkpoint.peer.copies < self.elastic.min",
        message_expression=(
            "'elastic.min is %d, but checkpoint.peer.copies %d needs at least %d workers: raise "
            "elastic.min or lower copies'.format([self.elastic.min, self.checkpoint.peer.copies, "
            "self.checkpoint.peer.copies + 1])"
        ),
        field_path=".elastic.min",
    ),
    rule(
        "!has(self.elastic) || self.scheduleTimeoutSeconds == 0 || "
        "self.elastic.shrinkAfterSeconds <= self.scheduleTimeoutSeconds",
        message_expression=(
            "'elastic.shrinkAfterSeconds is %d, but after scheduleTimeoutSeconds %d the gang gives all of "
            "its nodes back: lower shrinkAfterSeconds or raise "
            "scheduleTimeoutSeconds'.format([self.elastic.shrinkAfterSeconds, self.scheduleTimeoutSeconds])"
        ),
        field_path=".elastic.shrinkAfterSeconds",
    ),
)


class TrainingJobSpec(GangSpec):
    """What the job runs, how it is checkpointed and what it survives."""

    model_config = ConfigDict(json_schema_extra=cel_rules(COPIES_BELOW_WORKERS, *_ELASTIC_RULES))

    template: PodTemplate
    elastic: Annotated[
        ElasticSpec | None,
        Field(
            description="Lets the gang continue with fewer workers than spec.workers when nodes are "
            "missing, and grow again when there are nodes. Needs an object store. Default: the gang "
            "waits for all of its workers."
        ),
    ] = None
    suspend: Annotated[
        bool,
        Field(
            description=("true: save, then delete all pods; false: continue from that checkpoint.")
        ),
    ] = False
    spares: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_SPARES,
            description="Pods that wait, with the image pulled and torch imported, to take the place of lost "
            "workers. Each of them holds the resources of a worker, GPUs included. They are created while "
            "the gang trains.",
            json_schema_extra=remedy("0 keeps no spare pods"),
        ),
    ] = 0
    schedule_timeout_seconds: Annotated[
        int,
        Field(
            ge=0,
            le=604_800,
            description="Seconds after which the pods of a gang that cannot all be scheduled are "
            "deleted, so that other jobs can use their nodes. They are created again after a back-off. 0: "
            "never.",
            json_schema_extra={
                **remedy("0 lets pods wait for their nodes without a limit"),
                **cel_rules(
                    rule(
                        "self == 0 || self >= 30",
                        message_expression=(
                            "'scheduleTimeoutSeconds is %d, expected 0 or at least 30: a scheduler "
                            "needs some seconds for a large gang, and a new node some minutes; 0 "
                            "lets pods wait without a limit'.format([self])"
                        ),
                    )
                ),
            },
        ),
    ] = 900
    start_timeout_seconds: Annotated[
        int,
        Field(
            ge=0,
            le=604_800,
            description="Seconds after which a pod that has a node and has not started is created again on "
            "another node, for example because a volume cannot be mounted. An image must be pulled within "
            "this time. 0: never.",
            json_schema_extra={
                **remedy("0 lets pods wait for their start without a limit"),
                **cel_rules(
                    rule(
                        "self == 0 || self >= 60",
                        message_expression=(
                            "'startTimeoutSeconds is %d, expected 0 or at least 60: a pod has to pull "
                            "its image in this time; 0 lets pods wait without a limit'.format([self])"
                        ),
                    )
                ),
            },
        ),
    ] = 1800
    active_deadline_seconds: Annotated[
        int | None,
        Field(
            ge=1,
            le=315_360_000,
            description="Seconds after its start, or after its last resumption, when the job is "
            "failed. Default: never.",
            json_schema_extra=remedy("omit it for no deadline"),
        ),
    ] = None
    ttl_seconds_after_finished: Annotated[
        int | None,
        Field(
            ge=0,
            le=315_360_000,
            description="Seconds after its end when the job is deleted. Default: never.",
            json_schema_extra=remedy("omit it to keep the job"),
        ),
    ] = None


NAME_OF_GANG = rule(
    "self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    message_expression=(
        '\'metadata.name is "%s" (%d characters), expected at most 40 lower-case '
        "letters, digits and hyphens, a letter first: names of pods and their DNS "
        "records are derived from it; choose a shorter or simpler "
        "name'.format([self.metadata.name, self.metadata.name.size()])"
    ),
)


class TrainingJob(ApiObject):
    """A gang of worker pods that trains one model.

    It goes on from the newest readable checkpoint after the loss of a process, a pod or a node.
    """

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            NAME_OF_GANG,
        )
    )

    KIND: ClassVar[str] = "TrainingJob"
    PLURAL: ClassVar[str] = "trainingjobs"
    SHORT_NAME: ClassVar[str] = "tj"

    api_version: Literal["holdfast.dev/v1alpha1"] = "holdfast.dev/v1alpha1"
    kind: Literal["TrainingJob"] = "TrainingJob"
    spec: TrainingJobSpec
    status: TrainingJobStatus = TrainingJobStatus()

    @property
    def uid(self) -> JobUid:
        return JobUid(self.metadata.uid)
