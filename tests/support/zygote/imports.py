"""The modules that a program imports, found in its text."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = {
    "holdfast": "trainer_sdk/src",
    "holdfast_core": "core/src",
    "holdfast_sidecar": "sidecar/src",
    "holdfast_operator": "operator/src",
    "holdfast_cli": "cli/src",
    "tests": ".",
}
"""Packages of this repository, whose modules are searched for further imports."""
_FORK_SERVER = "holdfast.launcher.forkserver"
_OTHERS = frozenset({"torch", "numpy"})
_OF_OPTIMIZERS = "torch._dynamo"
"""torch imports it, with 900 further modules, when a program creates its first optimizer: 1.4 CPU seconds."""
_NOT_PRELOADED = "tests"
"""A program imports test modules itself, but not again what those import."""


def preloads(arguments: Sequence[str], directory: str) -> tuple[str, ...]:
    """Return the modules of Holdfast, torch and numpy that the program imports, in their order.

    For a module of Holdfast, what it imports within functions counts too: the sidecar's `__main__` imports
    its application there. Modules that the found ones import at their top are imported with them.
    """
    found: dict[str, None] = {}
    for name in _of_program(arguments, directory):
        top = name.partition(".")[0]
        if top == _NOT_PRELOADED:
            found.update(dict.fromkeys(_of_test_module(name)))
        else:
            found[name] = None
    if any(name.partition(".")[0] == "torch" for name in found):
        found[_OF_OPTIMIZERS] = None
    return tuple(name for name in found if name.partition(".")[0] in _OTHERS | set(_PACKAGES))


def _of_program(arguments: Sequence[str], directory: str) -> tuple[str, ...]:
    kind, *rest = arguments
    if kind == "-c":
        return tuple(_imported(rest[0]))
    if kind != "-m":
        file = Path(directory, kind)
        return tuple(_imported(file.read_text())) if file.is_file() else ()
    if rest[0] == _FORK_SERVER:
        return (*_of_main(rest[0]), "holdfast", *rest[2:])  # the launcher names what it preloads
    return _of_main(rest[0])


@functools.cache
def _of_main(module: str) -> tuple[str, ...]:
    file = _file(module, "__main__.py")
    found = _of_file(file) if file is not None else ()
    called = [name for name in found if name.endswith(".__main__")]
    return (*found, *(name for one in called for name in _of_main(one)))


@functools.cache
def _of_file(file: Path) -> tuple[str, ...]:
    return tuple(_imported(file.read_text()))


@functools.cache
def _of_test_module(name: str) -> tuple[str, ...]:
    """Return what a module of the tests, and the modules of the tests that it imports, import."""
    found: dict[str, None] = {}
    waiting, seen = [name], set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        file = _file(module, "__init__.py")
        for imported in _of_file(file) if file is not None else ():
            if imported.partition(".")[0] == _NOT_PRELOADED:
                waiting.append(imported)
            else:
                found[imported] = None
    return tuple(found)


def _file(module: str, of_package: str) -> Path | None:
    root = _PACKAGES.get(module.partition(".")[0])
    if root is None:
        return None
    path = _ROOT / root / Path(*module.split("."))
    for file in (path.with_suffix(".py"), path / of_package):
        if file.is_file():
            return file
    return None


def _imported(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
