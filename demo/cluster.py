"""Stage of the demo on the kind cluster, with real kubelets, a real MinIO and a killed node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kubernetes.client.exceptions import ApiException
from testbed import faults
from testbed.driver import metrics
from testbed.driver.install import ensure_installed
from testbed.driver.jobs import Job, Training, job_manifest, prepare_namespace
from testbed.driver.kube import Kube, is_true, kubeconfig_path
from urllib3.exceptions import HTTPError

from demo.recorder import Act, Recovery, Sample
from demo.waits import DemoFailed, wait_while_moving
from holdfast_cli.views import phases_of

NAMESPACE = "holdfast-demo"
TRAINING = Training(workers=4, steps=400, sleep_per_step=0.02)
INTERVAL = 10
OBJECT_EVERY = 20
REFERENCE = Path(kubeconfig_path()).parent / "demo-reference.json"


class ClusterStage:
    total_steps = TRAINING.steps
    transient: tuple[type[Exception], ...] = (ApiException, HTTPError, OSError)
    """Errors of the API server of a busy machine."""

    def __init__(self, kube: Kube) -> None:
        self.kube = kube
        ensure_installed(self.kube)
        prepare_namespace(self.kube, NAMESPACE)
        self.job = Job(self.kube, NAMESPACE, "gpt")
        self._killed_node = ""
        self._pool = ThreadPoolExecutor(max_workers=TRAINING.workers)

    # ------------------------------------------------------------ life

    def reference_digests(self, say: Callable[[str], None]) -> dict[int, str]:
        key = f"{TRAINING.arithmetic} {metrics.image_id(self.kube)}"
        if REFERENCE.exists():
            known = json.loads(REFERENCE.read_text())
            if known["key"] == key:
                return {int(rank): digest for rank, digest in known["digests"].items()}
        say("first an uninterrupted run to compare with (its result is kept for later demos)")
        job = self._fresh("reference")
        job.start(self._manifest("reference"))
        self.job = job
        seen = Sample(0.0, "Pending", 0, None, None, None, None)
        said = 0

        def ended() -> bool | None:
            nonlocal seen, said
            try:
                seen = self.sample()
                quarter = 4 * (seen.step or 0) // TRAINING.steps
                if quarter > said:
                    said = quarter
                    say(f"  uninterrupted run: step {seen.step} of {TRAINING.steps}")
                return self.is_complete()
            except self.transient:
                return None

        wait_while_moving("the end of the uninterrupted run", ended, lambda: seen.sign, self.failed)
        digests = job.final_digests()
        job.delete()
        REFERENCE.write_text(json.dumps({"key": key, "digests": digests}))
        return digests

    def _fresh(self, name: str) -> Job:
        job = Job(self.kube, NAMESPACE, name)
        if self.kube.get("TrainingJob", NAMESPACE, name) is not None:
            job.delete()
        return job

    def _manifest(self, name: str) -> dict[str, object]:
        return job_manifest(name, NAMESPACE, TRAINING, interval=INTERVAL, object_every=OBJECT_EVERY)

    def start(self) -> None:
        self.job = self._fresh("gpt")
        self.job.start(self._manifest("gpt"))

    # ------------------------------------------------------------ looking

    def sample(self) -> Sample:
        status = self.job.read().get("status") or {}
        seen = metrics.gang(self.job, self._pool)
        return Sample(
            at_seconds=0.0,
            phase=str(status.get("phase", "Pending")),
            round=int(status.get("restartRound", 0)),
            step=seen.step if seen.step is not None else status.get("step"),
            loss=seen.loss,
            committed=_newest(seen.committed, status.get("lastCommittedStep")),
            persisted=(status.get("lastPersisted") or {}).get("step"),
            tiers=seen.tiers,
            pods=tuple(sorted(_pod_words(pod) for pod in self.job.pods())),
            replicated=status.get("lastReplicatedStep"),
        )

    def recovery(self) -> Recovery | None:
        status = self.job.status
        point = status.get("restorePoint") or {}
        last = (status.get("recoveries") or [{}])[-1]
        if last.get("round") != status.get("restartRound") or "totalSeconds" not in last:
            return None
        sources = last.get("sources") or {}
        served = metrics.served_by(metrics.gang(self.job, self._pool))
        return Recovery(
            int(point.get("step", 0)),
            served or ", ".join(f"{k} x{v}" for k, v in sources.items()),
            phases_of(last),
            float(last["totalSeconds"]),
            last.get("lostSteps"),
        )

    def is_complete(self) -> bool:
        item = self.job.read()
        if is_true(item, "Failed"):
            raise self.failed(f"The job {self.job.name} failed.")
        return is_true(item, "Complete")

    def final_digests(self) -> dict[int, str]:
        return self.job.final_digests()

    def failed(self, happened: str) -> DemoFailed:
        log = Path("build/demo-cluster.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        pods = f"kubectl --namespace {NAMESPACE} logs --all-containers POD"
        try:
            log.write_text(self.job.describe())
            seen = self.sample().words()
        except self.transient as error:
            seen = f"the cluster does not respond: {error}".partition("\n")[0]
        return DemoFailed(happened, seen, f"{log}; {pods}")

    def delete_jobs(self) -> None:
        """Request the deletion of both jobs after an interruption.

        The next demo waits until they are gone.
        """
        for name in ("gpt", "reference"):
            self.kube.delete("TrainingJob", NAMESPACE, name)

    # ------------------------------------------------------------ breaking

    def acts(self) -> list[tuple[Act, Callable[[], None]]]:
        return [
            (Act("pod deleted", "worker 2's pod with memory and node tier", "peer"), self._pod),
            (Act("rank killed", "the process of rank 1 (SIGKILL)", "memory"), self._rank),
            (Act("node killed", "a node with worker 3", "peer"), self._node),
            (
                Act(
                    "all copies removed",
                    "every pod with memory and node tier",
                    "object",
                    needs_persisted=True,
                ),
                self._all,
            ),
        ]

    def _pod(self) -> None:
        self.kube.delete_pod(NAMESPACE, self.job.pod_name(2), grace_seconds=1)

    def _rank(self) -> None:
        faults.kill_process(NAMESPACE, self.job.pod_name(1), "trainer", match=r"holdfast-rank")

    def _node(self) -> None:
        self._killed_node = self.job.node_of(3)
        faults.kill_node(self._killed_node)

    def _all(self) -> None:
        for pod in self.job.pods():
            self.kube.delete_pod(NAMESPACE, pod["metadata"]["name"], grace_seconds=0)

    def close(self) -> None:
        self.job.close()
        self._pool.shutdown(cancel_futures=True)
        if self._killed_node:
            faults.start_node(self._killed_node)


def _pod_words(pod: dict[str, Any]) -> str:
    """Return a pod's phase and the reason for which it waits.

    The name is left out, because it changes with every round.
    """
    status = pod.get("status") or {}
    states = [
        (c.get("state") or {}).get("waiting") or {}
        for key in ("initContainerStatuses", "containerStatuses")
        for c in status.get(key) or []
    ]
    why = [str(s["reason"]) for s in states if s.get("reason")]
    return " ".join([str(status.get("phase", "Pending")), *why[:1]])


def _newest(*steps: int | None) -> int | None:
    known = [step for step in steps if step is not None]
    return max(known) if known else None


def wait_nodes_ready(kube: Kube, timeout_seconds: float = 60) -> None:
    """Start nodes that an earlier demo killed, and wait until all nodes are Ready or the time-out ends."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        nodes = kube.plain(kube.core.list_node())["items"]
        down = [
            node["metadata"]["name"]
            for node in nodes
            if not any(
                c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"]
            )
        ]
        if not down:
            return
        for name in down:
            faults.start_node(name)
        time.sleep(2)
