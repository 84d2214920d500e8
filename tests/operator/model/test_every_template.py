"""Every template that the CRD lets in is either refused with the path of its fault, or rendered."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import job, now, pod, status

from holdfast_core.api import RestorePointStatus, changed
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.spec import template_problem
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import JobMemory, NodeView, Observed, PodPhase
from holdfast_operator.model.render import render_placeholder, render_pod

SIDECAR = SidecarSettings("example/sidecar:1")
REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)
TERM = {
    "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}],
    "matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}],
}
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "image": "example/trainer:1",
                "command": ["sh", "-c"],
                "args": ["holdfast run -- python train.py"],
                "env": [
                    {"name": "A", "value": "b"},
                    {
                        "name": "C",
                        "valueFrom": {"secretKeyRef": {"name": "mine", "key": "k"}},
                    },
                ],
                "envFrom": [{"secretRef": {"name": "mine"}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "volumeDevices": [{"name": "disk", "devicePath": "/dev/x"}],
                "securityContext": {"runAsUser": 1000},
                "resources": {
                    "limits": {"memory": "4Gi", "cpu": 2},
                    "requests": {"memory": "4Gi"},
                },
            },
            {"name": "other", "image": "example/other:1"},
        ],
        "initContainers": [{"name": "first", "image": "example/first:1"}],
        "volumes": [
            {"name": "data", "emptyDir": {}},
            {"name": "keys", "projected": {"sources": [{"secret": {"name": "mine"}}]}},
        ],
        "securityContext": {"runAsUser": 1000},
        "affinity": {
            "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [TERM]}, PREFERRED: []},
            "podAntiAffinity": {PREFERRED: [{"weight": 1, "podAffinityTerm": {}}]},
        },
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "terminationGracePeriodSeconds": 60,
        "nodeName": "",
        "shareProcessNamespace": False,
    },
}
VALUES: tuple[Any, ...] = (
    None,
    "",
    "4GB",
    7,
    -1,
    1.5,
    True,
    [],
    ["a"],
    [None],
    [{}],
    {},
    {"a": 1},
    {"name": None},
)

READ_BY_RULES: tuple[Any, ...] = (None, "4GB", ["a"], [None], {"a": 1})
"""One value of each type. A rule does not look further into them."""


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from paths(inner, (*path, key))


def mutant(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(TEMPLATE)
    parent: Any = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = copy.deepcopy(value)
    return changed


PATHS = [p for p in paths(TEMPLATE) if p]


LOST = NodeView("node-1", lost_because="is gone", is_silent=True)
OBSERVED = Observed(
    job=job(2, status(1, (0, 1), restore_point=RestorePointStatus(), coordinator=Worker(0))),
    pods=(
        pod(0),
        pod(1, 1, phase=PodPhase.PENDING, ip=None, node="node-1", sidecar_started=False),
    ),
    nodes={"node-1": LOST},
    lost_nodes=(LOST,),
    memory=JobMemory(round=RestartRound(1), round_seen_at=1.0),
)
"""A gang that has lost worker 1, and whose new pod waits on a lost node."""


def pass_over(template: dict[str, Any]) -> None:
    """Decide about a gang that runs with this template."""
    spec = changed(OBSERVED.job.spec, template=template)
    decide(replace(OBSERVED, job=changed(OBSERVED.job, spec=spec)), now())


def render(template: dict[str, Any]) -> None:
    found = job(2, template=template)
    for nodes in ((), ("node-a",)):
        render_pod(found, Worker(0), RestartRound(0), None, SIDECAR, nodes, nodes)
    render_placeholder(found, Worker(1), None, SIDECAR)


@pytest.mark.fault("A template has a value of a wrong type, or an unknown field")
@pytest.mark.parametrize("path", PATHS, ids=lambda p: ".".join(map(str, p)))
def test_a_template_is_refused_or_rendered_whatever_a_field_holds(path: tuple[Any, ...]) -> None:
    for value in VALUES:
        template = mutant(path, value)
        if value in READ_BY_RULES:
            pass_over(template)
        if template_problem(template) is None:
            render(template)


def test_the_template_without_a_fault_is_accepted() -> None:
    assert template_problem(TEMPLATE) is None
    render(TEMPLATE)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        pytest.param(
            ("spec", "containers", 0, "resources", "limits", "memory"),
            "4GB",
            "spec.template.spec.containers[0].resources.limits.memory: is '4GB'",
            id="a quantity that is none",
        ),
        pytest.param(
            ("spec", "containers", 0, "env"),
            {"A": "b"},
            "spec.template.spec.containers[0].env: is an object, expected a list",
            id="env as a map",
        ),
        pytest.param(
            ("spec", "volumes"),
            [None],
            "spec.template.spec.volumes[0]: is null, expected an object",
            id="an empty item of a list",
        ),
        pytest.param(
            ("metadata", "labels"),
            {"a": 1},
            "spec.template.metadata.labels.a: is a number, expected a string",
            id="a label that is a number",
        ),
        pytest.param(
            ("spec", "terminationGracePeriodSeconds"),
            "60",
            "spec.template.spec.terminationGracePeriodSeconds: is a string, expected an integer",
            id="a number as text",
        ),
    ],
)
def test_the_refusal_names_the_field_and_what_it_expects(
    path: tuple[Any, ...], value: Any, named: str
) -> None:
    problem = template_problem(mutant(path, value))
    assert problem.reason == "InvalidTemplate"
    assert named in problem.message
