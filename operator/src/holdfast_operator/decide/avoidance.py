"""Keep pods that have not started away from lost nodes, and remove exclusions that are not needed. Pure.

The scheduler places pods on a dead node until Kubernetes taints it, after 40 seconds or more. A pod that is
created in this time excludes the node by its node affinity, which cannot be changed later. So a pod that has
not started is deleted, and created again in the same round under the same name, in three cases (ADR 0008):
1. It is bound to a lost node that it does not exclude, because it was created before the loss was noticed.
2. No node has taken it, and it excludes a node that is back, repaired, tainted, deleted or no longer
   avoided because of failures. A node that is back may be the only one that fits, and Karpenter adds no node
   for a pod that excludes nodes by name.
3. It is bound to a node that is avoided because of failures. One of them is that a pod has not started there
   within startTimeoutSeconds (facts/scheduling.py).
This costs no round, because no container of the pod has run (World.awaits_start).
"""

from __future__ import annotations

from holdfast_operator.decide.acceptance import replacement_problem
from holdfast_operator.decide.facts.node_failures import failed_nodes
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.decide.report.status import Note
from holdfast_operator.model import kinds
from holdfast_operator.model.actions import Action, Delete
from holdfast_operator.model.job import PodView, tolerated_taints
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.template.shape import pod_spec
from holdfast_operator.model.wording import first_of

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


def replacements(world: World) -> list[Action]:
    """Return deletes of pods that a later pass creates again, because a new pod may get a better node."""
    return [
        Delete(kinds.POD, pod.name, pod.uid, MISPLACED, force=member.node_lost)
        for member, pod in _waiting(world)
        if _is_misplaced(world, member, pod)
    ]


def misplaced_spares(world: World) -> list[Action]:
    """Return deletes of spares that have not started and may get a better node."""
    return [
        Delete(kinds.POD, spare.pod.name, spare.pod.uid, MISPLACED, force=spare.node_lost)
        for spare in world.spares
        if spare.pod is not None and not spare.pod.started and not spare.node_lost
        if _is_misplaced(world, spare, spare.pod)
    ]


def waiting_note(world: World) -> Note | None:
    """Return why a pod has not started, if it is bound to a lost node or excludes nodes. Else None."""
    for member, pod in _waiting(world):
        if member.node_lost:
            return _note_of_lost_node(world, member, pod)
        if pod.node is None and pod.avoided_nodes:
            nodes = sorted(pod.avoided_nodes)
            text = f"pod {pod.name} is not scheduled: {pod.message}".rstrip(": ")
            text += (
                "; it avoids nodes that are lost or fail, until Kubernetes taints them, their kubelets "
                f"renew their leases, or their failing conditions end: {first_of(nodes)}{_kept(world)}"
            )
            return Note(Reason.WAITING_FOR_PODS, text)
        if pod.node is None and pod.failed_nodes:
            text = f"pod {pod.name} is not scheduled: {pod.message}".rstrip(": ")
            text += (
                f"; it avoids nodes on which workers failed: {', '.join(sorted(pod.failed_nodes))}"
                f"{_kept(world)}"
            )
            return Note(Reason.WAITING_FOR_PODS, text)
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
    if world.observed.job.spec.template is None:
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


def _waiting(world: World) -> list[tuple[MemberState, PodView]]:
    """Return the members whose pods exist and have not started."""
    return [(m, m.pod) for m in world.members if m.pod is not None and world.awaits_start(m)]


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
    tolerated = tolerated_taints(pod_spec(world.observed.job)).union(
        *(pod.tolerated for pod in world.observed.pods)
    )
    return [node.name for node in world.observed.lost_nodes if node.taints <= tolerated]
