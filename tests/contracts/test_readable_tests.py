"""Rules that keep the tests readable: each file can be understood without another test file, and tests look
at what a product object does and not into it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import file_order

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
LOOKING_INSIDE = {
    "tests/trainer_sdk/slots/test_device.py": "asks CUDA whether the ring's slots are page-locked",
    "tests/trainer_sdk/test_checkpointer_sidecar.py": "waits until a rank has received a request",
    "tests/support/trainer/device_training.py": "gives a Checkpointer a device that is no GPU",
}
"""Files that still read private attributes of product objects, and why. Do not add a file: a test that needs
the state of an object reads what a user or another process can see of it."""
OF_LIBRARIES = frozenset(
    {
        "_exit",
        "_run_exitfuncs",
        "_run_module_as_main",
        "_shutdown",
        "_sleep",
        "_version",
        "_StridedShard",
        "_start_workers",
        "_load_from_state_dict",
        "_get_cuda_rng_state",
        "_set_cuda_rng_state",
    }
)
"""Names of Python, torch and Megatron that have no public counterpart."""
USERS = ("tests", "testbed", "demo", "benchmarks", "tools")


@cache
def sources() -> dict[str, ast.Module]:
    """Return the parsed files that may use a module of the tests, by their path below the repository."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for folder in USERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if ".venv" not in path.parts  # of the peers, which `make bench-peers` creates
    }


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of all modules, and of what is imported from them."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)


def test_no_module_imports_a_test_module() -> None:
    """Builders that two files share belong to tests/support, or to a conftest of the folder."""
    found = {
        path
        for path, tree in sources().items()
        for name in imported(tree)
        if name.startswith("tests.") and name.split(".")[-1].startswith("test_")
    }
    assert found == set()


def test_every_module_of_support_is_used() -> None:
    """Some module imports it, or a test starts it as a program."""
    names = {name for tree in sources().values() for name in imported(tree)}
    texts = [
        node.value
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    unused = []
    for path in sorted((TESTS / "support").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name == "__init__.py" or module in names:
            continue
        if not any(module in text or path.name in text for text in texts):
            unused.append(module)
    assert unused == []


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private attributes that the module reads on objects of other modules."""
    defined = {
        name
        for node in ast.walk(tree)
        for name in (
            getattr(node, "name", None),
            node.attr
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            else None,
        )
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if name.startswith("_") and not name.endswith("__"):
                if name not in defined | OF_LIBRARIES:
                    yield name
            case ast.ImportFrom(names=names):
                yield from (
                    alias.name
                    for alias in names
                    if alias.name.startswith("_") and alias.name not in OF_LIBRARIES
                )


def test_tests_do_not_read_private_attributes() -> None:
    found = {
        path
        for path, tree in sources().items()
        if path.startswith("tests/") and any(private_names(tree))
    }
    assert found == set(LOOKING_INSIDE)


def test_files_with_a_time_exist() -> None:
    known = json.loads(file_order.FILE.read_text())
    assert [path for path in known if not (TESTS / path).is_file()] == []
