"""What every API model shares: camelCase outside, snake_case in Python, unknown ones ignored.

The operator must be able to read objects of a newer version of the CRDs, so the models ignore
what they do not know; `strict.py` is for those who write objects (tests, examples, the CLI).
May import ids and pydantic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "holdfast.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "holdfast"

Timestamp = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC, as `holdfast_core.clock.stamp` writes it."""


class ApiModel(BaseModel):
    """Base of all models of `holdfast.dev/v1alpha1`. Immutable: change one with `model_copy`."""

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
