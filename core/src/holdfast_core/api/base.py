"""What every API model shares: camelCase names in JSON, snake_case in Python, unknown fields ignored.

The operator must be able to read objects of a newer version of the CRDs, so the models ignore fields that
they do not know. `strict` is for those who write objects (tests, examples, the CLI).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
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
