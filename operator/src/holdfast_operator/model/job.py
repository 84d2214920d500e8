"""What the operator knows about one job at one moment, as frozen values.

`observe` assembles an `Observed` from reflectors and sidecar replies; `decide` reads nothing else.
The effects that come out of it are in `actions`. Nothing here reads a clock, an environment or the
API. Times named `_at` or `_since` of type float are monotonic seconds of this operator process and
may be missing after it restarted; stamps of type datetime are UTC and decide no order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from holdfast_core.contract import StoreConfig
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, Inventory


@dataclass(frozen=True, slots=True)
class Now:
    """The moment that a decision is taken for."""

    monotonic: float
    utc: datetime


# --------------------------------------------------------------------------- TrainingJob


@dataclass(frozen=True, slots=True)
class ExitCodeRule:
    """failurePolicy.rules: a rank that ends with one of these codes fails the job, no restart."""

    on_exit_codes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobSpecView:
    """spec of a TrainingJob with every default filled in."""

    workers: int
    procs_per_worker: int
    template: Mapping[str, Any]
    """PodTemplateSpec as the user wrote it; only render and acceptance look inside."""
    interval_steps: int = 100
    slots: int = 2
    shared_memory_bytes: int | None = None
    """spec.checkpoint.memory.sizeLimit; None: from the trainer's memory limit."""
    node_size_limit_bytes: int = 20 << 30
    peer_copies: int = 1
    topology_key: str = "kubernetes.io/hostname"
    peer_encryption: str = "TLS"
    store: str | None = None
    """Name of the CheckpointStore; None: no object tier."""
    object_every_steps: int | None = None
    object_compression: str = "None"
    keep_last: int = 3
    restore_from: str | None = None
    """Name of a Checkpoint in the same namespace."""
    max_restarts: int = 10
    restart_window: timedelta = timedelta(hours=1)
    rules: tuple[ExitCodeRule, ...] = ()
    suspect_after: timedelta = timedelta(seconds=20)
    suspend: bool = False
    active_deadline: timedelta | None = None
    ttl_after_finished: timedelta | None = None

    @property
    def world_size(self) -> int:
        return self.workers * self.procs_per_worker


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    """A JobCondition of core.api."""
    status: bool | None
    """True: the named state holds; None: Unknown."""
    reason: str
    message: str
    last_transition: datetime
    observed_generation: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """Ranks whose shard of the restore point comes from each tier."""

    memory: int = 0
    node: int = 0
    peer: int = 0
    object: int = 0


@dataclass(frozen=True, slots=True)
class RestorePointView:
    """status.restorePoint. step None: the round starts from the very beginning."""

    step: Step | None = None
    round: RestartRound | None = None
    manifest: Digest | None = None
    sources: Sources = Sources()
    job_uid: JobUid | None = None
    """Set where the checkpoint belongs to another job (spec.restoreFrom)."""
    job_namespace: str | None = None


@dataclass(frozen=True, slots=True)
class PersistedView:
    """status.lastPersisted: the commit of the object tier."""

    step: Step
    round: RestartRound
    manifest: Digest

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.step, self.round)


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """What `round` restored from. base_step None: it started from the very beginning."""

    round: RestartRound
    base_step: Step | None = None
    base_round: RestartRound | None = None
    base_manifest: Digest | None = None


@dataclass(frozen=True, slots=True)
class RecoveryView:
    """status.lastRecovery; a duration that was not measured is None. See decide/recovery.py."""

    round: RestartRound
    """The round that it began."""
    reason: str
    begun_at: datetime | None = None
    """When the round began (UTC)."""
    detect_seconds: float | None = None
    back_off_seconds: float | None = None
    seal_seconds: float | None = None
    schedule_seconds: float | None = None
    rehydrate_seconds: float | None = None
    rendezvous_seconds: float | None = None
    first_step_seconds: float | None = None
    total_seconds: float | None = None
    """From the fault to the first step of the round; None until then."""
    lost_steps: int | None = None

    def phases(self) -> dict[str, float]:
        """Seconds of each phase that was measured, in their order."""
        named = {
            "detect": self.detect_seconds,
            "back_off": self.back_off_seconds,
            "seal": self.seal_seconds,
            "schedule": self.schedule_seconds,
            "rehydrate": self.rehydrate_seconds,
            "rendezvous": self.rendezvous_seconds,
            "first_step": self.first_step_seconds,
        }
        return {name: seconds for name, seconds in named.items() if seconds is not None}


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """One restart that counts towards failurePolicy.maxRestarts."""

    round: RestartRound
    at: datetime
    reason: str
    failed_from: CheckpointId | None = None
    """What the round before had restored, where its ranks failed by themselves before a step."""


@dataclass(frozen=True, slots=True)
class GoodputView:
    ratio: float = 1.0
    training_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    recovery_seconds: float = 0.0
    lost_work_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatusView:
    """status of a TrainingJob. An empty status (no round yet) is `JobStatusView()`."""

    restart_round: RestartRound | None = None
    """None: no round was begun yet."""
    members: tuple[RestartRound, ...] = ()
    """Birth round of each worker's pod."""
    coordinator: Worker | None = None
    """Named with the restore point; renamed within a round when its sidecar is silent."""
    restore_point: RestorePointView | None = None
    """None: not chosen yet for restart_round."""
    lineage: tuple[LineageEntry, ...] = ()
    """Oldest first."""
    last_persisted: PersistedView | None = None
    step: Step | None = None
    last_committed_step: Step | None = None
    last_replicated_step: Step | None = None
    last_memory_step: Step | None = None
    steps_dropped: int | None = None
    restarts: int = 0
    restarts_count_towards_max: int = 0
    recent_restarts: tuple[RestartRecord, ...] = ()
    """Those that count towards the budget, inside the window, oldest first, bounded."""
    last_recovery: RecoveryView | None = None
    goodput: GoodputView | None = None
    workers_ready: int = 0
    workers_total: int = 0
    start_time: datetime | None = None
    completion_time: datetime | None = None
    conditions: tuple[Condition, ...] = ()
    phase: str = ""
    """Computed for people; never read by a decision."""
    observed_generation: int = 0

    def condition(self, kind: str) -> Condition | None:
        return next((c for c in self.conditions if c.type == kind), None)

    def is_true(self, kind: str) -> bool:
        condition = self.condition(kind)
        return condition is not None and condition.status is True


@dataclass(frozen=True, slots=True)
class JobView:
    namespace: str
    name: str
    uid: JobUid
    resource_version: str
    generation: int
    spec: JobSpecView
    status: JobStatusView
    created_at: datetime
    deleting: bool = False


# --------------------------------------------------------------------------- cluster


@dataclass(frozen=True, slots=True)
class Owner:
    """The controller in an object's ownerReferences."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that exists and that this version cannot parse. It is not gone: nothing may be
    concluded from its absence among the views."""

    kind: str
    namespace: str
    name: str
    uid: str
    problem: str
    """The first field that could not be read, and why."""
    owner: Owner | None = None
    job: str | None = None
    """Label with the job's name; for the queue only, it proves nothing."""

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class PodPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class PodView:
    name: str
    uid: str
    worker: Worker
    birth_round: RestartRound
    phase: PodPhase
    ip: str | None = None
    node: str | None = None
    terminating: bool = False
    ready: bool = False
    trainer_exit_code: int | None = None
    """Of a trainer container that is terminated now; None while it waits or runs."""
    trainer_finished_at: datetime | None = None
    """The kubelet's stamp of the newest end of the trainer container. Decides no order."""
    trainer_restarts: int = 0
    waiting_reason: str | None = None
    """The kubelet's word for a container that cannot start (ErrImagePull, CreateContainerError,
    CrashLoopBackOff); None where none waits."""
    waiting_message: str = ""
    sidecar_started: bool = False
    sidecar_restarts: int = 0
    reason: str | None = None
    """Evicted, OOMKilled, Unschedulable...: the pod's or the trainer's last."""
    message: str = ""
    created_at: datetime | None = None
    """Of the object; how old the leaf in its Secret is. Decides no order."""
    disrupted: bool = False
    """Condition DisruptionTarget is True; looked at before exit codes."""
    avoided_nodes: frozenset[str] = frozenset()
    """Names of the nodes that its affinity excludes because they were lost when it was created."""

    @property
    def started(self) -> bool:
        """A kubelet has run something of it. One without an address was never in a ROUND."""
        return self.phase is not PodPhase.PENDING or self.ip is not None or self.sidecar_started

    @property
    def alive(self) -> bool:
        """May still run processes of ours, and is not on its way out."""
        return not self.terminating and self.phase not in (PodPhase.FAILED, PodPhase.SUCCEEDED)


class Reachable(StrEnum):
    YES = "Yes"
    NO = "No"
    UNKNOWN = "Unknown"
    """Not asked yet, or the question is under way."""


@dataclass(frozen=True, slots=True)
class AckedRound:
    """The newest ROUND that a sidecar acknowledged to this operator process."""

    round: RestartRound
    version: int
    digest: Digest
    """actions.round_digest of its content."""
    sidecar_restarts: int = 0
    """Of the pod at that moment: a sidecar that restarted since must hear ROUND again."""


@dataclass(frozen=True, slots=True)
class SidecarView:
    worker: Worker
    pod_uid: str
    reachable: Reachable = Reachable.UNKNOWN
    inventory: Inventory | None = None
    """The newest reply; kept when the sidecar can no longer be reached."""
    sealed_round: RestartRound | None = None
    """The newest round that it is known to be sealed for (its own words); None: not known."""
    acked: AckedRound | None = None
    unreachable_since: float | None = None
    """Since when every call failed; None while reachable or not asked."""
    heard_at: float | None = None
    """When it last answered a call; None: never."""
    unreachable_because: str = ""
    """What was called and what happened, of the first call that failed."""


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    ready: bool = True
    lost: bool = False
    """Its lease did not change for suspect_after while the watch was known to work."""
    renewed_at: float | None = None
    """When this process saw the lease change last."""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointView:
    name: str
    uid: str
    resource_version: str
    job: str
    """spec.jobRef.name."""
    created_at: datetime
    step: Step | None = None
    """None: a request to save now that has not become a record yet."""
    round: RestartRound | None = None
    manifest: Digest | None = None
    job_uid: JobUid | None = None
    """Whose keys in the store hold it; None: not recorded yet."""
    job_namespace: str | None = None
    world_size: int | None = None
    hold: bool = False
    deletion_policy: str = "Retain"
    phase: str = ""
    """A CheckpointPhase of core.api; "" for an object without a status."""
    committed_at: datetime | None = None
    started_at: datetime | None = None
    payload_bytes: int = 0
    persisted: bool = False
    quarantined: bool = False
    deleting: bool = False
    has_finalizer: bool = False

    @property
    def id(self) -> CheckpointId | None:
        if self.step is None or self.round is None:
            return None
        return CheckpointId(self.step, self.round)


@dataclass(frozen=True, slots=True)
class StoreView:
    name: str
    config: StoreConfig
    credentials_secret: str | None = None
    """Secret in the job's namespace, mounted in the sidecar only; None: web identity."""
    ca_secret: str | None = None
    available: bool | None = None
    """Condition Available; None: not probed yet."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class AskedSave:
    """A Checkpoint request that was handed to the coordinator."""

    name: str
    round: RestartRound
    after_step: Step | None
    """Fulfilled by a step above this one; None: by any."""


@dataclass(frozen=True, slots=True)
class JobMemory:
    """What one operator process remembers about one job between passes.

    Lost when it restarts; decisions stay correct without it, only waits start again. `decide`
    returns the next value in `Decision.memory`; the caller hands it back unread.
    """

    round: RestartRound | None = None
    """Round that the times below belong to."""
    round_seen_at: float | None = None
    sealed_at: float | None = None
    """Every survivor was sealed."""
    scheduled_at: float | None = None
    """Every member's sidecar had started."""
    chosen_seen_at: float | None = None
    failure_seen_at: float | None = None
    failure_seen_utc: datetime | None = None
    """The same moment as a stamp, to compare with the kubelet's."""
    sound_at: float | None = None
    """The newest pass that found no failure."""
    progress_at: float | None = None
    """When the gang's ranks were last seen to have finished a step of `round`."""
    trained: int | None = None
    """Sum of the ranks' steps at that moment."""
    begins: RestartRound | None = None
    """The round that this process tries to begin."""
    begins_at: float | None = None
    """When it last tried."""
    begun_at: float | None = None
    """When this process began `round`; None: another process did."""
    answering_since: float | None = None
    """Since when at least one member's sidecar has answered without a gap; None: none answers."""
    terminating_since: tuple[tuple[str, float], ...] = ()
    """(pod uid, first seen terminating)."""
    unstarted: frozenset[str] = frozenset()
    """Names of this round's pods that had not started when they were last seen."""
    create_refused: str = ""
    """What the API server said to the last create of this round that it refused; "" after success."""
    checkpoints_deleting: tuple[tuple[str, float], ...] = ()
    """(uid of a deleted Checkpoint that our finalizer holds, first seen so)."""
    asked: tuple[AskedSave, ...] = ()
    round_sent_at: float | None = None
    """When ROUND was last given out with addresses missing: repeated at most once a second."""
    levels_written_at: float | None = None
    counted_at: float | None = None
    """Up to when goodput was counted."""
    blocked_counted_seconds: float = 0.0
    """Of this round, already in goodput.checkpointSeconds."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a decision about one job may look at."""

    job: JobView
    pods: tuple[PodView, ...] = ()
    """All pods of the job's namespace that the job controls, obsolete ones too."""
    sidecars: tuple[SidecarView, ...] = ()
    """At most one per pod uid."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    """By name; only nodes of the job's pods are needed. A node that is not in it is unknown."""
    lost_nodes: frozenset[str] = frozenset()
    """Names of all Nodes of the cluster whose leases have stopped, with a pod of the job or without;
    empty where every member's pod has started."""
    coordinator: CoordinatorState | None = None
    """The newest reply of the round's coordinator; None: none yet in this process."""
    checkpoints: tuple[CheckpointView, ...] = ()
    """Checkpoints of this job, and the one that spec.restoreFrom names."""
    store: StoreView | None = None
    """The store that the spec names; None: it names none, or there is none of that name."""
    services: frozenset[str] = frozenset()
    """Names of Services of the job that are known to exist."""
    secrets: frozenset[str] = frozenset()
    """Certificate Secrets that this process created or found there (they cannot be read)."""
    doubtful_secrets: frozenset[str] = frozenset()
    """Those of them that may have been deleted since: it was long ago."""
    memory: JobMemory = JobMemory()
    unreadable: tuple[Unreadable, ...] = ()
    """What exists and cannot be parsed: pods of the job, its store, its Checkpoints and the one that
    spec.restoreFrom names."""
    template_refusal: str | None = None
    """The API server's words on a dry run of the first pod; None: it would take it, or was not
    asked because the first round has begun."""

    def cannot_read(self, kind: str, name: str) -> Unreadable | None:
        """What is known of that object if it exists and cannot be parsed."""
        found = (u for u in self.unreadable if u.kind == kind and u.name == name)
        return next(found, None)

    def pod(self, worker: Worker, birth_round: RestartRound) -> PodView | None:
        """The pod that the member list means; None if it is not there."""
        for pod in self.pods:
            if pod.worker == worker and pod.birth_round == birth_round:
                return pod
        return None

    def sidecar_of(self, pod: PodView) -> SidecarView | None:
        return next((s for s in self.sidecars if s.pod_uid == pod.uid), None)

    def member_pods(self) -> tuple[tuple[Worker, RestartRound, PodView | None], ...]:
        """(worker, birth round, pod) of every member of the current round."""
        by_key = {(p.worker, p.birth_round): p for p in self.pods}
        return tuple(
            (Worker(w), birth, by_key.get((Worker(w), birth)))
            for w, birth in enumerate(self.job.status.members)
        )

    def node_lost(self, pod: PodView) -> bool:
        """The pod's node is silent and calls to its sidecar have failed; a pod without an address
        never had one to call."""
        if pod.node is None:
            return False
        node = self.nodes.get(pod.node)
        if node is None or not node.lost:
            return False
        sidecar = self.sidecar_of(pod)
        if sidecar is None:
            return pod.ip is None
        return sidecar.reachable is Reachable.NO
