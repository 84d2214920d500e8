"""Keep pods that have not started away from lost nodes, and let them use nodes that are back. Pure.

The scheduler places pods on a dead node until Kubernetes taints it, after 40 seconds or more. A pod that is
created while nodes are known to be lost excludes them by its affinity, which cannot be changed. So a
pod that has not started is deleted, and created again in the same round under the same name,
1. where it is bound to a lost node that it does not exclude: it was created before the loss was noticed;
2. where no node has taken it, and a node that it excludes is back: it may be the only one that fits.
It costs no round, because nothing of the pod has run (world.awaits_start).
"""

from __future__ import annotations

from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.decide.report.status import Note
from holdfast_operator.model.actions import Action, DeletePod
from holdfast_operator.model.job import PodView
from holdfast_operator.model.reasons import Reason

MAX_AVOIDED = 64
"""Each of them is a requirement in each term of the pod's affinity. Where more nodes are lost, the others
are left to Kubernetes' own taints."""
NAMED_NODES = 8


def avoided_nodes(world: World) -> tuple[str, ...]:
    """The nodes that a pod which is created now excludes, sorted."""
    return () if _names_its_node(world) else tuple(sorted(world.observed.lost_nodes)[:MAX_AVOIDED])


def replacements(world: World) -> list[Action]:
    """Deletes of pods that a new pod of the same name may serve better."""
    return [
        DeletePod(pod.name, pod.uid, force=member.node_lost)
        for member, pod in _waiting(world)
        if _is_misplaced(world, member, pod)
    ]


def waiting_note(world: World) -> Note | None:
    """Why a pod that has not started waits for a lost node, or for others than those."""
    for member, pod in _waiting(world):
        if member.node_lost:
            words = (
                f"pod {pod.name} has not started on node {pod.node}, whose lease has stopped: it is "
                "created again where the scheduler may choose another node"
            )
            return Note(Reason.WAITING_FOR_PODS, words)
        if pod.node is None and pod.avoided_nodes:
            nodes = sorted(pod.avoided_nodes)
            more = f" and {len(nodes) - NAMED_NODES} more" if len(nodes) > NAMED_NODES else ""
            words = f"pod {pod.name} is not scheduled: {pod.message}".rstrip(": ")
            words += (
                "; it avoids nodes whose leases have stopped, and may use each of them when its "
                f"kubelet renews its lease: {', '.join(nodes[:NAMED_NODES])}{more}"
            )
            return Note(Reason.WAITING_FOR_PODS, words)
    return None


def _waiting(world: World) -> list[tuple[MemberState, PodView]]:
    """Members whose pods are there and have not started."""
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
    """spec.nodeName of the template: no scheduler reads the affinity, and the kubelet of that node would
    reject a pod whose affinity excludes it."""
    spec = world.observed.job.spec.template.get("spec") or {}
    return bool(spec.get("nodeName"))
