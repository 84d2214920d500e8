"""The state of one job as the operator observed it, in frozen values.

`observe` assembles an `Observed` from the reflectors' caches and the replies of sidecars. `decide` reads
nothing else, and returns the actions in `actions`. Nothing here reads a clock, the environment or the API.

A time of type float, named `_at` or `_since`, is in monotonic seconds of this operator process, and may be
missing after a restart of the operator. A stamp of type datetime is in UTC and decides no order (R30).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from holdfast_core.api import (
    AzureSpec,
    Checkpoint,
    CheckpointStore,
    Gang,
    GoogleSpec,
    ReachedQuota,
    S3Spec,
    StoreCondition,
    TrainingJob,
    WebIdentitySpec,
)
from holdfast_core.contract import StoreConfig
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.ids import CheckpointId, Digest, RestartRound, ShardRef, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, UncommittedShard
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings

CLOCK_SKEW = timedelta(minutes=5)
"""Largest difference between the wall clocks of two operator processes in a cluster whose clocks are kept."""


def is_within(length: timedelta, at: datetime, now: datetime) -> bool:
    """Return whether a UTC stamp is at most this old.

    A stamp of the future was made before a clock was set back. It is not: it would count until that time has
    come.
    """
    return now - length < at <= now + CLOCK_SKEW


@dataclass(frozen=True, slots=True)
class Now:
    """The time of a pass, on both clocks."""

    monotonic: float
    utc: datetime
    jumped: timedelta = timedelta(0)
    """By how much the wall clock has gained on the monotonic clock since this process began. It is negative
    if the wall clock was set back."""

    def elapsed_seconds(self, since: datetime) -> float:
        """Return the seconds since a UTC stamp, without a jump of the wall clock during this process.

        It is the shorter one of the times with and without the jump, because an end that comes too early
        cannot be undone.
        """
        return min(self.utc - since, self.utc - self.jumped - since).total_seconds()

    @property
    def without_gain(self) -> datetime:
        """The UTC time without a jump forward during this process, which would end times too early."""
        return min(self.utc, self.utc - self.jumped)

    def at_most_seconds(self, since: datetime) -> float:
        """Return the longest time since a UTC stamp, with and without a jump of the wall clock."""
        return max(self.utc - since, self.utc - self.jumped - since, timedelta(0)).total_seconds()

    def is_within(self, length: timedelta, at: datetime) -> bool:
        """Return whether a UTC stamp is at most this old."""
        return is_within(length, at, self.utc)


# --------------------------------------------------------------------------- cluster


@dataclass(frozen=True, slots=True)
class Owner:
    """Controller in an object's ownerReferences."""

    kind: str
    name: str
    uid: str
    group: str
    """API group, without the version."""


@dataclass(frozen=True, slots=True)
class OwnerView:
    """The controller that creates an adopted gang's pods, and what its restart policy costs."""

    cost: str
    """What happens to the copies in pods if a pod fails, as a sentence for the status."""
    loses_all_copies: bool
    """Whether one failed pod leads to the deletion of all pods, and with them of every local copy."""
    remedy: str = ""
    """What a user can change in the controller's object so that `loses_all_copies` is False."""


class RawSource(NamedTuple):
    """What spec.restoreFrom names in an object that cannot be parsed. "" stands for what it does not name."""

    namespace: str
    checkpoint: str
    job: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that exists and that this version cannot parse (ADR 0002).

    It is missing among the views, but it must not be treated as gone.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    problem: str
    """The first field that could not be read, and why."""
    owner: Owner | None = None
    job: str | None = None
    """Name of the job in the object's label. Only the work queue uses it, because a label does not prove
    ownership."""
    source: RawSource | None = None
    """From what a gang may start. Its data must not be deleted as if the gang did not exist."""

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class PodPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


@dataclass(frozen=True, slots=True)
class Taint:
    """Taint of a node, without its value."""

    key: str
    effect: str

    def is_tolerated(self, toleration: Mapping[str, Any]) -> bool:
        """Return whether a pod's toleration matches the taint, by the rules of the scheduler."""
        if toleration.get("effect") not in (None, "", self.effect):
            return False
        if toleration.get("key") not in (None, "", self.key):
            return False
        if toleration.get("operator") == "Exists" or not toleration.get("value"):
            return True
        # An administrator sets the value of this taint, such as "nodeshutdown". A pod that tolerates a value
        # is assumed to tolerate the taint: at worst it excludes a node that the scheduler avoids by itself.
        return self.key == _OUT_OF_SERVICE


LOST_NODE_TAINTS = frozenset(
    {
        Taint("node.kubernetes.io/not-ready", "NoSchedule"),
        Taint("node.kubernetes.io/unreachable", "NoSchedule"),
        Taint(_OUT_OF_SERVICE, "NoSchedule"),
        Taint(_OUT_OF_SERVICE, "NoExecute"),
    }
)
"""Taints that stop the scheduler from placing pods on a lost node. `not-ready` and `unreachable` with the
effect NoExecute are missing: the API server adds tolerations of both to every pod, and the scheduler ignores
their tolerationSeconds (https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration)."""


def tolerated_taints(spec: Mapping[str, Any]) -> frozenset[Taint]:
    """Return the taints of lost nodes that a PodSpec tolerates."""
    tolerations = spec.get("tolerations") or []
    return frozenset(t for t in LOST_NODE_TAINTS if any(map(t.is_tolerated, tolerations)))


@dataclass(frozen=True, slots=True)
class PodGroup:
    """A group of pods that Kueue admits as a whole, from the labels of a pod or for a new pod (ADR 0012)."""

    name: str
    queue: str
    """Name of the LocalQueue."""
    pods: int
    """Number of pods of the group."""
    priority_class: str | None = None
    """Name of the WorkloadPriorityClass. None: Kueue takes the pod's own priority."""


def queue_of(job: Gang) -> str | None:
    """Return the LocalQueue of Kueue that the job's labels name, or None.

    A CheckpointAdoption has none: the controller of its pods, or Kueue itself, groups them.
    """
    job_labels = job.metadata.labels or {}
    return job_labels.get(labels.QUEUE_NAME) or None if isinstance(job, TrainingJob) else None


_OWN_LIMITS = (
    "exceeds the limit",
    "exceeded its local ephemeral storage limit",
    "exceeds the total limit of containers",
)
"""Parts of the kubelet's messages about an emptyDir volume, a container and a pod that exceed a limit of the
pod (pkg/kubelet/eviction/helpers.go of kubernetes)."""


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
    grace_seconds: float = 30.0
    """Time between SIGTERM and SIGKILL: of the deletion, or of the spec if the pod is not deleted yet."""
    ready: bool = False
    trainer_exit_code: int | None = None
    """Exit code of a trainer container that is terminated now. None while it waits or runs."""
    trainer_finished_at: datetime | None = None
    """The kubelet's stamp of the newest end of the trainer container. It decides no order."""
    trainer_restarts: int = 0
    memory_limit: str | None = None
    """Memory limit of the trainer container, as the pod's spec has it. None: it has none."""
    waiting_reason: str | None = None
    """The kubelet's reason why a container waits (ErrImagePull, CreateContainerError, CrashLoopBackOff).
    None: no container waits for more than its normal start."""
    waiting_message: str = ""
    sidecar_started: bool = False
    sidecar_restarts: int = 0
    reason: str | None = None
    """Newest reason of the pod or of its trainer container, such as Evicted, OOMKilled or Unschedulable."""
    message: str = ""
    disrupted: bool = False
    """Whether a condition announces its deletion: DisruptionTarget, or Kueue's TerminationTarget. The rules
    check it before exit codes."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """Type and status of each condition of the pod."""
    avoided_nodes: frozenset[str] = frozenset()
    """Names of the nodes that its affinity excludes because they were lost, and not tainted yet, when it was
    created."""
    failed_nodes: frozenset[str] = frozenset()
    """Names of the nodes that its affinity excludes because workers of the job failed there."""
    tolerated: frozenset[Taint] = frozenset()
    """Taints of lost nodes that it tolerates, by its template or by an admission plug-in."""
    tolerations: frozenset[tuple[str, str]] = frozenset()
    """Key and effect of each of its tolerations, without values and times. "" matches all keys or effects."""
    identity: str = ""
    """Name in its certificate and in ROUND. "" means its own name."""
    controller: Owner | None = None
    """The object of another controller that created it. None: there is none, or the operator created it."""
    placeholder: bool = False
    """Whether it only looks for a node for a missing worker of an elastic gang, and runs no container."""
    rendered_from: frozenset[tuple[str, str]] = frozenset()
    """Path and digest of each part of the spec from which it was created. Empty: it has no record of them."""
    trainer_ran: bool = True
    """Whether its trainer container has ever run."""
    certificates: str = ""
    """Secret from which it mounts its certificate. "" if it mounts none."""
    created: str = ""
    """Its creationTimestamp. It decides only between pods of other controllers that claim one worker."""
    group: PodGroup | None = None
    """The pod group in Kueue to which it belongs. None: it has no label of a group."""
    queued: bool = False
    """Whether a scheduling gate of Kueue holds it back."""
    has_kueue_finalizer: bool = False
    """Whether Kueue's finalizer keeps the object after the pod has ended."""

    @property
    def peer_name(self) -> str:
        """Return the name by which sidecars and the operator address it."""
        return self.identity or self.name

    @property
    def unscheduled(self) -> bool:
        """Return whether the pod waits for a node, and no scheduling gate holds it back."""
        return self.node is None and not self.queued and self.reason != "SchedulingGated"

    @property
    def started(self) -> bool:
        """Return whether a kubelet may have run a container of the pod.

        A pod that has not started has no address, so no ROUND message can have named it.
        """
        return self.phase is not PodPhase.PENDING or self.ip is not None or self.sidecar_started

    @property
    def alive(self) -> bool:
        """Return whether the pod is neither being deleted nor ended."""
        return not self.terminating and not self.ended

    @property
    def ended(self) -> bool:
        return self.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)

    @property
    def exceeded_own_limit(self) -> bool:
        """Return whether the kubelet evicted the pod because of a limit in its own spec.

        For a shortage of the node, the kubelet sets condition DisruptionTarget as well.
        """
        return (
            self.reason == "Evicted"
            and not self.disrupted
            and any(text in self.message for text in _OWN_LIMITS)
        )

    @property
    def disruption(self) -> str:
        """Return the pod's name, and why it is disrupted or was evicted."""
        return f"pod {self.name}: {self.reason or 'disrupted'}: {self.message}".rstrip(": ")

    @property
    def leaving(self) -> bool:
        """Return whether the pod is being deleted or evicted, and its containers may still run."""
        return (self.terminating or self.disrupted) and not self.ended

    def tolerates(self, taint: Taint) -> bool:
        """Return whether a toleration matches the taint, whatever their values and for whatever time."""
        return any(k in ("", taint.key) and e in ("", taint.effect) for k, e in self.tolerations)


class Reachable(StrEnum):
    YES = "Yes"
    NO = "No"
    UNKNOWN = "Unknown"
    """The sidecar has neither answered a call yet nor failed often enough to count as unreachable."""


@dataclass(frozen=True, slots=True)
class AckedRound:
    """The newest ROUND message that a sidecar acknowledged to this operator process."""

    round: RestartRound
    version: int
    digest: Digest
    """Content of the message (Round.content_digest)."""
    sidecar_restarts: int = 0
    """Restart count of the sidecar container when the message was sent. ROUND must be sent again to a sidecar
    that has restarted since."""


@dataclass(frozen=True, slots=True)
class ManifestView:
    """A manifest that a sidecar listed. Its contents were verified by its digest."""

    step: Step
    round: RestartRound
    manifest: Digest
    world_size: int
    shards: tuple[ManifestShard, ...]
    """Every rank once. Empty if the manifest is of another number of ranks than the job."""


@dataclass(frozen=True, slots=True)
class InventoryView:
    """What a sidecar stored when it sent its inventory, with the contents of the manifests."""

    round: RestartRound
    version: int
    """Version of the newest ROUND message that the sidecar held for `round`. 0 if it held none."""
    worker: Worker | None = None
    """Index of its worker, by the sidecar itself. None: it has not said it."""
    launcher: bool = False
    """Whether its launcher was connected."""
    manifests: tuple[ManifestView, ...] = ()
    shards: tuple[ShardRef, ...] = ()
    """Shards on its node tier and in its slots."""
    uncommitted: tuple[UncommittedShard, ...] = ()
    stored: dict[Digest, CheckpointId] | None = None
    """Newest checkpoints of the job in the object store. None: it was not asked, or the store not reached."""


@dataclass(frozen=True, slots=True)
class SidecarView:
    worker: Worker
    pod_uid: str
    reachable: Reachable = Reachable.UNKNOWN
    inventory: InventoryView | None = None
    """The newest reply. It is kept when the sidecar can no longer be reached."""
    sealed_round: RestartRound | None = None
    """The newest round for which it reported to be sealed. None: it has reported none."""
    acked: AckedRound | None = None
    unreachable_since: float | None = None
    """Time of the first failed call since the last answer. None unless `reachable` is NO."""
    answered_at: float | None = None
    """Time of its last answer. None: it has not answered this operator process."""
    unreachable_because: str = ""
    """The call after which the sidecar counted as unreachable, and its error."""


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    taints: frozenset[Taint] = frozenset()
    """Taints by which Kubernetes keeps new pods off a node that it regards as lost."""
    other_taints: frozenset[Taint] = frozenset()
    """Other taints that keep new pods off the node. Those with effect PreferNoSchedule are left out."""
    leaving_taints: frozenset[Taint] = frozenset()
    """Those of `other_taints` that say that the node will be taken away soon."""
    lost_because: str = ""
    """Why the node counts as lost if the sidecar on it does not answer. "": it does not. Its lease did not
    change for suspect_after while the watch of leases is known to work, its Node object is missing for as
    long, Kubernetes regards it as lost (`taints`), or it has a failing condition."""
    is_silent: bool = False
    """Whether it is lost because of its lease or its missing Node object."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """Type and status of its conditions."""
    renewed_at: float | None = None
    """When this process last saw the lease change."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        return bool(self.lost_because)


@dataclass(frozen=True, slots=True)
class StoreView:
    name: str
    config: StoreConfig
    credentials_secret: str | None = None
    """Secret in the job's namespace that only the sidecar mounts. None: the store uses web identity."""
    ca_secret: str | None = None
    available: bool | None = None
    """Value of condition Available. None: the store's spec is not probed yet."""
    message: str = ""
    reached_quotas: tuple[ReachedQuota, ...] = ()

    @property
    def token_audience(self) -> str | None:
        """Audience of the token that the sidecar mounts for the web identity. None: the store uses keys."""
        return "api://AzureADTokenExchange" if self.config.client_id else None


@dataclass(frozen=True, slots=True)
class ForeignSource:
    """The Checkpoint of another namespace that spec.restoreFrom names."""

    namespace: str
    granted: bool
    """Whether a CheckpointGrant of that namespace lets this job start from it."""
    checkpoint: Checkpoint | None = None
    """None: it does not exist, cannot be parsed, or is not granted."""
    places: tuple[str, ...] = ()
    """The places of the CheckpointStores there that may have its data."""


def place_of(config: StoreConfig) -> str:
    """Return endpoint, bucket and prefix, by which two stores are one place."""
    names = (config.endpoint, config.account, config.bucket, config.prefix.strip("/"))
    return "/".join(filter(None, names))


@dataclass(frozen=True, slots=True)
class RequestedSave:
    """A Checkpoint request that was sent to the coordinator."""

    name: str
    round: RestartRound
    after_step: Step | None
    """Newest step that a rank had finished when the request was sent. Only a later step fulfils the request.
    None: any step of the round does."""
    token: str = ""
    """Token of the request that the coordinator has. Several Checkpoints may share it."""
    state_version: int = 0
    """Version of the coordinator's state when the request was sent. A later state has the token, unless
    another coordinator has started since."""
    marked: bool = True
    """Whether the Checkpoint was written as in progress. False: that write failed, and is repeated."""


class Seen(StrEnum):
    """A state whose first sight JobMemory.seen keeps."""

    ANSWERING = "Answering"
    """The sidecar of at least one member is reachable."""
    UNSCHEDULED = "Unscheduled"
    """Pods of the gang that have not started have no nodes."""
    LACKING = "Lacking"
    """The same, while no pod of an earlier round holds a node."""
    AVOIDING = "Avoiding"
    """A pod that excludes failed nodes waits for a node."""
    ROOM = "Room"
    """A placeholder of the job has a node."""
    ENDING = "Ending"
    """Some members' pods have succeeded, and others have not."""
    MISSING = "Missing"
    """No place has a good copy of the restore point."""
    LEAVING = "Leaving"
    """This pod is being deleted or evicted, and its containers may still run."""
    BOUND = "Bound"
    """This pod has a node and has not started."""
    DELETING = "Deleting"
    """This Checkpoint is deleted, and our finalizer keeps it."""
    SEALED = "Sealed"
    """Every member was sealed for the round."""
    SCHEDULED = "Scheduled"
    """The sidecar of every member had started, and since the round last took in lost pods."""
    CHOSEN = "Chosen"
    """The restore point of the round was in the status."""


class Done(StrEnum):
    """An action of a round whose last time JobMemory.done keeps, so that it is not repeated too soon."""

    ROUND_SENT = "RoundSent"
    SPARES_CREATED = "SparesCreated"
    PLACEHOLDERS_CREATED = "PlaceholdersCreated"
    STORE_LISTED = "StoreListed"
    TAKEN_IN = "TakenIn"
    """The round took in further lost pods."""


@dataclass(frozen=True, slots=True)
class JobMemory:
    """State of one job that an operator process keeps between passes.

    It is lost when the operator restarts. Decisions are correct without it, and each field says what the loss
    costs. `decide` returns the next value in `Decision.memory`, and `apply.memory_after` corrects it for
    actions that failed.
    """

    round: RestartRound | None = None
    """Round that the memory belongs to. Lost: the waits of the round begin again."""
    round_seen_at: float | None = None
    """When this process first saw `round` in the status. Lost: the wait for holders begins again."""
    seen: Mapping[tuple[Seen, str], float] = field(default_factory=dict)
    """When this process first saw each state that holds now, by the uid of its object or "". SEALED,
    SCHEDULED and CHOSEN stay until the round ends. Lost: the waits begin again, and a recovery that is under
    way has no durations of its first phases."""
    done: Mapping[Done, float] = field(default_factory=dict)
    """When this process last did this in `round`. Lost: it is repeated once, and the objects exist."""
    failure_seen_at: float | None = None
    """When the failure that is present now was first seen. Lost: the back-off begins again."""
    cause_known_at: float | None = None
    """When it was first known what this failure lost. None: the operator waits for sidecars that do not
    answer, or for further lost pods. Lost: the phase `detect` is longer, and `backOff` shorter."""
    sound_at: float | None = None
    """When a pass last found no failure. Lost: the estimate of a fault's time has less evidence."""
    progress: tuple[int, float] | None = None
    """Sum of the ranks' step numbers, and when this process first saw it. Lost: as for `sound_at`."""
    begun: Mapping[RestartRound, float] = field(default_factory=dict)
    """When this process last decided to begin `round` or a later one. Lost: the recovery's record has the
    phases that the coordinator measures."""
    copying: tuple[Step, float] | None = None
    """A locally committed step that was not replicated yet, and the time at which it was first seen. Lost:
    one flush is not measured."""
    flush_seconds: float = 0.0
    """Longest time for which a step was seen to be copied in `round`. Lost: status.flushSeconds has the
    longest one that was written."""
    announced: tuple[tuple[str, str], ...] = ()
    """Pairs (name, `PodView.disruption`) of the pods that were seen disrupted in `round`, gone ones too.
    Lost: a pod that is gone counts as PodLost instead of PodEvicted."""
    unstarted: frozenset[str] = frozenset()
    """Names of this round's pods that had not started when they were last seen. Lost: one that is gone
    counts as lost, which costs a round."""
    create_refused: str = ""
    """Error of a create that was refused in the last pass of this round. "" if none was refused. Lost: the
    next pass repeats the create."""
    record_refused: str = ""
    """The same for the create or update of the Checkpoint object that records the newest commit."""
    placeholders_refused: str = ""
    """The same for the last creates of placeholders."""
    save_requests: tuple[RequestedSave, ...] = ()
    """Requests to save that were sent to the coordinator and are not fulfilled yet. Lost: they are sent again
    with the same tokens, which the coordinator knows."""
    prunes: Mapping[str, float] = field(default_factory=dict)
    """When the newest turn of each Checkpoint began whose prune was ordered in `round`. Lost: turns begin
    again."""
    levels_written_at: float | None = None
    """When the status was last written. Lost: routine news waits as long again."""
    counted_at: float | None = None
    """Time up to which goodput is counted. Lost: the time since the last write is not counted."""
    blocked_counted_seconds: float = 0.0
    """Seconds of this round, blocked by saves, that goodput.checkpointSeconds contains already. Lost: they
    count twice."""

    def seen_at(self, state: Seen, uid: str = "") -> float | None:
        """Return when this process first saw this state, or None if it does not hold."""
        return self.seen.get((state, uid))


@dataclass(frozen=True, slots=True)
class Observed:
    """Input of a decision about one job."""

    job: Gang
    pods: tuple[PodView, ...] = ()
    """All worker pods that the job controls, including those of replaced workers."""
    placeholders: tuple[PodView, ...] = ()
    """Pods of the job that look for nodes for missing workers of an elastic gang. No container of them runs,
    so no rule for workers sees them."""
    sidecars: tuple[SidecarView, ...] = ()
    """At most one per pod uid."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    """Nodes of the job's pods and placeholders, by name. A missing entry means that the node's state is not
    known."""
    lost_nodes: tuple[NodeView, ...] = ()
    """All nodes of the cluster whose leases have stopped or that have a failing condition, with a pod of the
    job or without, the newest loss
    first. Empty if every member's pod has started."""
    coordinator: CoordinatorState | None = None
    """The newest reply of the round's coordinator. None: this process has received none yet."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints of this job, and those that spec.restoreFrom may stand for."""
    source: Gang | None = None
    """The present job of the name in spec.restoreFrom.jobRef."""
    foreign: ForeignSource | None = None
    """The Checkpoint of another namespace that spec.restoreFrom names. None: it names none."""
    cloned: frozenset[str] = frozenset()
    """Names of the Checkpoints from which other jobs start that have none of their own in a store yet."""
    store: StoreView | None = None
    """The store that the spec names. None: the spec names no store, or the store does not exist, cannot be
    parsed or is being deleted."""
    sidecar: SidecarSettings = field(default_factory=lambda: SidecarSettings(""))
    """Settings of the installation for the objects of the job."""
    secrets: frozenset[str] = frozenset()
    """Names of certificate Secrets that this process created or found. The operator may not read them."""
    taken_secrets: frozenset[str] = frozenset()
    """Names for Secrets with certificates that this process found in use for something else."""
    memory: JobMemory = JobMemory()
    routine_seconds: float = 0.0
    """Shortest time between two passes without a reason, and between two writes of routine news."""
    unreadable: tuple[Unreadable, ...] = ()
    """Objects that exist and cannot be parsed: pods of the job, its store, its Checkpoints and the one that
    spec.restoreFrom names."""
    owner: OwnerView | None = None
    """What created the pods of an adopted gang. None: it is not known yet, or the operator creates them."""
    same_name: Gang | None = None
    """Another object of this namespace with the job's name, whose Checkpoints could be taken for the job's.
    None: there is none."""
    template_refusal: str | None = None
    """Error of the API server on a dry run of the job's first pod, before the first round or after an edit.
    None: the server accepted the pod, or no dry run was made, for example of an invalid template."""

    def cannot_read(self, kind: str, name: str) -> Unreadable | None:
        """Return the record of that object if it exists and cannot be parsed."""
        found = (u for u in self.unreadable if u.kind == kind and u.name == name)
        return next(found, None)

    def sidecar_of(self, pod: PodView) -> SidecarView | None:
        return next((s for s in self.sidecars if s.pod_uid == pod.uid), None)

    def node_lost(self, pod: PodView) -> bool:
        """Return whether the pod's node counts as lost: see NodeView.lost_because.

        The sidecar must be unreachable as well. A pod without an address has no sidecar to call, so the lease
        alone decides: its kubelet may be about to start it on a node that is not ready for a moment.
        """
        if pod.node is None:
            return False
        node = self.nodes.get(pod.node)
        if node is None or not node.lost:
            return False
        sidecar = self.sidecar_of(pod)
        if sidecar is None:
            return pod.ip is None and node.is_silent
        return sidecar.reachable is Reachable.NO


def store_config(store: CheckpointStore) -> StoreConfig:
    """Return the store's configuration as sidecars receive it. The CRD has validated the endpoint."""
    place, features = store.spec.place, store.status.features
    account = place.account if isinstance(place, AzureSpec) else ""
    url = urlsplit(place.endpoint or f"https://{account}.blob.core.windows.net")
    config = StoreConfig(
        endpoint=url.netloc,
        secure=url.scheme == "https",
        bucket=place.container if isinstance(place, AzureSpec) else place.bucket,
        prefix=place.prefix,
        region="",
        max_concurrency=place.max_concurrency,
        account=account,
    )
    match place:
        case AzureSpec(web_identity=WebIdentitySpec() as identity):
            return replace(
                config,
                client_id=identity.client_id,
                tenant_id=identity.tenant_id,
                authority=identity.authority or "",
            )
        case AzureSpec():
            return config
        case GoogleSpec():
            return replace(config, google="key" if place.credentials_secret_ref else "identity")
        case S3Spec():
            return replace(
                config,
                region=place.region,
                part_size_mib=place.part_size_mib,
                conditional_put=features is None or features.conditional_put is not False,
            )


def store_view(store: CheckpointStore) -> StoreView:
    credentials, ca = store.spec.place.credentials_secret_ref, store.spec.place.ca_secret_ref
    answered = store.status.observed_generation == store.generation
    condition = store.status.condition(StoreCondition.AVAILABLE)
    return StoreView(
        name=store.name,
        config=store_config(store),
        credentials_secret=None if credentials is None else credentials.name,
        ca_secret=None if ca is None else ca.name,
        available=store.available if answered else None,
        message="" if condition is None else condition.message,
        reached_quotas=store.status.reached_quotas,
    )
