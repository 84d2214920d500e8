"""An in-memory Kubernetes API with nodes and a kubelet that runs toy sidecars.

One tick is one second. Writes check what the real API checks: resourceVersion of status writes,
uid preconditions of deletes, names that exist. Nothing here knows how the operator decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast_core.ids import CheckpointId, Level, RestartRound, Step, Worker
from holdfast_core.names import pod_name
from holdfast_operator import labels
from holdfast_operator.actions import CheckpointRecord
from holdfast_operator.effects import ConflictError
from holdfast_operator.kube_api import ApiError
from holdfast_operator.model import CheckpointView, NodeView, PodPhase, PodView
from holdfast_operator.testing.builders import START, UID
from holdfast_operator.testing.toy_gang import ToyGang, ToySidecar, ToyStore

LEASE_SECONDS = 20
"""A node that is silent for this long counts as lost."""
DELETE_SECONDS = 2
"""How long a kubelet takes to end a deleted pod."""
START_SECONDS = 2
"""How long a pod takes from create to a sidecar that listens."""


@dataclass(slots=True)
class FakeNode:
    name: str
    dead: bool = False
    """Powered off: its pods do not run, and nobody confirms their deletion."""
    cut_off: bool = False
    """Runs, but neither the API nor the operator reaches it."""
    silent_ticks: int = 0

    @property
    def silent(self) -> bool:
        return self.dead or self.cut_off


@dataclass(slots=True)
class FakePod:
    view: PodView
    age: int = 0
    deleted_for: int | None = None


@dataclass(frozen=True, slots=True)
class ChoiceMade:
    """CAS 2 as it happened: the statuses before and after, and whose disks were there then. A pod
    that only does not answer the operator still has its disk."""

    before: Mapping[str, Any]
    status: Mapping[str, Any]
    readable_members: frozenset[str]


@dataclass(frozen=True, slots=True)
class DeletionMade:
    """A pod that the operator deleted: the newest commit that could be read before, and after."""

    name: str
    node_lost: bool
    before: CheckpointId | None
    after: CheckpointId | None


@dataclass(slots=True)
class FakeCluster:
    job: dict[str, Any]
    """The TrainingJob as the API server holds it."""
    nodes: dict[str, FakeNode]
    store: ToyStore = field(default_factory=ToyStore)
    gang: ToyGang = field(init=False)
    pods: dict[str, FakePod] = field(default_factory=dict)
    sidecars: dict[str, ToySidecar] = field(default_factory=dict)
    """By pod name; the disk of a pod, which goes with it."""
    checkpoints: dict[str, CheckpointView] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)
    secrets: set[str] = field(default_factory=set)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    """Every status that was ever written, in order."""
    choices: list[ChoiceMade] = field(default_factory=list)
    deletions: list[DeletionMade] = field(default_factory=list)
    pod_refusal: str = ""
    """The server's words to whoever creates a pod (quota, admission); "": it takes pods."""
    all_silent: bool = False
    """No sidecar answers the operator; the gang itself talks on (a default-deny policy)."""
    silent_workers: set[int] = field(default_factory=set)
    """Workers whose sidecars do not answer the operator, whatever pod they have."""
    total_steps: int = 100_000
    seconds: int = 1000
    _uids: int = 0

    def __post_init__(self) -> None:
        self.gang = ToyGang(store=self.store, total=self.total_steps)

    # ------------------------------------------------------------------ the API

    def patch_job_status(self, resource_version: str, status: Mapping[str, Any]) -> None:
        """A merge patch with a resourceVersion."""
        meta = self.job["metadata"]
        if meta["resourceVersion"] != resource_version:
            raise ConflictError(
                f"status of job written at {resource_version}, it is at {meta['resourceVersion']}"
            )
        merged = _merged(self.job["status"], status)
        if merged != self.job["status"]:
            if "restorePoint" in merged and "restorePoint" not in self.job["status"]:
                self.choices.append(ChoiceMade(self.job["status"], merged, self._readable(merged)))
            self.job["status"] = merged
            self.touch_job()
            self.statuses.append(merged)

    def _readable(self, status: Mapping[str, Any]) -> frozenset[str]:
        members = enumerate(status["members"])
        names = (pod_name("job", UID, worker, birth) for worker, birth in members)
        return frozenset(n for n in names if n in self.pods and self._has_disk(self.pods[n]))

    def _has_disk(self, pod: FakePod) -> bool:
        """It runs, nobody ends it, and its node is not lost."""
        node = self.nodes.get(pod.view.node or "")
        running = pod.view.phase is PodPhase.RUNNING and not pod.view.terminating
        return node is not None and node.silent_ticks < LEASE_SECONDS and running

    def newest_commit(
        self, without: str = "", *, with_lost_nodes: bool = False
    ) -> CheckpointId | None:
        """The newest commit on the job's true history that lies complete on disks or in the store."""
        there = [
            self.sidecars[n]
            for n, p in self.pods.items()
            if n != without
            and n in self.sidecars
            and (self._has_disk(p) or (with_lost_nodes and p.view.alive))
        ]
        ranks = range(self.job["spec"]["workers"])
        bases = {c.status["restartRound"]: point_of(c.status) for c in self.choices}
        found = [
            p.id
            for p in self.gang.promises
            if p.level is not Level.MEMORY
            and is_ancestor(p.id, max(bases), bases)
            and (
                p.id in self.store.checkpoints
                or (
                    any(p.id in s.manifests for s in there)
                    and all(any((p.id, r) in s.shards for s in there) for r in ranks)
                )
            )
        ]
        return max(found, key=lambda i: (i.step, i.round), default=None)

    def operator_deletes(self, name: str, uid: str, *, force: bool) -> None:
        """A delete that the operator decided on."""
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
        """Somebody else writes the job: its resourceVersion moves on."""
        meta = self.job["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)

    def create_pod(self, body: Mapping[str, Any]) -> None:
        name = body["metadata"]["name"]
        if name in self.pods:
            return
        if self.pod_refusal:
            raise ApiError(403, "Forbidden", f"pods {name} is forbidden: {self.pod_refusal}")
        marks = body["metadata"]["labels"]
        self._uids += 1
        view = PodView(
            name=name,
            uid=f"uid-{self._uids}",
            worker=Worker(int(marks[labels.WORKER])),
            birth_round=RestartRound(int(marks[labels.BIRTH_ROUND])),
            phase=PodPhase.PENDING,
        )
        self.pods[name] = FakePod(view)

    def delete_pod(self, name: str, uid: str, *, force: bool) -> None:
        pod = self.pods.get(name)
        if pod is None or pod.view.uid != uid:
            return
        if force:
            self.lose_pod(name)
        elif pod.deleted_for is None:
            pod.deleted_for = 0
            pod.view = replace(pod.view, terminating=True)

    def put_checkpoint(self, name: str, record: CheckpointRecord, **changes: Any) -> None:
        old = self.checkpoints.get(name)
        view = old or CheckpointView(
            name=name,
            uid=f"uid-{name}",
            resource_version="0",
            job="job",
            created_at=START,
        )
        id_ = record.checkpoint
        self.checkpoints[name] = replace(
            view,
            resource_version=str(int(view.resource_version) + 1),
            phase=record.phase,
            step=view.step if id_ is None else id_.step,
            round=view.round if id_ is None else id_.round,
            manifest=record.manifest,
            job_uid=record.job_uid,
            world_size=record.world_size,
            persisted=record.persisted,
            committed_at=record.committed_at,
            **changes,
        )

    # ------------------------------------------------------------------ faults

    def lose_pod(self, name: str) -> None:
        """Gone at once, with its disk."""
        self.pods.pop(name, None)
        self.sidecars.pop(name, None)

    def fail_pod(self, name: str, reason: str) -> None:
        pod = self.pods.get(name)
        if pod is not None:
            pod.view = replace(pod.view, phase=PodPhase.FAILED, reason=reason, ready=False)

    def restart_sidecar(self, name: str) -> None:
        """Its container only: the disk and the round stay, the ROUND in memory goes."""
        pod, sidecar = self.pods.get(name), self.sidecars.get(name)
        if pod is None or sidecar is None:
            return
        pod.view = replace(pod.view, sidecar_restarts=pod.view.sidecar_restarts + 1)
        sidecar.message = None

    # ------------------------------------------------------------------ what can be seen and called

    def pod_views(self) -> tuple[PodView, ...]:
        return tuple(p.view for p in self.pods.values())

    def node_views(self) -> dict[str, NodeView]:
        return {
            n.name: NodeView(n.name, ready=not n.silent, lost=n.silent_ticks >= LEASE_SECONDS)
            for n in self.nodes.values()
        }

    def reachable(self, pod: PodView) -> ToySidecar | None:
        """The sidecar that a call to this pod's address reaches; None: nobody answers."""
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
            and pod.view.phase is PodPhase.RUNNING
            and pod.view.sidecar_started
        )

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """One second of kubelets, leases and training."""
        self.seconds += 1
        for node in self.nodes.values():
            node.silent_ticks = node.silent_ticks + 1 if node.silent else 0
        for name, pod in list(self.pods.items()):
            self._kubelet(name, pod)
        running = {n: self.sidecars[n] for n, p in self.pods.items() if self._talks(p)}
        self.gang.tick(running)
        self._finish()

    def _talks(self, pod: FakePod) -> bool:
        """Other workers reach it. A node that is cut off is out of the gang's reach too."""
        return self._answers(pod) and pod.view.name in self.sidecars

    def _kubelet(self, name: str, pod: FakePod) -> None:
        pod.age += 1
        view = pod.view
        if view.node is None:
            node = self._place(view)
            if node is not None:
                pod.view = replace(view, node=node)
            return
        if self.nodes[view.node].silent:
            return
        if pod.deleted_for is not None:
            pod.deleted_for += 1
            if pod.deleted_for >= DELETE_SECONDS:
                self.lose_pod(name)
                return
        if view.phase is PodPhase.PENDING and pod.age >= START_SECONDS:
            self._uids += 1
            pod.view = replace(
                view,
                phase=PodPhase.RUNNING,
                ip=f"10.0.0.{self._uids}",
                ready=True,
                sidecar_started=True,
            )
            self.sidecars[name] = ToySidecar(view.worker, name, view.birth_round)

    def _place(self, view: PodView) -> str | None:
        """The node with the fewest pods among those that the scheduler takes for well."""
        load = {n.name: 0 for n in self.nodes.values() if n.silent_ticks == 0}
        for pod in self.pods.values():
            if pod.view.node in load:
                load[pod.view.node] += 1
        return min(load, key=lambda n: (load[n], n)) if load else None

    def _finish(self) -> None:
        """Released launchers end, and with them their pods."""
        run = self.gang.run
        if run is None or not run.finished or not run.released:
            return
        for name, pod in self.pods.items():
            sidecar = self.sidecars.get(name)
            ran = sidecar is not None and sidecar.round == run.round
            if ran and pod.view.phase is PodPhase.RUNNING:
                pod.view = replace(pod.view, phase=PodPhase.SUCCEEDED, trainer_exit_code=0)


Bases = Mapping[int, CheckpointId | None]
"""What each round that chose started from."""


def is_ancestor(id_: CheckpointId, round_: int, bases: Bases) -> bool:
    """Whether the state that `round_` trained on descends from this checkpoint, or is it."""
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


def _merged(old: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(old) if isinstance(old, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result
