"""The chart, rendered by helm, and installed by helm on a real API server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.support.chart import CHART, NAMESPACE, render_chart, run_helm
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
        cp.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", *names)
        _until_policy_is_in_force(cp)
        yield cp


def _until_policy_is_in_force(cp: ControlPlane) -> None:
    """Wait until a forbidden job is denied, and until it causes a warning.

    The server enforces a new admission policy only after some seconds.
    """
    job = """
    {"apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob",
     "metadata": {"name": "probe", "namespace": "team-a"},
     "spec": {"workers": 1, "checkpoint": {"interval": {"steps": 1}},
              "template": {"spec": {"containers": [{"name": "trainer", "image": "a:1",
                "livenessProbe": {"exec": {"command": ["true"]}},
                "volumeMounts": [{"name": "a", "mountPath": "/holdfast"}]}]}}}}
    """
    deadline = time.monotonic() + 60
    while True:
        text = cp.kubectl("create", "--dry-run=server", "-f", "-", stdin=job, check=False)
        if "denied" in text and "Warning" in text:
            return
        assert time.monotonic() < deadline, f"the policy is not in force: {text}"
        time.sleep(0.5)
