"""A peer's gang on the cluster: one fault, and the time until it trains again.

Each repetition begins with new objects, because the kubelet waits before the second restart of a container
for 10 s and before each further one for more. So the figures are the best that a peer can reach.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import testbed.faults as faults
from kubernetes.client.exceptions import ApiException
from testbed.driver.jobs import (
    BUCKET,
    MINIO_ENDPOINT,
    STORE_SECRET,
    TRAINER_IMAGE,
)
from testbed.driver.kube import Kube, Object, ignore_missing, wait_for
from testbed.driver.store import delete_objects

from benchmarks.recovery.jobs import NAMESPACE

WORKERS = 4
SETTLED_STEP = 45
"""Step at which the store has two saves of ranks that wait for them, or at least one of ranks that do not."""
_PACKAGE = "benchmarks.recovery.peers"
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float
    lost_steps: int


class Peer(ABC):
    """One kind of job that runs one of the programs of this package.

    Args:
        kube: The cluster.
        state_mib: Size of the state of one rank, in MiB.
    """

    NAME: ClassVar[str]
    """Name of all of its objects."""
    PROGRAM: ClassVar[str]
    """Module of this package that a rank runs."""
    MASTER_ADDR: ClassVar[str]
    """DNS name of rank 0."""
    OWNER_LABEL: ClassVar[str]
    """Label of its pods whose value is NAME."""
    RESTART_POLICY: ClassVar[str]

    def __init__(self, kube: Kube, state_mib: int) -> None:
        self._kube = kube
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

    @abstractmethod
    def create_owner(self, template: Object) -> None:
        """Create the object whose controller creates WORKERS indexed pods from this template."""

    @abstractmethod
    def delete_owner(self) -> None:
        """Delete it. Raises ApiException with status 404 if there is none."""

    def _measured(self, cause: Callable[[], float]) -> Measured:
        self._remove()
        program = {f.name: f.read_text() for f in _FOLDER.glob("*.py")}
        metadata = {"name": self.NAME}
        self._kube.core.create_namespaced_config_map(
            NAMESPACE, {"metadata": metadata, "data": program}
        )
        self.create_owner(self._template(sorted(program)))
        try:
            first = self._wait(
                f"step {SETTLED_STEP}", lambda p: p if p["step"] >= SETTLED_STEP else None
            )
            at = cause()
            steps = [first["step"]]

            def restarted(progress: dict[str, Any]) -> dict[str, Any] | None:
                if progress["began"] != first["began"]:
                    return progress
                steps.append(progress["step"])
                return None

            next_ = self._wait("a step after the restart", restarted)
            seconds = time.monotonic() - at
            return Measured(seconds, max(0, steps[-1] - next_["base"]))
        finally:
            self._remove()

    def _remove(self) -> None:
        """Delete the objects of the job, wait until its pods are gone, and delete its saves."""
        with ignore_missing():
            self.delete_owner()
        with ignore_missing():
            self._kube.core.delete_namespaced_config_map(self.NAME, NAMESPACE)

        def gone() -> bool:  # a controller may create a pod after its owner was deleted
            pods = self._pods()
            for pod in pods:
                with ignore_missing():
                    self._kube.delete_pod(NAMESPACE, pod["metadata"]["name"], grace_seconds=0)
            return not pods

        wait_for(f"the pods of {self.NAME} to go", gone, timeout_seconds=60)
        delete_objects(self._kube, f"{self.NAME}/")  # a save is a GiB

    def _pods(self) -> list[Object]:
        return self._kube.pods(NAMESPACE, f"{self.OWNER_LABEL}={self.NAME}")

    def _pod(self, index: int) -> str:
        """Return the newest pod of this index."""
        found = [
            (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"])
            for pod in self._pods()
            if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == str(index)
            and "deletionTimestamp" not in pod["metadata"]
        ]
        if not found:
            raise RuntimeError(f"{self.NAME} has no pod of index {index}")
        return str(max(found)[1])

    def _wait(
        self, what: str, wanted: Callable[[dict[str, Any]], dict[str, Any] | None]
    ) -> dict[str, Any]:
        def probe() -> dict[str, Any] | None:
            progress = self._progress()
            return None if progress is None else wanted(progress)

        return wait_for(what, probe, timeout_seconds=300, every_seconds=0.05)

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

    def _template(self, files: list[str]) -> Object:
        environment = {
            "STORE": f"{MINIO_ENDPOINT}/{BUCKET}",
            "PREFIX": f"{self.NAME}/{uuid.uuid4().hex}",
            "WORLD_SIZE": str(WORKERS),
            "STATE_MIB": str(self._state_mib),
            "MASTER_ADDR": self.MASTER_ADDR,
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
            "command": ["python3", "-m", f"{_PACKAGE}.{self.PROGRAM}"],
            "workingDir": "/program",
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
        package = _PACKAGE.replace(".", "/")
        items = [{"key": file, "path": f"{package}/{file}"} for file in files]
        pod = {
            "restartPolicy": self.RESTART_POLICY,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "program", "configMap": {"name": self.NAME, "items": items}},
                {"name": "scratch", "emptyDir": {}},
            ],
        }
        return {"spec": pod}
