"""A placeholder asks for the node of a worker, and is selected by nothing that selects workers."""

from __future__ import annotations

from typing import Any

from tests.support.operator.builders import job

from holdfast_core.ids import RestartRound, Worker
from holdfast_core.names import parse_placeholder_name, parse_pod_name, placeholder_name
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.ownership import worker_identity
from holdfast_operator.model.render import (
    render_disruption_budget,
    render_placeholder,
    render_pod,
    render_service,
)

JOB = job(4)
SIDECAR = SidecarSettings("example/sidecar:1")


def bodies() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod of worker 3, and its placeholder."""
    pod = render_pod(JOB, Worker(3), RestartRound(0), None, SIDECAR)
    return pod, render_placeholder(JOB, Worker(3), None, SIDECAR)


def test_it_asks_the_scheduler_for_what_the_worker_asks_for() -> None:
    pod, placeholder = bodies()
    for field in ("containers", "initContainers", "affinity", "securityContext"):
        assert placeholder["spec"][field] == pod["spec"][field]
    assert placeholder["metadata"]["ownerReferences"] == pod["metadata"]["ownerReferences"]


def test_it_waits_for_a_secret_that_the_operator_never_creates() -> None:
    _, placeholder = bodies()
    secrets = [v["secret"]["secretName"] for v in placeholder["spec"]["volumes"] if "secret" in v]
    assert secrets == [placeholder["metadata"]["name"]]
    [certificates] = (v for v in placeholder["spec"]["volumes"] if "secret" in v)
    assert certificates["secret"].get("optional") is None


def test_what_selects_workers_does_not_select_it() -> None:
    pod, placeholder = bodies()
    budget = render_disruption_budget(JOB, 4)["spec"]["selector"]["matchLabels"]
    service = render_service(JOB)["spec"]["selector"]
    for selector in (budget, service):
        assert selector.items() <= pod["metadata"]["labels"].items()
        assert not selector.items() <= placeholder["metadata"]["labels"].items()
    watched = (labels.MANAGED_BY, labels.MANAGED_BY_VALUE)
    assert watched in placeholder["metadata"]["labels"].items()


def test_its_name_says_which_worker_is_missing_and_is_no_name_of_a_worker() -> None:
    _, placeholder = bodies()
    name = placeholder["metadata"]["name"]
    assert name == placeholder_name(JOB.name, JOB.uid, 3)
    assert parse_placeholder_name(JOB.name, JOB.uid, name) == 3
    assert parse_pod_name(JOB.name, JOB.uid, name) is None
    found = worker_identity(placeholder)
    assert found.placeholder
    assert found.worker == 3
    pod, _ = bodies()
    assert parse_placeholder_name(JOB.name, JOB.uid, pod["metadata"]["name"]) is None
