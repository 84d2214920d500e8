"""Each package declares what it imports, and imports what it declares."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tools.dependencies import MEMBERS, REASONS, declared, installed

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "core": "holdfast_core",
    "operator": "holdfast_operator",
    "sidecar": "holdfast_sidecar",
    "trainer_sdk": "holdfast",
    "cli": "holdfast_cli",
}
DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "yaml": "pyyaml"}
BROUGHT = {"urllib3": "kubernetes", "torchdata": "torch"}
"""Imported beside the package that depends on it: its exceptions, or a check of an optional type."""


def modules(member: str) -> dict[str, Path]:
    """Dotted name to file, without test doubles."""
    source = ROOT / member / "src"
    found = {}
    for path in (source / PACKAGES[member]).rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        if "testing" not in parts:
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


def third_party(member: str) -> frozenset[str]:
    """Distributions that the member's modules import, also through core."""
    known, found = first_party(), set()
    waiting = list(modules(member))
    seen: set[str] = set()
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
                found.add(BROUGHT.get(top, DISTRIBUTIONS.get(top, top)))
    return frozenset(found)


@pytest.mark.parametrize("member", [m for m in PACKAGES if m != "core"])
def test_what_is_imported_is_installed(member: str) -> None:
    assert third_party(member) <= installed(ROOT, member)


@pytest.mark.parametrize("member", PACKAGES)
def test_what_is_declared_is_imported(member: str) -> None:
    assert set(declared(ROOT, member)) <= third_party(member)


def test_a_training_script_needs_no_store_no_server_and_no_cluster() -> None:
    assert third_party("trainer_sdk") == {"blake3", "crc32c", "msgspec", "numpy", "torch"}


def test_each_dependency_has_a_reason() -> None:
    assert {name for member in MEMBERS for name in declared(ROOT, member)} == set(REASONS)
