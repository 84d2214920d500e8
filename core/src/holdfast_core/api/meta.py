"""The parts of Kubernetes' own metadata that Holdfast reads or writes."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from holdfast_core.api.base import ApiModel, Timestamp, changed

_NEVER = datetime.fromtimestamp(0, UTC)


class ObjectMeta(ApiModel):
    """The fields of metadata that Holdfast uses; all others are ignored."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: Timestamp = _NEVER
    """It is 1970 in an object that the API server has not stored."""
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: tuple[str, ...] = ()


class ApiObject(ApiModel):
    """Base of the kinds: metadata, and short names for the parts of it that rules read."""

    metadata: ObjectMeta = ObjectMeta()

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def resource_version(self) -> str:
        return self.metadata.resource_version

    @property
    def generation(self) -> int:
        return self.metadata.generation

    @property
    def created_at(self) -> datetime:
        return self.metadata.creation_timestamp

    @property
    def deleting(self) -> bool:
        return self.metadata.deletion_timestamp is not None


class NameRef(ApiModel):
    """An object of the same namespace, by its name."""

    name: Annotated[
        str, Field(min_length=1, max_length=253, description="Name, in the same namespace.")
    ]


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"

    @classmethod
    def of(cls, value: bool | None) -> ConditionStatus:
        """Return the status of a condition whose named state is true, false or not known (None)."""
        if value is None:
            return cls.UNKNOWN
        return cls.TRUE if value else cls.FALSE


class Condition(ApiModel):
    """A durable truth about an object, as metav1.Condition: True means the named state."""

    type: Annotated[
        str, Field(min_length=1, max_length=64, description="Type of the condition, in CamelCase.")
    ]
    status: Annotated[ConditionStatus, Field(description="True, False or Unknown.")]
    reason: Annotated[
        str, Field(min_length=1, max_length=128, description="Reason, as one CamelCase word.")
    ]
    message: Annotated[
        str, Field(max_length=4096, description="Explanation for people, and what to do.")
    ] = ""
    last_transition_time: Annotated[
        Timestamp, Field(description="When the status last changed (UTC).")
    ]
    observed_generation: Annotated[
        int | None, Field(ge=0, description="metadata.generation that the condition describes.")
    ] = None

    @property
    def is_true(self) -> bool:
        return self.status is ConditionStatus.TRUE

    @property
    def is_false(self) -> bool:
        return self.status is ConditionStatus.FALSE


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=24,
        description="Durable facts about this object, one entry per type.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    ),
]
"""A list-map by type."""


class WithConditions(ApiModel):
    """A status that holds conditions."""

    if TYPE_CHECKING:  # each status declares the field itself, at its place in the CRD
        conditions: Conditions

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of that type, or None if it was never set."""
        return next((c for c in self.conditions if c.type == kind), None)

    def is_true(self, kind: str) -> bool:
        found = self.condition(kind)
        return found is not None and found.is_true

    def with_condition(
        self,
        kind: str,
        value: bool | None,
        reason: str,
        message: str,
        now: datetime,
        generation: int | None = None,
    ) -> Self:
        """Return the status with that condition. Its transition time changes only if its value changes."""
        old, status = self.condition(kind), ConditionStatus.of(value)
        # Not validated: a sidecar may have reported the reason and the message (ApiModel.changed).
        new = Condition.model_construct(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            last_transition_time=now
            if old is None or old.status is not status
            else old.last_transition_time,
            observed_generation=generation,
        )
        if old is None:
            return changed(self, conditions=(*self.conditions, new))
        return changed(self, conditions=tuple(new if c is old else c for c in self.conditions))
