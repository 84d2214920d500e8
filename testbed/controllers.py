"""Controllers of other job kinds in the cluster: each from its pinned module, with its authors' Helm chart.

Only the tests of adopted pods and `make bench-recovery` need them, so no other target builds them (ADR 0027).
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from testbed import load, tools
from testbed.config import Bed, digest
from testbed.images import LABEL, image_label
from testbed.shell import run
from testbed.steps import Step
from testbed.tools import ToolSet


@dataclass(frozen=True, slots=True)
class Controller:
    """A controller: its binary is built from the Go module whose Helm chart installs it."""

    name: str
    """Name of the verb, of the Helm release, of the image and of the binary in its ToolSet."""
    kinds: str
    """Kinds of objects that it serves, for messages."""
    tools: ToolSet
    module: str
    version: str
    chart: str
    """Folder of the chart in the module."""
    scheduled_by: str
    """Key of the chart's values with nodeSelector and tolerations of the controller."""
    more_values: dict[str, str] = field(default_factory=dict)
    """Further values of the chart, as `helm --set` reads them."""
    needs: Controller | None = None
    """A controller that must run before this one. The chart of this one names its chart as a dependency."""

    @property
    def namespace(self) -> str:
        return f"{self.name}-system"

    @property
    def repository(self) -> str:
        return f"holdfast/{self.name}-controller"

    @property
    def tag(self) -> str:
        return f"{self.repository}:{self.version}"

    @property
    def dockerfile(self) -> str:
        copied = f"COPY {self.name} /manager"
        return f'FROM scratch\n{copied}\nUSER 65532:65532\nENTRYPOINT ["/manager"]\n'

    def chart_folder(self) -> Path:
        return tools.module_folder(self.tools.name, self.module) / self.chart

    def values(self) -> dict[str, str]:
        """Return values of the chart. Scenarios kill workers, so the control-plane node runs it."""
        toleration = f"{self.scheduled_by}.tolerations[0]"
        return {
            "image.repository": self.repository,
            "image.tag": self.version,
            "image.pullPolicy": "IfNotPresent",
            f"{self.scheduled_by}.nodeSelector.node-role\\.kubernetes\\.io/control-plane": "",
            f"{toleration}.key": "node-role.kubernetes.io/control-plane",
            f"{toleration}.operator": "Exists",
            f"{toleration}.effect": "NoSchedule",
        }


JOBSET = Controller(
    "jobset",
    "JobSets",
    tools.JOBSET,
    "sigs.k8s.io/jobset",
    tools.JOBSET_VERSION,
    "charts/jobset",
    scheduled_by="controller",
)
TRAINER = Controller(
    "trainer",
    "TrainJobs",
    tools.TRAINER,
    "github.com/kubeflow/trainer/v2",
    tools.TRAINER_VERSION,
    "charts/kubeflow-trainer",
    scheduled_by="manager",
    more_values={"jobset.install": "false", "image.registry": "docker.io"},
    needs=JOBSET,
)
CONTROLLERS = (JOBSET, TRAINER)


def build_image(bed: Bed, controller: Controller, log: Path) -> str:
    """Build the image from the binary unless both are unchanged."""
    binary = bed.bin / controller.name
    inputs = digest(binary, controller.dockerfile)
    if image_label(bed, controller.tag) == inputs:
        return "nothing changed"
    with tempfile.TemporaryDirectory(dir=bed.work) as context:
        shutil.copy(binary, context)
        (Path(context) / "Dockerfile").write_text(controller.dockerfile)
        command = ["docker", "build", "-q", "--network=none", "-t", controller.tag]
        command += ["--label", f"{LABEL}={inputs}", context]
        run(command, env=bed.environment(), log=log)
    return f"built {controller.tag}"


def install(bed: Bed, controller: Controller, log: Path) -> str:
    """Install or upgrade the chart and wait until the controller is Ready.

    Controllers write their certificate into a Secret of the chart. Helm's merge on the client keeps it at
    an upgrade, whereas a server-side apply would conflict with it.
    """
    sets = [w for k, v in controller.values().items() for w in ("--set-string", f"{k}={v}")]
    sets += [w for k, v in controller.more_values.items() for w in ("--set", f"{k}={v}")]
    with tempfile.TemporaryDirectory(dir=bed.work) as folder:
        chart = complete_chart(controller, Path(folder))
        command = ["helm", "upgrade", "--install", controller.name, str(chart)]
        command += ["-n", controller.namespace, "--create-namespace", "--server-side=false", *sets]
        command += ["--wait", "--timeout", "300s"]
        run(command, env=bed.environment(), log=log)
    return f"{controller.name} {controller.version}"


def complete_chart(controller: Controller, folder: Path) -> Path:
    """Return the chart of the controller.

    Helm refuses a chart without the charts on which it depends, and a module contains none of them. They are
    therefore put into a copy of the chart below `folder`.
    """
    chart = controller.chart_folder()
    if controller.needs is None:
        return chart
    copy = ["cp", "-r", "--no-preserve=mode"]  # the cache of Go modules is read-only
    complete = folder / controller.name
    run([*copy, chart, complete])
    (complete / "charts").mkdir()
    run([*copy, controller.needs.chart_folder(), complete / "charts" / controller.needs.name])
    return complete


def remove(bed: Bed, controller: Controller, log: Path) -> str:
    """Delete the CRDs with all of their objects, and uninstall the controller and its webhooks.

    The CRDs are first, because the controller removes the finalizers of their objects.
    """
    env = bed.environment()
    crds = str(controller.chart_folder() / "crds")
    delete = ["kubectl", "delete", "--ignore-not-found", "--timeout=120s", "-f", crds]
    run(delete, env=env, log=log)
    uninstall = ["helm", "uninstall", controller.name, "-n", controller.namespace]
    run([*uninstall, "--ignore-not-found", "--wait"], env=env, log=log)
    delete = ["kubectl", "delete", "namespace", controller.namespace, "--ignore-not-found"]
    run([*delete, "--timeout=120s"], env=env, log=log)
    return "binary and image stay"


def install_steps(bed: Bed, controller: Controller) -> list[Step]:
    """Return the steps from nothing to a controller that runs. The cluster must be up."""
    name = controller.name
    return [
        *([] if controller.needs is None else install_steps(bed, controller.needs)),
        tools.build_step(bed, controller.tools),
        Step(f"{name} image", lambda log: build_image(bed, controller, log), always=True),
        Step(f"load {name}", lambda log: load.load(bed, log, [controller.tag]), always=True),
        Step(f"{name} controller", lambda log: install(bed, controller, log), always=True),
    ]


def remove_steps(bed: Bed, controller: Controller) -> list[Step]:
    """Return the steps that remove a controller, and then those that it needs."""
    last = [] if controller.needs is None else remove_steps(bed, controller.needs)
    step = Step(f"remove {controller.name}", lambda log: remove(bed, controller, log), always=True)
    return [step, *last]
