"""Install the chart on the test bed as its README says, and wait until the operator is up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from testbed import faults
from testbed.config import current_bed
from testbed.driver.kube import Kube, kubeconfig_path, wait_for
from testbed.images import image_label

NAMESPACE = "holdfast-system"
RELEASE = "holdfast"
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/holdfast"

VALUES = {
    "operator.image.repository": "holdfast/operator",
    "operator.image.tag": "dev",
    "operator.image.pullPolicy": "IfNotPresent",
    "sidecar.image.repository": "holdfast/sidecar",
    "sidecar.image.tag": "dev",
    "sidecar.image.pullPolicy": "IfNotPresent",
    "operator.nodeSelector.node-role\\.kubernetes\\.io/control-plane": "",
    "operator.tolerations[0].key": "node-role.kubernetes.io/control-plane",
    "operator.tolerations[0].operator": "Exists",
    "operator.tolerations[0].effect": "NoSchedule",
}
"""The operator is pinned to the control-plane node: scenarios kill workers' nodes."""


def testbed_bin() -> str:
    base = os.environ.get("HOLDFAST_TESTBED_DIR", str(Path.home() / ".cache/holdfast/testbed"))
    return f"{base}/bin"


def helm(*arguments: str, check: bool = True) -> str:
    env = {**os.environ, "PATH": f"{testbed_bin()}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["helm", "--kubeconfig", kubeconfig_path(), "-n", NAMESPACE, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
    )
    if check and done.returncode:
        raise AssertionError(f"helm {' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def install_arguments() -> list[str]:
    """The tag never changes, so the inputs of the image are an annotation: a new image is a rollout."""
    built = image_label(current_bed(), "holdfast/operator:dev") or "unknown"
    values = {**VALUES, "operator.podAnnotations.holdfast\\.dev/image-inputs": built}
    sets = [part for key, value in values.items() for part in ("--set-string", f"{key}={value}")]
    return [RELEASE, str(CHART), "--create-namespace", *sets]


def ensure_installed(kube: Kube) -> None:
    """`helm upgrade --install`; the operator is restarted so that it runs the image as built now."""
    helm("upgrade", "--install", *install_arguments(), "--wait", "--timeout", "120s")
    wait_for(
        "the operator to be Ready",
        lambda: bool(operator_pod(kube)),
        timeout_seconds=90,
    )


def kill_operator(kube: Kube) -> None:
    """SIGKILL the operator's process; returns when another one is Ready.

    The dead pod is removed, too: the kubelet would start it again by itself, but after a back-off that
    doubles with each kill, and a scenario that kills three times would mostly wait.
    """
    name = wait_for("an operator", lambda: operator_pod(kube), timeout_seconds=120)
    faults.kill_process(NAMESPACE, name, "operator")
    kube.delete_pod(NAMESPACE, name, grace_seconds=0)
    wait_for(
        "another operator to be Ready",
        lambda: operator_pod(kube) not in (None, name),
        timeout_seconds=120,
    )


def operator_pod(kube: Kube) -> str | None:
    """Name of the Ready operator pod."""
    for pod in kube.pods(NAMESPACE, "app.kubernetes.io/name=holdfast"):
        ready = any(
            c["type"] == "Ready" and c["status"] == "True"
            for c in pod["status"].get("conditions", [])
        )
        if ready and "deletionTimestamp" not in pod["metadata"]:
            return str(pod["metadata"]["name"])
    return None
