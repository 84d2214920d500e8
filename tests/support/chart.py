"""Helm, and the objects that it renders from the chart."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml
from tests.support.hang import HANG_SECONDS
from tests.support.servers.control_plane import find_binary

CHART = Path(__file__).resolve().parents[2] / "charts" / "holdfast"
RELEASE, NAMESPACE = "holdfast", "holdfast-system"


def run_helm(home: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run helm with `home` for all of its folders. A failing command fails the test, unless check=False."""
    done = subprocess.run(
        [str(find_binary("helm")), *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={
            "HOME": str(home),
            "HELM_CACHE_HOME": str(home),
            "HELM_CONFIG_HOME": str(home),
            "HELM_DATA_HOME": str(home),
        },
    )
    if check:
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done


def render_chart(home: Path, *values: str) -> list[dict[str, Any]]:
    """Return the objects that the chart renders with values such as "operator.workers=4"."""
    sets = [part for value in values for part in ("--set", value)]
    return _documents(run_helm(home, "template", RELEASE, str(CHART), "-n", NAMESPACE, *sets))


def render_adoption(
    home: Path, training_runtime: str | None = None, *values: str
) -> list[dict[str, Any]]:
    """Return the policies that adopt pods, as on a cluster that serves MutatingAdmissionPolicy.

    Args:
        training_runtime: Image of the ClusterTrainingRuntime, which is rendered too. None: it is not.
        values: Further values below `adoption.trainingRuntime`, such as "backoffLimit=4".
    """
    options = ["--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"]
    options += ["--set", "adoption.enabled=true", "--show-only", "templates/adoption-policy.yaml"]
    if training_runtime is not None:
        options += ["--api-versions", "trainer.kubeflow.org/v1alpha1/ClusterTrainingRuntime"]
        options += ["--set", "adoption.trainingRuntime.enabled=true"]
        options += ["--set", f"adoption.trainingRuntime.image={training_runtime}"]
        options += ["--show-only", "templates/training-runtime.yaml"]
    for value in values:
        options += ["--set", f"adoption.trainingRuntime.{value}"]
    return _documents(run_helm(home, "template", RELEASE, str(CHART), "-n", NAMESPACE, *options))


def _documents(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    text = done.stdout
    return [d for d in yaml.safe_load_all(text) if d is not None]
