"""`python -m benchmarks.integrations [NAME ...]`: kills, identical bits and blocked time of each adapter.

Runs in the environment of tests/frameworks/uv.lock (`make bench-integrations`), and writes
benchmarks/results/integrations.json and .md. Only the entries of the named adapters are replaced.

 1. The adapter's script trains undisturbed once.
 2. It trains again several times, with other seeds. In each training some processes are killed with SIGKILL,
    each after a number of steps that the seed decides.
 3. A larger state is saved alternately by Holdfast and by the framework itself, in one process. Only the
    ratio of the two is meaningful.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.frameworks.forked import Training, train_forked

from benchmarks.integrations.case import Blocked, Case, all_cases
from benchmarks.integrations.page import page

RESULTS = Path(__file__).resolve().parents[1] / "results" / "integrations.json"
SEEDS = (1, 2)
KILLS = 5
LEAST_STEPS, MOST_STEPS = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.integrations")
    found = {case.name: case for case in all_cases()}
    parser.add_argument("names", nargs="*", help=f"of {', '.join(found)}; all by default")
    parser.add_argument("--blocked-only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in found]
    if unknown:
        parser.error(f"unknown adapters: {', '.join(unknown)}; there are {', '.join(found)}")
    if arguments.blocked_only:
        print(json.dumps(_blocked_here(found[arguments.blocked_only])))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments.names or found:
        results[name] = measured(found[name])
        print(json.dumps({name: results[name]}), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        RESULTS.with_suffix(".md").write_text(page(results))


def measured(case: Case) -> dict[str, Any]:
    """Return the entry of one adapter."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        plan = [Training(Path(folder) / "whole", case.arguments)]
        for seed in SEEDS:
            place = Path(folder) / f"seed-{seed}"
            killed = Training(place, case.arguments, KILLS, seed, LEAST_STEPS, MOST_STEPS)
            plan.append(killed)
        whole, *killed_ones = train_forked(case.script, plan, preload=case.preload)
    blocked = _blocked(case)
    return {
        "version": metadata.version(case.distribution),
        "lines": case.lines,
        "kills": sum(one.kills for one in killed_ones),
        "seeds": list(SEEDS),
        "starts": [list(one.starts) for one in killed_ones],
        "identical": all(one.digest == whole.digest for one in killed_ones),
        "theirs": case.theirs,
        "state_bytes": blocked.state_bytes,
        "blocked_seconds": statistics.median(blocked.ours),
        "their_blocked_seconds": statistics.median(blocked.theirs),
        "saves": len(blocked.ours),
        "load": round(load, 1),
    }


def _blocked(case: Case) -> Blocked:
    """Measure in a process of its own, because the trainings have left a framework without its threads."""
    command = [sys.executable, "-m", "benchmarks.integrations", "--blocked-only", case.name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Blocked(**json.loads(done.stdout.splitlines()[-1]))


def _blocked_here(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        return vars(case.blocked(Path(folder)))


if __name__ == "__main__":
    main()
