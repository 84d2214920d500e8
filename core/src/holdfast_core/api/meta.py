"""The parts of Kubernetes' own metadata that Holdfast reads or writes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from holdfast_core.api.base import ApiModel, Timestamp


class ObjectMeta(ApiModel):
    """The fields of metadata that Holdfast uses; all others are ignored."""

    name: str = ""
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    generation: int | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None
    owner_references: list[dict[str, Any]] | None = None


class NameRef(ApiModel):
    """An object of the same namespace, by its name."""

    name: Annotated[
        str, Field(min_length=1, max_length=253, description="Name, in the same namespace.")
    ]


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


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


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=16,
        description="Durable facts about this object, one entry per type.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    ),
]
"""A list-map by type."""


def condition(conditions: tuple[Condition, ...], type_: str) -> Condition | None:
    """The entry of that type, None where it was never set."""
    return next((c for c in conditions if c.type == type_), None)
