"""In-memory Kubernetes API (fake_api.py) with nodes and kubelets that run fake sidecars.

One tick is one second. All jobs of a cluster have the same name, one after the other; the newest is the
current job. A deleted job leaves pods, Secrets, Services and Checkpoints behind; they are collected with
the delays of a real cluster, or stay. Nothing in this module depends on how the operator decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.support.operator.builders import NAMESPACE, raw_store
from tests.support.operator.fake_api import STAMP, FakeApi, Key
from tests.support.operator.fake_sidecar import FakeSidecar
from tests.support.operator.toy_gang import ToyGang, ToyStore

from holdfast_core.api import Checkpoint
from holdfast_core.contract import SIDECAR_CONTAINER, TRAINER_CONTAINER
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import (
    FIRST_SPARE,
    CheckpointId,
    JobUid,
    RestartRound,
    Step,
    is_spare,
)
from holdfast_core.names import pod_name
from holdfast_operator.kube.api import ApiError
from holdfast_operator.model import labels
from holdfast_operator.model.job import PodPhase, PodView
from holdfast_operator.model.ownership import worker_identity

LEASE_SECONDS = 20
"""Seconds of silence after which a node counts as lost."""
TAINT_SECONDS = 40
"""Seconds of silence after which a node is tainted."""
UNREACHABLE = "node.kubernetes.io/unreachable"
DELETE_SECONDS = 2
"""Default of FakeCluster.delete_seconds."""
START_SECONDS = 2
"""Seconds from the creation of a pod until its sidecar listens."""


@dataclass(slots=True)
class FakeNode:
    name: str
    dead: bool = False
    """Whether the node is powered off: its pods do not run, and no kubelet confirms their deletion."""
    cut_off: bool = False
    """Whether the node runs but neither the API nor the operator can reach it."""
    deleted: bool = False
    """Whether its Node and Lease are deleted and its kubelet is gone."""
    notice: str = ""
    """Key of a taint with effect NoSchedule that says that the node will be taken away soon. "": none."""
    silent_ticks: int = 0
    renewed: float = 0
    """Time at which its kubelet last renewed the lease."""
    published: tuple[float, bool, str, bool] | None = None
    """What its Node and Lease in the API say of it."""

    @property
    def silent(self) -> bool:
        return self.dead or self.cut_off or self.deleted

    @property
    def tainted(self) -> bool:
        return self.silent_ticks >= TAINT_SECONDS


@dataclass(slots=True)
class FakePod:
    view: PodView
    """The state that its kubelet reports."""
    job_uid: str
    age: int = 0
    deleted_for: int | None = None
    removed: bool = False
    """Whether its kubelet has confirmed the deletion, or a forced delete did not wait for it. Finalizers keep
    the object."""
    announced: tuple[str, str] | None = None
    """Reason and message of condition TerminationTarget, by which Kueue announces its deletion."""
    unreadable: bool = False
    """Whether its status holds a value that no parser accepts."""


@dataclass(frozen=True, slots=True)
class ChoiceMade:
    """Record of a round's second status write (CAS 2), which sets its restore point.

    `before` and `status` are the job's status before and after. `readable_members` names the members whose
    disks existed then; a pod that only fails to answer the operator still has its disk. `stored` are its
    checkpoints in the object store, and `start_over` and `rollback` are these parts of its spec.
    """

    before: Mapping[str, Any]
    status: Mapping[str, Any]
    readable_members: frozenset[str]
    stored: frozenset[CheckpointId]
    start_over: Mapping[str, Any]
    rollback: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeletionMade:
    """Record of a pod that the operator deleted, with the newest readable commit before and after."""

    name: str
    node_lost: bool
    before: CheckpointId | None
    after: CheckpointId | None


_KEPT = ("name", "namespace", "creationTimestamp", "labels")
"""Metadata of a job that is created again."""


class Kueue(Protocol):
    """A Kueue that is installed in the cluster."""

    def admit_pod(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a pod that is created as the webhook leaves it."""
        ...

    def tick(self) -> None:
        """Run the controller for a second."""
        ...


@dataclass(slots=True)
class FakeCluster:
    job: dict[str, Any]
    """The current TrainingJob as the API server holds it."""
    nodes: dict[str, FakeNode]
    store: ToyStore = field(default_factory=ToyStore)
    """The current job's checkpoints in the object store."""
    api: FakeApi = field(init=False)
    gang: ToyGang = field(init=False)
    pods: dict[str, FakePod] = field(default_factory=dict)
    """Pods that a kubelet runs, by name, of the current job and of earlier jobs of its name."""
    sidecars: dict[str, FakeSidecar] = field(default_factory=dict)
    """Sidecars by pod name. Each is the disk of its pod and is lost with it."""
    statuses: list[dict[str, Any]] = field(default_factory=list)
    """Every status that was written of the current job, in order."""
    choices: list[ChoiceMade] = field(default_factory=list)
    deletions: list[DeletionMade] = field(default_factory=list)
    pod_refusal: str = ""
    """Message with which the server refuses to create pods (quota, admission); empty if it accepts them."""
    added_tolerations: list[dict[str, str]] = field(default_factory=list)
    """Tolerations that an admission plug-in of the cluster adds to every pod."""
    full_nodes: set[str] = field(default_factory=set)
    """Names of nodes without room for another pod."""
    gated: bool = False
    """Whether pods that have no node yet have a scheduling gate."""
    delete_seconds: int = DELETE_SECONDS
    """Seconds that a kubelet takes to end a deleted pod."""
    pods_per_node: int = 1000
    """Number of this cluster's pods that fit on a node."""
    hold_starts: bool = False
    """Whether every pod stays Pending (images are pulled, or a mounted Secret is missing)."""
    stuck_nodes: set[str] = field(default_factory=set)
    """Names of nodes on which pods stay Pending (a volume or the network cannot be set up there)."""
    all_silent: bool = False
    """Whether no sidecar answers the operator while the gang's own traffic continues (a default-deny
    policy)."""
    silent_workers: set[int] = field(default_factory=set)
    """Workers whose sidecars do not answer the operator, in whichever pod they run."""
    total_steps: int = 100_000
    kueue: Kueue | None = None
    ends_as: PodPhase = PodPhase.FAILED
    """Phase of a deleted pod that has ended and that finalizers keep."""
    seconds: float = 1000
    _uids: int = 0

    def __post_init__(self) -> None:
        self.gang = ToyGang(store=self.store, total=self.total_steps)
        self.api = _ClusterApi(self)
        self.job = self.api.put("trainingjobs", self.job)
        store = self.job["spec"]["checkpoint"].get("object")
        if store is not None:
            self.api.put("checkpointstores", raw_store(store["storeRef"]["name"]))

    @property
    def uid(self) -> JobUid:
        return JobUid(self.job["metadata"]["uid"])

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """Readable Checkpoints of all jobs, by name."""
        found = {}
        for raw in self.api.all("checkpoints", NAMESPACE):
            with suppress(ValueError, HoldfastError):
                found[raw["metadata"]["name"]] = Checkpoint.from_dict(raw)
        return found

    @property
    def services(self) -> set[str]:
        return self.api.names("services", NAMESPACE)

    @property
    def secrets(self) -> set[str]:
        """Secrets with data. A pod that mounts the keys of an empty one waits for ever."""
        found = self.api.all("secrets", NAMESPACE)
        return {raw["metadata"]["name"] for raw in found if raw.get("data")}

    # ------------------------------------------------------------------ the API

    def status_written(self, before: Mapping[str, Any]) -> None:
        """Record what a write to the job's status has changed. `before` is the status before it."""
        written = self.job["status"]
        if written == before:
            return
        if "restorePoint" in written and "restorePoint" not in before:
            policy = self.job["spec"].get("failurePolicy", {}).get("startOver", {})
            self.choices.append(
                ChoiceMade(
                    before,
                    written,
                    self._readable(written),
                    frozenset(self.store.checkpoints),
                    dict(policy),
                    dict(self.job["spec"].get("rollback") or {}),
                )
            )
        self.statuses.append(written)

    def member_names(self, status: Mapping[str, Any]) -> list[str]:
        """Return the names of the workers' pods by a status. A pod that was a spare keeps its name."""
        spares = (status.get("spares") or {}).get("promoted") or []
        promoted = {int(worker): pod for worker, _, pod in (r.partition("=") for r in spares)}
        return [
            promoted.get(key[0]) or pod_name("job", self.uid, *key)
            for key in enumerate(status.get("members") or [])
        ]

    def spare_names(self, status: Mapping[str, Any]) -> list[str]:
        """Return the names of the pods of the spares that the job is to have by a status."""
        births = (status.get("spares") or {}).get("births") or []
        return [pod_name("job", self.uid, *key) for key in enumerate(births, FIRST_SPARE)]

    def _readable(self, status: Mapping[str, Any]) -> frozenset[str]:
        names = self.member_names(status)
        return frozenset(n for n in names if n in self.pods and self._has_disk(self.pods[n]))

    def _has_disk(self, pod: FakePod) -> bool:
        """Return whether the pod runs, is not being deleted, and its node is not lost."""
        node = self.nodes.get(pod.view.node or "")
        running = pod.view.phase is PodPhase.RUNNING and not pod.view.terminating
        return node is not None and node.silent_ticks < LEASE_SECONDS and running

    def newest_commit(
        self, without: str = "", *, with_lost_nodes: bool = False
    ) -> CheckpointId | None:
        """Return the newest commit on the job's lineage that is complete on disks or in the store.

        The disk of pod `without` does not count. With `with_lost_nodes`, disks of live pods on lost nodes
        count.
        """
        there = [
            self.sidecars[n]
            for n, p in self.pods.items()
            if n != without
            and n in self.sidecars
            and (self._has_disk(p) or (with_lost_nodes and p.view.alive))
        ]
        bases = {c.status["restartRound"]: point_of(c.status) for c in self.choices}
        found = [
            p.id
            for p in self.gang.promises
            if is_ancestor(p.id, max(bases), bases)
            and (
                p.id in self.store.checkpoints
                or (
                    any(p.id in s.manifests for s in there)
                    and all(any((p.id, r) in s.shards for s in there) for r in range(len(p.pods)))
                )
            )
        ]
        return max(found, key=lambda i: (i.step, i.round), default=None)

    def operator_deletes(self, name: str, uid: str, *, force: bool) -> None:
        """Record a deletion that the operator decided on, and delete the pod."""
        pod = self.pods.get(name)
        if pod is not None and pod.view.uid == uid and pod.view.alive:
            node = self.nodes.get(pod.view.node or "")
            lost = node is not None and node.silent_ticks >= LEASE_SECONDS
            self.deletions.append(
                DeletionMade(
                    name,
                    lost,
                    self.newest_commit(with_lost_nodes=lost),
                    self.newest_commit(name, with_lost_nodes=lost),
                )
            )
        self.delete_pod(name, uid, force=force)

    def touch_job(self) -> None:
        """Simulate another client's write to the job: its resourceVersion changes."""
        self.api.touch(self.job)

    def change_spec(self, **fields: object) -> None:
        """Change fields of the job's spec as a user's patch would."""
        self.job["spec"].update(fields)
        self.job["metadata"]["generation"] += 1
        self.touch_job()

    def pod_created(self, raw: Mapping[str, Any]) -> None:
        """Register a created pod so that its kubelet runs it, if it is the pod of a worker."""
        identity = worker_identity(raw)
        if identity is None:
            return
        meta, spec = raw["metadata"], raw["spec"]
        stored = self.api.objects["pods", NAMESPACE, meta["name"]]["spec"]
        stored["tolerations"] = [*spec.get("tolerations", []), *self.added_tolerations]
        view = PodView(
            name=meta["name"],
            uid=meta["uid"],
            worker=identity.worker,
            birth_round=identity.birth_round,
            phase=PodPhase.PENDING,
            node=raw["spec"].get("nodeName"),
            placeholder=identity.placeholder,
        )
        self.pods[meta["name"]] = FakePod(view, identity.job_uid)

    def delete_pod(self, name: str, uid: str, *, force: bool) -> None:
        pod = self.pods.get(name)
        if pod is None or pod.view.uid != uid:
            return
        if force or pod.view.node is None:  # the API server does not wait for a kubelet
            self.lose_pod(name)
        elif pod.deleted_for is None:
            pod.deleted_for = 0
            pod.view = replace(pod.view, terminating=True)

    def publish(self) -> None:
        """Write the state of kubelets and nodes to the API."""
        for pod in self.pods.values():
            raw = self.api.objects["pods", NAMESPACE, pod.view.name]
            status = _UNREADABLE_STATUS if pod.unreadable else pod_status(pod.view)
            if pod.announced is not None:
                reason, message = pod.announced
                told = {"type": "TerminationTarget", "reason": reason, "message": message}
                status = {**status, "conditions": [{**told, "status": "True"}]}
            if raw.get("status") != status or raw["spec"].get("nodeName") != pod.view.node:
                raw["status"], raw["spec"]["nodeName"] = status, pod.view.node
                self.api.touch(raw)
            if pod.view.terminating and "deletionTimestamp" not in raw["metadata"]:
                raw["metadata"]["deletionTimestamp"] = STAMP
                self.api.touch(raw)
        for node in self.nodes.values():
            self._publish_node(node)

    def _publish_node(self, node: FakeNode) -> None:
        state_now = (node.renewed, node.tainted, node.notice, node.deleted)
        if node.published == state_now:
            return
        node.published = state_now
        spec = {"renewTime": str(node.renewed)}
        keys = [UNREACHABLE] * node.tainted + [node.notice] * bool(node.notice)
        taints = [{"key": key, "effect": "NoSchedule"} for key in keys]
        for plural, namespace, state in (
            ("nodes", "", {"spec": {"taints": taints}}),
            ("leases", "kube-node-lease", {"spec": spec}),
        ):
            known = self.api.objects.get((plural, namespace, node.name))
            if node.deleted:
                if known is not None:
                    self.api.remove(plural, namespace, node.name)
            elif known is None:
                meta = {"name": node.name, "uid": f"{plural}-{node.name}", "namespace": namespace}
                self.api.put(plural, {"metadata": meta, **state})
            elif any(known[k] != v for k, v in state.items()):
                known.update(state)
                self.api.touch(known)

    # ------------------------------------------------------------------ the job, again

    def delete_job(self) -> None:
        """Delete the job immediately, as with background propagation.

        Objects that it owns are collected later; its Checkpoints stay.
        """
        self.api.remove("trainingjobs", NAMESPACE, self.job["metadata"]["name"])

    def create_job_again(self) -> None:
        """Delete the job if it exists, and create a new one under its name."""
        self.delete_job()
        self._uids += 1
        meta = self.job["metadata"]
        self.job = self.api.put(
            "trainingjobs",
            {
                **self.job,
                "metadata": {
                    **{k: meta[k] for k in _KEPT if k in meta},
                    "uid": f"aaaaaaaa-0000-0000-0000-{self._uids:012}",
                    "generation": 1,
                },
                "status": {},
            },
        )
        self.store = ToyStore()
        self.gang = ToyGang(store=self.store, total=self.total_steps)
        self.statuses, self.choices, self.deletions = [], [], []

    def forge_pod(
        self, namespace: str, worker: int, birth: int, *, owned: bool = False, name: str = ""
    ) -> None:
        """Create a failed pod with all labels of a worker of the current job.

        With `owned` it also has the owner reference.
        """
        meta = self.job["metadata"]
        owner = {
            "apiVersion": self.job["apiVersion"],
            "kind": self.job["kind"],
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        marks = {
            labels.MANAGED_BY: labels.MANAGED_BY_VALUE,
            labels.JOB_NAME: meta["name"],
            labels.JOB_UID: meta["uid"],
            labels.COMPONENT: labels.COMPONENT_WORKER,
            labels.WORKER: str(worker),
            labels.BIRTH_ROUND: str(birth),
        }
        self.api.put(
            "pods",
            {
                "metadata": {
                    "name": name or pod_name(meta["name"], self.uid, worker, birth),
                    "namespace": namespace,
                    "labels": marks,
                    "ownerReferences": [owner] if owned else [],
                },
                "spec": {},
                "status": {"phase": "Failed", "reason": "Forged"},
            },
        )

    def forged_pods(self) -> set[tuple[str, str]]:
        """Return namespace and name of the pods that no kubelet of this cluster runs."""
        pods = (raw["metadata"] for raw in self.api.all("pods"))
        return {
            (m["namespace"], m["name"])
            for m in pods
            if m["namespace"] != NAMESPACE or m["name"] not in self.pods
        }

    # ------------------------------------------------------------------ faults

    def lose_pod(self, name: str) -> None:
        """Remove the pod and its disk immediately. Finalizers keep the object of the pod."""
        self.sidecars.pop(name, None)
        pod = self.pods.get(name)
        if pod is None:
            return
        if not self.api.objects["pods", NAMESPACE, name]["metadata"].get("finalizers"):
            del self.pods[name]
            self.api.remove("pods", NAMESPACE, name)
            return
        pod.removed = True
        view = pod.view
        node = self.nodes.get(view.node or "")
        ends = node is not None and not node.silent and not view.ended
        phase = self.ends_as if ends else view.phase
        pod.view = replace(view, terminating=True, ready=False, phase=phase)

    def finalizers_removed(self, name: str) -> None:
        """Remove the object of a pod that is gone from its node, unless a finalizer keeps it."""
        pod = self.pods.get(name)
        if pod is None or not pod.removed:
            return
        if not self.api.objects["pods", NAMESPACE, name]["metadata"].get("finalizers"):
            del self.pods[name]
            self.api.remove("pods", NAMESPACE, name)

    def fail_pod(self, name: str, reason: str) -> None:
        pod = self.pods.get(name)
        if pod is not None:
            pod.view = replace(pod.view, phase=PodPhase.FAILED, reason=reason, ready=False)

    def runs(self, name: str) -> bool:
        """Return whether the sidecar of the pod runs, on a node that has power."""
        return self._runs(self.pods[name])

    def end_pod(self, name: str) -> None:
        """Let the containers of the pod return 0."""
        pod = self.pods[name]
        pod.view = replace(
            pod.view,
            phase=PodPhase.SUCCEEDED,
            trainer_exit_code=0,
            ready=False,
            sidecar_started=False,
        )

    def restart_sidecar(self, name: str) -> None:
        """Restart the sidecar's container.

        The disk and the sealed round stay; the ROUND in memory is lost.
        """
        pod, sidecar = self.pods.get(name), self.sidecars.get(name)
        if pod is None or sidecar is None:
            return
        pod.view = replace(pod.view, sidecar_restarts=pod.view.sidecar_restarts + 1)
        sidecar.restart()

    # ------------------------------------------------------------------ what can be seen and called

    def reachable(self, pod: PodView) -> FakeSidecar | None:
        """Return the sidecar that the operator reaches at this pod's address, or None if none answers."""
        current = self.pods.get(pod.name)
        if current is None or current.view.uid != pod.uid or not self._answers(current):
            return None
        if self.all_silent or pod.worker in self.silent_workers:
            return None
        return self.sidecars.get(pod.name)

    def _answers(self, pod: FakePod) -> bool:
        return self._runs(pod) and not self.nodes[pod.view.node or ""].cut_off

    def _runs(self, pod: FakePod) -> bool:
        node = self.nodes.get(pod.view.node or "")
        return (
            node is not None
            and not node.dead
            and not node.deleted
            and pod.view.phase is PodPhase.RUNNING
            and pod.view.sidecar_started
        )

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """Advance kubelets, leases, training and garbage collection by one second."""
        self.seconds += 1
        for node in self.nodes.values():
            node.silent_ticks = node.silent_ticks + 1 if node.silent else 0
            if not node.silent:
                node.renewed = self.seconds
        for name, pod in list(self.pods.items()):
            self._kubelet(name, pod)
        running = {n: self.sidecars[n] for n, p in self.pods.items() if self._talks(p)}
        self.gang.tick(running)
        self.api.tick()
        self._finish()
        if self.kueue is not None:
            self.publish()
            self.kueue.tick()

    def _talks(self, pod: FakePod) -> bool:
        """Return whether other workers can reach the pod. They cannot reach a node that is cut off."""
        return self._answers(pod) and pod.view.name in self.sidecars and pod.job_uid == self.uid

    def _kubelet(self, name: str, pod: FakePod) -> None:
        pod.age += 1
        view = pod.view
        if pod.removed:
            return
        if view.node is None:
            gates = self.api.objects["pods", NAMESPACE, name]["spec"].get("schedulingGates")
            gated = self.gated or bool(gates)
            node = None if gated else self._place(view)
            waiting = "SchedulingGated" if gated else "Unschedulable"
            text = None if node else waiting
            message = "" if node else f"0/{len(self.nodes)} nodes are available"
            pod.view = replace(view, node=node, reason=text, message=message)
            return
        if self.nodes[view.node].silent:
            return
        if pod.deleted_for is not None:
            pod.deleted_for += 1
            if pod.deleted_for >= self.delete_seconds:
                self.lose_pod(name)
                return
        if (
            self.hold_starts
            or view.node in self.stuck_nodes
            or not self._mounts(name) <= self.secrets
        ):
            return
        if view.phase is PodPhase.PENDING and pod.age >= START_SECONDS:
            self._uids += 1
            pod.view = replace(
                view,
                phase=PodPhase.RUNNING,
                ip=f"10.0.0.{self._uids}",
                sidecar_started=True,
            )
            self.sidecars[name] = FakeSidecar(view.worker, name, view.birth_round, launcher=True)
        sidecar = self.sidecars.get(name)
        if sidecar is not None and pod.view.phase is PodPhase.RUNNING:
            ready = not is_spare(sidecar.worker)
            if pod.view.ready != ready:
                pod.view = replace(pod.view, ready=ready)

    def _mounts(self, name: str) -> set[str]:
        """Return the Secrets that the pod waits for."""
        volumes = self.api.objects["pods", NAMESPACE, name]["spec"]["volumes"]
        return {v["secret"]["secretName"] for v in volumes if "secret" in v}

    def _place(self, view: PodView) -> str | None:
        """Return the node with the fewest pods that has room, no taint, and matches the pod's affinity.

        Of tolerations, only the one of all taints is supported.
        """
        spec = self.api.objects["pods", NAMESPACE, view.name]["spec"]
        tolerates_all = {"operator": "Exists"} in spec.get("tolerations", [])
        load = {
            n.name: 0
            for n in self.nodes.values()
            if not n.deleted
            and (tolerates_all or not (n.tainted or n.notice))
            and n.name not in self.full_nodes
            and _allows(spec["affinity"], n.name)
        }
        for pod in self.pods.values():
            if pod.view.node in load:
                load[pod.view.node] += 1
        load = {n: pods for n, pods in load.items() if pods < self.pods_per_node}
        return min(load, key=lambda n: (load[n], n)) if load else None

    def _finish(self) -> None:
        """End the pods of a finished run once it is released."""
        run = self.gang.run
        if run is None or not run.finished or not run.released:
            return
        for name, pod in self.pods.items():
            sidecar = self.sidecars.get(name)
            ran = sidecar is not None and sidecar.round == run.round
            if ran and pod.view.phase is PodPhase.RUNNING:
                pod.view = replace(pod.view, phase=PodPhase.SUCCEEDED, trainer_exit_code=0)


def _allows(affinity: Mapping[str, Any], node: str) -> bool:
    """Return whether a term of the required node affinity selects the node.

    Only name fields are supported.
    """
    required = (affinity.get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if required is None:
        return True
    return any(
        bool(term.get("matchFields"))
        and all(
            (node in field["values"]) == (field["operator"] == "In")
            for field in term["matchFields"]
        )
        for term in required["nodeSelectorTerms"]
    )


Bases = Mapping[int, CheckpointId | None]
"""The checkpoint from which each round started that has chosen a restore point; None for an empty start."""


def is_ancestor(id_: CheckpointId, round_: int, bases: Bases) -> bool:
    """Return whether the state that `round_` trained on is this checkpoint or descends from it."""
    if id_.round == round_:
        return True
    base = bases.get(round_)
    if base is None:
        return False
    if id_.round == base.round:
        return id_.step <= base.step
    return is_ancestor(id_, base.round, bases)


def point_of(status: Mapping[str, Any]) -> CheckpointId | None:
    point = status["restorePoint"]
    if "step" not in point:
        return None
    return CheckpointId(Step(point["step"]), RestartRound(point["round"]))


_UNREADABLE_STATUS = {"phase": "Hibernating"}


def pod_status(view: PodView) -> dict[str, Any]:
    """Return the `.status` of a pod as a kubelet writes it. `watch.records.pod_view` parses it."""
    trainer: dict[str, Any] = {"name": TRAINER_CONTAINER, "restartCount": view.trainer_restarts}
    if view.trainer_exit_code is not None:
        trainer["state"] = {"terminated": {"exitCode": view.trainer_exit_code}}
    elif view.waiting_reason is not None:
        waiting = {"reason": view.waiting_reason, "message": view.waiting_message}
        trainer["state"] = {"waiting": waiting}
    started = {
        "name": SIDECAR_CONTAINER,
        "started": view.sidecar_started,
        "restartCount": view.sidecar_restarts,
    }
    conditions = [{"type": "Ready", "status": str(view.ready)}]
    if view.disrupted:
        conditions.append({"type": "DisruptionTarget", "status": "True"})
    return {
        "phase": view.phase.value,
        "podIP": view.ip,
        "reason": view.reason,
        "message": view.message,
        "containerStatuses": [trainer],
        "initContainerStatuses": [started],
        "conditions": conditions,
    }


class _ClusterApi(FakeApi):
    """API of a FakeCluster.

    Kubelets publish their state before each read, and run the pods that are created.
    """

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__()
        self._cluster = cluster

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        self._cluster.publish()
        return await super().get(path, params)

    async def post(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        text = self._cluster.pod_refusal
        if text and body.get("kind") == "Pod":
            name = body["metadata"]["name"]
            raise ApiError(403, "Forbidden", f"pods {name} is forbidden: {text}")
        kueue = self._cluster.kueue
        if kueue is not None and body.get("kind") == "Pod":
            body = kueue.admit_pod(body)
        answer = await super().post(path, body, params)
        if answer.get("kind") == "Pod":
            self._cluster.pod_created(answer)
        return answer

    async def patch(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        before = self._cluster.job["status"]
        answer = await super().patch(path, body, params)
        self._cluster.status_written(before)
        return answer

    async def patch_strategic(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        answer = await super().patch_strategic(path, body, params)
        self._cluster.finalizers_removed(answer["metadata"]["name"])
        return answer

    def _delete(self, key: Key, options: Mapping[str, Any]) -> None:
        pod = self._cluster.pods.get(key[2])
        if key[:2] != ("pods", NAMESPACE) or pod is None:
            super()._delete(key, options)
            return
        force = options.get("gracePeriodSeconds") == 0
        self._cluster.operator_deletes(key[2], pod.view.uid, force=force)
