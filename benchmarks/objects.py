"""What many Checkpoint objects of one job cost: the plan of the retention, and the operator's memory.

The plan is the operator's own function, with a policy that uses every rule. The memory is that of a real
operator, which watches a real API server with one job that trains: before the objects are created, when it
knows all of them, and in a new process.

Writes results/objects.json and prints it. It needs a few minutes.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.support.operator.operator_bed import GROUP

from benchmarks.report import RESULTS
from benchmarks.scale import cases
from benchmarks.scale.bed import NAMESPACE, Bed
from benchmarks.scale.kubelets import in_parallel
from holdfast_core.api import Checkpoint, TrainingJob
from holdfast_core.store_retention import plan_store

CHECKPOINTS = 10_000
PLANS = 5
TARGET_SECONDS = 2.0
TARGET_MIB = 100.0
SETTLE_SECONDS = 30.0
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


def plans() -> dict[str, Any]:
    """Plan the retention of all objects several times."""
    objects = [Checkpoint.from_dict(checkpoint(number)) for number in range(CHECKPOINTS)]
    gang = job()
    seconds = []
    for _ in range(PLANS):
        begun = time.perf_counter()
        plan = plan_store(gang, objects, (), NOW)
        seconds.append(time.perf_counter() - begun)
    return {
        "plan_seconds": [round(s, 4) for s in seconds],
        "plan_target_seconds": TARGET_SECONDS,
        "pruned": len(plan.prune),
        "kept": len(plan.keep),
    }


async def memory(folder: Path) -> dict[str, Any]:
    """Return the resident memory of an operator before and after the objects exist, in MiB."""
    async with Bed(folder, jobs=1, workers=2, nodes=2) as bed:
        operator = bed.operator()
        operator.start()
        await cases.create(bed, operator)
        await asyncio.sleep(SETTLE_SECONDS)
        before, _ = operator.memory_mib()
        (uid,) = await bed.statuses()
        await _create(bed, uid)
        await asyncio.sleep(SETTLE_SECONDS)
        after, peak = operator.memory_mib()
        operator.kill()
        operator.start()
        await bed.until("the new operator polls", lambda: _polls(bed), 300, 1)
        await asyncio.sleep(SETTLE_SECONDS)
        restarted, restarted_peak = operator.memory_mib()
    return {
        "operator_mib": round(before, 1),
        "operator_with_objects_mib": round(after, 1),
        "operator_peak_mib": round(peak, 1),
        "new_operator_mib": round(restarted, 1),
        "new_operator_peak_mib": round(restarted_peak, 1),
        "memory_mib": round(max(after, restarted) - before, 1),
        "memory_target_mib": TARGET_MIB,
    }


async def _create(bed: Bed, uid: str) -> None:
    """Create the objects of the bed's job. All are pinned, so the operator deletes none meanwhile."""
    path = f"{GROUP}/namespaces/{NAMESPACE}/checkpoints"

    async def create(number: int) -> None:
        body = checkpoint(number)
        name, status = body["metadata"]["name"], body.pop("status")
        body["metadata"] = {"name": name}
        body["spec"] = {"jobRef": {"name": "gpt-0000"}, "step": body["spec"]["step"], "pin": True}
        await bed.api.post(path, body)
        status = {**status, "jobUid": uid, "jobNamespace": NAMESPACE}
        await bed.api.patch(f"{path}/{name}/status", {"status": status})
        if number % 1000 == 0:
            print(f"    {number} of {CHECKPOINTS} objects", flush=True)

    await in_parallel(create, range(CHECKPOINTS), 8)


async def _polls(bed: Bed) -> bool:
    return bool(bed.called.get("/v1/state"))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-objects-") as folder:
        found = {**plans(), **asyncio.run(memory(Path(folder)))}
    is_met = max(found["plan_seconds"]) <= TARGET_SECONDS and found["memory_mib"] <= TARGET_MIB
    result = {"checkpoints": CHECKPOINTS, **found, "ok": is_met}
    text = json.dumps(result, indent=1)
    (RESULTS / "objects.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
