"""Nodes that pods avoid or leave, and the spare pods that wait on other ones. Pure.

Nodes on which workers failed:
1. A lost node, and a worker that failed by itself, count as a failure of its node. A pod that was deleted or
   evicted does not, nor does a rank that failed beside a disruption.
2. Failures that hit more than half of the gang's nodes at once have another cause than a node.
3. A node is avoided after failurePolicy.avoidNodes.failures of them, or immediately after a rule with action
   AvoidNode.
4. status.nodeFailures is the record. Each write of the status drops the failures that are older than the
   window. If no node takes a pod for PATIENCE_SECONDS, all are dropped: the job continues as it was before.

Nodes that leave: a spot notice or an autoscaler taints such a node. The end of a node costs the steps since
the last save. A delete of the pod costs none, because the gang then saves, and the pod flushes before it ends
(ADR 0013).
1. A pod that tolerates the taint stays: its owner wants it there, and a new pod could get the same node.
2. Only one pod is deleted at a time, and only while all ranks train. The PodDisruptionBudget allows an
   eviction under the same condition.
3. A pod is deleted once, because a pod that is being deleted leaves already.
4. Pods stay if a failure rule fails the job after the deletion: the operator must not cause that itself.

Nodes that are lost: the scheduler places pods on a dead node until Kubernetes taints it, after 40 seconds or
more. A pod that is created in this time excludes the node by its node affinity, which cannot be changed
later. So a pod that has not started is deleted, and created again in the same round under the same name, in
three cases (ADR 0008):
1. It is bound to a lost node that it does not exclude, because it was created before the loss was noticed.
2. No node has taken it, and it excludes a node that is back, repaired, tainted, deleted or no longer
   avoided because of failures. A node that is back may be the only one that fits, and Karpenter adds no node
   for a pod that excludes nodes by name.
3. It is bound to a node that is avoided because of failures. One of them is that a pod has not started there
   within startTimeoutSeconds (scheduling.py).
This costs no round, because no container of the pod has run (World.awaits_start).

Spare pods (ADR 0015): CAS 1 of a round writes status.spares together with the members of the round. A spare
that becomes a worker gives its number to a new spare, whose birth round is this round: the new pod has
another name.

Spares are less urgent than workers. They are created while the gang trains, and deleted when a worker has no
room. A spare that is lost holds nothing, so it is created again under its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast_core.api import (
    MAX_NODE_FAILURES,
    AvoidNodesSpec,
    FailureAction,
    FailureReason,
    FailureRule,
    JobCondition,
    NodeFailure,
    PromotedSpare,
    SparesStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import FIRST_SPARE, MAX_SPARES, RestartRound, Worker
from holdfast_core.names import first_of, pod_name
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.evidence import CANNOT_START, Ruling
from holdfast_operator.decide.facts.spec import replacement_problem
from holdfast_operator.decide.facts.world import (
    MemberState,
    Note,
    World,
    has_no_gang,
    held_uploads,
)
from holdfast_operator.model.actions import Delete, DesiredObject
from holdfast_operator.model.job import (
    NodeView,
    PodGroup,
    PodPhase,
    PodView,
    Seen,
    tolerated_taints,
)
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import render_certificates, render_pod
from holdfast_operator.model.template import pod_spec

# --------------------------------------------------------------------------- nodes on which workers failed


PATIENCE_SECONDS = 60.0
"""Time for which a pod waits for a node while it avoids nodes that failed. Karpenter adds no node for a pod
that excludes nodes by name, so a longer wait gains little."""
MAX_NODES = 32
"""Largest number of nodes that are avoided because of failures, the newest first."""


def failed_nodes(world: World, status: TrainingJobStatus) -> tuple[str, ...]:
    """Return the nodes that new pods avoid because of the failures in this status, the newest first."""
    policy = world.spec.failure_policy.avoid_nodes
    counts = Counter(f.node for f in status.node_failures)
    newest = dict.fromkeys(f.node for f in reversed(status.node_failures))
    ruled = {f.node for f in status.node_failures if f.by_rule}
    found = [n for n in newest if n in ruled or (policy and counts[n] >= policy.failures)]
    return tuple(found[:MAX_NODES])


def with_node_failures(
    status: TrainingJobStatus, world: World, ruling: Ruling
) -> TrainingJobStatus:
    """Return the status with the failures of this ruling on nodes."""
    if ruling.action is FailureAction.IGNORE:
        return status
    nodes = _nodes_of(world)
    failed = {nodes[w] for w in ruling.blamed if w in nodes}
    common = not ruling.disruption and 2 * len(failed) > len(set(nodes.values()))
    new = [
        NodeFailure(
            node=nodes[worker],
            at=world.now.utc,
            by_rule=worker in ruling.avoided,
        )
        for worker in sorted(ruling.blamed)
        if worker in nodes and (worker in ruling.avoided or not common)
    ]
    by_node = {f.node: f for f in sorted(new, key=lambda f: f.by_rule)}
    kept = _in_window(status.node_failures, world)
    return changed(status, node_failures=(*kept, *by_node.values())[-MAX_NODE_FAILURES:])


def workers_to_move(
    world: World, status: TrainingJobStatus, ruling: Ruling, gone: set[Worker | None]
) -> frozenset[Worker]:
    """Return the workers whose pods leave nodes that are avoided now, besides those in `gone`.

    They stay if the newest committed step is not known to be readable without them and those in `gone`, or if
    the gang fails from this step and an older one is not.
    """
    avoided = failed_nodes(world, status)
    if not avoided or not world.may_replace_pods or world.nodes_are_fixed:
        return frozenset()
    moved = frozenset(
        w for w, node in _nodes_of(world).items() if node in avoided and w not in gone
    )
    away = moved | {w for w in gone if w is not None}
    if not (
        moved
        and readable.answering_can_be_replaced(world, away)
        and readable.older_is_kept(world, away, ruling.failed_from)
    ):
        return frozenset()
    return moved


def with_failures_of_window(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status without the failures that are older than the window."""
    kept = _in_window(status.node_failures, world)
    return status if kept == status.node_failures else changed(status, node_failures=kept)


def no_node_is_left(world: World) -> bool:
    """Return whether no node has taken a pod that avoids failed nodes for PATIENCE_SECONDS."""
    return world.seconds_seen(Seen.AVOIDING) >= PATIENCE_SECONDS


def _in_window(failures: tuple[NodeFailure, ...], world: World) -> tuple[NodeFailure, ...]:
    policy = world.spec.failure_policy.avoid_nodes or AvoidNodesSpec()
    return tuple(f for f in failures if world.now.is_within(policy.window_length, f.at))


def _nodes_of(world: World) -> dict[Worker, str]:
    return {m.worker: m.node for m in world.members if m.node is not None}


# --------------------------------------------------------------------------- nodes that leave


@dataclass(frozen=True, slots=True)
class Departure:
    """A pod on a node that will be taken away soon, and the taint that says so."""

    pod: PodView
    node: str
    taint: str

    def __str__(self) -> str:
        return f"pod {self.pod.name} on node {self.node} (taint {self.taint})"


def departures(world: World) -> tuple[Departure, ...]:
    """Return the pods of members that tolerate not all taints by which their nodes leave, by worker."""
    found = []
    for member in world.members:
        node = None if member.pod is None else world.observed.nodes.get(member.pod.node or "")
        if member.pod is None or member.pod.ended or node is None or member.node_lost:
            continue
        taint = leaving_taint(member.pod, node)
        if taint is not None:
            found.append(Departure(member.pod, node.name, taint))
    return tuple(found)


def leaving_taint(pod: PodView, node: NodeView) -> str | None:
    """Return the key of a taint by which the node leaves and which the pod does not tolerate, or None."""
    return min((t.key for t in node.leaving_taints if not pod.tolerates(t)), default=None)


def why_pods_stay(world: World) -> str | None:
    """Return why the operator deletes no pod on a node that leaves, or None if it does."""
    if world.spec.template is None:
        return "another controller creates the pods"
    if world.nodes_are_fixed:
        return "the template sets spec.nodeName, so that a new pod would get the same node"
    if world.copies == 0:
        held = held_uploads(world)
        why = None if held is None else held.message
        if world.spec.store is None:
            why = "the job has no object store"
        if why is not None:
            return f"no other pod has copies of its shards, and its last step would be lost: {why}"
    return _fails_the_job(world.spec.failure_policy.rules)


def _fails_the_job(rules: Sequence[FailureRule]) -> str | None:
    """Return which rule would fail the job after the deletion, or None.

    The failure has no exit code, and the pod no condition of an eviction, so only onReasons can match.
    """
    for index, rule in enumerate(rules):
        if FailureReason.POD_LOST in rule.on_reasons:
            if rule.action is not FailureAction.FAIL_JOB:
                return None
            return f"failurePolicy.rules[{index}] fails the job after PodLost, which the deletion causes"
    return None


def next_departure(world: World) -> Departure | None:
    """Return the pod that is deleted now because its node leaves, or None."""
    state = world.state
    trains = (
        world.status.is_true(JobCondition.RUNNING)
        and state.running
        and not (state.finished or state.dead or state.hang)
        and all(m.alive and m.pod is not None and m.pod.ready for m in world.members)
        and not any(p.leaving for p in world.pods)
    )
    if not trains or world.spec.suspend or why_pods_stay(world) is not None:
        return None
    return next(iter(departures(world)), None)


def with_leaving_nodes(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition NodesLeaving, which a job without such a node does not get."""
    kind, found = JobCondition.NODES_LEAVING, () if has_no_gang(status) else departures(world)
    if not found and not status.is_true(kind):
        return status
    reason, text = Reason.NODES_STAY, "no worker runs on a node that will be taken away"
    if found:
        text = f"nodes will be taken away: {first_of(found)}. "
        stay = why_pods_stay(world)
        if stay is None:
            reason = Reason.NODE_LEAVING
            text += (
                "While all ranks train, one of these pods after the other is deleted and replaced"
            )
        else:
            reason = Reason.NODE_LEAVING_POD_STAYS
            text += f"The operator deletes none of these pods: {stay}"
    return world.with_condition(status, kind, bool(found), reason, text)


# --------------------------------------------------------------------------- nodes that are lost


MISPLACED = "a new pod may get a better node"
MAX_AVOIDED = 64
"""Largest number of nodes that a pod excludes. Each of them is a requirement in each term of the pod's
affinity. The newest losses go first: Kubernetes taints the others sooner."""


def avoided_nodes(world: World) -> tuple[str, ...]:
    """Return the sorted names of the lost nodes that a pod excludes if it is created now."""
    if world.nodes_are_fixed:
        return ()
    failed = avoided_for_failures(world)
    return tuple(sorted([n for n in _open_nodes(world) if n not in failed][:MAX_AVOIDED]))


def avoided_for_failures(world: World) -> tuple[str, ...]:
    """Return the sorted names of the nodes that it excludes because workers failed there (ADR 0010)."""
    return () if world.nodes_are_fixed else tuple(sorted(failed_nodes(world, world.status)))


def misplaced_pods(world: World) -> list[Delete]:
    """Return deletes of pods that a later pass creates again, because a new pod may get a better node."""
    return world.deletes((p for m, p in world.waiting if _is_misplaced(world, m, p)), MISPLACED)


def misplaced_spares(world: World) -> list[Delete]:
    """Return deletes of spares that have not started and may get a better node."""
    waiting = ((s, s.pod) for s in world.spares if s.pod is not None and not s.node_lost)
    pods = (p for s, p in waiting if not p.started and _is_misplaced(world, s, p))
    return world.deletes(pods, MISPLACED)


def waiting_note(world: World) -> Note | None:
    """Return why a pod has not started, if it is bound to a lost node or excludes nodes. Else None."""
    for member, pod in world.waiting:
        if member.node_lost:
            return _note_of_lost_node(world, member, pod)
        if pod.node is not None or not (pod.avoided_nodes or pod.failed_nodes):
            continue
        why = f"it avoids nodes on which workers failed: {', '.join(sorted(pod.failed_nodes))}"
        if pod.avoided_nodes:
            why = (
                "it avoids nodes that are lost or fail, until Kubernetes taints them, their kubelets "
                f"renew their leases, or their failing conditions end: {first_of(sorted(pod.avoided_nodes))}"
            )
        text = f"pod {pod.name} is not scheduled: {pod.message}".rstrip(": ")
        return Note(Reason.WAITING_FOR_PODS, f"{text}; {why}{_kept(world)}")
    return None


def _kept(world: World) -> str:
    """Return why a pod keeps an affinity that it may not need, which only a new pod could change, or ""."""
    problem = replacement_problem(world)
    return "" if problem is None else f". It could not be created again: {problem.message}"


def _note_of_lost_node(world: World, member: MemberState, pod: PodView) -> Note:
    """Return what happens to a pod that has not started on a lost node."""
    why = world.observed.nodes[pod.node or ""].lost_because
    text = f"pod {pod.name} has not started on node {pod.node}, which is lost: it {why}"
    problem = replacement_problem(world)
    if world.fixed_node == pod.node:
        return Note(Reason.NODE_NAME_UNUSABLE, f"{text}. {world.fixed_node_advice}")
    if world.spec.template is None:
        then = "The pod stays until the node is back or its own controller replaces it"
    elif not world.may_create_pods:
        then = "The pod stays, because no pod is created while spec.suspend is true"
    elif problem is not None:
        then = f"The pod stays, because it could not be created again: {problem.message}"
    elif _is_misplaced(world, member, pod):
        then = "The pod is created again, so that the scheduler can choose another node"
    else:
        then = (
            "The pod stays until Kubernetes taints the node: a new pod might be bound to it again"
        )
    return Note(Reason.WAITING_FOR_PODS, f"{text}. {then}")


def _is_misplaced(world: World, member: MemberState, pod: PodView) -> bool:
    if pod.node is None:
        needed = pod.avoided_nodes.issubset(_open_nodes(world)) and pod.failed_nodes.issubset(
            avoided_for_failures(world)
        )
        return not pod.terminating and not needed
    if not member.node_lost:
        avoided = pod.node in avoided_for_failures(world) and pod.node not in pod.failed_nodes
        return avoided and not pod.terminating
    if pod.terminating:
        return True  # no kubelet will confirm the delete
    if world.fixed_node is not None:
        return pod.node != world.fixed_node  # a new pod would be bound to the same node
    if pod.node in pod.avoided_nodes | pod.failed_nodes or world.nodes_are_fixed:
        return False  # likewise, or another controller creates it
    return pod.node not in _open_nodes(world) or pod.node in (
        *avoided_nodes(world),
        *avoided_for_failures(world),
    )


def _open_nodes(world: World) -> list[str]:
    """Return the lost nodes on which the scheduler may still place a pod of the job, the newest loss first.

    These are the nodes without a taint for lost nodes, and those whose taints the template or a pod of the
    job tolerates. An admission plug-in may add tolerations that the template does not have.
    """
    tolerated = tolerated_taints(pod_spec(world.job)).union(
        *(pod.tolerated for pod in world.observed.pods)
    )
    return [node.name for node in world.observed.lost_nodes if node.taints <= tolerated]


def domain_of(world: World, node_name: str | None) -> str | None:
    """Return the topology domain of a node. A node without the label is a domain of its own."""
    if node_name is None:
        return None
    node = world.observed.nodes.get(node_name)
    label = None if node is None else node.labels.get(world.spec.peer.topology_key)
    return label if label is not None else node_name


# --------------------------------------------------------------------------- spare pods


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


def new_pods(
    world: World, births: Iterable[tuple[Worker, RestartRound]], group: PodGroup | None = None
) -> list[DesiredObject]:
    """Return the pods that these workers and spares would get now, each with its birth round."""
    observed, avoided, failed = world.observed, avoided_nodes(world), avoided_for_failures(world)
    return [
        DesiredObject(
            render_pod(
                observed.job,
                worker,
                birth,
                observed.store,
                observed.sidecar,
                avoided,
                failed,
                group,
                world.certificates(worker, birth),
            )
        )
        for worker, birth in births
    ]


def create_spares(world: World) -> list[DesiredObject]:
    """Return the missing spares and the certificates of those that have not started."""
    job, missing = world.job, list[tuple[Worker, RestartRound]]()
    secrets: dict[str, DesiredObject] = {}
    for spare in world.spares:
        pod, birth = spare.pod, spare.birth_round
        if pod is None or (not pod.sidecar_started and pod.alive):
            secret = world.certificates(spare.worker, birth)
            # A Secret cannot be changed, so it has the leaves of all spares that may be created later.
            names = (pod_name(job.name, job.uid, FIRST_SPARE + n, birth) for n in range(MAX_SPARES))
            body, mounted = render_certificates(job, secret), world.is_mounted(secret)
            secrets[secret] = DesiredObject(body, tuple(names), mounted)
        if pod is None:
            missing.append((spare.worker, birth))
    return [*secrets.values(), *new_pods(world, missing)]


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
