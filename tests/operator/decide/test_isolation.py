"""Templates that access the sidecar's volumes, Secrets or processes are refused; the error names the
field."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator.builders import job, now, pod, status
from tests.support.operator.decisions import created_pods
from tests.support.operator.hostile_templates import HOSTILE_TEMPLATES, mounted, template

from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.spec import template_problem
from holdfast_operator.model.job import Observed
from holdfast_operator.model.template import find_breach


@pytest.mark.fault("A template reaches for the sidecar's volumes, Secrets or processes")
@pytest.mark.fault("A template gives a Secret with certificates to a volume driver")
@pytest.mark.parametrize("case", HOSTILE_TEMPLATES)
def test_a_template_that_reaches_for_the_sidecar_is_refused(case: str) -> None:
    given, path = HOSTILE_TEMPLATES[case]
    breach = find_breach(given)
    assert breach.path == path
    problem = template_problem(given)
    assert problem is not None and problem.message.startswith(f"{path}: ")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(template(), id="smallest"),
        pytest.param(mounted("/data"), id="a mount"),
        pytest.param(mounted("/data/"), id="a slash at the end"),
        pytest.param(mounted("/holdfasts/shared"), id="a longer name"),
        pytest.param(mounted("/data/holdfast"), id="the name further down"),
        pytest.param(mounted("/..data"), id="dots in a name"),
        pytest.param(template(shareProcessNamespace=False, hostPID=False), id="explicitly off"),
        pytest.param(
            template(volumes=[{"name": "v", "secret": {"secretName": "my-certs"}}]),
            id="another Secret",
        ),
        pytest.param({"spec": None}, id="no spec"),
        pytest.param({"spec": {"containers": "x", "volumes": [1]}}, id="not lists of objects"),
    ],
)
def test_a_template_that_stays_apart_passes(given: dict[str, Any]) -> None:
    assert find_breach(given) is None


@pytest.mark.fault("A job's template is changed to reach for the sidecar while the job runs")
@pytest.mark.parametrize(
    ("given", "workers"),
    [
        pytest.param(template(), [0], id="the same"),
        pytest.param(mounted("/c", "holdfast-store"), [], id="one that is refused"),
    ],
)
def test_a_later_round_creates_no_pod_from_a_changed_template(
    given: dict[str, Any], workers: list[int]
) -> None:
    """Worker 0 is replaced in round 1. The template was changed after the job was accepted."""
    running = job(2, status(round_=1, members=(1, 0)), template=given)
    decision = decide(Observed(job=running, pods=(pod(1),)), now())
    assert [p.worker for p in created_pods(decision.actions)] == workers
