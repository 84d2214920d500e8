"""Calls to the sidecars of a FakeCluster.

They do immediately what `sidecars.calls.Sidecars` does over the network. A `Trouble` can lose replies. What
is recorded of a sidecar is lost with the operator process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from tests.support.operator.fake_cluster import FakeCluster
from tests.support.operator.fake_sidecar import FakeSidecar

from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_core.messages.schema import (
    CoordinatorState,
    FinishCommit,
    GangRequest,
    Inventory,
    Prune,
    Refused,
    Seal,
)
from holdfast_operator.model.actions import Call, CallPath, OutgoingRound
from holdfast_operator.model.job import AckedRound, InventoryView, PodView, Reachable, SidecarView
from holdfast_operator.model.ownership import Key
from holdfast_operator.sidecars.calls import Sidecars


@dataclass(slots=True)
class Trouble:
    """Probabilities, 0 to 1, of each fault in one read or call."""

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
    """The operator's record of one sidecar."""

    pod: PodView
    inventory: InventoryView | None = None
    made_of: tuple[object, ...] = ()
    """What `inventory` was made of. Nothing is deleted from the disk of a FakeCluster, so lengths suffice."""
    acked: AckedRound | None = None
    reachable: Reachable = Reachable.UNKNOWN
    unreachable_since: float | None = None
    unreachable_because: str = ""
    answered_at: float | None = None


@dataclass(slots=True)
class _Followed:
    pods: dict[str, _Known] = field(default_factory=dict)
    """Records by pod uid."""
    state: CoordinatorState | None = None


class ToyLink(Sidecars):
    """Test double for `Sidecars`. `trouble` may be replaced at any time."""

    def __init__(self, cluster: FakeCluster, trouble: Trouble) -> None:
        self._cluster = cluster
        self.trouble = trouble
        self._followed: dict[JobUid, _Followed] = {}

    # ------------------------------------------------------------------ what a pass reads

    def views(self, uid: JobUid) -> tuple[SidecarView, ...]:
        return tuple(_view(k) for k in self._of(uid).pods.values())

    def coordinator_state(self, uid: JobUid) -> CoordinatorState | None:
        return self._of(uid).state

    def has_news(self, uid: JobUid) -> bool:
        """Return whether a sidecar answers again or no longer, or the coordinator's state has changed."""
        job, run = self._of(uid), self._cluster.gang.run
        for known in job.pods.values():
            answers = self._cluster.reachable(known.pod) is not None
            if answers != (known.reachable is Reachable.YES):
                return True
        state = job.state
        if run is None or state is None or state.round != run.round:
            return False
        return state.version != run.version and self._coordinator_answers(job, run.round)

    def _coordinator_answers(self, job: _Followed, round_: RestartRound) -> bool:
        for known in job.pods.values():
            sidecar = self._cluster.reachable(known.pod)
            message = None if sidecar is None else sidecar.message
            if message is not None and message.round == round_:
                return message.coordinator == known.pod.worker
        return False

    # ------------------------------------------------------------------ who there is

    def follow(
        self,
        key: Key,
        uid: JobUid,
        round_: RestartRound | None,
        pods: Iterable[PodView],
        coordinator: Worker | None,
        suspects: frozenset[str],
        *,
        ranks: int = 1,
        gang: frozenset[str] = frozenset(),
    ) -> None:
        """Read the inventory of each sidecar and the coordinator's state once."""
        job = self._of(uid)
        present = {p.uid: p for p in pods if p.ip is not None}
        for gone in [u for u in job.pods if u not in present]:
            del job.pods[gone]
        for pod in present.values():
            known = job.pods.setdefault(pod.uid, _Known(pod))
            known.pod = pod
            sidecar = self._answering(known)
            if sidecar is not None:
                self._update_sidecar(known, sidecar)
        named = [p for p in present.values() if p.worker == coordinator]
        for pod in named:
            self._read_state(job, pod, round_, ranks)

    def forget(self, uid: JobUid) -> None:
        self._followed.pop(uid, None)

    def acted_on(self, uid: JobUid, version: int | None) -> None:
        """Release a finished gang when the operator has recorded its end."""
        run = self._cluster.gang.run
        if run is not None and version is not None and run.finished and uid == self._cluster.uid:
            run.released = run.released or version >= run.version

    def _read_state(
        self, job: _Followed, pod: PodView, round_: RestartRound | None, ranks: int
    ) -> None:
        sidecar, run = self._cluster.reachable(pod), self._cluster.gang.run
        if sidecar is None or sidecar.message is None:
            return
        if sidecar.round != round_ or sidecar.message.coordinator != pod.worker:
            return
        if run is not None and run.round == sidecar.round:
            job.state = run.state(ranks, self._cluster.store)
        else:  # it coordinates, but the gang is not complete yet
            job.state = CoordinatorState(version=0, round=sidecar.round)

    # ------------------------------------------------------------------ what a pass asks for

    def call(self, uid: JobUid, call: Call) -> bool:
        match call.message:
            case GangRequest() as message:
                self._request(uid, call, message)
            case Prune() as message:
                return self._prune(uid, call, message)
            case Seal() | FinishCommit() | OutgoingRound() as message:
                known = self._of(uid).pods.get(call.pod_uid)
                sidecar = None if known is None else self._cluster.reachable(known.pod)
                if known is not None and sidecar is not None:
                    self._deliver(known, sidecar, message)
        return False

    def _deliver(
        self, known: _Known, sidecar: FakeSidecar, message: Seal | FinishCommit | OutgoingRound
    ) -> None:
        store = self._cluster.store
        acked = None
        match message:
            case Seal(round=round_):
                looks = message.look_in_store and not store.away
                found = {m.manifest: id_ for id_, m in store.checkpoints.items()}
                reply = sidecar.seal(round_, found if looks else None)
            case FinishCommit():
                reply = sidecar.finish_commit(message)
                if isinstance(reply, Inventory):
                    made = parse_manifest(message.manifest.encode()).checkpoint
                    self._cluster.gang.manifests_made.add(made)
            case OutgoingRound(message=of):
                reply = sidecar.take_round(of)
                if isinstance(reply, Refused):
                    self._update_sidecar(known, sidecar)
                    return
                restarts = known.pod.sidecar_restarts
                acked = AckedRound(of.round, of.version, message.digest, restarts)
        if self.trouble.strikes(self.trouble.lost_reply):
            return
        self._update_sidecar(known, sidecar)
        known.acked = acked or known.acked

    def _request(self, uid: JobUid, call: Call, message: GangRequest) -> None:
        run = self._cluster.gang.run
        if self._named(uid, call.pod) is None or run is None or run.round != message.round:
            return
        if call.path in (CallPath.STOP, CallPath.END):
            run.stop_asked = True
        if call.path is CallPath.END:
            run.is_over = True

    def _prune(self, uid: JobUid, call: Call, message: Prune) -> bool:
        if self._named(uid, call.pod) is None:
            return False
        wanted = {(c.step, c.round) for c in message.checkpoints}
        stored = self._cluster.store.checkpoints
        for id_ in [i for i in stored if (i.step, i.round) in wanted]:
            del stored[id_]
        return not self.trouble.strikes(self.trouble.lost_reply)

    # ------------------------------------------------------------------ parts

    def _of(self, uid: JobUid) -> _Followed:
        return self._followed.setdefault(uid, _Followed())

    def _named(self, uid: JobUid, pod: str) -> FakeSidecar | None:
        known = next((k for k in self._of(uid).pods.values() if k.pod.name == pod), None)
        return None if known is None else self._cluster.reachable(known.pod)

    def _answering(self, known: _Known) -> FakeSidecar | None:
        sidecar = self._cluster.reachable(known.pod)
        if sidecar is not None and not self.trouble.strikes(self.trouble.lost_reply):
            return sidecar
        known.reachable = Reachable.NO
        if known.unreachable_since is None:
            known.unreachable_since = float(self._cluster.seconds)
            known.unreachable_because = f"sidecar of pod {known.pod.name}: connection timed out"
        return None

    def _update_sidecar(self, known: _Known, sidecar: FakeSidecar) -> None:
        state = (sidecar.round, sidecar.version, sidecar.worker, sidecar.launcher, sidecar.stored)
        made_of = (*state, len(sidecar.manifests), len(sidecar.shards), len(sidecar.saved))
        if known.inventory is None or known.made_of != made_of:
            known.inventory, known.made_of = _inventory_view(sidecar), made_of
        known.reachable = Reachable.YES
        known.unreachable_since = None
        known.unreachable_because = ""
        known.answered_at = float(self._cluster.seconds)


def _view(known: _Known) -> SidecarView:
    return SidecarView(
        worker=known.pod.worker,
        pod_uid=known.pod.uid,
        reachable=known.reachable,
        inventory=known.inventory,
        sealed_round=None if known.inventory is None else known.inventory.round,
        acked=known.acked,
        unreachable_since=known.unreachable_since,
        unreachable_because=known.unreachable_because,
        answered_at=known.answered_at,
    )


def _inventory_view(sidecar: FakeSidecar) -> InventoryView:
    inventory = sidecar.inventory()
    return InventoryView(
        round=inventory.round,
        version=inventory.version,
        worker=inventory.worker,
        launcher=inventory.launcher,
        manifests=tuple(sidecar.manifests.values()),
        shards=(*inventory.shards, *inventory.in_memory),
        uncommitted=inventory.uncommitted,
        stored=inventory.stored,
    )
