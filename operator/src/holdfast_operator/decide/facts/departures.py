"""Find workers on nodes that will be taken away soon, and the one whose pod is deleted next. Pure.

A spot notice or an autoscaler taints such a node. The end of a node costs the steps since the last save. A
delete of the pod costs none, because the gang then saves, and the pod flushes before it ends (ADR 0013).
1. A pod that tolerates the taint stays: its owner wants it there, and a new pod could get the same node.
2. Only one pod is deleted at a time, and only while all ranks train. The PodDisruptionBudget allows an
   eviction under the same condition.
3. A pod is deleted once, because a pod that is being deleted leaves already.
4. Pods stay if a failure rule fails the job after the deletion: the operator must not cause that itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_core.api import (
    FailureAction,
    FailureReason,
    FailureRule,
    JobCondition,
    TrainingJobStatus,
)
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import NodeView, Now, PodView
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.wording import first_of


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
    job = world.observed.job
    if job.spec.template is None:
        return "another controller creates the pods"
    if world.nodes_are_fixed:
        return "the template sets spec.nodeName, so that a new pod would get the same node"
    if world.copies == 0 and job.spec.store is None:
        return (
            "no other pod has copies of its shards, and the job has no object store, so that its last step "
            "would be lost"
        )
    return _fails_the_job(job.spec.failure_policy.rules)


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
    state = world.coordinator
    trains = (
        world.status.is_true(JobCondition.RUNNING)
        and state is not None
        and state.running
        and not (state.finished or state.dead or state.hang)
        and all(m.alive and m.pod is not None and m.pod.ready for m in world.members)
        and not any(m.pod is not None and m.pod.leaving for m in world.members)
    )
    if not trains or world.observed.job.spec.suspend or why_pods_stay(world) is not None:
        return None
    return next(iter(departures(world)), None)


# --------------------------------------------------------------------------- the condition


def with_leaving_nodes(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status with condition NodesLeaving, which a job without such a node does not get."""
    kind, found = JobCondition.NODES_LEAVING, departures(world)
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
    generation = world.observed.job.generation
    return status.with_condition(kind, bool(found), reason, text, now.utc, generation)
