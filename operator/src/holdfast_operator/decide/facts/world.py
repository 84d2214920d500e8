"""What a pass over one job knows: the observation, the time, facts of both, and the memory of the process.

Pure: nothing here returns actions. Only waits and measured durations depend on the memory (JobMemory). They
start again after a restart of the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from typing import Any, NamedTuple

from holdfast_core.api import (
    Checkpoint,
    Gang,
    JobCondition,
    LineageEntry,
    PersistedStep,
    ReachedQuota,
    TrainingJobStatus,
    on_lineage,
    size_text,
)
from holdfast_core.api import with_status as job_with_status
from holdfast_core.api.checkpoint_adoption import CheckpointAdoptionSpec
from holdfast_core.api.training_job import TrainingJobSpec
from holdfast_core.ids import FIRST_SPARE, RestartRound, Step, Worker, is_spare
from holdfast_core.messages.schema import CoordinatorState
from holdfast_core.names import another_secret_name
from holdfast_operator.model import labels
from holdfast_operator.model.actions import Call, CallPath, Delete, Message
from holdfast_operator.model.job import (
    Done,
    InventoryView,
    JobMemory,
    Now,
    Observed,
    PodPhase,
    PodView,
    Reachable,
    Seen,
    SidecarView,
    queue_of,
)
from holdfast_operator.model.ownership import PodSource, pod_source
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.template import pod_spec

MAX_MESSAGE_CHARACTERS = 1024
_NOTHING_REPORTED = CoordinatorState(version=0, round=RestartRound(0))
ENDS_OF_GANG = (JobCondition.SUSPENDED, JobCondition.COMPLETE, JobCondition.FAILED)
"""Conditions of a job that has no gang: it is suspended or over."""
MAX_ROUNDS_AHEAD = 10_000
"""How far above the status the round of a pod or a sidecar may be and still count as evidence."""


class Note(NamedTuple):
    """Reason and message of a condition."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class MemberState:
    """Worker of the current round, with its birth round, its pod and its sidecar. None: there is none."""

    worker: Worker
    birth_round: RestartRound
    pod: PodView | None
    sidecar: SidecarView | None
    node_lost: bool
    sealed_from: RestartRound
    """Round for which its sidecar is sealed when it starts."""
    was_spare: bool = False
    """Whether its pod was a spare before it became this worker."""

    @property
    def alive(self) -> bool:
        return self.pod is not None and self.pod.alive and not self.node_lost

    @property
    def serves(self) -> bool:
        """Return whether its sidecar may serve: the pod is alive, or leaves and has not ended."""
        return self.pod is not None and not self.pod.ended and not self.node_lost

    @property
    def reachable(self) -> bool:
        return self.sidecar is not None and self.sidecar.reachable is Reachable.YES

    @property
    def node(self) -> str | None:
        return None if self.pod is None else self.pod.node

    @property
    def inventory(self) -> InventoryView | None:
        return None if self.sidecar is None else self.sidecar.inventory

    def call(self, path: CallPath, message: Message) -> list[Call]:
        """Return the call to its sidecar, or nothing while its pod has no address."""
        pod = self.pod
        if pod is None or pod.ip is None:
            return []
        return [Call(path, self.worker, pod.peer_name, pod.uid, message)]

    def sealed_for(self, round_: RestartRound) -> bool:
        """Return whether the member is known to be sealed for this round.

        A sidecar is sealed for `sealed_from` when it starts. It must have reported a later seal.
        """
        if self.sealed_from >= round_:
            return True
        sidecar = self.sidecar
        if sidecar is None:
            return False
        known = [r for r in (sidecar.sealed_round, inventory_round(sidecar)) if r is not None]
        return bool(known) and max(known) >= round_


def has_no_gang(status: TrainingJobStatus) -> bool:
    """Return whether the job is suspended or over."""
    return any(status.is_true(kind) for kind in ENDS_OF_GANG)


def inventory_round(sidecar: SidecarView) -> RestartRound | None:
    return None if sidecar.inventory is None else sidecar.inventory.round


@dataclass
class World:
    """What a pass over one job knows, with cached look-ups, because a gang may have thousands of pods.

    Rules that begin something note it in `memory`, which the pass leaves for the next one.
    """

    observed: Observed
    now: Now
    memory: JobMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = self.observed.memory

    def with_status(self, status: TrainingJobStatus) -> World:
        """Return what the pass would know if the job had this status. What it remembers is lost."""
        found = World(replace(self.observed, job=job_with_status(self.job, status)), self.now)
        found.memory = self.memory
        return found

    def remember(self, **changes: Any) -> None:
        """Change these fields of the memory."""
        self.memory = replace(self.memory, **changes)

    def remember_done(self, what: Done) -> None:
        self.remember(done={**self.memory.done, what: self.now.monotonic})

    def seconds_since(self, start: float | None) -> float:
        """Return the seconds since `start`, or 0 if `start` is None."""
        return 0.0 if start is None else self.now.monotonic - start

    def seconds_seen(self, state: Seen, uid: str = "") -> float:
        """Return for how long this process has seen the state, or 0 if it does not hold."""
        return self.seconds_since(self.memory.seen_at(state, uid))

    def deletes(self, pods: Iterable[PodView], why: str) -> list[Delete]:
        """Return deletes of these pods, by force on a lost node, which cannot confirm them.

        A pod that is being deleted already is left out, unless its node is lost.
        """
        lost = self.observed.node_lost
        found = (p for p in pods if lost(p) or not p.terminating)
        return [Delete(labels.POD, p.name, p.uid, why, force=lost(p)) for p in found]

    def with_condition(
        self,
        status: TrainingJobStatus,
        kind: JobCondition,
        value: bool | None,
        reason: str,
        text: str,
    ) -> TrainingJobStatus:
        """Return the status with that condition. Its transition time changes only if its value changes.

        The message is cut to MAX_MESSAGE_CHARACTERS.
        """
        text, generation = text[:MAX_MESSAGE_CHARACTERS], self.job.generation
        return status.with_condition(kind, value, reason, text, self.now.utc, generation)

    @cached_property
    def source(self) -> PodSource:
        return pod_source(self.job)

    @property
    def job(self) -> Gang:
        return self.observed.job

    @property
    def spec(self) -> TrainingJobSpec | CheckpointAdoptionSpec:
        return self.job.spec

    @property
    def status(self) -> TrainingJobStatus:
        return self.job.status

    @property
    def round(self) -> RestartRound:
        """Return the current round. Callers must have checked that a round has begun."""
        return self.status.restart_round or RestartRound(0)

    @cached_property
    def _pods_by_key(self) -> dict[tuple[int, int], PodView]:
        by_key: dict[tuple[int, int], PodView] = {}
        for pod in self.observed.pods:
            key = (pod.worker, pod.birth_round)
            known = by_key.get(key)
            if known is None or (pod.alive and not known.alive):
                by_key[key] = pod
        return by_key

    @cached_property
    def _sidecars(self) -> dict[str, SidecarView]:
        return {s.pod_uid: s for s in self.observed.sidecars}

    @cached_property
    def _used_secrets(self) -> dict[str, str]:
        """Return the Secrets that pods mount, by the first name for each."""
        found: dict[str, str] = {}
        for pod in self.observed.pods:
            if pod.certificates and not pod.ended:
                first = self.source.certificates(pod.worker, pod.birth_round)
                found.setdefault(first, pod.certificates)
        return found

    def certificates(self, worker: Worker, birth: RestartRound) -> str:
        """Return the Secret with the certificate of the worker's pod of this birth round.

        It is the one that pods of its block of workers mount. Before there are any, it is the first name for
        it that is not taken.
        """
        first = self.source.certificates(worker, birth)
        used = self._used_secrets.get(first)
        if used is not None:
            return used
        names = chain((first,), (another_secret_name(first, n) for n in count(1)))
        return next(n for n in names if n not in self.observed.taken_secrets)

    def is_mounted(self, secret: str) -> bool:
        """Return whether a pod of the job mounts this Secret."""
        return secret in self._used_secrets.values()

    @cached_property
    def own_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the Checkpoints of this job, without those that a former job of the same name left."""
        job = self.job
        return tuple(
            c
            for c in self.observed.checkpoints
            if c.job == job.name and c.status.job_uid in (None, job.uid)
        )

    @cached_property
    def members(self) -> tuple[MemberState, ...]:
        return self._states(enumerate(self.status.members))

    @cached_property
    def spares(self) -> tuple[MemberState, ...]:
        """Return the spares that the job is to have, with indices from FIRST_SPARE (ADR 0015)."""
        spares = self.status.spares
        return () if spares is None else self._states(enumerate(spares.births, FIRST_SPARE))

    def _states(self, births: Iterable[tuple[int, RestartRound]]) -> tuple[MemberState, ...]:
        found = []
        for index, birth in births:
            worker, pod = Worker(index), self._pods_by_key.get((index, birth))
            found.append(
                MemberState(
                    worker,
                    birth,
                    pod,
                    None if pod is None else self._sidecars.get(pod.uid),
                    node_lost=pod is not None and self.observed.node_lost(pod),
                    sealed_from=self.source.sealed_from(worker, birth),
                    was_spare=self.source.was_spare(worker, birth),
                )
            )
        return tuple(found)

    @cached_property
    def claims(self) -> dict[Worker, PodView]:
        """Return the spares that are workers by a newer status than this one, with the newest round first.

        Their sidecars say so, and are in a higher round than the status, which was restored from a backup.
        """
        found: dict[Worker, tuple[RestartRound, PodView]] = {}
        for pod in self.observed.pods:
            sidecar = self.observed.sidecar_of(pod) if is_spare(pod.worker) and pod.alive else None
            inventory = None if sidecar is None else sidecar.inventory
            worker = None if inventory is None else inventory.worker
            if inventory is None or worker is None or is_spare(worker):
                continue
            known = self.status.restart_round
            if known is None or inventory.round > known:
                old = found.get(worker)
                if old is None or old[0] < inventory.round:
                    found[worker] = (inventory.round, pod)
        return {worker: pod for worker, (_, pod) in found.items()}

    @cached_property
    def nodes_are_fixed(self) -> bool:
        """Return whether no affinity of the operator can keep the pods off a node.

        Either the template sets spec.nodeName. Then no scheduler reads the affinity, and the kubelet of that
        node would reject a pod whose affinity excludes it. Or another controller creates the pods.
        """
        return self.spec.template is None or self.fixed_node is not None

    @property
    def fixed_node(self) -> str | None:
        """Return spec.nodeName of the template, the node to which every new pod is bound, or None."""
        return pod_spec(self.job).get("nodeName") or None

    @property
    def fixed_node_advice(self) -> str:
        """Return what spec.nodeName of the template does and what to write instead, or "" without it."""
        if self.fixed_node is None:
            return ""
        return (
            f"spec.template.spec.nodeName is {self.fixed_node}, so every pod goes to this node: write a "
            "nodeSelector instead, or the name of a node that can run the pods"
        )

    @property
    def may_create_pods(self) -> bool:
        """Return whether missing pods are created.

        They are if spec.suspend is false. A job that is to be suspended creates them only to save a step that
        the object store lacks: the gang has to train again before it can save. Without a store it could not
        save it.
        """
        spec = self.spec
        return not spec.suspend or spec.store is not None

    @property
    def may_replace_pods(self) -> bool:
        """Return whether pods that exist may be deleted to be created again from the present template.

        While the API server refuses them, the job could not come back. Missing pods are created all the same:
        the dry run that refuses them is strict about fields that the server does not know, and a create is
        not.
        """
        return self.may_create_pods and self.observed.template_refusal is None

    @property
    def wanted_spares(self) -> int:
        """Return the number of spare pods that the job is to have.

        A job in a queue of Kueue has none: its pods are a group with a fixed number of pods (ADR 0012).
        """
        job = self.job
        return job.spec.spares if queue_of(job) is None else 0

    @cached_property
    def copies(self) -> int:
        """Return the number of copies of each shard on other workers of the present gang."""
        peer = self.spec.checkpoint.peer
        return min(1 if peer is None else peer.copies, len(self.members) - 1)

    @cached_property
    def unscheduled(self) -> tuple[MemberState, ...]:
        """Return the members whose pods the scheduler has not placed, or whose creation is refused.

        A pod with a scheduling gate is left out: its scheduler does not look for a node yet.
        """
        tries = self.status.scheduling
        if tries is not None and tries.retry_at is not None:
            return ()  # its pods are not to be created yet
        refused = bool(self.observed.memory.create_refused)
        return tuple(
            m
            for m in self.members
            if (refused if m.pod is None else m.pod.unscheduled) and self.awaits_start(m)
        )

    @property
    def nodes_become_free(self) -> bool:
        """Return whether pods that are no members of the round still have nodes, which are not lost.

        Until such a pod has ended, a pod of the round may wait for its node.
        """
        return bool(self.placeholders_with_nodes) or any(
            p.node is not None and not p.ended and not self.observed.node_lost(p)
            for p in self.obsolete_pods
        )

    @property
    def placeholders_with_nodes(self) -> tuple[PodView, ...]:
        """Return the placeholders that have not ended and have nodes, which are not lost."""
        found = (p for p in self.observed.placeholders if not p.ended and p.node is not None)
        return tuple(p for p in found if not self.observed.node_lost(p))

    @cached_property
    def unstarted(self) -> frozenset[str]:
        """Return the names of this round's pods that have not started, or had not when last seen."""
        born = [m for m in self.members if m.birth_round == self.status.restart_round]
        present = {m.pod.name for m in born if m.pod is not None and not m.pod.started}
        gone = {self._pod_name(m) for m in born if m.pod is None}
        return frozenset(present | (gone & self.observed.memory.unstarted))

    def awaits_start(self, member: MemberState) -> bool:
        """Return whether the member's pod belongs to the current round and has not started.

        Such a pod may not exist yet. It has no address, so no ROUND message can have named it, and it can be
        created again in the same round under the same name.
        """
        if member.birth_round != self.status.restart_round:
            return False
        started = self.source.has_started(member.worker, member.birth_round)
        if started is not None:
            return not started
        if member.pod is not None:
            return not member.pod.started
        return self.status.restore_point is None or self._pod_name(member) in self.unstarted

    def _pod_name(self, member: MemberState) -> str:
        return self.source.identity(member.worker, member.birth_round)

    @cached_property
    def obsolete_pods(self) -> tuple[PodView, ...]:
        """Return the pods that are neither members nor spares, such as those of replaced workers.

        Pods of a round above the status are left out: they are evidence that this operator is behind.
        """
        present = (*self.members, *self.spares)
        wanted = {m.pod.uid for m in present if m.pod is not None}
        return tuple(p for p in self.observed.pods if p.uid not in wanted and not self.is_ahead(p))

    def is_ahead(self, pod: PodView) -> bool:
        """Return whether the status is older than the pod, so that the pod must not be deleted.

        The pod's round is above the status, or its worker was lost while that round had only sealed and the
        status does not show it yet (ADR 0008), or it is a spare that has become a worker.
        """
        round_, members = self.status.restart_round, self.status.members
        if round_ is None or pod.birth_round > round_:
            return True
        taken_in = pod.worker < len(members) and members[pod.worker] < round_
        claims = is_spare(pod.worker) and any(p.uid == pod.uid for p in self.claims.values())
        return (pod.birth_round == round_ and taken_in) or claims

    def _is_evidence(self, round_: RestartRound) -> bool:
        """Return whether a round is close enough to the status to count as evidence.

        Otherwise the name of one pod or the answer of one sidecar could use up the range of round numbers.
        """
        return round_ <= (self.status.restart_round or 0) + MAX_ROUNDS_AHEAD

    @cached_property
    def highest_birth(self) -> RestartRound | None:
        """Return the highest birth round of the job's pods."""
        births = (p.birth_round for p in self.observed.pods if self._is_evidence(p.birth_round))
        return max(births, default=None)

    @cached_property
    def pods_ahead(self) -> dict[Worker, RestartRound]:
        """Return the highest birth round above the status, for each worker with such a pod that is alive.

        If the status really is behind, because etcd was restored, these pods become members: they may hold
        the newest copies (ADR 0002).
        """
        found: dict[Worker, RestartRound] = {}
        for pod in self.observed.pods:
            if not pod.alive or not self._is_evidence(pod.birth_round):
                continue
            if self.is_ahead(pod) and not self.observed.node_lost(pod):
                found[pod.worker] = max(pod.birth_round, found.get(pod.worker, pod.birth_round))
        return found

    @property
    def next_round(self) -> RestartRound:
        """Return the lowest round above the status, sealed sidecars, birth rounds and stored checkpoints.

        A round that is used again would write under the names of objects that the store has already.
        """
        status = self.status.restart_round
        known = (status, self.highest_sealed, self.highest_birth, self.highest_saved)
        return RestartRound(max((r for r in known if r is not None), default=-1) + 1)

    @cached_property
    def coordinator(self) -> CoordinatorState | None:
        """Return the coordinator's state if it is of the current round, else None."""
        state = self.observed.coordinator
        if state is None or state.round != self.status.restart_round:
            return None
        return state

    @property
    def state(self) -> CoordinatorState:
        """Return `coordinator`, or the state of one that has reported nothing."""
        return self.coordinator or _NOTHING_REPORTED

    @property
    def local_step(self) -> Step | None:
        """Return the newest step that is committed locally, as the coordinator reports it."""
        point = self.state.last_local
        return None if point is None else point.step

    @property
    def copied_step(self) -> Step | None:
        """Return the newest step whose copies are durable, as the coordinator reports it."""
        point = self.state.last_replicated
        return None if point is None else point.step

    @property
    def reached_quotas(self) -> tuple[ReachedQuota, ...]:
        """Return the limits of the store's quota for which the uploads of the job wait."""
        store = self.observed.store
        if store is None:
            return ()
        job = self.job
        return tuple(r for r in store.reached_quotas if r.holds(job.namespace, job.uid))

    @property
    def last_persisted(self) -> PersistedStep | None:
        """Return status.lastPersisted if it is on the lineage, else None."""
        last = self.status.last_persisted
        return None if last is None or not on_lineage(last.id, self.status.lineage) else last

    @cached_property
    def highest_saved(self) -> RestartRound | None:
        """Return the highest round of a stored checkpoint, by Checkpoint objects and lists of the store."""
        recorded = (c.id for c in self.own_checkpoints if c.persisted)
        listed = (
            checkpoint
            for s in self.observed.sidecars
            if s.inventory is not None
            for checkpoint in (s.inventory.stored or {}).values()
        )
        rounds = (i.round for i in chain(recorded, listed) if i is not None)
        return max((r for r in rounds if self._is_evidence(r)), default=None)

    @cached_property
    def highest_sealed(self) -> RestartRound | None:
        """Return the highest round for which a sidecar of the job reported to be sealed."""
        rounds = [
            r
            for s in self.observed.sidecars
            for r in (s.sealed_round, inventory_round(s))
            if r is not None and self._is_evidence(r)
        ]
        return max(rounds, default=None)

    def member(self, worker: Worker | None) -> MemberState | None:
        known = worker is not None and worker < len(self.members)
        return self.members[worker] if known and worker is not None else None

    def pod(self, worker: Worker | None) -> PodView | None:
        member = self.member(worker)
        return None if member is None else member.pod

    def place(self, worker: Worker) -> str:
        """Return the worker and the node of its pod, for messages."""
        pod = self.pod(worker)
        return f"worker {worker}" + (
            "" if pod is None or pod.node is None else f" on node {pod.node}"
        )

    @cached_property
    def pods(self) -> tuple[PodView, ...]:
        """Return the pods of the members that have one."""
        return tuple(m.pod for m in self.members if m.pod is not None)

    @property
    def is_untouched(self) -> bool:
        """Return whether each member has a pod that is not being deleted."""
        return all(m.pod is not None and not m.pod.terminating for m in self.members)

    @cached_property
    def waiting(self) -> tuple[tuple[MemberState, PodView], ...]:
        """Return the members whose pods exist and have not started."""
        return tuple((m, m.pod) for m in self.members if m.pod is not None and self.awaits_start(m))

    def coordinator_member(self) -> MemberState | None:
        return self.member(self.status.coordinator)

    def call_coordinator(self, path: CallPath, message: Message) -> list[Call]:
        member = self.coordinator_member()
        return [] if member is None else member.call(path, message)


def back_to(step: Step, lineage: tuple[LineageEntry, ...]) -> tuple[LineageEntry, ...]:
    """Return the lineage without its last rounds that started below a step, so that the step is on it again.

    No rank may have trained in these rounds.
    """
    kept = list(lineage)
    while kept and kept[-1].base is not None and kept[-1].base.step < step:
        kept.pop()
    return tuple(kept)


# --------------------------------------------------------------------------- the gang


def restore_point_is_missing(world: World) -> bool:
    """Return whether no place has a good copy of a part of the restore point."""
    return bool(world.state.cannot_restore) and not world.state.restore_may_succeed


def is_over(status: TrainingJobStatus) -> bool:
    return status.is_true(JobCondition.COMPLETE) or status.is_true(JobCondition.FAILED)


def trains(world: World) -> bool:
    """Return whether the gang trains with all of its members, so that it can be asked to save and stop."""
    at_work = world.state.running and not world.state.dead
    return at_work and all(m.alive for m in world.members)


def stop_requested(status: TrainingJobStatus) -> bool:
    """Return whether the gang of this round may have been asked to save and stop.

    The record, reason Stopping of condition Suspended or Resizing, is written before the gang is asked. It
    stays until the next round begins, because the request cannot be withdrawn, and ranks that stop for it
    return 0 although they have not finished.
    """
    return any(asked_for(status, kind) for kind in (JobCondition.SUSPENDED, JobCondition.RESIZING))


def asked_for(status: TrainingJobStatus, kind: JobCondition) -> bool:
    """Return whether this condition records that the gang was asked to save and stop."""
    condition = status.condition(kind)
    return condition is not None and condition.reason == Reason.STOPPING


def quota_text(world: World) -> str:
    """Describe the reached limits of the store's quota, for people."""
    found = []
    for reached in world.reached_quotas:
        what, name = f"CheckpointStore {world.spec.store}", "quota.bytes"
        if reached.job_uid is not None:
            what, name = "the job", "quota.perJob"
        elif reached.namespace is not None:
            what, name = f"namespace {reached.namespace}", "quota.perNamespace"
        used, limit = size_text(reached.bytes), size_text(reached.limit_bytes)
        found.append(f"{what} holds {used} in the store, and {name} is {limit}")
    return "; ".join(found)


def make_room(world: World) -> str:
    """Return what a person can do while a quota is reached. Only a running job can prune its checkpoints."""
    return (
        f"To make room: kubectl holdfast prune {world.job.name}, delete Checkpoints with deletionPolicy "
        f"DeleteData, or raise spec.quota of CheckpointStore {world.spec.store}"
    )


def held_uploads(world: World) -> Note | None:
    """Return why the object store of the job takes no upload now, or None if it does.

    A new round knows no failures yet. If it began because the last step of the one before did not reach the
    store, the gang trains until the store has answered: otherwise it would stop and wait for nothing again.
    """
    healthy = world.status.condition(JobCondition.REMOTE_TIER_HEALTHY)
    if healthy is not None and healthy.is_false:
        return Note(Reason.STORE_UNAVAILABLE, f"the object store is away: {healthy.message}")
    if world.reached_quotas:
        text = f"uploads wait for a quota: {quota_text(world)}. {make_room(world)}"
        return Note(Reason.QUOTA_REACHED, text)
    last = world.status.last_recovery
    if last is None or (last.round, last.reason) != (world.round, Reason.NOT_PERSISTED):
        return None
    if not trains(world) or world.state.newest_is_stored is not None:
        return None
    text = "the object store has not answered since the last step of the gang did not reach it"
    return Note(Reason.STORE_UNAVAILABLE, text)


def all_ended(world: World) -> bool:
    ended = [p for p in world.pods if p.phase is PodPhase.SUCCEEDED]
    return 0 < len(ended) == len(world.members)


# --------------------------------------------------------------------------- the memory of the process


LONGEST_PAUSE_SECONDS = 5.0
_OF_JOB = frozenset({Seen.ANSWERING, Seen.UNSCHEDULED, Seen.BOUND, Seen.DELETING})
"""States that may outlast a round. The others are seen anew in each round."""
_OF_ROUND = frozenset({Seen.SEALED, Seen.SCHEDULED, Seen.CHOSEN})
"""States that are known until the round ends, even if they do not hold any more."""


def advance(world: World) -> None:
    """Bring the memory up to this pass.

    States that are seen for the first time get the time of this pass. What belongs to an older round is
    dropped.
    """
    old, round_, at = world.memory, world.status.restart_round, world.now.monotonic
    if old.round != round_ or old.round_seen_at is None:
        world.memory = JobMemory(
            round=round_,
            round_seen_at=at,
            seen={k: t for k, t in old.seen.items() if k[0] in _OF_JOB},
            begun={r: t for r, t in old.begun.items() if r == round_},
            levels_written_at=old.levels_written_at,
            counted_at=old.counted_at,
            save_requests=old.save_requests,
        )
    seen = world.memory.seen
    kept = {k: t for k, t in seen.items() if k[0] in _OF_ROUND}
    gone = {pod.name: pod.disruption for pod in world.observed.pods if pod.disrupted}
    world.remember(
        seen=kept | {k: seen.get(k, at) for k in _holding(world)},
        announced=tuple((dict(world.memory.announced) | gone).items()),
        unstarted=world.unstarted,
    )
    if round_ is None:
        return
    if world.memory.counted_at is None:
        world.remember(counted_at=at)
    progress, known = world.state.progress, world.memory.progress
    if progress is not None and (known is None or progress.total_steps != known[0]):
        world.remember(progress=(progress.total_steps, at))
    _measure_copies(world)


def _holding(world: World) -> Iterator[tuple[Seen, str]]:
    """Yield the states that hold now, each with the uid of its object or ""."""
    members, observed, round_ = world.members, world.observed, world.status.restart_round
    pods = world.pods
    succeeded = sum(p.phase is PodPhase.SUCCEEDED for p in pods)
    waiting = bool(world.unscheduled)
    states = {
        Seen.ANSWERING: any(m.reachable for m in members),
        Seen.UNSCHEDULED: waiting,
        Seen.LACKING: waiting and not world.nodes_become_free,
        Seen.AVOIDING: any(p.unscheduled and p.failed_nodes for p in pods),
        Seen.ROOM: bool(world.placeholders_with_nodes),
        Seen.ENDING: 0 < succeeded < len(members),
        Seen.MISSING: restore_point_is_missing(world),
        # A member without a pod has nothing to seal: another controller creates its pod when it likes.
        Seen.SEALED: round_ is not None
        and world.memory.seen_at(Seen.SEALED) is None
        and all(m.pod is None or m.sealed_for(round_) for m in members),
        Seen.SCHEDULED: round_ is not None
        and world.memory.seen_at(Seen.SCHEDULED) is None
        and all(m.pod is not None and (m.pod.sidecar_started or m.reachable) for m in members),
        Seen.CHOSEN: round_ is not None and world.status.restore_point is not None,
    }
    yield from ((state, "") for state, holds in states.items() if holds)
    for pod in observed.pods:
        if pod.leaving:
            yield Seen.LEAVING, pod.uid
        if pod.node is not None and pod.alive and not pod.started:
            yield Seen.BOUND, pod.uid
    yield from (
        (Seen.DELETING, c.uid) for c in observed.checkpoints if c.deleting and c.has_finalizer
    )


def _measure_copies(world: World) -> None:
    """Measure how long a step takes from its local commit until all of its copies are durable."""
    newest, copied, memory = world.local_step, world.copied_step, world.memory
    if newest is None or world.copies <= 0:
        return
    copying = memory.copying
    if copying is not None and copied is not None and copied >= copying[0]:
        took, copying = world.seconds_since(copying[1]), None
        world.remember(copying=None, flush_seconds=max(memory.flush_seconds, took))
    if copying is None and (copied is None or newest > copied):
        world.remember(copying=(newest, world.now.monotonic))


def see_failure(world: World, failing: bool) -> None:
    """Set the time at which a failure was first seen, or clear it if there is no failure any more."""
    if not failing:
        world.remember(failure_seen_at=None, cause_known_at=None, sound_at=world.now.monotonic)
    elif world.memory.failure_seen_at is None:
        world.remember(failure_seen_at=world.now.monotonic)


def again_after(world: World, since: float | None, shortest: float) -> float:
    """Return the seconds until the next pass of a wait that began at `since`.

    The result is a tenth of the wait's age, between `shortest` and LONGEST_PAUSE_SECONDS. Events cause
    earlier passes.
    """
    return min(max(world.seconds_since(since) / 10, shortest), LONGEST_PAUSE_SECONDS)
