"""failurePolicy.avoidNodes and the action AvoidNode: new pods avoid nodes on which workers failed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import (
    NAMESPACE,
    START,
    condition,
    job,
    now,
    pod,
    sidecar,
    status,
)
from tests.support.operator.decisions import created_pods, of_kind
from tests.support.operator.life import Life, dies_after
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import (
    AvoidNodesSpec,
    FailureAction,
    FailureReason,
    FailureRule,
    JobCondition,
    NodeFailure,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, RestorePoint
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.nodes import PATIENCE_SECONDS
from holdfast_operator.model import labels
from holdfast_operator.model.actions import (
    BeginRound,
    ChooseRestorePoint,
    CommitPersisted,
    Decision,
    Delete,
    EmitEvent,
    WriteStatus,
)
from holdfast_operator.model.job import JobMemory, NodeView, Observed, PodPhase, PodView
from holdfast_operator.model.reasons import Reason

ROUND = RestartRound(3)
TWICE = AvoidNodesSpec(failures=2, window="1h")
AVOID_CODE_3 = FailureRule(on_exit_codes=(3,), action=FailureAction.AVOID_NODE)


def failure(node: str, seconds: float = 900.0, *, by_rule: bool = False) -> NodeFailure:
    at = START + timedelta(seconds=seconds)
    return NodeFailure(node=node, at=at, by_rule=by_rule)


def dead(worker: int, code: int = 1) -> DeadRank:
    return DeadRank(Rank(worker), Worker(worker), code)


def gang(
    *ended: DeadRank,
    known: tuple[NodeFailure, ...] = (),
    avoid: AvoidNodesSpec | None = TWICE,
    rules: tuple[FailureRule, ...] = (),
    **changes: Any,
) -> Observed:
    """Return a gang of three on three nodes, whose newest step has copies. These ranks have ended."""
    pods = changes.pop("pods", (pod(0), pod(1), pod(2)))
    running = condition(JobCondition.RUNNING, True, Reason.TRAINING)
    begun = status(
        ROUND,
        (0, 0, 0),
        restore_point=RestorePointStatus(),
        coordinator=Worker(0),
        conditions=(running,),
        node_failures=known,
    )
    newest = RestorePoint(Step(40), ROUND)
    of = job(3, begun, rules=rules)
    policy = changed(of.spec.failure_policy, avoid_nodes=avoid)
    spec = changed(of.spec, failure_policy=policy, **changes.pop("spec", {}))
    base = Observed(
        job=changed(of, spec=spec),
        pods=pods,
        sidecars=tuple(sidecar(p, ROUND, version=1) for p in pods),
        nodes={f"node-{i}": NodeView(f"node-{i}") for i in range(3)},
        coordinator=CoordinatorState(
            5,
            ROUND,
            running=True,
            dead=ended,
            last_local=newest,
            last_replicated=changes.pop("copied", newest),
        ),
        memory=JobMemory(round=ROUND, round_seen_at=900.0, failure_seen_at=999.0),
    )
    return replace(base, **changes)


def written(decision: Decision) -> TrainingJobStatus:
    [found] = [
        a.status
        for a in decision.actions
        if isinstance(a, BeginRound | ChooseRestorePoint | CommitPersisted | WriteStatus)
    ]
    return found


def begun(observed: Observed) -> TrainingJobStatus:
    found = decide(observed, now())
    assert any(isinstance(a, BeginRound) for a in found.actions), found.reason
    return written(found)


OLD_LOSS = pod(1, phase=PodPhase.FAILED, reason="OOMKilled")
EVICTED = pod(1, phase=PodPhase.FAILED, disrupted=True)

COUNTED = {
    "a rank that failed": (gang(dead(1)), {"node-1"}),
    "a pod that failed": (gang(pods=(pod(0), OLD_LOSS, pod(2))), {"node-1"}),
    "an evicted pod": (gang(pods=(pod(0), EVICTED, pod(2))), set()),
    "a deleted pod": (gang(pods=(pod(0), pod(2))), set()),
    "a rank that failed beside a disruption": (
        gang(dead(0), pods=(pod(0), EVICTED, pod(2))),
        set(),
    ),
    "ranks on most of the nodes": (gang(dead(0), dead(1)), set()),
    "ranks on all nodes that a rule names": (
        gang(dead(0, 3), dead(1, 3), dead(2, 3), rules=(AVOID_CODE_3,)),
        {"node-0", "node-1", "node-2"},
    ),
    "an evicted pod that a rule names": (
        gang(
            pods=(pod(0), EVICTED, pod(2)),
            rules=(
                FailureRule(
                    on_reasons=(FailureReason.POD_EVICTED,), action=FailureAction.AVOID_NODE
                ),
            ),
        ),
        {"node-1"},
    ),
    "a failure that a rule ignores": (
        gang(dead(1), rules=(FailureRule(on_exit_codes=(1,), action=FailureAction.IGNORE),)),
        set(),
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_which_failures_count_against_a_node(case: str) -> None:
    observed, nodes = COUNTED[case]
    assert {f.node for f in begun(observed).node_failures} == nodes


def avoided(found: TrainingJobStatus) -> str | None:
    """Return the message of condition NodesAvoided if it is true."""
    shown = found.condition(JobCondition.NODES_AVOIDED)
    return shown.message if shown is not None and shown.is_true else None


def test_a_node_is_avoided_after_the_number_of_failures_and_its_pod_moves() -> None:
    first = begun(gang(dead(1)))
    assert (avoided(first), first.members) == (None, (0, 0, 0))
    second = begun(gang(dead(1), known=first.node_failures))
    assert avoided(second) == "workers failed on node-1: new pods are created on other nodes"
    assert second.members == (0, 4, 0)


def test_without_avoid_nodes_only_a_rule_avoids_a_node() -> None:
    many = tuple(failure("node-1") for _ in range(5))
    assert avoided(begun(gang(dead(1), known=many, avoid=None))) is None
    ruled = begun(gang(dead(1, 3), avoid=None, rules=(AVOID_CODE_3,)))
    assert avoided(ruled) == "workers failed on node-1: new pods are created on other nodes"
    assert ruled.members == (0, 4, 0)


def test_failures_outside_of_the_window_are_forgotten() -> None:
    late = now(900.0 + 3601.0)
    observed = gang(known=(failure("node-1"), failure("node-1")))
    assert avoided(written(decide(observed, now()))) is not None
    after = written(decide(replace(observed, job=shown(observed)), late))
    assert after.node_failures == ()
    condition_ = after.condition(JobCondition.NODES_AVOIDED)
    assert (condition_.status, condition_.reason) == ("False", Reason.NODES_USED)


def shown(observed: Observed) -> Any:
    """Return the job with the status that a pass writes."""
    return changed(observed.job, status=written(decide(observed, now())))


def test_a_pod_that_may_have_the_only_copy_stays_on_its_node() -> None:
    known = (failure("node-1"),)
    observed = gang(dead(1), known=known, copied=RestorePoint(Step(30), ROUND))
    found = begun(observed)
    assert found.members == (0, 0, 0)
    assert avoided(found) is not None, "its next pod avoids the node"


def waiting(*failed: str, **changes: Any) -> PodView:
    base = pod(1, 3, phase=PodPhase.PENDING, ip=None, node=None, ready=False, sidecar_started=False)
    return replace(base, failed_nodes=frozenset(failed), **changes)


def starting(replacement: PodView | None, **changes: Any) -> Observed:
    """Return round 3 before its ranks have started, in which worker 1 gets this new pod."""
    pods = (pod(0), pod(2)) if replacement is None else (pod(0), replacement, pod(2))
    observed = gang(pods=pods, known=(failure("node-1", by_rule=True),), **changes)
    begun_ = changed(observed.job.status, members=(0, 3, 0), conditions=())
    memory = replace(observed.memory, unstarted=frozenset({pod(1, 3).name}), failure_seen_at=None)
    of = changed(observed.job, status=begun_)
    return replace(observed, job=of, coordinator=None, memory=memory)


def test_a_new_pod_excludes_the_nodes() -> None:
    [create] = created_pods(decide(starting(None), now()).actions)
    assert (create.avoided_nodes, create.failed_nodes) == (set(), {"node-1"})


def test_a_waiting_pod_says_what_it_avoids() -> None:
    decision = decide(starting(waiting("node-1", message="0/3 nodes are available")), now())
    assert "0/3 nodes are available; it avoids nodes on which workers failed" in decision.reason
    assert not of_kind(decision.actions, "delete Pod")


def test_a_pod_that_no_node_took_is_created_again_when_a_node_is_used_again() -> None:
    replacement = waiting("node-1", "node-2")
    deletes = of_kind(decide(starting(replacement), now()).actions, "delete Pod")
    assert deletes == [Delete("Pod", replacement.name, replacement.uid, "", force=False)]


@pytest.mark.fault("The nodes to avoid leave none")
def test_a_list_that_leaves_no_node_is_given_up() -> None:
    """The job goes on as it was: the pod is created again and may use every node."""
    observed = starting(waiting("node-1", message="0/3 nodes are available"))
    first = decide(observed, now(1000.0))
    early = decide(replace(observed, memory=first.memory), now(999.0 + PATIENCE_SECONDS))
    assert written_failures(early, observed) != ()
    late = decide(replace(observed, memory=first.memory), now(1000.0 + PATIENCE_SECONDS))
    after = written(late)
    assert after.node_failures == ()
    found = after.condition(JobCondition.NODES_AVOIDED)
    assert (found.status, found.reason) == ("False", Reason.NO_NODE_LEFT)
    assert "node-1: these nodes are used again" in found.message
    again = replace(observed, job=changed(observed.job, status=after), memory=late.memory)
    actions = decide(again, now(1001.0 + PATIENCE_SECONDS)).actions
    assert [a.name for a in of_kind(actions, "delete Pod")] == [observed.pods[1].name]


def written_failures(decision: Decision, observed: Observed) -> tuple[NodeFailure, ...]:
    writes = [a.status for a in decision.actions if isinstance(a, WriteStatus)]
    return (writes[0] if writes else observed.job.status).node_failures


def test_a_template_that_names_its_node_cannot_avoid_it() -> None:
    template = {"spec": {"containers": [{"name": "trainer"}], "nodeName": "node-1"}}
    found = begun(gang(dead(1, 3), rules=(AVOID_CODE_3,), spec={"template": template}))
    assert avoided(found) is None
    assert "the template sets spec.nodeName" in found.condition(JobCondition.NODES_AVOIDED).message


def test_an_event_reports_a_node_that_is_avoided() -> None:
    decision = decide(gang(dead(1, 3), rules=(AVOID_CODE_3,)), now())
    assert Reason.NODES_FAILED in [a.reason for a in decision.actions if isinstance(a, EmitEvent)]


@pytest.mark.fault("The operator dies while it moves a worker off a bad node")
@pytest.mark.parametrize("writes", [1, 2, 4])
def test_an_operator_that_dies_between_two_writes_moves_the_worker_once(writes: int) -> None:
    life = Life().trained()
    rules = [{"onExitCodes": [1], "action": "AvoidNode"}]
    life.change_spec(failurePolicy={"maxRestarts": 1000, "window": "24h", "rules": rules})
    life.run(3)
    before = life.operator.worker_pod(1)
    life.rank_dies()
    dies_after(life, writes)
    life.restart()
    life.run(60)
    after = life.operator.worker_pod(1)
    assert life.status.is_true("Running")
    raw = life.cluster.api.objects["pods", NAMESPACE, after.name]
    notes = raw["metadata"]["annotations"]
    assert (notes.get(labels.FAILED_NODES), notes.get(labels.AVOIDED_NODES)) == (before.node, None)
    assert after.node != before.node
    assert life.status.restarts == 1
    assert broken_rules(life.cluster, copies=1) == []
