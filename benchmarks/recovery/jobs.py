"""A TrainingJob that is measured: its steps, faults, and the records of its recoveries."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import testbed.faults as faults
from kubernetes import client
from testbed.driver import metrics
from testbed.driver.adopted import AdoptedJob
from testbed.driver.jobs import Job, Training, job_manifest
from testbed.driver.kube import Kube, Object, wait_for

NAMESPACE = "holdfast-bench"
INTERVAL = 10
KEEP_LAST = 3
"""Steps between two checkpoints. B7 allows as many lost steps."""
LOOK_SECONDS = 0.2
"""Time between two looks at the metrics of all pods, which pass through the API server's proxy. A look takes
processor time from the recovery on the same machine."""
ANSWER_SECONDS = 1.0
"""Longest wait for the metrics of one pod."""
Cause = Callable[[Job], float]
"""Causes a fault, and returns the monotonic time at which it did. What it looks up before takes no part."""


def start(kube: Kube, name: str, training: Training, *, copies: int = 1) -> Job:
    """Start a job under this name, or replace the one that an interrupted benchmark left."""
    job = Job(kube, NAMESPACE, name)
    if kube.get("TrainingJob", NAMESPACE, name) is not None:
        job.delete()
        job = Job(kube, NAMESPACE, name)
    manifest = job_manifest(
        name,
        NAMESPACE,
        training,
        interval=INTERVAL,
        copies=copies,
        keep_last=KEEP_LAST,
        memory_limit="3Gi",
        node_size=f"{_node_mib(training.state_mib, copies)}Mi",
    )
    manifest["spec"]["failurePolicy"] = {"maxRestarts": 1000, "window": "1h"}
    return job.start(manifest)


def _node_mib(state_mib: int, copies: int) -> int:
    """Return the size of a node volume that takes every checkpoint at once.

    A smaller one delays commits: the save waits until the coordinator has pruned a checkpoint.
    """
    shard_mib = state_mib + 64
    kept = KEEP_LAST + 2  # and one that is being written, one that is being copied
    return kept * (1 + copies) * shard_mib * 100 // 85


def start_adopted(kube: Kube, name: str, training: Training) -> Job:
    """Start a Job of batch/v1 whose pods are adopted, or replace the one of an interrupted benchmark."""
    job = AdoptedJob(kube, NAMESPACE, name)
    if kube.get(job.KIND, NAMESPACE, name) is not None:
        job.delete()
        job = AdoptedJob(kube, NAMESPACE, name)
    return job.start_training(training, memory_limit="3Gi", backoff_limit=1000)


def clear(kube: Kube) -> None:
    """Delete all jobs, and wait until their pods are gone, which would slow down the next cases."""
    for kind in ("TrainingJob", "CheckpointAdoption"):
        for found in kube.items(kind, NAMESPACE):
            kube.delete(kind, NAMESPACE, found["metadata"]["name"])
    client.BatchV1Api(kube.api).delete_collection_namespaced_job(
        NAMESPACE, propagation_policy="Background"
    )
    wait_for(
        "pods of the benchmark to go", lambda: not kube.pods(NAMESPACE, ""), timeout_seconds=300
    )


def recovery(job: Job, cause: Cause, timeout_seconds: float) -> tuple[float, dict[str, Any]]:
    """Cause a fault and measure the seconds until a rank finishes a step of a later round.

    Returns:
        The seconds, and details: rounds, the phases and the lost steps by the job's status, and what was
        committed before the fault.
    """
    settle(job)
    before = job.round
    promised = committed(job)
    at = cause(job)
    wait_for(
        f"a step of a round after {before}",
        lambda: _trained_round(job) > before,
        timeout_seconds=timeout_seconds,
        describe=job.describe,
        every_seconds=LOOK_SECONDS,
    )
    seconds = time.monotonic() - at
    records = wait_for(
        "the record of the recovery",
        lambda: _complete(job.status.get("recoveries") or [], before),
        timeout_seconds=60,
        describe=job.describe,
    )
    last = records[-1]
    phases = last["phaseSeconds"]
    return seconds, {
        "rounds": job.round - before,
        "reason": last["reason"],
        "phases": phases,
        "lost_steps": sum(r.get("lostSteps", 0) for r in records),
        "restored_step": last.get("restoredStep"),
        "sources": last.get("sources"),
        **promised,
    }


def _complete(recoveries: list[Object], before: int) -> list[Object] | None:
    found = [r for r in recoveries if r["round"] > before]
    return found if found and "totalSeconds" in found[-1] else None


def settle(job: Job) -> None:
    """Train past two commits and past one in the store, so that each repetition starts alike."""
    step = job.live_step()
    job.wait_step(step + 2 * INTERVAL + 5)
    job.wait_persisted(step)


def committed(job: Job) -> dict[str, int]:
    """Return the newest replicated step by the sidecars, and the newest persisted one by the status."""
    newest = -1
    for text in _pages(job):
        for name, labels, value in metrics.parse(text):
            if name == "holdfast_committed_step" and labels.get("level") == "replicated":
                newest = max(newest, int(value))
    return {"replicated_before": newest, "persisted_before": job.status["lastPersisted"]["step"]}


def _trained_round(job: Job) -> int:
    samples = (s for text in _pages(job) for s in metrics.parse(text))
    return max((int(v) for name, _, v in samples if name == "holdfast_trained_round"), default=-1)


def _pages(job: Job) -> list[str]:
    """Return the metrics of all pods that answer within ANSWER_SECONDS.

    The API server's proxy waits for a pod on a dead node, which must not delay what the others show.
    """
    names = [p["metadata"]["name"] for p in job.pods() if "deletionTimestamp" not in p["metadata"]]
    pool = ThreadPoolExecutor(max(1, len(names)))
    pages = [pool.submit(job.kube.proxy_text, job.namespace, n, 7072, "metrics") for n in names]
    answered, _ = wait(pages, timeout=ANSWER_SECONDS)
    pool.shutdown(wait=False, cancel_futures=True)
    return [text for page in answered if (text := page.result())]


# ------------------------------------------------------------------ faults


def killed_rank(worker: int) -> Cause:
    def cause(job: Job) -> float:
        pod = job.pod_name(worker)
        node, pids = faults.find_processes(job.namespace, pod, "trainer", match="holdfast-rank")
        at = time.monotonic()
        faults.send_signal(node, pids)
        return at

    return cause


def deleted_pods(workers: tuple[int, ...], seconds_apart: float = 0.0) -> Cause:
    """Delete these pods with grace period 0: at once, or one after another."""

    def cause(job: Job) -> float:
        names = [job.pod_name(worker) for worker in workers]
        at = time.monotonic()

        def delete(index: int) -> None:
            time.sleep(max(0.0, at + index * seconds_apart - time.monotonic()))
            job.kube.delete_pod(job.namespace, names[index], grace_seconds=0)

        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(delete, range(len(names))))
        return at

    return cause


def killed_node(worker: int) -> Cause:
    """Power off the node of this worker, without a word to the API server."""

    def cause(job: Job) -> float:
        node = job.node_of(worker)
        at = time.monotonic()
        faults.kill_node(node)
        return at

    return cause


def out_of_memory(worker: int) -> Cause:
    def cause(job: Job) -> float:
        at = time.monotonic()
        faults.oom_container(job.namespace, job.pod_name(worker), "trainer")
        return at

    return cause
