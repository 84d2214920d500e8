"""R1-R5 on the kind cluster: `make bench-recovery-quick` -> results/recovery-quick.json.

R1 rank killed -> next training step; R2 pod deleted -> next step; R2-oom trainer container killed by the
kernel's OOM killer -> next step (with the target of R2); R3 node killed -> next step; R4 trainer blocked
per save compared with torch DCP's async thread; R5 operator memory with four jobs. The next step is the
first one of the new round in a sidecar's metrics, which are polled every 50 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import testbed.faults as faults
from testbed.driver import install, metrics
from testbed.driver.jobs import Job, Training, job_manifest, prepare_namespace
from testbed.driver.kube import Kube, wait_for

from benchmarks.report import Figure, at_most, table, write

NAMESPACE = "holdfast-bench"
LONG = Training(workers=3, steps=100_000, sleep_per_step=0.05)


def recovery(job: Job, cause: Callable[[], None], timeout_seconds: float) -> float:
    """Measure the seconds from the failure to the first step of the new round."""
    round_before = job.round
    began = time.monotonic()
    cause()
    wait_for(
        f"a step of round {round_before + 1}",
        lambda: metrics.trained_round(job) > round_before,
        timeout_seconds=timeout_seconds,
        describe=job.describe,
        every_seconds=0.05,
    )
    return time.monotonic() - began


def measure_recoveries(kube: Kube, repetitions: int) -> list[Figure]:
    job = _start(kube, "recovery", LONG)
    kills: list[float] = []
    ooms: list[float] = []
    deletes: list[float] = []
    nodes: list[float] = []
    for turn in range(repetitions):
        worker = turn % LONG.workers
        _settle(job)
        kills.append(recovery(job, partial(_kill_rank, job, worker), 60))
        _settle(job)
        ooms.append(recovery(job, partial(_oom, job, worker), 120))
        _settle(job)
        deletes.append(recovery(job, partial(_delete_pod, job, worker), 120))
        _settle(job)
        node = job.node_of(worker)
        nodes.append(recovery(job, partial(faults.kill_node, node), 180))
        faults.heal_nodes()
        print(
            f"  {turn + 1}/{repetitions}: rank {kills[-1]:.1f} s, out of memory {ooms[-1]:.1f} s, "
            f"pod {deletes[-1]:.1f} s, node {nodes[-1]:.1f} s",
            flush=True,
        )
    job.delete()
    return [
        at_most("R1", kills, "seconds", 4, what="rank process killed -> next training step, p50"),
        at_most("R2", deletes, "seconds", 12, what="pod deleted -> next step, p50"),
        at_most("R2-oom", ooms, "seconds", 12, what="trainer out of memory -> next step, p50"),
        at_most("R3", nodes, "seconds", 60, what="node killed -> next step, p50"),
    ]


def measure_blocked(repetitions: int) -> Figure:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.blocked", "--repetitions", str(repetitions)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    ratios = [ours / dcp for ours, dcp in zip(found["ours"], found["dcp"], strict=True)]
    return at_most(
        "R4",
        ratios,
        "ours / DCP async thread",
        0.7,
        what="trainer blocked per save, 256 MiB state, same run, in turns",
        ours_seconds=found["ours"],
        dcp_seconds=found["dcp"],
    )


def measure_memory(kube: Kube) -> Figure:
    small = Training(workers=1, steps=100_000, sleep_per_step=0.2)
    jobs = [_start(kube, f"memory-{i}", small, copies=0) for i in range(4)]
    values = []
    for _ in range(10):
        time.sleep(1)
        pod = install.operator_pod(kube)
        text = kube.proxy_text(install.NAMESPACE, str(pod), 8080, "metrics") or ""
        for line in text.splitlines():
            if line.startswith("process_resident_memory_bytes "):
                values.append(float(line.split()[1]) / (1 << 20))
    for job in jobs:
        job.delete()
    if not values:
        raise RuntimeError("the operator's /metrics has no process_resident_memory_bytes")
    return at_most("R5", values, "MiB", 150, what="operator resident memory, four jobs running")


def _start(kube: Kube, name: str, training: Training, copies: int = 1) -> Job:
    job = Job(kube, NAMESPACE, name)
    if kube.get("TrainingJob", NAMESPACE, name) is not None:
        job.delete()
    manifest = job_manifest(name, NAMESPACE, training, object_every=None, copies=copies)
    manifest["spec"]["failurePolicy"] = {"maxRestarts": 1000, "window": "1h"}
    job.start(manifest)
    job.wait_step(12)
    return job


def _settle(job: Job) -> None:
    """Train past the next commit, so that each repetition starts from the same state."""
    job.wait_step(job.live_step() + 15)


def _kill_rank(job: Job, worker: int) -> None:
    faults.kill_process(job.namespace, job.pod_name(worker), "trainer", match="holdfast-rank")


def _oom(job: Job, worker: int) -> None:
    faults.oom_container(job.namespace, job.pod_name(worker), "trainer")


def _delete_pod(job: Job, worker: int) -> None:
    job.kube.delete_pod(job.namespace, job.pod_name(worker), grace_seconds=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    arguments = parser.parse_args()
    kube = Kube()
    install.ensure_installed(kube)
    prepare_namespace(kube, NAMESPACE)
    figures = [measure_blocked(arguments.repetitions), measure_memory(kube)]
    print(table(figures), flush=True)
    figures += measure_recoveries(kube, arguments.repetitions)
    figures.sort(key=lambda f: f.id)
    path = write("recovery-quick", figures)
    print(table(figures))
    print(f"written: {path}")
    return 0 if all(f.ok for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
