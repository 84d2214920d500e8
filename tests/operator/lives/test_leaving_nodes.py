"""Nodes that will be taken away soon, by a taint that the installation lists."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.operator.life import WORKERS, Life
from tests.support.operator.oracle import broken_rules
from tests.support.operator.simulated_operator import LEAVING_TAINTS

from holdfast_core.api import JobCondition
from holdfast_operator.model.reasons import Reason

[NOTICE] = LEAVING_TAINTS


def training(copies: int = 1, tolerations: Sequence[dict[str, str]] = ()) -> Life:
    life = Life(copies=copies, tolerations=tolerations)
    life.run(60, until=lambda status: status.is_true("Running"))
    return life


def most_pods_away(life: Life, seconds: int) -> int:
    """Run the job, and return how many workers were without a pod that trains at the most."""
    most = 0
    for _ in range(seconds):
        life.run(1)
        there = {
            p.view.worker
            for p in life.cluster.pods.values()
            if p.view.ready and not p.view.terminating
        }
        most = max(most, WORKERS - len(there))
    return most


def deletes(life: Life) -> list[str]:
    """Return the texts of the Events about pods that were deleted because their nodes leave."""
    events = [e.message for e in life.operator.events if e.reason == Reason.NODE_LEAVING]
    return [text for text in events if text.startswith("pod ")]


@pytest.mark.fault("A spot notice or an autoscaler taints nodes of a training gang")
def test_the_workers_of_nodes_that_leave_move_one_after_the_other() -> None:
    life = training()
    leaving = [life.node_of(worker) for worker in (1, 2, 3)]
    for node in leaving:
        node.notice = NOTICE
    assert most_pods_away(life, 200) == 1
    assert life.status.restart_round == 3
    assert life.status.members == (0, 1, 2, 3)
    assert not any(life.node_of(worker) in leaving for worker in range(WORKERS))
    assert len(deletes(life)) == 3
    assert NOTICE in deletes(life)[0]
    assert life.condition(JobCondition.NODES_LEAVING)[:2] == ("False", Reason.NODES_STAY)
    assert broken_rules(life.cluster, life.copies) == []


def test_a_pod_that_tolerates_the_taint_stays() -> None:
    life = training(tolerations=[{"operator": "Exists"}])
    life.node_of(2).notice = NOTICE
    life.run(60)
    assert life.nothing_was_deleted()
    assert life.status.condition(JobCondition.NODES_LEAVING) is None


def test_the_taint_of_a_node_without_a_notice_is_no_reason_to_leave_it() -> None:
    life = training()
    life.node_of(2).notice = "node.kubernetes.io/unschedulable"
    life.run(60)
    assert life.nothing_was_deleted()
    assert life.status.condition(JobCondition.NODES_LEAVING) is None


@pytest.mark.fault("A node leaves while the job has neither copies on peers nor an object store")
def test_a_pod_without_copies_on_other_pods_stays_and_the_status_says_so() -> None:
    life = training(copies=0)
    life.node_of(2).notice = NOTICE
    life.run(60)
    assert life.nothing_was_deleted()
    shown, reason, text = life.condition(JobCondition.NODES_LEAVING)
    assert (shown, reason) == ("True", Reason.NODE_LEAVING_POD_STAYS)
    assert "no other pod has copies of its shards" in text and "the job has no object store" in text


@pytest.mark.fault("The operator restarts while workers leave nodes that will be taken away")
@pytest.mark.parametrize("passes", range(1, 6))
def test_an_operator_that_restarts_deletes_no_second_pod(passes: int) -> None:
    life = training()
    for worker in (1, 2):
        life.node_of(worker).notice = NOTICE
    life.run(passes)
    life.restart()
    assert most_pods_away(life, 150) == 1
    assert life.status.restart_round == 2
    assert life.status.members == (0, 1, 2, 0)
    assert broken_rules(life.cluster, life.copies) == []
