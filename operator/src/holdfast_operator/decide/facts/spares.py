"""Spare pods (ADR 0015): which there are, which worker each becomes, and their creates and deletes. Pure.

CAS 1 of a round writes status.spares together with the members of the round. A spare that becomes a worker
gives its number to a new spare, whose birth round is this round: the new pod has another name.

Spares are less urgent than workers. They are created while the gang trains, and deleted when a worker has no
room. A spare that is lost holds nothing, so it is created again under its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast_core.api import JobCondition, PromotedSpare, SparesStatus, TrainingJobStatus, changed
from holdfast_core.ids import FIRST_SPARE, MAX_SPARES, RestartRound, Worker
from holdfast_core.names import pod_name
from holdfast_operator.decide.facts.evidence import CANNOT_START
from holdfast_operator.decide.facts.nodes import domain_of, failed_nodes, leaving_taint
from holdfast_operator.decide.facts.world import MemberState, World, has_no_gang, worker_pod
from holdfast_operator.model.actions import Delete, DesiredObject
from holdfast_operator.model.job import PodPhase
from holdfast_operator.model.reasons import Reason
from holdfast_operator.render.objects import render_certificates


def with_spares(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with as many spares as the spec wants, and the number of those that are ready."""
    status = _sized(status, world)
    if status.spares is None:
        return status
    births = dict(enumerate(status.spares.births, FIRST_SPARE))
    ready = sum(births.get(s.worker) == s.birth_round for s in ready_spares(world, status))
    return changed(status, spares=changed(status.spares, ready=ready))


def with_new_spares(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of a round in which all pods are new, the spares among them."""
    return _sized(changed(status, spares=None), world)


def with_promotions(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of a round with ready spares instead of its new pods, as far as there are any.

    A spare that has become a worker by a newer status than this one stays this worker, as a survivor: the
    status was restored from a backup (ADR 0002).
    """
    round_ = status.restart_round or RestartRound(0)
    status = _sized(status, world)
    members = list(status.members)
    old = status.spares or SparesStatus()
    before = world.status.members
    promoted = {
        r.worker: r
        for r in old.promoted
        if tuple(members[r.worker : r.worker + 1]) == before[r.worker : r.worker + 1] != ()
    }
    replaced = [
        Worker(w)
        for w, birth in enumerate(members)
        if birth == round_ and (w >= len(before) or before[w] != round_)
    ]
    taken = {w: world.claims[w] for w in replaced if w in world.claims and round_ > 0}
    for worker in taken:
        members[worker] = RestartRound(round_ - 1)
    free = [w for w in replaced if w not in taken]
    for worker, spare in choose_spares(world, status, free).items():
        if spare.pod is not None and spare.birth_round < round_:
            taken[worker] = spare.pod
    births = dict(enumerate(old.births, FIRST_SPARE))
    for worker, pod in taken.items():
        promoted[worker] = PromotedSpare(worker=worker, pod=pod.name)
        if births.get(pod.worker) == pod.birth_round:
            births[pod.worker] = round_
    if not (births or promoted):
        return changed(status, spares=None)
    spares = changed(
        old, births=tuple(births.values()), promoted=tuple(promoted[w] for w in sorted(promoted))
    )
    return changed(status, members=tuple(members), spares=spares)


def _sized(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with the number of spares of the spec. Additional ones are born in its round."""
    wanted, round_ = world.wanted_spares, status.restart_round
    old = status.spares or SparesStatus()
    if round_ is None or len(old.births) == wanted:
        return status
    births = (*old.births[:wanted], *(round_,) * (wanted - len(old.births)))
    if not (births or old.promoted):
        return changed(status, spares=None)
    return changed(status, spares=changed(old, births=births, ready=0))


# --------------------------------------------------------------------------- which spares are ready


def ready_spares(world: World, status: TrainingJobStatus) -> tuple[MemberState, ...]:
    """Return the spares that wait with a connected launcher on a node that may run a worker.

    Args:
        status: The status whose failures tell which nodes are avoided.
    """
    avoided = () if world.nodes_are_fixed else failed_nodes(world, status)
    return tuple(s for s in world.spares if _is_ready(world, s) and s.node not in avoided)


def choose_spares(
    world: World, status: TrainingJobStatus, replaced: Sequence[Worker]
) -> dict[Worker, MemberState]:
    """Return a ready spare for each of these workers, as far as there are spares.

    A spare whose topology domain has fewer members goes first, so that copies stay in other domains.
    """
    free = list(ready_spares(world, status))
    stay = (m for m in world.members if m.worker not in replaced and m.pod is not None)
    members = Counter(domain_of(world, m.pod.node) for m in stay if m.pod is not None)
    chosen: dict[Worker, MemberState] = {}
    for worker in replaced:
        best = min(free, key=lambda s: (members[domain_of(world, s.node)], s.worker), default=None)
        if best is None:
            break
        free.remove(best)
        members[domain_of(world, best.node)] += 1
        chosen[worker] = best
    return chosen


def _is_ready(world: World, spare: MemberState) -> bool:
    """Return whether the pod runs, its sidecar answers and has no worker, and its node is healthy."""
    pod = spare.pod
    if pod is None or pod.ip is None or pod.leaving or pod.phase is not PodPhase.RUNNING:
        return False
    inventory = spare.inventory
    if not (spare.alive and spare.reachable) or inventory is None or not inventory.launcher:
        return False
    if inventory.worker != spare.worker or pod.trainer_exit_code is not None:
        return False
    node = world.observed.nodes.get(pod.node or "")
    return node is None or not (node.lost or leaving_taint(pod, node))


# --------------------------------------------------------------------------- their pods


def create_spares(
    world: World, avoided: tuple[str, ...], failed: tuple[str, ...]
) -> list[DesiredObject]:
    """Return the missing spares and the certificates of those that have not started.

    Args:
        avoided: Names of lost nodes that new pods exclude.
        failed: Names of nodes that they exclude because workers failed there.
    """
    job = world.job
    secrets: dict[str, DesiredObject] = {}
    pods: list[DesiredObject] = []
    for spare in world.spares:
        pod, birth = spare.pod, spare.birth_round
        if pod is None or (not pod.sidecar_started and pod.alive):
            secret = world.certificates(spare.worker, birth)
            # A Secret cannot be changed, so it has the leaves of all spares that may be created later.
            names = (pod_name(job.name, job.uid, FIRST_SPARE + n, birth) for n in range(MAX_SPARES))
            body, mounted = render_certificates(job, secret), world.is_mounted(secret)
            secrets[secret] = DesiredObject(body, tuple(names), mounted)
        if pod is None:
            pods.append(DesiredObject(worker_pod(world, spare.worker, birth, avoided, failed)))
    return [*secrets.values(), *pods]


def delete_lost_spares(world: World) -> list[Delete]:
    """Return deletes of the spares that have ended or are on a lost node."""
    gone = (s.pod for s in world.spares if s.pod is not None and (s.node_lost or s.pod.ended))
    return world.deletes(gone, "the spare has ended or its node is lost")


def make_room(world: World) -> list[Delete]:
    """Return deletes of all spares if a worker is unschedulable, or the creation of its pod is refused."""
    pods = () if has_room(world) else (s.pod for s in world.spares if s.pod is not None)
    return world.deletes(pods, "a worker needs the room of the spare")


def has_room(world: World) -> bool:
    """Return whether no worker is unschedulable, and no creation of a worker's pod was refused."""
    return all(m.pod is not None and m.pod.reason != "Unschedulable" for m in world.unscheduled)


# --------------------------------------------------------------------------- the condition


def with_spares_ready(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition SparesReady. A job that never had spares does not get it."""
    wanted = world.spec.spares
    known = status.condition(JobCondition.SPARES_READY)
    if (wanted == 0 and known is None) or has_no_gang(status):
        return status
    ready = 0 if status.spares is None else status.spares.ready
    reason, text = Reason.SPARES_READY, f"{ready} of {wanted} spare pods are ready"
    if ready < wanted:
        reason, text = Reason.SPARES_WAIT, f"{text}: {_waits_for(status, world)}"
    return world.with_condition(status, JobCondition.SPARES_READY, ready >= wanted, reason, text)


def _waits_for(status: TrainingJobStatus, world: World) -> str:
    """Return what the first spare waits for that is not ready."""
    if world.wanted_spares == 0:
        return (
            "a job in a queue of Kueue has none, because its pod group has a fixed number of pods"
        )
    if not has_room(world):
        return "a worker has no node, so the spares are deleted to make room for it"
    if not status.is_true(JobCondition.RUNNING):
        return "spares are created while the gang trains"
    ready = {s.worker for s in ready_spares(world, status)}
    spare = next((s for s in world.spares if s.worker not in ready), None)
    if spare is None or spare.pod is None:
        return world.observed.memory.create_refused or "the next one is being created"
    return f"pod {spare.pod.name} {_state(spare)}"


def _state(spare: MemberState) -> str:
    pod = spare.pod
    assert pod is not None
    if pod.waiting_reason in CANNOT_START:
        return f"cannot start: {pod.waiting_reason}: {pod.waiting_message}"
    if pod.node is None:
        return f"is not scheduled: {pod.message}".rstrip(": ")
    if spare.node_lost:
        return f"is on node {pod.node}, which is lost"
    if not spare.reachable:
        return f"starts on node {pod.node}, or its sidecar does not answer"
    return f"on node {pod.node} has not imported torch yet, or its node is not to be used"
