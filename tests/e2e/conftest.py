"""The kind cluster of the test bed with Holdfast installed by Helm; logs and events on failure.

Each test gets a namespace of its own that enforces Pod Security `restricted`. The uninterrupted
reference run is made once a session and arithmetic, then every scenario is compared with its bits.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import faults
from testbed.driver import install
from testbed.driver.jobs import Job, Training, job_manifest, prepare_namespace
from testbed.driver.kube import Kube, kubeconfig_path, wait_for
from testbed.driver.scenario import Scenario

ROOT = Path(__file__).resolve().parents[2]
FAILURES = ROOT / "build/e2e"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session")
def kube() -> Kube:
    return Kube()


@pytest.fixture(scope="session")
def installed(kube: Kube) -> Kube:
    install.ensure_installed(kube)
    return kube


@pytest.fixture
def nodes_back() -> Iterator[None]:
    """Whatever a scenario did to nodes is undone, and they are Ready again, before the next one."""
    yield
    faults.heal_nodes()


@pytest.fixture
def namespace(installed: Kube, request: pytest.FixtureRequest) -> Iterator[str]:
    name = "e2e-" + re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:40].strip("-")
    installed.delete_namespace(name)
    _wait_gone(installed, name)
    prepare_namespace(installed, name)
    yield name
    installed.delete_namespace(name)


def _wait_gone(kube: Kube, namespace: str) -> None:
    wait_for(
        f"namespace {namespace} to go",
        lambda: all(
            item["metadata"]["name"] != namespace
            for item in kube.plain(kube.core.list_namespace())["items"]
        ),
        timeout_seconds=120,
        every_seconds=0.5,
    )


@pytest.fixture
def scenario(
    installed: Kube,
    namespace: str,
    reference: Callable[[Training], dict[int, str]],
    request: pytest.FixtureRequest,
) -> Iterator[Scenario]:
    it = Scenario(installed, namespace, reference)
    yield it
    for job in it.jobs:
        job.close()


@pytest.fixture(scope="session")
def reference(installed: Kube) -> Callable[[Training], dict[int, str]]:
    """Digests of an uninterrupted run of the same arithmetic, on the same cluster and image."""
    known: dict[tuple[int, ...], dict[int, str]] = {}

    def digests(training: Training) -> dict[int, str]:
        key = training.arithmetic
        if key not in known:
            space = "e2e-reference"
            prepare_namespace(installed, space)
            job = Job(installed, space, "reference-" + "-".join(map(str, key)))
            if installed.get("TrainingJob", space, job.name) is not None:
                job.delete()
            calm = Training(
                workers=training.workers,
                steps=training.steps,
                sleep_per_step=0.0,
                layers=training.layers,
                width=training.width,
                state_mib=training.state_mib,
            )
            job.start(job_manifest(job.name, space, calm, object_every=None))
            job.wait_complete()
            known[key] = job.final_digests()
            job.delete()
        return known[key]

    return digests


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        namespace = getattr(item, "funcargs", {}).get("namespace")
        kube = getattr(item, "funcargs", {}).get("installed")
        if kube is not None:
            folder = FAILURES / re.sub(r"\W+", "-", item.name)
            _collect(kube, namespace, folder)
            report.sections.append(("collected", f"logs and events are in {folder}"))


def _collect(kube: Kube, namespace: str | None, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    spaces = [install.NAMESPACE] + ([namespace] if namespace else [])
    for space in spaces:
        for pod in kube.pods(space):
            name = pod["metadata"]["name"]
            containers = pod["spec"].get("initContainers", []) + pod["spec"]["containers"]
            for container in containers:
                for previous in (False, True):
                    text = kube.logs(space, name, container["name"], previous=previous)
                    suffix = ".previous" if previous else ""
                    if not previous or not text.startswith("(no log"):
                        (folder / f"{space}.{name}.{container['name']}{suffix}.log").write_text(
                            text
                        )
        for kind in ("events", "trainingjobs,checkpoints,checkpointstores", "pods"):
            kubectl = [f"{install.testbed_bin()}/kubectl", "--kubeconfig", kubeconfig_path()]
            done = subprocess.run(
                [*kubectl, "-n", space, "get", kind, "-o", "yaml"],
                capture_output=True,
                text=True,
            )
            (folder / f"{space}.{kind.split(',')[0]}.yaml").write_text(done.stdout + done.stderr)
