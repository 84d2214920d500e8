"""The gate: the tests pass without a mutant, and fail with each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.model import Mutant
from tools.mutants.runs import Result, Runs, Verdict
from tools.mutants.trees import copy_sources, seed

FIRST_LIMIT_SECONDS = 600.0
"""Time limit of the tests without a mutant."""
LIMIT_SECONDS = 120.0
"""The limit with a mutant is this time, and that of all tests of the package without a mutant."""


class GateError(Exception):
    """Error: the gate cannot judge the mutants."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Judges mutants of one checkout, of which nothing is changed."""

    root: Path
    base: Path
    """Folder for the copies of the code."""
    runs: Runs
    workers: ThreadPoolExecutor
    show: Callable[[str], None]
    """Receives a line of text for each finished run."""

    @property
    def copies(self) -> Path:
        return self.base / "copies"

    def without_mutants(self, mutants: tuple[Mutant, ...]) -> dict[str, float]:
        """Run the tests of each package once, and return the seconds by source folder.

        Raises GateError if one fails: it would seem to find every mutant.
        """
        packages = {mutant.source: mutant.module for mutant in mutants}

        def run(number: int, source: str, module: str) -> Result:
            folder = self.base / f"b{number}"
            folder.mkdir()
            tests = _distinct(mutants, source)
            return self.runs.run(tests, self.copies / source, module, folder, FIRST_LIMIT_SECONDS)

        started: dict[Future[Result], str] = {
            self.workers.submit(run, number, source, module): source
            for number, (source, module) in enumerate(packages.items())
        }
        seconds: dict[str, float] = {}
        for future in as_completed(started):
            source, result = started[future], future.result()
            if result.verdict is not Verdict.SURVIVED:
                raise GateError(
                    f"{source}: the tests must pass without a mutant, and did not:\n{result.output}"
                )
            seconds[source] = result.seconds
            self.show(f"{source}: the tests pass without a mutant, {result.seconds:.1f} s")
        return seconds

    def with_mutants(
        self, mutants: tuple[Mutant, ...], seconds: dict[str, float]
    ) -> dict[Mutant, Result]:
        """Run the tests of each mutant. Raises GateError if they could not run."""

        def run(number: int, mutant: Mutant) -> Result:
            limit = LIMIT_SECONDS + seconds[mutant.source]
            with tempfile.TemporaryDirectory(
                prefix=f"m{number}-", dir=self.base, ignore_cleanup_errors=True
            ) as folder:
                copy = seed(mutant, self.root, self.copies, Path(folder))
                return self.runs.run(mutant.tests, copy, mutant.module, Path(folder), limit)

        started: dict[Future[Result], Mutant] = {
            self.workers.submit(run, number, mutant): mutant
            for number, mutant in enumerate(mutants)
        }
        width = max(len(mutant.name) for mutant in mutants)
        results: dict[Mutant, Result] = {}
        for future in as_completed(started):
            mutant, result = started[future], future.result()
            results[mutant] = result
            row = f"{mutant.name:<{width}}  {result.verdict:<19}  {result.seconds:5.1f} s"
            self.show(f"{row}  {result.killer}".rstrip())
            if result.verdict is Verdict.NOT_RUN:
                raise GateError(f"mutant {mutant.name}: its tests did not run:\n{result.output}")
        return results


def judge(
    root: Path, mutants: tuple[Mutant, ...], jobs: int, show: Callable[[str], None]
) -> dict[Mutant, Result]:
    """Run the tests of each mutant, and return what they showed.

    1. Every mutant is compared with the code.
    2. The tests of each package run once with a copy of its code, and must pass.
    3. Each mutant is seeded into another copy, and its tests run.

    Args:
        root: Root of the repository.
        mutants: The mutants, with different names.
        jobs: Number of runs at the same time.
        show: Receives a line of text for each finished run.

    Raises:
        StaleMutantError: A mutant does not fit the code.
        GateError: Tests fail without a mutant, or could not run.
    """
    for mutant in mutants:
        mutant.mutated(root)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        workers = ThreadPoolExecutor(jobs, thread_name_prefix="mutants")
        gate = Gate(root, Path(folder), Runs(root), workers, show)
        try:
            copy_sources(root, (mutant.source for mutant in mutants), gate.copies)
            return gate.with_mutants(mutants, gate.without_mutants(mutants))
        finally:
            # After an interrupt, the runs end before their folders are removed.
            gate.runs.stop()
            workers.shutdown(wait=True, cancel_futures=True)


def _distinct(mutants: Iterable[Mutant], source: str) -> tuple[str, ...]:
    """Return the tests that the mutants of a package name. A file stands for the tests in it."""
    named = dict.fromkeys(test for m in mutants if m.source == source for test in m.tests)
    return tuple(t for t in named if "::" not in t or t.partition("::")[0] not in named)
