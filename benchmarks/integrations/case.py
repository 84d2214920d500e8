"""What the benchmark needs to know of an adapter."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.integrations import cases

SCRIPTS = Path(__file__).resolve().parents[2] / "tests" / "frameworks" / "scripts"


@dataclass(frozen=True)
class Blocked:
    """Seconds for which saves blocked the training thread, alternately in one process."""

    ours: list[float]
    theirs: list[float]
    state_bytes: int


@dataclass(frozen=True)
class Case:
    """One adapter.

    name: that of its module in holdfast.integrations.
    distribution: the framework's name on the package index.
    lines: lines that a user adds or changes, as the adapter's page shows them.
    script, arguments: the training that is killed. It prints `step <n>` and `digest <hex>`, and does at
      least 18 steps.
    preload: modules that are imported once for all its processes.
    theirs: the framework's own way to save.
    blocked: saves a larger state with both, in the folder that it gets.
    """

    name: str
    distribution: str
    lines: int
    script: Path
    arguments: tuple[str, ...]
    preload: tuple[str, ...]
    theirs: str
    blocked: Callable[[Path], Blocked]


def all_cases() -> Iterator[Case]:
    """Yield the cases by name. Their modules import no framework before `blocked` is called."""
    for module in pkgutil.iter_modules(cases.__path__):
        found = importlib.import_module(f"{cases.__name__}.{module.name}").CASE
        assert isinstance(found, Case)
        yield found
