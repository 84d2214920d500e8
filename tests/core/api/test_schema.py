"""The generated schemas are structural, describe every field, and equal those in the repository."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast_core.api.base import ApiModel, ObjectMeta
from holdfast_core.api.crd import KINDS, Kind, crd, structural_schema
from holdfast_core.api.rules import REMEDY, RULES
from holdfast_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
FORBIDDEN = {"$ref", "$defs", "anyOf", "allOf", "oneOf", "const", "title", "nullable", REMEDY}


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def schema_of(kind: Kind) -> dict[str, Any]:
    schema: dict[str, Any] = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


@pytest.fixture(params=KINDS, ids=lambda kind: str(kind.KIND))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def test_nothing_but_structural_keywords(kind: Kind) -> None:
    found = {(path, key) for path, n in nodes(schema_of(kind), "") for key in FORBIDDEN & n.keys()}
    assert found == set()


def test_every_node_has_a_type(kind: Kind) -> None:
    assert [path for path, node in nodes(schema_of(kind), "") if "type" not in node] == []


def test_every_field_of_spec_and_status_has_a_description(kind: Kind) -> None:
    fields = (
        (path, node)
        for part in ("spec", "status")
        for path, node in nodes(schema_of(kind)["properties"][part], part)
        if not path.endswith("[]")
    )
    assert [path for path, node in fields if not node.get("description")] == []


def test_every_rule_names_a_remedy(kind: Kind) -> None:
    rules = [(path, r) for path, n in nodes(schema_of(kind), "") for r in n.get(RULES, ())]
    assert rules
    for path, rule in rules:
        assert ("message" in rule) != ("messageExpression" in rule), path
        assert rule["reason"] in ("FieldValueInvalid", "FieldValueForbidden"), path


def test_lists_are_bounded(kind: Kind) -> None:
    lists = [(p, n) for p, n in nodes(schema_of(kind), "") if n["type"] == "array"]
    assert [path for path, node in lists if "maxItems" not in node] == []


def test_status_has_no_defaults(kind: Kind) -> None:
    status = schema_of(kind)["properties"]["status"]
    assert [path for path, node in nodes(status, "status") if "default" in node] == []


def test_keys_of_list_maps_are_required(kind: Kind) -> None:
    maps = [(p, n) for p, n in nodes(schema_of(kind), "") if "x-kubernetes-list-map-keys" in n]
    assert maps
    for path, node in maps:
        assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), path


class UnionSpec(ApiModel):
    size: int | str


class DescribedUnion(ApiModel):
    """A kind that no CRD can express."""

    metadata: ObjectMeta = ObjectMeta()
    spec: UnionSpec
    status: UnionSpec


def test_a_union_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"spec\.size: a union of 2 types"):
        structural_schema(DescribedUnion)


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
