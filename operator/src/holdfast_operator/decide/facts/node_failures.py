"""Nodes on which workers of the job failed, and those that new pods avoid for it. Pure.

1. A lost node, and a worker that failed by itself, count as a failure of its node. A pod that was deleted or
   evicted does not, nor does a rank that failed beside a disruption.
2. Failures that hit more than half of the gang's nodes at once have another cause than a node.
3. A node is avoided after failurePolicy.avoidNodes.failures of them, or immediately after a rule with action
   AvoidNode.
4. status.nodeFailures is the record. Each write of the status drops the failures that are older than the
   window. If no node takes a pod for PATIENCE_SECONDS, all are dropped: the job continues as it was before.
"""

from __future__ import annotations

from collections import Counter

from holdfast_core.api import (
    MAX_NODE_FAILURES,
    AvoidNodesSpec,
    FailureAction,
    NodeFailure,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.failure import Ruling
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import JobMemory, Now, Seen

PATIENCE_SECONDS = 60.0
"""Time for which a pod waits for a node while it avoids nodes that failed. Karpenter adds no node for a pod
that excludes nodes by name, so a longer wait gains little."""
MAX_NODES = 32
"""Largest number of nodes that are avoided because of failures, the newest first."""


def failed_nodes(world: World, status: TrainingJobStatus) -> tuple[str, ...]:
    """Return the nodes that new pods avoid because of the failures in this status, the newest first."""
    policy = world.observed.job.spec.failure_policy.avoid_nodes
    counts = Counter(f.node for f in status.node_failures)
    newest = dict.fromkeys(f.node for f in reversed(status.node_failures))
    ruled = {f.node for f in status.node_failures if f.by_rule}
    found = [n for n in newest if n in ruled or (policy and counts[n] >= policy.failures)]
    return tuple(found[:MAX_NODES])


def with_node_failures(
    status: TrainingJobStatus, world: World, ruling: Ruling, round_: RestartRound, now: Now
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
            at=now.utc,
            by_rule=worker in ruling.avoided,
        )
        for worker in sorted(ruling.blamed)
        if worker in nodes and (worker in ruling.avoided or not common)
    ]
    by_node = {f.node: f for f in sorted(new, key=lambda f: f.by_rule)}
    kept = _in_window(status.node_failures, world, now)
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


def with_failures_of_window(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status without the failures that are older than the window."""
    kept = _in_window(status.node_failures, world, now)
    return status if kept == status.node_failures else changed(status, node_failures=kept)


def no_node_is_left(memory: JobMemory, now: Now) -> bool:
    """Return whether no node has taken a pod that avoids failed nodes for PATIENCE_SECONDS."""
    return seconds_since(memory.seen_at(Seen.AVOIDING), now) >= PATIENCE_SECONDS


def _in_window(
    failures: tuple[NodeFailure, ...], world: World, now: Now
) -> tuple[NodeFailure, ...]:
    policy = world.observed.job.spec.failure_policy.avoid_nodes or AvoidNodesSpec()
    return tuple(f for f in failures if now.is_within(policy.window_length, f.at))


def _nodes_of(world: World) -> dict[Worker, str]:
    return {
        m.worker: m.pod.node for m in world.members if m.pod is not None and m.pod.node is not None
    }
