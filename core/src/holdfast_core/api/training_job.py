"""TrainingJob: a gang of worker pods that trains one model and survives the loss of any of them.

spec is what people write; the rules beside the fields become validations of the CRD, so that bad
input is refused at `kubectl apply`. status is training_job_status.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from holdfast_core.api.base import ApiModel
from holdfast_core.api.checkpoint_policy import CheckpointPolicySpec, PeerTierSpec
from holdfast_core.api.failure_policy import FailurePolicySpec
from holdfast_core.api.meta import ApiObject, NameRef
from holdfast_core.api.rules.cel import RULES, cel_rules, remedy, rule
from holdfast_core.api.template import PodTemplate
from holdfast_core.api.training_job_status import TrainingJobStatus
from holdfast_core.ids import JobUid


def _checkpoint_ref_by_rule(schema: dict[str, Any]) -> None:
    """Absence is refused by our rule, which says what to do, not by `required`, which does not."""
    schema.pop("required", None)
    schema[RULES] = [
        rule(
            "has(self.checkpointRef)",
            message=(
                "restoreFrom has no source, expected exactly one: set checkpointRef.name (the "
                "only source of this version), or remove restoreFrom to start without a "
                "checkpoint"
            ),
        )
    ]


class RestoreFromSpec(ApiModel):
    """The checkpoint, of this or another job, that the first round starts from."""

    model_config = ConfigDict(json_schema_extra=_checkpoint_ref_by_rule)

    checkpoint_ref: Annotated[
        NameRef, Field(description="A committed Checkpoint of the same namespace.")
    ]


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
        """Return the name of the Checkpoint in restoreFrom, or None if the job starts without one."""
        return None if self.restore_from is None else self.restore_from.checkpoint_ref.name


class TrainingJobSpec(GangSpec):
    """What the job runs, how it is checkpointed and what it survives."""

    template: PodTemplate
    suspend: Annotated[
        bool,
        Field(
            description=("true: save, then delete all pods; false: continue from that checkpoint.")
        ),
    ] = False
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
