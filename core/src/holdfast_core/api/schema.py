"""pydantic's JSON schema -> the structural schema that a CustomResourceDefinition takes.

Kubernetes refuses $ref, unions and a good part of JSON schema; what cannot be said structurally is
refused here, with its path, instead of at `kubectl apply`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_core.api.base import ApiModel
from holdfast_core.api.rules.cel import REMEDY, RULES, bounds
from holdfast_core.errors import ConfigError

_ORDER = (
    "type",
    "format",
    "description",
    "default",
    "enum",
    "pattern",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
    RULES,
    "required",
    "properties",
    "items",
    "additionalProperties",
)
"""What a structural schema may hold, in the order in which it is written."""
_RULE_ORDER = ("rule", "message", "messageExpression", "fieldPath", "reason")
_DROPPED = frozenset({"title", "$defs", REMEDY})


def structural_schema(model: type[ApiModel]) -> dict[str, Any]:
    """openAPIV3Schema of a kind (a model with metadata, spec and status).

    metadata is the API server's own, so only its type stays. status keeps no defaults: absent means
    none yet. Raises ConfigError that names the path of what a CRD cannot say.
    """
    raw = model.model_json_schema(by_alias=True, mode="validation")
    walker = _Walker(raw.get("$defs", {}))
    properties = raw["properties"]
    schema: dict[str, Any] = {
        "type": "object",
        "description": _one_line(raw["description"]),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": walker.walk(properties["spec"], ("spec",)),
            "status": _without_defaults(walker.walk(properties["status"], ("status",))),
        },
    }
    if RULES in raw:
        schema[RULES] = raw[RULES]
    return schema


class _Walker:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions

    def walk(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        flat = self._flatten(schema, path)
        if "const" in flat:
            flat["enum"] = [flat.pop("const")]
            flat.setdefault("type", "string")
        self._bounds(flat, path)
        if flat.get("additionalProperties") is False:
            del flat["additionalProperties"]
        if "default" in flat:
            flat["default"] = _without_none(flat["default"])
            if flat["default"] is None or flat["default"] == []:
                del flat["default"]
        if "description" in flat:
            flat["description"] = _one_line(flat["description"])
        if flat.get("type") == "integer":
            flat.setdefault("format", "int64")
        if "properties" in flat:
            flat["properties"] = {
                name: self.walk(child, (*path, name)) for name, child in flat["properties"].items()
            }
        for key in ("items", "additionalProperties"):
            if isinstance(flat.get(key), dict):
                flat[key] = self.walk(flat[key], (*path, "*"))
        for name in _DROPPED & flat.keys():
            del flat[name]
        if unknown := sorted(flat.keys() - set(_ORDER)):
            raise ConfigError(
                f"{'.'.join(path)}: a CRD's schema cannot contain {', '.join(unknown)}; express it "
                "in another way in the model"
            )
        if RULES in flat:
            flat[RULES] = [_ordered(entry, _RULE_ORDER) for entry in flat[RULES]]
        return _ordered(flat, _ORDER)

    def _flatten(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """Inline $ref and fold Optional; what stands beside them wins over what they name."""
        flat = dict(schema)
        while True:
            if "$ref" in flat:
                name = flat.pop("$ref").rsplit("/", 1)[-1]
                flat = {**self._definitions[name], **flat}
            elif "allOf" in flat and len(flat["allOf"]) == 1:
                [only] = flat.pop("allOf")
                flat = {**only, **flat}
            elif "anyOf" in flat:
                options = [o for o in flat.pop("anyOf") if o != {"type": "null"}]
                if len(options) != 1:
                    raise ConfigError(
                        f"{'.'.join(path)}: a union of {len(options)} types cannot be expressed in "
                        "a CRD; use one optional field for each type"
                    )
                flat = {**options[0], **flat}
            else:
                return flat

    def _bounds(self, flat: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if key in flat:
                flat[bound] = flat.pop(key)
                flat[key] = True
        if REMEDY in flat:
            # As a rule of CEL, because the server's own message for `minimum` names no remedy.
            field = ".".join(part for part in path if part not in ("spec", "*"))
            entry = bounds(
                field, flat.pop("minimum", None), flat.pop("maximum", None), flat[REMEDY]
            )
            flat[RULES] = [entry, *flat.get(RULES, [])]


def _ordered(mapping: Mapping[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
    return {key: mapping[key] for key in order if key in mapping}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None and v != []}
    return value


def _without_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in schema.items() if k != "default"}
    if "properties" in kept:
        kept["properties"] = {k: _without_defaults(v) for k, v in kept["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = _without_defaults(kept[key])
    return kept


def _one_line(text: str) -> str:
    return " ".join(text.split())
