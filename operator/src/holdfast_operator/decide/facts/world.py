"""Questions about an Observed that several rules ask. Pure; knows no action."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from holdfast_core.ids import CheckpointId, RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState
from holdfast_core.names import pod_name
from holdfast_operator.model.job import (
    JobStatusView,
    LineageEntry,
    Observed,
    PersistedView,
    PodView,
    Reachable,
    SidecarView,
)

MAX_ROUNDS_AHEAD = 10_000


@dataclass(frozen=True, slots=True)
class MemberState:
    """One worker of the current round: its birth round, its pod and its sidecar, where known."""

    worker: Worker
    birth_round: RestartRound
    pod: PodView | None
    sidecar: SidecarView | None
    node_lost: bool

    @property
    def alive(self) -> bool:
        return self.pod is not None and self.pod.alive and not self.node_lost

    @property
    def reachable(self) -> bool:
        return self.sidecar is not None and self.sidecar.reachable is Reachable.YES

    def sealed_for(self, round_: RestartRound) -> bool:
        """A pod's birth round seals it; a survivor must have said so itself."""
        if self.birth_round >= round_:
            return True
        sidecar = self.sidecar
        if sidecar is None:
            return False
        known = [r for r in (sidecar.sealed_round, inventory_round(sidecar)) if r is not None]
        return bool(known) and max(known) >= round_


def inventory_round(sidecar: SidecarView) -> RestartRound | None:
    return None if sidecar.inventory is None else sidecar.inventory.round


@dataclass(frozen=True)
class World:
    """An Observed with its lookups made once: a gang may have thousands of pods."""

    observed: Observed

    @property
    def status(self) -> JobStatusView:
        return self.observed.job.status

    @property
    def round(self) -> RestartRound:
        """Only for callers that know that a round was begun."""
        return self.status.restart_round or RestartRound(0)

    @cached_property
    def members(self) -> tuple[MemberState, ...]:
        by_key: dict[tuple[int, int], PodView] = {}
        for pod in self.observed.pods:
            key = (pod.worker, pod.birth_round)
            known = by_key.get(key)
            if known is None or (pod.alive and not known.alive):
                by_key[key] = pod
        sidecars = {s.pod_uid: s for s in self.observed.sidecars}
        found = []
        for index, birth in enumerate(self.status.members):
            member_pod = by_key.get((index, birth))
            sidecar = None if member_pod is None else sidecars.get(member_pod.uid)
            lost = member_pod is not None and self.observed.node_lost(member_pod)
            found.append(MemberState(Worker(index), birth, member_pod, sidecar, lost))
        return tuple(found)

    @cached_property
    def unstarted(self) -> frozenset[str]:
        """Names of pods of this round that have not started, or had not when they were last seen."""
        born = [m for m in self.members if m.birth_round == self.status.restart_round]
        present = {m.pod.name for m in born if m.pod is not None and not m.pod.started}
        gone = {self._pod_name(m) for m in born if m.pod is None}
        return frozenset(present | (gone & self.observed.memory.unstarted))

    def awaits_start(self, member: MemberState) -> bool:
        """Nothing of this member has run: its pod is not created yet, or it has no address, so that
        no ROUND can have named it. It can be created again in the same round, under the same name."""
        if member.birth_round != self.status.restart_round:
            return False
        if member.pod is not None:
            return not member.pod.started
        return self.status.restore_point is None or self._pod_name(member) in self.unstarted

    def _pod_name(self, member: MemberState) -> str:
        job = self.observed.job
        return pod_name(job.name, job.uid, member.worker, member.birth_round)

    @cached_property
    def obsolete_pods(self) -> tuple[PodView, ...]:
        """Pods that status.members does not mean: of replaced workers, or of no round at all. A pod
        of a higher round is not among them: it is evidence that this operator is behind."""
        wanted = {m.pod.uid for m in self.members if m.pod is not None}
        return tuple(p for p in self.observed.pods if p.uid not in wanted and not self.is_ahead(p))

    def is_ahead(self, pod: PodView) -> bool:
        """The pod was born in a round that the status does not know yet: it must not be deleted on
        what is known now."""
        return self.status.restart_round is None or pod.birth_round > self.status.restart_round

    def _is_evidence(self, round_: RestartRound) -> bool:
        """A round that no status can have missed is not believed: neither the name of a pod nor the
        answer of a sidecar may use up the numbers of rounds."""
        return round_ <= (self.status.restart_round or 0) + MAX_ROUNDS_AHEAD

    @cached_property
    def highest_birth(self) -> RestartRound | None:
        """The highest round that a pod of the job was born in."""
        births = (p.birth_round for p in self.observed.pods if self._is_evidence(p.birth_round))
        return max(births, default=None)

    @cached_property
    def pods_ahead(self) -> dict[Worker, RestartRound]:
        """Birth rounds of living pods that the status does not know yet. Where it really is behind
        (etcd was restored), they become members: they may hold the newest copies."""
        found: dict[Worker, RestartRound] = {}
        for pod in self.observed.pods:
            if not pod.alive or not self._is_evidence(pod.birth_round):
                continue
            if self.is_ahead(pod) and not self.observed.node_lost(pod):
                found[pod.worker] = max(pod.birth_round, found.get(pod.worker, pod.birth_round))
        return found

    @property
    def next_round(self) -> RestartRound:
        """Above the status, and above whatever a sidecar or a pod remembers."""
        known = (self.status.restart_round, self.highest_sealed, self.highest_birth)
        return RestartRound(max((r for r in known if r is not None), default=-1) + 1)

    @cached_property
    def coordinator(self) -> CoordinatorState | None:
        """The coordinator's state, if it speaks of the current round."""
        state = self.observed.coordinator
        if state is None or state.round != self.status.restart_round:
            return None
        return state

    @property
    def last_persisted(self) -> PersistedView | None:
        """The commit of the object tier that this round's history still contains."""
        last = self.status.last_persisted
        return None if last is None or not on_lineage(last.id, self.status.lineage) else last

    @cached_property
    def highest_sealed(self) -> RestartRound | None:
        """The highest round that any sidecar of the job says it is sealed for."""
        rounds = [
            r
            for s in self.observed.sidecars
            for r in (s.sealed_round, inventory_round(s))
            if r is not None and self._is_evidence(r)
        ]
        return max(rounds, default=None)

    def member(self, worker: Worker) -> MemberState | None:
        return self.members[worker] if worker < len(self.members) else None

    def coordinator_member(self) -> MemberState | None:
        worker = self.status.coordinator
        return None if worker is None else self.member(worker)


def on_lineage(checkpoint: CheckpointId, lineage: tuple[LineageEntry, ...]) -> bool:
    """(s, r) is a candidate only if for every later round r' s <= baseStep(r').

    A later round that started from the very beginning leaves nothing of the rounds before it.
    """
    for entry in lineage:
        if entry.round <= checkpoint.round:
            continue
        if entry.base_step is None or checkpoint.step > entry.base_step:
            return False
    return True
