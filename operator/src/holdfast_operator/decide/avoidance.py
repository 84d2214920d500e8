"""Keep pods that have not started away from lost nodes, and let them use nodes that are back. Pure.

The scheduler places pods on a dead node until Kubernetes taints it, after 40 seconds or more. A pod that is
created while nodes are lost excludes them by its node affinity, which cannot be changed later. So a pod that
has not started is deleted, and created again in the same round under the same name, in two cases (ADR 0049):
1. It is bound to a lost node that it does not exclude, because it was created before the loss was noticed.
2. No node has taken it, and a node that it excludes is back. That node may be the only one that fits.
This costs no round, because no container of the pod has run (World.awaits_start).
"""

from __future__ import annotations

from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.decide.report.status import Note
from holdfast_operator.model.actions import Action, DeletePod
from holdfast_operator.model.job import PodView
from holdfast_operator.model.reasons import Reason

MAX_AVOIDED = 64
"""Largest number of nodes that a pod excludes. Each of them is a requirement in each term of the pod's
affinity. If more nodes are lost, only the taints of Kubernetes keep pods away from the others."""
NAMED_NODES = 8


def avoided_nodes(world: World) -> tuple[str, ...]:
    """Return the sorted names of the nodes that a pod excludes if it is created now."""
    return () if _names_its_node(world) else tuple(sorted(world.observed.lost_nodes)[:MAX_AVOIDED])


def replacements(world: World) -> list[Action]:
    """Return deletes of pods that a later pass creates again, because a new pod may get a better node."""
    return [
        DeletePod(pod.name, pod.uid, force=member.node_lost)
        for member, pod in _waiting(world)
        if _is_misplaced(world, member, pod)
    ]


def waiting_note(world: World) -> Note | None:
    """Return why a pod has not started, if it is bound to a lost node or excludes nodes. Else None."""
    for member, pod in _waiting(world):
        if member.node_lost:
            text = (
                f"pod {pod.name} has not started on node {pod.node}, whose lease has stopped: the "
                "pod is created again, so that the scheduler can choose another node"
            )
            return Note(Reason.WAITING_FOR_PODS, text)
        if pod.node is None and pod.avoided_nodes:
            nodes = sorted(pod.avoided_nodes)
            more = f" and {len(nodes) - NAMED_NODES} more" if len(nodes) > NAMED_NODES else ""
            text = f"pod {pod.name} is not scheduled: {pod.message}".rstrip(": ")
            text += (
                "; it avoids nodes whose leases have stopped, and may use each of them when its "
                f"kubelet renews its lease: {', '.join(nodes[:NAMED_NODES])}{more}"
            )
            return Note(Reason.WAITING_FOR_PODS, text)
    return None


def _waiting(world: World) -> list[tuple[MemberState, PodView]]:
    """Return the members whose pods exist and have not started."""
    return [(m, m.pod) for m in world.members if m.pod is not None and world.awaits_start(m)]


def _is_misplaced(world: World, member: MemberState, pod: PodView) -> bool:
    if pod.node is None:
        return not pod.terminating and not pod.avoided_nodes <= world.observed.lost_nodes
    if not member.node_lost:
        return False
    if pod.terminating:
        return True  # no kubelet will confirm the delete
    if pod.node in pod.avoided_nodes or _names_its_node(world):
        return False  # a new pod would be bound to the same node
    return pod.node not in world.observed.lost_nodes or pod.node in avoided_nodes(world)


def _names_its_node(world: World) -> bool:
    """Return whether the template sets spec.nodeName.

    Then no scheduler reads the affinity, and the kubelet of that node would reject a pod whose affinity
    excludes it.
    """
    spec = world.observed.job.spec.template.get("spec") or {}
    return bool(spec.get("nodeName"))
