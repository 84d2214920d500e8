"""`import holdfast` is cheap: it imports neither torch nor Kubernetes."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

FORBIDDEN = ("torch", "kubernetes", "kopf", "minio", "aiohttp", "pydantic")


@pytest.mark.parametrize(
    "module", ["holdfast", "holdfast.__main__", "holdfast.directory.persister"]
)
def test_an_import_loads_no_large_package(module: str) -> None:
    program = f"import {module}, sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(FORBIDDEN) & set(done.stdout.split())


def test_a_name_is_imported_at_its_first_use() -> None:
    program = (
        "import holdfast, sys\n"
        "def loaded(): return 'holdfast.checkpointer' in sys.modules\n"
        "print(loaded(), holdfast.Checkpointer.__name__, loaded())\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "Checkpointer", "True"]


def typed_names() -> dict[str, object]:
    """Return the public names that a type checker sees, and what they stand for."""
    found: dict[str, object] = {}
    (block, *_) = (
        node
        for node in ast.parse(Path(holdfast.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            module = importlib.import_module(node.module)
            found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def test_all_public_names_are_those_that_a_type_checker_sees() -> None:
    assert set(holdfast.__all__) == set(typed_names())
    assert set(holdfast.__all__) <= set(dir(holdfast))
    assert {name: getattr(holdfast, name) for name in holdfast.__all__} == typed_names()


def test_a_star_import_yields_all_public_names() -> None:
    names: dict[str, object] = {}
    exec("from holdfast import *", names)
    del names["__builtins__"]
    assert names == typed_names()


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'Chekpointer'"):
        holdfast.Chekpointer  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_command_prints_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("holdfast ")
