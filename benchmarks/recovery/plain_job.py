"""The peer: an Indexed Job of Kubernetes whose ranks restart from the object store with torch.save.

The kubelet restarts a container that failed. From the second restart on it waits 10 s and more, so each
repetition begins with a new Job: the figures are the best that this way can reach.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import testbed.faults as faults
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from testbed.driver.jobs import (
    BUCKET,
    MINIO_ENDPOINT,
    STORE_SECRET,
    TRAINER_IMAGE,
)
from testbed.driver.kube import Kube, Object, ignore_missing, wait_for

from benchmarks.recovery.jobs import NAMESPACE

NAME = "plain"
WORKERS = 4
PROGRAM = Path(__file__).with_name("plain_training.py")
SETTLED_STEP = 45
"""Step at which the store has two saves of the training."""


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float
    lost_steps: int


class PlainJob:
    def __init__(self, kube: Kube, state_mib: int) -> None:
        self._kube = kube
        self._batch = client.BatchV1Api(kube.api)
        self._state_mib = state_mib

    def killed_rank(self, repetition: int) -> Measured:
        def cause() -> float:
            pod = self._pod(1 + repetition % (WORKERS - 1))
            node, pids = faults.find_processes(NAMESPACE, pod, "trainer")
            at = time.monotonic()
            faults.send_signal(node, pids)
            return at

        return self._measured(cause)

    def deleted_pod(self, repetition: int) -> Measured:
        def cause() -> float:
            pod = self._pod(1 + repetition % (WORKERS - 1))
            at = time.monotonic()
            self._kube.delete_pod(NAMESPACE, pod, grace_seconds=0)
            return at

        return self._measured(cause)

    def _measured(self, cause: Callable[[], float]) -> Measured:
        self.remove()
        for body in _objects(self._state_mib):
            self._create(body)
        try:
            first = self._wait("two saves", lambda p: p if p["step"] >= SETTLED_STEP else None, 300)
            at = cause()
            steps = [first["step"]]

            def restarted(progress: dict[str, Any]) -> dict[str, Any] | None:
                if progress["began"] != first["began"]:
                    return progress
                steps.append(progress["step"])
                return None

            next_ = self._wait("a step after the restart", restarted, 300)
            seconds = time.monotonic() - at
            return Measured(seconds, max(0, steps[-1] - next_["base"]))
        finally:
            self.remove()

    def remove(self) -> None:
        """Delete the Job, its Service and its program, and wait until its pods are gone."""
        with ignore_missing():
            self._batch.delete_namespaced_job(NAME, NAMESPACE, propagation_policy="Background")
        with ignore_missing():
            self._kube.core.delete_namespaced_service(NAME, NAMESPACE)
        with ignore_missing():
            self._kube.core.delete_namespaced_config_map(NAME, NAMESPACE)
        for pod in self._pods():
            self._kube.delete_pod(NAMESPACE, pod["metadata"]["name"], grace_seconds=0)
        wait_for("the plain Job's pods to go", lambda: not self._pods(), timeout_seconds=60)

    def _create(self, body: Object) -> None:
        kind = {"Job": self._batch.create_namespaced_job}.get(body["kind"])
        core = self._kube.core
        if kind is None:
            kind = {
                "Service": core.create_namespaced_service,
                "ConfigMap": core.create_namespaced_config_map,
            }[body["kind"]]
        kind(NAMESPACE, body)

    def _pods(self) -> list[Object]:
        return self._kube.pods(NAMESPACE, f"job-name={NAME}")

    def _pod(self, index: int) -> str:
        for pod in self._pods():
            labels = pod["metadata"]["labels"]
            if labels["batch.kubernetes.io/job-completion-index"] == str(index):
                return str(pod["metadata"]["name"])
        raise RuntimeError(f"the plain Job has no pod of index {index}")

    def _wait(
        self, what: str, wanted: Callable[[dict[str, Any]], dict[str, Any] | None], limit: float
    ) -> dict[str, Any]:
        def probe() -> dict[str, Any] | None:
            progress = self._progress()
            return None if progress is None else wanted(progress)

        return wait_for(what, probe, timeout_seconds=limit, every_seconds=0.05)

    def _progress(self) -> dict[str, Any] | None:
        """Return the last line of rank 0. None: it has written no line."""
        try:
            text = self._kube.core.read_namespaced_pod_log(
                self._pod(0), NAMESPACE, container="trainer", tail_lines=1
            )
            found: dict[str, Any] = json.loads((text or "").splitlines()[-1])
            return found
        except (ApiException, RuntimeError, ValueError, IndexError):
            return None


def _objects(state_mib: int) -> list[Object]:
    environment = {
        "STORE": f"{MINIO_ENDPOINT}/{BUCKET}",
        "PREFIX": f"plain/{uuid.uuid4().hex}",
        "WORLD_SIZE": str(WORKERS),
        "STATE_MIB": str(state_mib),
        "MASTER_ADDR": f"{NAME}-0.{NAME}",
        "MASTER_PORT": "29500",
        "USE_LIBUV": "0",  # torch of the image may be built without it
    }
    keys = {"ACCESS_KEY": "accessKey", "SECRET_KEY": "secretKey"}
    env: list[Object] = [{"name": k, "value": v} for k, v in environment.items()]
    env += [
        {"name": k, "valueFrom": {"secretKeyRef": {"name": STORE_SECRET, "key": v}}}
        for k, v in keys.items()
    ]
    container = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "/program/plain_training.py"],
        "env": env,
        "volumeMounts": [
            {"name": "program", "mountPath": "/program"},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod = {
        "subdomain": NAME,
        "restartPolicy": "OnFailure",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "program", "configMap": {"name": NAME}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }
    service = {
        "clusterIP": "None",
        "selector": {"job-name": NAME},
        "publishNotReadyAddresses": True,
    }
    job = {
        "completions": WORKERS,
        "parallelism": WORKERS,
        "completionMode": "Indexed",
        "backoffLimit": 1000,
        "template": {"spec": pod},
    }
    return [
        _object("v1", "ConfigMap", data={PROGRAM.name: PROGRAM.read_text()}),
        _object("v1", "Service", spec=service),
        _object("batch/v1", "Job", spec=job),
    ]


def _object(version: str, kind: str, **fields: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": NAME}, **fields}
