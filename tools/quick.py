"""Run the tests that a change most probably breaks, within two minutes: `make quick`.

The change is what differs from BASE, by default from the commit where this branch left origin/main (without
an origin: from the newest commit), and files that git does not know yet. The tests of a changed file are
those that import it, directly or through other files, and those in the folder of tests/ with its path. They
run nearest first, and the short ones of each distance first, until the time is used up. What is left out is
named: `make test` runs all.

Tests that need servers, a cluster or the frameworks are left to their own targets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools import import_graph

ROOT = Path(__file__).resolve().parents[1]
SECONDS = Path("tests/file_seconds.json")
BUDGET_SECONDS = 240.0
"""Sum of the times of the files that run, of which four run side by side on two cores: under two minutes."""
SHORT_SECONDS = 0.5
"""Time of a file that SECONDS does not have, because it is short."""
_ELSEWHERE = ("tests/e2e", "tests/integration", "tests/charts", "tests/frameworks")
_FOLDERS = {
    "core/src/holdfast_core": "tests/core",
    "operator/src/holdfast_operator": "tests/operator",
    "sidecar/src/holdfast_sidecar": "tests/sidecar",
    "trainer_sdk/src/holdfast": "tests/trainer_sdk",
    "cli/src/holdfast_cli": "tests/cli",
    "testbed": "tests/testbed",
    "tools": "tests/tools",
    "demo": "tests/demo",
    "benchmarks": "tests/benchmarks",
}
"""The folder of the tests of each folder of code."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Test files to run, and those that depend on the change and are left out, nearest first."""

    run: tuple[Path, ...]
    left: tuple[Path, ...]


def is_test(path: Path) -> bool:
    """Return whether the file holds tests that need no server, cluster or framework."""
    return (
        path.parts[0] == "tests"
        and path.name.startswith("test_")
        and path.suffix == ".py"
        and not str(path).startswith(_ELSEWHERE)
    )


def choose(
    distances: Mapping[Path, int],
    folders: Iterable[Path],
    tests: Iterable[Path],
    seconds: Mapping[str, float],
    budget_seconds: float = BUDGET_SECONDS,
) -> Chosen:
    """Choose among the tests.

    Args:
        distances: Number of imports from each file to a changed one.
        folders: Folders of tests with the path of a changed file. Their tests count as its importers.
        tests: All test files.
        seconds: Time of each test file by its path below tests/.
        budget_seconds: The sum of times that may run. The changed tests themselves always run.
    """
    near = set(folders)
    ranked = []
    for test in tests:
        distance = distances.get(test)
        if test.parent in near:
            distance = min(1, 1 if distance is None else distance)
        if distance is not None:
            cost = seconds.get(str(test.relative_to("tests")), SHORT_SECONDS)
            ranked.append((distance, cost, test))
    run: list[Path] = []
    left: list[Path] = []
    spent = 0.0
    for distance, cost, test in sorted(ranked):
        if distance == 0 or spent + cost <= budget_seconds:
            run.append(test)
            spent += cost
        else:
            left.append(test)
    return Chosen(tuple(run), tuple(left))


def folders_of(changed: Iterable[Path]) -> set[Path]:
    """Return the folders of tests with the paths of the changed files of code."""
    found = set()
    for path in changed:
        for code, tests in _FOLDERS.items():
            if path.is_relative_to(code) and path.suffix == ".py":
                found.add(Path(tests) / path.parent.relative_to(code))
    return found


def changed_files(root: Path, base: str | None) -> list[Path]:
    """Return the paths of files that differ from `base`, and of those that git does not know."""
    base = base or _base(root)
    listed = _git(root, "diff", "--name-only", "--diff-filter=d", base)
    unknown = _git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({Path(line) for line in [*listed, *unknown]})


def _base(root: Path) -> str:
    done = subprocess.run(
        ["git", "merge-base", "HEAD", "origin/main"], cwd=root, capture_output=True, text=True
    )
    return done.stdout.strip() or "HEAD"


def _git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.splitlines()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.quick")
    parser.add_argument("--base", help="the commit to compare with", default=None)
    parser.add_argument("--list", action="store_true", help="only print the test files")
    options = parser.parse_args(arguments)
    changed = changed_files(ROOT, options.base or None)
    graph = import_graph.importers(ROOT)
    chosen = choose(
        import_graph.distances(changed, graph),
        folders_of(changed),
        (path for path in import_graph.modules(ROOT).values() if is_test(path)),
        json.loads((ROOT / SECONDS).read_text()),
    )
    if options.list:
        print("\n".join(map(str, chosen.run)))
        return 0
    print(f"{len(changed)} files differ, {len(chosen.run)} test files run", flush=True)
    status = 0
    if chosen.run:
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "4", "--dist", "loadfile"]
        command = [*pytest, "--no-loadscope-reorder", *map(str, chosen.run)]
        status = subprocess.run(command, cwd=ROOT).returncode
    if chosen.left:
        shown = ", ".join(map(str, chosen.left[:5]))
        more = f" and {len(chosen.left) - 5} more" if len(chosen.left) > 5 else ""
        print(f"left to `make test`, because they take longer: {shown}{more}")
    return status


if __name__ == "__main__":
    sys.exit(main())
