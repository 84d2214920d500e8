"""What every API model shares: camelCase names in JSON, snake_case in Python, unknown fields ignored.

The operator must be able to read objects of a newer version of the CRDs, so the models ignore fields that
they do not know. `strict` is for those who write objects (tests, examples, the CLI). The models of
Kubernetes' own metadata have only the parts that Holdfast reads or writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from holdfast_core.clock import parse_stamp, stamp
from holdfast_core.errors import ConfigError
from holdfast_core.names import GROUP

__all__ = [
    "API_VERSION",
    "CATEGORY",
    "GROUP",
    "VERSION",
    "ApiModel",
    "Timestamp",
    "changed",
    "merge_patch",
    "stamp",
    "strict",
]

VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "holdfast"

MAX_STAMP_CHARACTERS = 40


def _read_stamp(value: Any) -> Any:
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str) or len(value) > MAX_STAMP_CHARACTERS:
        raise ValueError(
            f"a time stamp is RFC 3339 text of up to {MAX_STAMP_CHARACTERS} characters"
        )
    return parse_stamp(value)


Timestamp = Annotated[
    datetime,
    BeforeValidator(_read_stamp),
    PlainSerializer(stamp, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "maxLength": MAX_STAMP_CHARACTERS, "format": "date-time"}),
]
"""A moment in UTC. In JSON it is RFC 3339 with whole seconds, as Kubernetes writes it."""


class ApiModel(BaseModel):
    """Base of all models of `holdfast.dev/v1alpha1`. Models are immutable; `changed` makes a copy."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=False,
    )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse what the API server sent; raises pydantic.ValidationError."""
        return cls.model_validate(data)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, camelCase, without absent (None) fields; an empty object stays `{}`."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


if TYPE_CHECKING:
    from dataclasses import replace as changed  # PEP 681: the type checker checks the changes
else:

    def changed(model, **changes):
        """Return a copy of the model with other values of these fields. An unknown name is a TypeError.

        The values are not validated: a status may hold details that a sidecar reported, and the API server
        judges them. An error here would end every pass over the job.
        """
        if not changes.keys() <= model.__dict__.keys():
            unknown = ", ".join(sorted(changes.keys() - model.__dict__.keys()))
            raise TypeError(f"{type(model).__name__} has no field {unknown}")
        return model.model_copy(update=changes)


def merge_patch(model: ApiModel) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7386) that writes every field of the model.

    A field that is None becomes null, which removes it. Fields that a newer version added are not in the
    patch and stay. A list is replaced as a whole, so its items contain no nulls: the server would keep them.
    """
    patch: dict[str, Any] = model.model_dump(mode="json", by_alias=True)
    return {name: _within_patch(value) for name, value in patch.items()}


def _within_patch(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _within_patch(item) for name, item in value.items()}
    return _without_none(value)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_none(item) for item in value]
    return value  # also a list of numbers, such as the members of a large gang


M = TypeVar("M", bound=ApiModel)


def strict(model: type[M], data: Mapping[str, Any]) -> M:
    """Parse `data`, refusing unknown fields at every depth (spec.template excepted).

    Raises ConfigError that names each field, the value found and what was expected. Rules that span
    fields are the API server's (CEL in the CRD).
    """
    try:
        return model.model_validate(data, extra="forbid")
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}"
            + ("" if e["type"] == "missing" else f", found {e['input']!r}")
            for e in error.errors(include_url=False)
        ]
        raise ConfigError(
            f"{model.__name__} is not valid: {'; '.join(lines)}. "
            f"`kubectl explain {model.__name__.lower()} --recursive` lists the fields"
        ) from error


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
        max_length=32,
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
