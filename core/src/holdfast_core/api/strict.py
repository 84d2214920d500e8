"""Reading objects that must hold nothing unknown: tests, examples, what people hand to the CLI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from holdfast_core.api.base import ApiModel
from holdfast_core.errors import ConfigError

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
