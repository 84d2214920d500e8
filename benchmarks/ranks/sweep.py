"""L7: sweep and prune of an object store that holds ten thousand checkpoints.

The code of the coordinator runs in a process of its own: a sweep, which finds the checkpoints without a
manifest, the deletion of all others but the newest, as retention requests it, and another sweep. It sends
real requests to a server that plays the store (played_store.py).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.ranks.played_store import (
    BUCKET,
    JOB_UID,
    NAMESPACE,
    first_of,
    is_dead,
    named,
)
from benchmarks.report import Figure, at_most, for_orientation
from holdfast_core.ids import RestartRound
from holdfast_core.store.open import open_tier
from holdfast_core.store.rules import QUIET
from holdfast_core.store_url import StoreUrl

_MIB = 1 << 20


def is_figure(figure: Figure) -> bool:
    """Return whether `measure` has made this figure."""
    return figure.id.startswith("L7") or "store_phase" in figure.details


def measure(checkpoints: int, ranks: int) -> list[Figure]:
    """Run the sweeps and the deletions in a process beside the store. Return the figures of L7.

    Args:
        checkpoints: Checkpoints in the store. One in ten of them has no manifest.
        ranks: Ranks of each checkpoint.

    Raises:
        RuntimeError: Other objects are left in the store than those that are needed.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ranks.played_store", str(checkpoints), str(ranks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as store:
        assert store.stdin is not None and store.stdout is not None
        port = store.stdout.readline().strip()
        command = [sys.executable, "-m", "benchmarks.ranks.sweep", port, str(checkpoints)]
        child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        store.stdin.close()
        requests, left = map(int, store.stdout.readline().split())
    expected = _expected_left(checkpoints, ranks)
    if left != expected:
        raise RuntimeError(f"{left} objects are left in the store, expected {expected}")
    return figures(json.loads(child.stdout), checkpoints, ranks, requests)


def figures(
    phases: dict[str, dict[str, Any]], checkpoints: int, ranks: int, requests: int
) -> list[Figure]:
    """Return the verdicts and a row for each phase."""
    size = f"{checkpoints} checkpoints of {ranks} ranks"
    cpu = sum(p["cpu_seconds"] for p in phases.values())
    peak = max(p["peak_mib"] for p in phases.values())
    details = {"what": f"sweep and prune of a store with {size}", "requests": requests}
    return [
        at_most("L7-cpu", [cpu], "s", 60, **details),
        at_most("L7-memory", [peak], "MiB", 256, what="peak of the process"),
        *(
            for_orientation(f"{name}, {size}", [p["cpu_seconds"]], "CPU s", store_phase=name, **p)
            for name, p in phases.items()
        ),
    ]


def _pruned_numbers(checkpoints: int) -> list[int]:
    """Return the numbers of all checkpoints with a manifest but the newest."""
    return [n for n in range(checkpoints) if not is_dead(n)][:-1]


def _expected_left(checkpoints: int, ranks: int) -> int:
    """Return the number of objects that the newest checkpoint with a manifest needs."""
    newest = max(n for n in range(checkpoints) if not is_dead(n))
    shards = {newest, first_of(newest)}
    references = 2 * (len(shards) - 1)
    return 2 * ranks * len(shards) + references + 1


def main() -> int:
    """Run the phases against the store at this port. Print what each of them cost, as JSON."""
    port, checkpoints = (int(text) for text in sys.argv[1:3])
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "played",
        "AWS_SECRET_ACCESS_KEY": "played-secret",
        "AWS_REGION": "us-east-1",
    }
    tier = open_tier(StoreUrl(BUCKET, ""), env)
    phases: dict[str, dict[str, Any]] = {}

    def phase(name: str, work: Callable[[], int]) -> None:
        began, cpu = time.monotonic(), time.process_time()
        count = work()
        phases[name] = {
            "count": count,
            "wall_seconds": round(time.monotonic() - began, 3),
            "cpu_seconds": round(time.process_time() - cpu, 3),
            "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MIB, 1),
        }

    def sweep() -> int:
        return len(tier.sweep(NAMESPACE, JOB_UID, RestartRound(1), QUIET, frozenset))

    def prune() -> int:
        numbers = _pruned_numbers(checkpoints)
        for number in numbers:
            tier.delete_checkpoint(NAMESPACE, JOB_UID, named(number))
        return len(numbers)

    phase("sweep", sweep)
    phase("prune", prune)
    phase("second sweep", sweep)
    print(json.dumps(phases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
