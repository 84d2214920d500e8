"""The CustomResourceDefinitions, whole, from the models: names, columns, schema. Pure."""

from __future__ import annotations

from typing import Any

from holdfast_core.api.base import CATEGORY, GROUP, VERSION
from holdfast_core.api.checkpoint import Checkpoint
from holdfast_core.api.checkpoint_adoption import CheckpointAdoption
from holdfast_core.api.checkpoint_store import CheckpointStore
from holdfast_core.api.schema import structural_schema
from holdfast_core.api.training_job import TrainingJob

Kind = type[TrainingJob] | type[Checkpoint] | type[CheckpointStore] | type[CheckpointAdoption]

KINDS: tuple[Kind, ...] = (TrainingJob, Checkpoint, CheckpointStore, CheckpointAdoption)
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
            "Persisted",
            "string",
            '.status.conditions[?(@.type=="Persisted")].status',
            "Whether all shards and the manifest are in the object store.",
        ),
        _column("Size", "string", ".status.size", "Size of all shards."),
        _column(
            "Pinned",
            "boolean",
            ".spec.pin",
            "Whether it is kept regardless of the retention policy.",
            wide=True,
        ),
        _AGE,
    ),
    CheckpointStore.KIND: (
        _column("Endpoint", "string", ".spec.s3.endpoint", "URL of the server."),
        _column("Bucket", "string", ".spec.s3.bucket", "Name of the bucket."),
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
