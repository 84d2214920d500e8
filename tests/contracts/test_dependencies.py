"""Each package declares what it imports, and imports what it declares."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools.dependencies import MEMBERS, REASONS, declared, installed, project

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "core": "holdfast_core",
    "operator": "holdfast_operator",
    "sidecar": "holdfast_sidecar",
    "trainer_sdk": "holdfast",
    "cli": "holdfast_cli",
}
DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "yaml": "pyyaml"}
BROUGHT = {"urllib3": ("kubernetes", "minio"), "torchdata": ("torch",)}
"""Imported beside a package that depends on it: its exceptions, or a check of an optional type."""
WITH_A_STORE = frozenset(
    {
        *(f"holdfast.directory.{name}" for name in ("folder_store", "share", "uploads")),
        "holdfast.reading.object_store",
    }
)
"""Modules of the SDK that only a process with an object store imports."""

BESIDE_FRAMEWORKS = {
    "blake3": "1.0.11",
    "crc32c": "2.8",
    "minio": "7.2.20",
    "msgspec": "0.22.0",
    "numpy": "2.1.3",
    "torch": "2.15.0",
    "zstandard": "0.25.0",
}
"""What `make resolve` found for the SDK in one environment with deepspeed 0.19.8, megatron-core 0.19.2,
transformers 4.57.6, mosaicml-streaming 0.13.0 and nvidia-resiliency-ext 0.4.1."""


def modules(member: str) -> dict[str, Path]:
    """Dotted name to file, without test doubles, and without adapters, whose framework a script brings."""
    source = ROOT / member / "src"
    found = {}
    for path in (source / PACKAGES[member]).rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        if not {"testing", "integrations"} & set(parts):
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def first_party() -> dict[str, Path]:
    return {name: path for member in PACKAGES for name, path in modules(member).items()}


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that the file imports when it runs."""
    return frozenset(_imported(ast.parse(path.read_text())))


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case _:
                yield from _imported(child)


def third_party(member: str, *, without: frozenset[str] = frozenset()) -> frozenset[str]:
    """Distributions that the member's modules import, also through core, but not those `without`."""
    known, found = first_party(), set[str]()
    waiting = list(modules(member))
    seen = set(without)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for imported in imports(known[name]):
            top = imported.partition(".")[0]
            if top in PACKAGES.values():
                waiting += [imported] if imported in known else []
            elif top not in sys.stdlib_module_names and top != "__future__":
                found.add(_distribution(top, imports(known[name])))
    return frozenset(found)


def _distribution(top: str, beside: frozenset[str]) -> str:
    """Return the distribution that brings a package to a file with the imports `beside`."""
    brings = BROUGHT.get(top)
    if brings is None:
        return DISTRIBUTIONS.get(top, top)
    names = {name.partition(".")[0] for name in beside}
    return next((one for one in brings if one in names), brings[0])


@pytest.mark.parametrize("member", [m for m in PACKAGES if m != "core"])
def test_what_is_imported_is_installed(member: str) -> None:
    assert third_party(member) <= installed(ROOT, member)


@pytest.mark.parametrize("member", PACKAGES)
def test_what_is_declared_is_imported(member: str) -> None:
    assert set(declared(ROOT, member)) <= third_party(member)


def test_a_training_script_needs_no_store_no_server_and_no_cluster() -> None:
    found = third_party("trainer_sdk", without=WITH_A_STORE)
    assert found == {"blake3", "crc32c", "msgspec", "numpy", "torch"}


def test_each_dependency_has_a_reason() -> None:
    assert {name for member in MEMBERS for name in declared(ROOT, member)} == set(REASONS)


def requirements(member: str) -> list[Requirement]:
    about = project(ROOT, member)
    extras = about.get("optional-dependencies", {}).values()
    return [Requirement(one) for one in [*about["dependencies"], *(r for e in extras for r in e)]]


@pytest.mark.parametrize("member", PACKAGES)
def test_a_package_of_another_project_has_a_lower_bound_and_no_upper_one(member: str) -> None:
    for one in requirements(member):
        if not one.name.startswith("holdfast"):
            assert [bound.operator for bound in one.specifier] == [">="], str(one)


@pytest.mark.parametrize("member", PACKAGES)
def test_members_are_pinned_to_each_other(member: str) -> None:
    for one in requirements(member):
        if one.name.startswith("holdfast"):
            assert str(one.specifier) == f"=={project(ROOT, member)['version']}", str(one)


def test_the_sdk_can_be_installed_beside_the_frameworks() -> None:
    wanted = [*requirements("trainer_sdk"), *requirements("core")]
    bounds = {one.name: one.specifier for one in wanted if not one.name.startswith("holdfast")}
    assert bounds.keys() >= BESIDE_FRAMEWORKS.keys()
    for name, found in BESIDE_FRAMEWORKS.items():
        assert bounds[name].contains(found), f"{name}{bounds[name]} excludes {found}"
