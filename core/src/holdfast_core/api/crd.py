"""The CustomResourceDefinitions from the models: names, columns and structural schema. Pure.

The schema comes from pydantic's JSON schema. Kubernetes refuses $ref, unions and a good part of JSON schema;
what cannot be said structurally is refused here, with its path, instead of at `kubectl apply`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_core.api.base import CATEGORY, GROUP, VERSION, ApiModel
from holdfast_core.api.checkpoint import Checkpoint
from holdfast_core.api.checkpoint_adoption import CheckpointAdoption
from holdfast_core.api.checkpoint_grant import CheckpointGrant
from holdfast_core.api.checkpoint_store import CheckpointStore
from holdfast_core.api.rules import REMEDY, RULES, bounds
from holdfast_core.api.training_job import TrainingJob
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


Kind = (
    type[TrainingJob]
    | type[Checkpoint]
    | type[CheckpointStore]
    | type[CheckpointAdoption]
    | type[CheckpointGrant]
)

KINDS: tuple[Kind, ...] = (
    TrainingJob,
    Checkpoint,
    CheckpointStore,
    CheckpointAdoption,
    CheckpointGrant,
)
"""Every kind of the API, in the order in which documents list them."""


def _column(
    name: str, type_: str, path: str, description: str, *, wide: bool = False
) -> dict[str, Any]:
    column: dict[str, Any] = {
        "name": name,
        "type": type_,
        "jsonPath": path,
        "description": description,
    }
    return {**column, "priority": 1} if wide else column


_AGE = _column("Age", "date", ".metadata.creationTimestamp", "Time since it was created.")

_GANG_COLUMNS = (
    _column("Phase", "string", ".status.phase", "Summary of the conditions."),
    _column(
        "Reason",
        "string",
        '.status.conditions[?(@.type=="Running")].reason',
        "Why the gang runs or does not. `kubectl describe` shows the whole sentence.",
    ),
    _column("Step", "integer", ".status.step", "Newest step that was trained."),
    _column("Committed", "integer", ".status.lastCommittedStep", "Newest local commit."),
    _column("Persisted", "integer", ".status.lastPersisted.step", "Newest step in the store."),
    _column(
        "Workers",
        "string",
        ".status.readyWorkers",
        "Workers that train or have finished, of all workers.",
    ),
    _column("Restarts", "integer", ".status.restarts", "Restarts of the gang."),
    _column(
        "Goodput",
        "number",
        ".status.goodput.ratio",
        "Share of time spent on training that no failure undid.",
    ),
    _column("Replicated", "integer", ".status.lastReplicatedStep", "Newest copied.", wide=True),
    _column("Round", "integer", ".status.restartRound", "Current restart round.", wide=True),
    _AGE,
)

_COLUMNS: dict[str, tuple[dict[str, Any], ...]] = {
    TrainingJob.KIND: _GANG_COLUMNS,
    CheckpointAdoption.KIND: _GANG_COLUMNS,
    Checkpoint.KIND: (
        _column("Job", "string", ".spec.jobRef.name", "The TrainingJob."),
        _column("Step", "integer", ".spec.step", "Optimizer step."),
        _column("Phase", "string", ".status.phase", "Summary of the conditions."),
        _column(
            "Tiers",
            "integer",
            ".status.tiers",
            "Tiers to which it was committed: nodes, copies on other nodes, object store.",
        ),
        _column(
            "Persisted",
            "string",
            '.status.conditions[?(@.type=="Persisted")].status',
            "Whether all shards and the manifest are in the object store.",
        ),
        _column(
            "Restorable",
            "string",
            '.status.conditions[?(@.type=="Restorable")].status',
            "Whether the job could restore it now.",
        ),
        _column("Size", "string", ".status.size", "Size of all shards."),
        _column(
            "Verified",
            "string",
            '.status.conditions[?(@.type=="Verified")].status',
            "Whether the newest drill found every byte in the object store as it was saved.",
        ),
        _column(
            "Pinned",
            "boolean",
            ".spec.pin",
            "Whether it is kept regardless of the retention policy.",
            wide=True,
        ),
        _AGE,
    ),
    CheckpointGrant.KIND: (
        _column("From", "string", ".spec.from[*].namespace", "Namespaces of the jobs."),
        _column("To", "string", ".spec.to[*].name", "Checkpoints. Empty: all of this namespace."),
        _AGE,
    ),
    CheckpointStore.KIND: (
        _column(
            "Endpoint",
            "string",
            ".spec['s3','azure','google']['endpoint','account']",
            "URL of the server, or the account of Azure.",
        ),
        _column(
            "Bucket",
            "string",
            ".spec['s3','azure','google']['bucket','container']",
            "Name of the bucket, or of the container of Azure.",
        ),
        _column(
            "Available",
            "string",
            '.status.conditions[?(@.type=="Available")].status',
            "Whether the newest probe succeeded.",
        ),
        _column(
            "Reason",
            "string",
            '.status.conditions[?(@.type=="Available")].reason',
            "Reason why it is available or not.",
            wide=True,
        ),
        _column("Size", "string", ".status.usage.size", "Bytes of all objects."),
        _column(
            "Pressure",
            "string",
            '.status.conditions[?(@.type=="QuotaPressure")].status',
            "Whether at least 80 % of the quota are used.",
        ),
        _AGE,
    ),
}


def crd(kind: Kind) -> dict[str, Any]:
    """Return the CustomResourceDefinition of one kind. Raises ConfigError if a CRD cannot express it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.KIND,
                "listKind": f"{kind.KIND}List",
                "plural": kind.PLURAL,
                "singular": kind.KIND.lower(),
                "shortNames": [kind.SHORT_NAME],
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": list(_COLUMNS[kind.KIND]),
                    "schema": {"openAPIV3Schema": structural_schema(kind)},
                }
            ],
        },
    }
