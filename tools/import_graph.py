"""Which Python file of the repository imports which, read from their text without importing them."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

SOURCES = ("core/src", "operator/src", "sidecar/src", "trainer_sdk/src", "cli/src")
"""Folders below the root whose packages ship."""
BESIDE = ("tests", "testbed", "demo", "benchmarks", "tools")
"""Packages below the root that do not ship."""


def modules(root: Path) -> dict[str, Path]:
    """Return the path from the root of each module of the repository, by its dotted name."""
    found: dict[str, Path] = {}
    for top in (*(root / name for name in SOURCES), root):
        below = [root / name for name in BESIDE] if top == root else [top]
        for file in (file for folder in below for file in folder.rglob("*.py")):
            parts = file.relative_to(top).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = file.relative_to(root)
    return found


def importers(root: Path) -> dict[Path, set[Path]]:
    """Return the files that import each file. A name that stands in a package counts as its module's."""
    known = modules(root)
    found: dict[Path, set[Path]] = {}
    for name, path in known.items():
        tree = ast.parse((root / path).read_text(), filename=str(path))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for wanted in _imported(tree, package):
            module = wanted if wanted in known else wanted.rpartition(".")[0]
            if module in known and known[module] != path:
                found.setdefault(known[module], set()).add(path)
    return found


def _imported(tree: ast.Module, package: str) -> Iterable[str]:
    """Return the dotted names that a module imports: `a.b.c` for `from a.b import c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def distances(changed: Iterable[Path], graph: Mapping[Path, set[Path]]) -> dict[Path, int]:
    """Return the number of imports from each file that depends on a changed one to the nearest of them."""
    found = dict.fromkeys(changed, 0)
    waiting = deque(found)
    while waiting:
        file = waiting.popleft()
        for importer in graph.get(file, ()):
            if importer not in found:
                found[importer] = found[file] + 1
                waiting.append(importer)
    return found
