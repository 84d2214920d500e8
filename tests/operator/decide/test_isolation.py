"""Templates that reach for the sidecar's volumes, Secrets or processes are refused by their field."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_operator.actions import CreatePod
from holdfast_operator.decide import decide
from holdfast_operator.decide.acceptance import template_problem
from holdfast_operator.decide.isolation import find_breach
from holdfast_operator.model import Observed
from holdfast_operator.testing.builders import job, now, pod, status

SPEC = "spec.template.spec"


def template(**spec: Any) -> dict[str, Any]:
    spec.setdefault("containers", [{"name": "trainer", "image": "example/trainer:1"}])
    return {"spec": spec}


def trainer(**fields: Any) -> dict[str, Any]:
    return template(containers=[{"name": "trainer", "image": "example/trainer:1", **fields}])


def mounted(path: str, name: str = "data") -> dict[str, Any]:
    return trainer(volumeMounts=[{"name": name, "mountPath": path}])


MOUNT = f"{SPEC}.containers[0].volumeMounts[0]"

REFUSED = {
    "certificates mounted": (mounted("/c", "holdfast-certs"), f"{MOUNT}.name"),
    "store keys mounted": (mounted("/c", "holdfast-store"), f"{MOUNT}.name"),
    "node tier mounted": (mounted("/c", "holdfast-node"), f"{MOUNT}.name"),
    "second mount": (
        trainer(
            volumeMounts=[
                {"name": "data", "mountPath": "/data"},
                {"name": "holdfast-store", "mountPath": "/keys", "subPath": "secretKey"},
            ]
        ),
        f"{SPEC}.containers[0].volumeMounts[1].name",
    ),
    "by an init container": (
        template(
            containers=[{"name": "trainer"}],
            initContainers=[{"name": "x", "volumeMounts": [{"name": "holdfast-certs"}]}],
        ),
        f"{SPEC}.initContainers[0].volumeMounts[0].name",
    ),
    "by a second container": (
        template(
            containers=[
                {"name": "trainer"},
                {"name": "x", "volumeMounts": [{"name": "holdfast-store", "mountPath": "/k"}]},
            ]
        ),
        f"{SPEC}.containers[1].volumeMounts[0].name",
    ),
    "as a block device": (
        trainer(volumeDevices=[{"name": "holdfast-node", "devicePath": "/dev/x"}]),
        f"{SPEC}.containers[0].volumeDevices[0].name",
    ),
    "a volume of our name": (
        template(volumes=[{"name": "holdfast-shared", "emptyDir": {}}]),
        f"{SPEC}.volumes[0].name",
    ),
    "a container of our name": (
        template(containers=[{"name": "trainer"}, {"name": "holdfast-sidecar"}]),
        f"{SPEC}.containers[1].name",
    ),
    "the sidecar as an init container": (
        template(initContainers=[{"name": "holdfast-sidecar"}]),
        f"{SPEC}.initContainers[0].name",
    ),
    "process namespace": (template(shareProcessNamespace=True), f"{SPEC}.shareProcessNamespace"),
    "processes of the node": (template(hostPID=True), f"{SPEC}.hostPID"),
    "over our directory": (mounted("/holdfast/shared"), f"{MOUNT}.mountPath"),
    "over its parent": (mounted("/holdfast"), f"{MOUNT}.mountPath"),
    "with a slash at the end": (mounted("/holdfast/"), f"{MOUNT}.mountPath"),
    "two slashes at the start": (mounted("//holdfast/shared"), f"{MOUNT}.mountPath"),
    "two slashes inside": (mounted("/data//x"), f"{MOUNT}.mountPath"),
    "with a dot": (mounted("/./holdfast/shared"), f"{MOUNT}.mountPath"),
    "up and down again": (mounted("/data/../holdfast/shared"), f"{MOUNT}.mountPath"),
    "up at the end": (mounted("/holdfast/x/.."), f"{MOUNT}.mountPath"),
    "relative": (mounted("holdfast/shared"), f"{MOUNT}.mountPath"),
    "over everything": (mounted("/"), f"{MOUNT}.mountPath"),
    "certificates of a gang as a volume": (
        template(volumes=[{"name": "v", "secret": {"secretName": "gpt-abc123-certs-r0"}}]),
        f"{SPEC}.volumes[0].secret.secretName",
    ),
    "certificates in a projected volume": (
        template(
            volumes=[
                {
                    "name": "v",
                    "projected": {
                        "sources": [{"configMap": {}}, {"secret": {"name": "a-certs-r12"}}]
                    },
                }
            ]
        ),
        f"{SPEC}.volumes[0].projected.sources[1].secret.name",
    ),
    "certificates as a variable": (
        trainer(env=[{"name": "K", "valueFrom": {"secretKeyRef": {"name": "a-certs-r1"}}}]),
        f"{SPEC}.containers[0].env[0].valueFrom.secretKeyRef.name",
    ),
    "certificates as variables": (
        trainer(envFrom=[{"secretRef": {"name": "a-certs-r1"}}]),
        f"{SPEC}.containers[0].envFrom[0].secretRef.name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_reaches_for_the_sidecar_is_refused(case: str) -> None:
    given, path = REFUSED[case]
    breach = find_breach(given)
    assert breach is not None
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
        pytest.param(template(shareProcessNamespace=False, hostPID=False), id="said to be off"),
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
    """Worker 0 is replaced in round 1; the template was changed after the job was accepted."""
    running = job(2, status(round_=1, members=(1, 0)), template=given)
    decision = decide(Observed(job=running, pods=(pod(1),)), now())
    assert [a.worker for a in decision.actions if isinstance(a, CreatePod)] == workers
