"""`python -m tools.mutants`: seed all mutants and fail if one survives. `make mutants` calls it."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from tools.mutants.gate import GateError, judge
from tools.mutants.listed import MUTANTS
from tools.mutants.model import Mutant, StaleMutantError, chosen
from tools.mutants.runs import Verdict

ROOT = Path(__file__).resolve().parents[2]
_BROKEN = 2
"""Exit status if the gate could not judge the mutants."""
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.mutants")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="mutants whose name has this part, or matches a `*`",
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default: 2)")
    options = parser.parse_args(arguments)
    mutants = chosen(MUTANTS, options.only)
    if not mutants:
        parser.error(f"no mutant has a name with {options.only!r}; --list prints all")
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name} ({mutant.kind}, {mutant.file}): {mutant.loses}")
        return 0
    return run(ROOT, mutants, max(1, options.jobs))


def run(root: Path, mutants: tuple[Mutant, ...], jobs: int) -> int:
    """Judge the mutants, print the table, and return the exit status."""
    began = time.monotonic()
    try:
        results = judge(root, mutants, jobs, lambda line: print(line, flush=True))
    except (GateError, StaleMutantError) as error:
        print(error, file=sys.stderr)
        return _BROKEN
    except KeyboardInterrupt:
        print("interrupted: nothing was changed", file=sys.stderr)
        return _INTERRUPTED
    survivors = [m for m in mutants if results[m].verdict is Verdict.SURVIVED]
    for mutant in survivors:
        print(f"\n{mutant.name} survived {' '.join(mutant.tests)}")
        print(f"A user would lose: {mutant.loses}\n{mutant.diff(root)}", end="")
    seconds = time.monotonic() - began
    print(
        f"\n{len(mutants) - len(survivors)} killed, {len(survivors)} survived, in {seconds:.0f} seconds"
    )
    return 1 if survivors else 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    sys.exit(main())
