"""The operator's `decide` and `apply` over local processes instead of Kubernetes.

All decisions are made by the product's code. Only the cluster is simulated: the job's status in memory,
with a checked resourceVersion; pods as processes (local_pods.py); and calls over mutual TLS.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from tests.support.servers.pki import Authority

from demo.local_pods import LocalPod, PodSpec
from holdfast_core.api import (
    Checkpoint,
    CheckpointStatus,
    Gang,
    TrainingJob,
    TrainingJobStatus,
    changed,
)
from holdfast_core.clock import SystemClock
from holdfast_core.ids import CheckpointId, RestartRound, Worker, is_spare
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import CoordinatorState, GangRequest, Inventory, Ok, Prune
from holdfast_core.names import parse_pod_name
from holdfast_core.net import operator_dns_name, peer_dns_name
from holdfast_operator.apply.apply import apply, memory_after
from holdfast_operator.decide.decide import decide
from holdfast_operator.kube.api import ConflictError
from holdfast_operator.model import labels
from holdfast_operator.model.actions import (
    Call,
    Delete,
    DesiredObject,
    EmitEvent,
    OutgoingRound,
    ReleasePod,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import (
    AckedRound,
    InventoryView,
    JobMemory,
    NodeView,
    Now,
    Observed,
    PodPhase,
    PodView,
    Reachable,
    SidecarView,
    StoreView,
)
from holdfast_operator.model.ownership import pod_source
from holdfast_operator.sidecars.state import Manifests

T = TypeVar("T")


@dataclass(slots=True)
class Place:
    """Folders of one local cluster."""

    memory_root: Path
    disk_root: Path
    certs_root: Path
    keys: Path
    log_folder: Path
    workdir: Path


@dataclass(slots=True)
class LocalCluster:
    """Implementation of holdfast_operator.apply.apply.Effects that also observes the cluster."""

    job: TrainingJob
    place: Place
    command: tuple[str, ...]
    store: StoreView | None
    authority: Authority
    pods: dict[str, LocalPod] = field(default_factory=dict)
    """Pods by name. Each change replaces the dict instead of updating it, because the threads of the story
    and of the operator both change it and iterate over it."""
    _pods_change: threading.Lock = field(default_factory=threading.Lock)
    nodes: dict[str, NodeView] = field(default_factory=dict)
    sidecars: dict[str, SidecarView] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)
    coordinator: CoordinatorState | None = None
    acted_version: int = 0
    events: list[str] = field(default_factory=list)
    memory: JobMemory = field(default_factory=JobMemory)
    clock: SystemClock = field(default_factory=SystemClock)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _session: aiohttp.ClientSession | None = None
    _tls: ssl.SSLContext | bool = True
    _manifests: Manifests = field(init=False)
    _calls: set[str] = field(default_factory=set)
    _pruned: set[Prune] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._manifests = Manifests(self.job.uid)

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Observe, decide and apply in a loop until cancelled."""
        folder = self.place.certs_root / "operator"
        self.authority.write_leaf(folder, operator_dns_name(self.job.uid))
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self._tls = context
        async with aiohttp.ClientSession() as session:
            self._session = session
            poll = asyncio.create_task(self._poll_coordinator())
            try:
                while True:
                    if poll.done():
                        poll.result()
                    self._wake.clear()
                    await self.one_pass()
                    # asyncio.wait_for of Python 3.11 ignores a cancellation that comes with the event.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.2):
                            await self._wake.wait()
            finally:
                poll.cancel()
                for task in self._tasks:
                    task.cancel()

    async def one_pass(self) -> None:
        now = Now(self.clock.monotonic(), self.clock.utc_now())
        self._look_after_spares()
        observed = self.observe()
        decision = decide(observed, now)
        if decision.acted_version is not None:
            self.acted_version = decision.acted_version
        try:
            applied = await apply(decision, observed, self)
        except ConflictError:
            self._wake.set()
            return
        self.memory = memory_after(decision, observed, applied)
        for failed in applied.failed:
            self.events.append(str(failed))

    def observe(self) -> Observed:
        return Observed(
            job=self.job,
            pods=pod_source(self.job).members(
                tuple(self._pod_view(p) for p in self.pods.values()), frozenset()
            ),
            sidecars=tuple(self.sidecars.values()),
            nodes=self.nodes,
            coordinator=self.coordinator,
            checkpoints=tuple(self.checkpoints.values()),
            store=self.store,
            sidecar=SidecarSettings(image="local"),
            secrets=frozenset(self.secrets),
            memory=self.memory,
        )

    def _look_after_spares(self) -> None:
        """Read the inventory of each spare until it is ready. Nothing else calls its sidecar."""
        for pod in self.pods.values():
            address, uid, name = pod.address(), pod.spec.uid, pod.spec.name
            known = self.sidecars.get(uid)
            inventory = None if known is None else known.inventory
            ready = inventory is not None and inventory.launcher
            if is_spare(pod.spec.worker) and address is not None and not ready:
                call = self._read_inventory(address, name, uid)
                self._start(f"inventory {name}", pod.spec.worker, uid, call)

    async def _read_inventory(self, address: str, pod: str, uid: str) -> None:
        found = await self._call(address, pod, "/v1/inventory", None, Inventory)
        stored = await self._stored(address, pod, found)
        self._update_sidecar(uid, stored, sealed=found.round)

    def _pod_view(self, pod: LocalPod) -> PodView:
        node = f"node-{pod.spec.worker}"
        self.nodes.setdefault(node, NodeView(node, labels={"kubernetes.io/hostname": node}))
        address = pod.address()
        return PodView(
            name=pod.spec.name,
            uid=pod.spec.uid,
            worker=pod.spec.worker,
            birth_round=pod.spec.birth_round,
            phase=PodPhase(pod.phase),
            ip=address,
            node=node,
            terminating=pod.terminating,
            ready=address is not None,
            trainer_exit_code=pod.exit_code,
            trainer_restarts=pod.trainer_restarts,
            sidecar_started=address is not None,
            sidecar_restarts=pod.sidecar_restarts,
        )

    def member(self, worker: Worker) -> str:
        """Return the name of the worker's pod in the current round."""
        return pod_source(self.job).identity(worker, self.job.status.members[worker])

    # ------------------------------------------------------------ faults of the demo

    def lose(self, name: str) -> None:
        self._forget(name).delete()
        self._wake.set()

    def evict(self, name: str, grace_seconds: float) -> None:
        """Evict a pod and wait until it is gone."""
        pod = self.pods[name]
        pod.evict(grace_seconds)
        self._forget(name)
        self._wake.set()

    def _forget(self, name: str) -> LocalPod:
        with self._pods_change:
            gone = self.pods[name]
            self.pods = {known: pod for known, pod in self.pods.items() if known != name}
        return gone

    # ------------------------------------------------------------ effects on Kubernetes

    async def write_status(self, job: Gang, status: TrainingJobStatus) -> None:
        if job.resource_version != self.job.resource_version:
            raise ConflictError(f"status of {job.name}: {job.resource_version} is not the newest")
        version = str(int(self.job.resource_version) + 1)
        metadata = changed(self.job.metadata, resource_version=version)
        self.job = changed(self.job, metadata=metadata, status=status)
        self._wake.set()

    async def pod_is_gone(self, job: Gang, name: str) -> bool:
        return name not in self.pods

    def is_present(self, job: Gang, wanted: DesiredObject) -> bool:
        return wanted.name in self.secrets

    async def put(self, job: Gang, wanted: DesiredObject) -> None:
        """Create pods, certificates and Checkpoints. Services and policies mean nothing to processes."""
        match wanted.kind:
            case labels.POD:
                await self._create_pod(job, wanted.name)
            case labels.SECRET:
                for pod in wanted.leaves:
                    self.authority.write_leaf(
                        self.place.certs_root / pod, peer_dns_name(pod, job.uid)
                    )
                self.secrets.add(wanted.name)
            case Checkpoint.KIND:
                self._put_checkpoint(wanted)
        self._wake.set()

    def _put_checkpoint(self, wanted: DesiredObject) -> None:
        known = self.checkpoints.get(wanted.name)
        status = {k: v for k, v in wanted.body["status"].items() if v is not None}
        if wanted.resource_version is None:
            if known is None:
                created = Checkpoint.from_dict({**wanted.body, "status": status})
                given = changed(created.metadata, uid=str(uuid.uuid4()), resource_version="1")
                self.checkpoints[wanted.name] = changed(created, metadata=given)
            return
        if known is None or known.resource_version != wanted.resource_version:
            raise ConflictError(
                f"Checkpoint {wanted.name}: {wanted.resource_version} is not the newest"
            )
        version = str(int(known.resource_version) + 1)
        metadata = changed(known.metadata, resource_version=version)
        written = CheckpointStatus.from_dict(status)
        self.checkpoints[wanted.name] = changed(known, metadata=metadata, status=written)

    async def _create_pod(self, job: Gang, name: str) -> None:
        if name in self.pods:
            return
        worker, birth = _identity(job, name)
        certs = self.place.certs_root / name
        pod = LocalPod(
            PodSpec(
                name=name,
                uid=str(uuid.uuid4()),
                job_uid=job.uid,
                job=job.name,
                namespace=job.namespace,
                worker=worker,
                birth_round=birth,
                store=self.store.config.to_json() if self.store is not None else "",
                node_capacity_bytes=job.spec.checkpoint.node.volume_bytes,
                command=self.command,
                memory_root=self.place.memory_root,
                disk_root=self.place.disk_root,
                certs=certs,
                keys=self.place.keys,
                log_folder=self.place.log_folder,
                workdir=self.place.workdir,
            )
        )
        with self._pods_change:
            self.pods = {**self.pods, name: pod}
        await asyncio.to_thread(pod.start)
        self._wake.set()

    async def delete(self, job: Gang, delete: Delete | ReleasePod) -> None:
        """Delete a pod, a Secret or a Checkpoint. No Kueue adds a finalizer to processes."""
        if isinstance(delete, ReleasePod):
            return
        pod = self.pods.get(delete.name)
        if delete.kind == labels.POD and pod is not None and pod.spec.uid == delete.uid:
            self._forget(delete.name)
            await asyncio.to_thread(pod.delete)
        elif delete.kind == labels.SECRET:
            self.secrets.discard(delete.name)
        elif delete.kind == Checkpoint.KIND:
            self.checkpoints.pop(delete.name, None)

    async def emit(self, job: Gang, event: EmitEvent) -> None:
        self.events.append(f"{event.reason}: {event.message}")

    # ------------------------------------------------------------ effects on sidecars

    def call(self, job: Gang, call: Call) -> bool:
        if isinstance(call.message, Prune) and call.message in self._pruned:
            self._pruned.remove(call.message)
            return True
        self._start(f"{call.path} {call.pod}", call.worker, call.pod_uid, self._send(call))
        return False

    async def _send(self, call: Call) -> None:
        message = call.message
        pod = next(p for p in self.pods.values() if p.spec.uid == call.pod_uid)
        address, restarts = pod.address() or "", pod.sidecar_restarts
        if isinstance(message, GangRequest):
            await self._call(address, call.pod, call.path, message, Ok)
            return
        if isinstance(message, Prune):
            await self._call(address, call.pod, call.path, message, Ok)
            self._pruned.add(message)
            return
        sent = message.message if isinstance(message, OutgoingRound) else message
        found = await self._call(address, call.pod, call.path, sent, Inventory)
        stored = await self._stored(address, call.pod, found)
        self._update_sidecar(call.pod_uid, stored, sealed=sent.round)
        if isinstance(message, OutgoingRound):
            view = self.sidecars[call.pod_uid]
            acked = AckedRound(sent.round, message.message.version, message.digest, restarts)
            self.sidecars[call.pod_uid] = replace(view, acked=acked)

    def _start(self, key: str, worker: Worker, uid: str, call: Any) -> None:
        """Start `call` as a task, unless a call with the same key is running.

        A pass never waits for a call.
        """
        self.sidecars.setdefault(uid, SidecarView(worker, uid))
        if key in self._calls:
            call.close()
            return
        self._calls.add(key)

        async def guarded() -> None:
            try:
                await call
            except (aiohttp.ClientError, TimeoutError, OSError):
                view = self.sidecars[uid]
                since = view.unreachable_since or self.clock.monotonic()
                self.sidecars[uid] = replace(view, reachable=Reachable.NO, unreachable_since=since)
            finally:
                self._calls.discard(key)
                self._wake.set()

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stored(self, address: str, pod: str, inventory: Inventory) -> InventoryView:
        async def fetch(checkpoint: CheckpointId) -> bytes | None:
            path = f"/v1/manifest?step={checkpoint.step}&round={checkpoint.round}"
            return await self._call(address, pod, path, None, bytes)

        spec = self.job.spec
        return await self._manifests.view(inventory, spec.workers * spec.procs_per_worker, fetch)

    def _update_sidecar(self, uid: str, inventory: InventoryView, *, sealed: RestartRound) -> None:
        view = self.sidecars[uid]
        self.sidecars[uid] = replace(
            view,
            reachable=Reachable.YES,
            unreachable_since=None,
            inventory=inventory,
            sealed_round=max(sealed, inventory.round),
        )

    async def _call(
        self, address: str, pod: str, path: str, message: Any | None, reply: type[T]
    ) -> T:
        """Post a message, or get the path if there is none. `bytes` is a document as it is."""
        assert self._session is not None
        url = f"https://{address.rpartition(':')[0]}{path}"
        async with self._session.request(
            "GET" if message is None else "POST",
            url,
            data=None if message is None else dumps(message),
            ssl=self._tls,
            server_hostname=peer_dns_name(pod, self.job.uid),
            timeout=aiohttp.ClientTimeout(total=60),
        ) as response:
            body = await response.read()
            if response.status != 200:
                self.events.append(f"{path} to {pod}: {response.status} {body.decode()}")
                raise aiohttp.ClientError(f"{path}: {response.status}")
            return body if isinstance(body, reply) else loads(reply, body)

    async def _poll_coordinator(self) -> None:
        while True:
            worker = self.job.status.coordinator
            pod = None if worker is None else self.pods.get(self.member(worker))
            address = pod.address() if pod is not None else None
            if pod is None or address is None or self._session is None:
                await asyncio.sleep(0.1)
                continue
            try:
                async with self._session.get(
                    f"https://{address.rpartition(':')[0]}/v1/state",
                    params={"since": str(self.acted_version), "timeout": "5"},
                    ssl=self._tls,
                    server_hostname=peer_dns_name(pod.spec.name, self.job.uid),
                    timeout=aiohttp.ClientTimeout(total=10),
                ) as response:
                    body = await response.read()
                    if response.status == 200:
                        self.coordinator = loads(CoordinatorState, body)
                        self._wake.set()
                    else:
                        await asyncio.sleep(0.2)
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(0.2)


def _identity(job: Gang, pod: str) -> tuple[Worker, RestartRound]:
    found = parse_pod_name(job.name, job.uid, pod)
    if found is None:
        raise ValueError(f"{pod} is not the name of a pod of job {job.name} with uid {job.uid}")
    return found
