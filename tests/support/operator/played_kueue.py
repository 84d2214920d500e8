"""A played Kueue: its webhook for pods and its controller of pod groups, for a FakeCluster.

The rules are those of kubernetes-sigs/kueue, pkg/controller/jobs/pod (pod_webhook.go, pod_controller.go) and
pkg/controller/jobframework/reconciler.go. Nothing in this module depends on how the operator decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.operator.builders import NAMESPACE
from tests.support.operator.fake_cluster import FakeCluster

from holdfast_operator.kube.api import ApiError

QUEUE = "kueue.x-k8s.io/queue-name"
GROUP = "kueue.x-k8s.io/pod-group-name"
COUNT = "kueue.x-k8s.io/pod-group-total-count"
ROLE = "kueue.x-k8s.io/role-hash"
RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
MANAGED = "kueue.x-k8s.io/managed"
GATE = "kueue.x-k8s.io/admission"
EVICTED = "WorkloadEvictedDueToPreempted"
COLLECT_SECONDS = 5
"""Seconds from the end of the last pod of a group until its Workload is gone."""


@dataclass(slots=True)
class Workload:
    queue: str
    count: int
    roles: frozenset[str]
    admitted: bool = False
    evicted: bool = False
    finished: bool = False
    empty_for: int = 0


@dataclass(slots=True)
class PlayedKueue:
    """Kueue of one cluster. `attach` installs its webhook; `FakeCluster.tick` runs its controller."""

    cluster: FakeCluster
    quota: int = 1000
    """Number of pods of all admitted Workloads."""
    queues: set[str] = field(default_factory=lambda: {"team-queue"})
    """LocalQueues that exist."""
    workloads: dict[str, Workload] = field(default_factory=dict)
    """By the name of the group."""
    excess: list[str] = field(default_factory=list)
    """Names of pods that it deleted because their group had more pods than its total count."""
    collected: list[str] = field(default_factory=list)
    """Names of groups that got new pods after their last pod was gone. The pods were deleted with the
    Workload of the group."""
    errors: list[str] = field(default_factory=list)
    """What Kueue refuses about a group: its pods would wait for ever."""

    def attach(self) -> None:
        self.cluster.kueue = self

    # ------------------------------------------------------------------ webhook

    def admit_pod(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pod as the webhook leaves it, or raise the error of its validation."""
        pod = {**body, "metadata": dict(body["metadata"]), "spec": dict(body["spec"])}
        meta, spec = pod["metadata"], pod["spec"]
        marks, notes = dict(meta.get("labels") or {}), dict(meta.get("annotations") or {})
        if not marks.get(QUEUE):
            return pod
        if bool(marks.get(GROUP)) != bool(notes.get(COUNT)):
            text = f"both the '{COUNT}' annotation and the '{GROUP}' label should be set"
            raise ApiError(403, "Forbidden", f"admission webhook denied the request: {text}")
        meta["labels"] = {**marks, MANAGED: "true"}
        # Without the annotation, Kueue hashes the shape of the pod, which includes its affinity.
        meta["annotations"] = {ROLE: str(hash(repr(spec.get("affinity")))), **notes}
        meta["finalizers"] = [*meta.get("finalizers", []), MANAGED]
        spec["schedulingGates"] = [*spec.get("schedulingGates", []), {"name": GATE}]
        return pod

    # ------------------------------------------------------------------ controller

    def tick(self) -> None:
        groups: dict[str, list[dict[str, Any]]] = {}
        for raw in self.cluster.api.all("pods", NAMESPACE):
            group = (raw["metadata"].get("labels") or {}).get(GROUP)
            if group and raw["metadata"]["labels"].get(MANAGED) == "true":
                groups.setdefault(group, []).append(raw)
        for name in list(self.workloads):
            if name not in groups:
                self._collect(name)
        for name, pods in groups.items():
            self._reconcile(name, pods)

    def preempt(self, group: str) -> None:
        """Evict the Workload for another one. Its pods are deleted, and then its quota is free."""
        workload = self.workloads[group]
        assert workload.admitted
        workload.evicted = True

    def admitted(self) -> set[str]:
        return {name for name, w in self.workloads.items() if w.admitted and not w.finished}

    def _collect(self, name: str) -> None:
        """Delete the Workload whose owners, the pods, are gone. The garbage collector takes a while."""
        workload = self.workloads[name]
        workload.admitted = False
        workload.empty_for += 1
        if workload.empty_for >= COLLECT_SECONDS:
            del self.workloads[name]

    def _reconcile(self, name: str, pods: list[dict[str, Any]]) -> None:
        workload = self.workloads.get(name)
        if workload is not None and workload.empty_for:
            # The Workload is marked for deletion: the group stops with it.
            for raw in pods:
                self._release(raw)
                self._delete(raw)
            del self.workloads[name]
            self.collected.append(name)
            return
        active = [p for p in pods if _counts(p)]
        inactive = [p for p in pods if not _counts(p)]
        if workload is None:
            workload = self._compose(name, active, inactive)
            if workload is None:
                return
        self._finish(workload, pods)
        if workload.finished:
            for raw in pods:
                self._release(raw)
            return
        self._remove_excess(workload, active)
        replaced = len(active) + len(inactive) - workload.count
        for raw in inactive[: max(0, replaced)]:
            self._release(raw)
        self._evict(workload, pods)
        strangers = [p for p in active if p["metadata"]["annotations"][ROLE] not in workload.roles]
        if strangers:
            self.errors.append(f"group {name} has pods of roles that it had not at its beginning")
        complete = len(active) == workload.count and not strangers
        if not workload.admitted and complete and self._has_room(workload):
            workload.admitted = True
        if workload.admitted and not workload.evicted:
            for raw in active:
                self._ungate(raw)

    def _compose(
        self, name: str, active: list[dict[str, Any]], inactive: list[dict[str, Any]]
    ) -> Workload | None:
        for raw in inactive:
            self._release(raw)
        if not active:
            return None
        first = active[0]["metadata"]
        queue, count = first["labels"][QUEUE], int(first["annotations"][COUNT])
        for raw in active:
            meta = raw["metadata"]
            if (meta["labels"][QUEUE], int(meta["annotations"][COUNT])) != (queue, count):
                self.errors.append(f"pods of group {name} have different queues or counts")
                return None
        if len(active) < count:
            return None
        roles = frozenset(raw["metadata"]["annotations"][ROLE] for raw in active)
        self.workloads[name] = Workload(queue, count, roles)
        return self.workloads[name]

    def _finish(self, workload: Workload, pods: list[dict[str, Any]]) -> None:
        phases = [(p.get("status") or {}).get("phase", "Pending") for p in pods]
        ended = all(phase in ("Succeeded", "Failed") for phase in phases)
        final = any(p["metadata"]["annotations"].get(RETRIABLE) == "false" for p in pods)
        succeeded = phases.count("Succeeded")
        workload.finished |= succeeded == workload.count or (ended and final)

    def _remove_excess(self, workload: Workload, active: list[dict[str, Any]]) -> None:
        """Delete the pods above the total count: those without a finalizer, gated or new go first."""
        active.sort(
            key=lambda p: (
                MANAGED not in p["metadata"].get("finalizers", []),
                bool(p["spec"].get("schedulingGates")),
                int(p["metadata"]["resourceVersion"]),
            )
        )
        for raw in active[workload.count :]:
            self.excess.append(raw["metadata"]["name"])
            self._release(raw)
            self._delete(raw)
        del active[workload.count :]

    def _evict(self, workload: Workload, pods: list[dict[str, Any]]) -> None:
        if not workload.evicted:
            return
        for raw in pods:
            gated = bool(raw["spec"].get("schedulingGates"))
            phase = (raw.get("status") or {}).get("phase", "Pending")
            if "deletionTimestamp" in raw["metadata"] or gated or phase in ("Succeeded", "Failed"):
                continue
            fake = self.cluster.pods[raw["metadata"]["name"]]
            fake.announced = (EVICTED, "Preempted to accommodate a workload in the ClusterQueue")
            self._delete(raw)
        if not any((p.get("status") or {}).get("phase") == "Running" for p in pods):
            workload.admitted = workload.evicted = False

    def _has_room(self, workload: Workload) -> bool:
        used = sum(self.workloads[name].count for name in self.admitted())
        return workload.queue in self.queues and used + workload.count <= self.quota

    def _ungate(self, raw: dict[str, Any]) -> None:
        if raw["spec"].pop("schedulingGates", None):
            self.cluster.api.touch(raw)

    def _release(self, raw: dict[str, Any]) -> None:
        if MANAGED in raw["metadata"].get("finalizers", []):
            raw["metadata"]["finalizers"].remove(MANAGED)
            self.cluster.api.touch(raw)
            self.cluster.finalizers_removed(raw["metadata"]["name"])

    def _delete(self, raw: dict[str, Any]) -> None:
        name, uid = raw["metadata"]["name"], raw["metadata"]["uid"]
        if name in self.cluster.pods:
            self.cluster.delete_pod(name, uid, force=False)


def _counts(raw: Mapping[str, Any]) -> bool:
    """Return whether the pod is runnable or has succeeded (isPodRunnableOrSucceeded)."""
    deleted = "deletionTimestamp" in raw["metadata"]
    if deleted and not raw["spec"].get("nodeName"):
        return False
    return bool((raw.get("status") or {}).get("phase", "Pending") != "Failed")
