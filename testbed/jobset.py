"""The JobSet controller in the cluster, from its pinned module: binary, image and its authors' Helm chart."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from testbed import load, tools
from testbed.config import Bed, digest
from testbed.images import LABEL, image_label
from testbed.shell import run
from testbed.steps import Step

NAMESPACE = "jobset-system"
REPOSITORY = "holdfast/jobset"
TAG = f"{REPOSITORY}:{tools.JOBSET_VERSION}"
DOCKERFILE = """FROM scratch
COPY jobset /manager
USER 65532:65532
ENTRYPOINT ["/manager"]
"""
VALUES = {
    "image.repository": REPOSITORY,
    "image.tag": tools.JOBSET_VERSION,
    "image.pullPolicy": "IfNotPresent",
    "controller.nodeSelector.node-role\\.kubernetes\\.io/control-plane": "",
    "controller.tolerations[0].key": "node-role.kubernetes.io/control-plane",
    "controller.tolerations[0].operator": "Exists",
    "controller.tolerations[0].effect": "NoSchedule",
}
"""Values of JobSet's chart. The controller runs on the control-plane node, because scenarios kill workers."""


def build_image(bed: Bed, log: Path) -> str:
    """Build the image from the binary unless both are unchanged."""
    binary = bed.bin / "jobset"
    inputs = digest(binary, DOCKERFILE)
    if image_label(bed, TAG) == inputs:
        return "nothing changed"
    with tempfile.TemporaryDirectory(dir=bed.work) as context:
        shutil.copy(binary, context)
        (Path(context) / "Dockerfile").write_text(DOCKERFILE)
        command = ["docker", "build", "-q", "--network=none", "-t", TAG]
        command += ["--label", f"{LABEL}={inputs}", context]
        run(command, env=bed.environment(), log=log)
    return f"built {TAG}"


def install(bed: Bed, log: Path) -> str:
    """Install or upgrade the chart and wait until the controller is Ready."""
    chart = tools.module_folder(tools.JOBSET.name, "sigs.k8s.io/jobset") / "charts/jobset"
    sets = [word for key, value in VALUES.items() for word in ("--set-string", f"{key}={value}")]
    command = ["helm", "upgrade", "--install", "jobset", str(chart), "-n", NAMESPACE]
    command += ["--create-namespace", *sets, "--wait", "--timeout", "180s"]
    run(command, env=bed.environment(), log=log)
    return f"JobSet {tools.JOBSET_VERSION}"


def remove(bed: Bed, log: Path) -> str:
    """Uninstall the controller and its webhooks. Its CRD stays, as Helm keeps every CRD."""
    command = ["helm", "uninstall", "jobset", "-n", NAMESPACE, "--ignore-not-found", "--wait"]
    run(command, env=bed.environment(), log=log)
    return "binary and image stay"


def steps(bed: Bed) -> list[Step]:
    """Return the steps from nothing to a controller that runs. The cluster must be up."""
    return [
        tools.build_step(bed, tools.JOBSET),
        Step("jobset image", lambda log: build_image(bed, log), always=True),
        Step("load jobset", lambda log: load.load(bed, log, [TAG]), always=True),
        Step("jobset controller", lambda log: install(bed, log), always=True),
    ]
