"""CheckpointAdoption: Holdfast for a gang whose pods another controller creates (ADR 0015).

Pods of its namespace with the label `holdfast.dev/adopt: <name>` get the sidecar at admission. The policy
that adds it reads `status.injection`, which the operator writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from holdfast_core.api.base import ApiModel, ApiObject, changed
from holdfast_core.api.rules import cel_rules, rule
from holdfast_core.api.training_job import (
    COPIES_BELOW_WORKERS,
    NAME_OF_GANG,
    GangSpec,
    TrainingJob,
)
from holdfast_core.api.training_job_status import (
    RoundField,
    TrainingJobStatus,
    WorkerField,
)
from holdfast_core.ids import MAX_WORKERS, JobUid, RestartRound, Worker


class CheckpointAdoptionSpec(GangSpec):
    """Which pods belong to the gang, how it is checkpointed and what it survives."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            COPIES_BELOW_WORKERS,
            rule(
                "!has(self.checkpoint.node.volume.ephemeral) || "
                "size(self.checkpoint.node.volume.ephemeral) == 0",
                message_expression=(
                    "'checkpoint.node.volume.ephemeral is not available for adopted pods: remove it, and set "
                    "checkpoint.node.volume.emptyDir.sizeLimit'"
                ),
                field_path=".checkpoint.node.volume.ephemeral",
            ),
            rule(
                "self.workers == oldSelf.workers",
                message_expression=(
                    "'workers is immutable (%d, found %d): another controller creates the pods; create a "
                    "new CheckpointAdoption'.format([oldSelf.workers, self.workers])"
                ),
                field_path=".workers",
                forbidden=True,
            ),
        )
    )

    container: Annotated[
        str,
        Field(
            min_length=1,
            max_length=63,
            description="Container of the pods that runs `holdfast run`. Immutable.",
            json_schema_extra=cel_rules(
                rule(
                    "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && !self.startsWith('holdfast-')",
                    message_expression=(
                        "'container is %s, expected the name of a container of the pods that does not "
                        "start with holdfast-: set it to the container that runs holdfast "
                        "run'.format([self])"
                    ),
                ),
                rule(
                    "self == oldSelf",
                    message_expression=(
                        "'container is immutable (%s, found %s): pods that run have the sidecar already; "
                        "create a new CheckpointAdoption'.format([oldSelf, self])"
                    ),
                    forbidden=True,
                ),
            ),
        ),
    ] = "trainer"

    @property
    def template(self) -> None:
        """Another controller has the template of the pods."""
        return None

    @property
    def spares(self) -> int:
        """Another controller creates the pods, so there are no spares."""
        return 0

    @property
    def suspend(self) -> bool:
        """Another controller suspends the pods: the operator sees only that they are deleted."""
        return False

    @property
    def schedule_timeout_seconds(self) -> int:
        """Another controller creates the pods again, so the operator never deletes pods that wait."""
        return 0

    @property
    def start_timeout_seconds(self) -> int:
        """Another controller creates the pods, so the operator never replaces one that has not started."""
        return 0

    @property
    def elastic(self) -> None:
        """Another controller decides how many pods there are."""
        return None

    @property
    def active_deadline_seconds(self) -> None:
        """Another controller ends the pods."""
        return None

    @property
    def ttl_seconds_after_finished(self) -> None:
        """The object stays until a user deletes it, because its checkpoints belong to it."""
        return None


class Variable(ApiModel):
    """A variable of the environment of a container."""

    name: Annotated[str, Field(max_length=128, description="Name of the variable.")]
    value: Annotated[str, Field(max_length=8192, description="Its value.")] = ""


class InjectionStatus(ApiModel):
    """What pods get at admission. It is the same for all workers."""

    trainer_env: Annotated[
        tuple[Variable, ...],
        Field(max_length=32, description="Variables of the container that trains."),
    ] = ()
    sidecar_env: Annotated[
        tuple[Variable, ...], Field(max_length=32, description="Variables of the sidecar.")
    ] = ()
    certificates: Annotated[
        str,
        Field(
            max_length=253,
            description="Prefix of the Secrets with the certificates of the workers. The number of the "
            "block of workers follows it.",
        ),
    ]
    workers_per_secret: Annotated[
        int, Field(ge=1, description="Workers of a block, whose certificates are in one Secret.")
    ]
    node_size: Annotated[str, Field(max_length=32, description="sizeLimit of the node volume.")]
    shared_size: Annotated[
        str | None,
        Field(
            max_length=32,
            description="sizeLimit of the shared-memory volume. Absent: none.",
        ),
    ] = None
    credentials_secret: Annotated[
        str | None,
        Field(max_length=253, description="Secret of the store that the sidecar mounts."),
    ] = None
    ca_secret: Annotated[
        str | None,
        Field(max_length=253, description="Secret with the certificate of the store's authority."),
    ] = None
    token_audience: Annotated[
        str | None,
        Field(
            max_length=253,
            description="Audience of the service account's token that the sidecar mounts for the store.",
        ),
    ] = None


class AdoptedPod(ApiModel):
    """The pod that is a worker of the gang since a restart round."""

    worker: Annotated[WorkerField, Field(description="Index of the worker.")]
    uid: Annotated[str, Field(max_length=64, description="uid of the pod.")]
    birth: Annotated[
        RoundField, Field(description="Birth round of the worker for which the pod was recorded.")
    ]


class CheckpointAdoptionStatus(TrainingJobStatus):
    """What the operator decided and saw. Step, levels, goodput: at most every 10 s."""

    injection: Annotated[
        InjectionStatus | None,
        Field(
            description="What pods get at admission. Absent: pods with the label are refused, and "
            "condition Accepted says why."
        ),
    ] = None
    pods: Annotated[
        tuple[AdoptedPod, ...],
        Field(
            max_length=MAX_WORKERS,
            description="Pods that have started as workers, by worker index.",
        ),
    ] = ()

    def recorded(self, worker: Worker, birth: RestartRound) -> str | None:
        """Return the uid of the worker's pod, or None if no pod of this birth round has started."""
        found = (p.uid for p in self.pods if (p.worker, p.birth) == (worker, birth))
        return next(found, None)


class CheckpointAdoption(ApiObject):
    """A gang whose pods another controller creates, such as a Job, a JobSet or a TrainJob."""

    model_config = ConfigDict(json_schema_extra=cel_rules(NAME_OF_GANG))

    KIND: ClassVar[str] = "CheckpointAdoption"
    PLURAL: ClassVar[str] = "checkpointadoptions"
    SHORT_NAME: ClassVar[str] = "cka"

    api_version: Literal["holdfast.dev/v1alpha1"] = "holdfast.dev/v1alpha1"
    kind: Literal["CheckpointAdoption"] = "CheckpointAdoption"
    spec: CheckpointAdoptionSpec
    status: CheckpointAdoptionStatus = CheckpointAdoptionStatus()

    @property
    def uid(self) -> JobUid:
        return JobUid(self.metadata.uid)


Gang = TrainingJob | CheckpointAdoption
"""An object whose gang the operator keeps alive."""

GANGS: tuple[type[TrainingJob], type[CheckpointAdoption]] = (TrainingJob, CheckpointAdoption)
"""The kinds of such objects."""


def with_status(gang: Gang, status: TrainingJobStatus) -> Gang:
    """Return the object with this status, which was derived from its own."""
    changes: Mapping[str, Any] = {"status": status}
    return changed(gang, **changes)
