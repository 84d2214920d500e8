"""Find the spare pods that can become workers now, and choose among them (ADR 0015). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast_core.api import TrainingJobStatus
from holdfast_core.ids import Worker
from holdfast_operator.decide.facts.departures import leaving_taint
from holdfast_operator.decide.facts.node_failures import failed_nodes
from holdfast_operator.decide.facts.placement import domain_of
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.model.job import PodPhase


def ready_spares(world: World, status: TrainingJobStatus) -> tuple[MemberState, ...]:
    """Return the spares that wait with a connected launcher on a node that may run a worker.

    Args:
        status: The status whose failures tell which nodes are avoided.
    """
    avoided = () if world.nodes_are_fixed else failed_nodes(world, status)
    return tuple(s for s in world.spares if _is_ready(world, s) and _node(s) not in avoided)


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
        best = min(
            free, key=lambda s: (members[domain_of(world, _node(s))], s.worker), default=None
        )
        if best is None:
            break
        free.remove(best)
        members[domain_of(world, _node(best))] += 1
        chosen[worker] = best
    return chosen


def _is_ready(world: World, spare: MemberState) -> bool:
    """Return whether the pod runs, its sidecar answers and has no worker, and its node is healthy."""
    pod, sidecar = spare.pod, spare.sidecar
    if pod is None or pod.ip is None or pod.leaving or pod.phase is not PodPhase.RUNNING:
        return False
    inventory = None if sidecar is None else sidecar.inventory
    if not (spare.alive and spare.reachable) or inventory is None or not inventory.launcher:
        return False
    if inventory.worker != spare.worker or pod.trainer_exit_code is not None:
        return False
    node = world.observed.nodes.get(pod.node or "")
    return node is None or not (node.lost or leaving_taint(pod, node))


def _node(spare: MemberState) -> str | None:
    return None if spare.pod is None else spare.pod.node
