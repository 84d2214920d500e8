"""TrainingJobs of the example trainer: manifests, waits and final digests.

A `Job` watches its TrainingJob's status in the background and keeps every version that it received, because
the oracle (oracle.py) checks the whole history.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from holdfast_core.names import member_pod_names
from testbed.config import FAULTS, HANG_SECONDS
from testbed.driver.digests import find_digests
from testbed.driver.kube import (
    GROUP,
    PLURALS,
    VERSION,
    Kube,
    Object,
    is_true,
    show,
    wait_for,
)

TRAINER_IMAGE = "holdfast/trainer-gpt:dev"
STORE_NAME = "main"
STORE_SECRET = "minio-keys"
MINIO_USER = "holdfast-test"
MINIO_PASSWORD = "holdfast-test-secret"
MINIO_ENDPOINT = "http://minio.minio.svc:9000"
BUCKET = "checkpoints"


@dataclass(frozen=True, slots=True)
class Training:
    """Arguments of the example trainer. Two jobs with equal `arithmetic` end with equal bits."""

    workers: int = 4
    steps: int = 120
    sleep_per_step: float = 0.05
    layers: int = 2
    width: int = 64
    state_mib: int = 0

    def command(self) -> list[str]:
        command = ["holdfast", "run", "--", "python3", "train.py"]
        command += ["--steps", str(self.steps), "--sleep-per-step", str(self.sleep_per_step)]
        command += ["--layers", str(self.layers), "--width", str(self.width)]
        if self.state_mib:
            command += ["--state-mib", str(self.state_mib)]
        return [*command, "--final-digest", "-"]

    @property
    def arithmetic(self) -> tuple[int, ...]:
        """The arguments that determine the final bits. The pace is not one of them."""
        return (self.workers, self.steps, self.layers, self.width, self.state_mib)


def checkpoint_policy(
    *,
    interval: int = 10,
    object_every: int | None = 20,
    compression: str = "None",
    copies: int = 1,
    keep_last: int = 3,
    when_deleted: str = "Retain",
    slots: int | None = None,
    node_size: str = "2Gi",
    node_class: str | None = None,
) -> Object:
    """Return spec.checkpoint.

    Args:
        node_class: Storage class of the node volume; None for an emptyDir.
    """
    volume: Object = {"emptyDir": {"sizeLimit": node_size}}
    if node_class is not None:
        volume = {"ephemeral": [{"storageClassName": node_class, "size": node_size}]}
    checkpoint: Object = {
        "interval": {"steps": interval},
        "peer": {"copies": copies},
        "retention": {"keepLast": keep_last, "whenDeleted": when_deleted},
        "node": {"volume": volume},
    }
    if slots is not None:
        checkpoint["memory"] = {"slots": slots}
    if object_every is not None:
        checkpoint["object"] = {
            "storeRef": {"name": STORE_NAME},
            "every": {"steps": object_every},
            "compression": compression,
        }
    return checkpoint


def job_manifest(
    name: str,
    namespace: str,
    training: Training,
    *,
    restore_from: str | None = None,
    memory_limit: str = "1Gi",
    suspect_after_seconds: int = 20,
    more: Object | None = None,
    pod: Object | None = None,
    **policy: Any,
) -> Object:
    """Return a TrainingJob.

    Args:
        more: Further fields of its spec.
        pod: Further fields of the spec of its pods.
        **policy: Arguments of `checkpoint_policy`.
    """
    spec: Object = {
        "workers": training.workers,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "trainer",
                        "image": TRAINER_IMAGE,
                        "imagePullPolicy": "IfNotPresent",
                        "command": training.command(),
                        "resources": {"limits": {"memory": memory_limit}},
                    }
                ],
                **(pod or {}),
            }
        },
        "checkpoint": checkpoint_policy(**policy),
        "nodeLoss": {"suspectAfterSeconds": suspect_after_seconds},
        "failurePolicy": {"maxRestarts": 30, "window": "1h"},
        **(more or {}),
    }
    if restore_from is not None:
        spec["restoreFrom"] = {"checkpointRef": {"name": restore_from}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def store_manifest(namespace: str, name: str = STORE_NAME, **overrides: Any) -> Object:
    s3: Object = {
        "endpoint": MINIO_ENDPOINT,
        "bucket": BUCKET,
        "prefix": "e2e",
        "region": "us-east-1",
        "credentialsSecretRef": {"name": STORE_SECRET},
    }
    s3.update(overrides)
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "CheckpointStore",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"s3": s3},
    }


def prepare_namespace(kube: Kube, namespace: str, *, pool: str = FAULTS) -> None:
    """Prepare a namespace that enforces Pod Security `restricted`, with the store and its Secret.

    Its pods run on the nodes of the pool. Waits until the store is Available.
    """
    kube.ensure_namespace(namespace, pool=pool)
    kube.ensure_secret(
        namespace, STORE_SECRET, {"accessKey": MINIO_USER, "secretKey": MINIO_PASSWORD}
    )
    if kube.get("CheckpointStore", namespace, STORE_NAME) is None:
        kube.create(store_manifest(namespace))
    wait_for(
        f"CheckpointStore {namespace}/{STORE_NAME} to be Available",
        lambda: is_true(kube.get("CheckpointStore", namespace, STORE_NAME), "Available"),
        describe=lambda: show(kube.get("CheckpointStore", namespace, STORE_NAME)),
    )


@dataclass(slots=True)
class Seen:
    """One version of the job's status, with the time (monotonic seconds) at which it was received."""

    at: float
    status: Object


@dataclass(slots=True)
class Job:
    """A gang of one kind: a TrainingJob, or a CheckpointAdoption (adopted.py)."""

    KIND: ClassVar[str] = "TrainingJob"
    CONTAINER: ClassVar[str] = "trainer"
    """Container of the pods that trains."""

    kube: Kube
    namespace: str
    name: str
    history: list[Seen] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    # ---------------------------------------------------------------- life

    def start(self, manifest: Object) -> Job:
        self.kube.create(manifest)
        return self.follow()

    def follow(self) -> Job:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        custom = client.CustomObjectsApi(self.kube.api)
        while not self._stop.is_set():
            try:
                stream = watch.Watch().stream(
                    custom.list_namespaced_custom_object,
                    GROUP,
                    VERSION,
                    self.namespace,
                    PLURALS[self.KIND],
                    field_selector=f"metadata.name={self.name}",
                    timeout_seconds=30,
                )
                for event in stream:
                    status = event["object"].get("status") or {}
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self.history.append(Seen(time.monotonic(), status))
                    if self._stop.is_set():
                        return
            except (ApiException, HTTPError, OSError, ValueError):
                time.sleep(0.3)

    # ---------------------------------------------------------------- what is there

    def read(self) -> Object:
        found = self.kube.get(self.KIND, self.namespace, self.name)
        if found is None:
            raise AssertionError(f"{self.KIND} {self.namespace}/{self.name} no longer exists")
        return found

    @property
    def status(self) -> Object:
        status: Object = self.read().get("status") or {}
        return status

    @property
    def uid(self) -> str:
        return str(self.read()["metadata"]["uid"])

    @property
    def round(self) -> int:
        return int(self.status.get("restartRound", 0))

    def pod_name(self, worker: int) -> str:
        return self.pod_names()[worker]

    def pod_names(self) -> list[str]:
        """Return the names of the members' pods, by worker."""
        return member_pod_names(self.read())

    def pods(self) -> list[Object]:
        return self.kube.pods(self.namespace, self._selector)

    @property
    def _selector(self) -> str:
        return f"holdfast.dev/job={self.name}"

    def pod_uids(self) -> dict[str, str]:
        """Return the uid of each pod of the job by name."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.pods()}

    def node_of(self, worker: int) -> str:
        pod = self.kube.pod(self.namespace, self.pod_name(worker))
        return str((pod or {}).get("spec", {}).get("nodeName", ""))

    def lose_a_shard_and_its_copy(self) -> None:
        """Delete two pods of a gang of three on two nodes, so that a shard is lost with its only copy.

        A copy is never on the node of its shard. So the worker that is alone on its node has the copies of
        the two others.
        """
        nodes = [self.node_of(worker) for worker in range(3)]
        assert len(set(nodes)) == 2, f"the gang of three is on {nodes}, expected two nodes"
        alone = next(worker for worker in range(3) if nodes.count(nodes[worker]) == 1)
        lost = [self.pod_name(alone), self.pod_name((alone + 1) % 3)]
        self.kube.lose_pods(self.namespace, lost)

    def metric(self, worker: int, name: str) -> dict[str, float]:
        """Return the samples of one metric of a worker's sidecar, by their label text."""
        text = self.kube.proxy_text(self.namespace, self.pod_name(worker), 7072, "metrics") or ""
        samples = {}
        for line in text.splitlines():
            if line.startswith((name + "{", name + " ")):
                label, _, value = line[len(name) :].rpartition(" ")
                samples[label] = float(value)
        return samples

    def live_step(self, sample: str = "holdfast_step{") -> int:
        """Return the newest step that any sidecar of the job reports, or -1.

        The status lags by up to 10 seconds.

        Args:
            sample: How the samples of the metric start that counts steps.
        """
        newest = -1
        for pod in self.pods():
            text = self.kube.proxy_text(self.namespace, pod["metadata"]["name"], 7072, "metrics")
            for line in (text or "").splitlines():
                if line.startswith(sample):
                    newest = max(newest, int(float(line.rpartition(" ")[2])))
        return newest

    def describe(self) -> str:
        """Return status, pods and events as text, for the message of a failed test."""
        pods = [
            {
                "name": p["metadata"]["name"],
                "node": p["spec"].get("nodeName"),
                "phase": p["status"].get("phase"),
                "deleting": "deletionTimestamp" in p["metadata"],
            }
            for p in self.pods()
        ]
        job = self.kube.get(self.KIND, self.namespace, self.name) or {}
        events = [
            f"{e.get('reason')}: {e.get('message')}" for e in self.kube.events(self.namespace)[-15:]
        ]
        return show({"status": job.get("status"), "pods": pods, "events": events})

    # ---------------------------------------------------------------- waits

    def wait(
        self,
        what: str,
        probe: Any,
        timeout_seconds: float = HANG_SECONDS,
        every_seconds: float = 0.2,
    ) -> Any:
        return wait_for(
            f"{what} of {self.namespace}/{self.name}",
            probe,
            timeout_seconds=timeout_seconds,
            describe=self.describe,
            every_seconds=every_seconds,
        )

    def failed_probes(self) -> list[str]:
        """Return the kubelets' warnings about probes of the job's pods."""
        pods = set(self.pod_names())
        return [
            f"{event['involvedObject']['name']}: {event['message']}"
            for event in self.kube.events(self.namespace)
            if event["reason"] == "Unhealthy" and event["involvedObject"]["name"] in pods
        ]

    def wait_step(self, step: int, timeout_seconds: float = HANG_SECONDS) -> int:
        """Wait until the sidecars report `step` or a later one, and return the reported step."""
        return int(
            self.wait(
                f"step {step}",
                lambda: (now := self.live_step()) >= step and now + 1,
                timeout_seconds,
                every_seconds=0.4,  # each asks every sidecar through the API server
            )
            - 1
        )

    def wait_replicated(self, step: int, timeout_seconds: float = HANG_SECONDS) -> None:
        """Wait until the coordinator's sidecar reports that peers hold copies of `step` or a later one."""
        replicated = 'holdfast_committed_step{level="replicated"'
        self.wait(
            f"copies of step {step}",
            lambda: self.live_step(replicated) >= step,
            timeout_seconds,
            every_seconds=0.4,
        )

    def wait_round(self, round_: int, timeout_seconds: float = HANG_SECONDS) -> None:
        """Wait until round `round_`, or a later one, trains."""
        self.wait(
            f"round {round_} to train",
            lambda: self.round >= round_ and is_true(self.read(), "Running"),
            timeout_seconds,
        )

    def wait_persisted(self, step: int, timeout_seconds: float = HANG_SECONDS) -> Object:
        found: Object = self.wait(
            f"step {step} to be persisted",
            lambda: (p := self.status.get("lastPersisted") or {}).get("step", -1) >= step and p,
            timeout_seconds,
        )
        return found

    def wait_condition(
        self, kind: str, status: str = "True", timeout_seconds: float = HANG_SECONDS
    ) -> Object:
        def probe() -> Object | None:
            for entry in self.status.get("conditions", []):
                if entry["type"] == kind and entry["status"] == status:
                    found: Object = entry
                    return found
            return None

        found: Object = self.wait(f"condition {kind}={status}", probe, timeout_seconds)
        return found

    def wait_complete(self, timeout_seconds: float = HANG_SECONDS) -> None:
        self.wait(
            "completion",
            lambda: is_true(self.read(), "Complete") or self._fail_if_failed(),
            timeout_seconds,
        )

    def _fail_if_failed(self) -> bool:
        if is_true(self.read(), "Failed"):
            raise AssertionError(f"{self.name} failed\n{self.describe()}")
        return False

    # ---------------------------------------------------------------- the end

    def final_digests(self) -> dict[int, str]:
        """Return each rank's SHA-256 of all training state, as the trainers printed it.

        A job may be complete before the last lines of its pods are in their logs. The log of a pod that has
        ended is whole.
        """

        def read() -> tuple[dict[int, str]] | None:
            names = self.pod_names()
            run = {pod["metadata"]["name"] for pod in self.pods() if not _has_ended(pod)}
            found = find_digests(
                self.kube.logs(self.namespace, name, self.CONTAINER) for name in names
            )
            return None if run.intersection(names) and len(found) < len(names) else (found,)

        whole: tuple[dict[int, str]] = self.wait("the final digests", read)
        return whole[0]

    def delete(self, timeout_seconds: float = HANG_SECONDS) -> None:
        """Delete the job and wait until nothing of its gang is left (I7). Its Checkpoints may be retained."""
        self.close()
        self.kube.delete(self.KIND, self.namespace, self.name)
        wait_for(
            f"what belongs to {self.namespace}/{self.name} to be deleted",
            lambda: not self.leftovers(),
            timeout_seconds=timeout_seconds,
            describe=lambda: show(self.leftovers()),
        )

    def leftovers(self) -> list[str]:
        """Return kind and name of each object that exists for the gang."""
        policy, network = client.PolicyV1Api(self.kube.api), client.NetworkingV1Api(self.kube.api)
        lists = {
            "Pod": self.kube.core.list_namespaced_pod,
            "Secret": self.kube.core.list_namespaced_secret,
            "Service": self.kube.core.list_namespaced_service,
            "PodDisruptionBudget": policy.list_namespaced_pod_disruption_budget,
            "NetworkPolicy": network.list_namespaced_network_policy,
        }
        found = []
        for kind, listed in lists.items():
            items = self.kube.read(listed, self.namespace, label_selector=self._selector)["items"]
            found += [f"{kind} {item['metadata']['name']}" for item in items]
        return found


def _has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")
