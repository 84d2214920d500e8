"""Kubelet double for tests with a real API server.

It gives pods an address and a state, and runs a ServedSidecar on that address with the certificates that the
pod would mount. Each pod has its own address in 127.0.0.0/8, so the operator's real client can reach it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.support.hang import HANG_SECONDS
from tests.support.operator.served_sidecar import ServedSidecar
from tests.support.servers.control_plane import ControlPlane, ControlPlaneError
from tests.support.servers.ports import free_address

from holdfast_core.contract import CONTROL_PORT, SIDECAR_CONTAINER, TRAINER_CONTAINER, StoreVerb
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState
from holdfast_operator.model import labels
from holdfast_operator.model.ownership import command_prefix
from holdfast_operator.sidecars.certificates import KeyPair

T = TypeVar("T")

_NOW = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}


EMPTY_STORE = {
    "bytes": 0,
    "objects": 0,
    "checkpoints": 0,
    "orphans": {},
    "swept": {"objects": 0, "bytes": 0},
    "namespaces": [],
    "jobs": [],
}
"""The report of a listing of a store without objects."""


@dataclass
class PlayedKubelet:
    """Kubelet double of one node.

    Sidecars run in the event loop of a separate thread; every method may be called from the test's thread.
    """

    plane: ControlPlane
    namespace: str
    node: str
    """Name of its Node object, which `register` creates."""
    sidecars: dict[str, ServedSidecar] = field(default_factory=dict)
    """Sidecars by pod name."""
    probe_answer: str = ""
    """The termination message of every store probe that `answer_probes` finds."""
    usage_answer: str = json.dumps(EMPTY_STORE)
    """The termination message of every listing of a store that it finds."""

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        for name in list(self.sidecars):
            self.kill_sidecar(name)
        self._run(_drained())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def register(self) -> dict[str, Any]:
        """Create the Node object, ready for pods and without a lease, and return it.

        A pod whose node has no Node object counts as lost once its sidecar does not answer.
        """
        made = self.plane.request("POST", "/api/v1/nodes", {"metadata": {"name": self.node}})
        made["spec"]["taints"] = []  # the API server taints new nodes as not ready
        return dict(self.plane.request("PUT", f"/api/v1/nodes/{self.node}", made))

    def run_pod(self, name: str) -> ServedSidecar:
        """Bind the pod to the node, start its sidecar and report its containers as running."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        pod = self.plane.request("GET", path)
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self.node},
        }
        self.plane.request("POST", f"{path}/binding", binding)
        marks = pod["metadata"]["labels"]
        address = free_address(CONTROL_PORT)
        sidecar = self._run(self._start(pod, marks, address))
        self.sidecars[name] = sidecar
        running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        common = {"image": "x", "imageID": "x", "restartCount": 0, "state": running}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "initContainerStatuses": [
                {"name": SIDECAR_CONTAINER, "ready": True, "started": True, **common}
            ],
            "containerStatuses": [
                {"name": TRAINER_CONTAINER, "ready": True, "started": True, **common}
            ],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        bound = self.plane.request("GET", path)
        self.plane.request("PUT", f"{path}/status", {**bound, "status": status})
        return sidecar

    def run_again(self, name: str) -> ServedSidecar:
        """Start the sidecar of a running pod at its address, with what a new process of the pod knows."""
        pod = self.plane.request("GET", f"/api/v1/namespaces/{self.namespace}/pods/{name}")
        start = self._start(pod, pod["metadata"]["labels"], pod["status"]["podIP"])
        self.sidecars[name] = self._run(start)
        return self.sidecars[name]

    def finish_pod(self, name: str, message: str) -> None:
        """Report that the pod's only container exited with code 0 and this termination message."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        pod = self.plane.request("GET", path)
        ended = {"exitCode": 0, "message": message, "reason": "Completed"}
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            "image": "x",
            "imageID": "x",
            "ready": False,
            "restartCount": 0,
            "state": {"terminated": ended},
        }
        status = {"phase": "Succeeded", "containerStatuses": [container]}
        self.plane.request("PUT", f"{path}/status", {**pod, "status": status})

    def answer_probes(self) -> None:
        """Finish the store probes that have not ended, if `probe_answer` is set.

        A store is probed again for a job that was created a second after the last probe.
        """
        if not self.probe_answer:
            return
        for pod in self.pods():
            name, phase = pod["metadata"]["name"], pod["status"].get("phase")
            answers = {StoreVerb.PROBE: self.probe_answer, StoreVerb.USAGE: self.usage_answer}
            answer = next(
                (a for v, a in answers.items() if name.startswith(command_prefix(v))), None
            )
            if answer is not None and phase == "Pending":
                try:
                    self.finish_pod(name, answer)
                except ControlPlaneError as error:
                    if not re.search("HTTP 40[49]", str(error)):
                        raise  # otherwise the operator has deleted the pod meanwhile

    def delete_pod(self, name: str) -> None:
        """Delete the pod without a grace period, as if its node had confirmed the deletion."""
        self.kill_sidecar(name)
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        self.plane.request("DELETE", path, _NOW)

    def kill_sidecar(self, name: str) -> None:
        sidecar = self.sidecars.pop(name, None)
        if sidecar is not None:
            self._run(sidecar.close())

    def publish(self, pod: str, state: CoordinatorState) -> None:
        sidecar = self.sidecars[pod]

        async def now() -> None:
            sidecar.publish(state)

        self._run(now())

    def pods(self) -> list[Any]:
        found = self.plane.request("GET", f"/api/v1/namespaces/{self.namespace}/pods")
        return list(found["items"])

    async def _start(self, pod: Any, marks: dict[str, str], address: str) -> ServedSidecar:
        [container] = [c for c in pod["spec"]["initContainers"] if c["name"] == SIDECAR_CONTAINER]
        environment = {e["name"]: e.get("value", "") for e in container["env"]}
        volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "holdfast-certs")["secret"]
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{volume['secretName']}"
        data = self.plane.request("GET", path)["data"]
        files = {i["path"]: base64.b64decode(data[i["key"]]).decode() for i in volume["items"]}
        sidecar = ServedSidecar(
            worker=Worker(int(marks[labels.WORKER])),
            pod=environment["HOLDFAST_POD_NAME"],
            round=RestartRound(int(environment["HOLDFAST_BIRTH_ROUND"])),
        )
        leaf = KeyPair(files["tls.crt"], files["tls.key"])
        await sidecar.start(address, CONTROL_PORT, files["ca.crt"], leaf)
        return sidecar

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG_SECONDS)


async def _drained() -> None:
    """Cancel the requests that are left and wait for them, before the loop stops."""
    others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    for task in others:  # a long poll would outlive its loop
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
