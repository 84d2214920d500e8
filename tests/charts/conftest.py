"""The chart, rendered by helm, and installed by helm on a real API server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.support.chart import CHART, NAMESPACE, render_chart, run_helm
from tests.support.hang import HANG_SECONDS
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import ControlPlane

from holdfast_core.api.crd import KINDS

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}

Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Run helm with its own folders. A failing command fails the test, unless check=False."""
    home = tmp_path_factory.mktemp("helm")

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run_helm(home, *arguments, check=check)

    return run


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Return the objects that the chart renders with these values: render("operator.workers=4")."""
    return partial(render_chart, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def cluster(helm: Helm) -> Iterator[ControlPlane]:
    """A real API server on which helm has installed the chart in a restricted namespace."""
    with ControlPlane() as cp:
        cp.create_namespace(NAMESPACE, **RESTRICTED)
        cp.create_namespace("team-a")
        helm("install", "holdfast", str(CHART), "-n", NAMESPACE, f"--kubeconfig={cp.kubeconfig}")
        names = [f"{kind.PLURAL}.holdfast.dev" for kind in KINDS]
        cp.kubectl(
            "wait", "--for=condition=Established", f"--timeout={HANG_SECONDS:.0f}s", "crd", *names
        )
        _until_policies_are_in_force(cp)
        yield cp


def _until_policies_are_in_force(cp: ControlPlane) -> None:
    """Wait until the server enforces all policies that exist by now.

    The server takes them over together, seconds after they were created. So one that is created last, which
    refuses a ConfigMap by its name, is enforced no earlier than the others.
    """
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "last"}}
    rules = [
        {
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["configmaps"],
        }
    ]
    spec = {
        "matchConstraints": {"resourceRules": rules},
        "validations": [{"expression": "object.metadata.name != 'last'"}],
    }
    binding = {"policyName": "last", "validationActions": ["Deny"]}
    cp.apply(
        {**kind, "kind": "ValidatingAdmissionPolicy", "spec": spec},
        {**kind, "kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    )
    refused = ("create", "configmap", "last", "-n", "team-a", "--dry-run=server")
    poll("the last policy", lambda: "denied request" in cp.kubectl(*refused, check=False))
