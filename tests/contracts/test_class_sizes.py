"""A class has at most 25 methods and 15 fields, so that one screen shows what it holds.

A larger class stands in a table with the reason. Classes of plain data share the sentence of their kind.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEMBERS = ("core", "operator", "sidecar", "trainer_sdk", "cli")
MOST_METHODS = 25
MOST_FIELDS = 15

API_OBJECT = "It is an object of the API, and has one field for each field of the CRD."
MESSAGE = "It is a message, and has one field for each thing that the receiver needs."
SETTINGS = "It is the settings, and has one field for each option."
METRICS = "It is the metrics of a process, and has one field for each metric."
VIEW = "It is a plain view, and has one field for each thing that a decision reads."
WIRING = "It wires the parts of its process once, and has one field for each part that it starts or stops."

ALLOWED = {
    "cli.Findings": VIEW,
    "core.CheckpointStatus": API_OBJECT,
    "core.CoordinatorState": MESSAGE,
    "core.Round": MESSAGE,
    "core.TrainingJobStatus": API_OBJECT,
    "core.WorkerReport": MESSAGE,
    "core.ObjectTier": "It has one method for each operation on shards and documents of jobs in a store.",
    "operator.ClusterCache": "It has a field and a method for the copies of each kind of object.",
    "operator.Controller": WIRING,
    "operator.JobCalls": "It is the state of the calls to the sidecars of one job.",
    "operator.JobMemory": "It has one field for each thing that passes over a job remember.",
    "operator.Metrics": METRICS,
    "operator.Observed": VIEW,
    "operator.PodView": VIEW,
    "operator.Reflector": "A watch and its list change the same copies, versions and times of contact.",
    "operator.Settings": SETTINGS,
    "operator.World": "It has one property for each fact that several policies use.",
    "sidecar.Flow": "It runs each kind of action on the table of own shards, and notes its reply there.",
    "sidecar.Gathered": "It collects each kind of report of the gang for one round.",
    "sidecar.Metrics": METRICS,
    "sidecar.Settings": SETTINGS,
    "sidecar.Sidecar": WIRING,
    "sidecar.GangUploads": "One machine decides which uploads run, wait and are repeated.",
    "trainer_sdk.CheckpointDescription": "It has one field for each thing that a checkpoint says of itself.",
    "trainer_sdk.Checkpointer": "It is the public interface of the SDK: training scripts call its methods.",
    "trainer_sdk.FolderPlace": "It offers each operation of a place of checkpoints for a folder.",
    "trainer_sdk.FolderStart": "A start keeps what was asked for, rejected, skipped and agreed on.",
    "trainer_sdk.ServiceOptions": SETTINGS,
    "trainer_sdk.FolderUploads": "One machine decides which uploads of a folder run, wait and are repeated.",
}
"""Larger classes by package and name, with the reason. A class leaves this table when it has become small."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for member in MEMBERS:
        for path in (ROOT / member / "src").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield f"{member}.{node.name}", node


def functions_of(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def methods_of(node: ast.ClassDef) -> set[str]:
    return {f.name for f in functions_of(node)}


def fields_of(node: ast.ClassDef) -> set[str]:
    """Return the fields that the class declares and those that its methods assign."""
    declared = {
        n.target.id
        for n in node.body
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and "ClassVar" not in ast.unparse(n.annotation)
    }
    return declared | {
        n.attr
        for function in functions_of(node)
        for n in ast.walk(function)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }


def large() -> dict[str, str]:
    return {
        name: f"{len(methods_of(node))} methods and {len(fields_of(node))} fields"
        for name, node in classes()
        if len(methods_of(node)) > MOST_METHODS or len(fields_of(node)) > MOST_FIELDS
    }


def test_a_class_is_small_or_says_why_not() -> None:
    found = large()
    assert {name: found[name] for name in sorted(found.keys() - ALLOWED.keys())} == {}, (
        "split the class by what changes together, or name the reason in the table"
    )


def test_no_exception_is_left_over() -> None:
    assert sorted(ALLOWED.keys() - large().keys()) == []


def test_methods_and_fields_are_counted() -> None:
    (node,) = ast.parse(
        "class Example:\n"
        "    declared: int\n"
        "    shared: ClassVar[int] = 1\n"
        "    def __init__(self): self.assigned = 1; self.also: int = 2\n"
        "    async def run(self): self.assigned = 2; other.field = 3\n"
        "    @property\n"
        "    def value(self): return self.also\n"
        "    @value.setter\n"
        "    def value(self, new): self.also = new\n"
    ).body
    assert isinstance(node, ast.ClassDef)
    assert methods_of(node) == {"__init__", "run", "value"}
    assert fields_of(node) == {"declared", "assigned", "also"}
