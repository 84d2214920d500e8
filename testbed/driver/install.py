"""Installs the chart on the test bed as its README describes, and waits until the operator is Ready."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from testbed import faults
from testbed.config import HANG_SECONDS, current_bed
from testbed.driver.kube import Kube, kubeconfig_path, wait_for
from testbed.images import image_label

NAMESPACE = "holdfast-system"
RELEASE = "holdfast"
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/holdfast"
WAIT = ("--wait", "--timeout", f"{HANG_SECONDS}s")

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
"""Values of the chart. The operator is pinned to the control-plane node, because scenarios kill worker
nodes."""


def testbed_bin() -> str:
    base = os.environ.get("HOLDFAST_TESTBED_DIR", str(Path.home() / ".cache/holdfast/testbed"))
    return f"{base}/bin"


def helm(*arguments: str, check: bool = True) -> str:
    env = {**os.environ, "PATH": f"{testbed_bin()}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["helm", "--kubeconfig", kubeconfig_path(), "-n", NAMESPACE, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS + 60,  # later than helm itself gives up
        env=env,
    )
    if check and done.returncode:
        raise AssertionError(f"helm {' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def install_arguments() -> list[str]:
    """Return the arguments of `helm upgrade --install`.

    The image's tag never changes, so its inputs are a pod annotation, which makes a new image cause a
    rollout.
    """
    built = image_label(current_bed(), "holdfast/operator:dev") or "unknown"
    values = {**VALUES, "operator.podAnnotations.holdfast\\.dev/image-inputs": built}
    sets = [part for key, value in values.items() for part in ("--set-string", f"{key}={value}")]
    switches = ["--set", "adoption.enabled=true"]  # a boolean, which --set-string cannot express
    return [RELEASE, str(CHART), "--create-namespace", *sets, *switches]


def upgrade(*more: str) -> str:
    """Install or upgrade the chart with the values of all scenarios and the arguments `more`."""
    arguments = install_arguments()
    return helm("upgrade", "--install", *arguments, *more, *WAIT)


def revision() -> int:
    """Return the number of the release's revision that is deployed."""
    (newest,) = json.loads(helm("history", RELEASE, "--max", "1", "-o", "json"))
    return int(newest["revision"])


def ensure_installed(kube: Kube) -> None:
    """Install or upgrade the chart and wait until the operator is Ready.

    A new image restarts the operator. The caller has the lock of installations, so an operation that the
    release still has under way belongs to a helm that was killed; helm itself would refuse for ever.
    """
    for release in json.loads(helm("list", "--pending", "--filter", f"^{RELEASE}$", "-o", "json")):
        last = json.loads(helm("history", RELEASE, "-o", "json"))
        if any(one["status"] in ("deployed", "superseded") for one in last):
            helm("rollback", RELEASE)
        else:
            helm("uninstall", release["name"])
    upgrade()
    wait_for(
        "the operator to be Ready",
        lambda: bool(operator_pod(kube)),
    )


def kill_operator(kube: Kube) -> None:
    """Send SIGKILL to the operator's process and wait until another operator is Ready.

    The dead pod is deleted too. The kubelet would restart its container, but after a back-off that doubles
    with each kill, so that a scenario with three kills would mostly wait.
    """
    name = wait_for("an operator", lambda: operator_pod(kube))
    faults.kill_process(NAMESPACE, name, "operator")
    kube.delete_pod(NAMESPACE, name, grace_seconds=0)
    wait_for(
        "another operator to be Ready",
        lambda: operator_pod(kube) not in (None, name),
    )


def operator_pod(kube: Kube) -> str | None:
    """Return the name of the Ready operator pod, or None."""
    for pod in kube.pods(NAMESPACE, "app.kubernetes.io/name=holdfast"):
        ready = any(
            c["type"] == "Ready" and c["status"] == "True"
            for c in pod["status"].get("conditions", [])
        )
        if ready and "deletionTimestamp" not in pod["metadata"]:
            return str(pod["metadata"]["name"])
    return None
