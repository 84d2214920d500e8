"""A class name stands for one thing in all packages. The exceptions are listed with their reasons."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEMBERS = ("core", "operator", "sidecar", "trainer_sdk", "cli")
ALLOWED = {
    "Failure": "The operator observes failures, and a sidecar's message reports some.",
    "Metrics": "Operator and sidecar each have the metrics of their process.",
    "RestorePoint": "A public name of the SDK, and the messages' word for the checkpoint.",
    "Session": "A rank's exchange with its sidecar, and one command of the command line.",
    "Settings": "Operator and sidecar each have the settings of their process.",
}
"""Names that two or more classes may have. A name leaves this list when its second class goes."""


def defined_more_than_once() -> set[str]:
    names = Counter(
        node.name
        for member in MEMBERS
        for path in (ROOT / member / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in names.items() if count > 1}


def test_a_class_name_stands_for_one_thing() -> None:
    assert sorted(defined_more_than_once() - ALLOWED.keys()) == [], (
        "another class has this name; rename the new one by what it means"
    )


def test_no_exception_is_left_over() -> None:
    assert sorted(ALLOWED.keys() - defined_more_than_once()) == []
