"""Checkpoint: one committed step of a job, as people see it.

A projection of the commit in TrainingJob.status, made by the operator after it; created by a person
with `spec.jobRef` only it is a request to save now.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_serializer, field_validator

from holdfast_core.api.base import (
    ApiModel,
    ApiObject,
    Conditions,
    NameRef,
    Timestamp,
    WithConditions,
)
from holdfast_core.api.checkpoint_policy import WhenDeleted
from holdfast_core.api.rules import cel_rules, remedy, rule, size_text
from holdfast_core.api.training_job_status import DigestField, RoundField
from holdfast_core.contract import MAX_DRILL_RANKS
from holdfast_core.ids import CheckpointId, JobUid, Step

DAMAGED = "Damaged"
"""Reason of Verified=False, and of Quarantined, where the store has wrong bytes or lacks some."""
MAX_CHECKPOINT_METRICS = 16
"""A job may have thousands of Checkpoint objects, which the operator keeps in memory."""


class DeletionPolicy(StrEnum):
    """What becomes of the data when the object is deleted."""

    DELETE_DATA = "DeleteData"
    RETAIN = "Retain"


class CheckpointPhase(StrEnum):
    """Computed from conditions, for people; never read back."""

    REQUESTED = "Requested"
    IN_PROGRESS = "InProgress"
    COMMITTED = "Committed"
    DELETING = "Deleting"
    FAILED = "Failed"
    """A request to save that will not be fulfilled. Condition Committed=False has the reason."""


class CheckpointCondition(StrEnum):
    """Types of the conditions of a Checkpoint."""

    COMMITTED = "Committed"
    REPLICATED = "Replicated"
    PERSISTED = "Persisted"
    RESTORABLE = "Restorable"
    PINNED = "Pinned"
    QUARANTINED = "Quarantined"
    VERIFIED = "Verified"
    """Absent until the first drill. Unknown: a drill could not read the checkpoint, which is no damage."""


class RequestedDrill(ApiModel):
    """A drill of this checkpoint, as soon as no other drill of its store runs."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "!has(self.worldSize) || self.restore",
                message="verify.worldSize is the number of ranks of verify.restore: set restore to true, or "
                "omit worldSize",
                field_path=".worldSize",
            )
        )
    )

    trigger: Annotated[
        str,
        Field(
            min_length=1,
            max_length=64,
            description="Any text. A change of it requests a drill; status.drill.trigger has it afterwards. "
            "`kubectl holdfast verify` writes the time.",
        ),
    ]
    restore: Annotated[
        bool,
        Field(
            description="true: also assemble the state for another number of ranks, and compare."
        ),
    ] = False
    world_size: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_DRILL_RANKS,
            description="Number of ranks for which the state is assembled. Default: half as many as saved "
            "it, and 2 for one rank.",
            json_schema_extra=remedy("omit it to let the operator choose"),
        ),
    ] = None


class StoredCheckpoint(ApiModel):
    """A checkpoint in an object store, of which this cluster may have no other record."""

    store_ref: Annotated[
        NameRef, Field(description="The CheckpointStore, in the same namespace, that reads it.")
    ]
    job_uid: Annotated[
        JobUid, Field(max_length=64, description="uid of the job that saved it, as in object keys.")
    ]
    job_namespace: Annotated[
        str, Field(max_length=63, description="Namespace of that job, as in object keys.")
    ]
    round: Annotated[RoundField, Field(description="Restart round that saved it.")]
    manifest: Annotated[DigestField, Field(description="BLAKE3 of the manifest, b3:<hex>.")]
    bytes: Annotated[int, Field(ge=0, description="Size of all shards, bytes.")]
    world_size: Annotated[int, Field(ge=1, description="Number of ranks that saved it.")]
    committed_at: Annotated[
        Timestamp | None, Field(description="When its manifest was written, by the store (UTC).")
    ] = None


class CheckpointSpec(ApiModel):
    """Which step of which job, and what to keep. With jobRef alone: a request to save now."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "self.jobRef.name == oldSelf.jobRef.name",
                message="jobRef is immutable: a checkpoint belongs to the job that saved it",
                field_path=".jobRef",
                forbidden=True,
            ),
            rule(
                "!has(oldSelf.step) || (has(self.step) && self.step == oldSelf.step)",
                message="step is immutable once it is set: a checkpoint is one step of its job; "
                "create another Checkpoint to save another step",
                field_path=".step",
                forbidden=True,
            ),
            rule(
                "has(self.stored) == has(oldSelf.stored) && "
                "(!has(self.stored) || self.stored == oldSelf.stored)",
                message="stored is immutable: it says where an imported checkpoint lies; create another "
                "Checkpoint for another one",
                field_path=".stored",
                forbidden=True,
            ),
            rule(
                "!has(self.stored) || has(self.step)",
                message="stored names a checkpoint that exists, so step must say which one it is: set step, "
                "or remove stored to save now",
                field_path=".step",
            ),
        )
    )

    job_ref: Annotated[NameRef, Field(description="The TrainingJob, in the same namespace.")]
    step: Annotated[
        Step | None,
        Field(
            ge=0,
            description=(
                "Optimizer step. Absent: save now; the operator then sets it to the saved step. "
                "At most 16 such requests of a job are open, and further ones fail."
            ),
            json_schema_extra=remedy("omit it to save now"),
        ),
    ] = None
    pin: Annotated[
        bool, Field(description="true: no retention policy removes this checkpoint.")
    ] = False
    deletion_policy: Annotated[
        DeletionPolicy,
        Field(
            description="When this object is deleted: Retain keeps the data in the object store, "
            "DeleteData removes manifest and shards, whatever the state of the job. Chunks that other "
            "checkpoints need stay, and the data of a pinned checkpoint does."
        ),
    ] = DeletionPolicy.RETAIN
    verify: Annotated[
        RequestedDrill | None,
        Field(description="Request to read every byte of it in the object store now."),
    ] = None
    stored: Annotated[
        StoredCheckpoint | None,
        Field(
            description="What an object store has of it, for a checkpoint that this cluster did not save or "
            "no longer knows. `kubectl holdfast import store/NAME` writes it."
        ),
    ] = None


class DrillStatus(ApiModel):
    """The newest drill."""

    ended_at: Annotated[
        Timestamp, Field(description="When it ended, with a result or without (UTC).")
    ]
    trigger: Annotated[
        str,
        Field(
            max_length=64,
            description="spec.verify.trigger of the newest request that was fulfilled.",
        ),
    ] = ""
    bytes: Annotated[int, Field(ge=0, description="Payload bytes that it read and compared.")] = 0
    seconds: Annotated[float, Field(ge=0, description="Seconds that reading took.")] = 0.0
    gib_per_second: Annotated[
        float,
        Field(ge=0, description="Both as GiB/s."),
    ] = 0.0
    world_size: Annotated[
        int | None,
        Field(
            ge=1,
            description="Number of ranks for which it assembled the state. Absent: it did not.",
        ),
    ] = None


class CheckpointStatus(WithConditions):
    """What is known of the checkpoint."""

    phase: Annotated[
        CheckpointPhase | None,
        Field(description="Summary for people, computed from the conditions."),
    ] = None
    manifest: Annotated[
        DigestField | None, Field(description="BLAKE3 of the manifest, b3:<hex>.")
    ] = None
    round: Annotated[RoundField | None, Field(description="Restart round that saved it.")] = None
    job_uid: Annotated[
        JobUid | None, Field(max_length=64, description="uid of the job that saved it.")
    ] = None
    job_namespace: Annotated[
        str | None, Field(max_length=63, description="Namespace of that job, as in object keys.")
    ] = None
    object_uid: Annotated[
        str | None,
        Field(
            max_length=64,
            description="metadata.uid of this object when it recorded a commit of a job of this cluster. A "
            "copy from a backup has another uid, and an imported checkpoint has none here: another cluster "
            "may train from the data, so neither deletes it.",
        ),
    ] = None
    store: Annotated[
        str | None,
        Field(
            max_length=253, description="CheckpointStore that has the data, in the same namespace."
        ),
    ] = None
    when_deleted: Annotated[
        WhenDeleted | None,
        Field(description="retention.whenDeleted of the job, which counts once the job is gone."),
    ] = None
    bytes: Annotated[int | None, Field(ge=0, description="Size of all shards, bytes.")] = None
    size: Annotated[
        str,
        Field(max_length=16, description="The same with a unit, computed, for the SIZE column."),
    ] = ""
    tiers: Annotated[
        int,
        Field(
            ge=0,
            le=3,
            description="Number of tiers to which the step was committed, computed, for the TIERS column: "
            "1 for the nodes that saved it, 1 for copies on other nodes, 1 for the object store. What the "
            "nodes keep of it goes with their pods and by retention.keepLast; condition Restorable says "
            "whether it can be restored now.",
        ),
    ] = 0
    world_size: Annotated[int | None, Field(ge=1, description="Number of ranks that saved it.")] = (
        None
    )
    committed_at: Annotated[
        Timestamp | None, Field(description="When the operator saw it committed (UTC).")
    ] = None
    metrics: Annotated[
        dict[str, float],
        Field(
            max_length=MAX_CHECKPOINT_METRICS,
            description="Values that rank 0 had reported when the step was saved, at most "
            f"{MAX_CHECKPOINT_METRICS} by name, and that of retention.keepBest among them.",
        ),
    ] = Field(default_factory=dict)
    verified_at: Annotated[
        Timestamp | None,
        Field(
            description="When a drill last read it to its end, whatever condition Verified says (UTC)."
        ),
    ] = None
    drill: Annotated[
        DrillStatus | None, Field(description="The newest drill. Absent: there was none.")
    ] = None
    conditions: Conditions = ()
    observed_generation: Annotated[
        int | None, Field(ge=0, description="metadata.generation that this status describes.")
    ] = None

    @field_validator("size", "tiers", mode="before")
    @classmethod
    def _never_read_back(cls, _: Any, info: ValidationInfo) -> Any:
        return "" if info.field_name == "size" else 0

    @field_serializer("size")
    def _size(self, _: str) -> str:
        return size_text(self.bytes)

    @field_serializer("tiers")
    def _tiers(self, _: int) -> int:
        kinds = CheckpointCondition
        return sum(map(self.is_true, (kinds.COMMITTED, kinds.REPLICATED, kinds.PERSISTED)))


class Checkpoint(ApiObject):
    """One committed step of a job; or, created with jobRef alone, a request to save now."""

    KIND: ClassVar[str] = "Checkpoint"
    PLURAL: ClassVar[str] = "checkpoints"
    SHORT_NAME: ClassVar[str] = "ckpt"
    FINALIZER: ClassVar[str] = "holdfast.dev/delete-data"
    """Finalizer that keeps an object with deletionPolicy DeleteData until its data is deleted."""

    api_version: Literal["holdfast.dev/v1alpha1"] = "holdfast.dev/v1alpha1"
    kind: Literal["Checkpoint"] = "Checkpoint"
    spec: CheckpointSpec
    status: CheckpointStatus = CheckpointStatus()

    @property
    def job(self) -> str:
        """Return the name of the job that saved it, or that is asked to save."""
        return self.spec.job_ref.name

    @property
    def id(self) -> CheckpointId | None:
        """Return step and round of the commit, or None for a request to save without a commit yet."""
        if self.spec.step is None or self.status.round is None:
            return None
        return CheckpointId(self.spec.step, self.status.round)

    @property
    def damaged(self) -> bool:
        """Return whether the newest drill that read it to its end found damage in the store."""
        found = self.status.condition(CheckpointCondition.VERIFIED)
        return found is not None and found.is_false and found.reason == DAMAGED

    @property
    def drill_requested(self) -> bool:
        wanted, drill = self.spec.verify, self.status.drill
        return wanted is not None and (drill is None or drill.trigger != wanted.trigger)

    @property
    def awaits_record(self) -> bool:
        """Return whether it was imported from a store, and its status does not say so yet."""
        return self.spec.stored is not None and self.status.phase is None and not self.deleting

    @property
    def saved_here(self) -> bool:
        """Return whether this object recorded the commit, so that its job was one of this cluster."""
        return self.status.object_uid == self.uid

    @property
    def persisted(self) -> bool:
        return self.status.is_true(CheckpointCondition.PERSISTED)

    @property
    def has_finalizer(self) -> bool:
        return self.FINALIZER in self.metadata.finalizers

    @property
    def lacks_finalizer(self) -> bool:
        """Return whether it would go without its data, because a person asked for the deletion of both."""
        wanted = self.spec.deletion_policy is DeletionPolicy.DELETE_DATA and not self.has_finalizer
        committed = self.status.phase is CheckpointPhase.COMMITTED
        return wanted and committed and self.persisted and not self.deleting

    @property
    def deletes_data(self) -> bool:
        """Return whether the data is deleted with the object. The data of a pinned checkpoint stays."""
        return self.spec.deletion_policy is DeletionPolicy.DELETE_DATA and not self.spec.pin
