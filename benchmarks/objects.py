"""What many Checkpoint objects of one job cost: the plan of the retention, and memory for the objects.

The plan is the operator's own function, with a policy that uses every rule. The memory is what parsed objects
take in a fresh process, as the operator keeps them.

Writes results/objects.json and prints it. It needs no cluster and a few seconds.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.report import RESULTS
from holdfast_core.api import Checkpoint, TrainingJob
from holdfast_core.store_retention import plan_store

CHECKPOINTS = 10_000
PLANS = 5
TARGET_SECONDS = 2.0
TARGET_MIB = 100.0
NOW = datetime(2026, 5, 4, tzinfo=UTC)


def job() -> TrainingJob:
    """Return a job that has a rule of each kind, and whose newest checkpoint is the last one."""
    return TrainingJob.from_dict(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "gpt", "namespace": "team-a", "uid": "uid-of-gpt"},
            "spec": {
                "workers": 2,
                "template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]}},
                "checkpoint": {
                    "interval": {"steps": 10},
                    "object": {"storeRef": {"name": "main"}, "every": {"steps": 10}},
                    "retention": {
                        "keepLast": 5,
                        "keepEvery": {"steps": 1000},
                        "keepFor": "24h",
                        "hourly": 48,
                        "daily": 30,
                        "keepBest": {"metric": "loss", "mode": "min", "count": 10},
                    },
                },
            },
        }
    )


def checkpoint(number: int) -> dict[str, Any]:
    step = 10 * (number + 1)
    at = NOW - timedelta(minutes=5 * (CHECKPOINTS - number))
    yes = {"status": "True", "reason": "Committed", "lastTransitionTime": at.isoformat()}
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {
            "name": f"gpt-abcdef-s{step}-r0",
            "namespace": "team-a",
            "uid": f"uid-{number}",
            "resourceVersion": str(number),
        },
        "spec": {"jobRef": {"name": "gpt"}, "step": step, "pin": number % 1000 == 0},
        "status": {
            "phase": "Committed",
            "manifest": f"b3:{number:064x}",
            "round": 0,
            "jobUid": "uid-of-gpt",
            "jobNamespace": "team-a",
            "bytes": 6_700_000_000,
            "worldSize": 16,
            "committedAt": at.isoformat(),
            "metrics": {"loss": 1.0 / step, "grad_norm": 1.0},
            "conditions": [
                {"type": kind, **yes} for kind in ("Committed", "Replicated", "Persisted")
            ],
        },
    }


def main() -> None:
    tracemalloc.start()
    raw = [checkpoint(number) for number in range(CHECKPOINTS)]
    before, _ = tracemalloc.get_traced_memory()
    objects = [Checkpoint.from_dict(item) for item in raw]
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gang = job()
    seconds = []
    for _ in range(PLANS):
        begun = time.perf_counter()
        plan = plan_store(gang, objects, (), NOW)
        seconds.append(time.perf_counter() - begun)
    mib = (after - before) / 2**20
    result = {
        "checkpoints": CHECKPOINTS,
        "plan_seconds": [round(s, 4) for s in seconds],
        "plan_target_seconds": TARGET_SECONDS,
        "memory_mib": round(mib, 1),
        "memory_target_mib": TARGET_MIB,
        "pruned": len(plan.prune),
        "kept": len(plan.keep),
        "ok": max(seconds) <= TARGET_SECONDS and mib <= TARGET_MIB,
    }
    text = json.dumps(result, indent=1)
    (RESULTS / "objects.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
