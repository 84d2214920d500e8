"""Templates that set spec.nodeName, so that no scheduler chooses the nodes of their pods."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from tests.support.operator.fake_cluster import FakeNode
from tests.support.operator.life import Life

from holdfast_operator.model.job import PodPhase

GONE = "gone"


def life_on(name: str) -> Life:
    """Return a life whose template names this node. Node GONE was deleted."""
    life = Life()
    life.cluster.nodes[GONE] = FakeNode(GONE, deleted=True)
    life.cluster.job["spec"]["template"]["spec"]["nodeName"] = name
    return life


def correct(life: Life, name: str | None) -> None:
    """Change spec.nodeName of the template, or remove it, as a user would."""
    template = copy.deepcopy(life.cluster.job["spec"]["template"])
    del template["spec"]["nodeName"]
    if name is not None:
        template["spec"]["nodeName"] = name
    life.change_spec(template=template)


def running(life: Life) -> tuple[str, str]:
    found = life.status.condition("Running")
    assert found is not None and found.is_false
    return found.reason, found.message


@pytest.mark.fault("The template names a node that does not exist, or that cannot run the pods")
def test_the_status_names_a_node_name_that_does_not_exist_and_what_to_write_instead() -> None:
    life = life_on(GONE)
    life.run(60)
    reason, message = running(life)
    assert reason == "NodeNameUnusable", "kubectl get trainingjobs shows this reason"
    assert f"spec.template.spec.nodeName is {GONE}" in message
    assert "nodeSelector" in message
    assert "created again" not in message
    events = [e for e in life.operator.events if e.reason == reason]
    assert len(events) == 1
    assert life.nothing_was_deleted()


@pytest.mark.fault("The template names a node that does not exist, or that cannot run the pods")
@pytest.mark.parametrize("corrected", [pytest.param(None, id="removed"), "node-2"])
def test_a_corrected_node_name_starts_the_gang(corrected: str | None) -> None:
    life = life_on(GONE)
    life.run(60)
    correct(life, corrected)
    life.run(60)
    assert life.status.is_true("Running")
    assert life.status.restarts == 0, "it costs no round"


def test_a_pod_that_does_not_start_on_the_named_node_shows_the_field() -> None:
    life = life_on("node-1")
    life.cluster.stuck_nodes = {"node-1"}
    life.run(60)
    reason, message = running(life)
    assert reason == "PodNotStarted"
    assert "spec.template.spec.nodeName is node-1" in message


@pytest.mark.fault("The template names a node that does not exist, or that cannot run the pods")
def test_a_pod_that_the_named_node_rejects_shows_the_field() -> None:
    life = life_on("node-1")
    life.cluster.hold_starts = True
    life.run(5)
    pod = life.cluster.pods[life.pod(0)]
    text = "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu"
    pod.view = replace(pod.view, phase=PodPhase.FAILED, reason="OutOfnvidia.com/gpu", message=text)
    life.run(5)
    message = " ".join(c.message for c in life.status.conditions)
    assert text in message
    assert "spec.template.spec.nodeName is node-1" in message
