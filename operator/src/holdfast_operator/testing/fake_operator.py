"""One operator process over a FakeCluster: the edges of the real one, with their troubles.

What it keeps in memory (sidecar replies, the coordinator's state, JobMemory) is lost when a test
makes a new one. `Trouble` makes reads stale, replies lost and writes conflict, by a seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from holdfast_core.errors import NotFoundError, UnavailableError
from holdfast_core.names import pod_name
from holdfast_core.transfer.messages import CoordinatorState, Inventory, PruneReply
from holdfast_operator.actions import (
    AskSave,
    AskStop,
    CheckpointRecord,
    CreateCertificates,
    Decision,
    EmitEvent,
    PruneObject,
    SealWorker,
    SendRound,
    round_digest,
)
from holdfast_operator.apply import Applied, apply, memory_after
from holdfast_operator.decide import decide
from holdfast_operator.model import (
    AckedRound,
    JobMemory,
    JobStatusView,
    JobView,
    Observed,
    PodView,
    Reachable,
    SidecarView,
    StoreView,
)
from holdfast_operator.observe_views import job_view, status_to_dict
from holdfast_operator.render.pod import SidecarSettings
from holdfast_operator.testing.builders import UID, now, store
from holdfast_operator.testing.fake_cluster import FakeCluster
from holdfast_operator.testing.toy_gang import ToySidecar


@dataclass(slots=True)
class Trouble:
    """Chances, 0 to 1, of what goes wrong with one read or call."""

    random: Random
    stale_read: float = 0.0
    lost_reply: float = 0.0
    conflict: float = 0.0

    def strikes(self, chance: float) -> bool:
        return self.random.random() < chance


def calm() -> Trouble:
    return Trouble(Random(0))


@dataclass(slots=True)
class _Known:
    """What the operator remembers of one sidecar."""

    inventory: Inventory | None = None
    acked: AckedRound | None = None
    reachable: Reachable = Reachable.UNKNOWN
    unreachable_since: float | None = None
    unreachable_because: str = ""


@dataclass(slots=True)
class FakeOperator:
    cluster: FakeCluster
    trouble: Trouble = field(default_factory=calm)
    memory: JobMemory = field(default_factory=JobMemory)
    events: list[EmitEvent] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    _known: dict[str, _Known] = field(default_factory=dict)
    _state: CoordinatorState | None = None
    _job: JobView | None = None
    _pods: tuple[PodView, ...] | None = None
    _secrets: set[str] = field(default_factory=set)

    async def run_pass(self) -> Applied:
        """Observe, decide, apply once."""
        observed = self.observe()
        decision = decide(observed, now(self.cluster.seconds))
        self.decisions.append(decision)
        run = self.cluster.gang.run
        if run is not None and decision.acted_version is not None and run.finished:
            run.released = run.released or decision.acted_version >= run.version
        applied = await apply(decision, observed, self, SidecarSettings("example/sidecar:1"))
        self.memory = memory_after(decision, observed, applied)
        return applied

    # ------------------------------------------------------------------ observe

    def observe(self) -> Observed:
        """A watch may lag, it never goes back; a first read is always fresh."""
        if self._job is None or not self.trouble.strikes(self.trouble.stale_read):
            self._job = job_view(self.cluster.job)
        if self._pods is None or not self.trouble.strikes(self.trouble.stale_read):
            self._pods = self.cluster.pod_views()
        for pod in self._pods:
            if pod.ip is not None:
                self._probe(pod)
        self._poll(self._job, self._pods)
        return Observed(
            job=self._job,
            pods=self._pods,
            sidecars=tuple(self._view(p) for p in self._pods if p.uid in self._known),
            nodes=self.cluster.node_views(),
            coordinator=self._state,
            checkpoints=tuple(self.cluster.checkpoints.values()),
            store=self._store(self._job),
            services=frozenset(self.cluster.services),
            secrets=frozenset(self._secrets),
            memory=self.memory,
        )

    def _store(self, job: JobView) -> StoreView | None:
        return None if job.spec.store is None else store()

    def _view(self, pod: PodView) -> SidecarView:
        known = self._known[pod.uid]
        return SidecarView(
            worker=pod.worker,
            pod_uid=pod.uid,
            reachable=known.reachable,
            inventory=known.inventory,
            sealed_round=None if known.inventory is None else known.inventory.round,
            acked=known.acked,
            unreachable_since=known.unreachable_since,
            unreachable_because=known.unreachable_because,
        )

    def _probe(self, pod: PodView) -> None:
        sidecar = self.cluster.reachable(pod)
        known = self._known.setdefault(pod.uid, _Known())
        if sidecar is None or self.trouble.strikes(self.trouble.lost_reply):
            known.reachable = Reachable.NO
            if known.unreachable_since is None:
                known.unreachable_since = float(self.cluster.seconds)
                known.unreachable_because = f"sidecar of pod {pod.name}: connection timed out"
            return
        self._heard(pod.uid, sidecar.inventory())

    def _heard(self, uid: str, inventory: Inventory) -> None:
        known = self._known.setdefault(uid, _Known())
        known.inventory = inventory
        known.reachable = Reachable.YES
        known.unreachable_since = None
        known.unreachable_because = ""

    def _poll(self, job: JobView, pods: tuple[PodView, ...]) -> None:
        """The long poll of the coordinator that the status names."""
        named, run = job.status.coordinator, self.cluster.gang.run
        if named is None or job.status.restart_round is None:
            return
        birth = job.status.members[named]
        pod = next((p for p in pods if (p.worker, p.birth_round) == (named, birth)), None)
        sidecar = None if pod is None else self.cluster.reachable(pod)
        if sidecar is None or sidecar.message is None:
            return
        if sidecar.round != job.status.restart_round or sidecar.message.coordinator != named:
            return
        if run is not None and run.round == sidecar.round:
            self._state = run.state(len(job.status.members))
        else:  # it coordinates, and the gang is not complete yet
            self._state = CoordinatorState(version=0, round=sidecar.round)

    # ------------------------------------------------------------------ Effects: Kubernetes

    async def write_job_status(
        self, job: JobView, resource_version: str, status: JobStatusView
    ) -> None:
        if self.trouble.strikes(self.trouble.conflict):
            self.cluster.touch_job()
        self.cluster.patch_job_status(resource_version, status_to_dict(status))
        self._may_lose("status write")

    async def delete_job(self, job: JobView) -> None:
        self.cluster.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    async def pod_is_gone(self, job: JobView, name: str) -> bool:
        pod = self.cluster.pods.get(name)
        return pod is None or pod.view.terminating

    async def create_pod(self, job: JobView, body: Mapping[str, Any]) -> None:
        self.cluster.create_pod(body)
        self._may_lose("pod create")

    async def delete_pod(self, job: JobView, name: str, uid: str, *, force: bool) -> None:
        self.cluster.operator_deletes(name, uid, force=force)
        self._may_lose("pod delete")

    async def create_network_policy(self, job: JobView, body: Mapping[str, Any]) -> None:
        """Nothing of the fake cluster looks at the network."""

    async def create_service(self, job: JobView, body: Mapping[str, Any]) -> None:
        self.cluster.services.add(body["metadata"]["name"])

    async def create_certificates(self, job: JobView, action: CreateCertificates) -> None:
        self.cluster.secrets.add(action.secret)
        self._secrets.add(action.secret)

    async def delete_certificates(self, job: JobView, secret: str) -> None:
        self.cluster.secrets.discard(secret)
        self._secrets.discard(secret)

    async def create_checkpoint(
        self, job: JobView, body: Mapping[str, Any], record: CheckpointRecord
    ) -> None:
        self.cluster.put_checkpoint(body["metadata"]["name"], record)

    async def update_checkpoint(
        self, job: JobView, name: str, resource_version: str, record: CheckpointRecord
    ) -> None:
        self.cluster.put_checkpoint(name, record)

    async def delete_checkpoint(self, job: JobView, name: str, uid: str) -> None:
        self.cluster.checkpoints.pop(name, None)

    # ------------------------------------------------------------------ Effects: sidecars

    def _call(self, name: str, uid: str | None = None) -> ToySidecar:
        pod = self.cluster.pods.get(name)
        if pod is None or (uid is not None and pod.view.uid != uid):
            raise NotFoundError(f"sidecar of pod {name}: no such pod")
        sidecar = self.cluster.reachable(pod.view)
        if sidecar is None:
            raise UnavailableError(f"sidecar of pod {name}: connection timed out")
        return sidecar

    async def seal(self, job: JobView, action: SealWorker) -> None:
        inventory = self._call(action.pod, action.pod_uid).seal(action.round)
        self._may_lose("seal")
        self._heard(action.pod_uid, inventory)

    async def send_round(self, job: JobView, action: SendRound) -> None:
        inventory = self._call(action.pod, action.pod_uid).take_round(action.message)
        self._may_lose("ROUND")
        self._heard(action.pod_uid, inventory)
        self._known[action.pod_uid].acked = AckedRound(
            action.message.round,
            action.message.version,
            round_digest(action.message),
            action.sidecar_restarts,
        )

    async def ask_save(self, job: JobView, action: AskSave) -> None:
        self._call(action.pod)

    async def ask_stop(self, job: JobView, action: AskStop) -> None:
        self._call(action.pod)
        run = self.cluster.gang.run
        if run is not None and run.round == action.round:
            run.stop_asked = True

    async def prune(self, job: JobView, action: PruneObject) -> PruneReply:
        self._call(action.pod)
        point = action.checkpoint
        for id_ in list(self.cluster.store.checkpoints):
            if (id_.step, id_.round) == (point.step, point.round):
                del self.cluster.store.checkpoints[id_]
        self._may_lose("prune")
        return PruneReply((point,))

    async def emit(self, job: JobView, event: EmitEvent) -> None:
        self.events.append(event)

    def _may_lose(self, what: str) -> None:
        if self.trouble.strikes(self.trouble.lost_reply):
            raise UnavailableError(f"{what}: connection reset before the reply came")

    def worker_pod(self, worker: int) -> PodView | None:
        """The pod that the status means by this worker, as the API has it now."""
        status = job_view(self.cluster.job).status
        if worker >= len(status.members):
            return None
        name = pod_name("job", UID, worker, status.members[worker])
        pod = self.cluster.pods.get(name)
        return None if pod is None else pod.view
