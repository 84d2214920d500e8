"""Scheduler and kubelets of all nodes, played on a real API server.

Pods are bound to the nodes in turn, started together with their sidecars, and removed when the operator
deletes them. Store probes end with success.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from tests.support.operator.played_kubelet import EMPTY_STORE
from tests.support.operator.served_sidecar import ServedSidecar

from benchmarks.scale.gangs import REPORT_SECONDS, Gang, GangSidecar
from benchmarks.scale.leases import LeaseProcess, now
from benchmarks.scale.listener import Credentials, Listener
from holdfast_core.clock import SystemClock
from holdfast_core.contract import SIDECAR_CONTAINER, TRAINER_CONTAINER, StoreVerb
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_core.net import peer_dns_name
from holdfast_operator.kube.api import ApiError, KubeApi
from holdfast_operator.model import labels
from holdfast_operator.sidecars.certificates import KeyPair
from holdfast_operator.watch.cache import LEASES_PATH
from holdfast_operator.watch.reflector import Collection, Reflector

_CONCURRENT = 24
_PROBED = {"available": True, "reason": "Probed", "message": "ok", "features": {}}
_REPORTS = {f"store-{StoreVerb.PROBE}": _PROBED, f"store-{StoreVerb.USAGE}": EMPTY_STORE}
"""Termination messages of the pods that run a command in a store, by their component."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What a kubelet needs of a pod."""

    namespace: str
    name: str
    uid: str
    job: str
    component: str
    worker: int
    birth_round: int
    node: str
    deleting: bool
    phase: str
    secret: str
    items: tuple[tuple[str, str], ...]
    """(key, path) of the certificates in the Secret."""
    ranks_name: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"


def read(raw: Mapping[str, Any]) -> Pod:
    meta, spec = raw["metadata"], raw["spec"]
    marks = meta.get("labels") or {}
    secret, items, name = "", [], ""
    for volume in spec.get("volumes") or []:
        if volume["name"] == "holdfast-certs":
            secret = volume["secret"]["secretName"]
            items = [(i["key"], i["path"]) for i in volume["secret"]["items"]]
    for container in spec.get("initContainers") or []:
        if container["name"] == SIDECAR_CONTAINER:
            values = {e["name"]: e.get("value", "") for e in container["env"]}
            name = values["HOLDFAST_POD_NAME"]
    owner = (meta.get("ownerReferences") or [{"uid": ""}])[0]
    return Pod(
        meta["namespace"],
        meta["name"],
        meta["uid"],
        owner["uid"],
        marks.get(labels.COMPONENT, ""),
        int(marks.get(labels.WORKER, -1)),
        int(marks.get(labels.BIRTH_ROUND, -1)),
        spec.get("nodeName") or "",
        meta.get("deletionTimestamp") is not None,
        (raw.get("status") or {}).get("phase", "Pending"),
        secret,
        tuple(items),
        name,
    )


class Kubelets:
    """All nodes of the cluster. Start `run` as a task.

    Args:
        leases: A started process.
        called: Receives each request to a sidecar: the sidecar and the path.
    """

    def __init__(
        self,
        api: KubeApi,
        leases: LeaseProcess,
        nodes: int,
        workers: int,
        called: Callable[[ServedSidecar, str], None],
    ) -> None:
        self._api = api
        self._leases = leases
        self._nodes = [f"node-{n:05d}" for n in range(nodes)]
        self._workers = workers
        self._next = 0
        self._addresses: dict[str, tuple[str, str]] = {}
        """Address and DNS name of each started pod, by uid."""
        self._secrets: dict[tuple[str, str], dict[str, str]] = {}
        self._queue: asyncio.Queue[Pod] = asyncio.Queue()
        self._watch = Reflector(
            api, Collection("pods", "/api/v1/pods", kind="Pod"), read, self._changed, SystemClock()
        )
        self.listener = Listener(called)
        self.gangs: dict[str, Gang] = {}
        """By uid of the job."""
        self.pods: dict[str, Pod] = {}
        """By uid."""
        self.cut_off = set[str]()
        """Names of nodes that reach neither the API server nor the operator."""
        self.errors: Counter[str] = Counter()
        self.works = asyncio.Event()
        """Cleared while no kubelet does anything."""
        self.works.set()

    async def run(self) -> None:
        await self.listener.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch.run())
                group.create_task(self._report())
                for _ in range(_CONCURRENT):
                    group.create_task(self._work())
        finally:
            await self.listener.close()

    async def create_nodes(self) -> None:
        async def one(name: str) -> None:
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name, "namespace": "kube-node-lease"},
                "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now()},
            }
            await self._api.post("/api/v1/nodes", node)
            # The API server taints a new node as not ready, and its kubelet's controller removes that.
            await self._api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
            await self._api.post(LEASES_PATH, lease)

        await in_parallel(one, self._nodes)
        self._leases.renew(self._nodes)

    def cut_off_nodes(self, names: Iterable[str]) -> None:
        """Separate these nodes from everything. Their sidecars go on."""
        self.cut_off.update(names)
        self._leases.renew(n for n in self._nodes if n not in self.cut_off)
        for pod in self._pods_of(self.cut_off):
            self.listener.silence(self._addresses[pod.uid][0])

    def lose_sidecar(self, pod: Pod) -> None:
        """Let the pod's sidecar answer no longer."""
        self.listener.silence(self._addresses[pod.uid][0])

    def rejoin_nodes(self) -> None:
        """Connect all nodes again. Their kubelets then see which pods have been deleted."""
        nodes, self.cut_off = self.cut_off, set()
        self._leases.renew(self._nodes)
        for pod in self._pods_of(nodes):
            self.listener.answer_again(self._addresses[pod.uid][0])
            if pod.deleting:
                self._queue.put_nowait(pod)

    def _pods_of(self, nodes: Set[str]) -> list[Pod]:
        return [p for p in self.pods.values() if p.node in nodes and p.uid in self._addresses]

    # ------------------------------------------------------------------ pods

    def _changed(self, old: Any, new: Any) -> None:
        if new is None:
            self.pods.pop(old.uid, None)
            self._stop(old)
            return
        self.pods[new.uid] = new
        if new.node in self.cut_off:
            return
        if new.deleting or not new.node or (new.component in _REPORTS and old is None):
            self._queue.put_nowait(new)

    async def _work(self) -> None:
        while True:
            pod = await self._queue.get()
            await self.works.wait()
            try:
                await self._handle(pod)
            except ApiError as error:
                if error.status not in (404, 409):
                    self.errors[str(error)[:200]] += 1
                    await asyncio.sleep(0.5)
                    self._queue.put_nowait(pod)

    async def _handle(self, pod: Pod) -> None:
        if pod.deleting:
            self._stop(pod)
            options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
            await self._api.delete(pod.path, {**options, "preconditions": {"uid": pod.uid}})
            return
        if pod.phase != "Pending" or pod.uid not in self.pods:
            return
        if (report := _REPORTS.get(pod.component)) is not None:
            ended = {"exitCode": 0, "message": json.dumps(report), "reason": "Completed"}
            name = pod.component.removeprefix("store-")
            container = {**_container(name), "ready": False, "state": {"terminated": ended}}
            status = {"phase": "Succeeded", "containerStatuses": [container]}
            await self._api.patch(f"{pod.path}/status", {"status": status})
            return
        while True:
            self._next += 1
            n = self._next
            node = self._nodes[n % len(self._nodes)]
            if node not in self.cut_off:
                break
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod.name}}
        await self._api.post(f"{pod.path}/binding", {**binding, "target": target})
        address = f"127.{16 + (n >> 16)}.{n >> 8 & 255}.{n & 255}"
        await self._start(pod, address)
        running = {"running": {"startedAt": now()[:19] + "Z"}}
        up = {"ready": True, "started": True, "state": running}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "initContainerStatuses": [{**_container(SIDECAR_CONTAINER), **up}],
            "containerStatuses": [{**_container(TRAINER_CONTAINER), **up}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await self._api.patch(f"{pod.path}/status", {"status": status})

    async def _start(self, pod: Pod, address: str) -> None:
        data = await self._secret(pod)
        files = {path: data[key] for key, path in pod.items}
        gang = self.gangs.setdefault(pod.job, Gang(JobUid(pod.job), self._workers))
        sidecar = GangSidecar(
            Worker(pod.worker), pod.ranks_name, RestartRound(pod.birth_round), gang=gang
        )
        gang.members[sidecar.worker] = sidecar
        name = peer_dns_name(pod.ranks_name, JobUid(pod.job))
        leaf = KeyPair(files["tls.crt"], files["tls.key"])
        self.listener.add(address, name, sidecar, Credentials(files["ca.crt"], leaf))
        self._addresses[pod.uid] = (address, name)

    def _stop(self, pod: Pod) -> None:
        known = self._addresses.pop(pod.uid, None)
        if known is not None:
            self.listener.remove(*known)

    async def _secret(self, pod: Pod) -> dict[str, str]:
        key = (pod.namespace, pod.secret)
        if key not in self._secrets:
            path = f"/api/v1/namespaces/{pod.namespace}/secrets/{pod.secret}"
            raw = await self._api.get(path)
            data = {k: base64.b64decode(v).decode() for k, v in raw["data"].items()}
            self._secrets[key] = data
        return self._secrets[key]

    # ------------------------------------------------------------------ ranks

    async def _report(self) -> None:
        """Let every gang's members report, spread over the interval."""
        parts = 10
        while True:
            for part in range(parts):
                for gang in list(self.gangs.values())[part::parts]:
                    gang.report()
                await asyncio.sleep(REPORT_SECONDS / parts)


def _container(name: str) -> dict[str, Any]:
    return {"name": name, "image": "x", "imageID": "x", "restartCount": 0}


async def in_parallel(call: Callable[[Any], Any], items: Any, at_once: int = 16) -> None:
    """Await the call for all items, `at_once` at the same time."""
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await call(item)

    await asyncio.gather(*(work() for _ in range(at_once)))
