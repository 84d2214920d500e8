"""The statuses hold what somebody reads (ADR 0001), and their columns show it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from holdfast_core.api import (
    Checkpoint,
    CheckpointAdoption,
    CheckpointGrant,
    CheckpointStore,
    TrainingJob,
)
from holdfast_core.api.crd import KINDS, Kind, crd

LIMITS = {
    TrainingJob: 80,
    CheckpointAdoption: 97,
    Checkpoint: 24,
    CheckpointStore: 47,
    CheckpointGrant: 1,
}
"""Largest number of fields of the status of each kind, those that hold others included. Conditions count as
one field. A change that adds a field takes another one out, or raises the number and says who reads it. Those
of a TrainingJob have their readers in contracts/test_status_readers.py. Of those of a Checkpoint, store and
whenDeleted are read when its job is gone (decide/deletions.py), tiers is a column, and those of drills are
read by the operator (decide/drills.py) and by `kubectl holdfast verify`. Of a CheckpointStore, 30 are usage
and reached limits: people read them, metrics show them, and the passes over jobs use the limits."""


def version(kind: Kind) -> dict[str, Any]:
    found: dict[str, Any] = crd(kind)["spec"]["versions"][0]
    return found


def paths(schema: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield the paths of all fields of a schema. The fields of conditions are those of Kubernetes."""
    for name, field in schema.get("properties", {}).items():
        yield f"{prefix}.{name}"
        if name != "conditions":
            yield from paths(field.get("items", field), f"{prefix}.{name}")


def through_each_name(column: str) -> Iterator[set[str]]:
    """Yield the paths through each name of a column such as .spec['a','b']['c'], one of which must exist."""
    root, _, rest = column.partition("['")
    groups = [group.split("','") for group in rest.removesuffix("']").split("']['")] if rest else []
    for name in (name for group in groups for name in group):
        yield {".".join((root, *path)) for path in product(*groups) if name in path}
    if not groups:
        yield {root.partition("[")[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_status_has_no_more_fields_than_have_readers(kind: Kind) -> None:
    status = version(kind)["schema"]["openAPIV3Schema"]["properties"]["status"]
    assert len(list(paths(status, "status"))) <= LIMITS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_each_column_shows_a_field_of_the_schema(kind: Kind) -> None:
    schema = version(kind)["schema"]["openAPIV3Schema"]
    known = {
        p for part in ("spec", "status") for p in paths(schema["properties"][part], f".{part}")
    }
    columns = [c["jsonPath"] for c in version(kind)["additionalPrinterColumns"]]
    shown = [found for c in columns for found in through_each_name(c) if ".metadata" not in c]
    assert [found for found in shown if not found & known] == []


def test_the_table_of_checkpoints_says_whether_the_store_has_them() -> None:
    """A count of shards by tier was always 0/0/0 and the number of ranks. Tiers counts commits."""
    columns = {c["name"]: c["jsonPath"] for c in version(Checkpoint)["additionalPrinterColumns"]}
    assert list(columns) == [
        "Job",
        "Step",
        "Phase",
        "Tiers",
        "Persisted",
        "Restorable",
        "Size",
        "Verified",
        "Pinned",
        "Age",
    ]
    assert columns["Persisted"] == '.status.conditions[?(@.type=="Persisted")].status'
